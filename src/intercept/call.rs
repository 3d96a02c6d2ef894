//! How a hooked call is answered.

use crate::runtimes::Runtime;
use crate::table::{Effect, Flavour};
use crate::{copies, reentrancy, room};
use std::ffi::c_void;
use std::mem;
use vramctl_core::contexts::note_current;
use vramctl_core::memory::Memory;
use vramctl_driver::{Current, StreamHandle};
use vramctl_host::guarded;
use vramctl_model::{StatusCode, code};

/// The functions through which a call came.
#[derive(Clone, Copy)]
pub enum Api {
    Driver,
    Runtime(&'static Runtime),
}

/// What is known about a call before its arguments.
#[derive(Clone, Copy)]
pub struct Origin {
    pub api: Api,
    pub effect: Effect,
    pub flavour: Flavour,
    /// The return address; null if nobody needs it.
    pub caller: *const c_void,
}

/// A call of the program's, as its handler sees it.
pub struct Call<'a> {
    origin: Origin,
    real: &'a mut dyn FnMut() -> StatusCode,
    was_forwarded: bool,
}

impl<'a> Call<'a> {
    /// `real` calls the real function with the program's arguments.
    pub fn new(origin: Origin, real: &'a mut dyn FnMut() -> StatusCode) -> Self {
        Self { origin, real, was_forwarded: false }
    }

    /// Calls the real function with the program's arguments.
    pub fn real(&mut self) -> StatusCode {
        self.was_forwarded = true;
        (self.real)()
    }

    /// Calls the real function; if it finds no memory for as many bytes, once more after releasing what has been freed in stream order.
    pub fn real_with_room(&mut self, bytes: usize) -> StatusCode {
        let Some(memory) = Memory::existing() else { return self.real() };
        let released = memory.registry.released();
        let answer = self.real();
        if answer == code::OUT_OF_MEMORY && free_up(memory, bytes, released) { self.real() } else { answer }
    }

    /// Whether the real function has been called.
    pub fn was_forwarded(&self) -> bool {
        self.was_forwarded
    }

    pub fn caller(&self) -> *const c_void {
        self.origin.caller
    }

    /// The runtime that the program has called; `None` if it has called the driver.
    pub fn runtime(&self) -> Option<&'static Runtime> {
        match self.origin.api {
            Api::Runtime(runtime) => Some(runtime),
            Api::Driver => None,
        }
    }

    /// The stream that the program means: a null stream depends on how the program was built.
    pub fn stream(&self, stream: StreamHandle) -> StreamHandle {
        match self.origin.flavour {
            Flavour::Plain => stream,
            Flavour::PerThread => stream.of_per_thread_program(),
        }
    }

    /// The context in which a call without a stream allocates on this thread. `None` if there is none: then the real function is to be called,
    /// and returns the error.
    pub fn context(&self) -> Result<Option<Current>, StatusCode> {
        match self.origin.api {
            Api::Driver => Current::of_thread().map_err(|failure| failure.code),
            Api::Runtime(runtime) => runtime.current_context().map(Some),
        }
    }

    /// Has the handler answer. If it panics, the call fails.
    fn answer(mut self, handler: &mut dyn FnMut(&mut Self) -> StatusCode) -> StatusCode {
        guarded(|| {
            if !copies::activate() {
                return self.real();
            }
            let answer = handler(&mut self);
            if answer == code::SUCCESS && self.origin.effect.shows_the_context() {
                note_current();
            }
            answer
        })
        .unwrap_or(code::UNKNOWN)
    }
}

/// Answers a call with its handler.
///
/// `passes`: the library has nothing to do with the call, so the real function answers directly, outside [`guarded`], which costs more than all
/// else here. A thread that is cancelled in the real function then unwinds through this function and its callers. They have nothing to clean up,
/// and are `C-unwind` functions, as the real one is.
#[inline]
pub fn answer(
    origin: Origin,
    passes: bool,
    mut real: impl FnMut() -> StatusCode,
    mut handler: impl FnMut(&mut Call) -> StatusCode,
) -> StatusCode {
    if room::waits(origin.effect) {
        return answer_with_room(origin, &mut real, &mut handler);
    }
    if passes {
        let answer = reentrancy::forward(&mut real);
        if answer == code::OUT_OF_MEMORY && origin.effect == Effect::Allocates && !reentrancy::is_nested() {
            return answer_without_memory(origin, &mut real, &mut handler);
        }
        return answer;
    }
    Call::new(origin, &mut real).answer(&mut handler)
}

/// Answers a request of a program that shares its GPUs.
#[cold]
fn answer_with_room(origin: Origin, real: &mut dyn FnMut() -> StatusCode, handler: &mut dyn FnMut(&mut Call) -> StatusCode) -> StatusCode {
    let runtime = if let Api::Runtime(runtime) = origin.api { Some(runtime) } else { None };
    let error_before = runtime.map(Runtime::last_error);
    let mut is_again = false;
    room::once_there_is(room::Caller { effect: origin.effect, address: origin.caller }, || {
        // The program does not get the error of an attempt in vain.
        if mem::replace(&mut is_again, true)
            && let (Some(runtime), Some(error)) = (runtime, error_before)
        {
            runtime.restore_last_error(error);
        }
        Call::new(origin, real).answer(handler)
    })
}

/// Answers a call for which CUDA has no memory: tries again if some can be released, and otherwise has the handler report the failure.
#[cold]
fn answer_without_memory(
    origin: Origin,
    real: &mut dyn FnMut() -> StatusCode,
    handler: &mut dyn FnMut(&mut Call) -> StatusCode,
) -> StatusCode {
    if guarded(|| Memory::existing().is_some_and(|memory| free_up(memory, 0, memory.registry.released()))) == Some(true) {
        let answer = reentrancy::forward(real);
        if answer != code::OUT_OF_MEMORY {
            return answer;
        }
    }
    guarded(|| handler(&mut Call::new(origin, &mut || code::OUT_OF_MEMORY)));
    code::OUT_OF_MEMORY
}

/// Has what was freed in stream order released on the thread's device. `released`: how often that had been done before the request. Returns whether
/// the request may find memory now.
fn free_up(memory: &Memory, bytes: usize, released: u64) -> bool {
    matches!(Current::of_thread(), Ok(Some(current)) if memory.registry.free_up(current.device(), bytes, released))
}

/// The handler of calls that are only of interest when they have succeeded.
pub fn forward(call: &mut Call) -> StatusCode {
    call.real()
}

/// Answers a call as its line in the table says.
macro_rules! answer_as {
    ({ $($handler:ident)::+ ($($passed:expr),*) unless $passes:expr } $origin:expr, $real:expr, $arguments:tt) => {
        answer($origin, $passes, || $real, |call| $($handler)::+(call, $($passed),*))
    };
    ({ $($handler:ident)::+ ($($passed:expr),*) } $origin:expr, $real:expr, $arguments:tt) => {
        answer($origin, false, || $real, |call| $($handler)::+(call, $($passed),*))
    };
    ({ $($handler:ident)::+ } $origin:expr, $real:expr, ($($argument:ident),*)) => {
        answer($origin, false, || $real, |_| $($handler)::+($($argument),*))
    };
}
pub(crate) use answer_as;
