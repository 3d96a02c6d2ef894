//! Memory that is left to CUDA because of who asks for it: libraries whose memory other processes, network cards or disks are
//! wired to, and whatever `VRAMCTL_EXCLUDE` names.
//!
//! The library is recognised by the address that its call returns to, once per call site.

use std::ffi::{CStr, c_void};
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use vramctl_config::Config;

/// Libraries, by the beginning of their file names.
const ALWAYS: &[&str] = &["libnccl", "libnvshmem", "nvshmem_", "libcufile"];

/// Call sites and whether they are excluded. A full table only costs the next call sites a lookup each time.
static SITES: [AtomicUsize; 512] = [const { AtomicUsize::new(0) }; 512];
/// Set in an excluded call site's entry; no address has it.
const EXCLUDED: usize = 1 << (usize::BITS - 1);

/// Whether the call that returns to `caller` comes from an excluded library.
#[inline]
pub fn is_excluded(caller: *const c_void) -> bool {
    let site = caller as usize;
    let first = (site >> 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - 9);
    for probe in 0..8 {
        match SITES[(first + probe) % SITES.len()].load(Ordering::Relaxed) {
            0 => break,
            known if known & !EXCLUDED == site => return known & EXCLUDED != 0,
            _ => (),
        }
    }
    look_up(site, first)
}

#[cold]
fn look_up(site: usize, first: usize) -> bool {
    let excluded = library_of(site as *const c_void).is_some_and(|name| is_named(&name));
    let entry = site | if excluded { EXCLUDED } else { 0 };
    for probe in 0..8 {
        let place = &SITES[(first + probe) % SITES.len()];
        if place.compare_exchange(0, entry, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            break;
        }
    }
    excluded
}

fn is_named(file: &str) -> bool {
    let excluded = &Config::get().exclude;
    ALWAYS.iter().copied().chain(excluded.iter().map(String::as_str)).any(|name| file.starts_with(name))
}

/// The file name of the library that contains an address.
fn library_of(address: *const c_void) -> Option<String> {
    // SAFETY: `info` is plain data and writable; the name it gets belongs to a loaded library.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        if libc::dladdr(address, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let path = CStr::from_ptr(info.dli_fname).to_string_lossy();
        Path::new(&*path).file_name().map(|name| name.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_known_by_how_their_names_begin() {
        assert!(is_named("libnccl.so.2") && is_named("libcufile.so.0"));
        assert!(!is_named("libtorch_cuda.so") && !is_named("mylibnccl.so"));
    }

    /// The second time, the answer comes from the table, which must not mix up call sites.
    #[test]
    fn a_call_site_keeps_its_answer() {
        let sites = [is_named as *const c_void, library_of as *const c_void, libc::malloc as *const c_void];
        for _ in 0..2 {
            assert!(sites.iter().all(|site| !is_excluded(*site)));
        }
        let (site, first) = (0x1234_5678, 7);
        SITES[first].store(site | EXCLUDED, Ordering::Relaxed);
        assert!(!look_up(site, first), "an address in no library is nobody's");
    }
}
