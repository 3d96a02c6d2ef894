//! Virtual and plain memory, host memory, and sticky errors.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Access, Gpu, LONG_MS, MIB2, isolated, on_gpu, prop};
use std::ffi::c_void;

#[test]
fn mapping_rules() {
    isolated("mapping_rules", &[], || {
        let gpu = Gpu::load();
        let mut pointer = 0u64;
        fails!(3, gpu.cuMemAddressReserve(&raw mut pointer, MIB2, 0, 0, 0));
        ok!(gpu.cuInit(0));
        // Virtual memory needs no context.
        fails!(201, gpu.cuMemAlloc_v2(&raw mut pointer, MIB2));
        let mut granularity = 0;
        ok!(gpu.cuMemGetAllocationGranularity(&raw mut granularity, &prop(0), 0));
        assert_eq!(granularity, MIB2);
        fails!(1, gpu.cuMemAddressReserve(&raw mut pointer, MIB2 + 1, 0, 0, 0));
        let base = gpu.reserve(4 * MIB2);
        assert_eq!(base % MIB2 as u64, 0);
        let at = |index: usize| base + (index * MIB2) as u64;

        let mut handle = 0;
        fails!(1, gpu.cuMemCreate(&raw mut handle, 4096, &prop(0), 0));
        fails!(101, gpu.cuMemCreate(&raw mut handle, MIB2, &prop(7), 0));
        let small = gpu.create(MIB2);
        let large = gpu.create(2 * MIB2);
        fails!(1, gpu.cuMemMap(at(4), MIB2, 0, small, 0));
        fails!(1, gpu.cuMemMap(at(3), 2 * MIB2, 0, large, 0));
        fails!(801, gpu.cuMemMap(at(0), MIB2, MIB2, large, 0));
        fails!(1, gpu.cuMemMap(at(0), MIB2, 0, 4711, 0));
        ok!(gpu.cuMemMap(at(0), MIB2, 0, small, 0));
        fails!(1, gpu.cuMemMap(at(0), MIB2, 0, small, 0));
        ok!(gpu.cuMemMap(at(1), 2 * MIB2, 0, large, 0));
        fails!(1, gpu.cuMemUnmap(at(1), MIB2));
        fails!(1, gpu.cuMemAddressFree(base, 4 * MIB2));

        let both = Access { location: [1, 0], flags: 3 };
        fails!(1, gpu.cuMemSetAccess(at(1), MIB2, &raw const both, 1));
        let mut flags = 9;
        ok!(gpu.cuMemGetAccess(&raw mut flags, &[1, 0], at(2)));
        assert_eq!(flags, 0);
        ok!(gpu.cuMemSetAccess(at(0), 3 * MIB2, &raw const both, 1));
        ok!(gpu.cuMemGetAccess(&raw mut flags, &[1, 0], at(2)));
        assert_eq!(flags, 3);

        ok!(gpu.cuMemRelease(small));
        ok!(gpu.cuMemRelease(large));
        fails!(1, gpu.cuMemRelease(large));
        assert_eq!(gpu.used(), 3 * MIB2 as u64);
        // One unmap can span several mappings.
        ok!(gpu.cuMemUnmap(base, 3 * MIB2));
        assert_eq!(gpu.used(), 0);
        fails!(1, gpu.cuMemAddressFree(base, MIB2));
        ok!(gpu.cuMemAddressFree(base, 4 * MIB2));
        fails!(1, gpu.cuMemAddressFree(base, 4 * MIB2));
        for kind in ["reservations", "handles", "mappings"] {
            assert_eq!(gpu.live(kind), 0, "{kind}");
        }
    });
}

