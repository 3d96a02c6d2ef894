//! Libraries that look symbols up past the preloaded library: those that the program opens with `RTLD_DEEPBIND`, whose own dependencies come
//! first for them, and those in a namespace of their own (`dlmopen`).
//!
//! What the program opens that way is noted at its `dlopen`. Only if there is something, the loaded objects are examined: that takes a lock
//! of the loader.
//!
//! A program with such a library is not held: the library's launches would pass by the gate and meet paused memory. Clearing the flag in
//! our `dlopen`, as heaptrack does, would break what the flag is for: a plug-in that brings its own version of a function would get the
//! program's, without a word (`tests/processes/deepbind.rs`). Patching the library's calls afterwards would miss what its constructors have looked
//! up.
//!
//! An object is in the way if it has bound a function of the table, or `dlsym`, past this library, or may still do so because it binds
//! lazily; for `dlsym`, only if it has names of the driver's functions in it, too. In a namespace of `dlmopen` objects are not visible:
//! there, a second mapping of libcuda's file counts. Not noticed: a library that gets the functions' names from elsewhere, and one that is
//! opened while the program is held.

use crate::symbols::{self, Loaded};
use crate::system::own_folder;
use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::{fs, slice};

/// How many libraries are noted by name, and how long a name may be.
const NAMES: usize = 64;
const LENGTH: usize = 128;

const EMPTY: u8 = 0;
const WRITING: u8 = 1;
const WRITTEN: u8 = 2;

/// The file name of a library.
struct FileName {
    state: AtomicU8,
    bytes: UnsafeCell<[u8; LENGTH]>,
}

// SAFETY: whoever changes the state from `EMPTY` to `WRITING` writes, once; everybody reads only what is `WRITTEN`.
unsafe impl Sync for FileName {}

impl FileName {
    fn get(&self) -> Option<&[u8]> {
        // SAFETY: written, and never again.
        let bytes = (self.state.load(Ordering::Acquire) == WRITTEN).then(|| unsafe { &*self.bytes.get() })?;
        bytes.split(|byte| *byte == 0).next()
    }
}

// A forked child has its parent's libraries. Nothing here may allocate or wait, as in a look-up.
static OPENED: [FileName; NAMES] = [const { FileName { state: AtomicU8::new(EMPTY), bytes: UnsafeCell::new([0; LENGTH]) } }; NAMES];
static BEGUN: AtomicU64 = AtomicU64::new(0);
static DEEP: AtomicU64 = AtomicU64::new(0);
static ELSEWHERE: AtomicU64 = AtomicU64::new(0);

/// Notes a `dlopen` of the program's.
///
/// # Safety
/// `name` must be null or NUL-terminated.
pub unsafe fn note(name: *const c_char, flags: c_int) {
    BEGUN.fetch_add(1, Ordering::Relaxed);
    if name.is_null() || flags & libc::RTLD_DEEPBIND == 0 || flags & libc::RTLD_NOLOAD != 0 {
        return;
    }
    // SAFETY: the caller's promise.
    let name = file_name(unsafe { CStr::from_ptr(name) }.to_bytes());
    let name = &name[..name.len().min(LENGTH - 1)];
    for place in &OPENED {
        if place.get() == Some(name) {
            break;
        }
        if place.state.compare_exchange(EMPTY, WRITING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // SAFETY: nobody else writes here, and nobody reads yet.
            unsafe { (&mut *place.bytes.get())[..name.len()].copy_from_slice(name) };
            place.state.store(WRITTEN, Ordering::Release);
            break;
        }
    }
    DEEP.fetch_add(1, Ordering::SeqCst);
}

/// Notes a `dlmopen` of the program's.
pub fn note_elsewhere(namespace: libc::c_long, name: *const c_char, flags: c_int) {
    const BASE: libc::c_long = 0;
    BEGUN.fetch_add(1, Ordering::Relaxed);
    if namespace != BASE && !name.is_null() && flags & libc::RTLD_NOLOAD == 0 {
        ELSEWHERE.fetch_add(1, Ordering::SeqCst);
    }
}

/// How often the program has begun to open a library in any way: as long as this stays the same, no address has become that of another library.
pub fn begun() -> u64 {
    BEGUN.load(Ordering::Relaxed)
}

