//! The addresses that the program has reserved: while memory is paused, the driver cannot be asked whether it would map the memory somewhere.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice, CUdeviceptr};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Span, StatusCode, code};

/// Each reservation's length, by its first address.
static RESERVED: PerProcess<Mutex<BTreeMap<CUdeviceptr, usize>>> = PerProcess::new(Mutex::default);

fn reserved() -> MutexGuard<'static, BTreeMap<CUdeviceptr, usize>> {
    RESERVED.get().lock().unpoisoned()
}

/// Records that the program has reserved addresses.
pub fn note(span: Span) {
    reserved().insert(span.address, span.bytes);
}

/// Makes the program's call that frees addresses.
pub fn freeing(span: Span, real: impl FnOnce() -> StatusCode) -> StatusCode {
    // Before the call: afterwards another thread may get them.
    let taken = reserved().remove(&span.address);
    let answer = real();
    if answer != code::SUCCESS
        && let Some(bytes) = taken
    {
        reserved().insert(span.address, bytes);
    }
    answer
}

/// The reservation around an address.
pub fn around(address: CUdeviceptr) -> Option<Span> {
    let (base, bytes) = reserved().range(..=address).next_back().map(|(base, bytes)| (*base, *bytes))?;
    (address - base < bytes as u64).then_some(Span { address: base, bytes })
}

/// Whether the driver would map memory of a device there, as far as can be said: it begins in a reservation, and nothing is mapped there yet. (The
/// driver looks no further: the memory may end behind the reservation, observed with 580.)
pub(super) fn is_free(span: Span, device: CUdevice) -> bool {
    let end = span.address.saturating_add(span.bytes as u64);
    let page = driver::granularity(device).unwrap_or(span.bytes).max(1);
    around(span.address).is_some() && !(span.address..end).step_by(page).any(|at| matches!(driver::memory_at(at), Ok(Some(_))))
}
