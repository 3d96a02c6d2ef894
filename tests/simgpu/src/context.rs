//! Contexts: each device's primary context, contexts created by the program, and each thread's context stack.

use crate::abi::{Handle, Out};
use crate::capture;
use crate::codes::{
    CONTEXT_IS_DESTROYED, Code, DEVICE_UNAVAILABLE, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, Outcome, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED,
};
use crate::device;
use crate::driver::{self, State, machine, settings, state};
use crate::pool;
use crate::stream::Ticket;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// One context.
#[derive(Debug)]
pub struct Context {
    /// The handle that programs see. A reset primary context keeps its handle, and handles of destroyed contexts are reused.
    pub handle: Handle,
    /// A unique id, renewed whenever a primary context is recreated.
    id: AtomicU64,
    /// Its device.
    pub device: usize,
    /// Whether it is the device's primary context.
    pub primary: bool,
    /// If it stands for a green context: that one, and the primary context, which has the memory.
    pub green: Option<(Handle, Handle)>,
    /// The sticky error; 0 if none.
    ///
    /// "The context cannot be used, so it must be destroyed. All existing device memory
    /// allocations from this context are invalid and must be reconstructed." (illegal address)
    sticky: AtomicU32,
    active: AtomicBool,
    flags: AtomicU32,
    lock: Lock,
    /// Of a primary context: held by the call that is ending it.
    ending: Mutex<()>,
}

/// What calls of one context exclude each other by. Some calls that wait for work hold it until the work has finished.
#[derive(Debug, Default)]
struct Lock {
    /// How many calls hold it.
    held: Mutex<u32>,
    changed: Condvar,
}

impl Lock {
    fn held(&self) -> MutexGuard<'_, u32> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Context {
    /// Waits for work that holds up all other calls of the context meanwhile.
    pub fn wait_alone(&self, pending: &[Arc<Ticket>]) {
        *self.lock.held() += 1;
        Ticket::wait_all(pending);
        *self.lock.held() -= 1;
        self.lock.changed.notify_all();
    }

    /// Waits while a call holds the context's lock.
    fn wait_for_lock(&self) {
        drop(self.lock.changed.wait_while(self.lock.held(), |held| *held > 0).unwrap_or_else(PoisonError::into_inner));
    }

    /// The context with which memory ends that is allocated in this one.
    pub fn owner(&self) -> Handle {
        self.green.map_or(self.handle, |(_, primary)| primary)
    }