/// How often the program has begun to open a library that way.
pub fn count() -> u64 {
    DEEP.load(Ordering::SeqCst) + ELSEWHERE.load(Ordering::SeqCst)
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// What calls functions of a library past this one, or may: why, in words. `soname`: the library; `is_function`: whether it may have a function
/// of this name; `traces`: texts of which those that look its functions up have one.
pub fn passing_by(soname: &CStr, is_function: fn(&[u8]) -> bool, traces: &[&[u8]]) -> Vec<String> {
    let own = Loaded::around((&raw const DEEP).cast());
    let is_function = |name: &CStr| is_function(name.to_bytes()) && own.is_some_and(|own| own.symbol(name).is_some());
    let mut found = Vec::new();
    if DEEP.load(Ordering::SeqCst) > 0 {
        let objects = objects();
        let opened: BTreeSet<_> = OPENED.iter().filter_map(FileName::get).collect();
        let is_opened = |object: &Object| opened.contains(file_name(&object.path));
        // Its direct dependencies may have come with it.
        let brought: BTreeSet<_> = objects.iter().filter(|object| is_opened(object)).flat_map(|object| object.library.needed()).collect();
        for object in objects.iter().filter(|object| !object.library.is_named(soname)) {
            let may_be_deep = is_opened(object) || brought.iter().any(|name| object.library.is_named(name));
            if object.passes_by(&is_function, traces, may_be_deep) {
                found.push(format!("{} was opened with RTLD_DEEPBIND, or by a library that was", String::from_utf8_lossy(&object.path)));
            }
        }
    }
    if ELSEWHERE.load(Ordering::SeqCst) > 0 && copies_of(soname) > 1 {
        found.push(format!("{} is there a second time, in a namespace of dlmopen", soname.to_string_lossy()));
    }
    found
}

/// A loaded object.
struct Object {
    path: Vec<u8>,
    library: Loaded,
    /// Its segments: address, length, and whether it is only read.
    segments: Vec<(usize, usize, bool)>,
}

/// How an object has bound a function that it uses.
enum BoundTo {
    NotYet,
    Address(*const c_void),
}

impl Object {
    fn contains(&self, address: *const c_void) -> bool {
        self.segments.iter().any(|(start, length, _)| (*start..start + length).contains(&(address as usize)))
    }

    /// `may_be_deep`: whether what it has not bound yet may be bound past this library.
    fn passes_by(&self, is_function: &dyn Fn(&CStr) -> bool, traces: &[&[u8]], may_be_deep: bool) -> bool {
        let is_past = |bound: &BoundTo| match bound {
            BoundTo::NotYet => may_be_deep,
            // Another interposer comes first, for everybody.
            BoundTo::Address(address) => !symbols::is_ours(*address) && !symbols::is_before_us(*address),
        };
        let mut looks_up = false;
        for (name, bound) in self.uses() {
            if is_function(name) && is_past(&bound) {
                return true;
            }
            looks_up |= matches!(name.to_bytes(), b"dlsym" | b"dlvsym") && is_past(&bound);
        }
        looks_up && traces.iter().any(|trace| self.has(trace))
    }

    /// The functions of others that it uses.
    fn uses(&self) -> impl Iterator<Item = (&CStr, BoundTo)> {
        self.library.relocations().filter_map(|(name, place)| {
            // SAFETY: the object's own table says that there is an address; it is only read.
            let value = self.contains(place.cast()).then(|| unsafe { place.read_volatile() })?;
            // A stub of its own, which asks the loader at the first call.
            Some((name, if self.contains(value) { BoundTo::NotYet } else { BoundTo::Address(value) }))
        })
    }

    fn has(&self, text: &[u8]) -> bool {
        self.segments.iter().any(|(start, length, is_read_only)| {
            // SAFETY: a mapped segment of a loaded object.
            *is_read_only && unsafe { !libc::memmem(*start as *const c_void, *length, text.as_ptr().cast(), text.len()).is_null() }
        })
    }
}

/// The loaded objects of this namespace, without this library.
fn objects() -> Vec<Object> {
    unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _size: libc::size_t, list: *mut c_void) -> c_int {
        // SAFETY: the loader passes a complete entry, and `list` comes from below.
        unsafe {
            let (info, list) = (&*info, &mut *list.cast::<Vec<Object>>());
            let headers = slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            let base = info.dlpi_addr as usize;
            let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC);
            let library = dynamic.and_then(|header| Loaded::at(base, base + header.p_vaddr as usize));
            let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
            let segment = |header: &libc::Elf64_Phdr| {
                let is_read_only = header.p_flags & libc::PF_R != 0 && header.p_flags & libc::PF_W == 0;
                (base + header.p_vaddr as usize, header.p_memsz as usize, is_read_only)
            };
            let path = if info.dlpi_name.is_null() { Vec::new() } else { CStr::from_ptr(info.dlpi_name).to_bytes().to_vec() };
            list.extend(library.map(|library| Object { path, library, segments: loaded.map(segment).collect() }));
        }
        0
    }
    let mut list: Vec<Object> = Vec::new();
    // SAFETY: the callback gets the list, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut list).cast()) };
    let own = (&raw const DEEP).cast();
    list.retain(|object| !object.contains(own));
    list
}

/// How often a library's file is mapped from its beginning: once in each namespace.
fn copies_of(soname: &CStr) -> usize {
    let objects = objects();
    let Some(object) = objects.iter().find(|object| object.library.is_named(soname)) else { return 0 };
    let Ok(file) = Path::new(OsStr::from_bytes(&object.path)).canonicalize() else { return 0 };
    let maps = fs::read_to_string(own_folder().join("maps")).unwrap_or_default();
    maps.lines()
        .filter(|line| {
            let mut words = line.split_ascii_whitespace();
            words.nth(2) == Some("00000000") && words.nth(2).is_some_and(|path| Path::new(path) == file)
        })
        .count()
}
