//! What the runtime did with driver 580 on an H200 where its documentation is silent. Each test runs in a process of its
//! own.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
#[path = "../../simgpu/tests/common/mod.rs"]
mod common;
use common::{Gpu, LONG_MS, MIB2, isolated, library};
use std::ffi::{CString, c_int, c_void};

/// Calls the runtime's function of this name.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),* $(,)?)) => {
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> c_int>(symbol(stringify!($name)))($($argument),*)
        }
    };
}

/// The driver must be loaded first: its SONAME makes it the one that the runtime finds.
fn symbol(name: &str) -> *mut c_void {
    let (path, name) = (library().with_file_name("libsimcudart.so"), CString::new(name).unwrap());
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let symbol = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

fn malloc(bytes: usize) -> (c_int, u64) {
    let mut pointer = 9;
    (call!(cudaMalloc(&raw mut pointer => *mut u64, bytes => usize)), pointer)
}

fn free(pointer: u64) -> c_int {
    call!(cudaFree(pointer => u64))
}

fn last_error() -> c_int {
    call!(cudaGetLastError())
}

#[test]
fn a_failed_allocation_is_null_and_its_error_stays() {
    isolated("a_failed_allocation_is_null_and_its_error_stays", &[], || {
        let _ = Gpu::load();
        assert_eq!(malloc(1 << 60), (2, 0));
        assert_eq!(malloc(64).0, 0);
        assert_eq!((last_error(), last_error()), (2, 0));
        assert_eq!(malloc(0), (0, 0));
    });
}

#[test]
fn frees_refuse_virtual_memory_and_take_both_kinds_of_allocation() {
    isolated("frees_refuse_virtual_memory_and_take_both_kinds_of_allocation", &[], || {
        let gpu = Gpu::load();
        assert_eq!(free(0), 0);
        let (mapped, plain) = (gpu.map_new(MIB2), malloc(4096).1);
        for wrong in [mapped, mapped + 4096, plain + 256, 0x1234] {
            assert_eq!((free(wrong), last_error(), last_error()), (1, 1, 0));
            assert_eq!((call!(cudaFreeAsync(wrong => u64, 0 => u64)), last_error()), (1, 1));
        }
        assert_eq!(call!(cudaFreeAsync(plain => u64, 0 => u64)), 0);
        assert_eq!(call!(cudaStreamSynchronize(0 => u64)), 0);
        assert_eq!(free(plain), 1);
        let mut pooled = 0;
        assert_eq!(call!(cudaMallocAsync(&raw mut pooled => *mut u64, 64 => usize, 0 => u64)), 0);
        let mut ipc = [0u8; 64];
        assert_eq!(call!(cudaIpcGetMemHandle(ipc.as_mut_ptr() => *mut u8, pooled => u64)), 1);
        assert_eq!(free(pooled), 0);
        assert_eq!(gpu.used(), MIB2 as u64);
    });
}

#[test]
fn pitches_are_multiples_of_512() {
    #[repr(C)]
    struct Extent(usize, usize, usize);
    isolated("pitches_are_multiples_of_512", &[], || {
        let _ = Gpu::load();
        let pitched = |width: usize, height: usize| {
            let (mut pointer, mut pitch) = (9u64, 9usize);
            let code = call!(cudaMallocPitch(&raw mut pointer => *mut u64, &raw mut pitch => *mut usize, width => usize, height => usize));
            (code, pitch, pointer == 0)
        };
        for (width, pitch) in [(1, 512), (512, 512), (513, 1024), (1025, 1536), (100_000, 100_352)] {
            assert_eq!(pitched(width, 10), (0, pitch, false));
        }
        assert_eq!([pitched(0, 10), pitched(10, 0)], [(0, 0, true); 2]);
        assert_eq!([pitched(1 << 40, 1).0, pitched(1 << 30, 1 << 40).0, pitched(usize::MAX, usize::MAX).0], [2, 1, 1]);
        let mut result = [9u64; 4];
        assert_eq!(call!(cudaMalloc3D(result.as_mut_ptr() => *mut u64, Extent(513, 10, 3) => Extent)), 0);
        assert_eq!(result[1..], [1024, 513, 10]);
        assert_eq!(call!(cudaMalloc3D(result.as_mut_ptr() => *mut u64, Extent(10, 10, 0) => Extent)), 0);
        assert_eq!(result, [0, 0, 10, 10]);
    });
}

#[test]
fn unmapped_memory_is_an_unregistered_pointer() {
    /// Type, device, device pointer and host pointer.
    #[repr(C)]
    #[derive(Debug, PartialEq)]
    struct Attributes(c_int, c_int, u64, u64);
    isolated("unmapped_memory_is_an_unregistered_pointer", &[], || {
        let gpu = Gpu::load();
        assert_eq!(free(0), 0);
        let pointer = gpu.map_new(MIB2);
        let attributes = || {
            let mut attributes = Attributes(9, 9, 9, 9);
            let code = call!(cudaPointerGetAttributes(&raw mut attributes => *mut Attributes, pointer => u64));
            (code, attributes)
        };
        assert_eq!(attributes(), (0, Attributes(2, 0, pointer, 0)));
        gpu.access(pointer, MIB2, 0);
        assert_eq!(attributes(), (0, Attributes(2, 0, 0, 0)));
        ok!(gpu.cuMemUnmap(pointer, MIB2));
        assert_eq!(attributes(), (0, Attributes(0, -2, 0, pointer)));
    });
}

#[test]
fn freeing_null_and_waiting_for_the_device_follow_the_capture_rules() {
    isolated("freeing_null_and_waiting_for_the_device_follow_the_capture_rules", &[], || {
        let _ = Gpu::load();
        let (mut stream, mut graph) = (0u64, 0u64);
        assert_eq!(call!(cudaStreamCreateWithFlags(&raw mut stream => *mut u64, 1 => u32)), 0);
        for (mode, of_free) in [(0, 900), (1, 900), (2, 0)] {
            assert_eq!(call!(cudaStreamBeginCapture(stream => u64, mode => u32)), 0);
            assert_eq!(free(0), of_free);
            let ended = call!(cudaStreamEndCapture(stream => u64, &raw mut graph => *mut u64));
            assert_eq!(ended, if of_free == 0 { 0 } else { 901 });
            assert_eq!(call!(cudaStreamBeginCapture(stream => u64, mode => u32)), 0);
            assert_eq!(call!(cudaDeviceSynchronize()), 900);
            assert_eq!(call!(cudaStreamEndCapture(stream => u64, &raw mut graph => *mut u64)), 901);
        }
    });
}

#[test]
fn a_reset_does_not_clear_a_sticky_error() {
    isolated("a_reset_does_not_clear_a_sticky_error", &[], || {
        let gpu = Gpu::load();
        assert_eq!(free(0), 0);
        let (plain, mapped, kept) = (malloc(64).1, gpu.map_new(MIB2), gpu.map_new(MIB2));
        gpu.slow_down(LONG_MS);
        assert_eq!(call!(cudaMemset(mapped => u64, 1 => c_int, 64 => usize)), 0);
        ok!(gpu.cuMemUnmap(mapped, MIB2));
        gpu.slow_down(0);
        assert_eq!(call!(cudaDeviceSynchronize()), 700);
        assert_eq!((malloc(64), free(plain), last_error()), ((700, 0), 700, 700));
        assert_eq!(call!(cudaDeviceReset()), 0);
        assert_eq!([free(0), malloc(64).0, call!(cudaDeviceSynchronize()), last_error()], [46; 4]);
        ok!(gpu.cuMemUnmap(kept, MIB2));
        assert_eq!(gpu.used(), 0);
    });
}

extern "C" fn registered_before() {
    let codes = [last_error(), malloc(64).0, free(0), last_error()];
    unsafe { libc::_exit(i32::from(codes != [0, 4, 4, 4])) };
}

#[test]
fn exit_handlers_from_before_the_first_call_find_the_runtime_unloading() {
    isolated("exit_handlers_from_before_the_first_call_find_the_runtime_unloading", &[], || {
        let _ = Gpu::load();
        symbol("cudaFree");
        unsafe { libc::atexit(registered_before) };
        assert_eq!(free(0), 0);
        unsafe { libc::exit(2) };
    });
}