    /// Sets the sticky error. The first one stays.
    pub fn poison(&self, code: Code) {
        let _ = self.sticky.compare_exchange(0, code, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The sticky error as a result.
    pub fn check(&self) -> Outcome {
        match self.sticky.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// The contexts of this process.
#[derive(Debug, Default)]
pub struct Contexts {
    known: HashMap<Handle, Arc<Context>>,
    /// Handles of destroyed contexts, to be reused.
    destroyed: Vec<Handle>,
    /// Per device, the primary context and its retain count. As on a real driver, the context keeps its handle across
    /// resets.
    primary: HashMap<usize, (Arc<Context>, u32)>,
    peers: HashSet<(Handle, Handle)>,
    /// The devices on which a context ended with a sticky error: the process cannot create another there.
    lost: HashSet<usize>,
}

thread_local! {
    /// The thread's context stack; the last entry is current, and an entry may be null. Never dropped, because exit handlers
    /// still have a current context.
    static STACK: ManuallyDrop<RefCell<Vec<Handle>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

fn stack<R>(use_it: impl FnOnce(&mut Vec<Handle>) -> R) -> R {
    STACK.with(|stack| use_it(&mut stack.borrow_mut()))
}

impl Contexts {
    /// Looks up a context by handle.
    pub fn get(&self, handle: Handle) -> Outcome<Arc<Context>> {
        let context = self.known.get(&handle).ok_or(INVALID_CONTEXT)?;
        if context.active.load(Ordering::Acquire) { Ok(Arc::clone(context)) } else { Err(CONTEXT_IS_DESTROYED) }
    }

    /// Whether a handle may be made current. A destroyed context may, as long as nothing uses it.
    fn can_be_current(&self, handle: Handle) -> Outcome {
        if self.known.contains_key(&handle) || self.destroyed.contains(&handle) { Ok(()) } else { Err(INVALID_CONTEXT) }
    }

    /// Fails if the process can no longer have a context on a device.
    fn admit(&self, device: usize) -> Outcome {
        if self.lost.contains(&device) { Err(DEVICE_UNAVAILABLE) } else { Ok(()) }
    }

    /// Whether a context of the device has access to plain memory of one of the other's.
    pub fn are_peers(&self, device: usize, owner: usize) -> bool {
        let is_of = |handle: &Handle, device| self.known.get(handle).is_some_and(|context| context.device == device);
        self.peers.iter().any(|(from, to)| is_of(from, device) && is_of(to, owner))
    }

    /// Number of live contexts.
    pub fn live(&self) -> usize {
        self.known.values().filter(|context| context.active.load(Ordering::Relaxed)).count()
    }
}

fn top() -> Handle {
    stack(|stack| stack.last().copied().unwrap_or(0))
}

/// The calling thread's context. An error if there is none, if it has been destroyed, or if it has a sticky error.
pub fn current() -> Outcome<Arc<Context>> {
    current_in(&state().contexts)
}

/// [`current`], for callers that hold the state lock.
pub fn current_in(contexts: &Contexts) -> Outcome<Arc<Context>> {
    let context = contexts.get(top())?;
    context.check()?;
    Ok(context)
}

/// Waits while a call of another thread holds the lock of the calling thread's context.
pub fn wait_for_lock() {
    let context = state().contexts.get(top());
    if let Ok(context) = context {
        context.wait_for_lock();
    }
}

/// Fails if the calling thread has a current context that is unusable.
pub fn healthy() -> Outcome {
    if top() == 0 { Ok(()) } else { current().map(drop) }
}

/// `cuCtxGetCurrent`.
pub fn get_current(context: Out<Handle>) -> Outcome {
    context.put(top())
}

/// `cuCtxSetCurrent`: replaces the top of the stack; null pops it.
pub fn set_current(context: Handle) -> Outcome {
    if context != 0 {
        state().contexts.can_be_current(context)?;
    }
    stack(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
    Ok(())
}

/// `cuCtxPushCurrent`.
pub fn push(context: Handle) -> Outcome {
    state().contexts.can_be_current(context)?;
    stack(|stack| stack.push(context));
    Ok(())
}

/// `cuCtxPopCurrent`.
pub fn pop(context: Out<Handle>) -> Outcome {
    let popped = stack(Vec::pop).ok_or(INVALID_CONTEXT)?;
    context.put_if_given(popped);
    Ok(())
}

/// `cuCtxGetDevice`: works for a reset primary context. The real driver crashes if a destroyed context is current.
pub fn get_device(device: Out<i32>) -> Outcome {
    let state = state();
    if state.contexts.destroyed.contains(&top()) {
        eprintln!("simgpu: cuCtxGetDevice of a destroyed context, which crashes a real program");
        std::process::abort();
    }
    device.put(state.contexts.known.get(&top()).ok_or(INVALID_CONTEXT)?.device as i32)
}

/// `cuCtxGetId`.
pub fn get_id(context: Handle, id: Out<u64>) -> Outcome {
    let state = state();
    let context = if context == 0 { top() } else { context };
    match state.contexts.get(context) {
        Ok(context) => id.put(context.id.load(Ordering::Acquire)),
        Err(_) if context != 0 => Err(CONTEXT_IS_DESTROYED),
        none => none.map(drop),
    }
}

/// `cuCtxGetFlags`.
pub fn get_flags(flags: Out<u32>) -> Outcome {
    flags.put(current()?.flags.load(Ordering::Relaxed))
}

/// `cuCtxGetApiVersion`.
pub fn api_version(context: Handle, version: Out<u32>) -> Outcome {
    let context = if context == 0 { top() } else { context };
    state().contexts.get(context)?;
    version.put(3020)
}

/// `cuCtxGetStreamPriorityRange`.
pub fn priority_range(least: Out<i32>, greatest: Out<i32>) -> Outcome {
    least.put_if_given(0);
    greatest.put_if_given(-5);
    Ok(())
}

fn new_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn new(handle: Handle, device: usize, primary: bool, flags: u32) -> Arc<Context> {
    Arc::new(made(handle, device, primary, flags, None))
}

fn made(handle: Handle, device: usize, primary: bool, flags: u32, green: Option<(Handle, Handle)>) -> Context {
    Context {
        handle,
        green,
        id: AtomicU64::new(new_id()),
        device,
        primary,
        sticky: AtomicU32::new(0),
        active: AtomicBool::new(true),
        flags: AtomicU32::new(flags),
        lock: Lock::default(),
        ending: Mutex::default(),
    }
}

/// `cuGreenCtxCreate`: retains the primary context.
pub fn create_green(green: Out<Handle>, device: i32) -> Outcome {
    green.required()?;
    let primary = retain(device)?;
    let device = driver::device(device)?;
    let mut state = state();
    let handle = state.contexts.destroyed.pop().unwrap_or_else(driver::new_handle);
    let name = driver::new_handle();
    state.contexts.known.insert(handle, Arc::new(made(handle, device, false, 0, Some((name, primary)))));
    green.put(name)
}

fn of_green(green: Handle) -> Outcome<Arc<Context>> {
    let state = state();
    let found = state.contexts.known.values().find(|context| context.green.is_some_and(|(name, _)| name == green));
    found.cloned().ok_or(INVALID_CONTEXT)
}

/// `cuCtxFromGreenCtx`.
pub fn from_green(context: Out<Handle>, green: Handle) -> Outcome {
    context.put(of_green(green)?.handle)
}

/// `cuGreenCtxDestroy`: releases the primary context.
pub fn destroy_green(green: Handle) -> Outcome {
    let context = of_green(green)?;
    destroy(context.handle)?;
    release_primary(context.device as i32)
}

/// `cuCtxCreate`: makes the new context current.
pub fn create(handle: Out<Handle>, flags: u32, device: i32) -> Outcome {
    handle.required()?;
    let device = driver::device(device)?;
    let mut state = state();
    state.contexts.admit(device)?;
    device::take(device, settings().context_bytes)?;
    let context = new(state.contexts.destroyed.pop().unwrap_or_else(driver::new_handle), device, false, flags);
    state.contexts.known.insert(context.handle, Arc::clone(&context));
    drop(state);
    stack(|stack| stack.push(context.handle));
    handle.put(context.handle)
}

/// `cuCtxDestroy`.
pub fn destroy(handle: Handle) -> Outcome {
    let context = state().contexts.get(handle)?;
    if context.primary {
        return Err(INVALID_CONTEXT);
    }
    empty(&context);
    let mut state = state();
    if context.check().is_err() {
        state.contexts.lost.insert(context.device);
    }
    context.active.store(false, Ordering::Release);
    state.contexts.known.remove(&handle);
    state.contexts.destroyed.push(handle);
    drop(state);
    if context.green.is_none() {
        machine()?.give(context.device, settings().context_bytes);
    }
    stack(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    });
    Ok(())
}

/// `cuDevicePrimaryCtxRetain`.
pub fn retain_primary(handle: Out<Handle>, device: i32) -> Outcome {
    handle.required()?;
    handle.put(retain(device)?)
}

fn retain(device: i32) -> Outcome<Handle> {
    let device = driver::device(device)?;
    wait_for_primary(device);
    let mut state = state();
    let contexts = &mut state.contexts;
    let admitted = contexts.admit(device);
    let (context, retained) = contexts.primary.entry(device).or_insert_with(|| (new(driver::new_handle(), device, true, 0), 0));
    if *retained == 0 {
        admitted?;
        device::take(device, settings().context_bytes)?;
        context.sticky.store(0, Ordering::Release);
        context.id.store(new_id(), Ordering::Release);
        context.active.store(true, Ordering::Release);
        contexts.known.insert(context.handle, Arc::clone(context));
    }
    *retained += 1;
    Ok(context.handle)
}

/// `cuDevicePrimaryCtxRelease`: the last release destroys the context's contents.
pub fn release_primary(device: i32) -> Outcome {
    let device = driver::device(device)?;
    let last = {
        let mut state = state();
        let Some((context, retained)) = state.contexts.primary.get_mut(&device) else {
            return Err(INVALID_CONTEXT);
        };
        if *retained == 0 {
            return Err(INVALID_CONTEXT);
        }
        *retained -= 1;
        (*retained == 0).then(|| Arc::clone(context))
    };
    last.map_or(Ok(()), |context| end_primary(&context))
}

/// `cuDevicePrimaryCtxReset`: destroys the context's contents, however often it is retained.
pub fn reset_primary(device: i32) -> Outcome {
    let device = driver::device(device)?;
    let context = {
        let mut state = state();
        match state.contexts.primary.get_mut(&device) {
            Some((context, retained)) if *retained > 0 => {
                *retained = 0;
                Arc::clone(context)
            }
            _ => return Ok(()),
        }
    };
    end_primary(&context)
}

fn end_primary(context: &Arc<Context>) -> Outcome {
    let _ending = context.ending.lock().unwrap_or_else(PoisonError::into_inner);
    empty(context);
    context.active.store(false, Ordering::Release);
    // A reset does not clear a sticky error: only another process can get a new context.
    if context.sticky.swap(0, Ordering::AcqRel) != 0 {
        state().contexts.lost.insert(context.device);
    }
    machine()?.give(context.device, settings().context_bytes);
    Ok(())
}

/// Destroys a context's streams, events, modules and plain allocations, once the work of the process on the device has finished. Virtual memory
/// belongs to the process, so it stays.
fn empty(context: &Context) {
    let pending = {
        let state = state();
        state.streams.pending(context.handle).into_iter().chain(state.streams.pending_on(context.device)).collect::<Vec<_>>()
    };
    Ticket::wait_all(&pending);
    let mut state = state();
    let State { space, streams, captures, host, modules, .. } = &mut *state;
    captures.forget_context(context.handle);
    streams.forget_context(context.handle);
    space.forget_context(context.handle);
    host.forget_context(context.handle);
    modules.forget_context(context.handle);
    state.contexts.peers.retain(|&(from, to)| from != context.handle && to != context.handle);
}

/// Waits while a call is ending a device's primary context.
fn wait_for_primary(device: usize) {
    let primary = state().contexts.primary.get(&device).map(|(context, _)| Arc::clone(context));
    if let Some(context) = primary {
        drop(context.ending.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// `cuDevicePrimaryCtxGetState`: waits for a reset.
pub fn primary_state(device: i32, flags: Out<u32>, active: Out<i32>) -> Outcome {
    let device = driver::device(device)?;
    wait_for_primary(device);
    let state = state();
    let primary = state.contexts.primary.get(&device);
    flags.put_if_given(primary.map_or(0, |(context, _)| context.flags.load(Ordering::Relaxed)));
    active.put_if_given(i32::from(primary.is_some_and(|&(_, retained)| retained > 0)));
    Ok(())
}

/// `cuDevicePrimaryCtxSetFlags`.
pub fn primary_set_flags(device: i32, flags: u32) -> Outcome {
    let device = driver::device(device)?;
    if let Some((context, _)) = state().contexts.primary.get(&device) {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

/// `cuCtxSynchronize`: waits for the context's work and returns its error.
pub fn synchronize() -> Outcome {
    let context = current()?;
    capture::refuse_context_wait(&context)?;
    let pending = state().streams.pending(context.handle);
    Ticket::wait_all(&pending);
    pool::synchronised();
    context.check()
}

/// `cuCtxRecordEvent`: the event happens when all work that the context has now is done. No stream waits for it.
pub fn record_event(context: Handle, event: Handle) -> Outcome {
    let context = state().contexts.get(context)?;
    context.check()?;
    capture::refuse_context_wait(&context)?;
    let mut state = state();
    let pending = state.streams.pending(context.handle);
    state.streams.record(event, &context, pending)
}

/// Whether one device's memory can be reached from the other: from all, unless the machine has no paths between its devices.
pub fn has_path(device: usize, owner: usize) -> bool {
    device == owner || !settings().no_p2p
}

/// `cuDeviceCanAccessPeer`.
pub fn can_access_peer(answer: Out<i32>, device: i32, peer: i32) -> Outcome {
    let (device, peer) = (driver::device(device)?, driver::device(peer)?);
    answer.put(i32::from(device != peer && has_path(device, peer)))
}

/// `cuCtxEnablePeerAccess`.
pub fn enable_peer(peer: Handle, flags: u32) -> Outcome {
    let context = current()?;
    let mut state = state();
    let peer = state.contexts.get(peer)?;
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    if peer.device == context.device {
        return Err(INVALID_DEVICE);
    }
    if !has_path(context.device, peer.device) {
        return Err(PEER_ACCESS_UNSUPPORTED);
    }
    if state.contexts.peers.insert((context.handle, peer.handle)) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
}

/// `cuCtxDisablePeerAccess`.
pub fn disable_peer(peer: Handle) -> Outcome {
    let context = current()?;
    if state().contexts.peers.remove(&(context.handle, peer)) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
}
