//! Identifies the library that makes a call, to attribute memory that is left to CUDA, and to decide whether to leave it. The memory of
//! some libraries is accessed directly by other processes, network cards or disks, so it must be left to CUDA; `VRAMCTL_EXCLUDE` names more
//! such libraries.
//!
//! The library is found by the return address, without a lock.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use vramctl_config::Config;
use vramctl_core::memory::NCCL;
use vramctl_host::{PerProcess, Unpoison, symbols};

/// Libraries, by the beginning of their file names.
const ALWAYS: &[&str] = &["libnccl", "libnvshmem", "nvshmem_", "libcufile"];

/// A calling library, or the program itself.
#[derive(Debug)]
pub struct Library {
    name: String,
    is_excluded: bool,
    /// The tag of its memory, whatever the region.
    tag: Option<&'static str>,
}

impl Library {
    /// Its file name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tag of its memory, if it has one of its own.
    pub fn tag(&self) -> Option<&'static str> {
        self.tag
    }

    /// Whether its memory is left to CUDA.
    pub fn is_excluded(&self) -> bool {
        self.is_excluded
    }
}

/// The known libraries, by the address of the path that the loader has of them. A library that is loaded later may get the place of one that has been
/// unloaded, so the name is compared each time. If there is no place left, the look-up takes a lock.
static KNOWN: [AtomicPtr<Library>; 512] = [const { AtomicPtr::new(ptr::null_mut()) }; 512];

/// The library that contains a return address.
#[inline]
pub fn library_at(caller: *const c_void) -> &'static Library {
    let path = symbols::path_around(caller);
    // SAFETY: the path of a loaded library: it contains the caller.
    let file = if path.is_null() { &b"unknown"[..] } else { file_name(unsafe { CStr::from_ptr(path) }) };
    // SAFETY: null, or a library of `known_as`, none of which is ever freed.
    let known = places_of(path).filter_map(|place| unsafe { place.load(Ordering::Acquire).as_ref() });
    known.into_iter().find(|library| library.name.as_bytes() == file).unwrap_or_else(|| look_up(path, file))
}

/// Where the library with this path may be in the table.
fn places_of(path: *const c_char) -> impl Iterator<Item = &'static AtomicPtr<Library>> {
    let first = path.addr().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - 9);
    (first..first + 4).map(|place| &KNOWN[place % KNOWN.len()])
}

fn file_name(path: &CStr) -> &[u8] {
    path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

#[cold]
fn look_up(path: *const c_char, file: &[u8]) -> &'static Library {
    let library = known_as(String::from_utf8_lossy(file).into_owned());
    let entry = ptr::from_ref(library).cast_mut();
    if places_of(path).find(|place| place.compare_exchange(ptr::null_mut(), entry, Ordering::AcqRel, Ordering::Relaxed).is_ok()).is_none()
        && let Some(place) = places_of(path).next()
    {
        place.store(entry, Ordering::Release);
    }
    library
}

/// The entry of the library with this name. There are few, and they are never freed.
fn known_as(name: String) -> &'static Library {
    static BY_NAME: PerProcess<Mutex<Vec<&'static Library>>> = PerProcess::new(Mutex::default);
    let mut known = BY_NAME.get().lock().unpoisoned();
    if let Some(library) = known.iter().find(|library| library.name == name) {
        return library;
    }
    let tag = (name.starts_with("libnccl") && is_of_job()).then_some(NCCL);
    let is_excluded = is_named(&name) && (tag.is_none() || is_named_by_user(&name));
    let library: &'static Library = Box::leak(Box::new(Library { name, is_excluded, tag: tag.filter(|_| !is_excluded) }));
    known.push(library);
    library
}

fn is_named(file: &str) -> bool {
    ALWAYS.iter().any(|name| file.starts_with(name)) || is_named_by_user(file)
}

fn is_named_by_user(file: &str) -> bool {
    Config::get().exclude.iter().any(|name| file.starts_with(name))
}

/// Whether this process is one of a job: then all ranks can give up NCCL's memory together.
fn is_of_job() -> bool {
    Config::get().job.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_recognised_by_name_prefix() {
        assert!(is_named("libnccl.so.2") && is_named("libcufile.so.0"));
        assert!(!is_named("libtorch_cuda.so") && !is_named("mylibnccl.so"));
    }

    /// The second time, the answer comes from the table, which must not confuse libraries.
    #[test]
    fn a_call_site_keeps_its_library() {
        let own = library_at(is_named as *const c_void);
        for _ in 0..2 {
            assert!(ptr::eq(library_at(is_named as *const c_void), own));
            assert!(ptr::eq(library_at(known_as as *const c_void), own));
            let other = library_at(libc::malloc as *const c_void);
            assert!(other.name() != own.name() && !other.is_excluded(), "{}", other.name());
            assert_eq!(library_at(ptr::null()).name(), "unknown");
            assert_eq!(library_at(ptr::without_provenance(0x1234_5678)).name(), "unknown", "an address in no library is nobody's");
        }
    }
}
