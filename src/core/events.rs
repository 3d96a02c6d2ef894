//! What happens in this process, for those who keep a record of it: the event log, the report when memory runs out, counts, the watch. This
//! crate does not know them. Whoever [`subscribe`]s hears of each event at once, on the thread on which it happens.
//!
//! An event without a subscriber costs one load. Publishing neither allocates nor locks.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vramctl_control::protocol::{Reply, Request};
use vramctl_driver::CUdevice;
use vramctl_driver::nccl::NcclResult;
use vramctl_host::PerProcess;
use vramctl_model::{Error, Holder, OverLimit, Report, Stage, Status, Verb};

/// What has happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// An owner's memory on a device has changed.
    Changed(Change, Owner<'a>, Option<CUdevice>, usize, &'a Presence),
    /// An owner has this memory, and may have had it before the subscriber has asked ([`Memory::tell_what_is_there`](crate::memory::Memory)).
    IsThere(Owner<'a>, Option<CUdevice>, usize, &'a Presence),
    /// A request for device memory has failed.
    Failed(FailedRequest),
    /// A request of the calling thread has succeeded, while the retry of a failed one is expected. `is_piece`: the memory may be one of
    /// several pieces for one larger request, as in torch's expandable segments.
    Succeeded {
        /// Bytes asked for.
        bytes: usize,
        /// See above.
        is_piece: bool,
    },
    /// The calling thread begins to free memory, while a retry is expected. The free may have to wait for the GPU.
    FreeBegun,
    /// The calling thread has freed memory.
    FreeEnded,
    /// The calling thread begins to wait for other programs to make room, while a retry is expected.
    WaitBegun,
    /// The calling thread no longer waits for room.
    WaitEnded,
    /// The process has device memory now, managed or not.
    HasMemory,
    /// A pause or resume has begun on this thread.
    Began(Verb),
    /// A stage of a pause or resume has ended on this thread, after this time.
    Stage(Stage, Duration),
    /// A pause or resume has ended on this thread, after this time.
    Ended(Verb, &'a Result<Report, Error>, Duration),
    /// The program's own allocator has returned so many bytes in this time.
    Trimmed(u64, Duration),
    /// The process may have moved to other GPUs: it has just been restored.
    MayHaveMoved,
    /// A call of NCCL's has failed. Without a function, the program has asked NCCL to explain the error.
    NcclFailed(Option<&'static CStr>, NcclResult),
}

/// Who has memory.
#[derive(Debug, Clone, Copy)]
pub enum Owner<'a> {
    /// A tag.
    Tag(&'a Arc<str>),
    /// A library whose memory is left to CUDA.
    Library(&'static str),
}

/// What can happen to an owner's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It was allocated.
    Allocated,
    /// It was freed while it was there.
    Freed,
    /// It was freed while it was paused.
    FreedPaused,
    /// A pause took it.
    Paused,
    /// A resume gave it back.
    Resumed,
}

/// Whether a piece of memory is on its device, and whether a record counts it there. A record may begin at any moment, beside threads that
/// allocate and free: each piece is counted once, and taken off if it was counted.
#[derive(Debug, Default)]
pub struct Presence(AtomicU8);

impl Presence {
    const THERE: u8 = 1;
    const COUNTED: u8 = 2;

    /// The memory is on its device from now on.
    #[inline]
    pub fn come(&self) {
        self.0.fetch_or(Self::THERE, Ordering::SeqCst);
    }

    /// It is gone. Returns whether it was counted.
    #[inline]
    pub fn go(&self) -> bool {
        self.0.swap(0, Ordering::SeqCst) & Self::COUNTED != 0
    }

    /// Returns whether the caller is to count it: it is there, and nobody has counted it.
    pub fn count(&self) -> bool {
        self.0.compare_exchange(Self::THERE, Self::THERE | Self::COUNTED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// A request for device memory that has failed.
#[derive(Debug)]
pub struct FailedRequest {
    /// Bytes.
    pub bytes: u64,
    /// The device; `None`: the calling thread's.
    pub device: Option<CUdevice>,
    /// The tag that the memory would have had; `None` if it was left to CUDA.
    pub tag: Option<Arc<str>>,
    /// The file name of the library that made the request.
    pub library: &'static str,
    /// The address to which its call returns; 0 if that is not known.
    pub caller: usize,
    /// Why it has failed.
    pub cause: Cause,
}

/// Why a request has failed.
#[derive(Debug, Clone)]
pub enum Cause {
    /// The driver refused it, in this function if known.
    Refused(Option<&'static str>),
    /// It would have left less than the memory margin free.
    Margin,
    /// The process has as much as its limit allows.
    Limit(OverLimit),
    /// A resume needs more than is free. The other processes that NVML reports.
    Resume(Vec<Holder>),
}

impl Cause {
    /// Whether a resume has failed.
    pub fn is_resume(&self) -> bool {
        matches!(self, Self::Resume(_))
    }
}

/// Who hears of events. The functions run on the program's threads.
#[derive(Debug)]
pub struct Subscriber {
    /// Hears of an event.
    pub hear: fn(Event<'_>),
    /// Adds what it has counted to a status.
    pub complete: fn(&mut Status),
    /// Answers a request that is about its records. `None` if the request is not.
    pub answer: fn(Request) -> Option<Reply>,
}

/// A forked child keeps the subscriber, whose state is its own matter.
static SUBSCRIBER: AtomicPtr<Subscriber> = AtomicPtr::new(ptr::null_mut());

/// From now on, the subscriber hears of all events, and nobody else.
pub fn subscribe(subscriber: &'static Subscriber) {
    SUBSCRIBER.store(ptr::from_ref(subscriber).cast_mut(), Ordering::Release);
}

#[inline]
fn subscriber() -> Option<&'static Subscriber> {
    // SAFETY: null, or from a shared reference that lives for ever; nobody writes through it.
    unsafe { SUBSCRIBER.load(Ordering::Acquire).as_ref() }
}

/// Passes an event to the subscriber, if there is one.
#[inline]
pub fn publish(event: Event<'_>) {
    if let Some(subscriber) = subscriber() {
        (subscriber.hear)(event);
    }
}

/// Publishes a change of what an owner has on a device.
#[inline]
pub fn change(change: Change, owner: Owner<'_>, device: Option<CUdevice>, bytes: usize, presence: &Presence) {
    publish(Event::Changed(change, owner, device, bytes, presence));
}

/// Publishes memory that an owner has already, for a subscriber that begins to count.
pub fn tell_presence(owner: Owner<'_>, device: Option<CUdevice>, bytes: usize, presence: &Presence) {
    publish(Event::IsThere(owner, device, bytes, presence));
}

/// Runs a pause or resume, and publishes its beginning and its end.
pub fn transition(verb: Verb, work: impl FnOnce() -> Result<Report, Error>) -> Result<Report, Error> {
    let started = Instant::now();
    publish(Event::Began(verb));
    let outcome = work();
    publish(Event::Ended(verb, &outcome, started.elapsed()));
    outcome
}

/// A status with what the subscriber has counted.
pub(crate) fn complete(mut status: Status) -> Status {
    if let Some(subscriber) = subscriber() {
        (subscriber.complete)(&mut status);
    }
    status
}

/// The subscriber's answer to a request.
pub(crate) fn answer(request: Request) -> Result<Reply, Error> {
    let answer = subscriber().and_then(|subscriber| (subscriber.answer)(request));
    answer.ok_or_else(|| Error::Invalid("this process keeps no records".into()))
}

/// How many failed requests may be tried again. A child that is forked in between expects none.
static RETRIES: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

/// For the subscriber: the next successful requests and frees are worth an event, until as many [`retry_over`] as this.
pub fn expect_retry() {
    RETRIES.get().fetch_add(1, Ordering::Relaxed);
}

/// For the subscriber: a retry is no longer expected.
pub fn retry_over() {
    RETRIES.get().fetch_sub(1, Ordering::Relaxed);
}

/// Whether a request has failed that may be tried again.
#[inline]
pub fn is_retry_expected() -> bool {
    RETRIES.existing().is_some_and(|retries| retries.load(Ordering::Relaxed) > 0)
}

/// A request of the calling thread has succeeded, see [`Event::Succeeded`].
#[inline]
pub fn succeeded(bytes: usize, is_piece: bool) {
    if is_retry_expected() {
        publish(Event::Succeeded { bytes, is_piece });
    }
}

/// What the calling thread does, until dropped, which publishes the event of its end, if there is one.
pub struct Doing(Option<Event<'static>>);

/// The calling thread frees memory, see [`Event::FreeBegun`].
#[inline]
pub fn freeing() -> Doing {
    doing(Event::FreeBegun, Event::FreeEnded)
}

/// The calling thread waits for other programs to make room, see [`Event::WaitBegun`].
pub fn waiting_for_room() -> Doing {
    doing(Event::WaitBegun, Event::WaitEnded)
}

#[inline]
fn doing(begun: Event<'static>, ended: Event<'static>) -> Doing {
    let is_expected = is_retry_expected();
    if is_expected {
        publish(begun);
    }
    Doing(is_expected.then_some(ended))
}

impl Drop for Doing {
    #[inline]
    fn drop(&mut self) {
        if let Some(ended) = self.0.take() {
            publish(ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// One thread counts what is there while another one frees it: the record has it once and takes it off again, or never has it.
    #[test]
    fn memory_that_goes_while_a_record_begins_is_taken_off_if_it_was_counted() {
        for _ in 0..1000 {
            let presence = Presence::default();
            presence.come();
            let (counted, also, taken_off) = thread::scope(|scope| {
                let counts = scope.spawn(|| presence.count());
                let frees = scope.spawn(|| presence.go());
                let also = presence.count();
                (counts.join().unwrap(), also, frees.join().unwrap())
            });
            assert_eq!((counted || also, counted && also), (taken_off, false));
            assert!(!presence.count(), "it is gone");
        }
    }
}
