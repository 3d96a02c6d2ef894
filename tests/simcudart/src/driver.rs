//! Access to the driver. Like the real runtime, it looks up `cuGetProcAddress_v2` in `libcuda.so.1` and gets everything else
//! from that, by name, version and flags.

use crate::errors::{INITIALIZATION_ERROR, INSUFFICIENT_DRIVER, Outcome};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The CUDA version of this runtime.
pub const VERSION: c_int = 13000;

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut u32) -> u32;

macro_rules! driver {
    ($($field:ident = $name:literal, $flags:literal: ($($kind:ty),* $(,)?);)*) => {
        /// The driver functions that the runtime uses.
        #[allow(non_snake_case, missing_docs)]
        pub struct Driver {
            get: GetProcAddress,
            $(pub $field: unsafe extern "C" fn($($kind),*) -> u32,)*
        }

        impl Driver {
            fn load(get: GetProcAddress) -> Option<Self> {
                Some(Self {
                    get,
                    // SAFETY: this version of the function has these arguments.
                    $($field: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> u32>(
                            find(get, $name, VERSION, $flags).ok()?,
                        )
                    },)*
                })
            }
        }
    };
}

/// A device address, or a host address used as one.
pub type Address = u64;
/// A driver handle.
pub type Handle = u64;

/// `cudaIpcMemHandle_t` and `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    reserved: [u8; 64],
}

driver! {
    cuInit = c"cuInit", 0: (u32);
    cuDriverGetVersion = c"cuDriverGetVersion", 0: (*mut c_int);
    cuGetErrorString = c"cuGetErrorString", 0: (u32, *mut *const c_char);
    cuDeviceGetCount = c"cuDeviceGetCount", 0: (*mut c_int);
    cuDeviceGetAttribute = c"cuDeviceGetAttribute", 0: (*mut c_int, c_int, c_int);
    cuDeviceCanAccessPeer = c"cuDeviceCanAccessPeer", 0: (*mut c_int, c_int, c_int);
    cuDeviceGetDefaultMemPool = c"cuDeviceGetDefaultMemPool", 0: (*mut Handle, c_int);
    cuMemPoolSetAttribute = c"cuMemPoolSetAttribute", 0: (Handle, c_int, *mut c_void);
    cuMemPoolTrimTo = c"cuMemPoolTrimTo", 0: (Handle, usize);
    cuDevicePrimaryCtxRetain = c"cuDevicePrimaryCtxRetain", 0: (*mut Handle, c_int);
    cuDevicePrimaryCtxReset = c"cuDevicePrimaryCtxReset", 0: (c_int);
    cuCtxSetCurrent = c"cuCtxSetCurrent", 0: (Handle);
    cuCtxGetDevice = c"cuCtxGetDevice", 0: (*mut c_int);
    cuCtxGetId = c"cuCtxGetId", 0: (Handle, *mut u64);
    cuCtxSynchronize = c"cuCtxSynchronize", 0: ();
    cuCtxEnablePeerAccess = c"cuCtxEnablePeerAccess", 0: (Handle, u32);
    cuCtxDisablePeerAccess = c"cuCtxDisablePeerAccess", 0: (Handle);
    cuMemGetInfo = c"cuMemGetInfo", 0: (*mut usize, *mut usize);
    cuMemAlloc = c"cuMemAlloc", 0: (*mut Address, usize);
    cuMemAllocPitch = c"cuMemAllocPitch", 0: (*mut Address, *mut usize, usize, usize, u32);
    cuMemAllocManaged = c"cuMemAllocManaged", 0: (*mut Address, usize, u32);
    cuMemFree = c"cuMemFree", 0: (Address);
    cuMemAllocAsync = c"cuMemAllocAsync", 0: (*mut Address, usize, Handle);
    cuMemAllocAsync_ptsz = c"cuMemAllocAsync", 2: (*mut Address, usize, Handle);
    cuMemAllocFromPoolAsync = c"cuMemAllocFromPoolAsync", 0: (*mut Address, usize, Handle, Handle);
    cuMemAllocFromPoolAsync_ptsz = c"cuMemAllocFromPoolAsync", 2: (*mut Address, usize, Handle, Handle);
    cuMemFreeAsync = c"cuMemFreeAsync", 0: (Address, Handle);
    cuMemFreeAsync_ptsz = c"cuMemFreeAsync", 2: (Address, Handle);
    cuMemPoolCreate = c"cuMemPoolCreate", 0: (*mut Handle, *const c_void);
    cuMemPoolDestroy = c"cuMemPoolDestroy", 0: (Handle);
    cuMemPoolSetAccess = c"cuMemPoolSetAccess", 0: (Handle, *const c_void, usize);
    cuMemHostAlloc = c"cuMemHostAlloc", 0: (*mut Address, usize, u32);
    cuMemFreeHost = c"cuMemFreeHost", 0: (Address);
    cuMemHostRegister = c"cuMemHostRegister", 0: (Address, usize, u32);
    cuMemHostUnregister = c"cuMemHostUnregister", 0: (Address);
    cuMemHostGetDevicePointer = c"cuMemHostGetDevicePointer", 0: (*mut Address, Address, u32);
    cuIpcGetMemHandle = c"cuIpcGetMemHandle", 0: (*mut c_void, Address);
    cuIpcOpenMemHandle = c"cuIpcOpenMemHandle", 0: (*mut Address, IpcHandle, u32);
    cuIpcCloseMemHandle = c"cuIpcCloseMemHandle", 0: (Address);
    cuPointerGetAttributes = c"cuPointerGetAttributes", 0: (u32, *const c_int, *const *mut c_void, Address);
    cuMemcpy = c"cuMemcpy", 0: (Address, Address, usize);
    cuMemcpyHtoD = c"cuMemcpyHtoD", 0: (Address, Address, usize);
    cuMemcpyDtoH = c"cuMemcpyDtoH", 0: (Address, Address, usize);
    cuMemcpyDtoD = c"cuMemcpyDtoD", 0: (Address, Address, usize);
    cuMemcpyAsync = c"cuMemcpyAsync", 0: (Address, Address, usize, Handle);
    cuMemcpyAsync_ptsz = c"cuMemcpyAsync", 2: (Address, Address, usize, Handle);
    cuMemcpyHtoDAsync = c"cuMemcpyHtoDAsync", 0: (Address, Address, usize, Handle);
    cuMemcpyHtoDAsync_ptsz = c"cuMemcpyHtoDAsync", 2: (Address, Address, usize, Handle);
    cuMemcpyDtoHAsync = c"cuMemcpyDtoHAsync", 0: (Address, Address, usize, Handle);
    cuMemcpyDtoHAsync_ptsz = c"cuMemcpyDtoHAsync", 2: (Address, Address, usize, Handle);
    cuMemcpyDtoDAsync = c"cuMemcpyDtoDAsync", 0: (Address, Address, usize, Handle);
    cuMemcpyDtoDAsync_ptsz = c"cuMemcpyDtoDAsync", 2: (Address, Address, usize, Handle);
    cuMemsetD8 = c"cuMemsetD8", 0: (Address, u8, usize);
    cuMemsetD8Async = c"cuMemsetD8Async", 0: (Address, u8, usize, Handle);
    cuMemsetD8Async_ptsz = c"cuMemsetD8Async", 2: (Address, u8, usize, Handle);
    cuStreamCreateWithPriority = c"cuStreamCreateWithPriority", 0: (*mut Handle, u32, c_int);
    cuStreamDestroy = c"cuStreamDestroy", 0: (Handle);
    cuStreamSynchronize = c"cuStreamSynchronize", 0: (Handle);
    cuStreamQuery = c"cuStreamQuery", 0: (Handle);
    cuStreamWaitEvent = c"cuStreamWaitEvent", 0: (Handle, Handle, u32);
    cuStreamIsCapturing = c"cuStreamIsCapturing", 0: (Handle, *mut u32);
    cuStreamGetCaptureInfo = c"cuStreamGetCaptureInfo", 0: (Handle, *mut u32, *mut u64, *mut Handle, *mut *const Handle, *mut *const c_void, *mut usize);
    cuStreamBeginCapture = c"cuStreamBeginCapture", 0: (Handle, u32);
    cuStreamEndCapture = c"cuStreamEndCapture", 0: (Handle, *mut Handle);
    cuThreadExchangeStreamCaptureMode = c"cuThreadExchangeStreamCaptureMode", 0: (*mut u32);
    cuGraphInstantiate = c"cuGraphInstantiate", 0: (*mut Handle, Handle, u64);
    cuGraphLaunch = c"cuGraphLaunch", 0: (Handle, Handle);
    cuGraphDestroy = c"cuGraphDestroy", 0: (Handle);
    cuGraphExecDestroy = c"cuGraphExecDestroy", 0: (Handle);
    cuGraphGetNodes = c"cuGraphGetNodes", 0: (Handle, *mut Handle, *mut usize);
    cuLaunchHostFunc = c"cuLaunchHostFunc", 0: (Handle, *mut c_void, *mut c_void);
    cuEventCreate = c"cuEventCreate", 0: (*mut Handle, u32);
    cuEventDestroy = c"cuEventDestroy", 0: (Handle);
    cuEventRecord = c"cuEventRecord", 0: (Handle, Handle);
    cuEventQuery = c"cuEventQuery", 0: (Handle);
    cuEventSynchronize = c"cuEventSynchronize", 0: (Handle);
    cuEventElapsedTime = c"cuEventElapsedTime", 0: (*mut f32, Handle, Handle);
}

