//! Memory registered with NCCL never gets new pages silently until it is deregistered, and each call reaches the NCCL that it was meant
//! for. `tests/apps/nccl/nccl.c` stands in for NCCL.

use crate::common::machine::{Machine, Ran};
use crate::common::{
    self, Gpu, MIB, SHARED, compile, free, library, malloc_tagged, own_folder, pattern, pause, read, resume, simulated_libraries, write,
};
use std::ffi::{CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{fs, mem, ptr};
use vramctl_core::memory::{Memory, region};
use vramctl_intercept::{entries, nccl};
use vramctl_model::{Error, Registered};

const PAGE: usize = 2 * MIB;

/// The folder with the stand-ins and their users, built once.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("nccl");
        fs::create_dir_all(folder.join("other")).unwrap();
        let compile = |name: &str, sources: &[&str], options: &[&str]| {
            compile(&folder.join(name), sources, &[&["-Wl,--no-as-needed"], options].concat());
        };
        let with = |options: &[&'static str]| [&SHARED[..], options].concat();
        compile("libnccl.so.2", &["nccl/nccl.c"], &with(&["-Wl,-soname,libnccl.so.2"]));
        compile("other/libnccl.so.2", &["nccl/nccl.c"], &with(&["-Wl,-soname,libnccl.so.2", "-DNAME=\"the other\""]));
        compile("libneeds.so", &["nccl/linked.c"], &with(&["-l:libcudart.so.13", "-l:libnccl.so.2"]));
        compile("libhas.so", &["nccl/linked.c", "nccl/nccl.c"], &with(&["-l:libcudart.so.13", "-DNAME=\"its own\""]));
        compile("linked", &["nccl/linked.c"], &["-DPROGRAM", "-l:libcudart.so.13", "-l:libnccl.so.2"]);
        compile("opens", &["nccl/opens.c"], &["-l:libcudart.so.13"]);
        folder
    })
}

fn path(name: &str) -> String {
    built().join(name).to_str().unwrap().to_owned()
}

/// The output of a program under these preloaded libraries.
fn said(preloaded: &[&Path], program: &str, arguments: &[&str]) -> String {
    let machine = Machine::with(1, "256M");
    let mut command = machine.preloaded(preloaded, path(program), arguments);
    command.env("LD_LIBRARY_PATH", format!("{}:{}", simulated_libraries().display(), built().display()));
    Ran::of(command.env("VRAMCTL_TAG", "default")).expect(0, "", "").out
}

/// What `uses.h` prints if the registrations of `name` are noticed, and its errors are explained by this NCCL, both to it and within NCCL.
fn noticed_by(name: &str, nccl: &str) -> String {
    let calls = "malloc 0, add 0 16, take 0 0, window 0 16, take 0 0, destroy 0 16, abort 0 0";
    format!("{name}: {calls}, no error, {nccl}, {nccl}\n")
}

fn noticed(name: &str) -> String {
    noticed_by(name, if name == "libhas.so" { "its own" } else { "NCCL" })
}

#[test]
fn registrations_of_a_program_linked_with_nccl() {
    let text = said(&[&library()], "linked", &[]);
    assert_eq!(text, noticed("linked") + "looked up: 0 16\nchild: 0, parent: 16\ntaken: 0 0\n");
}

/// Like torch's bundled NCCL: neither it nor its users are in the global scope.
#[test]
fn registrations_of_a_library_linked_with_nccl() {
    assert_eq!(said(&[&library()], "opens", &[&path("libneeds.so")]), noticed("libneeds.so"));
}

/// As torch may be built. Another library's NCCL knows nothing of its communicators.
#[test]
fn registrations_of_a_library_with_nccl_linked_into_it() {
    assert_eq!(said(&[&library()], "opens", &[&path("libhas.so")]), noticed("libhas.so"));
    let both = said(&[&library()], "opens", &[&path("libneeds.so"), &path("libhas.so")]);
    assert_eq!(both, noticed("libneeds.so") + &noticed("libhas.so"));
}

/// A call that is the last thing in a function is a jump: it returns to the library that has called that function. Which NCCL it means
/// shows in the communicator.
#[test]
fn registrations_by_jumps_with_several_nccls() {
    let (needs, has) = (format!("jump:{}", path("libneeds.so")), format!("jump:{}", path("libhas.so")));
    for both in [[&needs, &has], [&has, &needs]] {
        let names = both.map(|library| noticed(library.rsplit('/').next().unwrap()));
        assert_eq!(said(&[&library()], "opens", &both.map(String::as_str)), names.concat());
    }
}

