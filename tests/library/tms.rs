//! The C functions of `torch_memory_saver`, called the way its users call them.

use crate::common::machine::{Machine, Ran};
use crate::common::{self, Gpu, MIB, free, library, malloc, pattern, read, write};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::thread;
use vramctl_core::memory::Memory;
use vramctl_intercept::abi::{VramctlBackup, vramctl_last_error, vramctl_region_begin, vramctl_region_end};
use vramctl_intercept::tms::*;
use vramctl_model::{Kind, Policy};

fn set_tag(tag: &str) {
    let tag = CString::new(tag).unwrap();
    unsafe { tms_set_current_tag(tag.as_ptr()) };
}

fn tag() -> String {
    unsafe { CStr::from_ptr(tms_get_current_tag()) }.to_str().unwrap().to_owned()
}

fn backend() -> &'static CStr {
    unsafe { CStr::from_ptr(tms_get_cpu_backup_backend()) }
}

fn named(tag: Option<&str>, call: unsafe extern "C" fn(*const c_char) -> c_int) -> c_int {
    let tag = tag.map(|tag| CString::new(tag).unwrap());
    unsafe { call(tag.as_ref().map_or(ptr::null(), |tag| tag.as_ptr())) }
}

fn pause(tag: Option<&str>) -> c_int {
    named(tag, tms_pause)
}

fn resume(tag: Option<&str>) -> c_int {
    named(tag, tms_resume)
}

/// The calling thread's settings: (tag, managed, kept in host memory, kept on disk).
fn settings() -> (String, bool, bool, bool) {
    (tag(), tms_get_interesting_region(), tms_get_enable_cpu_backup(), tms_get_enable_disk_backup())
}

fn policy(address: u64) -> (String, Policy) {
    let allocation = Memory::get().registry.find(address).expect("it is managed");
    (allocation.tag.to_string(), allocation.backup)
}

/// Runs `body` on a thread of its own, because settings outside regions belong to the thread.
fn in_a_new_thread(body: impl FnOnce() + Send + 'static) {
    thread::spawn(body).join().unwrap();
}

#[test]
fn settings_are_per_thread_and_persist() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        assert_eq!(settings(), ("default".into(), false, false, false));
        assert_eq!(backend(), c"pinned");
        common::set_device(0);
        let plain = malloc(2 * MIB).unwrap();
        assert!(Memory::get().registry.find(plain).is_none(), "nothing is managed until it is said");

        set_tag("weights");
        tms_set_interesting_region(true);
        assert_eq!(settings(), ("weights".into(), true, false, false));
        let discarded = malloc(2 * MIB).unwrap();
        tms_set_enable_cpu_backup(true);
        let in_memory = malloc(2 * MIB).unwrap();
        assert_eq!(settings(), ("weights".into(), true, true, false));
        tms_set_enable_disk_backup(true);
        assert_eq!(settings(), ("weights".into(), true, false, true), "one at a time");
        let on_disk = malloc(2 * MIB).unwrap();
        tms_set_enable_cpu_backup(false);
        assert_eq!(settings(), ("weights".into(), true, false, true), "it was not there that they were kept");
        tms_set_enable_disk_backup(false);
        assert_eq!(settings(), ("weights".into(), true, false, false));
        unsafe { tms_set_cpu_backup_backend(c"mmap".as_ptr()) };
        assert_eq!(backend(), c"mmap");

        tms_set_interesting_region(false);
        let left = malloc(2 * MIB).unwrap();
        assert!(Memory::get().registry.find(left).is_none());
        assert_eq!(settings(), ("weights".into(), false, false, false), "what else was said is not forgotten");
        assert_eq!(
            [discarded, in_memory, on_disk].map(policy),
            [Policy::Discard, Policy::Host, Policy::Disk].map(|backup| ("weights".to_owned(), backup))
        );
        in_a_new_thread(|| {
            assert_eq!(settings(), ("default".into(), false, false, false));
            assert_eq!(backend(), c"pinned");
        });
        for address in [plain, discarded, in_memory, on_disk, left] {
            assert_eq!(free(address), 0);
        }
    });
}

