//! Other processes that hold a device's memory, as reported by NVML, and device UUIDs. A program's process asks NVML only for a
//! suspend, when memory is short, and with a limit once for its context: NVML takes locks that a fork by another thread would leave locked in the child.

use super::{CUdevice, Driver, NoCards, devices};
use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::{mem, process, ptr};
use vramctl_host::program_of;
use vramctl_host::symbols;
use vramctl_model::{GpuUse, Holder};

/// The other processes that hold memory of `device`, largest first. Empty if NVML is missing or does not report them.
pub fn holders(device: CUdevice) -> Vec<Holder> {
    let mut holders = Nvml::load().map_or_else(|_| Vec::new(), |nvml| nvml.processes(device));
    holders.retain(|holder| holder.pid != process::id());
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// A GPU of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Card {
    /// Its index in `nvidia-smi`.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// The model.
    pub name: String,
    /// Its address on the bus, `00000000:18:00.0`.
    pub bus: String,
    /// Bytes free.
    pub free: u64,
    /// Bytes in use by processes and by the driver. Older drivers include reserved memory.
    pub used: u64,
    /// Bytes that the driver reserves; `None` if it does not distinguish them from `used`.
    pub reserved: Option<u64>,
    /// Bytes in all.
    pub total: u64,
    /// The share of NVML's last sample period in which kernels were running, in percent; `None` if NVML does not report it.
    pub utilization: Option<u32>,
    /// Whether it is split into instances (MIG).
    pub mig: bool,
}

/// The GPUs of this machine, or container: at least one.
pub fn cards() -> Result<Vec<Card>, NoCards> {
    let nvml = Nvml::load()?;
    let mut count = 0;
    // SAFETY: NVML is initialised; `count` is writable.
    nvml.done("nvmlDeviceGetCount_v2", unsafe { (nvml.count)(&raw mut count) })?;
    let cards: Vec<_> = (0..count).filter_map(|index| nvml.card(index)).collect();
    match (cards.is_empty(), count) {
        (false, _) => Ok(cards),
        (true, 0) => Err(NoCards::None),
        (true, _) => Err(NoCards::Fails(format!("it counts {count} GPUs, and describes none of them"))),
    }
}

/// The processes that hold memory of the GPU with this UUID, largest first.
pub fn holders_of(uuid: &str) -> Vec<Holder> {
    let mut holders = Nvml::load().map_or_else(|_| Vec::new(), |nvml| nvml.processes_on(uuid));
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// How warm a GPU is, and what it draws, as far as NVML reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Climate {
    /// Degrees Celsius.
    pub celsius: Option<u32>,
    /// Milliwatts.
    pub milliwatts: Option<u32>,
}

/// That of the GPU with this UUID.
pub fn climate(uuid: &str) -> Climate {
    Nvml::load().map_or_else(|_| Climate::default(), |nvml| nvml.climate(uuid))
}

/// The index in `nvidia-smi` of the GPU with this UUID; `None` if NVML does not say.
pub fn index_of(uuid: &str) -> Option<u32> {
    let nvml = Nvml::load().ok()?;
    (0..).map_while(|index| Some((index, nvml.uuid_of_index(index)?))).find(|(_, its)| its == uuid).map(|(index, _)| index)
}

/// Loads NVML, which takes a while, as does the first question about a GPU (9 ms on an H100), and keeps it loaded, so that later questions about
/// the GPUs with these UUIDs are fast. Only for the command line: must not be called in a program's process.
pub fn keep_nvml<'a>(uuids: impl IntoIterator<Item = &'a str>) {
    if let Ok(nvml) = Nvml::load().map(mem::ManuallyDrop::new) {
        for uuid in uuids {
            nvml.processes_on(uuid);
        }
    }
}

/// This process's memory on a device. `None` if NVML cannot identify this process, as in some containers.
pub fn own_use(device: CUdevice) -> Option<u64> {
    Nvml::load().ok()?.own_use(device)
}

/// This process's memory on each GPU that it sees, as NVML tells.
pub fn uses() -> Vec<GpuUse> {
    uses_by(Nvml::load().ok().as_ref())
}

/// The same as far as the driver knows it: what programs use.
pub fn usual_uses() -> Vec<GpuUse> {
    uses_by(None)
}

