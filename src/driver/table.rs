//! The driver functions that this library calls, each by its exact symbol.
//!
//! Calls return raw status codes, so codes added by newer drivers are valid values. A function that the driver does not have returns
//! [`code::NOT_FOUND`]. cudarc's loader would panic instead and take the host process down, so only its types and constants
//! are used here.

use crate::structures::{CopyBetween, LockArgs, NoArgs, RestoreArgs};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmodule,
    CUstream, CUuuid,
};
use once_cell::sync::OnceCell;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use vramctl_host::{PerProcess, exit, symbols};
use vramctl_model::{Failure, StatusCode, code};

/// Declares the table: a field per symbol, and a method of the same name that calls it.
macro_rules! driver_functions {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions. A missing one is `None`, and its method returns [`code::NOT_FOUND`].
        #[allow(non_snake_case)]
        pub struct Driver { $($name: Option<unsafe extern "C" fn($($type),*) -> StatusCode>,)* }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Driver {
            /// The names of these functions.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Looks up every symbol with `symbol`, which returns null for a missing one.
            fn from_symbols(symbol: impl Fn(&CStr) -> *mut c_void) -> Self {
                const fn name(bytes: &'static str) -> &'static CStr {
                    match CStr::from_bytes_with_nul(bytes.as_bytes()) { Ok(name) => name, Err(_) => panic!("no NUL in a symbol") }
                }
                // SAFETY: the declarations below match cuda.h, and a null pointer becomes `None`.
                Self { $($name: unsafe {
                    std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($type),*) -> StatusCode>>(
                        symbol(const { name(concat!(stringify!($name), "\0")) }))
                },)* }
            }

            $(
                /// The driver's function of this name. On a worker, once the program is exiting, it returns [`code::DEINITIALIZED`]
                /// without calling the driver.
                ///
                /// # Safety
                /// The arguments must meet the requirements of `cuda.h`.
                #[inline]
                pub unsafe fn $name(&self $(, $argument: $type)*) -> Result<(), Failure> {
                    let status = match (self.$name, exit::enter_driver()) {
                        // SAFETY: the caller's promise.
                        (Some(function), Some(_inside)) => unsafe { function($($argument),*) },
                        (Some(_), None) => code::DEINITIALIZED,
                        (None, _) => code::NOT_FOUND,
                    };
                    Failure::check(stringify!($name), status)
                }
            )*
        }
    };
}

driver_functions! {
    // Devices.
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, room: c_int, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
    cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceCanAccessPeer(answer: *mut c_int, device: CUdevice, owner: CUdevice);
    cuDeviceGetMemPool(pool: *mut *mut c_void, device: CUdevice);
    cuDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: CUdevice);
    cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_uint, value: *mut c_void);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);

    // Contexts and streams.
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxGetId(context: CUcontext, id: *mut c_ulonglong);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxSynchronize();
    cuCtxRecordEvent(context: CUcontext, event: CUevent);
    cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamQuery(stream: CUstream);
    cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
    cuStreamGetId(stream: CUstream, id: *mut c_ulonglong);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamGetCtx_v2(stream: CUstream, context: *mut CUcontext, green: *mut *mut c_void);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);

    // Virtual memory management.
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const CUmemAllocationProp, option: c_uint);
    cuMemAddressReserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong);
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong);
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemExportToShareableHandle(shared: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: c_ulonglong);
    cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shared: *mut c_void, kind: c_uint);
    cuMemGetAllocationPropertiesFromHandle(properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);

    // Checkpoints of other processes.
    cuCheckpointProcessGetState(pid: c_int, state: *mut c_int);
    cuCheckpointProcessLock(pid: c_int, arguments: *const LockArgs);
    cuCheckpointProcessCheckpoint(pid: c_int, arguments: *const NoArgs);
    cuCheckpointProcessRestore(pid: c_int, arguments: *const RestoreArgs);
    cuCheckpointProcessUnlock(pid: c_int, arguments: *const NoArgs);

    // Kernels and their memory.
    cuLinkCreate_v2(options: c_uint, kinds: *mut c_uint, values: *mut *mut c_void, linker: *mut *mut c_void);
    cuLinkAddData_v2(
        linker: *mut c_void, kind: c_uint, data: *mut c_void, bytes: usize, name: *const c_char, options: c_uint, kinds: *mut c_uint,
        values: *mut *mut c_void,
    );
    cuLinkComplete(linker: *mut c_void, image: *mut *mut c_void, bytes: *mut usize);
    cuLinkDestroy(linker: *mut c_void);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: CUfunction, blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint, threads_x: c_uint, threads_y: c_uint,
        threads_z: c_uint, shared_bytes: c_uint, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    );
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: CUdeviceptr);
    cuPointerGetAttributes(count: c_uint, attributes: *const c_uint, values: *mut *mut c_void, address: CUdeviceptr);

    // Host memory and copies.
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    cuMemcpy3DPeerAsync(copy: *const CopyBetween, stream: CUstream);
}

impl Driver {
    /// This process's driver: the `libcuda.so.1` that is loaded already, else the one that the loader finds.
    pub fn get() -> Result<&'static Self, Failure> {
        static TABLE: PerProcess<OnceCell<Driver>> = PerProcess::new(OnceCell::new);
        let table = TABLE.get();
        // Two threads may look the functions up at once. If one waited for the other, and had the loader's lock, neither would go on.
        if table.get().is_none() {
            // A failure is not remembered: the program may load its driver later.
            let _ = table.set(Self::load()?);
        }
        table.get().ok_or(Failure { call: "dlopen(libcuda.so.1)", code: code::NOT_FOUND })
    }

    fn load() -> Result<Self, Failure> {
        let open = |flags| {
            // SAFETY: a NUL-terminated name. Loading the library runs its initialisers, as it would for the program itself.
            // The handle is never closed.
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) }
        };
        let mut library = open(libc::RTLD_LAZY | libc::RTLD_LOCAL | libc::RTLD_NOLOAD);
        if library.is_null() {
            library = open(libc::RTLD_LAZY | libc::RTLD_LOCAL);
        }
        if library.is_null() {
            return Err(Failure { call: "dlopen(libcuda.so.1)", code: code::NOT_FOUND });
        }
        // SAFETY: `library` is open and `name` is NUL-terminated.
        Ok(Self::from_symbols(|name| unsafe { symbols::dlsym(library, name) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With an old driver, a missing function must be an error, not a jump to address zero.
    #[test]
    fn a_missing_symbol_is_an_error_value() {
        let nothing = Driver::from_symbols(|_| std::ptr::null_mut());
        // SAFETY: no function is called.
        let failure = unsafe { nothing.cuCtxSynchronize() }.unwrap_err();
        assert_eq!((failure.call, failure.code), ("cuCtxSynchronize", code::NOT_FOUND));
    }
}