/// The access of a pool is that of all its memory, also of what was allocated before.
#[test]
fn a_pool_is_open_to_the_devices_that_were_given_access() {
    on_gpu("a_pool_is_open_to_the_devices_that_were_given_access", &[("SIMGPU_DEVICES", "2")], |gpu| {
        let (mut pool, mut earlier, mut later) = (0, 0, 0);
        ok!(gpu.cuDeviceGetDefaultMemPool(&raw mut pool, 0));
        ok!(gpu.cuMemAllocAsync(&raw mut earlier, MIB2, 0));
        let of_device = |device, flags| Access { location: [1, device], flags };
        gpu.use_device(1);
        fails!(1, gpu.cuMemsetD8_v2(earlier, 7, MIB2));
        ok!(gpu.cuMemPoolSetAccess(pool, &of_device(1, 3), 1));
        ok!(gpu.cuMemsetD8_v2(earlier, 7, MIB2));
        gpu.use_device(0);
        ok!(gpu.cuMemAllocAsync(&raw mut later, MIB2, 0));
        gpu.use_device(1);
        ok!(gpu.cuMemsetD8_v2(later, 7, MIB2));
        // From under work, the access would be lost with the context.
        ok!(gpu.cuCtxSynchronize());
        ok!(gpu.cuMemPoolSetAccess(pool, &of_device(1, 0), 1));
        fails!(1, gpu.cuMemsetD8_v2(earlier, 7, MIB2));
        fails!(1, gpu.cuMemsetD8_v2(later, 7, MIB2));
        for wrong in [of_device(0, 0), of_device(2, 3), of_device(1, 2), Access { location: [0, 1], flags: 3 }] {
            fails!(1, gpu.cuMemPoolSetAccess(pool, &raw const wrong, 1));
        }
        fails!(1, gpu.cuMemPoolSetAccess(4711, &of_device(1, 3), 1));
        fails!(1, gpu.cuMemPoolSetAccess(pool, std::ptr::null(), 1));
        gpu.use_device(0);
        ok!(gpu.cuMemsetD8_v2(earlier, 7, MIB2));
    });
}

#[test]
fn an_address_hint_is_honoured_if_free() {
    on_gpu("an_address_hint_is_honoured_if_free", &[], |gpu| {
        let first = gpu.reserve(8 * MIB2);
        ok!(gpu.cuMemAddressFree(first, 8 * MIB2));
        let mut again = 0;
        ok!(gpu.cuMemAddressReserve(&raw mut again, 8 * MIB2, 0, first, 0));
        assert_eq!(again, first);
        let mut elsewhere = 0;
        ok!(gpu.cuMemAddressReserve(&raw mut elsewhere, 8 * MIB2, 0, first, 0));
        assert_ne!(elsewhere, first);
        let mut aligned = 0;
        ok!(gpu.cuMemAddressReserve(&raw mut aligned, MIB2, 1 << 30, 0, 0));
        assert_eq!(aligned % (1 << 30), 0);
    });
}

#[test]
fn memory_lives_while_anything_refers_to_it() {
    on_gpu("memory_lives_while_anything_refers_to_it", &[], |gpu| {
        let pointer = gpu.map_new(MIB2);
        assert_eq!((gpu.live("handles"), gpu.used()), (0, MIB2 as u64));
        gpu.upload(pointer, b"kept");
        let mut handle = 0;
        ok!(gpu.cuMemRetainAllocationHandle(&raw mut handle, pointer + 5));
        ok!(gpu.cuMemUnmap(pointer, MIB2));
        assert_eq!(gpu.used(), MIB2 as u64);
        // The same memory at other addresses, twice.
        let other = gpu.reserve(2 * MIB2);
        ok!(gpu.cuMemMap(other, MIB2, 0, handle, 0));
        ok!(gpu.cuMemMap(other + MIB2 as u64, MIB2, 0, handle, 0));
        gpu.access(other, 2 * MIB2, 3);
        ok!(gpu.cuMemRelease(handle));
        assert_eq!(gpu.download(other + MIB2 as u64, 4), b"kept");
        assert_eq!(gpu.used(), MIB2 as u64);
        ok!(gpu.cuMemUnmap(other, 2 * MIB2));
        assert_eq!(gpu.used(), 0);
        // New memory at the old addresses reads as zero.
        gpu.put_new(pointer, MIB2);
        assert_eq!(gpu.download(pointer, 4), [0; 4]);
    });
}

