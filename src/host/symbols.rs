//! Symbols, looked up past the preloaded library's own `dlsym` and `dlvsym`.
//!
//! The preloaded library answers `dlsym` and `dlvsym` for the whole process, its own code included: `libc::dlsym` would find what
//! the library put there itself. So every lookup of ours goes through this module. It finds the C library's functions by reading
//! the loaded objects' symbol tables, which needs no memory and no lock of ours, and works in programs that are not preloaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{mem, ptr};

/// `dlsym`.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
/// `dlvsym`.
pub type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The C library's `dlsym`. To it, this library is the caller, which matters for `RTLD_NEXT` and `RTLD_DEFAULT`.
///
/// # Safety
/// `handle` must be a handle of `dlopen`, `RTLD_NEXT` or `RTLD_DEFAULT`.
pub unsafe fn dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the caller's promise.
    c_library_dlsym().map_or(ptr::null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// The `dlsym` that programs would call if this library were not loaded: that of the next library in lookup order that has one,
/// which is another preloaded library's or the C library's.
pub fn next_dlsym() -> Option<Dlsym> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let found = next(&FOUND, c"dlsym").or_else(|| c_library_dlsym().map(|own| own as *mut c_void))?;
    // SAFETY: every `dlsym` has this type.
    Some(unsafe { mem::transmute::<*mut c_void, Dlsym>(found) })
}

/// The `dlvsym` that programs would call if this library were not loaded.
pub fn next_dlvsym() -> Option<Dlvsym> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let found = next(&FOUND, c"dlvsym").or_else(|| in_c_library(c"dlvsym"))?;
    // SAFETY: every `dlvsym` has this type.
    Some(unsafe { mem::transmute::<*mut c_void, Dlvsym>(found) })
}

/// Whether an address is in this library (in a program that is not preloaded: in the program itself).
pub fn is_ours(address: *const c_void) -> bool {
    static BEGIN: AtomicUsize = AtomicUsize::new(0);
    static END: AtomicUsize = AtomicUsize::new(0);
    if END.load(Ordering::Acquire) == 0 {
        let own = ptr::from_ref(&BEGIN) as usize;
        let (begin, end) = find(|object| object.contains(own).then(|| object.extent())).unwrap_or((0, 1));
        BEGIN.store(begin, Ordering::Relaxed);
        // Whoever sees the end sees the beginning.
        END.store(end, Ordering::Release);
    }
    let address = address as usize;
    BEGIN.load(Ordering::Relaxed) <= address && address < END.load(Ordering::Acquire)
}

/// Whether the object that contains `address` comes before this library in the order in which objects were loaded, as libraries
/// that are preloaded in front of it and the program itself do.
pub fn is_before_us(address: *const c_void) -> bool {
    static ANCHOR: u8 = 0;
    let (address, own) = (address as usize, ptr::from_ref(&ANCHOR) as usize);
    find(|object| if object.contains(own) { Some(false) } else { object.contains(address).then_some(true) }).unwrap_or(false)
}

/// A loaded library that is never unloaded, or not while this is used.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    base: usize,
    dynamic: *const Dynamic,
    names: *const c_char,
    symbols: *const libc::Elf64_Sym,
    /// `DT_GNU_HASH` or null.
    gnu_hash: *const u32,
    /// `DT_HASH` or null.
    hash: *const u32,
    /// `DT_VERSYM` or null.
    versions: *const u16,
}

impl Loaded {
    /// The first loaded library with this `SONAME`. Neither loads it nor keeps it loaded.
    pub fn named(soname: &CStr) -> Option<Self> {
        find(|object| {
            let library = object.library()?;
            // SAFETY: the library is loaded; its own table says where its name is.
            let name = unsafe { library.entry(DT_SONAME).map(|offset| CStr::from_ptr(library.names.add(offset))) };
            (name == Some(soname)).then_some(library)
        })
    }

    /// Whether a handle of `dlopen` is that of this library.
    ///
    /// # Safety
    /// `handle` must be a handle of `dlopen` that is still open.
    pub unsafe fn is_behind(self, handle: *mut c_void) -> bool {
        /// The public beginning of `struct link_map` (`link.h`), which is what glibc's handles point to.
        #[repr(C)]
        struct LinkMap {
            base: usize,
            name: *const c_char,
            dynamic: *const Dynamic,
        }
        // SAFETY: the caller's promise.
        unsafe { (*handle.cast::<LinkMap>()).dynamic == self.dynamic }
    }

