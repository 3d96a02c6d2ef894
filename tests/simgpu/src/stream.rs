//! Streams and events.
//!
//! Every operation has a ticket that is punched when it finishes, and lists the tickets that it waits for. The order within
//! a stream, the legacy stream's order with blocking streams, events and synchronisation are all the same mechanism: waiting
//! for tickets issued earlier, which rules out cycles.

use crate::abi::{Address, Handle, HostFunction, Out, StreamCallback};
use crate::capture::{self, Captures};
use crate::codes::{CAPTURED_EVENT, Code, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OPERATING_SYSTEM, Outcome};
use crate::context::{self, Context};
use crate::copy::{self, Until, Work};
use crate::driver::{self, State, state};
use crate::pool;
use crate::vmm;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// `CU_STREAM_LEGACY`; handle 0 means the same unless the function's name says otherwise.
pub const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
pub const PER_THREAD: Handle = 2;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// How long an idle stream's thread waits for more work before it ends.
const IDLE: Duration = Duration::from_millis(500);

/// Maps the default stream for calls whose names end in `_ptsz` or `_ptds`.
pub fn per_thread(stream: Handle) -> Handle {
    if stream == 0 { PER_THREAD } else { stream }
}

/// Becomes done once and stays done.
#[derive(Debug, Default)]
pub struct Ticket {
    done: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it was done, if it is.
    pub fn done(&self) -> Option<Instant> {
        *self.lock()
    }

    fn punch(&self) {
        *self.lock() = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Waits until it is done.
    pub fn wait(&self) {
        let mut done = self.lock();
        while done.is_none() {
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all are done.
    pub fn wait_all(tickets: &[Arc<Self>]) {
        for ticket in tickets {
            ticket.wait();
        }
    }
}

#[derive(Debug)]
struct Operation {
    work: Work,
    after: Vec<Arc<Ticket>>,
    ticket: Arc<Ticket>,
}

#[derive(Debug, Default)]
struct Queue {
    operations: VecDeque<Operation>,
    /// The one that its worker has taken.
    running: Option<Arc<Ticket>>,
    has_worker: bool,
}

/// One stream.
#[derive(Debug)]
pub struct Stream {
    /// The handle used internally: default streams have one of their own, too.
    pub handle: Handle,
    /// A number that no other stream of this process ever has.
    pub id: u64,
    /// The context that it belongs to.
    pub context: Arc<Context>,
    kind: Kind,
    flags: u32,
    priority: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
    tail: Mutex<Option<Arc<Ticket>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Legacy,
    Blocking,
    NonBlocking,
}

impl Stream {
    fn new(handle: Handle, context: Arc<Context>, kind: Kind, flags: u32, priority: i32) -> Arc<Self> {
        Arc::new(Self {
            handle,
            id: driver::new_handle(),
            context,
            kind,
            flags,
            priority,
            queue: Mutex::default(),
            changed: Condvar::new(),
            tail: Mutex::default(),
        })
    }

    /// Whether this is the legacy default stream.
    pub fn is_legacy(&self) -> bool {
        self.kind == Kind::Legacy
    }

    /// Whether this stream and the legacy stream wait for each other.
    pub fn is_blocking(&self) -> bool {
        self.kind == Kind::Blocking
    }

    /// What must end before there is room for another launch. One waits with its context's lock, as observed: meanwhile no other thread
    /// can create an event.
    pub fn first_if_full(&self) -> Option<Arc<Ticket>> {
        /// As many launches fit on an H100, behind what is running.
        const MOST: usize = 1020;
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let running = queue.running.as_ref();
        let first = || running.or(queue.operations.front().map(|first| &first.ticket)).map(Arc::clone);
        if queue.operations.len() + usize::from(running.is_some()) <= MOST { None } else { first() }
    }

    /// The ticket of the last operation, if unfinished.
    fn unfinished(&self) -> Option<Arc<Ticket>> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.as_ref().filter(|ticket| ticket.done().is_none()).map(Arc::clone)
    }

    fn push(self: &Arc<Self>, work: Work, after: Vec<Arc<Ticket>>) -> Outcome<Arc<Ticket>> {
        let ticket = Arc::new(Ticket::default());
        {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            if !queue.has_worker {
                start_worker(Arc::clone(self))?;
                queue.has_worker = true;
            }
            queue.operations.push_back(Operation { work, after, ticket: Arc::clone(&ticket) });
        }
        *self.tail.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&ticket));
        self.changed.notify_one();
        Ok(ticket)
    }