#[test]
fn capacity_is_exact() {
    on_gpu("capacity_is_exact", &[("SIMGPU_MEMORY", "8M")], |gpu| {
        let (mut free, mut total) = (0, 0);
        let handle = gpu.create(3 * MIB2);
        ok!(gpu.cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!((free, total), (MIB2, 4 * MIB2));
        let mut none = 0;
        fails!(2, gpu.cuMemCreate(&raw mut none, 2 * MIB2, &prop(0), 0));
        fails!(2, gpu.cuMemAlloc_v2(&raw mut none, 2 * MIB2));
        fails!(2, gpu.cuMemAlloc_v2(&raw mut none, usize::MAX - 5));
        unsafe { (gpu.simgpu_occupy)(0, MIB2 as u64) };
        fails!(2, gpu.cuMemCreate(&raw mut none, MIB2, &prop(0), 0));
        unsafe { (gpu.simgpu_occupy)(0, 0) };
        ok!(gpu.cuMemCreate(&raw mut none, MIB2, &prop(0), 0));
        ok!(gpu.cuMemRelease(none));
        ok!(gpu.cuMemRelease(handle));
        assert_eq!(gpu.used(), 0);
    });
}

#[test]
fn host_memory_goes_back_with_the_device_memory() {
    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }
    on_gpu("host_memory_goes_back_with_the_device_memory", &[], |gpu| {
        let before = resident();
        let pointer = gpu.map_new(64 << 20);
        // Untouched memory costs the host nothing.
        assert!(resident() < before + (16 << 20));
        ok!(gpu.cuMemsetD8_v2(pointer, 1, 64 << 20));
        ok!(gpu.cuCtxSynchronize());
        assert!(resident() > before + (48 << 20));
        ok!(gpu.cuMemUnmap(pointer, 64 << 20));
        assert!(resident() < before + (16 << 20));
    });
}

#[test]
fn the_host_cannot_read_device_memory() {
    on_gpu("the_host_cannot_read_device_memory", &[], |gpu| {
        for pointer in [gpu.map_new(MIB2), gpu.alloc(100)] {
            let child = unsafe { libc::fork() };
            if child == 0 {
                unsafe {
                    libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                    std::ptr::read_volatile(pointer as *const u8);
                    libc::_exit(0)
                };
            }
            let mut status = 0;
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
        }
    });
}

#[test]
fn memory_taken_from_under_running_work_is_a_fault() {
    on_gpu("memory_taken_from_under_running_work_is_a_fault", &[], |gpu| {
        let stream = gpu.stream(1);
        let pointer = gpu.map_new(MIB2);
        gpu.slow_down(LONG_MS);
        ok!(gpu.cuMemsetD8Async(pointer, 1, MIB2, stream));
        gpu.until_delayed(1);
        ok!(gpu.cuMemUnmap(pointer, MIB2));
        // Mapping other memory at the same addresses does not hide the fault.
        gpu.put_new(pointer, MIB2);
        gpu.slow_down(0);
        fails!(700, gpu.cuStreamSynchronize(stream));
    });
}

#[test]
fn copies_between_all_kinds_of_memory() {
    on_gpu("copies_between_all_kinds_of_memory", &[], |gpu| {
        let pattern: Vec<u8> = (0..300_000u32).map(|value| (value * 7) as u8).collect();
        let plain = gpu.alloc(pattern.len());
        let mapped = gpu.reserve(2 * MIB2);
        gpu.put_new(mapped, MIB2);
        gpu.put_new(mapped + MIB2 as u64, MIB2);
        // Across the boundary between two mappings.
        let across = mapped + MIB2 as u64 - 1000;
        let (mut pinned, mut managed) = (0, 0);
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, pattern.len(), 0));
        ok!(gpu.cuMemAllocManaged(&raw mut managed, pattern.len(), 1));
        ok!(gpu.cuMemcpy(pinned, pattern.as_ptr() as u64, pattern.len()));
        ok!(gpu.cuMemcpyHtoD_v2(across, pinned, pattern.len()));
        ok!(gpu.cuMemcpyDtoD_v2(plain, across, pattern.len()));
        ok!(gpu.cuMemcpy(managed, plain, pattern.len()));
        ok!(gpu.cuCtxSynchronize());
        assert_eq!(gpu.download(managed, pattern.len()), pattern);
        let seen = unsafe { std::slice::from_raw_parts(managed as *const u8, pattern.len()) };
        assert_eq!(seen, pattern);
        ok!(gpu.cuMemsetD32_v2(across, 0x0403_0201, 1000));
        assert_eq!(gpu.download(across, 4000), [1, 2, 3, 4].repeat(1000));
        fails!(1, gpu.cuMemcpyHtoD_v2(pattern.as_ptr() as u64, plain, 10));
        // An invalid host address ends the context, not the process.
        fails!(700, gpu.cuMemcpyDtoH_v2(4096, plain, 10));
    });
}

