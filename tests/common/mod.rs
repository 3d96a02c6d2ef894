//! Shared by the tests: the simulated GPU inside the test process, and the CUDA calls that a program would make.
//!
//! The test binary plays both parts: it is the program that calls the hooked functions, and it makes the driver fail
//! (`fail`). One test at a time holds the [`Gpu`], because a process has only one driver.
#![allow(
    dead_code,
    missing_docs,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_transmute_annotations,
    clippy::unused_self
)]

pub mod generated;
pub mod images;
pub mod machine;
pub mod sharing;
pub mod warnings;

use cudarc::driver::sys::CUmemAllocationProp;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::mem::transmute;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use vramctl_backup::CopyBy;
use vramctl_core::memory::Memory;
use vramctl_core::transition::{Failed, Pause, Preparation, Prepared, Resume};
use vramctl_driver::ContextHandle;
use vramctl_intercept::{entries, hooks as interpose};
use vramctl_model::{Error, PauseRequest, Report, ResumeRequest, Selection, TagState};

pub const MIB: usize = 1 << 20;
pub const DEVICES: i32 = 2;
/// Device memory of the simulated machine in the test process: small, so that running out is quick.
pub const DEVICE_BYTES: usize = 256 * MIB;

/// The tag that `VRAMCTL_BACKUP` discards in the test process.
pub const DISCARDED_TAG: &str = "cache-by-environment";
/// The tag that `VRAMCTL_RETAIN` names in the test process.
pub const RETAINED_TAG: &str = "retained-by-environment";
/// Sets the library's log level in the test process; `off` by default.
pub const LOG_LEVEL: &str = "TESTS_LOG_LEVEL";
/// `VRAMCTL_HOST_CAP` in the test process.
pub const HOST_CAP: u64 = 192 << 20;

/// A delay that the test ends itself, after whatever time the machine takes.
pub const LONG_MS: u64 = 600_000;

/// How many cases a random test has: `PROPTEST_CASES`, or else this many.
pub fn cases(otherwise: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(otherwise)
}

/// Some of the cases, chosen by `FAULTS_SEED`; `PROPTEST_CASES` sets how many, so that a high one sweeps all.
pub fn some<C: Debug>(mut cases: Vec<C>, count: u32) -> Vec<C> {
    let seed = std::env::var("FAULTS_SEED").unwrap_or_default();
    cases.sort_by_cached_key(|case| {
        let mut hasher = DefaultHasher::new();
        (&seed, format!("{case:?}")).hash(&mut hasher);
        hasher.finish()
    });
    cases.truncate(self::cases(count) as usize);
    cases
}

/// Tries until it succeeds; the last failure if it never does. Only a hang takes longer than the limit, however busy the machine is.
pub fn patiently<T, E>(mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let begun = Instant::now();
    loop {
        let done = attempt();
        if done.is_ok() || begun.elapsed() >= Duration::from_secs(100) {
            return done;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Tells threads of a scope to end, also if a check fails: the scope would wait for them without end.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does `work` for each of the cases, a few at a time: most wait for programs.
pub fn in_parallel<Case: Send>(cases: Vec<Case>, threads: usize, work: impl Fn(Case) + Sync) {
    let cases = Mutex::new(cases.into_iter());
    let next = || cases.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(case) = next() {
                    work(case);
                }
            });
        }
    });
}

/// Waits until it is so.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let done = patiently(|| if is_so() { Ok(()) } else { Err(()) });
    assert!(done.is_ok(), "not in time: {what}");
}

/// Waits until a command that resumes a job has found too little memory and waits for it.
#[track_caller]
pub fn eventually_waits_for_memory(sockets: &Path) {
    eventually("a job waits for memory", || {
        let files = std::fs::read_dir(sockets).unwrap().map(|file| file.unwrap().path());
        let mut tickets = files.filter(|path| path.extension().is_some_and(|end| end == "ticket"));
        tickets.any(|ticket| std::fs::read_to_string(ticket).is_ok_and(|text| text.contains("\"stage\":\"waits_for_memory\"")))
    });
}

