//! Code and small buffers on the device: a kernel of our own and the memory that it works on.
//!
//! They belong to a context and go with it: what a reset of the device has destroyed must not be touched any more, not
//! even to destroy it. [`Resident`] sees to that.

use super::{CUdeviceptr, Context, Current, Driver, RelaxedCapture, Stream, pointer_attribute};
use cudarc::driver::sys::{CUfunction, CUmodule, CUpointer_attribute};
use std::ffi::{CStr, c_void};
use std::{mem, ptr};
use vramctl_model::Failure;

/// A kernel in a context, ready to be launched, with a stream and memory of its own. Its user enters the relaxed capture
/// mode, as for any memory management.
pub struct Resident {
    context: Context,
    /// There until the value is dropped.
    parts: Option<Parts>,
}

/// What there is of a [`Resident`], in the order in which it is to be dropped.
pub struct Parts {
    /// A stream.
    pub stream: Stream,
    /// The kernel.
    pub kernel: Kernel,
    /// The memory.
    pub buffer: DeviceBuffer,
}

impl Resident {
    /// Loads the function `name` of a module of PTX into the current context and takes so many bytes of its device's
    /// memory. `launch` is to run the kernel with nothing to do: a driver that loads lazily puts the code on the device at
    /// the first launch, and it is to be there by then.
    pub fn new(
        current: &Current,
        ptx: &CStr,
        name: &CStr,
        bytes: usize,
        launch: impl FnOnce(&Parts) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        // The compiler takes long enough for a program to fill the device.
        let buffer = DeviceBuffer::new(bytes)?;
        let parts = Parts { kernel: Kernel::load(ptx, name)?, buffer, stream: Stream::create()? };
        launch(&parts).and_then(|()| parts.stream.synchronize())?;
        Ok(Self { context: current.context(), parts: Some(parts) })
    }

    /// What there is of it, in the current context. None where that is another, or was reset.
    pub fn parts(&self, current: &Current) -> Option<&Parts> {
        self.parts.as_ref().filter(|parts| self.context == current.context() && parts.buffer.is_alive())
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        let _relaxed = RelaxedCapture::enter();
        if let Some(parts) = self.parts.take() {
            match Current::push(self.context) {
                Ok(_current) if parts.buffer.is_alive() => drop(parts),
                // Gone with its context: nothing is left to undo, and the driver would follow stale handles.
                _ => mem::forget(parts),
            }
        }
    }
}

/// One function of a module of PTX, compiled by the driver for the current context's device.
#[derive(Debug)]
pub struct Kernel {
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: the handles name objects of the driver, which is thread-safe.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Compiles a module for the current context and looks its function `name` up.
    pub fn load(ptx: &CStr, name: &CStr) -> Result<Self, Failure> {
        let driver = Driver::get()?;
        let mut kernel = Self { module: ptr::null_mut(), function: ptr::null_mut() };
        // SAFETY: `module` is writable and the text is terminated.
        unsafe { driver.cuModuleLoadData(&raw mut kernel.module, ptx.as_ptr().cast())? };
        // SAFETY: `function` is writable, the module was loaded just now, and the name is terminated.
        unsafe { driver.cuModuleGetFunction(&raw mut kernel.function, kernel.module, name.as_ptr())? };
        Ok(kernel)
    }

    /// Queues `blocks` blocks of `threads` threads each in a stream of the kernel's context.
    ///
    /// # Safety
    /// Each argument must point to a value of the type of the kernel's parameter in its place. Memory that these values
    /// name must be there until the stream has finished.
    pub unsafe fn launch<const N: usize>(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        mut arguments: [*mut c_void; N],
    ) -> Result<(), Failure> {
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the arguments are read before the call returns; the rest is the caller's promise.
        unsafe { Driver::get()?.cuLaunchKernel(self.function, blocks, 1, 1, threads, 1, 1, 0, stream.raw(), arguments, ptr::null_mut()) }
    }
}

impl Drop for Kernel {
    /// The context must be current, and the one that the kernel was loaded in.
    fn drop(&mut self) {
        if !self.module.is_null() {
            // SAFETY: loaded by us, and dropped once.
            let _ = Driver::get().and_then(|driver| unsafe { driver.cuModuleUnload(self.module) });
        }
    }
}

/// A small allocation of device memory that stays where it is.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: CUdeviceptr,
    bytes: usize,
    /// The driver's number for this allocation, "guaranteed to be unique within the process"
    /// (`CU_POINTER_ATTRIBUTE_BUFFER_ID` in the driver API's reference).
    id: u64,
}

impl DeviceBuffer {
    /// Allocates in the current context.
    pub fn new(bytes: usize) -> Result<Self, Failure> {
        let mut buffer = Self { address: 0, bytes, id: 0 };
        // SAFETY: `address` is writable.
        unsafe { Driver::get()?.cuMemAlloc_v2(&raw mut buffer.address, bytes)? };
        buffer.id = buffer.id_now()?;
        Ok(buffer)
    }

    /// The first address.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Whether the allocation is still there. It is gone once its context has been destroyed or reset, and so is all else
    /// that was made in that context.
    pub fn is_alive(&self) -> bool {
        self.id_now() == Ok(self.id)
    }

    fn id_now(&self) -> Result<u64, Failure> {
        pointer_attribute(self.address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
    }

    /// Queues a copy of host memory to `offset` bytes into the buffer.
    ///
    /// # Safety
    /// `values` must stay and not change until the stream has finished.
    pub unsafe fn write<T: Copy>(&self, stream: &Stream, offset: usize, values: &[T]) -> Result<(), Failure> {
        let bytes = mem::size_of_val(values);
        assert!(offset + bytes <= self.bytes, "beyond the end of a device buffer");
        // SAFETY: inside the buffer; the host's side is the caller's promise.
        unsafe { Driver::get()?.cuMemcpyHtoDAsync_v2(self.address + offset as u64, values.as_ptr().cast(), bytes, stream.raw()) }
    }

    /// Queues a copy from `offset` bytes into the buffer to host memory.
    ///
    /// # Safety
    /// `values` must stay and not be used until the stream has finished, and be valid whatever bytes it holds.
    pub unsafe fn read<T: Copy>(&self, stream: &Stream, offset: usize, values: &mut [T]) -> Result<(), Failure> {
        let bytes = mem::size_of_val(values);
        assert!(offset + bytes <= self.bytes, "beyond the end of a device buffer");
        // SAFETY: inside the buffer; the host's side is the caller's promise.
        unsafe { Driver::get()?.cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), self.address + offset as u64, bytes, stream.raw()) }
    }
}

impl Drop for DeviceBuffer {
    /// The driver waits for the work of the buffer's context first.
    fn drop(&mut self) {
        if self.address != 0 {
            // SAFETY: allocated by us, and dropped once.
            let _ = Driver::get().and_then(|driver| unsafe { driver.cuMemFree_v2(self.address) });
        }
    }
}
