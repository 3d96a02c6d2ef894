//! Shared by the tests, each of which runs in a process of its own that loads the library as a program would.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(
    dead_code,
    unused_macros,
    missing_docs,
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    clippy::macro_metavars_in_unsafe
)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Marks the process that runs a test's body.
const INSIDE: &str = "SIMGPU_TEST_INSIDE";

/// Runs a test's body in a process of its own, because the driver's state is per process and the environment is read once.
pub fn isolated(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        body();
        return;
    }
    let output = command(test, environment).output().expect("the test's own process");
    assert!(
        output.status.success(),
        "{test}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The same with the driver, initialised.
pub fn on_gpu(test: &str, environment: &[(&str, &str)], body: impl FnOnce(Gpu)) {
    isolated(test, environment, || body(Gpu::start()));
}

/// A process that runs another test's body, or a part of this one (see [`part`]).
pub fn command(test: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's path"));
    command.args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SIMGPU_")) {
        command.env_remove(name);
    }
    command.env(INSIDE, "1").envs(environment.iter().copied());
    command
}

/// Starts a process and waits until it prints `line`.
pub fn start_until(command: &mut Command, line: &str) -> Child {
    use std::io::{BufRead, BufReader};
    let mut child = command.stdout(Stdio::piped()).spawn().expect("a helper");
    let stdout = child.stdout.as_mut().expect("its stdout");
    for said in BufReader::new(stdout).lines() {
        if said.expect("a line").contains(line) {
            return child;
        }
    }
    panic!("the helper ended without saying {line}: {:?}", child.wait());
}

/// A temporary directory, removed on drop.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("simgpu-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    pub fn text(&self) -> &str {
        self.0.to_str().expect("a readable path")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The library that Cargo built for this run.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the test's path");
    let dependencies = test.parent().expect("its directory");
    let outside = dependencies.parent().expect("the profile's directory");
    [dependencies, outside]
        .into_iter()
        .map(|directory| directory.join("libsimgpu.so"))
        .filter(|path| path.exists())
        .max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok())
        .expect("libsimgpu.so beside the test")
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Prop {
    pub kind: u32,
    pub handle_types: u32,
    pub location: [i32; 2],
    pub win32: *mut c_void,
    pub flags: [u8; 8],
}