    /// A function that the library defines: what `dlsym` finds with the library's handle, without what it depends on.
    pub fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the tables are those of a loaded library, and as long as their headers say.
        unsafe { if self.gnu_hash.is_null() { self.by_hash(name) } else { self.by_gnu_hash(name) } }
    }

    /// A value of the dynamic section.
    unsafe fn entry(self, tag: i64) -> Option<usize> {
        // SAFETY: the section ends with `DT_NULL`.
        unsafe {
            let mut entry = self.dynamic;
            while (*entry).tag != DT_NULL {
                if (*entry).tag == tag {
                    return Some((*entry).value);
                }
                entry = entry.add(1);
            }
        }
        None
    }

    /// An address in the dynamic section. The loader has relocated it already, except in sections that are read-only.
    unsafe fn table<T>(self, tag: i64) -> *const T {
        // SAFETY: the caller's promise.
        let value = unsafe { self.entry(tag) };
        value.map_or(ptr::null(), |value| (if value < self.base { self.base.wrapping_add(value) } else { value }) as *const T)
    }

    /// The format is described at <https://flapenguin.me/elf-dt-gnu-hash> and in `elf/dl-lookup.c` of glibc.
    unsafe fn by_gnu_hash(self, name: &CStr) -> Option<*mut c_void> {
        let wanted = name.to_bytes().iter().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        // SAFETY: the header tells the sizes of what follows it; a bucket holds the index of its first symbol, and the chain of a
        // bucket ends with an odd hash.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|index| *self.gnu_hash.add(index) as usize);
            if buckets == 0 {
                return None;
            }
            let bucket = self.gnu_hash.add(4 + filter * 2);
            let chain = bucket.add(buckets);
            let mut index = *bucket.add(wanted as usize % buckets) as usize;
            if index < first {
                return None;
            }
            loop {
                let hash = *chain.add(index - first);
                if hash | 1 == wanted | 1
                    && let Some(found) = self.defined(index, name)
                {
                    return Some(found);
                }
                if hash & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// The format is part of the ELF specification.
    unsafe fn by_hash(self, name: &CStr) -> Option<*mut c_void> {
        if self.hash.is_null() {
            return None;
        }
        let wanted = name.to_bytes().iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add(u32::from(*byte));
            let high = hash & 0xf000_0000;
            (hash ^ (high >> 24)) & !high
        });
        // SAFETY: the header tells the number of buckets; chains end with index 0.
        unsafe {
            let buckets = *self.hash as usize;
            if buckets == 0 {
                return None;
            }
            let bucket = self.hash.add(2);
            let chain = bucket.add(buckets);
            let mut index = *bucket.add(wanted as usize % buckets) as usize;
            while index != 0 {
                if let Some(found) = self.defined(index, name) {
                    return Some(found);
                }
                index = *chain.add(index) as usize;
            }
        }
        None
    }

    /// The address of the symbol at this index, if it is a definition with this name in its default version.
    unsafe fn defined(self, index: usize, name: &CStr) -> Option<*mut c_void> {
        /// In the version table: an old version, kept for old programs.
        const HIDDEN: u16 = 0x8000;
        /// The address is that of a function that chooses the function.
        const INDIRECT: u8 = 10;
        // SAFETY: the index comes from the library's own hash table.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let current = self.versions.is_null() || *self.versions.add(index) & HIDDEN == 0;
            let defined = symbol.st_shndx != 0 && symbol.st_value != 0 && symbol.st_info & 0xf != INDIRECT;
            let found = current && defined && CStr::from_ptr(self.names.add(symbol.st_name as usize)) == name;
            found.then(|| self.base.wrapping_add(symbol.st_value as usize) as *mut c_void)
        }
    }
}

fn c_library_dlsym() -> Option<Dlsym> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        found = in_c_library(c"dlsym")?;
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: the C library's function of this name has this type.
    Some(unsafe { mem::transmute::<*mut c_void, Dlsym>(found) })
}

/// Before glibc 2.34, `dlsym` and `dlvsym` were in a library of their own, which is loaded wherever they are used.
fn in_c_library(name: &CStr) -> Option<*mut c_void> {
    let within = |soname| Loaded::named(soname)?.symbol(name);
    within(c"libc.so.6").or_else(|| within(c"libdl.so.2"))
}

/// The definition of a function in the libraries behind this one.
fn next(cache: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    let mut found = cache.load(Ordering::Relaxed);
    if found.is_null() {
        // Without a version: another preloaded library's function has none.
        // SAFETY: `RTLD_NEXT` needs no handle.
        found = unsafe { dlsym(libc::RTLD_NEXT, name) };
        if found.is_null() || is_ours(found) {
            return None;
        }
        cache.store(found, Ordering::Relaxed);
    }
    Some(found)
}

/// An entry of the dynamic section, `Elf64_Dyn`.
#[repr(C)]
#[derive(Debug)]
struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;

/// An object in the loader's list.
struct Object<'a>(&'a libc::dl_phdr_info);

