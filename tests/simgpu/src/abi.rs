//! The C border: pointers that a caller gave, and the structures of `cuda.h` and `nvml.h`.
//!
//! CUDA's contract is that a pointer argument is null or points to what the header says. [`In`]
//! and [`Out`] carry that contract, so that the code behind them needs no `unsafe` of its own.

use crate::codes::{INVALID_VALUE, Outcome};
use std::ffi::{CStr, c_char, c_int, c_void};

/// A device address (`CUdeviceptr`), or a host address given in its place.
pub type Address = u64;

/// An opaque handle (`CUcontext`, `CUstream`, `CUevent`, `CUgraph` …).
///
/// The simulated GPU's handles are numbers that are looked up, never followed: a wrong one is
/// answered with an error code.
pub type Handle = u64;

/// A pointer through which the caller receives a value.
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

    /// Stores the value where the caller wants it; null says that it does not.
    pub fn put_if_given(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: CUDA's contract, see the module's text.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Fails, before anything is done, where there is nowhere to put the result.
    pub fn required(self) -> Outcome {
        if self.0.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// What the caller put there: some calls pass a capacity in and a count out.
    pub fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// Nowhere.
    pub const fn none() -> Self {
        Self(std::ptr::null_mut())
    }

    /// Whether the caller gave nothing.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Stores several values one after another.
    pub fn put_all(self, values: impl IntoIterator<Item = T>) {
        if !self.0.is_null() {
            for (index, value) in values.into_iter().enumerate() {
                // SAFETY: CUDA's contract: the caller named how many it has room for.
                unsafe { self.0.add(index).write_unaligned(value) }
            }
        }
    }
}

impl Out<c_char> {
    /// Stores a string, cut to the caller's room, always terminated.
    pub fn put_text(self, text: &str, room: c_int) -> Outcome {
        if self.0.is_null() || room <= 0 {
            return Err(INVALID_VALUE);
        }
        let kept = text.len().min(room as usize - 1);
        self.put_all(text.as_bytes()[..kept].iter().map(|&byte| byte as c_char).chain([0]));
        Ok(())
    }
}

/// A pointer to what the caller passes in.
#[repr(transparent)]
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
        // SAFETY: CUDA's contract, see the module's text.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// `count` values; a null pointer is an invalid argument.
    pub fn get_all(self, count: usize) -> Outcome<Vec<T>> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: the caller named how many there are.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read_unaligned() }).collect())
    }
}

impl In<c_char> {
    /// The string; null and what is not UTF-8 are invalid arguments.
    pub fn text<'a>(self) -> Outcome<&'a str> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: a terminated string that outlives the call.
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

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `CUmemAllocationType`; 1 is pinned, the only one that the driver knows.
    pub kind: u32,
    /// Bits of `CUmemAllocationHandleType`.
    pub handle_types: u32,
    /// Where the memory lies.
    pub location: Location,
    /// Windows only.
    pub win32: *mut c_void,
    /// Compression, `GPUDirect` RDMA and use, eight bytes.
    pub flags: [u8; 8],
}

// SAFETY: the pointer is kept only to be given back as it came.
unsafe impl Send for AllocationProp {}
// SAFETY: as above.
unsafe impl Sync for AllocationProp {}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Who may access.
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
    /// Bytes in all.
    pub total: u64,
    /// Bytes free.
    pub free: u64,
    /// Bytes in use.
    pub used: u64,
}

/// `nvmlProcessInfo_t` of `nvmlDeviceGetComputeRunningProcesses_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NvmlProcess {
    /// The process.
    pub pid: u32,
    /// Bytes of device memory.
    pub used: u64,
    /// No MIG here: all ones.
    pub gpu_instance: u32,
    /// No MIG here: all ones.
    pub compute_instance: u32,
}

/// A function that a stream calls (`CUhostFn`).
pub type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

const _: () = {
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<NvmlProcess>() == 24);
};