    fn work(&self) {
        loop {
            let operation = {
                let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
                let (mut queue, _) = self
                    .changed
                    .wait_timeout_while(queue, IDLE, |queue| queue.operations.is_empty())
                    .unwrap_or_else(PoisonError::into_inner);
                let Some(operation) = queue.operations.pop_front() else {
                    queue.has_worker = false;
                    return;
                };
                queue.running = Some(Arc::clone(&operation.ticket));
                operation
            };
            Ticket::wait_all(&operation.after);
            copy::execute(&self.context, operation.work);
            self.queue.lock().unwrap_or_else(PoisonError::into_inner).running = None;
            operation.ticket.punch();
        }
    }
}

/// Starts a stream's thread, with all signals blocked.
fn start_worker(stream: Arc<Stream>) -> Outcome {
    // SAFETY: zeroed signal sets are valid, and the calls fill them.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let started = std::thread::Builder::new().name("simgpu-stream".to_owned()).spawn(move || stream.work());
    // SAFETY: the set is this thread's previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    started.map(drop).map_err(|_| OPERATING_SYSTEM)
}

#[derive(Debug)]
struct Event {
    context: Handle,
    flags: u32,
    /// What it waits for; `None` if it was never recorded.
    recorded: Option<Vec<Arc<Ticket>>>,
    captured: Option<capture::Recorded>,
}

/// This process's streams and events.
#[derive(Debug, Default)]
pub struct Streams {
    created: HashMap<Handle, Arc<Stream>>,
    /// Handles of destroyed streams, which new streams get.
    destroyed: Vec<Handle>,
    /// Default streams by context and thread; the legacy stream is under thread 0.
    defaults: HashMap<(Handle, u64), Arc<Stream>>,
    /// Unfinished work of destroyed streams.
    left_over: Vec<(Handle, Arc<Ticket>)>,
    events: HashMap<Handle, Event>,
}

impl Streams {
    fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.created.values().chain(self.defaults.values())
    }

    /// The tickets to wait for until a context is idle.
    pub fn pending(&self, context: Handle) -> Vec<Arc<Ticket>> {
        self.all()
            .filter(|stream| stream.context.handle == context)
            .filter_map(|stream| stream.unfinished())
            .chain(self.left_over.iter().filter(|(owner, _)| *owner == context).map(|(_, ticket)| Arc::clone(ticket)))
            .collect()
    }

    /// The tickets to wait for until a device is idle.
    pub fn pending_on(&self, device: usize) -> Vec<Arc<Ticket>> {
        let of_streams = self.all().filter(|stream| stream.context.device == device).filter_map(|stream| stream.unfinished());
        of_streams.collect()
    }

    /// The unfinished work that synchronising a stream waits for. For the legacy stream this includes the work on blocking
    /// streams, which its next operation would also wait for.
    fn before(&self, stream: &Stream) -> Vec<Arc<Ticket>> {
        if !stream.is_legacy() {
            return Vec::from_iter(stream.unfinished());
        }
        self.all()
            .filter(|other| other.context.handle == stream.context.handle && other.kind != Kind::NonBlocking)
            .filter_map(|other| other.unfinished())
            .collect()
    }

    /// Drops the streams and events of a destroyed context.
    pub fn forget_context(&mut self, context: Handle) {
        self.created.retain(|_, stream| stream.context.handle != context);
        self.defaults.retain(|&(owner, _), _| owner != context);
        self.left_over.retain(|(owner, _)| *owner != context);
        self.events.retain(|_, event| event.context != context);
    }

    /// Whether a blocking stream of the context is in this set.
    pub fn any_blocking(&self, context: Handle, among: impl Fn(Handle) -> bool) -> bool {
        self.all().any(|stream| stream.context.handle == context && stream.is_blocking() && among(stream.handle))
    }

    /// Makes an event of this context happen when these tickets are done.
    pub fn record(&mut self, event: Handle, context: &Context, tickets: Vec<Arc<Ticket>>) -> Outcome {
        let event = self.events.get_mut(&event).filter(|event| event.context == context.handle).ok_or(INVALID_HANDLE)?;
        event.recorded = Some(tickets);
        event.captured = None;
        Ok(())
    }

    /// Number of live created streams.
    pub fn live(&self) -> usize {
        self.created.len()
    }

    /// Number of live events.
    pub fn live_events(&self) -> usize {
        self.events.len()
    }
}

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// A unique, never reused number for the calling thread.
pub fn thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    THREAD.with(|thread| {
        if thread.get() == 0 {
            thread.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        thread.get()
    })
}