pub fn prop(device: i32) -> Prop {
    Prop { kind: 1, handle_types: 0, location: [1, device], win32: std::ptr::null_mut(), flags: [0; 8] }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    pub location: [i32; 2],
    pub flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ipc(pub [u8; 64]);

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Process {
    pub pid: u32,
    pub used: u64,
    pub instances: [u32; 2],
}

/// Old and new UUID of each device.
#[repr(C)]
pub struct RestoreArgs {
    pub pairs: *const [[u8; 16]; 2],
    pub count: u32,
    pub reserved: [u8; 44],
    pub reserved_too: u64,
}

macro_rules! library {
    ($($name:ident($($kind:ty),*) -> $result:ty;)*) => {
        /// The library's functions.
        #[derive(Clone, Copy)]
        pub struct Gpu {
            $(pub $name: unsafe extern "C" fn($($kind),*) -> $result,)*
        }

        impl Gpu {
            /// Loads the library.
            pub fn load() -> Self {
                let path = CString::new(library().to_str().unwrap()).unwrap();
                unsafe {
                    let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
                    assert!(!library.is_null(), "{path:?} cannot be loaded");
                    Self {
                        $($name: {
                            let name = CString::new(stringify!($name)).unwrap();
                            let symbol = libc::dlsym(library, name.as_ptr());
                            assert!(!symbol.is_null(), "{name:?} is missing");
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> $result>(symbol)
                        },)*
                    }
                }
            }
        }
    };
}

library! {
    cuInit(u32) -> u32;
    cuDriverGetVersion(*mut i32) -> u32;
    cuDeviceGetCount(*mut i32) -> u32;
    cuDeviceGetPCIBusId(*mut c_char, c_int, i32) -> u32;
    cuDeviceGetByPCIBusId(*mut i32, *const c_char) -> u32;
    cuDeviceGetDefaultMemPool(*mut u64, i32) -> u32;
    cuDevicePrimaryCtxGetState(i32, *mut u32, *mut i32) -> u32;
    cuDeviceGetAttribute(*mut i32, i32, i32) -> u32;
    cuDevicePrimaryCtxRetain(*mut u64, i32) -> u32;
    cuDevicePrimaryCtxRelease_v2(i32) -> u32;
    cuDevicePrimaryCtxReset_v2(i32) -> u32;
    cuCtxCreate_v2(*mut u64, u32, i32) -> u32;
    cuCtxDestroy_v2(u64) -> u32;
    cuCtxGetCurrent(*mut u64) -> u32;
    cuCtxSetCurrent(u64) -> u32;
    cuCtxPushCurrent_v2(u64) -> u32;
    cuCtxPopCurrent_v2(*mut u64) -> u32;
    cuCtxSynchronize() -> u32;
    cuCtxRecordEvent(u64, u64) -> u32;
    cuCtxGetDevice(*mut i32) -> u32;
    cuCtxGetId(u64, *mut u64) -> u32;
    cuMemGetAllocationGranularity(*mut usize, *const Prop, u32) -> u32;
    cuMemAddressReserve(*mut u64, usize, usize, u64, u64) -> u32;
    cuMemAddressFree(u64, usize) -> u32;
    cuMemCreate(*mut u64, usize, *const Prop, u64) -> u32;
    cuMemRelease(u64) -> u32;
    cuMemMap(u64, usize, usize, u64, u64) -> u32;
    cuMemUnmap(u64, usize) -> u32;
    cuMemSetAccess(u64, usize, *const Access, usize) -> u32;
    cuMemGetAccess(*mut u64, *const [i32; 2], u64) -> u32;
    cuMemRetainAllocationHandle(*mut u64, u64) -> u32;
    cuMemGetInfo_v2(*mut usize, *mut usize) -> u32;
    cuMemAlloc_v2(*mut u64, usize) -> u32;
    cuMemAllocPitch_v2(*mut u64, *mut usize, usize, usize, u32) -> u32;
    cuMemFree_v2(u64) -> u32;
    cuMemPoolTrimTo(u64, usize) -> u32;
    cuMemPoolSetAttribute(u64, u32, *mut c_void) -> u32;
    cuMemPoolGetAttribute(u64, u32, *mut c_void) -> u32;
    cuMemPoolSetAccess(u64, *const Access, usize) -> u32;
    cuMemGetAddressRange_v2(*mut u64, *mut usize, u64) -> u32;
    cuMemHostGetDevicePointer_v2(*mut u64, u64, u32) -> u32;
    cuPointerGetAttribute(*mut c_void, i32, u64) -> u32;
    cuPointerSetAttribute(*const u32, i32, u64) -> u32;
    cuPointerGetAttributes(u32, *const i32, *mut *mut c_void, u64) -> u32;
    cuMemAllocAsync(*mut u64, usize, u64) -> u32;
    cuMemFreeAsync(u64, u64) -> u32;
    cuMemAllocManaged(*mut u64, usize, u32) -> u32;
    cuIpcGetMemHandle(*mut [u8; 64], u64) -> u32;
    cuIpcOpenMemHandle_v2(*mut u64, Ipc, u32) -> u32;
    cuIpcCloseMemHandle(u64) -> u32;
    cuMemExportToShareableHandle(*mut c_int, u64, u32, u64) -> u32;
    cuMemImportFromShareableHandle(*mut u64, usize, u32) -> u32;
    cuMemGetAllocationPropertiesFromHandle(*mut Prop, u64) -> u32;
    cuMemHostAlloc(*mut u64, usize, u32) -> u32;
    cuMemFreeHost(u64) -> u32;
    cuMemHostRegister_v2(u64, usize, u32) -> u32;
    cuMemHostUnregister(u64) -> u32;
    cuMemcpy(u64, u64, usize) -> u32;
    cuMemcpyHtoD_v2(u64, u64, usize) -> u32;
    cuMemcpyDtoH_v2(u64, u64, usize) -> u32;
    cuMemcpyDtoD_v2(u64, u64, usize) -> u32;
    cuMemcpyAsync(u64, u64, usize, u64) -> u32;
    cuMemcpyDtoDAsync_v2(u64, u64, usize, u64) -> u32;
    cuMemcpyHtoDAsync_v2(u64, u64, usize, u64) -> u32;
    cuMemcpyDtoHAsync_v2(u64, u64, usize, u64) -> u32;
    cuMemsetD8_v2(u64, u8, usize) -> u32;
    cuMemsetD8Async(u64, u8, usize, u64) -> u32;
    cuMemsetD32_v2(u64, u32, usize) -> u32;
    cuStreamCreate(*mut u64, u32) -> u32;
    cuStreamDestroy_v2(u64) -> u32;
    cuStreamSynchronize(u64) -> u32;
    cuStreamQuery(u64) -> u32;
    cuStreamGetCtx(u64, *mut u64) -> u32;
    cuStreamGetId(u64, *mut u64) -> u32;
    cuStreamWaitEvent(u64, u64, u32) -> u32;
    cuStreamWaitValue32_v2(u64, u64, u32, u32) -> u32;
    cuStreamWaitValue64_v2(u64, u64, u64, u32) -> u32;
    cuModuleLoadData(*mut u64, *const c_char) -> u32;
    cuModuleUnload(u64) -> u32;
    cuModuleGetFunction(*mut u64, u64, *const c_char) -> u32;
    cuLaunchKernel(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const c_void, usize) -> u32;
    cuLaunchHostFunc(u64, unsafe extern "C" fn(*mut c_void), *mut c_void) -> u32;
    cuStreamAddCallback(u64, Option<unsafe extern "C" fn(u64, u32, *mut c_void)>, *mut c_void, u32) -> u32;
    cuEventCreate(*mut u64, u32) -> u32;
    cuEventDestroy_v2(u64) -> u32;
    cuEventRecord(u64, u64) -> u32;
    cuEventQuery(u64) -> u32;
    cuEventSynchronize(u64) -> u32;
    cuEventElapsedTime(*mut f32, u64, u64) -> u32;
    cuStreamBeginCapture_v2(u64, u32) -> u32;
    cuStreamEndCapture(u64, *mut u64) -> u32;
    cuStreamIsCapturing(u64, *mut u32) -> u32;
    cuThreadExchangeStreamCaptureMode(*mut u32) -> u32;
    cuGraphInstantiateWithFlags(*mut u64, u64, u64) -> u32;
    cuGraphInstantiateWithParams(*mut u64, u64, *mut [u64; 4]) -> u32;
    cuGraphGetNodes(u64, *mut u64, *mut usize) -> u32;
    cuGraphLaunch(u64, u64) -> u32;
    cuGraphDestroy(u64) -> u32;
    cuGraphExecDestroy(u64) -> u32;
    cuDeviceGetUuid_v2(*mut [u8; 16], i32) -> u32;
    cuCheckpointProcessGetState(i32, *mut u32) -> u32;
    cuCheckpointProcessLock(i32, *const [u32; 16]) -> u32;
    cuCheckpointProcessCheckpoint(i32, *const [u64; 8]) -> u32;
    cuCheckpointProcessRestore(i32, *const RestoreArgs) -> u32;
    cuCheckpointProcessUnlock(i32, *const [u64; 8]) -> u32;
    cuGetProcAddress_v2(*const c_char, *mut *mut c_void, c_int, u64, *mut u32) -> u32;
    cuGetErrorName(u32, *mut *const c_char) -> u32;
    nvmlInit_v2() -> u32;
    nvmlDeviceGetHandleByIndex_v2(u32, *mut u64) -> u32;
    nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut u64) -> u32;
    nvmlDeviceGetHandleByUUID(*const c_char, *mut u64) -> u32;
    nvmlDeviceGetUUID(u64, *mut c_char, u32) -> u32;
    nvmlDeviceGetMemoryInfo(u64, *mut [u64; 3]) -> u32;
    nvmlDeviceGetTemperature(u64, u32, *mut u32) -> u32;
    nvmlDeviceGetPowerUsage(u64, *mut u32) -> u32;
    nvmlDeviceGetUtilizationRates(u64, *mut [u32; 2]) -> u32;
    nvmlDeviceGetComputeRunningProcesses_v3(u64, *mut u32, *mut Process) -> u32;
    simgpu_fail(*const c_char, u64, u32, u64) -> c_int;
    simgpu_clear_faults() -> ();
    simgpu_calls(*const c_char) -> u64;
    simgpu_used(c_int) -> u64;
    simgpu_live(*const c_char) -> u64;
    simgpu_set_op_delay_ms(u64) -> ();
    simgpu_occupy(c_int, u64) -> ();
}