/// As vLLM does.
#[test]
fn registrations_of_a_program_that_looks_nccl_up() {
    let [first, other] = ["libnccl.so.2", "other/libnccl.so.2"].map(|name| format!("lookup:{}", path(name)));
    assert_eq!(said(&[&library()], "opens", &[&first]), noticed("libnccl.so.2"));
    // The second one's calls must not reach the first.
    let others = noticed_by("libnccl.so.2", "the other");
    assert_eq!(said(&[&library()], "opens", &[&first, &other]), noticed("libnccl.so.2") + &others);
    let all = said(&[&library()], "opens", &[&other, &path("libneeds.so"), &path("libhas.so"), &other]);
    // The loader takes a library of the same name for the one that is needed.
    assert_eq!(all, [&*others, &*noticed_by("libneeds.so", "the other"), &*noticed("libhas.so"), &*others].concat());
}

#[test]
fn nccl_is_not_found_if_none_is_loaded() {
    assert_eq!(said(&[&library()], "opens", &[]), "not found, with an error\nnot found\n");
}

/// A second copy of the library, under another name, changes nothing.
#[test]
fn with_a_second_copy() {
    let copy = own_folder().join("libsecondcopy.so");
    fs::copy(library(), &copy).unwrap();
    let lookup = format!("lookup:{}", path("libnccl.so.2"));
    for preloaded in [[&*library(), &*copy], [&*copy, &*library()]] {
        for (argument, name) in [(path("libneeds.so"), "libneeds.so"), (path("libhas.so"), "libhas.so"), (lookup.clone(), "libnccl.so.2")] {
            assert_eq!(said(&preloaded, "opens", &[&argument]), noticed(name));
        }
    }
}

// In this process.

/// The stand-in's own functions.
struct Nccl {
    make: unsafe extern "C" fn() -> usize,
    fail: unsafe extern "C" fn(c_int),
    give_none: unsafe extern "C" fn(c_int),
    called: unsafe extern "C" fn() -> c_int,
}

impl Nccl {
    fn get() -> &'static Self {
        static LOADED: OnceLock<Nccl> = OnceLock::new();
        LOADED.get_or_init(|| unsafe {
            let library = CString::new(path("libnccl.so.2")).unwrap();
            let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null());
            Nccl {
                make: mem::transmute::<*mut c_void, _>(libc::dlsym(library, c"nccl_make".as_ptr())),
                fail: mem::transmute::<*mut c_void, _>(libc::dlsym(library, c"nccl_fail".as_ptr())),
                give_none: mem::transmute::<*mut c_void, _>(libc::dlsym(library, c"nccl_give_none".as_ptr())),
                called: mem::transmute::<*mut c_void, _>(libc::dlsym(library, c"nccl_called".as_ptr())),
            }
        })
    }

    fn communicator() -> usize {
        unsafe { (Self::get().make)() }
    }

    fn fail_next(answer: c_int) {
        unsafe { (Self::get().fail)(answer) };
    }
}

fn register(communicator: usize, address: u64, bytes: usize) -> (c_int, usize) {
    let mut handle = 0;
    let address = ptr::without_provenance_mut(address as usize);
    (unsafe { nccl::ncclCommRegister(communicator, address, bytes, &raw mut handle) }, handle)
}

fn registered(communicator: usize, address: u64, bytes: usize) -> usize {
    let (answer, handle) = register(communicator, address, bytes);
    assert_eq!(answer, 0);
    handle
}

fn deregister(communicator: usize, handle: usize) -> c_int {
    unsafe { nccl::ncclCommDeregister(communicator, handle) }
}

fn destroy(communicator: usize) -> c_int {
    unsafe { nccl::ncclCommDestroy(communicator) }
}

/// What a pause of everything would refuse, with the registrants.
fn refused() -> Vec<(String, String, u64)> {
    match Memory::get().plan_pause(&common::pausing(&[])) {
        Err(Error::Registered(list)) => list.into_iter().map(|one| (one.tag, one.registrant, one.bytes)).collect(),
        other => other.map(|_| Vec::new()).unwrap(),
    }
}

fn by_nccl(tag: &str, bytes: usize) -> Vec<(String, String, u64)> {
    vec![(tag.to_owned(), "NCCL: ncclCommRegister".to_owned(), bytes as u64)]
}