/// Whether the calling thread is inside a host function of `cuLaunchHostFunc` or `cuStreamAddCallback`.
pub fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// Calls a host function on behalf of a stream.
///
/// # Safety
/// The program must have passed the function and its argument to `cuLaunchHostFunc`.
pub unsafe fn call_host_function(function: HostFunction, data: *mut c_void) {
    if let Some(function) = function {
        IN_HOST_FUNCTION.set(true);
        // SAFETY: the caller's promise.
        unsafe { function(data) };
        IN_HOST_FUNCTION.set(false);
    }
}

/// Calls a stream's callback.
///
/// # Safety
/// The program must have passed the function and its argument to `cuStreamAddCallback`.
pub unsafe fn call_back(function: StreamCallback, stream: Handle, code: Code, data: *mut c_void) {
    if let Some(function) = function {
        IN_HOST_FUNCTION.set(true);
        // SAFETY: the caller's promise.
        unsafe { function(stream, code, data) };
        IN_HOST_FUNCTION.set(false);
    }
}

/// Resolves a stream handle for the calling thread.
pub fn find(state: &mut State, handle: Handle) -> Outcome<Arc<Stream>> {
    if handle > PER_THREAD {
        let stream = state.streams.created.get(&handle).ok_or(INVALID_HANDLE)?;
        stream.context.check()?;
        return Ok(Arc::clone(stream));
    }
    // The state is locked already, so look the current context up in it directly.
    let context = context::current_in(&state.contexts)?;
    let (owner, kind) = if handle == PER_THREAD { (thread(), Kind::Blocking) } else { (0, Kind::Legacy) };
    let stream =
        state.streams.defaults.entry((context.handle, owner)).or_insert_with(|| Stream::new(driver::new_handle(), context, kind, 0, 0));
    Ok(Arc::clone(stream))
}

/// Queues work on a stream or, if it is being captured, adds it to the graph (then there is no ticket).
pub fn submit(state: &mut State, stream: &Arc<Stream>, work: Work) -> Outcome<Option<Arc<Ticket>>> {
    submit_after(state, stream, work, Vec::new())
}

fn submit_after(state: &mut State, stream: &Arc<Stream>, work: Work, mut after: Vec<Arc<Ticket>>) -> Outcome<Option<Arc<Ticket>>> {
    stream.context.check()?;
    let State { streams, captures, .. } = state;
    if captures.is_capturing(stream.handle) {
        captures.add(stream, work)?;
        return Ok(None);
    }
    if stream.is_legacy() {
        captures.refuse_legacy(streams, stream.context.handle)?;
    }
    // "The legacy default stream is an implicit stream which synchronizes with all other streams in
    // the same CUcontext except for non-blocking streams."
    match stream.kind {
        Kind::Legacy => after.extend(
            streams
                .all()
                .filter(|other| other.is_blocking() && other.context.handle == stream.context.handle)
                .filter_map(|other| other.unfinished()),
        ),
        Kind::Blocking => after.extend(streams.defaults.get(&(stream.context.handle, 0)).and_then(|legacy| legacy.unfinished())),
        Kind::NonBlocking => {}
    }
    stream.push(work, after).map(Some)
}

/// Queues work on a stream and waits for it.
pub fn run(handle: Handle, work: Work) -> Outcome {
    let (stream, ticket) = {
        let mut state = state();
        let stream = find(&mut state, handle)?;
        // A call that waits cannot be captured.
        state.captures.refuse(stream.handle)?;
        let ticket = submit(&mut state, &stream, work)?;
        (stream, ticket)
    };
    if let Some(ticket) = ticket {
        ticket.wait();
    }
    stream.context.check()
}

/// `cuStreamCreate`.
pub fn create(handle: Out<Handle>, flags: u32) -> Outcome {
    create_with_priority(handle, flags, 0)
}

/// `cuStreamCreateWithPriority`.
pub fn create_with_priority(handle: Out<Handle>, flags: u32, priority: i32) -> Outcome {
    handle.required()?;
    if flags > NON_BLOCKING {
        return Err(INVALID_VALUE);
    }
    let kind = if flags == NON_BLOCKING { Kind::NonBlocking } else { Kind::Blocking };
    let context = context::current()?;
    let streams = &mut state().streams;
    let new = streams.destroyed.pop().unwrap_or_else(driver::new_handle);
    streams.created.insert(new, Stream::new(new, context, kind, flags, priority));
    handle.put(new)
}

