//! The driver's per-process state, and the checks before every call.

use crate::capture::Captures;
use crate::codes::{
    Code, DEINITIALIZED, INVALID_DEVICE, NO_DEVICE, NOT_FOUND, NOT_INITIALIZED, NOT_PERMITTED, NOT_SUPPORTED, OPERATING_SYSTEM, Outcome,
    UNKNOWN,
};
use crate::context::{self, Contexts};
use crate::exports::{self, Function, Hazard, Needs};
use crate::faults;
use crate::graph::Graphs;
use crate::host::HostMemory;
use crate::kernel::Modules;
use crate::machine::{Hand, Machine};
use crate::nodes::Opener;
use crate::pool::Pools;
use crate::restore_thread;
use crate::settings::{self, Settings};
use crate::sharing::Opened;
use crate::stream::{self, Streams};
use crate::vmm::Space;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::Duration;

/// All of the driver's per-process state, under one lock, which keeps the rules simple and the answers consistent. Nothing
/// blocks while holding it: copies, delays and synchronisation happen outside.
#[derive(Debug, Default)]
pub struct State {
    /// Addresses, physical memory and mappings.
    pub space: Space,
    /// Host memory known to the driver.
    pub host: HostMemory,
    /// Contexts.
    pub contexts: Contexts,
    /// Streams and events.
    pub streams: Streams,
    /// Stream captures in progress.
    pub captures: Captures,
    /// Graphs and executable graphs.
    pub graphs: Graphs,
    /// Memory pools.
    pub pools: Pools,
    /// Modules and functions.
    pub modules: Modules,
    /// Plain memory of other processes.
    pub opened: Opened,
}

static STATE: OnceLock<Mutex<State>> = OnceLock::new();
/// Whether `cuInit` has been called.
static INITIALISED: AtomicBool = AtomicBool::new(false);
/// Whether this process is a child of one that had called it. Set in the child, so that no call has to ask for the process's id:
/// that would take longer than a call of the real driver.
static FORKED: AtomicBool = AtomicBool::new(false);
/// Whether the process is exiting and has reached the exit handler that `cuInit` registered.
static ENDED: AtomicBool = AtomicBool::new(false);
/// The actions of other processes on this one.
static HAND: OnceLock<Option<Hand>> = OnceLock::new();
/// The thread that runs the exit handlers.
static ENDER: AtomicI32 = AtomicI32::new(0);

/// Locks the state.
pub fn state() -> MutexGuard<'static, State> {
    STATE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The simulated machine, opened at first use. A failure to open it is explained on stderr, once.
pub fn machine() -> Outcome<&'static Machine> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    MACHINE
        .get_or_init(|| {
            let settings = settings::get();
            Machine::open(settings)
                .inspect_err(|error| {
                    eprintln!("simgpu: cannot open the machine {:?}: {error}", settings.directory);
                })
                .ok()
        })
        .as_ref()
        .ok_or(OPERATING_SYSTEM)
}

/// This process's settings.
pub fn settings() -> &'static Settings {
    settings::get()
}

/// Returns a handle that no other object of this process has. Handles look like addresses in a range that programs do not
/// use, so that dereferencing one fails at once.
pub fn new_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x5147_0000_0000_0100);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Checks a device ordinal.
pub fn device(ordinal: i32) -> Outcome<usize> {
    let known = machine()?.visible();
    usize::try_from(ordinal).ok().filter(|&device| device < known).ok_or(INVALID_DEVICE)
}

/// `cuInit`.
pub fn init(flags: u32) -> Outcome {
    static REGISTERED: Once = Once::new();
    if flags != 0 {
        return Err(crate::codes::INVALID_VALUE);
    }
    let machine = machine()?;
    if machine.visible() == 0 {
        return Err(NO_DEVICE);
    }
    if !machine.join() {
        return Err(OPERATING_SYSTEM);
    }
    // Exit handlers run in reverse order of registration. Those that the program registers after this still have a driver;
    // earlier ones, and destructors, do not.
    REGISTERED.call_once(|| {
        // SAFETY: the handlers are functions of this library, which is never unloaded.
        unsafe {
            libc::atexit(end);
            libc::pthread_atfork(None, None, Some(forked));
        }
    });
    INITIALISED.store(true, Ordering::Release);
    if HAND.set(machine.hand()).is_ok() && settings().restore_thread {
        restore_thread::listen();
        restore_thread::start(machine, Opener::Cuda);
    }
    Ok(())
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Release);
}

extern "C" fn end() {
    ENDER.store(thread(), Ordering::Relaxed);
    ENDED.store(true, Ordering::Release);
    // A real driver would free memory that the call is using, and crash now and then. Here it crashes always.
    if faults::is_delaying_elsewhere() {
        eprintln!("simgpu: the driver shut down while another thread was in a delayed call");
        std::process::abort();
    }
    std::thread::sleep(Duration::from_millis(settings().end_ms.unwrap_or(0)));
}

