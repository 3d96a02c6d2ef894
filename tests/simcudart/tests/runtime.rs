//! The runtime over the simulated driver, loaded as a program loads it. One test per subject; they share the process, like
//! the threads of a program.

#![allow(clippy::undocumented_unsafe_blocks)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

fn built(name: &str) -> CString {
    let test = std::env::current_exe().unwrap();
    let dependencies: PathBuf = test.parent().unwrap().into();
    let found = [dependencies.clone(), dependencies.parent().unwrap().into()]
        .into_iter()
        .map(|directory| directory.join(name))
        .filter(|path| path.exists())
        .max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    CString::new(found.expect(name).to_str().unwrap()).unwrap()
}

struct Libraries {
    driver: usize,
    runtime: usize,
}

/// Loads the driver from its file; its SONAME makes it the libcuda.so.1 that the runtime finds.
fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let load = |name| {
            let library = unsafe { libc::dlopen(built(name).as_ptr(), libc::RTLD_NOW) };
            assert!(!library.is_null(), "{name}");
            library as usize
        };
        Libraries { driver: load("libsimgpu.so"), runtime: load("libsimcudart.so") }
    })
}

fn symbol(library: usize, name: &str) -> *mut c_void {
    let text = CString::new(name).unwrap();
    let symbol = unsafe { libc::dlsym(library as *mut c_void, text.as_ptr()) };
    assert!(!symbol.is_null(), "{name}");
    symbol
}

macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),* $(,)?)) => {
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> c_int>(
                symbol(libraries().runtime, stringify!($name)),
            )($($argument),*)
        }
    };
}

fn malloc(bytes: usize) -> Result<u64, c_int> {
    let mut pointer = 9;
    match call!(cudaMalloc(&raw mut pointer => *mut u64, bytes => usize)) {
        0 => Ok(pointer),
        code => Err(code),
    }
}

fn copy(to: u64, from: u64, bytes: usize, kind: c_int) -> c_int {
    call!(cudaMemcpy(to => u64, from => u64, bytes => usize, kind => c_int))
}

#[test]
fn allocation_and_the_last_error() {
    assert_eq!(call!(cudaFree(0 => u64)), 0);
    assert_eq!(malloc(0), Ok(0));
    let pointer = malloc(4096).unwrap();
    assert_eq!(malloc(1 << 60), Err(2));
    assert_eq!(call!(cudaPeekAtLastError()), 2);
    // Each thread has its own last error.
    assert_eq!(std::thread::spawn(|| call!(cudaGetLastError())).join().unwrap(), 0);
    assert_eq!(call!(cudaGetLastError()), 2);
    assert_eq!(call!(cudaGetLastError()), 0);
    assert_eq!(call!(cudaFree(0x1234 => u64)), 1);
    assert_eq!(call!(cudaFree(pointer => u64)), 0);
    let name = unsafe {
        let name = symbol(libraries().runtime, "cudaGetErrorName");
        CStr::from_ptr(std::mem::transmute::<*mut c_void, extern "C" fn(c_int) -> *const c_char>(name)(2))
    };
    assert_eq!(name, c"cudaErrorMemoryAllocation");
}

/// Held during a capture, and by whoever synchronizes the device: that invalidates all captures.
static CAPTURE: Mutex<()> = Mutex::new(());

#[test]
fn copies_and_pitched_memory() {
    #[repr(C)]
    #[derive(Default)]
    struct Pitched {
        pointer: u64,
        pitch: usize,
        width: usize,
        height: usize,
    }
    #[repr(C)]
    struct Extent(usize, usize, usize);

    let (text, mut back) = (*b"in every thread", [0u8; 15]);
    let pointer = malloc(4096).unwrap();
    assert_eq!(copy(pointer, text.as_ptr() as u64, 15, 1), 0);
    // A thread that has never called CUDA gets the device's context with its first call.
    let copied = std::thread::spawn(move || {
        let code = copy(back.as_mut_ptr() as u64, pointer, 15, 4);
        (code, back)
    });
    assert_eq!(copied.join().unwrap(), (0, text));
    assert_eq!(copy(pointer, pointer, 1, 7), 21);
    let mut pitched = Pitched::default();
    assert_eq!(call!(cudaMalloc3D(&raw mut pitched => *mut Pitched, Extent(100, 10, 10) => Extent)), 0);
    assert_eq!((pitched.pitch, pitched.width, pitched.height), (512, 100, 10));
    assert_eq!(call!(cudaMemset(pitched.pointer => u64, 3 => c_int, 51200 => usize)), 0);
    let _no_capture = CAPTURE.lock();
    assert_eq!(call!(cudaDeviceSynchronize()), 0);
}

