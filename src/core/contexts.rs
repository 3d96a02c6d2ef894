//! The contexts of this process, as far as they have become visible: work in any context of a device may use the memory of
//! that device, whichever it was allocated in.
//!
//! A context is seen when something is allocated in it, when it is current at a hooked call, and when it is the primary one of
//! a device that is asked about.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use vramctl_driver::{CUdevice, Context, ContextHandle, Current};
use vramctl_host::PerProcess;

type Contexts = RwLock<BTreeSet<Context>>;

/// Those that were seen and are not known to be gone.
static SEEN: PerProcess<Contexts> = PerProcess::new(Contexts::default);

fn read() -> RwLockReadGuard<'static, BTreeSet<Context>> {
    SEEN.get().read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, BTreeSet<Context>> {
    SEEN.get().write().unwrap_or_else(PoisonError::into_inner)
}

/// A context has become visible.
pub fn note(context: Context) {
    if !read().contains(&context) {
        write().insert(context);
    }
}

/// Notes the context that is current on this thread. Cheap, since it is done at every hooked call: whether a known handle has
/// another context by now is asked when that matters.
#[inline]
pub fn note_current() {
    let Ok(Some(handle)) = ContextHandle::of_thread() else { return };
    if read().iter().all(|context| context.handle() != handle)
        && let Ok(context) = handle.context()
    {
        note(context);
    }
}

/// The contexts of these devices.
pub fn of_devices(devices: &BTreeSet<CUdevice>) -> BTreeSet<Context> {
    devices.iter().filter_map(|device| Current::primary_of(*device).ok().flatten()).for_each(note);
    // Those that have the handles now.
    let handles: BTreeSet<_> = read().iter().map(|context| context.handle()).collect();
    let mut contexts: BTreeSet<_> = handles.into_iter().filter_map(|handle| handle.context().ok()).collect();
    contexts.iter().copied().for_each(note);
    contexts.retain(|context| Current::push(*context).is_ok_and(|current| devices.contains(&current.device())));
    contexts
}

/// Forgets those that are gone, and says which these are.
pub fn forget_gone() -> Vec<Context> {
    let seen: Vec<_> = read().iter().copied().collect();
    let gone: Vec<_> = seen.into_iter().filter(|context| context.is_gone()).collect();
    // A context that has got the handle of one of them may be current at hooked calls for long.
    gone.iter().filter_map(|context| context.handle().context().ok()).for_each(note);
    write().retain(|context| !gone.contains(context));
    gone
}