/// `cuStreamDestroy`: returns at once; queued work still completes.
pub fn destroy(handle: Handle) -> Outcome {
    let mut state = state();
    let State { streams, captures, .. } = &mut *state;
    streams.created.get(&handle).ok_or(INVALID_HANDLE)?.context.check()?;
    let stream = streams.created.remove(&handle).ok_or(INVALID_HANDLE)?;
    captures.forget_stream(handle);
    streams.destroyed.push(handle);
    streams.left_over.retain(|(_, ticket)| ticket.done().is_none());
    if let Some(ticket) = stream.unfinished() {
        streams.left_over.push((stream.context.handle, ticket));
    }
    Ok(())
}

/// `cuStreamSynchronize`.
pub fn synchronize(handle: Handle) -> Outcome {
    let (stream, pending) = {
        let mut state = state();
        let stream = find(&mut state, handle)?;
        let State { streams, captures, .. } = &mut *state;
        captures.refuse_wait(streams, &stream)?;
        let pending = streams.before(&stream);
        (stream, pending)
    };
    Ticket::wait_all(&pending);
    pool::synchronised();
    stream.context.check()
}

/// `cuStreamQuery`.
pub fn query(handle: Handle) -> Outcome {
    let mut state = state();
    let stream = find(&mut state, handle)?;
    let State { streams, captures, .. } = &mut *state;
    captures.refuse_wait(streams, &stream)?;
    if streams.before(&stream).is_empty() { stream.context.check() } else { Err(NOT_READY) }
}

/// `cuStreamGetCtx`: on the legacy stream it counts as work.
pub fn get_context(handle: Handle, context: Out<Handle>) -> Outcome {
    let mut state = state();
    let stream = find(&mut state, handle)?;
    let State { streams, captures, .. } = &mut *state;
    if stream.is_legacy() {
        captures.refuse_legacy(streams, stream.context.handle)?;
    }
    context.put(stream.context.handle)
}

/// `cuStreamGetCtx_v2`: the primary context of a green context's stream, and that one.
pub fn get_contexts(handle: Handle, context: Out<Handle>, green: Out<Handle>) -> Outcome {
    let of_stream = find(&mut state(), handle)?.context.clone();
    get_context(handle, context)?;
    green.put(of_stream.green.map_or(0, |(green, _)| green))?;
    context.put(of_stream.owner())
}

/// `cuStreamGetId`: a handle is reused, and a default stream's means another one in each context or thread; the id is unique.
/// On the legacy stream it counts as work (driver 580).
pub fn get_id(handle: Handle, id: Out<u64>) -> Outcome {
    let mut state = state();
    let stream = find(&mut state, handle)?;
    let State { streams, captures, .. } = &mut *state;
    if stream.is_legacy() {
        captures.refuse_legacy(streams, stream.context.handle)?;
    }
    id.put(stream.id)
}

/// `cuStreamGetFlags`.
pub fn get_flags(handle: Handle, flags: Out<u32>) -> Outcome {
    flags.put(find(&mut state(), handle)?.flags)
}

/// `cuStreamGetPriority`.
pub fn get_priority(handle: Handle, priority: Out<i32>) -> Outcome {
    priority.put(find(&mut state(), handle)?.priority)
}

/// `cuStreamGetDevice`.
pub fn get_device(handle: Handle, device: Out<i32>) -> Outcome {
    device.put(find(&mut state(), handle)?.context.device as i32)
}

/// `cuStreamWaitEvent`: waiting for an event that was never recorded is a no-op.
pub fn wait_event(handle: Handle, event: Handle, _flags: u32) -> Outcome {
    let mut state = state();
    let stream = find(&mut state, handle)?;
    let event = state.streams.events.get(&event).ok_or(INVALID_HANDLE)?;
    let (recorded, captured) = (event.recorded.clone(), event.captured);
    if let Some(captured) = captured {
        return state.captures.join(stream.handle, captured);
    }
    if let Some(tickets) = recorded {
        if state.captures.is_capturing(stream.handle) {
            return state.captures.refuse_outside_event(stream.handle);
        }
        submit_after(&mut state, &stream, Work::Marker, tickets)?;
    }
    Ok(())
}