/// A call after shutdown fails, as it does on the real driver if nothing worse happens. With `SIMGPU_END_MS` it aborts the
/// process, except on the exiting thread, which may find out that the driver has shut down.
fn call_after_the_end(function: &Function) -> Code {
    if settings().end_ms.is_some() && ENDER.load(Ordering::Relaxed) != thread() {
        eprintln!("simgpu: {} was called after the driver shut down", function.name);
        std::process::abort();
    }
    DEINITIALIZED
}

fn thread() -> i32 {
    // SAFETY: touches no memory.
    unsafe { libc::gettid() }
}

/// Whether `cuInit` has been called in this process.
pub fn is_initialised() -> bool {
    INITIALISED.load(Ordering::Acquire) && !FORKED.load(Ordering::Acquire)
}

/// Runs one external call: counts it, applies injected faults, checks the function's requirements, and converts the outcome
/// to a C result code. Panics do not reach the caller.
pub fn call(index: usize, function: &Function, body: impl FnOnce() -> Outcome) -> Code {
    // CUDA does not survive fork: the child of an initialised process has inherited the state but not the driver behind it.
    // Takes no lock, because another thread of the parent may have held it at the fork.
    if FORKED.load(Ordering::Acquire) && function.needs != Needs::Nothing {
        return NOT_INITIALIZED;
    }
    let fault = faults::use_of(index);
    // An older driver does not have the function at all.
    if exports::since(index) > settings().cuda {
        return NOT_FOUND;
    }
    // After shutdown even names of codes are unavailable. NVML is another library.
    if ENDED.load(Ordering::Acquire) && function.name.starts_with("cu") {
        return call_after_the_end(function);
    }
    let hand = HAND.get().copied().flatten();
    let _inside = match function {
        function if looks_at_the_device(function) => hand.and_then(Hand::look),
        function if waits_while_locked(function) => hand.map(Hand::enter),
        _ => None,
    };
    faults::delay(index);
    let (before, after) = (faults::signal_before(fault), faults::signal_after(fault));
    match fault {
        Some(code) if before.or(after).is_none() => return code,
        _ => faults::raise(before),
    }
    let checked = AssertUnwindSafe(|| {
        if takes_the_contexts_lock(function) {
            context::wait_for_lock();
        }
        admit(function)?;
        body()
    });
    let done = catch_unwind(checked);
    faults::raise(after);
    match done {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

/// Whether a locked process waits in this function. Host functions may finish even then; their calls are refused anyway. Of the real driver's
/// functions, these have been observed to pass (580).
fn waits_while_locked(function: &Function) -> bool {
    const PASS: &[&str] = &["cuCheckpoint", "cuStreamIsCapturing", "cuPointerGetAttribute", "cuDeviceGetAttribute", "cuCtxGetCurrent"];
    function.needs != Needs::Nothing && !PASS.iter().any(|name| function.name.starts_with(name)) && !stream::in_host_function()
}

/// Functions that look at what the device has written to the host's memory. A locked process does not wait in them, and in one that is
/// checkpointed that memory is gone (580).
fn looks_at_the_device(function: &Function) -> bool {
    const LOOK: &[&str] =
        &["cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime", "cuStreamQuery", "cuStreamSynchronize", "cuCtxSynchronize"];
    LOOK.iter().any(|name| function.name.starts_with(name))
}

/// Whether a function is held up by another thread's call that waits for work with the context's lock: launches, copies and recording an
/// event are, queries are not. Of the others, none has been observed to pass.
fn takes_the_contexts_lock(function: &Function) -> bool {
    const PASS: &[&str] = &["cuCtxSynchronize", "cuCtxRecordEvent", "cuMemGetInfo", "cuMemGetAddressRange", "cuStreamGet", "cuCtxGet"];
    function.needs == Needs::Context && !PASS.iter().any(|name| function.name.starts_with(name)) && !stream::in_host_function()
}

/// Checks a function's requirements.
fn admit(function: &Function) -> Outcome {
    if matches!(function.needs, Needs::Nothing | Needs::Start) {
        return Ok(());
    }
    // "The callback must not make any CUDA API call"; the driver returns this code.
    if stream::in_host_function() {
        return Err(NOT_PERMITTED);
    }
    if !is_initialised() {
        return Err(NOT_INITIALIZED);
    }
    match function.needs {
        Needs::Nothing | Needs::Start | Needs::Init => {}
        Needs::Vmm => {
            if settings().no_vmm {
                return Err(NOT_SUPPORTED);
            }
        }
        Needs::Healthy => context::healthy()?,
        Needs::Context => {
            context::current()?;
        }
    }
    if function.hazard == Hazard::CaptureUnsafe {
        state().captures.refuse_unsafe_call()?;
    }
    Ok(())
}
