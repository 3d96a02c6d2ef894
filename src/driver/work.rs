//! Waiting for the work of a context without being in the program's way.
//!
//! Of the driver's calls that wait for all work of a context, `cuMemFree`, `cuMemHostUnregister`, `cuMemFreeHost` and `cuModuleLoadData` hold
//! the context's lock meanwhile: launches of all other threads wait until they return (H100, driver 580). They cannot
//! be cancelled either. If the work needs such a launch to end, as between the stages of a pipeline, it never ends. So none of them is called
//! while work may be in flight.
//!
//! An event of the whole context (`cuCtxRecordEvent`, CUDA 12.5) shows when all work that the context had at a moment is over, and holds
//! nobody up. Recording it would invalidate the captures of the context, so that happens only while there are none
//! ([`streams`](super::streams)); asking about it disturbs none. In a context with captures, each stream that is not being captured is
//! asked, and so it is where the driver has no such events or refuses one. Once all look idle, a call that waits confirms it. During captures,
//! freeing a small block does: that leaves them valid in the relaxed mode. Otherwise, `cuCtxSynchronize` does, which holds nobody up.

use super::{Context, Current, Driver, Event, RelaxedCapture, streams, vmm};
use std::ffi::c_void;
use std::time::{Duration, Instant};
use std::{ptr, thread};
use vramctl_model::{Failure, code};

/// Waits until all work is over that the context has now, and returns any error that it left behind; `false` if the wait is no longer wanted.
/// A destroyed context has no work left. `alive` makes a guard that is held while the context is being used, and not while it is waited for.
pub fn wait_for_work<G>(context: Context, alive: impl Fn() -> G, is_wanted: impl Fn() -> bool) -> Result<bool, Failure> {
    let _relaxed = RelaxedCapture::enter();
    let waited = until_over(context, &alive, is_wanted);
    waited.or_else(|failure| if failure.is_of_gone_context() { Ok(true) } else { Err(failure) })
}

fn until_over<G>(context: Context, alive: &impl Fn() -> G, is_wanted: impl Fn() -> bool) -> Result<bool, Failure> {
    /// The longest time between two questions.
    const LONGEST: Duration = Duration::from_micros(500);
    let (begun, mut pause) = (Instant::now(), Duration::from_micros(5));
    let mut work = None;
    loop {
        {
            let _alive = alive();
            let current = Current::push(context)?;
            // A capture may have ended meanwhile.
            let mut now = work.take().filter(|work| !matches!(work, Awaited::OfStreams)).map_or_else(|| Awaited::of(&current), Ok)?;
            match now.is_over(&current) {
                Ok(true) => return Ok(true),
                Ok(false) => (),
                // The driver marks the work, but does not report the mark.
                Err(failure) if failure.is_refusal() && matches!(now, Awaited::Until(_)) => now = Awaited::Unmarked,
                Err(failure) => return Err(failure),
            }
            if !is_wanted() {
                return Ok(false);
            }
            work = Some(now);
        }
        // An event of an idle context takes a moment to happen, and a sleep at least ten times as long.
        if begun.elapsed() < MOMENT {
            thread::yield_now();
        } else {
            thread::sleep(pause);
            pause = LONGEST.min(pause * 2);
        }
    }
}

/// Whether work is in flight, as far as can be seen without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// None.
    Idle,
    /// There is some, or may be: a stream is being captured.
    Busy,
    /// The driver does not say. It may never do.
    Unknown,
}

/// The activity in the current context.
pub fn activity(current: &Current) -> Activity {
    let _relaxed = RelaxedCapture::enter();
    let asked = Awaited::of(current).and_then(|now| match now {
        Awaited::Until(event) => {
            let begun = Instant::now();
            loop {
                let is_over = event.has_happened()?;
                if is_over || begun.elapsed() > MOMENT {
                    return Ok(if is_over { Activity::Idle } else { Activity::Busy });
                }
                thread::yield_now();
            }
        }
        Awaited::OfStreams => Ok(Activity::Busy),
        Awaited::Unmarked => Ok(Activity::Unknown),
    });
    asked.unwrap_or_else(Activity::of_failure)
}

