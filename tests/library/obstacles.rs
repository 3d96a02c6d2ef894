//! What the driver could not restore is known before a suspend, also if it is left to CUDA, until it ends.

use crate::common::machine::{Machine, Program};
use crate::common::sharing::MIB;
use crate::common::{self, Gpu, OwnContext, free, malloc, reset_unseen, use_again};
use std::ptr;
use vramctl_core::memory::{Memory, is_ours};
use vramctl_driver::StreamHandle;
use vramctl_intercept::entries;

const PAGE: usize = 2 << 20;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: u32 = 6;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, and `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DESCRIPTOR: u32 = 1;

fn obstacles() -> Vec<String> {
    Memory::get().status().obstacles.into_iter().map(|obstacle| obstacle.what).collect()
}

#[track_caller]
fn there_are(what: &str) {
    assert_eq!(obstacles(), [what]);
    let refused = Memory::get().suspend(|| false).unwrap_err().to_string();
    assert!(refused.contains(what), "{refused}");
}

#[track_caller]
fn there_are_none() {
    assert_eq!(obstacles(), Vec::<String>::new());
}

fn small() -> u64 {
    let mut address = 0;
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, 4096) }, 0);
    address
}

/// Memory of `cuMemCreate` that is left to CUDA, mapped twice, not accessible yet.
struct Virtual {
    handle: u64,
    places: [u64; 2],
}

impl Virtual {
    fn new() -> Self {
        // `CUmemAllocationProp` of plain memory on the first device.
        let wanted = [1_u32, 0, 1, 0, 0, 0, 0, 0];
        let (mut handle, mut place) = (0, 0);
        unsafe {
            assert_eq!(entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0), 0);
            assert!(!is_ours(handle));
            assert_eq!(entries::cuMemAddressReserve(&raw mut place, 2 * PAGE, 0, 0, 0), 0);
            let places = [place, place + PAGE as u64];
            for place in places {
                assert_eq!(entries::cuMemMap(place, PAGE, 0, handle, 0), 0);
            }
            Self { handle, places }
        }
    }

    /// Both mappings.
    fn set_access(&self, device: u32, flags: u32) {
        let access = access(device, flags);
        assert_eq!(unsafe { entries::cuMemSetAccess(self.places[0], 2 * PAGE, access.as_ptr().cast(), 1) }, 0);
    }

    fn unmap(&self, which: usize) -> u32 {
        unsafe { entries::cuMemUnmap(self.places[which], PAGE) }
    }
}

/// `CUmemAccessDesc`.
fn access(device: u32, flags: u32) -> [u32; 3] {
    [1, device, flags]
}

fn sync_memops(address: u64) {
    let on = 1_u32;
    assert_eq!(unsafe { entries::cuPointerSetAttribute((&raw const on).cast(), SYNC_MEMOPS, address) }, 0);
}

#[test]
fn registered_memory_that_is_left_to_cuda() {
    let gpu = Gpu::take();
    let (small, large) = (small(), malloc(2 * PAGE).unwrap());
    assert!(Memory::existing().is_none_or(|memory| !memory.registry.manages(large)));
    sync_memops(small + 64);
    sync_memops(small);
    there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    gpu.fail("cuMemFree_v2", 1, 1, 1);
    assert_eq!(free(small), 1);
    there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    assert_eq!(free(small), 0);
    there_are_none();

    let mut descriptor = -1;
    let middle = large + PAGE as u64;
    unsafe {
        assert_eq!(entries::cuMemGetHandleForAddressRange((&raw mut descriptor).cast(), middle, 4096, DESCRIPTOR, 0), 0);
        libc::close(descriptor);
    }
    there_are("1 registration of memory (cuMemGetHandleForAddressRange)");
    assert_eq!(free(large), 0);
    there_are_none();

    // Physical memory stays registered as long as it exists.
    let memory = Virtual::new();
    memory.set_access(0, 3);
    sync_memops(memory.places[0] + 4096);
    there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    assert_eq!(memory.unmap(0), 0);
    assert_eq!(unsafe { entries::cuMemRelease(memory.handle) }, 0);
    there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    assert_eq!(memory.unmap(1), 0);
    there_are_none();
    assert_eq!(unsafe { entries::cuMemAddressFree(memory.places[0], 2 * PAGE) }, 0);
}

/// The driver frees it then, whether or not the program's call passes by here.
#[test]
fn what_ends_with_its_context() {
    const GLOBAL: u32 = 1; // CU_MEM_ATTACH_GLOBAL
    let all = [
        "1 piece of memory shared with other processes (cuIpcGetMemHandle)",
        "1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))",
        "1 allocation of unified memory (cuMemAllocManaged)",
    ];
    let make = || {
        let mut managed = 0;
        let mut handle = [0_u8; 64];
        unsafe {
            assert_eq!(entries::cuMemAllocManaged(&raw mut managed, PAGE, GLOBAL), 0);
            assert_eq!(entries::cuIpcGetMemHandle(handle.as_mut_ptr().cast(), small()), 0);
        }
        sync_memops(small());
        let mut found = obstacles();
        found.sort();
        let mut wanted = all.map(str::to_owned);
        wanted.sort();
        assert_eq!(found, wanted);
    };
    let _gpu = Gpu::take();
    // In the primary context, which stays.
    let kept = small();
    sync_memops(kept);
    let own = OwnContext::create(0);
    sync_memops(small());
    there_are("2 registrations of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    drop(own);
    there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
    assert_eq!(free(kept), 0);
    there_are_none();

    let own = OwnContext::create(0);
    make();
    drop(own);
    there_are_none();
    make();
    reset_unseen(0);
    use_again(0);
    there_are_none();

    // Before anybody looks, other memory may get the address, which stays as it is.
    let is_registered_again = || {
        let gone = small();
        sync_memops(gone);
        reset_unseen(0);
        use_again(0);
        let new = small();
        sync_memops(new);
        there_are("1 registration of memory (cuPointerSetAttribute(SYNC_MEMOPS))");
        assert_eq!(free(new), 0);
        new == gone
    };
    assert!((0..1000).any(|_| is_registered_again()));
    there_are_none();
}

#[test]
fn virtual_memory_that_is_left_to_cuda_and_open_to_another_gpu() {
    let gpu = Gpu::take();
    let memory = Virtual::new();
    let open = "of access to another GPU's memory (cuMemSetAccess)";
    memory.set_access(0, 3);
    there_are_none();
    memory.set_access(1, 1);
    there_are(&format!("2 grants {open}"));
    memory.set_access(1, 3);
    there_are(&format!("2 grants {open}"));
    gpu.fail("cuMemSetAccess", 1, 1, 1);
    let none = access(1, 0);
    assert_eq!(unsafe { entries::cuMemSetAccess(memory.places[0], PAGE, none.as_ptr().cast(), 1) }, 1);
    there_are(&format!("2 grants {open}"));
    memory.set_access(1, 0);
    there_are_none();
    memory.set_access(1, 3);
    gpu.fail("cuMemUnmap", 1, 1, 1);
    assert_eq!(memory.unmap(0), 1);
    there_are(&format!("2 grants {open}"));
    assert_eq!(memory.unmap(0), 0);
    there_are(&format!("1 grant {open}"));
    assert_eq!(memory.unmap(1), 0);
    there_are_none();
    unsafe {
        assert_eq!(entries::cuMemRelease(memory.handle), 0);
        assert_eq!(entries::cuMemAddressFree(memory.places[0], 2 * PAGE), 0);
    }
}

/// A pool on the first device, that can be shared.
fn pool() -> *mut std::ffi::c_void {
    // `CUmemPoolProps`.
    let wanted = [1_u32, DESCRIPTOR, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut pool = ptr::null_mut();
    assert_eq!(unsafe { entries::cuMemPoolCreate(&raw mut pool, wanted.as_ptr().cast()) }, 0);
    pool
}

#[test]
fn pools_that_are_shared_or_open_to_another_gpu() {
    let gpu = Gpu::take();
    let _context = OwnContext::create(0);
    let made = pool();
    let set = |device, flags| assert_eq!(unsafe { entries::cuMemPoolSetAccess(made, access(device, flags).as_ptr().cast(), 1) }, 0);
    set(0, 3);
    there_are_none();
    set(1, 3);
    there_are("1 grant of access to another GPU's memory (cuMemPoolSetAccess)");
    set(1, 0);
    there_are_none();
    set(1, 3);
    gpu.fail("cuMemPoolDestroy", 1, 1, 1);
    assert_eq!(unsafe { entries::cuMemPoolDestroy(made) }, 1);
    there_are("1 grant of access to another GPU's memory (cuMemPoolSetAccess)");
    assert_eq!(unsafe { entries::cuMemPoolDestroy(made) }, 0);
    there_are_none();

    let made = pool();
    let null = unsafe { std::mem::transmute::<usize, StreamHandle>(0) };
    let (mut address, mut descriptor, mut data) = (0, -1, [0_u8; 64]);
    unsafe {
        assert_eq!(entries::cuMemAllocFromPoolAsync(&raw mut address, PAGE, made, null), 0);
        there_are_none();
        assert_eq!(entries::cuMemPoolExportPointer(data.as_mut_ptr().cast(), address), 0);
        there_are("1 piece of memory shared with other processes (cuMemPoolExportPointer)");
        assert_eq!(entries::cuMemFreeAsync(address, null), 0);
        there_are_none();
        assert_eq!(entries::cuMemPoolExportToShareableHandle((&raw mut descriptor).cast(), made, DESCRIPTOR, 0), 0);
        libc::close(descriptor);
        there_are("1 piece of memory shared with other processes (cuMemPoolExportToShareableHandle)");
        assert_eq!((common::synchronize(), entries::cuMemPoolDestroy(made)), (0, 0));
    }
    there_are_none();
}

/// A suspend that is refused as it must be, or one that brings the process back.
#[track_caller]
fn suspended(machine: &Machine, name: &str, obstacle: Option<&str>) {
    let text = machine.vramctl(&["suspend", "--name", name]).expect(if obstacle.is_some() { 7 } else { 0 }, "", "").text();
    assert!(text.contains(obstacle.unwrap_or_default()), "{text}");
    machine.done(&["resume", "--name", name]);
}

/// Driver 580 answers the second opening with the same address, and counts.
#[test]
fn opened_memory_until_it_is_closed_as_often() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let mine = other.number(&format!("malloc({})", 4 * MIB));
    // Too small to be managed.
    let plain = owner.number("malloc(4096)");
    let handle = owner.ask(&format!("get({plain})"));
    let shared = "piece of memory shared with other processes (cuIpcOpenMemHandle)";
    other.ask("globals().update(driver=ctypes.CDLL('libcuda.so.1'))");
    let closes: [fn(u64) -> String; 2] =
        [|theirs| format!("close({theirs})"), |theirs| format!("driver.cuIpcCloseMemHandle(ctypes.c_uint64({theirs}))")];
    for close in closes {
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.number(&format!("open_('{handle}')")), theirs);
        suspended(&machine, "other", Some(shared));
        assert_eq!(other.ask(&close(theirs)), "0");
        suspended(&machine, "other", Some(shared));
        assert_eq!(other.ask(&close(theirs)), "0");
        assert_eq!(other.ask(&close(theirs)), "1");
        suspended(&machine, "other", None);
        assert_eq!(other.ask(&format!("fill({mine}, 1, 100)")), "0");
    }
}

/// A process with a pool that can be shared.
const POOL: &str = "globals().update(driver=ctypes.CDLL('libcuda.so.1'), pool=ctypes.c_void_p(), at=ctypes.c_uint64(), file=ctypes.c_int(), \
                    data=(ctypes.c_ubyte * 64)())";

fn with_pools(machine: &Machine, name: &str) -> Program {
    let mut program = machine.python(name);
    program.number(&format!("malloc({})", 4 * MIB));
    program.ask(POOL);
    program
}

#[test]
fn pools_of_two_processes() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (with_pools(&machine, "owner"), with_pools(&machine, "other"));
    let wanted = "(ctypes.c_uint32 * 22)(1, 1, 1, 0)";
    assert_eq!(owner.ask(&format!("driver.cuMemPoolCreate(ctypes.byref(pool), {wanted})")), "0");
    suspended(&machine, "owner", None);
    assert_eq!(owner.ask("driver.cuMemPoolExportToShareableHandle(ctypes.byref(file), pool, 1, ctypes.c_uint64(0))"), "0");
    suspended(&machine, "owner", Some("(cuMemPoolExportToShareableHandle)"));
    assert_eq!(owner.ask("driver.cuMemAllocFromPoolAsync(ctypes.byref(at), ctypes.c_size_t(2 << 20), pool, None)"), "0");
    assert_eq!(owner.ask("driver.cuMemPoolExportPointer(data, at)"), "0");

    let (pid, file, data) = (owner.pid(), owner.ask("file.value"), owner.ask("bytes(data).hex()"));
    assert_eq!(other.ask(&format!("globals().update(file=os.open('/proc/{pid}/fd/{file}', os.O_RDWR))")), "None");
    assert_eq!(
        other.ask("driver.cuMemPoolImportFromShareableHandle(ctypes.byref(pool), ctypes.c_size_t(file), 1, ctypes.c_uint64(0))"),
        "0"
    );
    suspended(&machine, "other", Some("(cuMemPoolImportFromShareableHandle)"));
    let import = format!("driver.cuMemPoolImportPointer(ctypes.byref(at), pool, bytes.fromhex('{data}'))");
    assert_eq!(other.ask(&import), "0");
    assert_eq!(other.ask("driver.cuMemPoolDestroy(pool)"), "0");
    suspended(&machine, "other", Some("(cuMemPoolImportPointer)"));
    assert_eq!(other.ask("free(at.value)"), "0");
    suspended(&machine, "other", None);

    // Memory outlives its pool.
    assert_eq!(owner.ask("driver.cuMemPoolDestroy(pool)"), "0");
    suspended(&machine, "owner", Some("(cuMemPoolExportToShareableHandle)"));
}