/// 2 MiB, the granularity.
pub const MIB2: usize = 2 << 20;

/// A call that must succeed.
macro_rules! ok {
    ($gpu:ident . $name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(unsafe { ($gpu.$name)($($argument),*) }, 0, stringify!($name))
    };
}

/// A call that must return a code.
macro_rules! fails {
    ($code:expr, $gpu:ident . $name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(unsafe { ($gpu.$name)($($argument),*) }, $code, stringify!($name))
    };
}

/// Long enough for every test: a delay of operations that the test ends itself.
pub const LONG_MS: u64 = 600_000;

impl Gpu {
    /// Sets how long operations take, including those that have begun.
    pub fn slow_down(&self, milliseconds: u64) {
        unsafe { (self.simgpu_set_op_delay_ms)(milliseconds) };
    }

    /// Waits until this many operations have begun and are being delayed.
    pub fn until_delayed(&self, operations: u64) {
        while self.live("delayed") != operations {
            std::thread::yield_now();
        }
    }

    /// Loads the library and makes device 0's primary context current.
    pub fn start() -> Self {
        let gpu = Self::load();
        ok!(gpu.cuInit(0));
        gpu.use_device(0);
        gpu
    }

    pub fn use_device(&self, device: i32) -> u64 {
        let gpu = self;
        let mut context = 0;
        ok!(gpu.cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(gpu.cuCtxSetCurrent(context));
        context
    }

    pub fn live(&self, kind: &str) -> u64 {
        let kind = CString::new(kind).unwrap();
        unsafe { (self.simgpu_live)(kind.as_ptr()) }
    }

    pub fn used(&self) -> u64 {
        unsafe { (self.simgpu_used)(0) }
    }

    pub fn fail(&self, name: &str, nth: u64, code: u32, count: u64) -> c_int {
        let name = CString::new(name).unwrap();
        unsafe { (self.simgpu_fail)(name.as_ptr(), nth, code, count) }
    }

    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        unsafe { (self.simgpu_calls)(name.as_ptr()) }
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let gpu = self;
        let mut pointer = 0;
        ok!(gpu.cuMemAlloc_v2(&raw mut pointer, bytes));
        pointer
    }

