//! Other processes that hold a device's memory, as reported by NVML (queried only when memory is short), and device UUIDs.

use super::{CUdevice, Driver};
use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::{fs, mem, process, ptr};
use vramctl_host::symbols;
use vramctl_model::Holder;

/// The other processes that hold memory of `device`, largest first. Empty if NVML is missing or does not report them.
pub fn holders(device: CUdevice) -> Vec<Holder> {
    let mut holders = Nvml::load().map_or_else(Vec::new, |nvml| nvml.processes(device));
    holders.retain(|holder| holder.pid != process::id());
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// `nvmlProcessInfo_t` of `nvml.h`, as `nvmlDeviceGetComputeRunningProcesses_v3` fills it.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo {
    pid: c_uint,
    used_gpu_memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// `NVML_SUCCESS`.
const SUCCESS: c_uint = 0;

struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_uint,
    by_index: unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint,
    uuid: unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint,
    processes: unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_uint,
}

impl Nvml {
    fn load() -> Option<Self> {
        // SAFETY: a NUL-terminated name; the library stays open, so its functions stay valid.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the types match nvml.h, and each symbol is checked for null.
        unsafe {
            let symbol = |name: &CStr| ptr::NonNull::new(symbols::dlsym(library, name)).map(ptr::NonNull::as_ptr);
            let init = mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_uint>(symbol(c"nvmlInit_v2")?);
            let nvml = Self {
                shutdown: mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_uint>(symbol(c"nvmlShutdown")?),
                by_index: mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint>(symbol(
                    c"nvmlDeviceGetHandleByIndex_v2",
                )?),
                uuid: mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint>(symbol(
                    c"nvmlDeviceGetUUID",
                )?),
                by_uuid: mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint>(symbol(
                    c"nvmlDeviceGetHandleByUUID",
                )?),
                processes: mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_uint>(
                    symbol(c"nvmlDeviceGetComputeRunningProcesses_v3")?,
                ),
            };
            (init() == SUCCESS).then_some(nvml)
        }
    }

    fn uuid_of_index(&self, index: u32) -> Option<String> {
        let (mut handle, mut text) = (ptr::null_mut(), [0 as c_char; 96]);
        // SAFETY: NVML is initialised; `handle` and `text` are writable, and NVML is told the size of `text`.
        let answered = unsafe {
            (self.by_index)(index, &raw mut handle) == SUCCESS && (self.uuid)(handle, text.as_mut_ptr(), text.len() as c_uint) == SUCCESS
        };
        // SAFETY: NVML NUL-terminates the text within the given size.
        answered.then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn processes(&self, device: CUdevice) -> Vec<Holder> {
        let Some(uuid) = uuid(device).and_then(|uuid| CString::new(uuid).ok()) else { return Vec::new() };
        let mut handle = ptr::null_mut();
        let mut infos = [ProcessInfo { pid: 0, used_gpu_memory: 0, gpu_instance: 0, compute_instance: 0 }; 128];
        let mut count = infos.len() as c_uint;
        // SAFETY: NVML is initialised; `handle`, `count` and `infos` are writable, and `count` is the length of `infos`.
        let answered = unsafe {
            (self.by_uuid)(uuid.as_ptr(), &raw mut handle) == SUCCESS
                && (self.processes)(handle, &raw mut count, infos.as_mut_ptr()) == SUCCESS
        };
        let known = if answered { &infos[..(count as usize).min(infos.len())] } else { &[] };
        known
            .iter()
            .map(|info| Holder {
                pid: info.pid,
                bytes: Some(info.used_gpu_memory).filter(|bytes| *bytes != NOT_AVAILABLE),
                program: fs::read_to_string(format!("/proc/{}/comm", info.pid)).ok().map(|name| name.trim().to_owned()),
            })
            .collect()
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised in `load`; NVML is reference-counted, so the program's own use is unaffected.
        unsafe { (self.shutdown)() };
    }
}

/// The device's UUID as NVML writes it, `GPU-…`. Unlike the ordinal, it is the same in every process.
pub fn uuid(device: CUdevice) -> Option<String> {
    // SAFETY: plain bytes.
    let mut uuid: cudarc::driver::sys::CUuuid = unsafe { mem::zeroed() };
    // SAFETY: `uuid` is writable.
    unsafe { Driver::get().ok()?.cuDeviceGetUuid(&raw mut uuid, device).ok()? };
    let hex = format!("{:032x}", u128::from_be_bytes(uuid.bytes.map(|byte| byte as u8)));
    Some(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// The UUID of the GPU with this index in `nvidia-smi`; `None` if NVML is missing or has no such GPU.
pub fn uuid_of_index(index: u32) -> Option<String> {
    Nvml::load()?.uuid_of_index(index)
}
