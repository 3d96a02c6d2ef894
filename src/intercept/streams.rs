//! Streams that the program creates and destroys, and captures that begin and end on them: a wait of ours must know them
//! ([`vramctl_driver::streams`]).

use crate::call::Call;
use crate::room;
use vramctl_core::member;
use vramctl_driver::{StreamHandle, streams};
use vramctl_host::exit;
use vramctl_model::{StatusCode, code};

pub unsafe fn create(call: &mut Call, stream: *const StreamHandle) -> StatusCode {
    let answer = call.real();
    if answer == code::OUT_OF_MEMORY {
        room::lacks_code();
    }
    if answer == code::SUCCESS
        && !exit::is_ending()
        // SAFETY: the program promises that a non-null pointer is writable, and the real function has succeeded.
        && let Some(stream) = unsafe { stream.as_ref() }
    {
        streams::created(*stream);
    }
    answer
}

pub fn destroy(call: &mut Call, stream: StreamHandle) -> StatusCode {
    // While the program exits, interrupted code may hold our lock.
    if !exit::is_ending() {
        streams::ends(stream);
    }
    call.real()
}

pub fn begin_capture(call: &mut Call, stream: StreamHandle) -> StatusCode {
    let answer = streams::begin_capture(call.stream(stream), || call.real());
    member::note_capture();
    answer
}

pub fn end_capture(call: &mut Call, stream: StreamHandle) -> StatusCode {
    let answer = streams::end_capture(call.stream(stream), || call.real());
    member::note_capture();
    answer
}