fn find(get: GetProcAddress, name: &CStr, version: c_int, flags: u64) -> Result<*mut c_void, u32> {
    let mut found = std::ptr::null_mut();
    let mut status = 0;
    // SAFETY: all pointers are into this frame, and the name is NUL-terminated.
    let code = unsafe { get(name.as_ptr(), &raw mut found, version, flags, &raw mut status) };
    if code == 0 && !found.is_null() { Ok(found) } else { Err(status.max(1)) }
}

impl Driver {
    /// A driver function for the program.
    pub fn entry_point(&self, name: &CStr, version: c_int, flags: u64) -> Result<*mut c_void, u32> {
        find(self.get, name, version, flags)
    }
}

/// The driver, loaded and initialised at first use.
pub fn get() -> Outcome<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    static INITIALISED: OnceLock<u32> = OnceLock::new();
    let driver = DRIVER
        .get_or_init(|| {
            // SAFETY: the name is NUL-terminated; the library is never unloaded.
            let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
            if library.is_null() {
                return None;
            }
            // SAFETY: as above.
            let symbol = unsafe { libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr()) };
            if symbol.is_null() {
                return None;
            }
            // SAFETY: the driver's function of this name has this type.
            Driver::load(unsafe { std::mem::transmute::<*mut c_void, GetProcAddress>(symbol) })
        })
        .as_ref()
        .ok_or(INSUFFICIENT_DRIVER)?;
    // SAFETY: no pointers.
    match *INITIALISED.get_or_init(|| unsafe { (driver.cuInit)(0) }) {
        0 => Ok(driver),
        2 => Err(INITIALIZATION_ERROR),
        code => Err(code),
    }
}
