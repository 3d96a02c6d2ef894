//! The handlers of the hooked functions of the CUDA runtime. Invalid arguments are left for the real function to reject.

use crate::alloc::{ApiLayer, Source, provide, release, release_async, reported, rows};
use crate::copies;
use crate::runtimes::Runtime;
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use vramctl_driver::{Current, RelaxedCapture};
use vramctl_model::code;

pub unsafe fn malloc(runtime: &Runtime, pointer: *mut *mut c_void, bytes: usize, caller: *const c_void) -> CudaError {
    // SAFETY: here and below, the program promises that a non-null pointer is writable, and the real function gets the
    // arguments unchanged.
    unsafe { provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Thread, || runtime.cudaMalloc(pointer, bytes)) }
}

pub unsafe fn malloc_async(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    bytes: usize,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Stream(stream), || runtime.cudaMallocAsync(pointer, bytes, stream))
    }
}

pub unsafe fn malloc_async_ptsz(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    bytes: usize,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Stream(stream.of_per_thread_program()), || {
            runtime.cudaMallocAsync_ptsz(pointer, bytes, stream)
        })
    }
}

pub unsafe fn malloc_from_pool_async(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Pool(pool, stream), || {
            runtime.cudaMallocFromPoolAsync(pointer, bytes, pool, stream)
        })
    }
}

pub unsafe fn malloc_from_pool_async_ptsz(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let source = Source::Pool(pool, stream.of_per_thread_program());
        provide(&RuntimeLayer(runtime), caller, pointer, bytes, source, || {
            runtime.cudaMallocFromPoolAsync_ptsz(pointer, bytes, pool, stream)
        })
    }
}

pub unsafe fn malloc_pitch(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    pitch: *mut usize,
    width: usize,
    height: usize,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = || runtime.cudaMallocPitch(pointer, pitch, width, height);
        if pointer.is_null() || pitch.is_null() {
            return real();
        }
        let Some((row, bytes)) = rows(width, height, 1) else { return real() };
        let mut asked = false;
        let answer = provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Thread, || {
            asked = true;
            real()
        });
        if answer == code::SUCCESS && !asked {
            *pitch = row;
        }
        answer
    }
}

pub unsafe fn malloc_3d(runtime: &Runtime, pitched: *mut CudaPitchedPtr, extent: CudaExtent, caller: *const c_void) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = move || runtime.cudaMalloc3D(pitched, extent);
        if pitched.is_null() {
            return real();
        }
        let Some((pitch, bytes)) = rows(extent.width, extent.height, extent.depth) else { return real() };
        let (pointer, mut asked) = (&raw mut (*pitched).pointer, false);
        let answer = provide(&RuntimeLayer(runtime), caller, pointer, bytes, Source::Thread, || {
            asked = true;
            real()
        });
        if answer == code::SUCCESS && !asked {
            *pitched = CudaPitchedPtr { pointer: pointer.read(), pitch, xsize: extent.width, ysize: extent.height };
        }
        answer
    }
}

/// Unified memory is always left to CUDA: it migrates by itself, so its share on the device is unknown.
pub unsafe fn malloc_managed(
    runtime: &Runtime,
    pointer: *mut *mut c_void,
    bytes: usize,
    flags: c_uint,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    reported(caller, bytes, None, || unsafe { runtime.cudaMallocManaged(pointer, bytes, flags) })
}

pub unsafe fn free(runtime: &Runtime, pointer: *mut c_void) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release(pointer as u64, || unsafe { runtime.cudaFree(pointer) })
}

pub unsafe fn free_async(runtime: &Runtime, pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&RuntimeLayer(runtime), pointer as u64, stream, || unsafe { runtime.cudaFreeAsync(pointer, stream) })
}

pub unsafe fn free_async_ptsz(runtime: &Runtime, pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&RuntimeLayer(runtime), pointer as u64, stream.of_per_thread_program(), || unsafe {
        runtime.cudaFreeAsync_ptsz(pointer, stream)
    })
}

/// Allocates on a device for torch's pluggable allocator, as the hooked `cudaMalloc` does, also in a capture: for its own allocator, torch
/// allows that itself. Null if out of memory: torch then frees its cached blocks and retries.
pub fn torch_malloc(runtime: &Runtime, bytes: usize, device: c_int) -> *mut c_void {
    let _relaxed = RelaxedCapture::enter();
    let before = runtime.current_device();
    if before != Some(device) && !runtime.set_device(device) {
        log::error!("cannot allocate on device {device}: it does not exist");
        return ptr::null_mut();
    }
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is writable.
    let answer = unsafe {
        if copies::another_is_first() {
            runtime.cudaMalloc(&raw mut pointer, bytes)
        } else {
            malloc(runtime, &raw mut pointer, bytes, ptr::null())
        }
    };
    if let Some(before) = before.filter(|before| *before != device) {
        runtime.set_device(before);
    }
    if answer == code::SUCCESS { pointer } else { ptr::null_mut() }
}

/// Frees memory of [`torch_malloc`].
///
/// # Safety
/// `pointer` must come from there and must not have been freed.
pub unsafe fn torch_free(runtime: &Runtime, pointer: *mut c_void) {
    let _relaxed = RelaxedCapture::enter();
    // SAFETY: the caller's promise.
    let answer = unsafe { if copies::another_is_first() { runtime.cudaFree(pointer) } else { free(runtime, pointer) } };
    // At exit the runtime may shut down before torch's pools; everything is freed then anyway.
    if !matches!(answer, code::SUCCESS | code::DEINITIALIZED) {
        log::error!("cannot free the memory at {pointer:p} (CUDA error {answer})");
    }
}

/// Calls through the runtime.
struct RuntimeLayer<'a>(&'a Runtime);

impl ApiLayer for RuntimeLayer<'_> {
    fn current_context(&self) -> Result<Option<Current>, CudaError> {
        self.0.current_context().map(Some)
    }

    fn out_of_memory(&self, pointer: *mut *mut c_void) {
        // Like the real function.
        // SAFETY: the program promises that the pointer is writable.
        unsafe { pointer.write(ptr::null_mut()) };
    }
}
