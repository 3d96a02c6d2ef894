//! What the registry of managed memory costs, by the number of allocations, on the simulated GPU: to find an address, one in the middle and one
//! that is not managed; and to record an allocation and take it out, with what the simulated driver takes for it.
//!
//! `cargo bench --bench registry`
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

#[path = "../tests/common/mod.rs"]
mod common;
mod timed;

use common::{Gpu, MIB, free, malloc_tagged};
use std::hint::black_box;
use timed::timed;
use vramctl_core::memory::Memory;
use vramctl_model::Policy;

fn allocate() -> u64 {
    malloc_tagged("weights", Some(Policy::Discard), 2 * MIB).expect("there is room")
}

fn main() {
    let _gpu = Gpu::take();
    for count in [1, 100] {
        let addresses: Vec<_> = (0..count).map(|_| allocate()).collect();
        let address = addresses[count / 2];
        for (what, address) in
            [("an address", address), ("an address in the middle", address + 4096), ("an address that is not managed", 4096)]
        {
            timed(&format!("find {what}, of {count}"), || _ = black_box(Memory::get().registry.find(black_box(address))));
        }
        timed(&format!("allocate and free beside {count}"), || _ = free(allocate()));
        for address in addresses {
            free(address);
        }
    }
}
