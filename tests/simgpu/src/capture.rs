//! Stream capture: operations that go into a graph instead of running, and calls that are illegal during a capture.
//!
//! The table in [`crate::exports`] marks the potentially unsafe calls (`CaptureUnsafe`). [`rules`] defines what an illegal
//! call returns and whether it invalidates the capture.

use crate::abi::{Handle, Out};
use crate::codes::{
    CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_WRONG_THREAD, Code, ILLEGAL_STATE, INVALID_VALUE, Outcome,
};
use crate::context::Context;
use crate::copy::Work;
use crate::driver::{self, State, state};
use crate::stream::{self, Stream, Streams};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

/// How a capture responds to illegal calls.
pub mod rules {
    use crate::codes::{CAPTURE_IMPLICIT, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNSUPPORTED, Code};

    /// What an illegal call returns, and whether it invalidates the capture.
    #[derive(Clone, Copy, Debug)]
    pub struct Rule {
        /// The code that the call returns.
        pub code: Code,
        /// Whether the capture is invalidated.
        pub invalidates: bool,
    }

    /// A potentially unsafe call on a thread whose mode forbids it.
    pub const UNSAFE_CALL: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Synchronising a context that has a capturing stream.
    pub const CONTEXT_WAIT: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Synchronising or querying a capturing stream, and work on it that cannot be a graph node.
    pub const STREAM_WAIT: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Work on the legacy stream, which would wait for a capturing blocking stream.
    pub const LEGACY_WORK: Rule = Rule { code: CAPTURE_IMPLICIT, invalidates: true };
    /// A capturing stream waits for an event that was recorded outside the capture.
    pub const OUTSIDE_EVENT: Rule = Rule { code: CAPTURE_ISOLATION, invalidates: true };
    /// A capturing stream waits for an event of another capture.
    pub const OTHER_CAPTURE: Rule = Rule { code: CAPTURE_MERGE, invalidates: true };
}

/// `CUstreamCaptureMode` of a capture or a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    fn of(number: u32) -> Outcome<Self> {
        Ok(match number {
            0 => Self::Global,
            1 => Self::ThreadLocal,
            2 => Self::Relaxed,
            _ => return Err(INVALID_VALUE),
        })
    }
}

/// The capture and stream in which an event was recorded.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    capture: u64,
    stream: Handle,
}

#[derive(Debug)]
struct Capture {
    mode: Mode,
    /// The thread that began it.
    thread: u64,
    context: Handle,
    /// The stream on which it began and must end.
    origin: Handle,
    /// The streams that joined through an event, and whether the origin has waited for all of their work.
    joined: HashMap<Handle, bool>,
    invalid: bool,
    nodes: Vec<Work>,
}