#[test]
fn memory_registered_with_nccl_is_replaced_only_when_told_so() {
    let gpu = Gpu::take();
    let (buffer, other) = (malloc_tagged("buffers", None, 2 * PAGE).unwrap(), malloc_tagged("weights", None, PAGE).unwrap());
    let bytes = pattern(3, PAGE);
    assert_eq!((write(buffer, &bytes), write(other, &bytes)), (0, 0));
    let communicator = Nccl::communicator();
    // A part of it.
    let handle = registered(communicator, buffer + PAGE as u64, 4096);
    let used = gpu.used(0);
    assert_eq!(refused(), by_nccl("buffers", 2 * PAGE));
    assert!(pause(&[]).is_err());
    assert_eq!(gpu.used(0), used, "nothing has changed");
    assert!(pause(&["weights"]).and(resume(&["weights"])).is_ok());

    let with = |registered| common::pausing_with(&[], |request| request.options.registered = registered);
    Memory::get().pause(&with(Registered::Keep), &mut ()).unwrap();
    assert_eq!((gpu.used(0), read(buffer, PAGE)), (used - PAGE as u64, Ok(bytes.clone())), "still there");
    resume(&[]).unwrap();
    Memory::get().pause(&with(Registered::Take), &mut ()).unwrap();
    assert_eq!(gpu.used(0), used - 3 * PAGE as u64);
    resume(&[]).unwrap();
    assert_eq!((read(buffer, PAGE), read(other, PAGE)), (Ok(bytes.clone()), Ok(bytes)));
    assert_eq!(refused(), by_nccl("buffers", 2 * PAGE), "NCCL knows it still");

    assert_eq!(deregister(communicator, handle), 0);
    assert_eq!(refused(), []);
    assert_eq!((destroy(communicator), free(buffer), free(other)), (0, 0, 0));
}

/// NCCL gives the handle of a range for its parts, too, and keeps all of it until the last is gone.
#[test]
fn registrations_are_counted_as_nccl_counts_them() {
    let _gpu = Gpu::take();
    let (one, other) = (Nccl::communicator(), Nccl::communicator());
    let [first, second] = [(); 2].map(|()| malloc_tagged("buffers", None, PAGE).unwrap());
    let (low, high) = (first.min(second), first.max(second));
    let whole = (high - low) as usize + PAGE;
    let wide = registered(one, low, whole);
    assert_eq!(registered(one, high, 4096), wide);
    // A part that is not managed.
    let between = register(one, high + PAGE as u64 - 1, 1).1;
    assert_eq!(between, wide);
    let others = registered(other, high, PAGE);
    assert_eq!(refused(), by_nccl("buffers", 2 * PAGE));
    assert_eq!((deregister(one, wide), deregister(one, wide)), (0, 0));
    assert_eq!(refused(), by_nccl("buffers", 2 * PAGE), "one is left");
    assert_eq!(deregister(one, wide), 0);
    assert_eq!(refused(), by_nccl("buffers", PAGE), "the other communicator's");
    assert_ne!(deregister(one, wide), 0, "NCCL's own answer");
    assert_eq!(deregister(other, others), 0);
    assert_eq!(refused(), []);
    assert_eq!((destroy(one), destroy(other), free(first), free(second)), (0, 0, 0, 0));
}

#[test]
fn a_communicators_registrations_end_with_it() {
    let _gpu = Gpu::take();
    let (one, other) = (Nccl::communicator(), Nccl::communicator());
    let [first, second] = ["first", "second"].map(|tag| malloc_tagged(tag, None, PAGE).unwrap());
    registered(one, first, PAGE);
    registered(one, second, PAGE);
    registered(other, second, PAGE);
    assert_eq!(refused(), [by_nccl("first", PAGE), by_nccl("second", PAGE)].concat());
    Nccl::fail_next(1);
    assert_eq!(destroy(one), 1);
    assert_eq!(refused().len(), 2, "it is still there");
    assert_eq!(destroy(one), 0);
    assert_eq!(refused(), by_nccl("second", PAGE));
    // A non-blocking communicator continues in the background.
    Nccl::fail_next(7);
    assert_eq!(unsafe { nccl::ncclCommAbort(other) }, 7);
    assert_eq!(refused(), []);
}

#[test]
fn calls_that_fail_change_nothing() {
    let _gpu = Gpu::take();
    let communicator = Nccl::communicator();
    let buffer = malloc_tagged("buffers", None, PAGE).unwrap();
    Nccl::fail_next(3);
    assert_eq!(register(communicator, buffer, PAGE).0, 3);
    assert_eq!(refused(), []);
    let handle = registered(communicator, buffer, PAGE);
    assert_eq!(registered(communicator, buffer, PAGE), handle);
    for left in [2, 1] {
        Nccl::fail_next(2);
        assert_eq!(deregister(communicator, handle), 2);
        assert_eq!(refused(), by_nccl("buffers", PAGE), "{left} are left");
        assert_eq!(deregister(communicator, handle), 0);
    }
    assert_eq!(refused(), []);
    // Without a handle, nothing is registered.
    unsafe { (Nccl::get().give_none)(1) };
    assert_eq!(register(communicator, buffer, PAGE), (0, 0));
    unsafe { (Nccl::get().give_none)(0) };
    assert_eq!(refused(), []);
    assert_eq!((destroy(communicator), free(buffer)), (0, 0));
}