/// Set by `scripts/test`, and for a test that starts itself many times: everything is built already.
pub const BUILT: &str = "TESTS_ARE_BUILT";

/// The directory with the test libraries and programs, built if needed.
pub fn artifacts() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let target = std::env::current_exe().expect("a path").ancestors().nth(2).expect("a folder").to_owned();
        if std::env::var_os(BUILT).is_some() {
            return target;
        }
        let mut build = Command::new(env!("CARGO"));
        // Builds the library too: the test profile's build is not placed where programs can load it.
        build
            .args(["build", "--quiet", "-p", "vramctl", "-p", "vramctl-cli", "-p", "simgpu", "-p", "simcudart"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if target.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the simulated GPU does not build");
        target
    })
}

/// The preloaded library.
pub fn library() -> PathBuf {
    artifacts().join("libvramctl.so")
}

/// The command line.
pub fn command_line() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| artifacts().join("vramctl").to_str().expect("UTF-8").to_owned())
}

/// Lets SIGINT end a program. A background job that runs these tests has it ignored, which a child inherits.
pub fn interruptible(command: &mut Command) -> &mut Command {
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    }
}

/// A directory of this process, removed when it exits.
pub fn own_folder() -> &'static Path {
    static FOLDER: OnceLock<(PathBuf, u32)> = OnceLock::new();
    extern "C" fn remove() {
        let (folder, owner) = FOLDER.get().expect("it is there");
        // A forked child runs this too.
        if *owner == std::process::id() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
    let (folder, _) = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder").keep();
        // SAFETY: the function needs nothing that may be destroyed by then. A static is never dropped, so a destructor would
        // not run.
        assert_eq!(unsafe { libc::atexit(remove) }, 0);
        (folder, std::process::id())
    });
    folder
}

/// A link to the directory with the sample programs of `tests/apps`, built if needed. All tests share the directory; the link's path has the same
/// length in each checkout, as messages show it.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let (folder, link) = (artifacts().join("apps"), own_folder().join("programs"));
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apps/build.sh");
        let done = Command::new(build).arg(&folder).arg(simulated_libraries()).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::os::unix::fs::symlink(folder, &link).unwrap();
        link
    })
}

/// Writes a program to execute, such as a script. Another process does it: a program that another thread is just starting would still have this
/// one's descriptor, and what is open for writing cannot be executed ("Text file busy").
#[track_caller]
pub fn write_executable(path: &Path, contents: impl AsRef<[u8]>) {
    let mut writes = Command::new("sh").args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped()).spawn().unwrap();
    // It reads to the end, which is when this is dropped.
    writes.stdin.take().unwrap().write_all(contents.as_ref()).unwrap();
    assert!(writes.wait().unwrap().success(), "{}", path.display());
}

/// The C compiler: $CC, else cc.
pub fn c_compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

/// For [`compile`]: as a library.
pub const SHARED: [&str; 2] = ["-shared", "-fPIC"];

/// Compiles sources of `tests/apps` into a program or a library. With `-l:NAME`, links what lies beside it or a simulated library.
#[track_caller]
pub fn compile(built: &Path, sources: &[&str], options: &[&str]) {
    let apps = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apps");
    let mut compiler = c_compiler();
    compiler.args(["-std=gnu11", "-O2", "-o"]).arg(built);
    compiler.args(sources.iter().map(|source| apps.join(source)));
    if options.iter().any(|option| option.starts_with("-l:")) {
        for folder in [built.parent().expect("a folder"), simulated_libraries()] {
            compiler.arg("-L").arg(folder);
        }
    }
    compiler.args(options).args(["-Wl,--allow-shlib-undefined", "-ldl", "-lpthread"]);
    let done = compiler.output().unwrap_or_else(|error| panic!("a C compiler ($CC, else cc): {error}"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The same, once, in this process's own directory: another test's program may be using it.
pub fn built(name: &str, source: &str, options: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let built = own_folder().join(name);
    if !built.exists() {
        compile(&built, &[source], options);
    }
    built
}

/// A directory for `LD_LIBRARY_PATH`, with the simulated libraries under the names that programs load.
pub fn simulated_libraries() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| {
        let folder = own_folder().join("libraries");
        std::fs::create_dir(&folder).expect("a folder");
        for (name, library) in [
            ("libcuda.so.1", "libsimgpu.so"),
            ("libnvidia-ml.so.1", "libsimgpu.so"),
            ("libcudart.so.13", "libsimcudart.so"),
            ("libcudart.so.12", "libsimcudart.so"),
            ("libcudart.so", "libsimcudart.so"),
        ] {
            std::os::unix::fs::symlink(artifacts().join(library), folder.join(name)).expect("a link");
        }
        folder
    })
}

unsafe fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{}: {:?}", path.display(), unsafe { CStr::from_ptr(libc::dlerror()) });
    library
}

