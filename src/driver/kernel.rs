//! The library's own kernels, and small device buffers for them.
//!
//! Both are destroyed with their context. After a device reset they must not be used, or even destroyed; [`Resident`] ensures
//! that.

use super::{CUdeviceptr, Context, Current, Driver, RelaxedCapture, Stream, pointer_attribute};
use cudarc::driver::sys::{CUfunction, CUmodule, CUpointer_attribute};
use std::ffi::{CStr, c_uint, c_void};
use std::{mem, ptr, slice};
use vramctl_model::Failure;

/// A kernel loaded in a context, with a stream and a buffer of its own. Users must enter the relaxed capture mode, as for any
/// memory management.
pub struct Resident {
    context: Context,
    /// `None` only during drop.
    parts: Option<Parts>,
}

/// The parts of a [`Resident`], in drop order.
pub struct Parts {
    /// The stream.
    pub stream: Stream,
    /// The kernel.
    pub kernel: Kernel,
    /// The buffer.
    pub buffer: DeviceBuffer,
}

impl Resident {
    /// Loads the function `name` of a module into the current context and allocates a buffer of `bytes`. `launch` must run the kernel with
    /// nothing to do, because a driver that loads lazily uploads the code at the first launch.
    ///
    /// Waits for the context's work, and holds up all its launches meanwhile: no work may be in flight.
    pub fn new(
        current: &Current,
        image: &Image,
        name: &CStr,
        bytes: usize,
        launch: impl FnOnce(&Parts) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let buffer = DeviceBuffer::new(bytes)?;
        let parts = Parts { kernel: Kernel::load(image, name)?, buffer, stream: Stream::create()? };
        launch(&parts).and_then(|()| parts.stream.synchronize())?;
        Ok(Self { context: current.context(), parts: Some(parts) })
    }

    /// The parts; `None` if the current context is not theirs or has been reset.
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
                // Destroyed with its context. The driver would dereference stale handles.
                _ => mem::forget(parts),
            }
        }
    }
}

/// A PTX module, compiled for a device.
pub struct Image(Vec<u8>);

impl Image {
    /// Has the driver compile a module for the current context's device, which takes it up to 90 ms. That loads nothing into the context,
    /// waits for no work and holds nobody up.
    pub fn compile(_current: &Current, ptx: &CStr) -> Result<Self, Failure> {
        /// `CU_JIT_INPUT_PTX`.
        const PTX: c_uint = 1;
        let (driver, mut linker) = (Driver::get()?, ptr::null_mut());
        // SAFETY: no options, and `linker` is writable.
        unsafe { driver.cuLinkCreate_v2(0, ptr::null_mut(), ptr::null_mut(), &raw mut linker)? };
        let (mut image, mut bytes) = (ptr::null_mut(), 0);
        let text = ptx.to_bytes_with_nul();
        // SAFETY: the text has this length; `image` and `bytes` are writable.
        let compiled = unsafe {
            let (text, length, name) = (text.as_ptr().cast_mut().cast(), text.len(), c"vramctl".as_ptr());
            let added = driver.cuLinkAddData_v2(linker, PTX, text, length, name, 0, ptr::null_mut(), ptr::null_mut());
            added.and_then(|()| driver.cuLinkComplete(linker, &raw mut image, &raw mut bytes))
        };
        // SAFETY: the driver's image of this length, which belongs to the linker.
        let image = compiled.map(|()| Self(unsafe { slice::from_raw_parts(image.cast::<u8>(), bytes) }.to_vec()));
        // SAFETY: our linker, destroyed once.
        unsafe { driver.cuLinkDestroy(linker)? };
        image
    }
}

/// A function of a module that is loaded into the current context.
#[derive(Debug)]
pub struct Kernel {
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: the handles name objects of the driver, which is thread-safe.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Loads a module into the current context and looks up its function `name`.
    fn load(image: &Image, name: &CStr) -> Result<Self, Failure> {
        let driver = Driver::get()?;
        let mut kernel = Self { module: ptr::null_mut(), function: ptr::null_mut() };
        // SAFETY: `module` is writable, and the image is one that the driver has made.
        unsafe { driver.cuModuleLoadData(&raw mut kernel.module, image.0.as_ptr().cast())? };
        // SAFETY: `function` is writable, the module is loaded, and the name is NUL-terminated.
        unsafe { driver.cuModuleGetFunction(&raw mut kernel.function, kernel.module, name.as_ptr())? };
        Ok(kernel)
    }

    /// Launches `blocks` blocks of `threads` threads on a stream of the kernel's context.
    ///
    /// # Safety
    /// Each argument must point to a value of the corresponding parameter's type. Memory that these values point to must stay
    /// valid until the stream has finished.
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
    /// The context that the kernel was loaded in must be current.
    fn drop(&mut self) {
        if !self.module.is_null() {
            // SAFETY: our module, dropped once.
            let _ = Driver::get().and_then(|driver| unsafe { driver.cuModuleUnload(self.module) });
        }
    }
}

/// A small, unmanaged allocation of device memory.
#[derive(Debug)]
pub struct DeviceBuffer {
    address: CUdeviceptr,
    bytes: usize,
    /// The driver's id for this allocation, "guaranteed to be unique within the process"
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

    /// First address.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Whether the allocation still exists. It is freed, like everything in its context, when that is destroyed or reset.
    pub fn is_alive(&self) -> bool {
        self.id_now() == Ok(self.id)
    }

    fn id_now(&self) -> Result<u64, Failure> {
        pointer_attribute(self.address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
    }

    /// Queues a copy from host memory to byte `offset` of the buffer.
    ///
    /// # Safety
    /// `values` must stay valid and unchanged until the stream has finished.
    pub unsafe fn write<T: Copy>(&self, stream: &Stream, offset: usize, values: &[T]) -> Result<(), Failure> {
        let bytes = mem::size_of_val(values);
        assert!(offset + bytes <= self.bytes, "beyond the end of a device buffer");
        // SAFETY: inside the buffer; the caller's promise covers the host side.
        unsafe { Driver::get()?.cuMemcpyHtoDAsync_v2(self.address + offset as u64, values.as_ptr().cast(), bytes, stream.raw()) }
    }

    /// Queues a copy from byte `offset` of the buffer to host memory.
    ///
    /// # Safety
    /// `values` must stay valid and unused until the stream has finished, and every bit pattern must be a valid `T`.
    pub unsafe fn read<T: Copy>(&self, stream: &Stream, offset: usize, values: &mut [T]) -> Result<(), Failure> {
        let bytes = mem::size_of_val(values);
        assert!(offset + bytes <= self.bytes, "beyond the end of a device buffer");
        // SAFETY: inside the buffer; the caller's promise covers the host side.
        unsafe { Driver::get()?.cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), self.address + offset as u64, bytes, stream.raw()) }
    }
}

impl Drop for DeviceBuffer {
    /// The driver first waits for the work of the buffer's context. So this happens where none is in flight: before the buffer is in use, or
    /// when the program is destroying the context.
    fn drop(&mut self) {
        if self.address != 0 {
            // SAFETY: allocated by us, and dropped once.
            let _ = Driver::get().and_then(|driver| unsafe { driver.cuMemFree_v2(self.address) });
        }
    }
}