impl Object<'_> {
    fn segments(&self, kind: u32) -> impl Iterator<Item = (usize, usize)> {
        // SAFETY: the loader tells where the headers are and how many.
        let headers = (0..usize::from(self.0.dlpi_phnum)).map(|index| unsafe { &*self.0.dlpi_phdr.add(index) });
        let base = self.0.dlpi_addr as usize;
        headers.filter(move |header| header.p_type == kind).map(move |header| {
            let begin = base.wrapping_add(header.p_vaddr as usize);
            (begin, begin.wrapping_add(header.p_memsz as usize))
        })
    }

    fn contains(&self, address: usize) -> bool {
        self.segments(libc::PT_LOAD).any(|(begin, end)| begin <= address && address < end)
    }

    fn extent(&self) -> (usize, usize) {
        self.segments(libc::PT_LOAD).fold((usize::MAX, 0), |(low, high), (begin, end)| (low.min(begin), high.max(end)))
    }

    fn library(&self) -> Option<Loaded> {
        let (dynamic, _) = self.segments(libc::PT_DYNAMIC).next()?;
        let mut library = Loaded {
            base: self.0.dlpi_addr as usize,
            dynamic: dynamic as *const Dynamic,
            names: ptr::null(),
            symbols: ptr::null(),
            gnu_hash: ptr::null(),
            hash: ptr::null(),
            versions: ptr::null(),
        };
        // SAFETY: the dynamic section of a loaded object, and tables of the types that the ELF specification gives them.
        unsafe {
            library.names = library.table(DT_STRTAB);
            library.symbols = library.table(DT_SYMTAB);
            library.gnu_hash = library.table(DT_GNU_HASH);
            library.hash = library.table(DT_HASH);
            library.versions = library.table(DT_VERSYM);
        }
        (!library.names.is_null() && !library.symbols.is_null()).then_some(library)
    }
}

/// The first answer of `look` for the loaded objects, in the order in which they were loaded. `look` runs under a lock of the
/// loader and must not call it.
fn find<R, F: FnMut(&Object) -> Option<R>>(look: F) -> Option<R> {
    struct Search<R, F> {
        look: F,
        found: Option<R>,
    }
    unsafe extern "C" fn visit<R, F: FnMut(&Object) -> Option<R>>(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a complete entry, and the search that is passed below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<R, F>>()) };
        search.found = (search.look)(&Object(info));
        c_int::from(search.found.is_some())
    }
    let mut search = Search { look, found: None };
    // SAFETY: the callback gets a search of its own type, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit::<R, F>), (&raw mut search).cast()) };
    search.found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test is not preloaded, so the linker's `dlsym` is the real one.
    #[test]
    fn the_c_librarys_functions_are_those_that_the_linker_finds() {
        let linked = libc::dlsym as *mut c_void;
        // In an executable that may be a stub that jumps there, so compare what the functions say of themselves.
        // SAFETY: NUL-terminated names.
        let said = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr()) };
        assert!(c_library_dlsym().is_some_and(|own| own as *mut c_void == said || own as *mut c_void == linked));
        // SAFETY: as above.
        let versioned = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"dlvsym".as_ptr()) };
        assert_eq!(in_c_library(c"dlvsym"), Some(versioned));
        assert!(next_dlsym().is_some() && next_dlvsym().is_some());
    }

    #[test]
    fn symbols_are_found_as_the_loader_finds_them() {
        let library = Loaded::named(c"libc.so.6").unwrap();
        for name in [c"malloc", c"dlopen", c"open64", c"pthread_create", c"no_such_function", c""] {
            // SAFETY: a NUL-terminated name.
            let said = unsafe { dlsym(libc::RTLD_DEFAULT, name) };
            assert_eq!(library.symbol(name).unwrap_or(ptr::null_mut()), said, "{name:?}");
        }
        assert!(Loaded::named(c"libc.so").is_none() && Loaded::named(c"").is_none());
    }

    /// A library without `DT_GNU_HASH` is searched by `DT_HASH`.
    #[test]
    fn both_kinds_of_hash_tables_are_read() {
        let library = Loaded::named(c"libc.so.6").unwrap();
        if library.hash.is_null() || library.gnu_hash.is_null() {
            println!("not run: the C library has only one of them");
            return;
        }
        let old = Loaded { gnu_hash: ptr::null(), ..library };
        for name in [c"malloc", c"dlopen", c"dlsym", c"pthread_create", c"no_such_function"] {
            assert_eq!(old.symbol(name), library.symbol(name), "{name:?}");
        }
        assert_eq!(Loaded { hash: ptr::null(), ..old }.symbol(c"malloc"), None);
    }

    #[test]
    fn a_handle_is_told_from_others() {
        let library = Loaded::named(c"libc.so.6").unwrap();
        // SAFETY: both are loaded already.
        unsafe {
            let of_library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            let of_program = libc::dlopen(ptr::null(), libc::RTLD_LAZY);
            assert!(library.is_behind(of_library) && !library.is_behind(of_program));
        }
    }

    #[test]
    fn this_program_is_ours_and_its_libraries_come_later() {
        let (own, other) = (is_ours as *const c_void, in_c_library(c"dlsym").unwrap().cast_const());
        assert!(is_ours(own) && !is_ours(other) && !is_ours(ptr::null()));
        assert!(!is_before_us(own) && !is_before_us(other) && !is_before_us(ptr::null()));
    }
}