/// The functions of the simulated driver and runtime that the tests call.
macro_rules! simulated {
    ($($library:ident($file:literal) { $($field:ident = $name:literal($($argument:ty),*) $(-> $answer:ty)?,)* })*) => {
        struct Simulated {
            $($($field: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*)*
        }

        impl Simulated {
            fn load() -> Self {
                let libraries = simulated_libraries();
                $(
                    let library = unsafe { open(&libraries.join($file)) };
                    let $library = move |name: &CStr| {
                        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
                        assert!(!symbol.is_null(), "{name:?} is missing");
                        symbol
                    };
                )*
                Self { $($($field: unsafe { transmute($library($name)) },)*)* }
            }
        }
    };
}

simulated! {
    driver("libcuda.so.1") {
        simgpu_fail = c"simgpu_fail"(*const c_char, u64, u32, u64),
        simgpu_slow_down = c"simgpu_slow_down"(*const c_char, u64) -> c_int,
        simgpu_hold = c"simgpu_hold"(u64),
        simgpu_is_holding = c"simgpu_is_holding"() -> c_int,
        simgpu_release = c"simgpu_release"(),
        simgpu_clear_faults = c"simgpu_clear_faults"(),
        simgpu_calls = c"simgpu_calls"(*const c_char) -> u64,
        simgpu_reset_counts = c"simgpu_reset_counts"(),
        simgpu_used = c"simgpu_used"(c_int) -> u64,
        simgpu_live = c"simgpu_live"(*const c_char) -> u64,
        simgpu_set_op_delay_ms = c"simgpu_set_op_delay_ms"(u64),
        simgpu_occupy = c"simgpu_occupy"(c_int, u64),
        cu_mem_retain_allocation_handle = c"cuMemRetainAllocationHandle"(*mut u64, *mut c_void) -> u32,
        cu_mem_get_allocation_properties_from_handle = c"cuMemGetAllocationPropertiesFromHandle"(*mut CUmemAllocationProp, u64) -> u32,
        cu_mem_release = c"cuMemRelease"(u64) -> u32,
        cu_device_primary_ctx_retain = c"cuDevicePrimaryCtxRetain"(*mut *mut c_void, c_int) -> u32,
        cu_ctx_set_current = c"cuCtxSetCurrent"(*mut c_void) -> u32,
        cu_device_primary_ctx_reset = c"cuDevicePrimaryCtxReset_v2"(c_int) -> u32,
        cu_stream_wait_value = c"cuStreamWaitValue32_v2"(*mut c_void, *const AtomicU32, u32, u32) -> u32,
        cu_launch_host_func = c"cuLaunchHostFunc"(*mut c_void, extern "C" fn(*mut c_void), *mut c_void) -> u32,
        cu_graph_create = c"cuGraphCreate"(*mut *mut c_void, u32) -> u32,
        cu_graph_destroy = c"cuGraphDestroy"(*mut c_void) -> u32,
        cu_mem_host_alloc = c"cuMemHostAlloc"(*mut *mut c_void, usize, u32) -> u32,
        cu_mem_free_host = c"cuMemFreeHost"(*mut c_void) -> u32,
        cu_ctx_destroy = c"cuCtxDestroy_v2"(*mut c_void) -> u32,
    }
    runtime("libcudart.so.13") {
        cuda_memcpy = c"cudaMemcpy"(*mut c_void, *const c_void, usize, c_int) -> u32,
        cuda_memcpy_async = c"cudaMemcpyAsync"(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> u32,
        cuda_memset_async = c"cudaMemsetAsync"(*mut c_void, c_int, usize, *mut c_void) -> u32,
        cuda_device_get_default_mem_pool = c"cudaDeviceGetDefaultMemPool"(*mut *mut c_void, c_int) -> u32,
        cuda_device_synchronize = c"cudaDeviceSynchronize"() -> u32,
        cuda_set_device = c"cudaSetDevice"(c_int) -> u32,
        cuda_get_last_error = c"cudaGetLastError"() -> u32,
        cuda_peek_at_last_error = c"cudaPeekAtLastError"() -> u32,
        cuda_stream_create_with_flags = c"cudaStreamCreateWithFlags"(*mut *mut c_void, u32) -> u32,
        cuda_stream_synchronize = c"cudaStreamSynchronize"(*mut c_void) -> u32,
        cuda_stream_destroy = c"cudaStreamDestroy"(*mut c_void) -> u32,
        cuda_graph_instantiate = c"cudaGraphInstantiate"(*mut *mut c_void, *mut c_void, u64) -> u32,
        cuda_graph_launch = c"cudaGraphLaunch"(*mut c_void, *mut c_void) -> u32,
        cuda_graph_destroy = c"cudaGraphDestroy"(*mut c_void) -> u32,
        cuda_graph_exec_destroy = c"cudaGraphExecDestroy"(*mut c_void) -> u32,
    }
}

/// Everything allocated: tests compare it before and after.
#[derive(Debug, PartialEq, Eq, Clone)]
pub struct Footprint {
    used: Vec<u64>,
    live: Vec<(&'static str, u64)>,
}

impl Footprint {
    pub fn used(&self) -> &[u64] {
        &self.used
    }

    pub fn without_streams(&self) -> Self {
        Self { used: self.used.clone(), live: self.live.iter().filter(|(kind, _)| *kind != "streams").copied().collect() }
    }
}

/// The simulated GPU, for one test at a time.
pub struct Gpu {
    _turn: MutexGuard<'static, ()>,
}

fn simulated() -> &'static Simulated {
    static SIMULATED: OnceLock<Simulated> = OnceLock::new();
    SIMULATED.get_or_init(Simulated::load)
}

/// Releases the driver call being held.
pub fn release() {
    unsafe { (simulated().simgpu_release)() };
}

/// Number of calls of a driver function; works after the driver's shutdown too.
pub fn calls(function: &str) -> u64 {
    let name = CString::new(function).unwrap();
    unsafe { (simulated().simgpu_calls)(name.as_ptr()) }
}

impl Gpu {
    /// Waits for this test's turn and starts with nothing allocated and no faults pending.
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static SET_UP: Once = Once::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        SET_UP.call_once(|| {
            let sockets = own_folder().join("sockets");
            for (name, value) in [
                ("SIMGPU_DEVICES", DEVICES.to_string()),
                ("SIMGPU_MEMORY", DEVICE_BYTES.to_string()),
                ("VRAMCTL_DIR", sockets.display().to_string()),
                ("VRAMCTL_LOG", std::env::var(LOG_LEVEL).unwrap_or_else(|_| "off".to_owned())),
                ("VRAMCTL_RETAIN", RETAINED_TAG.to_owned()),
                ("VRAMCTL_HOST_CAP", HOST_CAP.to_string()),
                // Host memory kept by one test must not be there for the next.
                ("VRAMCTL_HOST_KEEP", "0".to_owned()),
                ("VRAMCTL_BACKUP", format!("{DISCARDED_TAG}=discard")),
            ] {
                // SAFETY: only this thread accesses the environment now; the others wait for their turn.
                unsafe { std::env::set_var(name, value) };
            }
        });
        let gpu = Self { _turn: turn };
        gpu.clear_faults();
        gpu.free_everything();
        // Creates what the library creates once per context and keeps, so that it does not look like a leak.
        vramctl_backup::set_copy_by(CopyBy::Kernel, None);
        for device in (0..DEVICES).rev() {
            set_device(device);
            let address = malloc_tagged(RETAINED_TAG, None, MIB).expect("a device that works");
            pause(&[]).and_then(|_| resume(&[])).expect("a device that works");
            free(address);
        }
        vramctl_backup::set_copy_by(CopyBy::Auto, None);
        vramctl_backup::settle();
        gpu
    }

    pub fn fail(&self, function: &str, nth: u64, code: u32, times: u64) {
        let name = CString::new(function).unwrap();
        unsafe { (simulated().simgpu_fail)(name.as_ptr(), nth, code, times) };
    }

    /// Makes every call of a function take this much longer, including those being delayed now. A process that ends during one is aborted.
    pub fn slow_down(&self, function: &str, milliseconds: u64) {
        let name = CString::new(function).unwrap();
        assert_eq!(unsafe { (simulated().simgpu_slow_down)(name.as_ptr(), milliseconds) }, 0, "{function}");
    }

    /// Holds the `nth` driver call (1 is the next) until [`release`].
    pub fn hold(&self, nth: u64) {
        unsafe { (simulated().simgpu_hold)(nth) };
    }

    pub fn is_holding(&self) -> bool {
        unsafe { (simulated().simgpu_is_holding)() != 0 }
    }

    pub fn clear_faults(&self) {
        unsafe { (simulated().simgpu_clear_faults)() };
    }

    pub fn calls(&self, function: &str) -> u64 {
        calls(function)
    }

    pub fn reset_counts(&self) {
        unsafe { (simulated().simgpu_reset_counts)() };
    }

    pub fn used(&self, device: i32) -> u64 {
        unsafe { (simulated().simgpu_used)(device) }
    }

    /// How long the device's work takes, including what it is doing now.
    pub fn set_op_delay_ms(&self, ms: u64) {
        unsafe { (simulated().simgpu_set_op_delay_ms)(ms) };
    }

    /// Makes another program hold this much of the device.
    pub fn occupy(&self, device: i32, bytes: usize) {
        unsafe { (simulated().simgpu_occupy)(device, bytes as u64) };
    }

    /// The properties that the physical memory at an address was created with; `None` if it is not virtual memory.
    pub fn properties(&self, address: u64) -> Option<CUmemAllocationProp> {
        let (mut handle, mut properties) = (0, unsafe { std::mem::zeroed() });
        unsafe {
            if (simulated().cu_mem_retain_allocation_handle)(&raw mut handle, address as *mut c_void) != 0 {
                return None;
            }
            assert_eq!((simulated().cu_mem_get_allocation_properties_from_handle)(&raw mut properties, handle), 0);
            assert_eq!((simulated().cu_mem_release)(handle), 0);
        }
        Some(properties)
    }

    /// Number of live driver objects of a kind.
    pub fn live(&self, kind: &str) -> u64 {
        let name = CString::new(kind).unwrap();
        unsafe { (simulated().simgpu_live)(name.as_ptr()) }
    }

    pub fn footprint(&self) -> Footprint {
        vramctl_driver::free_spare_addresses();
        let live = |kind: &'static str| (kind, self.live(kind));
        Footprint {
            used: (0..DEVICES).map(|device| self.used(device)).collect(),
            live: ["reservations", "handles", "mappings", "streams"].into_iter().map(live).collect(),
        }
    }

    pub fn free_everything(&self) {
        for address in Memory::get().registry.addresses() {
            free(address);
        }
        vramctl_driver::sweep();
        vramctl_backup::settle();
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.clear_faults();
        self.set_op_delay_ms(0);
        for device in 0..DEVICES {
            self.occupy(device, 0);
        }
        while vramctl_core::memory::region::end().is_ok() {}
        let _ = Memory::get().set_process_tag(None);
        vramctl_backup::set_copy_by(CopyBy::Auto, None);
        vramctl_backup::set_host_keep(None, None);
        Memory::get().set_margin(0);
        self.free_everything();
    }
}

// The program's part.

pub fn malloc(bytes: usize) -> Result<u64, u32> {
    let mut pointer = std::ptr::null_mut();
    match unsafe { interpose::cudaMalloc(&raw mut pointer, bytes) } {
        0 => Ok(pointer as u64),
        code => Err(code),
    }
}

pub fn malloc_tagged(tag: &str, backup: Option<vramctl_model::Policy>, bytes: usize) -> Result<u64, u32> {
    vramctl_core::memory::region::begin(Some(tag), backup).unwrap();
    let answer = malloc(bytes);
    vramctl_core::memory::region::end().unwrap();
    answer
}

pub fn free(address: u64) -> u32 {
    unsafe { interpose::cudaFree(address as *mut c_void) }
}

pub fn set_device(device: i32) {
    assert_eq!(unsafe { (simulated().cuda_set_device)(device) }, 0);
}

/// Creates a context and makes it current.
pub fn create_context(context: &mut *mut c_void, device: i32) -> u32 {
    unsafe { entries::cuCtxCreate_v2((&raw mut *context).cast(), 0, device) }
}

/// A context besides the device's primary one, current on the thread that created it until dropped there.
pub struct OwnContext(*mut c_void);

impl OwnContext {
    pub fn create(device: i32) -> Self {
        let mut context = std::ptr::null_mut();
        assert_eq!(create_context(&mut context, device), 0);
        Self(context)
    }

    pub fn handle(&self) -> ContextHandle {
        unsafe { transmute(self.0) }
    }

    /// Makes it current on this thread.
    pub fn enter(&self) {
        assert_eq!(unsafe { (simulated().cu_ctx_set_current)(self.0) }, 0);
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        assert_eq!(unsafe { (simulated().cu_ctx_destroy)(self.0) }, 0);
    }
}

/// Resets the primary context through a call that the library does not see.
pub fn reset_unseen(device: i32) {
    assert_eq!(unsafe { (simulated().cu_device_primary_ctx_reset)(device) }, 0);
}

/// A green context of a device, destroyed when dropped.
pub struct Green(*mut c_void);

impl Green {
    pub fn create(device: i32) -> Self {
        let mut green = std::ptr::null_mut::<c_void>();
        assert_eq!(unsafe { entries::cuGreenCtxCreate((&raw mut green).cast(), std::ptr::null(), device, 1) }, 0);
        Self(green)
    }

    fn handle(&self) -> vramctl_driver::Green {
        unsafe { transmute(self.0) }
    }

    /// Makes it current on this thread.
    pub fn enter(&self) {
        let mut context = std::ptr::null_mut::<c_void>();
        assert_eq!(unsafe { entries::cuCtxFromGreenCtx((&raw mut context).cast(), self.handle()) }, 0);
        assert_eq!(unsafe { (simulated().cu_ctx_set_current)(context) }, 0);
    }
}

impl Drop for Green {
    fn drop(&mut self) {
        assert_eq!(unsafe { entries::cuGreenCtxDestroy(self.handle()) }, 0);
    }
}

/// Recreates it and makes it current on this thread.
pub fn use_again(device: i32) {
    let mut context = std::ptr::null_mut();
    assert_eq!(unsafe { (simulated().cu_device_primary_ctx_retain)(&raw mut context, device) }, 0);
    assert_eq!(unsafe { (simulated().cu_ctx_set_current)(context) }, 0);
}

/// A gate that streams of the program wait for until it is opened.
pub struct Gate(*mut c_void);

// SAFETY: an address that all threads may use.
unsafe impl Sync for Gate {}

impl Gate {
    pub fn new() -> Self {
        let mut word = std::ptr::null_mut();
        assert_eq!(unsafe { (simulated().cu_mem_host_alloc)(&raw mut word, 4, 0) }, 0);
        Self(word)
    }

    fn word(&self) -> &AtomicU32 {
        unsafe { AtomicU32::from_ptr(self.0.cast()) }
    }

    pub fn open(&self) {
        self.word().store(1, Ordering::Release);
    }

    pub fn shut(&self) {
        self.word().store(0, Ordering::Release);
    }

    pub fn is_open(&self) -> bool {
        self.word().load(Ordering::Acquire) == 1
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Waits for the streams first.
        self.open();
        assert_eq!(unsafe { (simulated().cu_mem_free_host)(self.0) }, 0);
    }
}

pub fn synchronize() -> u32 {
    let answer = unsafe { (simulated().cuda_device_synchronize)() };
    // The runtime's own call does not reach the entry here.
    unsafe { entries::cuCtxSynchronize() };
    answer
}

pub fn last_error() -> u32 {
    unsafe { (simulated().cuda_get_last_error)() }
}

pub fn write(address: u64, bytes: &[u8]) -> u32 {
    unsafe { (simulated().cuda_memcpy)(address as *mut c_void, bytes.as_ptr().cast(), bytes.len(), 1) }
}

pub fn read(address: u64, length: usize) -> Result<Vec<u8>, u32> {
    let mut bytes = vec![0xAA; length];
    match unsafe { (simulated().cuda_memcpy)(bytes.as_mut_ptr().cast(), address as *const c_void, length, 2) } {
        0 => Ok(bytes),
        code => Err(code),
    }
}

/// Bytes that are distinct for every seed and position.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let words: Vec<u64> = (0..length.div_ceil(8)).map(|_| next()).collect();
    // SAFETY: at least this many bytes, all initialised.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), length) }.to_vec()
}