/// The next memory at the same addresses is not what was registered.
#[test]
fn freed_memory_is_not_registered_any_more() {
    let _gpu = Gpu::take();
    let communicator = Nccl::communicator();
    let plain = malloc_tagged("plain", None, PAGE).unwrap();
    registered(communicator, plain, PAGE);
    assert_eq!(free(plain), 0);
    let place = Mapped::reserve(PAGE);
    let first = place.map(0, "first");
    let handle = registered(communicator, place.base, PAGE);
    assert_eq!(refused(), by_nccl("first", PAGE));
    assert_eq!(unsafe { (entries::cuMemUnmap(place.base, PAGE), entries::cuMemRelease(first)) }, (0, 0));
    let second = place.map(0, "second");
    assert_eq!(refused(), []);
    assert_eq!((deregister(communicator, handle), destroy(communicator)), (0, 0));
    place.end(&[second]);
}

/// A window over what the program has mapped itself, by parts of which it is only some.
#[test]
fn a_window_covers_what_the_program_has_mapped() {
    let _gpu = Gpu::take();
    let communicator = Nccl::communicator();
    let place = Mapped::reserve(3 * PAGE);
    let handles = [(0, "one"), (1, "two"), (2, "three")].map(|(at, tag)| place.map(at, tag));
    let (pointer, mut window) = (ptr::without_provenance_mut(place.base as usize + PAGE / 2), 0);
    assert_eq!(unsafe { nccl::ncclCommWindowRegister(communicator, pointer, PAGE, &raw mut window, 1) }, 0);
    let seen: Vec<_> = refused().into_iter().map(|(tag, registrant, _)| (tag, registrant)).collect();
    assert_eq!(seen, ["one", "two"].map(|tag| (tag.to_owned(), "NCCL: ncclCommWindowRegister".to_owned())));
    assert_eq!(unsafe { nccl::ncclCommWindowDeregister(communicator, window) }, 0);
    assert_eq!((refused(), destroy(communicator)), (Vec::new(), 0));
    place.end(&handles);
}

/// Inside a group NCCL tells a window's handle only when the group ends, and registers it all the same.
#[test]
fn a_window_without_a_handle_is_registered_until_its_communicator_ends() {
    let _gpu = Gpu::take();
    let communicator = Nccl::communicator();
    let buffer = malloc_tagged("buffer", None, PAGE).unwrap();
    let (pointer, mut window) = (ptr::without_provenance_mut(buffer as usize), 0);
    unsafe { (Nccl::get().give_none)(1) };
    assert_eq!(unsafe { nccl::ncclCommWindowRegister(communicator, pointer, PAGE, &raw mut window, 1) }, 0);
    unsafe { (Nccl::get().give_none)(0) };
    assert_eq!((window, refused().len()), (0, 1));
    assert_eq!(destroy(communicator), 0);
    assert_eq!((refused(), free(buffer)), (Vec::new(), 0));
}

/// Addresses at which the program maps pages of its own.
struct Mapped {
    base: u64,
    bytes: usize,
}

impl Mapped {
    fn reserve(bytes: usize) -> Self {
        let mut base = 0;
        assert_eq!(unsafe { entries::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }, 0);
        Self { base, bytes }
    }

    /// A new page, mapped as the `at`-th.
    fn map(&self, at: usize, tag: &str) -> u64 {
        // `CUmemAllocationProp` of plain memory on the first device.
        let (wanted, mut handle) = ([1_u32, 0, 1, 0, 0, 0, 0, 0], 0);
        region::begin(Some(tag), None).unwrap();
        assert_eq!(unsafe { entries::cuMemCreate(&raw mut handle, PAGE, wanted.as_ptr().cast(), 0) }, 0);
        region::end().unwrap();
        assert_eq!(unsafe { entries::cuMemMap(self.base + (at * PAGE) as u64, PAGE, 0, handle, 0) }, 0);
        handle
    }

    fn end(self, handles: &[u64]) {
        unsafe {
            assert_eq!(entries::cuMemUnmap(self.base, self.bytes), 0);
            assert!(handles.iter().all(|handle| entries::cuMemRelease(*handle) == 0));
            assert_eq!(entries::cuMemAddressFree(self.base, self.bytes), 0);
        }
    }
}

/// Unmanaged memory and invalid arguments are left to NCCL.
#[test]
fn other_memory_is_left_alone() {
    let _gpu = Gpu::take();
    let communicator = Nccl::communicator();
    let before = unsafe { (Nccl::get().called)() };
    let handle = registered(communicator, 0x1000, usize::MAX);
    assert_eq!((deregister(communicator, handle), deregister(communicator, 0)), (0, 5));
    assert_eq!(destroy(communicator), 0);
    assert_eq!(unsafe { (Nccl::get().called)() }, before + 4);
    assert_eq!(refused(), []);
}