/// Frameworks turn management off and on inside a region: for a library's buffers in slime, for chunks of weights with their
/// own tags. It must take effect there, and end with the region.
#[test]
fn inside_a_region_the_settings_are_the_regions() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        set_tag("ground");
        tms_set_interesting_region(true);
        unsafe { vramctl_region_begin(c"weights".as_ptr(), VramctlBackup::Host as i32) };
        assert_eq!(settings(), ("weights".into(), true, true, false));
        tms_set_interesting_region(false);
        common::set_device(0);
        let plain = malloc(2 * MIB).unwrap();
        assert!(Memory::get().registry.find(plain).is_none());
        tms_set_interesting_region(true);
        set_tag("chunk_0");
        let chunk = malloc(2 * MIB).unwrap();
        assert_eq!(policy(chunk), ("chunk_0".into(), Policy::Host));
        vramctl_region_end();
        assert_eq!(settings(), ("ground".into(), true, false, false));
        unsafe { vramctl_region_begin(ptr::null(), 0) };
        assert!(!tms_get_interesting_region());
        vramctl_region_end();
        assert!(tms_get_interesting_region());
        assert_eq!((free(plain), free(chunk)), (0, 0));
    });
}

#[test]
fn repeated_transitions_and_unused_tags_are_no_errors() {
    let gpu = Gpu::take();
    common::set_device(0);
    let (weights, cache) = thread::spawn(|| {
        common::set_device(0);
        tms_set_interesting_region(true);
        set_tag("kv_cache");
        let cache = malloc(4 * MIB).unwrap();
        set_tag("weights");
        tms_set_enable_cpu_backup(true);
        (malloc(4 * MIB).unwrap(), cache)
    })
    .join()
    .unwrap();
    let contents = pattern(3, 4 * MIB);
    assert_eq!((write(weights, &contents), write(cache, &contents)), (0, 0));
    let used = gpu.used(0);

    let backup = |address: u64, bytes: u64| tms_get_cpu_backup_pointer(address as *const u8, bytes);
    assert!(backup(weights, 1).is_null(), "what is active has none");
    assert_eq!((pause(Some("weights")), pause(Some("weights")), pause(Some("cuda_graph"))), (0, 0, 0));
    assert_eq!(pause(Some("")), 0, "an empty tag is all of them");
    assert!(gpu.used(0) <= used - 8 * MIB as u64);
    let kept = backup(weights + 4096, 4096);
    assert!(unsafe { std::slice::from_raw_parts(kept, 4096) } == &contents[4096..8192]);
    assert!(backup(weights + 4096, 4 * MIB as u64).is_null(), "so much does not follow there");
    assert!(backup(cache, 1).is_null(), "what was discarded has none");

    // Too little memory: reported, and nothing has changed.
    gpu.occupy(0, common::DEVICE_BYTES - 6 * MIB);
    let failed = resume(None);
    assert_eq!(failed, Kind::DeviceMemory as c_int);
    assert!(unsafe { CStr::from_ptr(vramctl_last_error()) }.to_str().unwrap().contains("too little memory"));
    gpu.occupy(0, 0);
    assert_eq!((resume(Some("weights")), resume(None), resume(None), resume(Some("cuda_graph"))), (0, 0, 0, 0));
    assert!(read(weights, 4 * MIB).unwrap() == contents);
    assert!(read(cache, 4 * MIB).unwrap().iter().all(|byte| *byte == 0), "without a backup nothing is kept");
}

#[test]
fn retention_margin_and_directory_are_per_process() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        assert!(!tms_get_retain_cpu_backup());
        tms_set_retain_cpu_backup(true);
        in_a_new_thread(|| assert!(tms_get_retain_cpu_backup()));
        tms_set_interesting_region(true);
        tms_set_enable_cpu_backup(true);
        common::set_device(0);
        let address = malloc(4 * MIB).unwrap();
        let held = || {
            vramctl_backup::settle();
            Memory::get().status().host.used_bytes
        };
        assert_eq!((pause(None), resume(None), held()), (0, 0, 4 << 20));
        tms_set_retain_cpu_backup(false);
        assert_eq!((pause(None), resume(None), held()), (0, 0, 0));

        let folder = tempfile::tempdir().unwrap();
        let made = CString::new(folder.path().join("made/for/it").to_str().unwrap()).unwrap();
        unsafe { tms_set_disk_backup_dir(made.as_ptr()) };
        assert!(folder.path().join("made/for/it").is_dir());
        assert_eq!(vramctl_backup::disk_directory().path, folder.path().join("made/for/it"));
        vramctl_backup::set_disk_directory(None);

        set_memory_margin_bytes(common::DEVICE_BYTES as u64);
        assert_eq!(malloc(2 * MIB), Err(2));
        common::last_error();
        set_memory_margin_bytes(0);
        assert_eq!(free(address), 0);
    });
}

