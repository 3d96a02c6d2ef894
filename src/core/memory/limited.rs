//! Memory within the limit of this process ([`limit`]).

use super::{Memory, unmanaged};
use crate::limit::{self, Charge, Growth, Taken};
use std::ffi::c_void;
use vramctl_driver::CUdevice;
use vramctl_model::{Error, OverLimit, Share, Shown};

/// Charges memory of a device that is about to be allocated. `None` without a limit.
pub fn charge(device: CUdevice, bytes: usize) -> Result<Option<Charge>, Error> {
    or_again(device, || limit::charge(device, bytes as u64))
}

/// Charges memory that the driver allocates for the program: at least so much, in its pages.
pub fn charge_unmanaged(device: CUdevice, bytes: usize) -> Result<Option<Charge>, Error> {
    /// The driver packs smaller ones into pages, at multiples of `UNIT`.
    const SMALL: usize = 1 << 20;
    const UNIT: usize = 512;
    const PAGE: usize = 2 << 20;
    let unit = if bytes < SMALL { UNIT } else { PAGE };
    charge(device, bytes.checked_next_multiple_of(unit).unwrap_or(usize::MAX))
}

/// Charges a request to a pool of a device, until the answer. `None` without a limit.
///
/// # Safety
/// `pool` must be a pool of the driver's.
pub unsafe fn charge_pool(device: CUdevice, pool: *mut c_void, bytes: usize) -> Result<Option<Growth>, Error> {
    // SAFETY: the caller's promise.
    or_again(device, || unsafe { limit::charge_pool(device, pool, bytes as u64) })
}

/// What has ended with its context, or has left a pool, is still charged. Who finds no room looks for that, and tries again.
fn or_again<T>(device: CUdevice, charge: impl Fn() -> Result<T, OverLimit>) -> Result<T, Error> {
    charge().or_else(|_| {
        unmanaged::forget_gone();
        Memory::existing().map(Memory::drop_gone);
        limit::refresh(device);
        charge().map_err(Error::Limit)
    })
}

/// What the program is shown of a device that has so many bytes free and in all. `None`: that.
///
/// In a program that shares its GPUs, what others have that share them, too, makes way for it, so that counts as free.
pub fn shown(device: CUdevice, free: u64, total: u64) -> Option<Shown> {
    limit::taken(device)?;
    unmanaged::forget_gone();
    limit::refresh(device);
    let taken = limit::taken(device)?;
    let away = Memory::existing().map_or(0, |memory| memory.away_on(device));
    let others = total.saturating_sub(free).saturating_sub(taken.counted.saturating_sub(away));
    // The scheduler looks when programs come, wait or change places: some of it may have become free since.
    let others = limit::unavailable(device).map_or(others, |told| told.reserve + told.others.min(others));
    Some(Share { total, limit: taken.limit, others, own: taken.counted }.shown())
}

/// How much of its limit the process has taken of each device that it uses.
pub fn all_taken() -> Vec<Taken> {
    unmanaged::forget_gone();
    limit::refresh_all();
    limit::all_taken()
}

impl Memory {
    /// Bytes of a device that its paused memory takes once it is back.
    fn away_on(&self, device: CUdevice) -> u64 {
        let all = self.registry.all();
        let away = all.iter().filter(|allocation| allocation.on_device() == Some(device) && allocation.contents().state.memory().is_none());
        away.map(|allocation| allocation.bytes() as u64).sum()
    }
}
