//! The program's streams, and the captures on them.
//!
//! Waiting for a context must not touch a stream that is being captured: that would invalidate the capture, whatever the thread's mode
//! (driver 580). The driver does not list which streams and captures there are, so the library hears of them when they begin and end. None of
//! these calls is frequent. Streams and captures of a library that hides its calls from ours remain unknown.

use super::{Context, Current, Driver, Event, Green, RelaxedCapture, StreamHandle};
use std::collections::BTreeMap;
use std::mem;
use std::sync::{RwLock, RwLockReadGuard};
use vramctl_host::{PerProcess, Unpoison, exit, stack};
use vramctl_model::{Failure, StatusCode, code};

/// A stream's handle; for the default streams of threads, which share one, also the thread.
type StreamName = (usize, u32);

/// What is known.
#[derive(Debug, Default)]
pub struct Streams {
    /// Those that the program has created.
    created: BTreeMap<StreamName, Created>,
    /// Captures in progress, by the streams that they began on.
    captures: BTreeMap<StreamName, Capture>,
}

#[derive(Debug)]
struct Created {
    stream: StreamHandle,
    /// The context whose memory it uses.
    context: Context,
    green: Option<Green>,
}

#[derive(Debug)]
struct Capture {
    /// `None`: the driver did not say, so it may be any.
    context: Option<Context>,
    /// Whether the driver has said so; until then, no stream of the context must be asked.
    has_begun: bool,
    /// The end of the work that the stream had before. The stream itself can no longer be asked.
    before: Option<Event>,
}

/// Held for reading while somebody asks about streams, and for writing before one ends or a capture begins: the driver crashes if it is asked
/// about a destroyed stream. None of the calls made meanwhile waits for work, or for another call of the program's.
static STREAMS: PerProcess<RwLock<Streams>> = PerProcess::new(RwLock::default);

/// Whether a stream of this process is being captured.
pub fn is_any_captured() -> bool {
    STREAMS.existing().is_some_and(|streams| !streams.read().unpoisoned().captures.is_empty())
}

/// What is known, until the guard is dropped: no known stream ends meanwhile, and no capture begins.
pub fn known() -> RwLockReadGuard<'static, Streams> {
    STREAMS.get().read().unpoisoned()
}

impl Streams {
    /// Whether a stream of the context is being captured.
    pub fn has_capture(&self, context: Context) -> bool {
        self.captures_in(context).next().is_some()
    }

    fn captures_in(&self, context: Context) -> impl Iterator<Item = &Capture> {
        self.captures.values().filter(move |capture| capture.context.is_none_or(|of| of == context))
    }

    /// Whether no work is to be seen in a context some of whose streams are being captured. `false` says that there is some; `true` does
    /// not say that there is none: the default streams of threads cannot be asked, nor the legacy stream while a blocking stream is being
    /// captured. The context must be current.
    pub fn look_idle(&self, context: Context) -> Result<bool, Failure> {
        for capture in self.captures_in(context) {
            let is_over = capture.before.as_ref().map_or(Ok(true), Event::has_happened);
            if !capture.has_begun || !is_over? {
                return Ok(false);
            }
        }
        let created = self.created.values().filter(|created| created.context == context).map(|created| created.stream);
        for stream in created.chain([StreamHandle::LEGACY]).filter(|stream| !stream.is_capturing()) {
            // SAFETY: a stream of the program's that has not been destroyed, as this guard's owner ensures, or the legacy one.
            match unsafe { Driver::get()?.cuStreamQuery(stream.raw()) } {
                Err(Failure { code: code::NOT_READY, .. }) => return Ok(false),
                answer => answer?,
            }
        }
        Ok(true)
    }
}

fn name_of(stream: StreamHandle) -> StreamName {
    (stream.raw() as usize, if stream.is_default() { stack::thread_id() } else { 0 })
}

/// The context that memory used by a stream belongs to.
fn owner_of(stream: StreamHandle) -> Option<Context> {
    Some(Current::push_of_stream(stream).ok()?.owner())
}

/// Notes a stream that the program has created.
pub fn created(stream: StreamHandle) {
    if let Some(context) = owner_of(stream) {
        let created = Created { stream, context, green: stream.green() };
        STREAMS.get().write().unpoisoned().created.insert(name_of(stream), created);
    }
}

/// Forgets a stream that the program is about to destroy, and its capture.
pub fn ends(stream: StreamHandle) {
    if let Some(streams) = STREAMS.existing() {
        let mut streams = streams.write().unpoisoned();
        let gone = (streams.created.remove(&name_of(stream)), streams.captures.remove(&name_of(stream)));
        drop(streams);
        // Dropping the event calls the driver.
        drop(gone);
    }
}

/// Forgets the streams of a green context that the program is about to destroy.
pub fn green_ends(green: Green) {
    if let Some(streams) = STREAMS.existing() {
        streams.write().unpoisoned().created.retain(|_, created| created.green != Some(green));
    }
}

/// Forgets the streams of a destroyed context.
pub fn forget_context(context: Context) {
    if let Some(streams) = STREAMS.existing() {
        let mut streams = streams.write().unpoisoned();
        streams.created.retain(|_, created| created.context != context);
        let captures = mem::take(&mut streams.captures);
        let (ended, others): (BTreeMap<_, _>, _) = captures.into_iter().partition(|(_, capture)| capture.context == Some(context));
        streams.captures = others;
        drop(streams);
        drop(ended);
    }
}

/// Runs a call of the program's that begins a capture, while nobody [asks](known) about its context's streams. The call may wait for another
/// call of the program's in the context, so not under the guard.
pub fn begin_capture(stream: StreamHandle, begin: impl FnOnce() -> StatusCode) -> StatusCode {
    // No capture can begin on the legacy stream, and asking about it could invalidate another.
    if stream.is_legacy() || exit::is_ending() || stream.is_capturing() {
        return begin();
    }
    let current = Current::push_of_stream(stream).ok();
    let before = current.as_ref().filter(|_| is_busy(stream)).and_then(|current| Event::after(current, stream).ok());
    let context = current.as_ref().map(Current::owner);
    drop(current);
    let name = name_of(stream);
    let stale = STREAMS.get().write().unpoisoned().captures.insert(name, Capture { context, has_begun: false, before });
    drop(stale);
    let answer = begin();
    let mut streams = STREAMS.get().write().unpoisoned();
    let unused = if answer == code::SUCCESS {
        streams.captures.entry(name).and_modify(|capture| capture.has_begun = true);
        None
    } else {
        streams.captures.remove(&name)
    };
    drop(streams);
    drop(unused);
    answer
}

/// Whether a stream that is not being captured has work.
fn is_busy(stream: StreamHandle) -> bool {
    let _relaxed = RelaxedCapture::enter();
    // SAFETY: a stream that the program is about to use.
    Driver::get().and_then(|driver| unsafe { driver.cuStreamQuery(stream.raw()) }).is_err()
}

/// Runs a call of the program's that may end a capture. It goes on if the call is on the wrong thread.
pub fn end_capture(stream: StreamHandle, end: impl FnOnce() -> StatusCode) -> StatusCode {
    let answer = end();
    if !exit::is_ending()
        && !stream.is_capturing()
        && let Some(streams) = STREAMS.existing()
    {
        let ended = streams.write().unpoisoned().captures.remove(&name_of(stream));
        drop(ended);
    }
    answer
}