/// A change of the retain setting takes effect at the next resume: contents kept then stay readable in place until the one after.
#[test]
fn a_retained_backup_stays_where_it_is_and_can_be_read() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        const BYTES: usize = 4 * MIB;
        tms_set_interesting_region(true);
        tms_set_enable_cpu_backup(true);
        common::set_device(0);
        let address = malloc(BYTES).unwrap();
        let kept = || tms_get_cpu_backup_pointer(address as *const u8, BYTES as u64);
        let holds = |seed: u64| unsafe { std::slice::from_raw_parts(kept(), BYTES) } == pattern(seed, BYTES);
        assert_eq!((write(address, &pattern(1, BYTES)), pause(None)), (0, 0));
        let first = kept();
        tms_set_retain_cpu_backup(true);
        assert_eq!((resume(None), kept()), (0, first));
        assert!(holds(1));
        tms_set_retain_cpu_backup(false);
        assert_eq!((write(address, &pattern(2, BYTES)), kept()), (0, first));
        assert!(holds(1), "the copy of the last pause");
        assert_eq!((pause(None), kept()), (0, first));
        assert!(holds(2));
        assert_eq!(resume(None), 0);
        assert!(kept().is_null(), "it is not retained any more");
        assert!(read(address, BYTES).unwrap() == pattern(2, BYTES));
        assert_eq!(free(address), 0);
    });
}

/// The host memory of allocations made under `mmap` is freed before the resume returns, even if the rest is kept.
#[test]
fn backups_of_mmap_are_gone_when_the_resume_returns() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        const BYTES: usize = 64 * MIB;
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim();
            line.trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        let ready = || Memory::get().status().host.ready_bytes;
        vramctl_backup::set_host_keep(Some(std::time::Duration::from_secs(600)), Some(u64::MAX));
        tms_set_interesting_region(true);
        tms_set_enable_cpu_backup(true);
        unsafe { tms_set_cpu_backup_backend(c"mmap".as_ptr()) };
        common::set_device(0);
        let address = malloc(BYTES).unwrap();
        assert_eq!(write(address, &pattern(1, BYTES)), 0);
        let before = resident();
        for _ in 0..3 {
            assert_eq!((pause(None), ready()), (0, BYTES as u64));
            assert_eq!((resume(None), ready()), (0, 0));
            assert!(resident() < before + BYTES / 2, "{before} bytes before, {} after", resident());
        }
        assert!(read(address, BYTES).unwrap() == pattern(1, BYTES));
        unsafe { tms_set_cpu_backup_backend(c"pinned".as_ptr()) };
        let other = malloc(2 * MIB).unwrap();
        assert_eq!((free(address), pause(None), resume(None)), (0, 0, 0));
        assert_eq!(ready(), vramctl_backup::HOST_PIECE as u64, "of the others it stays");
        assert_eq!(free(other), 0);
        vramctl_backup::set_host_keep(None, Some(0));
        while ready() > 0 {
            thread::sleep(std::time::Duration::from_millis(5));
        }
        vramctl_backup::set_host_keep(None, None);
    });
}

/// Users of `torch_memory_saver`'s disk directory look for its files.
#[test]
fn its_directory_holds_a_file_for_each_paused_allocation() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| std::fs::File::create_new(folder.path().join(name)).unwrap();
        // Left behind by a killed process; still in use by another process; and a foreign file.
        let (_stale, used, _others) = (file("vramctl-4711-99-7f0000000000"), file("vramctl-4711-99-7f0000200000"), file("vramctl-notes"));
        assert_eq!(unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(&used), libc::LOCK_EX) }, 0);
        let found = || {
            let entries = std::fs::read_dir(folder.path()).unwrap().flatten();
            let mut found: Vec<_> =
                entries.map(|entry| (entry.metadata().unwrap().len(), entry.file_name().into_string().unwrap())).collect();
            found.sort();
            found
        };
        let path = CString::new(folder.path().to_str().unwrap()).unwrap();
        unsafe { tms_set_disk_backup_dir(path.as_ptr()) };
        let others = found();
        assert_eq!(others.iter().map(|(_, name)| &**name).collect::<Vec<_>>(), ["vramctl-4711-99-7f0000200000", "vramctl-notes"]);

        tms_set_interesting_region(true);
        tms_set_enable_disk_backup(true);
        common::set_device(0);
        let sizes = [2 * MIB, 4 * MIB, 6 * MIB];
        let addresses = sizes.map(|bytes| malloc(bytes).unwrap());
        let contents = |at: usize| pattern(at as u64, sizes[at]);
        for _ in 0..2 {
            (0..3).for_each(|at| assert_eq!(write(addresses[at], &contents(at)), 0));
            assert_eq!(pause(None), 0);
            let ours = &found()[2..];
            assert_eq!(ours.iter().map(|(bytes, _)| *bytes as usize).collect::<Vec<_>>(), sizes);
            for ((_, name), address) in ours.iter().zip(addresses) {
                assert!(
                    name.starts_with(&format!("vramctl-{}-", std::process::id())) && name.ends_with(&format!("-{address:x}")),
                    "{name}"
                );
            }
            assert_eq!((resume(None), found()), (0, others.clone()));
            (0..3).for_each(|at| assert!(read(addresses[at], sizes[at]).unwrap() == contents(at)));
        }
        // Freed while paused.
        assert_eq!((pause(None), free(addresses[1]), found().len()), (0, 0, 4));
        assert_eq!((resume(None), free(addresses[0]), free(addresses[2])), (0, 0, 0));
        assert_eq!(found(), others);
        vramctl_backup::set_disk_directory(None);
    });
}

