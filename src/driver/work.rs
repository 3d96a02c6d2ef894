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
//! asked, and so it is where the driver has no such events or refuses one.
//!
//! That does not show all work ([`Streams::look_idle`](streams::Streams::look_idle)), so a call that waits confirms it, once all look idle:
//! `cuCtxSynchronize`, which holds nobody up, or during captures, which that would invalidate, the free of a small block, which leaves them valid
//! in the relaxed mode. In a program whose streams are never all idle, that moment does not come. A free of the program's does not wait for it:
//! the driver's own would wait for the work that there is now, and hold up launches meanwhile, in a relaxed capture too, and so does
//! `cuIpcCloseMemHandle` ([`Manner::AsFree`]; H200, driver 580).

use super::{Context, Current, Driver, Event, RelaxedCapture, streams, vmm};
use std::ffi::c_void;
use std::time::{Duration, Instant};
use std::{ptr, thread};
use vramctl_model::{Failure, code};

/// How to wait where the driver marks no end of all work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// As the driver's own free, in a call of the program's that stands for one: launches in the context wait meanwhile.
    AsFree,
    /// Nobody notices it. Until all streams are idle at the same time.
    Unnoticed,
}

/// Waits until all work is over that the context has now, and returns any error that it left behind; `false` if the wait is no longer wanted.
/// A destroyed context has no work left; while it is ending, it may. The context is kept alive while it is asked, and not while it is waited for.
pub fn wait_for_work(context: Context, manner: Manner, is_wanted: impl Fn() -> bool) -> Result<bool, Failure> {
    let _relaxed = RelaxedCapture::enter();
    let waited = until_over(context, manner, is_wanted);
    waited.or_else(|failure| if failure.is_of_gone_context() { Ok(true) } else { Err(failure) })
}

fn until_over(context: Context, manner: Manner, is_wanted: impl Fn() -> bool) -> Result<bool, Failure> {
    /// The longest time between two questions.
    const LONGEST: Duration = Duration::from_micros(500);
    let (begun, mut pause) = (Instant::now(), Duration::from_micros(5));
    let mut work = Awaited::Unknown;
    loop {
        match Current::push(context) {
            Ok(current) => {
                if work.look(&current, manner)? {
                    return Ok(true);
                }
            }
            Err(failure) if failure.is_of_ending_context() => (),
            Err(failure) => return Err(failure),
        }
        if !is_wanted() {
            return Ok(false);
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
        Awaited::Unknown | Awaited::OfStreams { may_be_marked: true } => Ok(Activity::Busy),
        Awaited::OfStreams { may_be_marked: false } => Ok(Activity::Unknown),
    });
    asked.unwrap_or_else(Activity::of_failure)
}

impl Activity {
    /// What a context's failure says. Nothing runs in one that is gone or lost.
    pub fn of_failure(failure: Failure) -> Self {
        if failure.is_of_gone_context() || failure.is_of_earlier_work() {
            Self::Idle
        } else if failure.is_of_ending_context() {
            Self::Busy
        } else {
            Self::Unknown
        }
    }
}

/// How long an event of an idle context may take to happen.
const MOMENT: Duration = Duration::from_micros(50);

/// The work that a context had at a moment.
enum Awaited {
    /// The context has not been looked at.
    Unknown,
    /// It is over when the event has happened.
    Until(Event),
    /// Streams are asked one by one.
    OfStreams {
        /// Only because some are being captured.
        may_be_marked: bool,
    },
}

impl Awaited {
    fn of(current: &Current) -> Result<Self, Failure> {
        let of_streams = |may_be_marked| Ok(Self::OfStreams { may_be_marked });
        // Before the guard is taken: this may wait for a launch of the program's.
        let event = Event::new(current);
        // No capture begins while the event is being recorded.
        let streams = streams::known();
        if streams.has_capture(current.owner()) {
            return of_streams(true);
        }
        match event.and_then(|event| event.record_after_all().map(|()| event)) {
            Ok(event) => Ok(Self::Until(event)),
            // A capture that was not seen to begin.
            Err(failure) if failure.is_capture() => of_streams(true),
            // It has no such events, or refuses one.
            Err(failure) if failure.is_refusal() => of_streams(false),
            Err(failure) => Err(failure),
        }
    }

    /// Whether it is known to be over.
    fn look(&mut self, current: &Current, manner: Manner) -> Result<bool, Failure> {
        match self {
            Self::Unknown => *self = Self::of(current)?,
            // The captures may have ended.
            Self::OfStreams { may_be_marked: true } => {
                if let now @ Self::Until(_) = Self::of(current)? {
                    *self = now;
                }
            }
            Self::Until(_) | Self::OfStreams { .. } => (),
        }
        match self {
            Self::Unknown => Ok(false),
            Self::Until(event) => event.has_happened().or_else(|failure| {
                // The driver marks the work, but does not report the mark.
                *self = Self::OfStreams { may_be_marked: false };
                if failure.is_refusal() { Ok(false) } else { Err(failure) }
            }),
            Self::OfStreams { .. } => {
                let is_over = confirm_if_idle(current)?;
                if !is_over && manner == Manner::AsFree {
                    free_a_block()?;
                }
                Ok(is_over || manner == Manner::AsFree)
            }
        }
    }
}

/// Whether all work is over. `false` if some is to be seen.
fn confirm_if_idle(current: &Current) -> Result<bool, Failure> {
    let streams = streams::known();
    if !streams.look_idle(current.owner())? {
        return Ok(false);
    }
    if streams.has_capture(current.owner()) {
        drop(streams);
        free_a_block()?;
    } else {
        // Under the guard: a capture that began before the call would be invalidated.
        // SAFETY: a context is current; no arguments.
        unsafe { Driver::get()?.cuCtxSynchronize() }?;
    }
    Ok(true)
}

/// Waits for a context as freeing memory does: 80 us on an idle H200. On a full device, a page of host memory is registered and unregistered.
fn free_a_block() -> Result<(), Failure> {
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