#[test]
fn host_registration() {
    on_gpu("host_registration", &[], |gpu| {
        let memory = vec![0u8; 1 << 20];
        let at = memory.as_ptr() as u64;
        fails!(713, gpu.cuMemHostUnregister(at));
        ok!(gpu.cuMemHostRegister_v2(at, 1 << 20, 0));
        fails!(712, gpu.cuMemHostRegister_v2(at + 4096, 100, 0));
        fails!(1, gpu.cuMemHostUnregister(at + 4096));
        assert_eq!(gpu.live("registered"), 1);
        ok!(gpu.cuMemHostUnregister(at));
        fails!(1, gpu.cuMemHostRegister_v2(8192, 4096, 0));
        let mut pinned = 0;
        ok!(gpu.cuMemHostAlloc(&raw mut pinned, 100, 0));
        fails!(1, gpu.cuMemHostRegister_v2(pinned, 100, 0));
        fails!(1, gpu.cuMemFreeHost(pinned + 8));
        ok!(gpu.cuMemFreeHost(pinned));
        fails!(1, gpu.cuMemFreeHost(pinned));
    });
}

/// Observed with driver 580: `across` fails whichever the function and the direction.
#[test]
fn a_copy_does_not_leave_a_registration() {
    isolated("a_copy_does_not_leave_a_registration", &[], || {
        const HALF: usize = 1 << 20;
        let gpu = Gpu::start();
        let device = gpu.alloc(2 * HALF);
        let memory = vec![1u8; 4 * HALF];
        let at = memory.as_ptr() as u64;
        ok!(gpu.cuMemHostRegister_v2(at + HALF as u64, HALF, 0));
        ok!(gpu.cuMemHostRegister_v2(at + 2 * HALF as u64, HALF, 0));
        let (within, across, out, into) = (at + HALF as u64, at + 3 * HALF as u64 / 2, at + 5 * HALF as u64 / 2, at + HALF as u64 / 2);
        for from in [within, into] {
            ok!(gpu.cuMemcpyHtoD_v2(device, from, HALF));
            ok!(gpu.cuMemcpyDtoH_v2(from, device, HALF));
            ok!(gpu.cuMemcpyHtoDAsync_v2(device, from, HALF, 0));
        }
        for from in [across, out] {
            fails!(1, gpu.cuMemcpyHtoD_v2(device, from, HALF));
            fails!(1, gpu.cuMemcpyDtoH_v2(from, device, HALF));
            fails!(1, gpu.cuMemcpyHtoDAsync_v2(device, from, HALF, 0));
            fails!(1, gpu.cuMemcpy(device, from, HALF));
        }
    });
}

#[test]
fn plain_memory_and_virtual_memory_do_not_mix() {
    on_gpu("plain_memory_and_virtual_memory_do_not_mix", &[], |gpu| {
        let (plain, mapped) = (gpu.alloc(4 * MIB2), gpu.map_new(MIB2));
        let mut ipc = [0; 64];
        ok!(gpu.cuIpcGetMemHandle(&raw mut ipc, plain));
        fails!(1, gpu.cuIpcGetMemHandle(&raw mut ipc, mapped));
        fails!(1, gpu.cuMemFree_v2(mapped));
        fails!(1, gpu.cuMemFree_v2(plain + 512));
        fails!(1, gpu.cuMemUnmap(plain, 4 * MIB2));
        fails!(1, gpu.cuMemAddressFree(plain, 4 * MIB2));
        ok!(gpu.cuMemFree_v2(plain));
        fails!(1, gpu.cuMemFree_v2(plain));
        ok!(gpu.cuMemFree_v2(0));
    });
}

#[test]
fn a_device_without_virtual_memory() {
    on_gpu("a_device_without_virtual_memory", &[("SIMGPU_NO_VMM", "1")], |gpu| {
        let mut value = 9;
        ok!(gpu.cuDeviceGetAttribute(&raw mut value, 102, 0));
        assert_eq!(value, 0);
        let mut handle = 0;
        fails!(801, gpu.cuMemCreate(&raw mut handle, MIB2, &prop(0), 0));
        gpu.alloc(100);
    });
}