#[test]
fn invalid_calls_change_nothing() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        let before = settings();
        unsafe {
            tms_set_current_tag(ptr::null());
            tms_set_current_tag(c"a,b".as_ptr());
            tms_set_current_tag(c"\xff".as_ptr());
            tms_set_cpu_backup_backend(ptr::null());
            tms_set_cpu_backup_backend(c"tape".as_ptr());
            tms_set_disk_backup_dir(ptr::null());
            tms_set_disk_backup_dir(c"/dev/null/x".as_ptr());
        }
        assert_eq!(settings(), before);
        assert_eq!(backend(), c"pinned");
        assert!(tms_get_cpu_backup_pointer(ptr::null(), 0).is_null());
        assert!(tms_torch_malloc(-1, 0, ptr::null_mut()).is_null());
        assert!(tms_torch_malloc(2 << 20, 99, ptr::null_mut()).is_null());
    });
}

/// torch allows its own allocator to call `cudaMalloc` in a capture, and trusts another one to do so.
#[test]
fn torchs_allocator_works_in_a_capture() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        common::set_device(0);
        tms_set_interesting_region(true);
        for mode in 0..3 {
            let stream = common::Stream::create();
            let before = tms_torch_malloc(2 << 20, 0, ptr::null_mut());
            stream.begin_capture(mode);
            let memory = tms_torch_malloc(2 << 20, 0, ptr::null_mut());
            assert!(Memory::get().registry.find(memory as u64).is_some(), "mode {mode}");
            assert_eq!(stream.fill(memory as u64, 7, 2 * MIB), 0);
            unsafe { tms_torch_free(before, 2 << 20, 0, ptr::null_mut()) };
            assert!(Memory::get().registry.find(before as u64).is_none(), "mode {mode}");
            let graph = stream.end_capture().expect("the capture is intact");
            assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
            assert_eq!(read(memory as u64, 1).unwrap(), [7]);
            unsafe { tms_torch_free(memory, 2 << 20, 0, ptr::null_mut()) };
        }
    });
}

#[test]
fn torchs_allocator_gets_managed_memory_on_the_device_that_it_names() {
    let _gpu = Gpu::take();
    in_a_new_thread(|| {
        common::set_device(0);
        let stream = ptr::null_mut::<c_void>();
        let plain = tms_torch_malloc(2 << 20, 1, stream);
        assert!(!plain.is_null() && Memory::get().registry.find(plain as u64).is_none(), "outside a region it is CUDA's own");
        tms_set_interesting_region(true);
        set_tag("pool");
        let managed = tms_torch_malloc(2 << 20, 1, stream);
        let allocation = Memory::get().registry.find(managed as u64).unwrap();
        assert_eq!((&*allocation.tag, allocation.device), ("pool", 1));
        let here = malloc(2 * MIB).unwrap();
        assert_eq!(Memory::get().registry.find(here).unwrap().device, 0, "the thread's device is as it was");
        assert!(tms_torch_malloc(common::DEVICE_BYTES as isize, 0, stream).is_null());
        common::last_error();
        // torch frees at any time: outside the region, and while paused.
        tms_set_interesting_region(false);
        assert_eq!(pause(Some("pool")), 0);
        unsafe {
            tms_torch_free(managed, 2 << 20, 1, stream);
            tms_torch_free(plain, 2 << 20, 1, stream);
            tms_torch_free(ptr::null_mut(), 0, 0, stream);
        }
        assert_eq!(free(here), 0);
    });
}