    pub fn create(&self, bytes: usize) -> u64 {
        let gpu = self;
        let mut handle = 0;
        ok!(gpu.cuMemCreate(&raw mut handle, bytes, &prop(0), 0));
        handle
    }

    pub fn reserve(&self, bytes: usize) -> u64 {
        let gpu = self;
        let mut pointer = 0;
        ok!(gpu.cuMemAddressReserve(&raw mut pointer, bytes, 0, 0, 0));
        pointer
    }

    pub fn access(&self, pointer: u64, bytes: usize, flags: u32) {
        let gpu = self;
        ok!(gpu.cuMemSetAccess(pointer, bytes, &Access { location: [1, 0], flags }, 1));
    }

    /// Reserves, creates, maps and makes accessible, and releases the handle.
    pub fn map_new(&self, bytes: usize) -> u64 {
        let pointer = self.reserve(bytes);
        self.put_new(pointer, bytes);
        pointer
    }

    /// Maps new memory at reserved addresses.
    pub fn put_new(&self, pointer: u64, bytes: usize) {
        let gpu = self;
        let handle = self.create(bytes);
        ok!(gpu.cuMemMap(pointer, bytes, 0, handle, 0));
        ok!(gpu.cuMemRelease(handle));
        self.access(pointer, bytes, 3);
    }

    pub fn upload(&self, to: u64, bytes: &[u8]) {
        let gpu = self;
        ok!(gpu.cuMemcpyHtoD_v2(to, bytes.as_ptr() as u64, bytes.len()));
    }

    pub fn download(&self, from: u64, bytes: usize) -> Vec<u8> {
        let gpu = self;
        let mut result = vec![0xee; bytes];
        ok!(gpu.cuMemcpyDtoH_v2(result.as_mut_ptr() as u64, from, bytes));
        result
    }

    pub fn stream(&self, flags: u32) -> u64 {
        let gpu = self;
        let mut stream = 0;
        ok!(gpu.cuStreamCreate(&raw mut stream, flags));
        stream
    }
}

/// A word of host memory that streams wait for.
pub struct Gate(pub u64);

impl Gate {
    pub fn new(gpu: &Gpu) -> Self {
        let mut word = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut word, 64, 0));
        Self(word)
    }

    pub fn set(&self, value: u32) {
        unsafe { std::sync::atomic::AtomicU32::from_ptr(self.0 as *mut u32) }.store(value, std::sync::atomic::Ordering::Release);
    }
}
