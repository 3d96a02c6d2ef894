//! The C boundary: caller-provided pointers, and the structures of `cuda.h` and `nvml.h`.
//!
//! CUDA requires a pointer argument to be null or to point to what the header says. [`In`] and [`Out`] carry that contract,
//! so that the code behind them needs no `unsafe` of its own.

use crate::codes::{Code, INVALID_VALUE, Outcome};
use std::ffi::{CStr, c_char, c_int, c_void};

/// A device address (`CUdeviceptr`), or a host address given in its place.
pub type Address = u64;

/// An opaque handle (`CUcontext`, `CUstream`, `CUevent`, `CUgraph` …).
///
/// Handles are looked up, never dereferenced, so an invalid one returns an error code.
pub type Handle = u64;

/// An output pointer.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Stores the value; a null pointer is an invalid argument.
    pub fn put(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        self.put_if_given(value);
        Ok(())
    }

    /// Stores the value, unless the pointer is null.
    pub fn put_if_given(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: CUDA's contract, see the module documentation.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Fails if the pointer is null; called before the operation has any effect.
    pub fn required(self) -> Outcome {
        if self.0.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// Reads the value: some calls take a capacity and return a count here.
    pub fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// Room for a value whose type depends on the other arguments.
    pub const fn of(place: *mut c_void) -> Self {
        Self(place.cast())
    }

    /// A null pointer.
    pub const fn none() -> Self {
        Self(std::ptr::null_mut())
    }

    /// Whether the pointer is null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Stores consecutive values.
    pub fn put_all(self, values: impl IntoIterator<Item = T>) {
        if !self.0.is_null() {
            for (index, value) in values.into_iter().enumerate() {
                // SAFETY: CUDA's contract: the caller said how many values fit.
                unsafe { self.0.add(index).write_unaligned(value) }
            }
        }
    }
}

impl Out<c_char> {
    /// Stores a NUL-terminated string, truncated to the caller's buffer.
    pub fn put_text(self, text: &str, room: c_int) -> Outcome {
        if self.0.is_null() || room <= 0 {
            return Err(INVALID_VALUE);
        }
        let kept = text.len().min(room as usize - 1);
        self.put_all(text.as_bytes()[..kept].iter().map(|&byte| byte as c_char).chain([0]));
        Ok(())
    }
}

/// An input pointer.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value; a null pointer is an invalid argument.
    pub fn get(self) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract, see the module documentation.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// `count` values; a null pointer is an invalid argument.
    pub fn get_all(self, count: usize) -> Outcome<Vec<T>> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: the caller said how many values there are.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read_unaligned() }).collect())
    }
}

impl In<c_char> {
    /// The string; null and invalid UTF-8 are invalid arguments.
    pub fn text<'a>(self) -> Outcome<&'a str> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: a NUL-terminated string that outlives the call.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| INVALID_VALUE)
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Location {
    /// `CUmemLocationType`.
    pub kind: u32,
    /// The device's ordinal.
    pub id: i32,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`: the host's memory at a node, by its number.
pub const LOCATION_HOST_NUMA: u32 = 3;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `CUmemAllocationType`; the driver supports only 1, pinned.
    pub kind: u32,
    /// Bits of `CUmemAllocationHandleType`.
    pub handle_types: u32,
    /// Where the memory is.
    pub location: Location,
    /// Windows only.
    pub win32: *mut c_void,
    /// Compression, `GPUDirect` RDMA and usage flags, eight bytes.
    pub flags: [u8; 8],
}

// SAFETY: the pointer is stored only to be returned to the caller.
unsafe impl Send for AllocationProp {}
// SAFETY: as above.
unsafe impl Sync for AllocationProp {}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// The device that gets access.
    pub location: Location,
    /// `CUmemAccess_flags`: 0 nothing, 1 read, 3 read and write.
    pub flags: u32,
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle {
    /// Opaque to programs.
    pub reserved: [u8; 64],
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Uuid {
    /// The sixteen bytes.
    pub bytes: [u8; 16],
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlMemory {
    /// Total bytes.
    pub total: u64,
    /// Free bytes.
    pub free: u64,
    /// Used bytes.
    pub used: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlUtilization {
    /// Percent of the sample period in which kernels were running.
    pub gpu: u32,
    /// Percent of it in which memory was read or written.
    pub memory: u32,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlMemory2 {
    /// The version of the caller's structure.
    pub version: u32,
    /// Total bytes.
    pub total: u64,
    /// Bytes that the driver reserves.
    pub reserved: u64,
    /// Free bytes.
    pub free: u64,
    /// Used bytes.
    pub used: u64,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlPci {
    /// The bus id with a short domain.
    pub legacy: [u8; 16],
    /// Domain, bus, device, and two identifiers.
    pub numbers: [u32; 5],
    /// The bus id.
    pub bus: [u8; 32],
}

/// `nvmlProcessInfo_t` of `nvmlDeviceGetComputeRunningProcesses_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlProcess {
    /// Process id.
    pub pid: u32,
    /// Bytes of device memory.
    pub used: u64,
    /// Always all ones: MIG is not simulated.
    pub gpu_instance: u32,
    /// Always all ones: MIG is not simulated.
    pub compute_instance: u32,
}

/// A host function queued on a stream (`CUhostFn`).
pub type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

/// A callback queued on a stream (`CUstreamCallback`).
pub type StreamCallback = Option<unsafe extern "C" fn(Handle, Code, *mut c_void)>;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InstantiateParams {
    /// `CUgraphInstantiate_flags`.
    pub flags: u64,
    /// The stream in which the graph is uploaded, if the flags ask for that.
    pub upload_stream: Handle,
    /// The node that cannot be instantiated; never set here.
    pub error_node: Handle,
    /// `CUgraphInstantiateResult`.
    pub result: u32,
    /// A caller's, and left alone.
    pub padding: u32,
}

const _: () = {
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<InstantiateParams>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<NvmlProcess>() == 24);
    assert!(size_of::<NvmlMemory2>() == 40);
    assert!(size_of::<NvmlUtilization>() == 8);
};
