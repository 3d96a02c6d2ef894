//! Weak references of the program and its libraries to functions that this library exports in place of others'. A program asks in this way
//! whether the process has the function, so without the other library the answer is no.
//!
//! At the program's start, the loader has bound the references before any code of this library runs. So those to nobody else's function
//! are set back to null, as the loader leaves them where it finds nothing. Those of a library that is opened later stay.

use crate::symbols::{self, Loaded};
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::{ptr, slice};

/// A weak reference that is bound to this library.
struct Bound {
    name: &'static CStr,
    place: *mut *const c_void,
    /// The addresses of the object that the loader has made read-only after it had bound the references.
    read_only: Range<usize>,
}

/// Sets the references to null that would be without this library. `is_in_place`: whether it exports the function in place of another's.
pub fn release(is_in_place: fn(&CStr) -> bool) {
    let mut search = Search { is_in_place, found: Vec::new() };
    // SAFETY: the callback gets what it expects, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut search).cast()) };
    for reference in search.found {
        // SAFETY: `RTLD_NEXT` needs no handle.
        if unsafe { symbols::dlsym(libc::RTLD_NEXT, reference.name) }.is_null() {
            symbols::dlerror();
            reference.release();
        }
    }
}

impl Bound {
    fn release(self) {
        let page = page_size();
        let first = self.place as usize / page * page;
        let is_read_only = self.read_only.contains(&(self.place as usize));
        // SAFETY: the loader has written an address here, and nothing of the program's runs yet that reads it. What cannot be made writable stays.
        unsafe {
            if is_read_only && libc::mprotect(first as *mut c_void, page, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return;
            }
            self.place.write_volatile(ptr::null());
            if is_read_only {
                libc::mprotect(first as *mut c_void, page, libc::PROT_READ);
            }
        }
    }
}

struct Search {
    is_in_place: fn(&CStr) -> bool,
    found: Vec<Bound>,
}

unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _size: libc::size_t, search: *mut c_void) -> c_int {
    // SAFETY: the loader passes a complete entry, and `search` comes from `release`.
    unsafe {
        let (info, search) = (&*info, &mut *search.cast::<Search>());
        let segments = slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        let place = |kind: u32| {
            let segment = segments.iter().find(|segment| segment.p_type == kind)?;
            let start = info.dlpi_addr as usize + segment.p_vaddr as usize;
            Some(start..start + segment.p_memsz as usize)
        };
        // The loader protects whole pages.
        let (page, read_only) = (page_size(), place(libc::PT_GNU_RELRO).unwrap_or_default());
        let read_only = read_only.start / page * page..read_only.end / page * page;
        if let Some(object) = place(libc::PT_DYNAMIC).and_then(|dynamic| Loaded::at(info.dlpi_addr as usize, dynamic.start)) {
            let bound = object.weak_references().filter(|(name, place)| (search.is_in_place)(name) && symbols::is_ours(**place));
            search.found.extend(bound.map(|(name, place)| Bound { name, place, read_only: read_only.clone() }));
        }
    }
    0
}

fn page_size() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}