fn uses_by(nvml: Option<&Nvml>) -> Vec<GpuUse> {
    /// Used if NVML cannot identify this process, as in some containers. Apart from paused memory, programs use 0.8 to 0.9 GiB.
    const USUAL: u64 = 1 << 30;
    let has_context = |device| {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both are writable.
        let asked = Driver::get().and_then(|driver| unsafe { driver.cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) });
        asked.is_ok() && active != 0
    };
    devices()
        .filter_map(|device| {
            let uuid = uuid(device)?;
            Some(GpuUse {
                bytes: nvml.and_then(|nvml| nvml.own_use(device)).unwrap_or_else(|| {
                    let used = nvml.and_then(|nvml| nvml.used(&uuid)).unwrap_or(USUAL);
                    if has_context(device) { USUAL.min(used) } else { 0 }
                }),
                uuid,
            })
        })
        .collect()
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

/// `nvmlMemory_t`.
#[repr(C)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`: percent.
#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlPciInfo_t`, as `nvmlDeviceGetPciInfo_v3` fills it.
#[repr(C)]
struct PciInfo {
    legacy_bus: [c_char; 16],
    numbers: [c_uint; 5],
    bus: [c_char; 32],
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryInfo2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

type AskProcesses = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut ProcessInfo) -> c_uint;

struct Nvml {
    count: unsafe extern "C" fn(*mut c_uint) -> c_uint,
    name: unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint,
    bus: unsafe extern "C" fn(*mut c_void, *mut PciInfo) -> c_uint,
    memory: unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_uint,
    shutdown: unsafe extern "C" fn() -> c_uint,
    by_index: unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint,
    uuid: unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint,
    processes: AskProcesses,
    /// Absent before driver 510.
    memory2: Option<unsafe extern "C" fn(*mut c_void, *mut MemoryInfo2) -> c_uint>,
    /// GPUs with MIG do not report it.
    utilization: Option<unsafe extern "C" fn(*mut c_void, *mut Utilization) -> c_uint>,
    /// Lists graphics processes, which are not among `processes`.
    drawing: Option<AskProcesses>,
    error_text: Option<unsafe extern "C" fn(c_uint) -> *const c_char>,
    /// The sensor, and degrees.
    temperature: Option<unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_uint>,
    power: Option<unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_uint>,
    /// Absent before driver 450.
    mig_mode: Option<unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_uint>,
}

