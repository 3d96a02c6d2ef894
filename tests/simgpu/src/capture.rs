//! Stream capture: operations that go into a graph instead of running, and which calls a running
//! capture forbids.
//!
//! Which calls count as potentially unsafe is said beside each function in the table of
//! [`crate::exports`] (`CaptureUnsafe`); what a refused call answers, and whether it ends the
//! capture, is the table [`rules`].

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

/// What a capture makes of calls that do not go with it.
pub mod rules {
    use crate::codes::{CAPTURE_IMPLICIT, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNSUPPORTED, Code};

    /// The answer to a call, and what becomes of the capture.
    #[derive(Clone, Copy, Debug)]
    pub struct Rule {
        /// The code that the call answers.
        pub code: Code,
        /// Whether the capture is invalid from then on.
        pub invalidates: bool,
    }

    /// A potentially unsafe call, by a thread whose mode does not allow it.
    pub const UNSAFE_CALL: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Waiting for a context in which a stream is being captured.
    pub const CONTEXT_WAIT: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Waiting for or asking a stream that is being captured, and work in it that cannot be a node.
    pub const STREAM_WAIT: Rule = Rule { code: CAPTURE_UNSUPPORTED, invalidates: true };
    /// Work in the legacy stream, which would wait for a blocking stream that is being captured.
    pub const LEGACY_WORK: Rule = Rule { code: CAPTURE_IMPLICIT, invalidates: true };
    /// A captured stream is to wait for an event outside of the capture.
    pub const OUTSIDE_EVENT: Rule = Rule { code: CAPTURE_ISOLATION, invalidates: true };
    /// A captured stream is to wait for an event of another capture.
    pub const OTHER_CAPTURE: Rule = Rule { code: CAPTURE_MERGE, invalidates: true };
}

/// `CUstreamCaptureMode`, of a capture and of a thread.
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

/// An event's place in a capture.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    capture: u64,
    stream: Handle,
}

#[derive(Debug)]
struct Capture {
    mode: Mode,
    /// Who began it.
    thread: u64,
    context: Handle,
    /// The stream in which it began, and must end.
    origin: Handle,
    /// The streams that joined by an event, and whether the origin has waited for all of theirs.
    joined: HashMap<Handle, bool>,
    invalid: bool,
    nodes: Vec<Work>,
}

/// The captures that are running.
#[derive(Debug, Default)]
pub struct Captures {
    running: HashMap<u64, Capture>,
    by_stream: HashMap<Handle, u64>,
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Captures {
    /// Whether a stream's work goes into a graph.
    pub fn is_capturing(&self, stream: Handle) -> bool {
        self.by_stream.contains_key(&stream)
    }

    /// Whether the capture that an event was recorded in is still running.
    pub fn is_running(&self, event: Recorded) -> bool {
        self.running.contains_key(&event.capture)
    }

    fn of(&mut self, stream: Handle) -> Option<(u64, &mut Capture)> {
        let id = *self.by_stream.get(&stream)?;
        Some((id, self.running.get_mut(&id)?))
    }

    /// Refuses what a rule forbids while the stream is being captured.
    fn apply(&mut self, stream: Handle, rule: rules::Rule) -> Outcome {
        match self.of(stream) {
            None => Ok(()),
            Some((_, capture)) if capture.invalid => Err(CAPTURE_INVALIDATED),
            Some((_, capture)) => Err(refusal(capture, rule)),
        }
    }

    /// Refuses a call that waits for the stream, or cannot be a node, while it is being captured.
    pub fn refuse(&mut self, stream: Handle) -> Outcome {
        self.apply(stream, rules::STREAM_WAIT)
    }

    /// Refuses an event from outside in a stream that is being captured.
    pub fn refuse_outside_event(&mut self, stream: Handle) -> Outcome {
        self.apply(stream, rules::OUTSIDE_EVENT)
    }

    /// Refuses work in the legacy stream while a blocking stream of the context is captured.
    pub fn refuse_legacy(&mut self, streams: &Streams, context: Handle) -> Outcome {
        let by_stream = &self.by_stream;
        let mut refused = None;
        for (id, capture) in &mut self.running {
            let of_this = |stream: Handle| by_stream.get(&stream) == Some(id);
            if capture.context == context && streams.any_blocking(context, of_this) {
                refused = Some(refusal(capture, rules::LEGACY_WORK));
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Refuses a potentially unsafe call as `cuThreadExchangeStreamCaptureMode` documents: with mode
    /// global, while the thread has a capture that is not relaxed or any other thread has a global
    /// one; with mode thread-local, only the former; with mode relaxed, never.
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

    /// Refuses to wait for a stream or to ask it: always while it is being captured, the legacy
    /// stream while a blocking one is, and any other as a potentially unsafe call.
    pub fn refuse_wait(&mut self, streams: &Streams, stream: &Stream) -> Outcome {
        self.refuse(stream.handle)?;
        if stream.is_legacy() {
            self.refuse_legacy(streams, stream.context.handle)?;
        }
        self.refuse_unsafe_call()
    }

    /// Makes work a node of the stream's capture.
    pub fn add(&mut self, stream: Handle, work: Work) -> Outcome {
        let Some((_, capture)) = self.of(stream) else { return Err(ILLEGAL_STATE) };
        if capture.invalid {
            return Err(CAPTURE_INVALIDATED);
        }
        if let Some(waited_for) = capture.joined.get_mut(&stream) {
            *waited_for = false;
        }
        match work {
            Work::Marker => {}
            // A graph launched into a capture becomes a child, whose nodes run in its place.
            Work::Graph { nodes } => capture.nodes.extend(nodes.iter().cloned()),
            node => capture.nodes.push(node),
        }
        Ok(())
    }

    /// An event is recorded: its place, where the stream is being captured.
    pub fn record(&mut self, stream: Handle) -> Outcome<Option<Recorded>> {
        match self.of(stream) {
            None => Ok(None),
            Some((_, capture)) if capture.invalid => Err(CAPTURE_INVALIDATED),
            Some((id, _)) => Ok(Some(Recorded { capture: id, stream })),
        }
    }

    /// A stream waits for an event of a capture: it becomes part of it, or its origin takes another
    /// stream's work in again.
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

    /// A stream is destroyed: its capture ends with it.
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

    /// A context ends, and the captures in it.
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

/// Refuses to wait for a context in which anything is being captured.
pub fn refuse_context_wait(context: &Context) -> Outcome {
    let mut refused = None;
    for capture in state().captures.running.values_mut() {
        if capture.context == context.handle {
            refused = Some(refusal(capture, rules::CONTEXT_WAIT));
        }
    }
    refused.map_or(Ok(()), Err)
}

/// `cuStreamBeginCapture`: not in the legacy stream.
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

/// `cuStreamEndCapture`: the graph, or null where the capture came to nothing.
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

/// `CUstreamCaptureStatus` and the capture's id.
fn status(handle: Handle) -> Outcome<(u32, u64)> {
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    if stream.is_legacy() {
        let State { captures, streams, .. } = &mut *state;
        let captured = |stream| captures.is_capturing(stream);
        // "If this is called on the legacy stream while a blocking stream in the same context is
        // capturing, it will return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", and harm nothing.
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

/// `cuStreamGetCaptureInfo`. The graph under construction and its nodes are not shown.
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
