//! Allocation and copying, where the runtime differs from the driver.

use crate::device::ready;
use crate::done;
use crate::driver::{Address, Driver, Handle};
use crate::errors::{INVALID_MEMCPY_DIRECTION, INVALID_VALUE, Outcome};
use std::ffi::{c_int, c_void};

/// `cudaPitchedPtr`.
#[repr(C)]
pub struct PitchedPointer {
    pointer: Address,
    pitch: usize,
    width: usize,
    height: usize,
}

/// `cudaExtent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    width: usize,
    height: usize,
    depth: usize,
}

/// `cudaPointerAttributes`, the part common to all versions.
#[repr(C)]
pub struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: Address,
    host_pointer: Address,
}

/// Stores a result.
///
/// # Safety
/// The pointer must be null or valid.
pub unsafe fn store<T>(pointer: *mut T, value: T) -> Outcome {
    if pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Allocates with a driver call. As in the real runtime, zero bytes give a null pointer without an error.
///
/// # Safety
/// The pointer must be null or valid.
pub unsafe fn unless_empty(pointer: *mut Address, bytes: usize, allocate: impl FnOnce(&Driver) -> u32) -> Outcome {
    let driver = ready()?;
    if bytes == 0 {
        // SAFETY: the caller's promise.
        return unsafe { store(pointer, 0) };
    }
    done(allocate(driver))
}

/// `cudaMalloc`: on failure it stores a null pointer.
///
/// # Safety
/// The pointer must be null or valid.
pub unsafe fn allocate(pointer: *mut Address, bytes: usize) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        let outcome = unless_empty(pointer, bytes, |driver| (driver.cuMemAlloc)(pointer, bytes));
        if outcome.is_err() && !pointer.is_null() {
            pointer.write(0);
        }
        outcome
    }
}

/// `cudaFree`: of null, it only initialises the context, which is still illegal during a capture.
///
/// # Safety
/// None: any address is allowed.
pub unsafe fn free(pointer: Address) -> Outcome {
    let driver = ready()?;
    // SAFETY: the driver checks the address.
    done(unsafe { (driver.cuMemFree)(pointer) })
}

/// `cudaMallocPitch`.
///
/// # Safety
/// The pointers must be null or valid.
pub unsafe fn allocate_pitch(pointer: *mut Address, pitch: *mut usize, width: usize, height: usize) -> Outcome {
    let driver = ready()?;
    // SAFETY: the caller's promise.
    unsafe {
        if width == 0 || height == 0 {
            store(pitch, 0)?;
            return store(pointer, 0);
        }
        done((driver.cuMemAllocPitch)(pointer, pitch, width, height, 4))
    }
}

/// `cudaMalloc3D`.
///
/// # Safety
/// The pointer must be null or valid.
pub unsafe fn allocate_3d(result: *mut PitchedPointer, extent: Extent) -> Outcome {
    if result.is_null() {
        return Err(INVALID_VALUE);
    }
    let (mut pointer, mut pitch) = (0, 0);
    let rows = extent.height.checked_mul(extent.depth).ok_or(INVALID_VALUE)?;
    // SAFETY: pointers into this frame, and the caller's promise.
    unsafe {
        allocate_pitch(&raw mut pointer, &raw mut pitch, extent.width, rows)?;
        store(result, PitchedPointer { pointer, pitch, width: extent.width, height: extent.height })
    }
}

/// How a copy is ordered.
#[derive(Clone, Copy)]
pub enum Order {
    /// On the legacy stream; the call waits.
    Now,
    /// On a stream.
    Stream(Handle),
    /// On a stream; the default one is per thread.
    ThreadStream(Handle),
}

/// `cudaMemcpy` and its variants; `kind` is a `cudaMemcpyKind`.
///
/// # Safety
/// The addresses must match the kind.
pub unsafe fn copy(to: Address, from: Address, bytes: usize, kind: c_int, order: Order) -> Outcome {
    const UPLOAD: c_int = 1;
    const DOWNLOAD: c_int = 2;
    const DEVICE: c_int = 3;
    let driver = ready()?;
    if !(0..=4).contains(&kind) {
        return Err(INVALID_MEMCPY_DIRECTION);
    }
    // SAFETY: the caller's promise.
    done(unsafe {
        match order {
            Order::Now => match kind {
                UPLOAD => (driver.cuMemcpyHtoD)(to, from, bytes),
                DOWNLOAD => (driver.cuMemcpyDtoH)(to, from, bytes),
                DEVICE => (driver.cuMemcpyDtoD)(to, from, bytes),
                _ => (driver.cuMemcpy)(to, from, bytes),
            },
            Order::Stream(stream) => match kind {
                UPLOAD => (driver.cuMemcpyHtoDAsync)(to, from, bytes, stream),
                DOWNLOAD => (driver.cuMemcpyDtoHAsync)(to, from, bytes, stream),
                DEVICE => (driver.cuMemcpyDtoDAsync)(to, from, bytes, stream),
                _ => (driver.cuMemcpyAsync)(to, from, bytes, stream),
            },
            Order::ThreadStream(stream) => match kind {
                UPLOAD => (driver.cuMemcpyHtoDAsync_ptsz)(to, from, bytes, stream),
                DOWNLOAD => (driver.cuMemcpyDtoHAsync_ptsz)(to, from, bytes, stream),
                DEVICE => (driver.cuMemcpyDtoDAsync_ptsz)(to, from, bytes, stream),
                _ => (driver.cuMemcpyAsync_ptsz)(to, from, bytes, stream),
            },
        }
    })
}

/// `cudaPointerGetAttributes`: an unknown pointer is "unregistered", not an error.
///
/// # Safety
/// The pointer to the attributes must be null or valid.
pub unsafe fn attributes(attributes: *mut PointerAttributes, pointer: Address) -> Outcome {
    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, _DEVICE_POINTER
    const WHICH: [c_int; 4] = [2, 8, 9, 3];
    let (mut kind, mut managed, mut device, mut device_pointer) = (0u32, 0u32, 0i32, 0 as Address);
    let data: [*mut c_void; 4] =
        [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut device).cast(), (&raw mut device_pointer).cast()];
    let driver = ready()?;
    // SAFETY: pointers into this frame, and the caller's promise.
    unsafe {
        done((driver.cuPointerGetAttributes)(4, WHICH.as_ptr(), data.as_ptr(), pointer))?;
        let on_host = kind != 2 || managed != 0;
        store(
            attributes,
            PointerAttributes {
                kind: if managed != 0 { 3 } else { kind as c_int },
                device,
                device_pointer,
                host_pointer: if on_host { pointer } else { 0 },
            },
        )
    }
}