impl Nvml {
    fn load() -> Result<Self, NoCards> {
        // SAFETY: a NUL-terminated name; the library stays open, so its functions stay valid.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: after a failure it is a text, valid until the next call.
            return Err(NoCards::NoLibrary(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned()));
        }
        // SAFETY: an open library; the types of the fields, and of `init`, are those of nvml.h.
        unsafe {
            let init: unsafe extern "C" fn() -> c_uint = function(library, c"nvmlInit_v2")?;
            // Dropping it shuts NVML down, so not before it is initialised.
            let nvml = mem::ManuallyDrop::new(Self {
                count: function(library, c"nvmlDeviceGetCount_v2")?,
                name: function(library, c"nvmlDeviceGetName")?,
                bus: function(library, c"nvmlDeviceGetPciInfo_v3")?,
                memory: function(library, c"nvmlDeviceGetMemoryInfo")?,
                shutdown: function(library, c"nvmlShutdown")?,
                by_index: function(library, c"nvmlDeviceGetHandleByIndex_v2")?,
                uuid: function(library, c"nvmlDeviceGetUUID")?,
                by_uuid: function(library, c"nvmlDeviceGetHandleByUUID")?,
                processes: function(library, c"nvmlDeviceGetComputeRunningProcesses_v3")?,
                memory2: function(library, c"nvmlDeviceGetMemoryInfo_v2").ok(),
                utilization: function(library, c"nvmlDeviceGetUtilizationRates").ok(),
                temperature: function(library, c"nvmlDeviceGetTemperature").ok(),
                power: function(library, c"nvmlDeviceGetPowerUsage").ok(),
                drawing: function(library, c"nvmlDeviceGetGraphicsRunningProcesses_v3").ok(),
                error_text: function(library, c"nvmlErrorString").ok(),
                mig_mode: function(library, c"nvmlDeviceGetMigMode").ok(),
            });
            nvml.done("nvmlInit_v2", init())?;
            Ok(mem::ManuallyDrop::into_inner(nvml))
        }
    }

    /// The answer of a call.
    fn done(&self, call: &str, code: c_uint) -> Result<(), NoCards> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: a static text, for any code, also before NVML is initialised.
        let text = self.error_text.map_or_else(String::new, |ask| format!(" ({})", unsafe { CStr::from_ptr(ask(code)) }.to_string_lossy()));
        Err(NoCards::Fails(format!("{call} answers {code}{text}")))
    }

    fn uuid_of_index(&self, index: u32) -> Option<String> {
        let (mut handle, mut text) = (ptr::null_mut(), [0 as c_char; 96]);
        // SAFETY: NVML is initialised; `handle` and `text` are writable, and NVML gets the size of `text`.
        let answered = unsafe {
            (self.by_index)(index, &raw mut handle) == SUCCESS && (self.uuid)(handle, text.as_mut_ptr(), text.len() as c_uint) == SUCCESS
        };
        // SAFETY: NVML NUL-terminates the text within the given size.
        answered.then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn card(&self, index: u32) -> Option<Card> {
        let (mut handle, mut text) = (ptr::null_mut(), [0 as c_char; 96]);
        // SAFETY: NVML is initialised, and the structures are plain data; all places are writable and of the sizes passed, and NVML
        // NUL-terminates within them.
        unsafe {
            let (mut memory, mut bus): (MemoryInfo, PciInfo) = (mem::zeroed(), mem::zeroed());
            let read = |text: &[c_char]| CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
            let uuid = self.uuid_of_index(index)?;
            let answered = (self.by_index)(index, &raw mut handle) == SUCCESS
                && (self.name)(handle, text.as_mut_ptr(), text.len() as c_uint) == SUCCESS
                && (self.bus)(handle, &raw mut bus) == SUCCESS
                && (self.memory)(handle, &raw mut memory) == SUCCESS;
            let exact = self.memory_and_reserved(handle);
            let (used, reserved) = exact.map_or((memory.used, None), |memory| (memory.used, Some(memory.reserved)));
            let MemoryInfo { free, total, .. } = memory;
            let mig = answered && self.is_in_mig_mode(handle);
            let utilization = if answered { self.utilization(handle) } else { None };
            answered.then(|| Card { index, uuid, name: read(&text), bus: read(&bus.bus), free, used, reserved, total, utilization, mig })
        }
    }

    /// GPUs without MIG answer with an error.
    ///
    /// # Safety
    /// `handle` must be one of NVML's.
    unsafe fn is_in_mig_mode(&self, handle: *mut c_void) -> bool {
        let (mut now, mut after_a_reset) = (0, 0);
        // SAFETY: NVML is initialised; both are writable.
        self.mig_mode.is_some_and(|ask| unsafe { ask(handle, &raw mut now, &raw mut after_a_reset) } == SUCCESS) && now != 0
    }

    /// # Safety
    /// `handle` must be one of NVML's.
    unsafe fn utilization(&self, handle: *mut c_void) -> Option<u32> {
        let mut rates = Utilization { gpu: 0, memory: 0 };
        // SAFETY: NVML is initialised; `rates` is writable.
        (unsafe { (self.utilization?)(handle, &raw mut rates) } == SUCCESS).then_some(rates.gpu)
    }

    fn climate(&self, uuid: &str) -> Climate {
        /// `NVML_TEMPERATURE_GPU`.
        const OF_THE_CHIP: c_uint = 0;
        let Some(handle) = self.handle(uuid) else { return Climate::default() };
        let (mut celsius, mut milliwatts) = (0, 0);
        // SAFETY: NVML is initialised, and the handle is its own; both are writable.
        let (is_warm, draws) = unsafe {
            (
                self.temperature.is_some_and(|ask| ask(handle, OF_THE_CHIP, &raw mut celsius) == SUCCESS),
                self.power.is_some_and(|ask| ask(handle, &raw mut milliwatts) == SUCCESS),
            )
        };
        Climate { celsius: is_warm.then_some(celsius), milliwatts: draws.then_some(milliwatts) }
    }

    fn handle(&self, uuid: &str) -> Option<*mut c_void> {
        let (uuid, mut handle) = (CString::new(uuid).ok()?, ptr::null_mut());
        // SAFETY: NVML is initialised; `handle` is writable.
        (unsafe { (self.by_uuid)(uuid.as_ptr(), &raw mut handle) } == SUCCESS).then_some(handle)
    }

    /// # Safety
    /// `handle` must be one of NVML's.
    unsafe fn memory_and_reserved(&self, handle: *mut c_void) -> Option<MemoryInfo2> {
        // NVML_STRUCT_VERSION: the size, and the version in the upper bits.
        const VERSION: c_uint = mem::size_of::<MemoryInfo2>() as c_uint | 2 << 24;
        let mut memory = MemoryInfo2 { version: VERSION, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: NVML is initialised; `memory` is writable and says which structure it is.
        (unsafe { (self.memory2?)(handle, &raw mut memory) } == SUCCESS).then_some(memory)
    }

    /// Bytes in use on a GPU, by anybody.
    fn used(&self, uuid: &str) -> Option<u64> {
        let handle = self.handle(uuid)?;
        let mut memory = MemoryInfo { total: 0, free: 0, used: 0 };
        // SAFETY: NVML is initialised, and the handle is its own; `memory` is writable.
        (unsafe { (self.memory)(handle, &raw mut memory) } == SUCCESS).then_some(memory.used)
    }

    /// This process's.
    fn own_use(&self, device: CUdevice) -> Option<u64> {
        self.processes(device).into_iter().find(|holder| holder.pid == process::id())?.bytes
    }

    fn processes(&self, device: CUdevice) -> Vec<Holder> {
        uuid(device).map_or_else(Vec::new, |uuid| self.processes_on(&uuid))
    }

    fn processes_on(&self, uuid: &str) -> Vec<Holder> {
        let Some(handle) = self.handle(uuid) else { return Vec::new() };
        let mut holders = Vec::<Holder>::new();
        for ask in [Some(self.processes), self.drawing].into_iter().flatten() {
            let mut infos = [ProcessInfo { pid: 0, used_gpu_memory: 0, gpu_instance: 0, compute_instance: 0 }; 128];
            let mut count = infos.len() as c_uint;
            // SAFETY: NVML is initialised, and the handle is its own; `count` and `infos` are writable, and `count` is the length of `infos`.
            let answered = unsafe { ask(handle, &raw mut count, infos.as_mut_ptr()) } == SUCCESS;
            for info in &infos[..if answered { (count as usize).min(infos.len()) } else { 0 }] {
                // A process that does both is in both lists, with the same bytes.
                if holders.iter().all(|holder| holder.pid != info.pid) {
                    holders.push(Holder {
                        pid: info.pid,
                        bytes: Some(info.used_gpu_memory).filter(|bytes| *bytes != NOT_AVAILABLE),
                        program: program_of(info.pid),
                    });
                }
            }
        }
        holders
    }
}

/// A function of an open library. Fails if the library does not have it.
///
/// # Safety
/// `F` must be the type of this function, and `library` must stay open while it is called.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F, NoCards> {
    const { assert!(mem::size_of::<F>() == mem::size_of::<*mut c_void>(), "a function") };
    // SAFETY: an open library.
    let found = unsafe { symbols::dlsym(library, name) };
    if found.is_null() {
        return Err(NoCards::NoLibrary(format!("libnvidia-ml.so.1 has no {}", name.to_string_lossy())));
    }
    // SAFETY: it is not null, has the size of a pointer, and the caller promises the type.
    Ok(unsafe { mem::transmute_copy(&found) })
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

/// A device in a message of the program's process: by its UUID, to which the command line adds the index in `nvidia-smi`.
pub fn gpu_in_words(device: CUdevice) -> String {
    vramctl_model::gpu_in_words(device, uuid(device).as_deref(), None)
}

/// A device in a line that nothing but the program's process writes, such as one of its log: by its index in `nvidia-smi` and its UUID.
/// Asks NVML, so it takes a while.
pub fn gpu_with_index(device: CUdevice) -> String {
    let uuid = uuid(device);
    vramctl_model::gpu_in_words(device, uuid.as_deref(), uuid.as_deref().and_then(index_of))
}

/// The UUID of the GPU with this index in `nvidia-smi`; `None` if there is no such GPU.
pub fn uuid_of_index(index: u32) -> Result<Option<String>, NoCards> {
    Ok(Nvml::load()?.uuid_of_index(index))
}
