//! Identifies the library that makes a call, to attribute memory that is left to CUDA, and to decide whether to leave it. The memory of
//! some libraries is accessed directly by other processes, network cards or disks, so it must be left to CUDA; `VRAMCTL_EXCLUDE` names more
//! such libraries.
//!
//! The library is found by the return address, once per call site.

use std::ffi::{CStr, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
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

/// A call site. A thread that finds its address set but not its library yet does the lookup itself.
struct Site {
    address: AtomicUsize,
    library: AtomicPtr<Library>,
}

/// The known call sites. If the table is full, other call sites need a lookup each time.
static SITES: [Site; 512] = [const { Site { address: AtomicUsize::new(0), library: AtomicPtr::new(ptr::null_mut()) } }; 512];

/// The library that contains a return address. It stays known after it is unloaded.
#[inline]
pub fn library_at(caller: *const c_void) -> &'static Library {
    let site = caller as usize;
    for known in places_of(site) {
        match known.address.load(Ordering::Acquire) {
            0 => break,
            address if address == site => {
                // SAFETY: null, or a library of `known_as`, none of which is ever freed.
                if let Some(library) = unsafe { known.library.load(Ordering::Acquire).as_ref() } {
                    return library;
                }
                break;
            }
            _ => (),
        }
    }
    look_up(site)
}

/// Where a call site may be in the table.
fn places_of(site: usize) -> impl Iterator<Item = &'static Site> {
    let first = (site >> 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - 9);
    (first..first + 8).map(|place| &SITES[place % SITES.len()])
}

#[cold]
fn look_up(site: usize) -> &'static Library {
    let library = known_as(library_of(site as *const c_void).unwrap_or_else(|| "unknown".to_owned()));
    let free = |place: &&Site| place.address.compare_exchange(0, site, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if site != 0
        && let Some(place) = places_of(site).find(free)
    {
        place.library.store(ptr::from_ref(library).cast_mut(), Ordering::Release);
    }
    library
}

/// The entry of the library with this name. There are few, and they are never freed.
fn known_as(name: String) -> &'static Library {
    static KNOWN: PerProcess<Mutex<Vec<&'static Library>>> = PerProcess::new(Mutex::default);
    let mut known = KNOWN.get().lock().unpoisoned();
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

/// The file name of the library that contains an address.
fn library_of(address: *const c_void) -> Option<String> {
    let path = NonNull::new(symbols::path_around(address).cast_mut())?;
    // SAFETY: the name of a loaded library.
    let path = unsafe { CStr::from_ptr(path.as_ptr()) }.to_string_lossy();
    Path::new(&*path).file_name().map(|name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_recognised_by_name_prefix() {
        assert!(is_named("libnccl.so.2") && is_named("libcufile.so.0"));
        assert!(!is_named("libtorch_cuda.so") && !is_named("mylibnccl.so"));
    }

    /// The second time, the answer comes from the table, which must not confuse call sites.
    #[test]
    fn a_call_site_keeps_its_library() {
        let own = library_at(is_named as *const c_void);
        for _ in 0..2 {
            assert!(ptr::eq(library_at(is_named as *const c_void), own));
            assert!(ptr::eq(library_at(library_of as *const c_void), own));
            let other = library_at(libc::malloc as *const c_void);
            assert!(other.name() != own.name() && !other.is_excluded(), "{}", other.name());
            assert_eq!(library_at(ptr::null()).name(), "unknown");
            assert_eq!(library_at(ptr::without_provenance(0x1234_5678)).name(), "unknown", "an address in no library is nobody's");
        }
    }
}
