//! Memory left to CUDA is counted, by the library that asked for it.

use crate::common::{self, Gpu, MIB, OwnContext, SHARED, free, malloc, malloc_tagged};
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::{env, mem, ptr};
use vramctl_core::memory::{Memory, is_ours, region};
use vramctl_intercept::table::{CudaExtent, CudaPitchedPtr};
use vramctl_intercept::{entries, hooks};
use vramctl_model::Unmanaged;

const PAGE: usize = 2 * MIB;

/// The bytes left to CUDA, by owner.
fn left() -> BTreeMap<String, u64> {
    let told = |left: Unmanaged| {
        assert_eq!(left.gpus.values().sum::<u64>(), left.bytes, "all of it is on some GPU");
        (left.owner, left.bytes)
    };
    Memory::get().status().unmanaged.into_iter().map(told).collect()
}

/// This program, as an owner.
fn this() -> String {
    env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

fn driver_malloc(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, bytes) }, 0);
    address
}

fn driver_free(address: u64) -> u32 {
    unsafe { entries::cuMemFree_v2(address) }
}

/// Managed memory and small requests are not counted.
#[test]
fn memory_left_to_cuda_is_counted_until_it_is_freed() {
    let _gpu = Gpu::take();
    let mine = |bytes: usize| if bytes == 0 { BTreeMap::new() } else { BTreeMap::from([(this(), bytes as u64)]) };
    let managed = malloc_tagged("managed", None, PAGE).unwrap();
    let small = driver_malloc(4096);
    assert_eq!(left(), mine(0));

    let (runtimes, drivers) = (malloc(2 * PAGE).unwrap(), driver_malloc(PAGE));
    assert_eq!(left(), mine(3 * PAGE), "what passes both doors counts once");
    assert_eq!((driver_free(runtimes), free(drivers)), (0, 0), "freed through the other door");
    assert_eq!(left(), mine(0));
    assert_ne!(free(drivers), 0);

    let (mut pointer, mut pitch) = (ptr::null_mut(), 0);
    assert_eq!(unsafe { hooks::cudaMallocPitch(&raw mut pointer, &raw mut pitch, 1000, 4096) }, 0);
    assert_eq!(left(), mine(pitch * 4096));
    assert_eq!(free(pointer as u64), 0);
    let mut pitched = CudaPitchedPtr { pointer: ptr::null_mut(), pitch: 0, xsize: 0, ysize: 0 };
    let extent = CudaExtent { width: 512, height: 1024, depth: 8 };
    assert_eq!(unsafe { hooks::cudaMalloc3D(&raw mut pitched, extent) }, 0);
    assert_eq!((left(), pitched.ysize), (mine(512 * 1024 * 8), 1024));
    assert_eq!(free(pitched.pointer as u64), 0);

    assert_eq!((free(managed), driver_free(small)), (0, 0));
}

#[test]
fn physical_memory_left_to_cuda_is_counted_until_its_last_reference_is_gone() {
    let _gpu = Gpu::take();
    // `CUmemAllocationProp` of plain memory on the first device.
    let wanted = [1_u32, 0, 1, 0, 0, 0, 0, 0];
    let (mut handle, mut again, mut place) = (0, 0, 0);
    unsafe {
        assert_eq!(entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0), 0);
        assert!(!is_ours(handle));
        assert_eq!(entries::cuMemAddressReserve(&raw mut place, PAGE, 0, 0, 0), 0);
        assert_eq!((entries::cuMemMap(place, PAGE, 0, handle, 0), entries::cuMemRelease(handle)), (0, 0));
        assert_eq!(left()[&this()], PAGE as u64, "mapped memory outlives its handle");
        assert_eq!(entries::cuMemRetainAllocationHandle(&raw mut again, ptr::without_provenance_mut(place as usize)), 0);
        assert_eq!(entries::cuMemUnmap(place, PAGE), 0);
        assert_eq!(left()[&this()], PAGE as u64, "retained");
        assert_eq!(entries::cuMemRelease(again), 0);
        assert_eq!(left(), BTreeMap::new());
        assert_ne!(entries::cuMemRelease(again), 0);
        assert_eq!(entries::cuMemAddressFree(place, PAGE), 0);
    }
}

/// The driver frees it with the context, and a new context may get the handle of the old one.
#[test]
fn memory_left_to_cuda_ends_with_its_context() {
    let _gpu = Gpu::take();
    let kept = driver_malloc(PAGE);
    {
        let _context = OwnContext::create(0);
        driver_malloc(2 * PAGE);
        assert_eq!(left()[&this()], 3 * PAGE as u64);
    }
    assert_eq!(left()[&this()], PAGE as u64);
    let again = OwnContext::create(0);
    let new = driver_malloc(PAGE);
    assert_eq!(left()[&this()], 2 * PAGE as u64);
    assert_eq!(driver_free(new), 0);
    drop(again);
    assert_eq!(driver_free(kept), 0);
    assert_eq!(left(), BTreeMap::new());
}

/// Through the runtime or the driver, and whatever it is linked to.
#[test]
fn an_excluded_librarys_memory_is_left_to_cuda() {
    type Allocate = unsafe extern "C-unwind" fn(*mut *mut c_void, usize) -> u32;
    type Ask = unsafe extern "C" fn(Allocate, *mut *mut c_void, usize) -> u32;
    let _gpu = Gpu::take();
    let ask = |name: &str| {
        let library = common::own_folder().join(name);
        common::compile(&library, &["asks.c"], &SHARED);
        let path = CString::new(library.to_str().unwrap()).unwrap();
        unsafe {
            let opened = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!opened.is_null());
            mem::transmute::<*mut c_void, Ask>(libc::dlsym(opened, c"ask".as_ptr()))
        }
    };
    let doors: [Allocate; 2] = unsafe {
        let driver = entries::cuMemAlloc_v2 as *const c_void;
        [hooks::cudaMalloc, mem::transmute::<*const c_void, Allocate>(driver)]
    };
    region::begin(Some("all"), None).unwrap();
    for (name, is_left) in [("libnccl_test.so", true), ("libother_test.so", false)] {
        let ask = ask(name);
        for door in doors {
            let mut pointer = ptr::null_mut();
            assert_eq!(unsafe { ask(door, &raw mut pointer, PAGE) }, 0);
            assert_eq!(Memory::get().registry.manages(pointer as u64), !is_left, "{name}");
            assert_eq!(left().get(name), is_left.then_some(&(PAGE as u64)), "{name}");
            assert_eq!(free(pointer as u64), 0);
            assert_eq!(left().get(name), None);
        }
    }
    region::end().unwrap();
}