impl Activity {
    /// What a context's failure says. Nothing runs in one that is gone or lost.
    pub fn of_failure(failure: Failure) -> Self {
        if failure.is_of_gone_context() || failure.is_of_earlier_work() { Self::Idle } else { Self::Unknown }
    }
}

/// How long an event of an idle context may take to happen.
const MOMENT: Duration = Duration::from_micros(50);

/// The work that a context had at a moment.
enum Awaited {
    /// It is over when the event has happened.
    Until(Event),
    /// Some streams are being captured; the others are asked.
    OfStreams,
    /// The driver does not mark it, so all streams are asked.
    Unmarked,
}

impl Awaited {
    fn of(current: &Current) -> Result<Self, Failure> {
        // Before the guard is taken: this may wait for a launch of the program's.
        let event = Event::new(current);
        // No capture begins while the event is being recorded.
        let streams = streams::known();
        if streams.has_capture(current.owner()) {
            return Ok(Self::OfStreams);
        }
        match event.and_then(|event| event.record_after_all().map(|()| event)) {
            Ok(event) => Ok(Self::Until(event)),
            // A capture that was not seen to begin.
            Err(failure) if failure.is_capture() => Ok(Self::OfStreams),
            // It has no such events, or refuses one.
            Err(failure) if failure.is_refusal() => Ok(Self::Unmarked),
            Err(failure) => Err(failure),
        }
    }

    /// Whether it is known to be over.
    fn is_over(&self, current: &Current) -> Result<bool, Failure> {
        match self {
            Self::Until(event) => event.has_happened(),
            Self::OfStreams | Self::Unmarked => {
                let streams = streams::known();
                if !streams.look_idle(current.owner())? {
                    return Ok(false);
                }
                if streams.has_capture(current.owner()) {
                    drop(streams);
                    confirm()?;
                } else {
                    // Under the guard: a capture that began before the call would be invalidated.
                    // SAFETY: a context is current; no arguments.
                    unsafe { Driver::get()?.cuCtxSynchronize() }?;
                }
                Ok(true)
            }
        }
    }
}

/// Waits for a context that looks idle, as freeing memory does: 80 us on an idle H200. On a full device, a page of host memory is
/// registered and unregistered.
fn confirm() -> Result<(), Failure> {
    let (driver, mut address) = (Driver::get()?, 0);
    // SAFETY: `address` is writable.
    match unsafe { driver.cuMemAlloc_v2(&raw mut address, PAGE) } {
        // SAFETY: just allocated, and not in use.
        Ok(()) => unsafe { driver.cuMemFree_v2(address) }.inspect_err(|_| vmm::free_later(address, PAGE)),
        Err(failure) if failure.is_of_earlier_work() => Err(failure),
        Err(_) => Page::register()?.unregister(),
    }
}

const PAGE: usize = 4096;

/// A page of host memory, registered with the driver.
struct Page(*mut c_void);

impl Page {
    fn register() -> Result<Self, Failure> {
        // SAFETY: a new private mapping.
        let address = unsafe {
            libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if address == libc::MAP_FAILED {
            return Err(Failure { call: "mmap", code: code::OUT_OF_MEMORY });
        }
        // SAFETY: just mapped, and stays mapped while registered.
        let registered = Driver::get().and_then(|driver| unsafe { driver.cuMemHostRegister_v2(address, PAGE, 0) });
        registered.map(|()| Self(address)).inspect_err(|_| {
            // SAFETY: our own mapping, which the driver did not register.
            unsafe { libc::munmap(address, PAGE) };
        })
    }

    /// After an error the driver may still use the page, so it stays mapped.
    fn unregister(self) -> Result<(), Failure> {
        // SAFETY: registered by `register` and not in use.
        unsafe {
            Driver::get()?.cuMemHostUnregister(self.0)?;
            libc::munmap(self.0, PAGE);
        }
        Ok(())
    }
}