#[test]
fn several_devices() {
    let devices = [("SIMGPU_DEVICES", "2"), ("SIMGPU_MEMORY", "4M"), ("SIMGPU_CONTEXT_BYTES", "1M")];
    on_gpu("several_devices", &devices, |gpu| {
        let mapped = gpu.map_new(MIB2);
        let first = gpu.alloc(512);
        let mut none = 0;
        fails!(2, gpu.cuMemAlloc_v2(&raw mut none, MIB2));
        gpu.use_device(1);
        let second = gpu.alloc(MIB2);
        assert_eq!(unsafe { (gpu.simgpu_used)(1) }, 3 << 20);
        gpu.upload(first, b"across");
        ok!(gpu.cuMemcpyDtoD_v2(second, first, 6));
        assert_eq!(gpu.download(second, 6), b"across");
        // Device 1 has no access to memory that only device 0 was granted.
        let mut byte = 0u8;
        fails!(1, gpu.cuMemcpyDtoH_v2(&raw mut byte as u64, mapped, 1));
        ok!(gpu.cuDevicePrimaryCtxReset_v2(1));
        assert_eq!(unsafe { (gpu.simgpu_used)(1) }, 0);
    });
}

#[test]
fn contexts_and_code_need_memory() {
    let environment = [("SIMGPU_MEMORY", "8M"), ("SIMGPU_CONTEXT_BYTES", "2M"), ("SIMGPU_CODE_BYTES", "1M")];
    on_gpu("contexts_and_code_need_memory", &environment, |gpu| {
        let (mut second, mut third) = (0, 0);
        ok!(gpu.cuCtxCreate_v2(&raw mut second, 0, 0));
        assert_eq!(gpu.used(), 4 << 20);
        let filler = gpu.alloc(3 << 20);
        fails!(2, gpu.cuCtxCreate_v2(&raw mut third, 0, 0));
        let (mut module, mut function) = (0, 0);
        let text = c".version 8.0\n.entry nothing() { ret; }";
        ok!(gpu.cuModuleLoadData(&raw mut module, text.as_ptr()));
        fails!(2, gpu.cuModuleLoadData(&raw mut module, text.as_ptr()));
        // A function is loaded when it is first launched.
        ok!(gpu.cuModuleGetFunction(&raw mut function, module, c"nothing".as_ptr()));
        let launch = || unsafe { (gpu.cuLaunchKernel)(function, 1, 1, 1, 1, 1, 1, 0, 0, std::ptr::null(), 0) };
        assert_eq!(launch(), 2);
        ok!(gpu.cuMemFree_v2(filler));
        assert_eq!((launch(), launch(), gpu.used()), (0, 0, 6 << 20));
        ok!(gpu.cuModuleUnload(module));
        assert_eq!(gpu.used(), 4 << 20);
        ok!(gpu.cuCtxDestroy_v2(second));
        assert_eq!(gpu.used(), 2 << 20);
    });
}

#[test]
fn any_call_can_be_made_to_fail() {
    let environment = [("SIMGPU_FAIL", "cuMemCreate:2:999:2,cuMemMap:1:205:*")];
    on_gpu("any_call_can_be_made_to_fail", &environment, |gpu| {
        let mut handle = 0;
        let codes: Vec<u32> = (0..4).map(|_| unsafe { (gpu.cuMemCreate)(&raw mut handle, MIB2, &prop(0), 0) }).collect();
        assert_eq!(codes, [0, 999, 999, 0]);
        assert_eq!(gpu.calls("cuMemCreate"), 4);
        let base = gpu.reserve(MIB2);
        for _ in 0..3 {
            fails!(205, gpu.cuMemMap(base, MIB2, 0, handle, 0));
        }
        unsafe { (gpu.simgpu_clear_faults)() };
        ok!(gpu.cuMemMap(base, MIB2, 0, handle, 0));
        assert_eq!(gpu.fail("cuMemAlloc", 2, 2, 1), 0);
        gpu.alloc(1);
        let mut none = 0;
        fails!(2, gpu.cuMemAlloc_v2(&raw mut none, 1));
        gpu.alloc(1);
        assert_eq!(gpu.fail("cuNoSuchCall", 1, 2, 1), 1);
    });
}

#[test]
fn a_forked_child_has_no_cuda() {
    isolated("a_forked_child_has_no_cuda", &[], || {
        let gpu = Gpu::load();
        let in_child = |body: &dyn Fn() -> u32| {
            let child = unsafe { libc::fork() };
            if child == 0 {
                unsafe { libc::_exit(body() as i32) };
            }
            let mut status = 0;
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            libc::WEXITSTATUS(status)
        };
        // Before the parent initialises CUDA, a child may use it.
        assert_eq!(in_child(&|| unsafe { (gpu.cuInit)(0) }), 0);
        ok!(gpu.cuInit(0));
        gpu.use_device(0);
        let pointer = gpu.alloc(4096);
        assert_eq!(in_child(&|| unsafe { (gpu.cuMemFree_v2)(pointer) }), 3);
        assert_eq!(in_child(&|| unsafe { (gpu.cuInit)(0) }), 3);
        assert_eq!(gpu.used(), 4096);
        ok!(gpu.cuMemFree_v2(pointer));
    });
}

