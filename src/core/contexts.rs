//! The contexts of this process, as far as they have become visible: work in any context of a device may use the memory of
//! that device, whichever it was allocated in.
//!
//! A context is seen when something is allocated in it, when it is current at a hooked call, and when it is the primary one of
//! a device that is asked about.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use vramctl_driver::{CUdevice, Context, ContextHandle, Current};
use vramctl_host::PerProcess;

type Contexts = BTreeMap<Context, CUdevice>;

/// Those that were seen and are not known to be gone, with their devices.
static SEEN: PerProcess<RwLock<Contexts>> = PerProcess::new(RwLock::default);

fn read() -> RwLockReadGuard<'static, Contexts> {
    SEEN.get().read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Contexts> {
    SEEN.get().write().unwrap_or_else(PoisonError::into_inner)
}

/// A context has become visible.
pub fn note(current: &Current) {
    if !read().contains_key(&current.context()) {
        write().insert(current.context(), current.device());
    }
}

/// Notes the context that is current on this thread. Cheap, since it is done at every hooked call: whether a known handle has
/// another context by now is asked when that matters.
#[inline]
pub fn note_current() {
    let Ok(Some(handle)) = ContextHandle::of_thread() else { return };
    if read().keys().all(|context| context.handle() != handle)
        && let Ok(Some(current)) = Current::of_thread()
    {
        note(&current);
    }
}

/// The contexts of these devices.
pub fn of_devices(devices: &BTreeSet<CUdevice>) -> BTreeSet<Context> {
    let handles: BTreeSet<_> = read().keys().map(|context| context.handle()).collect();
    handles.into_iter().for_each(note_heir);
    let primaries: Vec<_> = devices.iter().filter_map(|device| Some((Current::primary_of(*device).ok()??, *device))).collect();
    write().extend(primaries);
    read().iter().filter(|(_, device)| devices.contains(device)).map(|(context, _)| *context).collect()
}

/// Forgets those that are gone, and says which these are.
pub fn forget_gone() -> Vec<Context> {
    let seen: Vec<_> = read().keys().copied().collect();
    let gone: Vec<_> = seen.into_iter().filter(|context| context.is_gone()).collect();
    gone.iter().map(|context| context.handle()).for_each(note_heir);
    write().retain(|context, _| !gone.contains(context));
    gone
}

/// Notes the context that has a handle now: it may have been current at many a hooked call, taken for the one before it.
fn note_heir(handle: ContextHandle) {
    if let Ok(context) = handle.context()
        && !read().contains_key(&context)
        && let Ok(current) = Current::push(context)
    {
        note(&current);
    }
}