/// The captures in progress.
#[derive(Debug, Default)]
pub struct Captures {
    running: HashMap<u64, Capture>,
    by_stream: HashMap<Handle, u64>,
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Captures {
    /// Whether a stream is being captured.
    pub fn is_capturing(&self, stream: Handle) -> bool {
        self.by_stream.contains_key(&stream)
    }

    /// Whether the capture in which an event was recorded is still in progress.
    pub fn is_running(&self, event: Recorded) -> bool {
        self.running.contains_key(&event.capture)
    }

    fn of(&mut self, stream: Handle) -> Option<(u64, &mut Capture)> {
        let id = *self.by_stream.get(&stream)?;
        Some((id, self.running.get_mut(&id)?))
    }

    /// Applies a rule if the stream is being captured.
    fn apply(&mut self, stream: Handle, rule: rules::Rule) -> Outcome {
        match self.of(stream) {
            None => Ok(()),
            Some((_, capture)) if capture.invalid => Err(CAPTURE_INVALIDATED),
            Some((_, capture)) => Err(refusal(capture, rule)),
        }
    }

    /// Rejects a call that waits for a capturing stream or cannot be a graph node.
    pub fn refuse(&mut self, stream: Handle) -> Outcome {
        self.apply(stream, rules::STREAM_WAIT)
    }

    /// Rejects an event from outside the capture on a capturing stream.
    pub fn refuse_outside_event(&mut self, stream: Handle) -> Outcome {
        self.apply(stream, rules::OUTSIDE_EVENT)
    }

    /// Rejects work on the legacy stream while a blocking stream of the context is being captured.
    pub fn refuse_legacy(&mut self, streams: &Streams, context: Handle) -> Outcome {
        let by_stream = &self.by_stream;
        let mut refused = None;
        for (id, capture) in &mut self.running {
            if capture.context == context && streams.any_blocking(context, |stream| by_stream.get(&stream) == Some(id)) {
                refused = Some(refusal(capture, rules::LEGACY_WORK));
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Rejects a potentially unsafe call as documented for `cuThreadExchangeStreamCaptureMode`. In global mode: if the
    /// thread has a capture that is not relaxed, or any other thread has a global one. In thread-local mode: only in the
    /// first case. In relaxed mode: never.
    pub fn refuse_unsafe_call(&mut self) -> Outcome {
        let mode = MODE.get();
        if mode == Mode::Relaxed {
            return Ok(());
        }
        let thread = stream::thread();
        let mut refused = None;
        for capture in self.running.values_mut() {
            let own = capture.thread == thread && capture.mode != Mode::Relaxed;
            if own || (mode == Mode::Global && capture.mode == Mode::Global) {
                refused = Some(refusal(capture, rules::UNSAFE_CALL));
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Rejects synchronising or querying a stream: always if it is being captured, for the legacy stream also if a blocking
    /// stream is, and for any other stream as a potentially unsafe call.
    pub fn refuse_wait(&mut self, streams: &Streams, stream: &Stream) -> Outcome {
        self.refuse(stream.handle)?;
        if stream.is_legacy() {
            self.refuse_legacy(streams, stream.context.handle)?;
        }
        self.refuse_unsafe_call()
    }

    /// Adds work to the stream's capture as a graph node.
    pub fn add(&mut self, stream: &Stream, work: Work) -> Outcome {
        let (context, stream) = (&stream.context, stream.handle);
        let Some((_, capture)) = self.of(stream) else { return Err(ILLEGAL_STATE) };
        if capture.invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        if let Some(waited_for) = capture.joined.get_mut(&stream) {
            *waited_for = false;
        }
        match work {
            Work::Marker => {}
            // A graph launched into a capture becomes a child graph; here its nodes are inlined.
            Work::Graph { nodes } => capture.nodes.extend(nodes.iter().cloned()),
            node if context.handle == capture.context && !matches!(node, Work::Fill { .. }) => capture.nodes.push(node),
            // The target of a memset is checked when the graph is instantiated, in whichever context.
            node => capture.nodes.push(Work::Within { context: Arc::clone(context), work: Arc::new(node) }),
        }
        Ok(())
    }

    /// Records an event; returns its place in the capture if the stream is being captured.
    pub fn record(&mut self, stream: Handle) -> Outcome<Option<Recorded>> {
        match self.of(stream) {
            None => Ok(None),
            Some((_, capture)) if capture.invalid => Err(CAPTURE_INVALIDATED),
            Some((id, _)) => Ok(Some(Recorded { capture: id, stream })),
        }
    }

    /// Makes a stream wait for an event of a capture: the stream joins the capture, or the origin rejoins another stream's
    /// work.
    pub fn join(&mut self, stream: Handle, event: Recorded) -> Outcome {
        if !self.running.contains_key(&event.capture) {
            return Err(INVALID_VALUE);
        }
        match self.by_stream.get(&stream) {
            Some(&own) if own != event.capture => return self.apply(stream, rules::OTHER_CAPTURE),
            Some(_) => {}
            None => {
                self.by_stream.insert(stream, event.capture);
                if let Some(capture) = self.running.get_mut(&event.capture) {
                    capture.joined.insert(stream, false);
                }
            }
        }
        if let Some(capture) = self.running.get_mut(&event.capture) {
            if capture.invalid {
                return Err(CAPTURE_INVALIDATED);
            }
            if event.stream != stream
                && let Some(waited_for) = capture.joined.get_mut(&event.stream)
            {
                *waited_for = true;
            }
        }
        Ok(())
    }

    fn end(&mut self, id: u64) -> Option<Capture> {
        self.by_stream.retain(|_, capture| *capture != id);
        self.running.remove(&id)
    }

    /// Ends the capture of a destroyed stream.
    pub fn forget_stream(&mut self, stream: Handle) {
        if let Some((id, capture)) = self.of(stream) {
            if capture.origin == stream {
                self.end(id);
            } else {
                capture.invalid = true;
                self.by_stream.remove(&stream);
            }
        }
    }

    /// Ends the captures of a destroyed context.
    pub fn forget_context(&mut self, context: Handle) {
        let ended: Vec<u64> = self.running.iter().filter(|(_, capture)| capture.context == context).map(|(&id, _)| id).collect();
        for id in ended {
            self.end(id);
        }
    }
}

fn refusal(capture: &mut Capture, rule: rules::Rule) -> Code {
    capture.invalid |= rule.invalidates;
    rule.code
}

/// Rejects synchronising a context with a capture in progress.
pub fn refuse_context_wait(context: &Context) -> Outcome {
    let mut refused = None;
    for capture in state().captures.running.values_mut() {
        if capture.context == context.handle {
            refused = Some(refusal(capture, rules::CONTEXT_WAIT));
        }
    }
    refused.map_or(Ok(()), Err)
}

/// `cuStreamBeginCapture`: not allowed on the legacy stream.
pub fn begin(handle: Handle, mode: u32) -> Outcome {
    let mode = Mode::of(mode)?;
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    if stream.is_legacy() {
        return Err(crate::codes::CAPTURE_UNSUPPORTED);
    }
    let captures = &mut state.captures;
    if captures.is_capturing(stream.handle) {
        return Err(ILLEGAL_STATE);
    }
    let id = driver::new_handle();
    captures.by_stream.insert(stream.handle, id);
    captures.running.insert(
        id,
        Capture {
            mode,
            thread: stream::thread(),
            context: stream.context.handle,
            origin: stream.handle,
            joined: HashMap::new(),
            invalid: false,
            nodes: Vec::new(),
        },
    );
    Ok(())
}

/// `cuStreamEndCapture`: returns a null graph if the capture was invalidated.
pub fn end(handle: Handle, graph: Out<Handle>) -> Outcome {
    graph.required()?;
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    let State { captures, graphs, .. } = &mut *state;
    let (id, capture) = captures.of(stream.handle).ok_or(ILLEGAL_STATE)?;
    if capture.mode != Mode::Relaxed && capture.thread != stream::thread() {
        return Err(CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.handle {
        capture.invalid = true;
        return Err(CAPTURE_UNMATCHED);
    }
    let capture = captures.end(id).ok_or(ILLEGAL_STATE)?;
    graph.put(0)?;
    if capture.invalid {
        return Err(CAPTURE_INVALIDATED);
    }
    if capture.joined.values().any(|&waited_for| !waited_for) {
        return Err(CAPTURE_UNJOINED);
    }
    graph.put(graphs.add(capture.nodes))
}

/// The stream's `CUstreamCaptureStatus` and the capture's id.
fn status(handle: Handle) -> Outcome<(u32, u64)> {
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    if stream.is_legacy() {
        let State { captures, streams, .. } = &mut *state;
        let captured = |stream| captures.is_capturing(stream);
        // "If this is called on the legacy stream while a blocking stream in the same context is capturing, it will return
        // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT". The capture survives.
        if streams.any_blocking(stream.context.handle, captured) {
            return Err(crate::codes::CAPTURE_IMPLICIT);
        }
    }
    Ok(match state.captures.of(stream.handle) {
        None => (0, 0),
        Some((id, capture)) if capture.invalid => (2, id),
        Some((id, _)) => (1, id),
    })
}

/// `cuStreamIsCapturing`.
pub fn is_capturing(handle: Handle, answer: Out<u32>) -> Outcome {
    answer.put(status(handle)?.0)
}

/// `cuStreamGetCaptureInfo`, without the graph under construction and its nodes.
pub fn info(
    handle: Handle,
    answer: Out<u32>,
    id: Out<u64>,
    graph: Out<Handle>,
    dependencies: Out<*const Handle>,
    count: Out<usize>,
) -> Outcome {
    let (status, capture) = status(handle)?;
    answer.put(status)?;
    id.put_if_given(capture);
    graph.put_if_given(0);
    dependencies.put_if_given(std::ptr::null());
    count.put_if_given(0);
    Ok(())
}

/// `cuThreadExchangeStreamCaptureMode`.
pub fn exchange_mode(mode: Out<u32>) -> Outcome {
    let new = Mode::of(mode.get()?)?;
    mode.put(MODE.replace(new) as u32)
}