#[test]
fn a_captured_graph() {
    let _capture = CAPTURE.lock();
    let (mut stream, mut graph, mut executable) = (0u64, 0u64, 0u64);
    let mut source = 0u64;
    let (pointer, mut back) = (malloc(64).unwrap(), 0u8);
    assert_eq!(call!(cudaMallocHost(&raw mut source => *mut u64, 64 => usize)), 0);
    assert_eq!(call!(cudaStreamCreateWithFlags(&raw mut stream => *mut u64, 1 => u32)), 0);
    assert_eq!(call!(cudaStreamBeginCapture(stream => u64, 2 => u32)), 0);
    assert_eq!(call!(cudaMemcpyAsync(pointer => u64, source => u64, 64 => usize, 1 => c_int, stream => u64)), 0);
    assert_eq!(call!(cudaStreamEndCapture(stream => u64, &raw mut graph => *mut u64)), 0);
    assert_eq!(call!(cudaGraphInstantiate(&raw mut executable => *mut u64, graph => u64, 0 => u64)), 0);
    unsafe { (source as *mut u8).write(42) };
    assert_eq!(call!(cudaGraphLaunch(executable => u64, stream => u64)), 0);
    assert_eq!(call!(cudaStreamSynchronize(stream => u64)), 0);
    assert_eq!(copy(&raw mut back as u64, pointer, 1, 2), 0);
    assert_eq!(back, 42);
    assert_eq!(call!(cudaGraphDestroy(graph => u64)), 0);
    assert_eq!(call!(cudaGraphExecDestroy(executable => u64)), 0);
}

#[test]
fn pointer_attributes_match_their_memory() {
    #[repr(C)]
    #[derive(Default, Debug, PartialEq)]
    struct Attributes {
        kind: c_int,
        device: c_int,
        device_pointer: u64,
        host_pointer: u64,
    }
    let kind = |pointer: u64| {
        let mut attributes = Attributes::default();
        let code = call!(cudaPointerGetAttributes(&raw mut attributes => *mut Attributes, pointer => u64));
        assert_eq!(code, 0);
        attributes.kind
    };
    let (mut pinned, mut managed, local) = (0u64, 0u64, 0u8);
    assert_eq!(call!(cudaHostAlloc(&raw mut pinned => *mut u64, 64 => usize, 0 => u32)), 0);
    assert_eq!(call!(cudaMallocManaged(&raw mut managed => *mut u64, 64 => usize, 1 => u32)), 0);
    let device = malloc(64).unwrap();
    assert_eq!([kind(&raw const local as u64), kind(pinned), kind(device), kind(managed)], [0, 1, 2, 3]);
}

#[test]
fn everything_comes_from_one_symbol_of_the_driver() {
    let calls = |name: &CStr| unsafe {
        let calls = symbol(libraries().driver, "simgpu_calls");
        std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> u64>(calls)(name.as_ptr())
    };
    malloc(64).unwrap();
    assert!(calls(c"cuGetProcAddress_v2") > 50);
    assert!(calls(c"cuMemAlloc_v2") > 0);
    let (mut found, mut status) = (std::ptr::null_mut::<c_void>(), 9u32);
    assert_eq!(
        call!(cudaGetDriverEntryPoint(c"cuMemCreate".as_ptr() => *const c_char, &raw mut found => *mut *mut c_void, 0 => u64, &raw mut status => *mut u32)),
        0
    );
    assert_eq!((found, status), (symbol(libraries().driver, "cuMemCreate"), 0));
}