pub fn default_pool() -> *mut c_void {
    let mut pool = std::ptr::null_mut();
    assert_eq!(unsafe { (simulated().cuda_device_get_default_mem_pool)(&raw mut pool, 0) }, 0);
    pool
}

/// A non-blocking stream of the program.
pub struct Stream(pub *mut c_void);

impl Stream {
    pub fn create() -> Self {
        let mut stream = std::ptr::null_mut();
        assert_eq!(unsafe { (simulated().cuda_stream_create_with_flags)(&raw mut stream, 1) }, 0);
        let stream = Self(stream);
        // In a program, the runtime calls the driver through our entries.
        vramctl_driver::streams::created(stream.handle());
        stream
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> u32 {
        unsafe { (simulated().cuda_memcpy_async)(to as *mut c_void, from as *const c_void, bytes, 3, self.0) }
    }

    pub fn fill(&self, address: u64, value: u8, bytes: usize) -> u32 {
        unsafe { (simulated().cuda_memset_async)(address as *mut c_void, i32::from(value), bytes, self.0) }
    }

    pub fn synchronize(&self) -> u32 {
        let answer = unsafe { (simulated().cuda_stream_synchronize)(self.0) };
        // As above.
        unsafe { entries::cuStreamSynchronize(self.handle()) };
        answer
    }

    /// Makes later work on the stream wait for the gate.
    pub fn wait_for(&self, gate: &Gate) {
        assert_eq!(unsafe { (simulated().cu_stream_wait_value)(self.0, gate.word(), 1, 0) }, 0);
    }

    /// The same, with a host function.
    pub fn wait_in_a_function_for(&self, gate: &Gate) {
        extern "C" fn wait(word: *mut c_void) {
            let word = unsafe { AtomicU32::from_ptr(word.cast()) };
            while word.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
        }
        assert_eq!(unsafe { (simulated().cu_launch_host_func)(self.0, wait, gate.0) }, 0);
    }

    /// Opens the gate when the stream gets there.
    pub fn open(&self, gate: &Gate) {
        extern "C" fn open(word: *mut c_void) {
            unsafe { AtomicU32::from_ptr(word.cast()) }.store(1, Ordering::Release);
        }
        assert_eq!(unsafe { (simulated().cu_launch_host_func)(self.0, open, gate.0) }, 0);
    }

    pub fn handle(&self) -> vramctl_driver::StreamHandle {
        unsafe { transmute(self.0) }
    }

    /// Capture mode: 0 global, 1 thread-local, 2 relaxed.
    pub fn begin_capture(&self, mode: u32) {
        assert_eq!(unsafe { entries::cuStreamBeginCapture_v2(self.handle(), mode) }, 0);
    }

    pub fn end_capture(&self) -> Result<Graph, u32> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        match unsafe { entries::cuStreamEndCapture(self.handle(), &raw mut graph) } {
            0 => (),
            code => return Err(code),
        }
        assert_eq!(unsafe { (simulated().cuda_graph_instantiate)(&raw mut executable, graph, 0) }, 0);
        assert_eq!(unsafe { (simulated().cuda_graph_destroy)(graph) }, 0);
        Ok(Graph(executable))
    }

