//! The contexts seen in this process. Work in any context of a device may use that device's memory, whichever context it was
//! allocated in.
//!
//! A context is seen when it is created, when something is allocated in it, and when it is the primary context of a device passed to
//! [`of_devices`]. Green contexts belong to a primary context, and waiting for that one waits for them (`cuCtxSynchronize` in the driver
//! API's reference).
//!
//! The program may end a context at any moment. Whoever uses one that the program does not vouch for makes it current
//! ([`Current::push`]), and the program's call waits for that; the reverse is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use vramctl_driver::{self as driver, CUdevice, Context, ContextHandle, Current};
use vramctl_host::{PerProcess, Unpoison};

type Contexts = BTreeMap<Context, CUdevice>;

/// Contexts seen and not known to be destroyed, with their devices.
static SEEN: PerProcess<RwLock<Contexts>> = PerProcess::new(RwLock::default);

fn read() -> RwLockReadGuard<'static, Contexts> {
    SEEN.get().read().unpoisoned()
}

fn write() -> RwLockWriteGuard<'static, Contexts> {
    SEEN.get().write().unpoisoned()
}

/// Records a context; of a green one, also the primary one, whose end is that of the memory.
pub fn note(current: &Current) {
    if !read().contains_key(&current.context()) {
        let both = [current.context(), current.owner()];
        write().extend(both.map(|context| (context, current.device())));
    }
}

/// Whether a context is known and not known to be destroyed.
pub fn knows(context: Context) -> bool {
    read().contains_key(&context)
}

/// The device of a known context.
pub fn device_of(context: Context) -> Option<CUdevice> {
    read().get(&context).copied()
}

/// Records this thread's current context. Runs at every allocation, so it must be cheap: whether a known handle now belongs
/// to a new context is checked only when it matters.
#[inline]
pub fn note_current() {
    let Ok(Some(handle)) = ContextHandle::of_thread() else { return };
    if read().keys().all(|context| context.handle() != handle)
        && let Ok(Some(current)) = Current::of_thread()
    {
        note(&current);
    }
}

/// All known contexts of these devices.
pub fn of_devices(devices: &BTreeSet<CUdevice>) -> BTreeSet<Context> {
    let handles: BTreeSet<_> = read().keys().map(|context| context.handle()).collect();
    handles.into_iter().for_each(note_heir);
    let primaries: Vec<_> = devices.iter().filter_map(|device| Some((Current::primary_of(*device).ok()??, *device))).collect();
    write().extend(primaries);
    read().iter().filter(|(_, device)| devices.contains(device)).map(|(context, _)| *context).collect()
}

/// All known contexts.
pub fn all() -> Vec<Context> {
    read().keys().copied().collect()
}

/// The devices of known contexts.
pub fn devices() -> BTreeSet<CUdevice> {
    read().values().copied().collect()
}

/// Makes a context of the device current on this thread. `None` if none is known that is neither gone nor ending.
pub fn enter_any(device: CUdevice) -> Option<Current> {
    let known: Vec<_> = read().iter().filter(|(_, of)| **of == device).map(|(context, _)| *context).collect();
    // Some may have been destroyed, by calls that were not seen.
    let enter = |context| Current::push(context).ok();
    known.into_iter().find_map(enter).or_else(|| of_devices(&BTreeSet::from([device])).into_iter().find_map(enter))
}

/// A context of the device for copies: the preferred one, or another if that is ending. The same as long as the transition lock is held.
pub fn for_copies(device: CUdevice, preferred: Context) -> Context {
    if !preferred.is_ending() {
        return preferred;
    }
    of_devices(&BTreeSet::from([device])).into_iter().find(|context| !context.is_ending()).unwrap_or(preferred)
}

/// Free and total bytes of a device, as the driver says. Neither this nor entering a context disturbs a stream capture, whatever the thread's
/// mode. `None` if no context of the device is known, or the driver does not say.
pub fn memory_info(device: CUdevice) -> Option<(u64, u64)> {
    let _entered = enter_any(device)?;
    driver::memory_info().ok()
}

/// Forgets destroyed contexts and returns them.
pub fn forget_gone() -> Vec<Context> {
    let seen: Vec<_> = read().keys().copied().collect();
    let gone: Vec<_> = seen.into_iter().filter(|context| context.is_gone()).collect();
    gone.iter().map(|context| context.handle()).for_each(note_heir);
    gone.iter().copied().for_each(driver::streams::forget_context);
    write().retain(|context, _| !gone.contains(context));
    gone
}

/// Records the context that a handle now refers to: [`note_current`] may have mistaken it for the handle's previous context.
fn note_heir(handle: ContextHandle) {
    if let Ok(_kept) = handle.keep()
        && let Ok(context) = handle.context()
        && !read().contains_key(&context)
        && let Ok(current) = Current::push(context)
    {
        note(&current);
    }
}