#[test]
fn names_and_addresses() {
    isolated("names_and_addresses", &[], || {
        let gpu = Gpu::load();
        let (mut found, mut status) = (std::ptr::null_mut::<c_void>(), 9);
        let mut find = |name: &std::ffi::CStr, flags| unsafe {
            let code = (gpu.cuGetProcAddress_v2)(name.as_ptr(), &raw mut found, 13000, flags, &raw mut status);
            (code, found, status)
        };
        assert_eq!(find(c"cuMemFree", 0), (0, gpu.cuMemFree_v2 as *mut c_void, 0));
        assert_eq!(find(c"cuMemCreate", 2), (0, gpu.cuMemCreate as *mut c_void, 0));
        assert_ne!(find(c"cuMemcpyHtoDAsync", 2).1, gpu.cuMemcpyHtoDAsync_v2 as *mut c_void);
        assert_eq!(find(c"cuTeleport", 0), (0, std::ptr::null_mut(), 1));
        let mut text = std::ptr::null();
        ok!(gpu.cuGetErrorName(700, &raw mut text));
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(text) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    });
}

#[test]
fn many_threads_at_once() {
    on_gpu("many_threads_at_once", &[], |gpu| {
        let context = gpu.use_device(0);
        let threads: Vec<_> = (1..=8u8)
            .map(|value| {
                std::thread::spawn(move || {
                    ok!(gpu.cuCtxSetCurrent(context));
                    let stream = gpu.stream(u32::from(value % 2));
                    let kept = gpu.map_new(MIB2);
                    for round in 0..40u32 {
                        let mapped = gpu.map_new(MIB2);
                        let plain = gpu.alloc(5000);
                        let target = if round % 3 == 0 { 0 } else { stream };
                        ok!(gpu.cuMemsetD8Async(mapped, value, 5000, target));
                        ok!(gpu.cuMemcpyHtoDAsync_v2(plain, [value; 100].as_ptr() as u64, 100, target));
                        ok!(gpu.cuStreamSynchronize(target));
                        ok!(gpu.cuMemcpyDtoD_v2(kept, mapped, 5000));
                        assert_eq!(gpu.download(kept, 5000), [value; 5000]);
                        if round % 10 == 0 {
                            ok!(gpu.cuCtxSynchronize());
                        }
                        ok!(gpu.cuMemFree_v2(plain));
                        ok!(gpu.cuMemUnmap(mapped, MIB2));
                        ok!(gpu.cuMemAddressFree(mapped, MIB2));
                    }
                    ok!(gpu.cuMemUnmap(kept, MIB2));
                    ok!(gpu.cuStreamDestroy_v2(stream));
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!((gpu.used(), gpu.live("streams"), gpu.live("plain")), (0, 0, 0));
    });
}

/// A driver that reports support for `GPUDirect` RDMA, as in WSL 2.
#[test]
fn access_to_memory_for_rdma_can_be_refused() {
    isolated("access_to_memory_for_rdma_can_be_refused", &[("SIMGPU_NO_RDMA", "1")], || {
        const RDMA: i32 = 110;
        let gpu = Gpu::start();
        let mut supported = 0;
        ok!(gpu.cuDeviceGetAttribute(&raw mut supported, RDMA, 0));
        assert_eq!(supported, 1);
        let own = Access { location: [1, 0], flags: 3 };
        for (rdma, answer) in [(0, 0), (1, 999)] {
            let mut wanted = prop(0);
            wanted.flags[1] = rdma;
            let (base, mut handle) = (gpu.reserve(MIB2), 0);
            ok!(gpu.cuMemCreate(&raw mut handle, MIB2, &raw const wanted, 0));
            ok!(gpu.cuMemMap(base, MIB2, 0, handle, 0));
            assert_eq!(unsafe { (gpu.cuMemSetAccess)(base, MIB2, &raw const own, 1) }, answer);
        }
    });
}
