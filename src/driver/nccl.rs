//! The communicator functions of one NCCL. A process may contain several NCCLs, so each is found through one of its own functions.
//!
//! `ncclCommSuspend` and `ncclCommResume` came with NCCL 2.29.7. Both wait for all ranks of the communicator (`src/mem_manager.cc`
//! of NCCL), copy part of the contents, and keep the addresses.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::{mem, ptr};
use vramctl_host::symbols::Loaded;

/// `ncclResult_t`.
pub type NcclResult = c_int;

/// What NCCL answers.
pub mod answer {
    use super::NcclResult;

    /// Done.
    pub const SUCCESS: NcclResult = 0;
    /// A call of CUDA has failed.
    pub const CUDA_ERROR: NcclResult = 1;
    /// A system call has failed.
    pub const SYSTEM_ERROR: NcclResult = 2;
    /// A bug.
    pub const INTERNAL_ERROR: NcclResult = 3;
    /// An argument is wrong. Nothing has been done.
    pub const INVALID_ARGUMENT: NcclResult = 4;
    /// The call is not possible now. Nothing has been done.
    pub const INVALID_USAGE: NcclResult = 5;
    /// Another rank has ended, or cannot be reached.
    pub const REMOTE_ERROR: NcclResult = 6;
    /// For a non-blocking communicator: the operation continues in the background.
    pub const IN_PROGRESS: NcclResult = 7;
}

/// `NCCL_SUSPEND_MEM`.
const MEMORY: c_int = 1;

/// A communicator's memory, as `ncclCommMemStats` reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommunicatorMemory {
    /// Bytes of device memory that can be, or have been, given back.
    pub bytes: u64,
    /// Bytes that cannot.
    pub kept_bytes: u64,
    /// Whether they are given back.
    pub is_suspended: bool,
}

/// One NCCL of the process.
#[derive(Debug, Clone, Copy)]
pub struct Nccl(Loaded);

// SAFETY: the tables of a loaded library are the same for all threads.
unsafe impl Send for Nccl {}

impl Nccl {
    /// The NCCL that contains this function.
    pub fn around(function: *const c_void) -> Option<Self> {
        Loaded::around(function).map(Self)
    }

    /// Its function of this name.
    pub fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        self.0.symbol(name)
    }

    /// Calls the function of this name, which returns a number about a communicator.
    unsafe fn number(self, name: &CStr, communicator: usize) -> Option<c_int> {
        let found = self.symbol(name)?;
        let mut number = 0;
        // SAFETY: `ncclCommCount` and the like have this type; the communicator exists by the caller's promise.
        let told = unsafe {
            mem::transmute::<*mut c_void, unsafe extern "C" fn(usize, *mut c_int) -> NcclResult>(found)(communicator, &raw mut number)
        };
        (told == answer::SUCCESS).then_some(number)
    }

    /// How many ranks a communicator has, if it is ready. NCCL does not call the driver for this.
    ///
    /// # Safety
    /// The communicator must be one of this NCCL's that exists.
    pub unsafe fn ranks(self, communicator: usize) -> Option<u32> {
        // SAFETY: the caller's promise.
        unsafe { self.number(c"ncclCommCount", communicator) }.and_then(|ranks| u32::try_from(ranks).ok()).filter(|ranks| *ranks > 0)
    }

    /// A communicator's device. NCCL does not call the driver for this.
    ///
    /// # Safety
    /// As for [`ranks`](Self::ranks).
    pub unsafe fn device(self, communicator: usize) -> Option<c_int> {
        // SAFETY: the caller's promise.
        unsafe { self.number(c"ncclCommCuDevice", communicator) }
    }

    /// Its version, such as `2.29.7`.
    pub fn version(self) -> String {
        let mut version = 0;
        if let Some(found) = self.symbol(c"ncclGetVersion") {
            // SAFETY: NCCL's function of this name has this type.
            unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> NcclResult>(found)(&raw mut version) };
        }
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// Whether it can suspend communicators.
    pub fn can_suspend(self) -> bool {
        [c"ncclCommSuspend", c"ncclCommResume", c"ncclCommMemStats"].iter().all(|name| self.symbol(name).is_some())
    }

    /// Suspends a communicator: gives its memory back, once all its ranks call this.
    ///
    /// # Safety
    /// As for [`ranks`](Self::ranks), and nobody may use the communicator meanwhile.
    pub unsafe fn suspend(self, communicator: usize) -> Result<(), NcclResult> {
        let found = self.symbol(c"ncclCommSuspend").ok_or(answer::INVALID_USAGE)?;
        // SAFETY: NCCL's function of this name has this type.
        done(unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(usize, c_int) -> NcclResult>(found)(communicator, MEMORY) })
    }

    /// Resumes a communicator: takes its memory back, once all its ranks call this.
    ///
    /// # Safety
    /// As for [`suspend`](Self::suspend).
    pub unsafe fn resume(self, communicator: usize) -> Result<(), NcclResult> {
        let found = self.symbol(c"ncclCommResume").ok_or(answer::INVALID_USAGE)?;
        // SAFETY: as above.
        done(unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> NcclResult>(found)(communicator) })
    }

    /// A communicator's memory. NCCL does not call the driver for this.
    ///
    /// # Safety
    /// As for [`ranks`](Self::ranks).
    pub unsafe fn memory(self, communicator: usize) -> Result<CommunicatorMemory, NcclResult> {
        let found = self.symbol(c"ncclCommMemStats").ok_or(answer::INVALID_USAGE)?;
        // SAFETY: as above.
        let tell = unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(usize, c_int, *mut u64) -> NcclResult>(found) };
        let told = |which| {
            let mut value = 0;
            // SAFETY: the caller's promise; `value` is writable.
            done(unsafe { tell(communicator, which, &raw mut value) }).map(|()| value)
        };
        // `ncclStatGpuMemSuspend`, `ncclStatGpuMemPersist` and `ncclStatGpuMemSuspended`.
        Ok(CommunicatorMemory { bytes: told(0)?, kept_bytes: told(2)?, is_suspended: told(1)? != 0 })
    }

    /// The text of a result code, with NCCL's last error message.
    pub fn text(self, answer: NcclResult) -> String {
        let said = |found: *mut c_char| {
            // SAFETY: null, or a string of NCCL's that stays.
            if found.is_null() { String::new() } else { unsafe { CStr::from_ptr(found) }.to_string_lossy().trim().to_owned() }
        };
        let means = self.symbol(c"ncclGetErrorString").map(|found| {
            // SAFETY: NCCL's function of this name has this type.
            said(unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(NcclResult) -> *mut c_char>(found)(answer) })
        });
        let last = self.symbol(c"ncclGetLastError").map(|found| {
            // SAFETY: as above; the communicator is not looked at.
            said(unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> *mut c_char>(found)(ptr::null_mut()) })
        });
        let means = means.filter(|text| !text.is_empty()).unwrap_or_else(|| format!("error {answer}"));
        match last.filter(|text| !text.is_empty()) {
            Some(last) => format!("{means}: {last}"),
            None => means,
        }
    }
}

fn done(answer: NcclResult) -> Result<(), NcclResult> {
    if answer == self::answer::SUCCESS { Ok(()) } else { Err(answer) }
}
