//! Streams that the program creates and destroys, and captures that begin and end on them: a wait of ours must know them
//! ([`vramctl_driver::streams`]).

use crate::driver_originals;
use std::ffi::{c_int, c_uint, c_void};
use vramctl_driver::{StreamHandle, streams};
use vramctl_host::exit;
use vramctl_model::{StatusCode, code};

pub unsafe fn create(stream: *mut StreamHandle, flags: c_uint) -> StatusCode {
    // SAFETY: here and below, the real function gets the arguments unchanged.
    let answer = unsafe { driver_originals::cuStreamCreate(stream, flags) };
    // SAFETY: the program promises that a non-null pointer is writable; the answer is the real function's.
    unsafe { created(answer, stream) }
}

pub unsafe fn create_with_priority(stream: *mut StreamHandle, flags: c_uint, priority: c_int) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuStreamCreateWithPriority(stream, flags, priority) };
    // SAFETY: as above.
    unsafe { created(answer, stream) }
}

pub unsafe fn create_in_green(stream: *mut StreamHandle, green: *mut c_void, flags: c_uint, priority: c_int) -> StatusCode {
    // SAFETY: as above.
    let answer = unsafe { driver_originals::cuGreenCtxStreamCreate(stream, green, flags, priority) };
    // SAFETY: as above.
    unsafe { created(answer, stream) }
}

/// # Safety
/// If the answer is a success and the pointer is not null, a stream is there.
unsafe fn created(answer: StatusCode, stream: *const StreamHandle) -> StatusCode {
    if answer == code::SUCCESS
        && !exit::is_ending()
        // SAFETY: the caller's promise.
        && let Some(stream) = unsafe { stream.as_ref() }
    {
        streams::created(*stream);
    }
    answer
}

pub unsafe fn destroy_v1(stream: StreamHandle) -> StatusCode {
    ends(stream);
    // SAFETY: as above.
    unsafe { driver_originals::cuStreamDestroy(stream) }
}

pub unsafe fn destroy(stream: StreamHandle) -> StatusCode {
    ends(stream);
    // SAFETY: as above.
    unsafe { driver_originals::cuStreamDestroy_v2(stream) }
}

fn ends(stream: StreamHandle) {
    // While the program exits, interrupted code may hold our lock.
    if !exit::is_ending() {
        streams::ends(stream);
    }
}

/// Functions that begin or end a capture: each calls the real one, with its own arguments.
macro_rules! captures {
    ($($what:ident $handler:ident $original:ident ($stream:ident $($argument:ident: $type:ty)*) $meaning:expr;)*) => { $(
        pub unsafe fn $handler($stream: StreamHandle $(, $argument: $type)*) -> StatusCode {
            let captured = $meaning($stream);
            // SAFETY: as above.
            streams::$what(captured, || unsafe { driver_originals::$original($stream $(, $argument)*) })
        }
    )* };
}

const fn same(stream: StreamHandle) -> StreamHandle {
    stream
}

captures! {
    begin_capture begin_v1 cuStreamBeginCapture (stream) same;
    begin_capture begin_v1_ptsz cuStreamBeginCapture_ptsz (stream) StreamHandle::of_per_thread_program;
    begin_capture begin cuStreamBeginCapture_v2 (stream mode: c_uint) same;
    begin_capture begin_ptsz cuStreamBeginCapture_v2_ptsz (stream mode: c_uint) StreamHandle::of_per_thread_program;
    begin_capture begin_to_graph cuStreamBeginCaptureToGraph (stream graph: *mut c_void nodes: *const c_void edges: *const c_void count: usize mode: c_uint) same;
    begin_capture begin_to_graph_ptsz cuStreamBeginCaptureToGraph_ptsz (stream graph: *mut c_void nodes: *const c_void edges: *const c_void count: usize mode: c_uint) StreamHandle::of_per_thread_program;
    begin_capture begin_to_cig cuStreamBeginCaptureToCig (stream parameters: *mut c_void) same;
    begin_capture begin_to_cig_ptsz cuStreamBeginCaptureToCig_ptsz (stream parameters: *mut c_void) StreamHandle::of_per_thread_program;
    begin_capture begin_again cuStreamBeginRecaptureToGraph (stream second: usize third: usize fourth: usize fifth: usize) same;
    begin_capture begin_again_ptsz cuStreamBeginRecaptureToGraph_ptsz (stream second: usize third: usize fourth: usize fifth: usize) StreamHandle::of_per_thread_program;
    end_capture end_to_cig cuStreamEndCaptureToCig (stream) same;
    end_capture end_to_cig_ptsz cuStreamEndCaptureToCig_ptsz (stream) StreamHandle::of_per_thread_program;
    end_capture end cuStreamEndCapture (stream graph: *mut *mut c_void) same;
    end_capture end_ptsz cuStreamEndCapture_ptsz (stream graph: *mut *mut c_void) StreamHandle::of_per_thread_program;
}