/// Runs Python with the simulated GPU and with these libraries preloaded. The script's argument is the library.
fn python(script: &str, preloaded: &[&Path]) {
    let machine = Machine::new();
    let mut python = machine.preloaded(preloaded, "python3", &["-c", script]);
    Ran::of(python.arg(library()).env("VRAMCTL_TAG", "default")).expect(0, "", "");
}

/// `vramctl run` preloads the library, and a framework preloads it again under another name. The second copy must not manage
/// what the first leaves to CUDA, and there must be one control socket.
#[test]
fn of_two_copies_only_the_first_is_active() {
    let folder = tempfile::tempdir().unwrap();
    let (library, copy) = (library(), folder.path().join("torch_memory_saver_hook_mode_preload.abi3.so"));
    std::fs::copy(&library, &copy).unwrap();
    for order in [[&*copy, &*library], [&*library, &*copy]] {
        python(
            "
import ctypes, json, os, time
ctypes.CDLL('libcudart.so.13', mode=ctypes.RTLD_GLOBAL)
first, *others = [ctypes.CDLL(path) for path in os.environ['LD_PRELOAD'].split(':')]
program = ctypes.CDLL(None)

def tags(library):
    text = ctypes.create_string_buffer(1 << 16)
    assert library.vramctl_status_json(text, len(text), None) == 0
    return {tag['tag']: tag['bytes'] for tag in json.loads(text.value)['tags']}

def malloc(library=program):
    pointer = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(8 << 20)) == 0
    return pointer

managed = malloc()
assert tags(first) == {'default': 8 << 20}, tags(first)
program.tms_set_interesting_region(False)
plain, asked_of_the_second = malloc(), malloc(others[0])
assert tags(first) == {'default': 8 << 20}, 'what is left to CUDA is managed'
assert all(not tags(other) for other in others), 'the second copy manages memory, too'
sockets = lambda: os.listdir(os.environ['VRAMCTL_DIR']) if os.path.exists(os.environ['VRAMCTL_DIR']) else []
deadline = time.monotonic() + 100
while not sockets() and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.2)
assert len(sockets()) == 1, sockets()
for pointer in (managed, plain, asked_of_the_second):
    assert program.cudaFree(pointer) == 0
assert not tags(first)
",
            &order,
        );
    }
}

/// torch's pluggable allocator opens the library without preloading it. Nothing is hooked then, but what torch allocates can
/// be paused.
#[test]
fn a_library_that_was_only_opened_manages_what_it_is_asked_for() {
    python(
        "
import ctypes, sys
runtime = ctypes.CDLL('libcudart.so.13')
library = ctypes.CDLL(sys.argv[1])
library.tms_torch_malloc.restype = ctypes.c_void_p
library.tms_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.tms_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
runtime.cudaMemGetInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

def free_bytes():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value

library.tms_set_current_tag(b'weights')
library.tms_set_interesting_region(True)
library.tms_set_enable_cpu_backup(True)
pointer = library.tms_torch_malloc(64 << 20, 0, None)
assert pointer
contents = bytes(range(256)) * 16
assert runtime.cudaMemcpy(ctypes.c_void_p(pointer), contents, len(contents), 1) == 0
before = free_bytes()
assert library.tms_pause(None) == 0
assert free_bytes() >= before + (64 << 20)
assert library.tms_resume(None) == 0
found = ctypes.create_string_buffer(len(contents))
assert runtime.cudaMemcpy(found, ctypes.c_void_p(pointer), len(contents), 2) == 0
assert found.raw == contents
library.tms_torch_free(pointer, 64 << 20, 0, None)

plain = ctypes.c_void_p()
before = free_bytes()
assert runtime.cudaMalloc(ctypes.byref(plain), ctypes.c_size_t(8 << 20)) == 0
library.tms_pause(None)
assert free_bytes() == before - (8 << 20), 'the runtime itself is not hooked'
assert runtime.cudaFree(plain) == 0
",
        &[],
    );
}

/// The reported policy must be the effective one, in a process with a tag of its own too.
#[test]
fn a_thread_of_a_tagged_process_keeps_its_backup_setting() {
    let _gpu = Gpu::take();
    Memory::get().set_process_tag(Some("default")).unwrap();
    std::thread::spawn(|| {
        common::set_device(0);
        unsafe { tms_set_current_tag(c"weights".as_ptr()) };
        tms_set_interesting_region(true);
        assert!(tms_get_enable_cpu_backup());
        let address = malloc(2 * MIB).unwrap();
        assert_eq!(Memory::get().registry.find(address).unwrap().backup, Policy::Host);
        assert_eq!(free(address), 0);
    })
    .join()
    .unwrap();
    Memory::get().set_process_tag(None).unwrap();
}