    pub fn launch(&self, graph: &Graph) -> u32 {
        unsafe { (simulated().cuda_graph_launch)(graph.0, self.0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        vramctl_driver::streams::ends(self.handle());
        unsafe { (simulated().cuda_stream_destroy)(self.0) };
    }
}

/// A graph without nodes that is not instantiated.
pub struct EmptyGraph(pub *mut c_void);

impl EmptyGraph {
    pub fn create() -> Self {
        let mut graph = std::ptr::null_mut();
        assert_eq!(unsafe { (simulated().cu_graph_create)(&raw mut graph, 0) }, 0);
        Self(graph)
    }
}

impl Drop for EmptyGraph {
    fn drop(&mut self) {
        unsafe { (simulated().cu_graph_destroy)(self.0) };
    }
}

pub struct Graph(*mut c_void);

impl Drop for Graph {
    fn drop(&mut self) {
        unsafe { (simulated().cuda_graph_exec_destroy)(self.0) };
    }
}

/// A pause of these tags that another process asks for.
pub fn pausing(tags: &[&str]) -> Pause {
    pausing_with(tags, |_| ())
}

pub fn pausing_with(tags: &[&str], set: impl FnOnce(&mut PauseRequest)) -> Pause {
    let mut request = PauseRequest { selection: selection(tags), ..PauseRequest::default() };
    set(&mut request);
    Pause { request, is_from_outside: true, ..Pause::default() }
}

/// Commits what is prepared, or undoes it, as `vote` says.
pub fn decide(prepared: Preparation<'_>, vote: impl FnOnce(&dyn Prepared) -> Result<(), Error>) -> Result<Report, Error> {
    let prepared = prepared.map_err(Failed::undo)?;
    match vote(&*prepared) {
        Ok(()) => Ok(prepared.commit(&mut ())),
        Err(refused) => Err(prepared.undo(refused)),
    }
}

/// A resume of these tags that another process asks for.
pub fn resuming(tags: &[&str]) -> Resume {
    resuming_with(tags, |_| ())
}

pub fn resuming_with(tags: &[&str], set: impl FnOnce(&mut ResumeRequest)) -> Resume {
    let mut request = ResumeRequest { selection: selection(tags), ..ResumeRequest::default() };
    set(&mut request);
    Resume { request, is_from_outside: true }
}

fn selection(tags: &[&str]) -> Selection {
    Selection { tags: tags.iter().map(ToString::to_string).collect(), ..Selection::default() }
}

pub fn pause(tags: &[&str]) -> Result<Report, vramctl_model::Error> {
    Memory::get().pause(&pausing(tags), &mut ())
}

pub fn resume(tags: &[&str]) -> Result<Report, vramctl_model::Error> {
    Memory::get().resume(&resuming(tags), &mut ())
}

/// Pauses these tags and resumes them.
#[track_caller]
pub fn cycle(tags: &[&str]) {
    pause(tags).unwrap();
    resume(tags).unwrap();
}

pub fn state(tag: &str) -> Option<TagState> {
    Memory::get().status().tags.into_iter().find(|status| status.tag == tag).map(|status| status.state)
}

/// Does `work`, which must not wait for a stream, and then opens the gate that the stream waits for. Whether it has not waited.
pub fn without_waiting(gate: &Gate, work: impl FnOnce()) -> bool {
    std::thread::scope(|scope| {
        // A call that waits fails the test instead of hanging it.
        let (done, is_done) = std::sync::mpsc::channel();
        let late = scope.spawn(move || {
            let in_time = is_done.recv_timeout(Duration::from_secs(100)).is_ok();
            gate.open();
            in_time
        });
        work();
        let _ = done.send(());
        late.join().unwrap()
    })
}
