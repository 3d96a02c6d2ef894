//! The handlers of the hooked functions of the CUDA runtime. Invalid arguments are left for the real function to reject.

use crate::alloc::{ApiLayer, Source, provide, release, release_async, reported, rows};
use crate::copies;
use crate::real::{self, originals};
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, CudaStream};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use vramctl_core::memory::Memory;
use vramctl_driver::Current;
use vramctl_model::code;

pub unsafe fn malloc(pointer: *mut *mut c_void, bytes: usize, caller: *const c_void) -> CudaError {
    // SAFETY: here and below, the program promises that a non-null pointer is writable, and the real function gets the
    // arguments unchanged.
    unsafe { provide(&RuntimeLayer, caller, pointer, bytes, Source::Thread, || originals::cudaMalloc(pointer, bytes)) }
}

pub unsafe fn malloc_async(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream, caller: *const c_void) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe { provide(&RuntimeLayer, caller, pointer, bytes, Source::Stream(stream), || originals::cudaMallocAsync(pointer, bytes, stream)) }
}

pub unsafe fn malloc_async_ptsz(pointer: *mut *mut c_void, bytes: usize, stream: CudaStream, caller: *const c_void) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(&RuntimeLayer, caller, pointer, bytes, Source::Stream(stream.of_per_thread_program()), || {
            originals::cudaMallocAsync_ptsz(pointer, bytes, stream)
        })
    }
}

pub unsafe fn malloc_from_pool_async(
    pointer: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        provide(&RuntimeLayer, caller, pointer, bytes, Source::Pool(pool, stream), || {
            originals::cudaMallocFromPoolAsync(pointer, bytes, pool, stream)
        })
    }
}

pub unsafe fn malloc_from_pool_async_ptsz(
    pointer: *mut *mut c_void,
    bytes: usize,
    pool: *mut c_void,
    stream: CudaStream,
    caller: *const c_void,
) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let source = Source::Pool(pool, stream.of_per_thread_program());
        provide(&RuntimeLayer, caller, pointer, bytes, source, || originals::cudaMallocFromPoolAsync_ptsz(pointer, bytes, pool, stream))
    }
}

pub unsafe fn malloc_pitch(pointer: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize, caller: *const c_void) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = || originals::cudaMallocPitch(pointer, pitch, width, height);
        if pointer.is_null() || pitch.is_null() {
            return real();
        }
        let Some((row, bytes)) = rows(width, height, 1) else { return real() };
        let mut asked = false;
        let answer = provide(&RuntimeLayer, caller, pointer, bytes, Source::Thread, || {
            asked = true;
            real()
        });
        if answer == code::SUCCESS && !asked {
            *pitch = row;
        }
        answer
    }
}

pub unsafe fn malloc_3d(pitched: *mut CudaPitchedPtr, extent: CudaExtent, caller: *const c_void) -> CudaError {
    // SAFETY: as in `malloc`.
    unsafe {
        let real = move || originals::cudaMalloc3D(pitched, extent);
        if pitched.is_null() {
            return real();
        }
        let Some((pitch, bytes)) = rows(extent.width, extent.height, extent.depth) else { return real() };
        let (pointer, mut asked) = (&raw mut (*pitched).pointer, false);
        let answer = provide(&RuntimeLayer, caller, pointer, bytes, Source::Thread, || {
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
pub unsafe fn malloc_managed(pointer: *mut *mut c_void, bytes: usize, flags: c_uint, caller: *const c_void) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    reported(caller, bytes, None, || unsafe { originals::cudaMallocManaged(pointer, bytes, flags) })
}

pub unsafe fn free(pointer: *mut c_void) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release(pointer as u64, || unsafe { originals::cudaFree(pointer) })
}

pub unsafe fn free_async(pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&RuntimeLayer, pointer as u64, stream, || unsafe { originals::cudaFreeAsync(pointer, stream) })
}

pub unsafe fn free_async_ptsz(pointer: *mut c_void, stream: CudaStream) -> CudaError {
    // SAFETY: the arguments are passed on unchanged.
    release_async(&RuntimeLayer, pointer as u64, stream.of_per_thread_program(), || unsafe {
        originals::cudaFreeAsync_ptsz(pointer, stream)
    })
}

pub unsafe fn device_reset() -> CudaError {
    if let Some(memory) = Memory::existing()
        && let Some(device) = real::current_device()
    {
        memory.forget_device(device);
    }
    // SAFETY: no arguments.
    unsafe { originals::cudaDeviceReset() }
}

/// Allocates on a device for torch's pluggable allocator, as the hooked `cudaMalloc` does. Null if out of memory: torch then
/// frees its cached blocks and retries.
pub fn torch_malloc(bytes: usize, device: c_int) -> *mut c_void {
    let before = real::current_device();
    if before != Some(device) && !real::set_device(device) {
        log::error!("cannot allocate on device {device}: it does not exist, or no CUDA runtime is loaded");
        return ptr::null_mut();
    }
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is writable.
    let answer = unsafe {
        if copies::another_is_first() {
            originals::cudaMalloc(&raw mut pointer, bytes)
        } else {
            malloc(&raw mut pointer, bytes, ptr::null())
        }
    };
    if let Some(before) = before.filter(|before| *before != device) {
        real::set_device(before);
    }
    if answer == code::SUCCESS { pointer } else { ptr::null_mut() }
}

/// Frees memory of [`torch_malloc`].
///
/// # Safety
/// `pointer` must come from there and must not have been freed.
pub unsafe fn torch_free(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    let answer = unsafe { if copies::another_is_first() { originals::cudaFree(pointer) } else { free(pointer) } };
    // At exit the runtime may shut down before torch's pools; everything is freed then anyway.
    if !matches!(answer, code::SUCCESS | code::DEINITIALIZED) {
        log::error!("cannot free the memory at {pointer:p} (CUDA error {answer})");
    }
}

/// Calls through the runtime.
struct RuntimeLayer;

impl ApiLayer for RuntimeLayer {
    fn current_context(&self) -> Result<Option<Current>, CudaError> {
        real::current_context().map(Some)
    }

    fn out_of_memory(&self, pointer: *mut *mut c_void) {
        // Like the real function: a null pointer, and the error for `cudaGetLastError`.
        // SAFETY: the program promises that the pointer is writable.
        unsafe { pointer.write(ptr::null_mut()) };
        real::leave_out_of_memory_as_last_error();
    }
}