/// `cuStreamWaitValue32` and `64`: later work on the stream waits until the memory meets the condition.
pub fn wait_value(handle: Handle, address: Address, value: u64, width: usize, flags: u32) -> Outcome {
    /// `CU_STREAM_WAIT_VALUE_FLUSH`.
    const FLUSH: u32 = 1 << 30;
    let until = Until::of(flags & !FLUSH, value).ok_or(INVALID_VALUE)?;
    let mut state = state();
    let stream = find(&mut state, handle)?;
    let is_there = if state.space.is_device(address) {
        copy::is_reachable(&state, address, width, stream.context.device, vmm::READ)
    } else {
        state.host.find(address).is_some()
    };
    if !is_there || !address.is_multiple_of(width as u64) {
        return Err(INVALID_VALUE);
    }
    submit(&mut state, &stream, Work::Wait { address, width, until })?;
    Ok(())
}

/// `cuLaunchHostFunc`.
pub fn launch_host_function(handle: Handle, function: HostFunction, data: *mut c_void) -> Outcome {
    if function.is_none() {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    let stream = find(&mut state, handle)?;
    submit(&mut state, &stream, Work::Call { function, data: data as usize })?;
    Ok(())
}

/// `cuStreamAddCallback`: cannot be captured.
pub fn add_callback(handle: Handle, function: StreamCallback, data: *mut c_void, flags: u32) -> Outcome {
    if function.is_none() || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    let stream = find(&mut state, handle)?;
    state.captures.refuse(stream.handle)?;
    submit(&mut state, &stream, Work::Callback { function, stream: handle, data: data as usize })?;
    Ok(())
}

/// `cuEventCreate`.
pub fn create_event(handle: Out<Handle>, flags: u32) -> Outcome {
    handle.required()?;
    if flags & !7 != 0 {
        return Err(INVALID_VALUE);
    }
    let context = context::current()?.handle;
    let new = driver::new_handle();
    state().streams.events.insert(new, Event { context, flags, recorded: None, captured: None });
    handle.put(new)
}

/// `cuEventDestroy`.
pub fn destroy_event(event: Handle) -> Outcome {
    state().streams.events.remove(&event).map(drop).ok_or(INVALID_HANDLE)
}

/// `cuEventRecord`.
pub fn record_event(event: Handle, handle: Handle) -> Outcome {
    let mut state = state();
    let stream = find(&mut state, handle)?;
    if !state.streams.events.contains_key(&event) {
        return Err(INVALID_HANDLE);
    }
    let captured = state.captures.record(stream.handle)?;
    let recorded = match captured {
        Some(_) => None,
        None => submit(&mut state, &stream, Work::Marker)?,
    };
    if let Some(event) = state.streams.events.get_mut(&event) {
        event.recorded = recorded.map(|ticket| vec![ticket]);
        event.captured = captured;
    }
    Ok(())
}

fn recorded(captures: &Captures, event: &Event) -> Outcome<Option<Vec<Arc<Ticket>>>> {
    match event.captured {
        Some(place) if captures.is_running(place) => Err(CAPTURED_EVENT),
        _ => Ok(event.recorded.clone()),
    }
}

/// `cuEventQuery`: an event that was never recorded counts as done.
pub fn query_event(event: Handle) -> Outcome {
    let state = state();
    let event = state.streams.events.get(&event).ok_or(INVALID_HANDLE)?;
    state.contexts.get(event.context)?.check()?;
    match recorded(&state.captures, event)? {
        Some(tickets) if tickets.iter().any(|ticket| ticket.done().is_none()) => Err(NOT_READY),
        _ => Ok(()),
    }
}

/// `cuEventSynchronize`.
pub fn synchronize_event(event: Handle) -> Outcome {
    let (context, tickets) = {
        let state = state();
        let event = state.streams.events.get(&event).ok_or(INVALID_HANDLE)?;
        let context = state.contexts.get(event.context)?;
        context.check()?;
        (context, recorded(&state.captures, event)?)
    };
    Ticket::wait_all(&tickets.unwrap_or_default());
    pool::synchronised();
    context.check()
}

/// `cuEventElapsedTime`.
pub fn elapsed(milliseconds: Out<f32>, start: Handle, end: Handle) -> Outcome {
    let state = state();
    let moment = |handle: Handle| {
        let event = state.streams.events.get(&handle).ok_or(INVALID_HANDLE)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let tickets = recorded(&state.captures, event)?.ok_or(INVALID_HANDLE)?;
        let done: Vec<_> = tickets.iter().map(|ticket| ticket.done().ok_or(NOT_READY)).collect::<Outcome<_>>()?;
        Ok(done.into_iter().max().unwrap_or_else(Instant::now))
    };
    let (start, end) = (moment(start)?, moment(end)?);
    let forward = end.saturating_duration_since(start).as_secs_f32();
    let backward = start.saturating_duration_since(end).as_secs_f32();
    milliseconds.put((forward - backward) * 1000.0)
}
