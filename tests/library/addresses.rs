//! Address reservation.

use crate::common::{Gpu, MIB, free, malloc};
use vramctl_driver::Addresses;

#[test]
fn reservations_wrap_around_at_the_end_of_the_address_space() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    // The first reservation is at a high address, with too little room behind it for the second.
    for bytes in [1 << 40, 32 << 40] {
        gpu.reset_counts();
        drop(Addresses::reserve(bytes).unwrap());
    }
    assert_eq!(gpu.calls("cuMemAddressReserve"), 2, "refused, and asked for without a wish");
    let _ = vramctl_core::memory::region::begin(Some("cache"), None);
    free(malloc(MIB).unwrap());
    assert_eq!(gpu.footprint(), before);
}
