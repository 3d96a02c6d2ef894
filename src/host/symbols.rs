//! Looks symbols up, bypassing the preloaded library's own `dlsym` and `dlvsym`.
//!
//! The preloaded library defines `dlsym` and `dlvsym` for the whole process, including its own code: `libc::dlsym` would call the library's
//! own function. So every lookup of ours goes through this module. It finds the C library's functions by reading its symbol table, which
//! needs no memory, and works in programs that are not preloaded.
//!
//! Objects are found by an address or a handle, and with an old C library (before glibc 2.35) by `dladdr`, which takes the lock that `dlsym` takes,
//! too. While a constructor of a library runs, its thread has that lock, and may wait for another thread. So what a thread of the program's does
//! in a call of CUDA uses `dl_iterate_phdr` instead, whose lock is another one. That is done as rarely as possible: a forked child may inherit it
//! locked forever, while glibc resets the first one.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{mem, ptr, slice};

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

/// The same for a version of the symbol.
///
/// # Safety
/// As [`dlsym`].
pub unsafe fn dlvsym(handle: *mut c_void, name: &CStr, version: &CStr) -> *mut c_void {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let Some(found) = cached(&FOUND, || in_c_library(c"dlvsym")) else { return ptr::null_mut() };
    // SAFETY: the C library's function of this name has this type; the caller's promise.
    unsafe { mem::transmute::<*mut c_void, Dlvsym>(found)(handle, name.as_ptr(), version.as_ptr()) }
}

/// The `dlsym` that programs would call if this library were not loaded: the one of the next library in lookup order that has one, which is
/// another preloaded library or the C library.
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

/// The `dlopen` that programs would call if this library were not loaded.
pub fn next_dlopen() -> Option<*mut c_void> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    next(&FOUND, c"dlopen").or_else(|| in_c_library(c"dlopen"))
}

/// The `dlmopen` that programs would call if this library were not loaded.
pub fn next_dlmopen() -> Option<*mut c_void> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    next(&FOUND, c"dlmopen").or_else(|| in_c_library(c"dlmopen"))
}

/// Whether an address is in this library (in a program that is not preloaded: in the program itself).
pub fn is_ours(address: *const c_void) -> bool {
    static OWN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut own = OWN.load(Ordering::Relaxed);
    if own.is_null() {
        own = map_of(ptr::from_ref(&OWN).cast()).cast_mut().cast();
        OWN.store(own, Ordering::Relaxed);
    }
    !own.is_null() && map_of(address) == own.cast()
}

/// The path of the library that contains an address, or null. Valid as long as the library is loaded.
///
/// Takes no lock, or with an old C library one that the loader has for moments only: a thread in a constructor of a library that is being loaded
/// may wait for this one, and has the loader's lock meanwhile.
pub fn path_around(address: *const c_void) -> *const c_char {
    unsafe extern "C" {
        static program_invocation_name: *const c_char;
    }
    let path = match find_object() {
        // SAFETY: null, or the loader's own entry.
        Some(find) => unsafe { found_by(find, address).as_ref() }.map_or(ptr::null(), |map| map.name),
        None => in_list(|object| object.contains(address)).map_or(ptr::null(), |object| object.name),
    };
    // SAFETY: null, or NUL-terminated. The C library's variable is set before anything else runs; a program may change it, to a text.
    let is_program = !path.is_null() && unsafe { *path } == 0;
    // SAFETY: as above.
    if is_program { unsafe { program_invocation_name } } else { path }
}

/// A function that the program itself or a library exports whose file name begins like this; null if there is none. Takes the same lock for
/// moments.
pub fn in_program_or(library: &[u8], name: &CStr) -> *mut c_void {
    let mut found = None;
    in_list(|object| {
        let file = object.file_name();
        if file.is_empty() || file.starts_with(library) {
            // SAFETY: the object is loaded.
            found = unsafe { Loaded::at(object.base, object.dynamic) }.and_then(|object| object.symbol(name));
        }
        found.is_some_and(|found| !found.is_null())
    });
    found.unwrap_or(ptr::null_mut())
}

/// The only loaded library that is wanted; `None` if none is, or several. `is_wanted` must neither allocate nor wait. Takes the same lock for moments.
pub fn only_library(is_wanted: impl Fn(Loaded) -> bool) -> Option<Loaded> {
    let (mut only, mut are_several) = (None, false);
    in_list(|object| {
        // SAFETY: the object is loaded.
        let wanted = unsafe { Loaded::at(object.base, object.dynamic) }.filter(|library| is_wanted(*library));
        are_several = only.is_some() && wanted.is_some();
        only = only.or(wanted);
        are_several
    });
    only.filter(|_| !are_several)
}

/// An object in the loader's list.
#[derive(Clone, Copy)]
struct ListedObject {
    base: usize,
    name: *const c_char,
    segments: *const libc::Elf64_Phdr,
    count: usize,
    /// The address of its dynamic section.
    dynamic: usize,
}

impl ListedObject {
    /// # Safety
    /// The loader's own description.
    unsafe fn of(info: &libc::dl_phdr_info) -> Self {
        let (base, segments, count) = (info.dlpi_addr as usize, info.dlpi_phdr, info.dlpi_phnum.into());
        let mut object = Self { base, name: info.dlpi_name, segments, count, dynamic: 0 };
        let dynamic = object.segments().iter().find(|segment| segment.p_type == libc::PT_DYNAMIC);
        object.dynamic = dynamic.map_or(0, |segment| base.wrapping_add(segment.p_vaddr as usize));
        object
    }

    fn segments(&self) -> &[libc::Elf64_Phdr] {
        // SAFETY: the loader's own table, as long as it says.
        if self.segments.is_null() { &[] } else { unsafe { slice::from_raw_parts(self.segments, self.count) } }
    }

    fn contains(&self, address: *const c_void) -> bool {
        let offset = address.addr().wrapping_sub(self.base);
        let mut loaded = self.segments().iter().filter(|segment| segment.p_type == libc::PT_LOAD);
        loaded.any(|segment| offset.wrapping_sub(segment.p_vaddr as usize) < segment.p_memsz as usize)
    }

    /// Empty for the program itself.
    fn file_name(&self) -> &[u8] {
        // SAFETY: null, or NUL-terminated.
        let path = if self.name.is_null() { &[] } else { unsafe { CStr::from_ptr(self.name) }.to_bytes() };
        path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }
}

/// The first object in the loader's list that is wanted, which must neither allocate nor wait. The list's lock is not the one that the loader has
/// while it runs constructors.
fn in_list(mut is_wanted: impl FnMut(&ListedObject) -> bool) -> Option<ListedObject> {
    struct Search<'a> {
        is_wanted: &'a mut dyn FnMut(&ListedObject) -> bool,
        found: Option<ListedObject>,
    }
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _size: libc::size_t, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes its description and what is passed below.
        let (object, search) = unsafe { (ListedObject::of(&*info), &mut *search.cast::<Search<'_>>()) };
        search.found = Some(object).filter(|object| (search.is_wanted)(object));
        search.found.is_some().into()
    }
    let mut search = Search { is_wanted: &mut is_wanted, found: None };
    // SAFETY: the callback gets what it expects, which outlives the call, and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// Whether the object that contains `address` was loaded before this library, like the program itself and libraries that are preloaded
/// before this one.
pub fn is_before_us(address: *const c_void) -> bool {
    static ANCHOR: u8 = 0;
    let (wanted, mut map) = (map_of(address), map_of((&raw const ANCHOR).cast()));
    while !map.is_null() && !wanted.is_null() {
        // SAFETY: the loader's entry of this library, which is never unloaded if it is preloaded. Neither is what comes before it.
        map = unsafe { (*map).previous };
        if map == wanted {
            return true;
        }
    }
    false
}

/// Whether a lookup with `RTLD_NEXT` comes to this library first, if it has the function.
pub fn is_next_after(caller: *const c_void, name: &CStr) -> bool {
    static ANCHOR: u8 = 0;
    if !is_before_us(caller) {
        return false;
    }
    let (own, mut map) = (map_of((&raw const ANCHOR).cast()), map_of(caller));
    loop {
        // SAFETY: from the caller's entry to this library's, nothing is ever unloaded.
        map = unsafe { (*map).next };
        // SAFETY: as above.
        if map == own || unsafe { Loaded::of_map(map) }.is_some_and(|library| library.symbol(name).is_some()) {
            return map == own;
        }
    }
}

/// Whether this is the handle of the program itself, through which the global scope is searched.
///
/// # Safety
/// `handle` must be a handle of `dlopen` that is still open, `RTLD_NEXT` or `RTLD_DEFAULT`.
pub unsafe fn is_program(handle: *mut c_void) -> bool {
    // SAFETY: glibc's handles are its entries.
    let map = unsafe { handle.cast_const().cast::<LinkMap>().as_ref() }.filter(|_| handle != libc::RTLD_NEXT);
    map.is_some_and(|map| map.previous.is_null())
}

/// Whether an address is in the program itself.
pub fn is_in_program(address: *const c_void) -> bool {
    // SAFETY: null, or the loader's own entry.
    unsafe { map_of(address).as_ref() }.is_some_and(|map| map.previous.is_null())
}

/// The C library's `dlerror`.
pub fn dlerror() -> *mut c_char {
    type Dlerror = unsafe extern "C" fn() -> *mut c_char;
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    // A lookup with `dlsym` would end the error that is asked for.
    let found = cached(&FOUND, || in_c_library(c"dlerror"));
    // SAFETY: every `dlerror` has this type.
    found.map_or(ptr::null_mut(), |found| unsafe { mem::transmute::<*mut c_void, Dlerror>(found)() })
}

/// A loaded library. Must not be unloaded while this is used.
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

// SAFETY: the tables of a loaded library are the same for all threads, and nothing writes to them.
unsafe impl Send for Loaded {}

impl Loaded {
    /// The library that contains an address.
    pub fn around(address: *const c_void) -> Option<Self> {
        // SAFETY: the loader's own entry, or null.
        unsafe { Self::of_map(map_of(address)) }
    }

    /// The library behind a handle of `dlopen`.
    ///
    /// # Safety
    /// `handle` must be a handle of `dlopen` that is still open.
    pub unsafe fn behind(handle: *mut c_void) -> Option<Self> {
        // SAFETY: glibc's handles are its entries.
        unsafe { Self::of_map(handle.cast_const().cast()) }
    }

    /// The object with this base and dynamic section.
    ///
    /// # Safety
    /// It must be loaded.
    pub(super) unsafe fn at(base: usize, dynamic: usize) -> Option<Self> {
        let map = LinkMap { base, name: ptr::null(), dynamic: dynamic as *const Dynamic, next: ptr::null(), previous: ptr::null() };
        // SAFETY: the caller's promise.
        unsafe { Self::of_map(&raw const map) }
    }

    /// The names of the libraries that it needs.
    pub fn needed(self) -> impl Iterator<Item = &'static CStr> {
        let mut entry = self.dynamic;
        std::iter::from_fn(move || {
            // SAFETY: the section ends with `DT_NULL`, and its offsets are of the library's own names.
            unsafe {
                while (*entry).tag != DT_NULL {
                    let Dynamic { tag, value } = *entry;
                    entry = entry.add(1);
                    if tag == DT_NEEDED {
                        return Some(CStr::from_ptr(self.names.add(value)));
                    }
                }
            }
            None
        })
    }

    /// The names of the symbols that it uses, each with the place where the loader writes the address.
    pub(super) fn relocations(self) -> impl Iterator<Item = (&'static CStr, *const *const c_void)> {
        self.references().map(|reference| (reference.name, reference.place))
    }

    /// The weak references to others' symbols: the name, and where the loader has written the address that it has found, if any.
    pub fn weak_references(self) -> impl Iterator<Item = (&'static CStr, *mut *const c_void)> {
        const WEAK: u8 = 2;
        self.relocated().filter_map(move |(symbol, place)| {
            // SAFETY: the index is of the library's own symbols.
            let entry = unsafe { &*self.symbols.add(symbol) };
            // SAFETY: as above.
            (entry.st_info >> 4 == WEAK && entry.st_shndx == 0)
                .then(|| unsafe { (CStr::from_ptr(self.names.add(entry.st_name as usize)), place.cast_mut()) })
        })
    }

    /// The version of others' functions that it is linked with: of the first of them that has one.
    pub fn version_needed(self, is_meant: impl Fn(&CStr) -> bool) -> Option<&'static CStr> {
        self.references().filter(|reference| is_meant(reference.name)).find_map(|reference| self.version_of(reference.symbol))
    }

    /// The version that it needs of a symbol.
    fn version_of(self, symbol: usize) -> Option<&'static CStr> {
        if self.versions.is_null() {
            return None;
        }
        // SAFETY: the version table has an entry for each symbol. The list of the needed versions is as long as its entries say.
        unsafe {
            let index = *self.versions.add(symbol);
            let mut library = self.table::<VersionsNeeded>(DT_VERNEED);
            while !library.is_null() {
                let mut version = library.byte_add((*library).first as usize).cast::<VersionNeeded>();
                for _ in 0..(*library).count {
                    if (*version).index == index {
                        return Some(CStr::from_ptr(self.names.add((*version).name as usize)));
                    }
                    version = version.byte_add((*version).next as usize);
                }
                library = if (*library).next == 0 { ptr::null() } else { library.byte_add((*library).next as usize) };
            }
        }
        None
    }

    /// Whether it is linked with such a function of another's.
    pub fn uses(self, is_meant: impl Fn(&CStr) -> bool) -> bool {
        self.references().any(|reference| is_meant(reference.name))
    }

    fn references(self) -> impl Iterator<Item = Reference> {
        // SAFETY: the index is of the library's own symbols.
        let name = move |symbol| unsafe { CStr::from_ptr(self.names.add((*self.symbols.add(symbol)).st_name as usize)) };
        self.relocated().map(move |(symbol, place)| Reference { name: name(symbol), symbol, place })
    }

    /// The indices of the symbols that it uses, each with the place where the loader writes the address.
    fn relocated(self) -> impl Iterator<Item = (usize, *const *const c_void)> {
        // SAFETY: the library's own tables, as long as it says.
        let list = |table, bytes| unsafe {
            let (start, length) = (self.table::<libc::Elf64_Rela>(table), self.entry(bytes).unwrap_or(0) / size_of::<libc::Elf64_Rela>());
            if start.is_null() { &[] } else { std::slice::from_raw_parts(start, length) }
        };
        // Those that the linker has put first use no symbol. In large libraries they are most.
        // SAFETY: the library's own count.
        let relative = unsafe { self.entry(DT_RELACOUNT) }.unwrap_or(0);
        list(DT_JMPREL, DT_PLTRELSZ).iter().chain(list(DT_RELA, DT_RELASZ).iter().skip(relative)).filter_map(move |one| {
            let symbol = (one.r_info >> 32) as usize;
            (symbol != 0).then(|| (symbol, self.base.wrapping_add(one.r_offset as usize) as *const *const c_void))
        })
    }

    unsafe fn of_map(map: *const LinkMap) -> Option<Self> {
        // SAFETY: null, or an entry of the loader.
        let map = unsafe { map.as_ref() }?;
        let mut library = Loaded {
            base: map.base,
            dynamic: map.dynamic,
            names: ptr::null(),
            symbols: ptr::null(),
            gnu_hash: ptr::null(),
            hash: ptr::null(),
            versions: ptr::null(),
        };
        if library.dynamic.is_null() {
            return None;
        }
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

    /// Whether this is the library's `SONAME`.
    pub fn is_named(self, soname: &CStr) -> bool {
        // SAFETY: the library's own table says where its name is.
        unsafe { self.entry(DT_SONAME).is_some_and(|offset| CStr::from_ptr(self.names.add(offset)) == soname) }
    }

    /// A function that the library defines: what `dlsym` finds with the library's handle, without what it depends on.
    pub fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        self.find(name).map(|(_, address)| address)
    }

    /// Whether the library's symbol of this name does for one that is linked with this version of it: it has that version, or none.
    pub fn has_version(self, name: &CStr, version: &CStr) -> bool {
        let Some((index, _)) = self.find(name).filter(|_| !self.versions.is_null()) else { return true };
        // SAFETY: the version table has an entry for each symbol. The list of the versions is as long as its entries say.
        unsafe {
            let index = *self.versions.add(index) & !HIDDEN;
            let mut defined = self.table::<VersionDefined>(DT_VERDEF);
            while index > UNVERSIONED && !defined.is_null() {
                if (*defined).index == index {
                    let name = *defined.byte_add((*defined).name as usize).cast::<u32>();
                    return CStr::from_ptr(self.names.add(name as usize)) == version;
                }
                defined = if (*defined).next == 0 { ptr::null() } else { defined.byte_add((*defined).next as usize) };
            }
        }
        true
    }

    fn find(self, name: &CStr) -> Option<(usize, *mut c_void)> {
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
    unsafe fn by_gnu_hash(self, name: &CStr) -> Option<(usize, *mut c_void)> {
        let wanted = name.to_bytes().iter().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        // SAFETY: the header has the sizes of the tables that follow it; a bucket holds the index of its first symbol, and the chain of a
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
                    return Some((index, found));
                }
                if hash & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// The format is part of the ELF specification.
    unsafe fn by_hash(self, name: &CStr) -> Option<(usize, *mut c_void)> {
        if self.hash.is_null() {
            return None;
        }
        let wanted = name.to_bytes().iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add(u32::from(*byte));
            let high = hash & 0xf000_0000;
            (hash ^ (high >> 24)) & !high
        });
        // SAFETY: the header has the number of buckets; chains end with index 0.
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
                    return Some((index, found));
                }
                index = *chain.add(index) as usize;
            }
        }
        None
    }

    /// The address of the symbol at this index, if it is a definition with this name in its default version.
    unsafe fn defined(self, index: usize, name: &CStr) -> Option<*mut c_void> {
        /// The address is that of a resolver function that selects the implementation (`STT_GNU_IFUNC`).
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
    let found = cached(&FOUND, || in_c_library(c"dlsym"))?;
    // SAFETY: the C library's function of this name has this type.
    Some(unsafe { mem::transmute::<*mut c_void, Dlsym>(found) })
}

fn cached(cache: &AtomicPtr<c_void>, find: impl FnOnce() -> Option<*mut c_void>) -> Option<*mut c_void> {
    let mut found = cache.load(Ordering::Relaxed);
    if found.is_null() {
        found = find()?;
        cache.store(found, Ordering::Relaxed);
    }
    Some(found)
}

/// Before glibc 2.34, `dlsym` and `dlvsym` were in a library of their own, with `dlinfo`. The library is located through two functions that
/// no other library replaces.
fn in_c_library(name: &CStr) -> Option<*mut c_void> {
    let beside = |function: *const c_void| Loaded::around(function)?.symbol(name);
    beside(libc::gnu_get_libc_version as *const c_void).or_else(|| beside(libc::dlinfo as *const c_void))
}

/// The definition of a function in the libraries after this one.
fn next(cache: &AtomicPtr<c_void>, name: &CStr) -> Option<*mut c_void> {
    cached(cache, || {
        // Without a version: another preloaded library's function has none.
        // SAFETY: `RTLD_NEXT` needs no handle.
        let found = unsafe { dlsym(libc::RTLD_NEXT, name) };
        (!found.is_null() && !is_ours(found)).then_some(found)
    })
}

/// The use of another's symbol.
struct Reference {
    name: &'static CStr,
    /// Its index in the symbol table.
    symbol: usize,
    /// Where the loader writes the address.
    place: *const *const c_void,
}

/// The versions needed of a library, `Elf64_Verneed`.
#[repr(C)]
struct VersionsNeeded {
    format: u16,
    count: u16,
    file: u32,
    /// From here to the first version.
    first: u32,
    /// From here to the next library; 0: this is the last.
    next: u32,
}

/// A version of a library's own symbols, `Elf64_Verdef`.
#[repr(C)]
struct VersionDefined {
    format: u16,
    flags: u16,
    /// In the version table.
    index: u16,
    count: u16,
    hash: u32,
    /// From here to the names, of which the first is the version's.
    name: u32,
    /// From here to the next version; 0: this is the last.
    next: u32,
}

/// In the version table: an old version, kept for compatibility.
const HIDDEN: u16 = 0x8000;
/// In the version table: up to here, the symbol has no version.
const UNVERSIONED: u16 = 1;

/// A needed version, `Elf64_Vernaux`.
#[repr(C)]
struct VersionNeeded {
    hash: u32,
    flags: u16,
    /// In the version table.
    index: u16,
    name: u32,
    /// From here to the next version.
    next: u32,
}

/// Which loaded object contains an address. Another that is loaded in its place later differs, as far as can be told without a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectId {
    map: usize,
    base: usize,
    dynamic: usize,
    path: u64,
}

impl ObjectId {
    /// `None` if the address is in no object.
    pub fn around(address: *const c_void) -> Option<Self> {
        let map = map_of(address);
        // SAFETY: null, or the loader's entry of an object that is loaded, because the address is that of a caller.
        let LinkMap { base, name, dynamic, .. } = *unsafe { map.as_ref() }?;
        // SAFETY: the loader's own name, if any.
        let path = if name.is_null() { &[] } else { unsafe { CStr::from_ptr(name) }.to_bytes() };
        Some(Self {
            map: map.addr(),
            base,
            dynamic: dynamic.addr(),
            path: path.iter().fold(path.len() as u64, |hash, byte| hash.rotate_left(5) ^ u64::from(*byte)),
        })
    }
}

/// An entry of the dynamic section, `Elf64_Dyn`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_PLTRELSZ: i64 = 2;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_SONAME: i64 = 14;
const DT_JMPREL: i64 = 23;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_RELACOUNT: i64 = 0x6fff_fff9;
const DT_VERSYM: i64 = 0x6fff_fff0;
const DT_VERDEF: i64 = 0x6fff_fffc;
const DT_VERNEED: i64 = 0x6fff_fffe;

/// The public beginning of `struct link_map` (`link.h`), an entry in the loader's list.
#[repr(C)]
#[derive(Clone, Copy)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// The loader's entry of the object that contains an address, or null.
fn map_of(address: *const c_void) -> *const LinkMap {
    let found = find_object().map_or(ptr::null(), |find| found_by(find, address));
    // An older C library, or an object that is being loaded.
    if found.is_null() { map_by_symbol(address) } else { found }
}

fn found_by(find: FindObject, address: *const c_void) -> *const LinkMap {
    let mut found = FoundObject { flags: 0, start: ptr::null(), end: ptr::null(), map: ptr::null(), rest: [0; 16] };
    // SAFETY: `found` is writable. The function takes no lock.
    if unsafe { find(address, &raw mut found) } == 0 { found.map } else { ptr::null() }
}

/// `struct dl_find_object`, and room for more.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: *const c_void,
    end: *const c_void,
    map: *const LinkMap,
    rest: [usize; 16],
}

type FindObject = unsafe extern "C" fn(*const c_void, *mut FoundObject) -> c_int;

/// The C library's `_dl_find_object`, which came with glibc 2.35.
fn find_object() -> Option<FindObject> {
    static KNOWN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    const NONE: *mut c_void = ptr::without_provenance_mut(1);
    let mut known = KNOWN.load(Ordering::Relaxed);
    if known.is_null() {
        // The first look-up comes before CUDA has started. Sanitizers have a `dl_iterate_phdr` of their own, which cannot be called as early.
        let library = map_by_symbol(libc::gnu_get_libc_version as *const c_void);
        // SAFETY: the loader's own entry, or null.
        known = unsafe { Loaded::of_map(library) }.and_then(|library| library.symbol(c"_dl_find_object")).unwrap_or(NONE);
        KNOWN.store(known, Ordering::Relaxed);
    }
    // SAFETY: glibc's function of this name has this type.
    (known != NONE).then(|| unsafe { mem::transmute::<*mut c_void, FindObject>(known) })
}

/// The same through the nearest symbol, which examines every symbol of the object.
fn map_by_symbol(address: *const c_void) -> *const LinkMap {
    const RTLD_DL_LINKMAP: c_int = 2;
    let mut map = ptr::null_mut();
    // SAFETY: `info` is plain data; both outputs are writable.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        if libc::dladdr1(address, &raw mut info, &raw mut map, RTLD_DL_LINKMAP) == 0 {
            return ptr::null();
        }
    }
    map.cast_const().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn c_library() -> Loaded {
        Loaded::around(libc::gnu_get_libc_version as *const c_void).unwrap()
    }

    /// This test is not preloaded, so the linker's `dlsym` is the real one.
    #[test]
    fn the_c_librarys_functions_are_those_that_the_linker_finds() {
        let linked = libc::dlsym as *mut c_void;
        // In an executable this may be a stub that jumps there, so compare what the functions return. SAFETY: NUL-terminated names.
        let said = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr()) };
        assert!(c_library_dlsym().is_some_and(|own| own as *mut c_void == said || own as *mut c_void == linked));
        // SAFETY: as above.
        let versioned = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"dlvsym".as_ptr()) };
        assert_eq!(in_c_library(c"dlvsym"), Some(versioned));
        assert!(next_dlsym().is_some() && next_dlvsym().is_some());
    }

    #[test]
    fn symbols_are_found_as_the_loader_finds_them() {
        let library = c_library();
        for name in [c"malloc", c"dlopen", c"open64", c"pthread_create", c"no_such_function", c""] {
            // SAFETY: a NUL-terminated name.
            let said = unsafe { dlsym(libc::RTLD_DEFAULT, name) };
            assert_eq!(library.symbol(name).unwrap_or(ptr::null_mut()), said, "{name:?}");
        }
        assert!(library.is_named(c"libc.so.6") && !library.is_named(c"libc.so") && !library.is_named(c""));
        assert!(Loaded::around(ptr::null()).is_none());
    }

    #[test]
    fn versions_are_those_that_the_library_has_and_the_program_needs() {
        let (library, program) = (c_library(), Loaded::around(c_library as *const c_void).unwrap());
        let version = program.version_needed(|name| name == c"gnu_get_libc_version").unwrap();
        assert!(version.to_bytes().starts_with(b"GLIBC_2."), "{version:?}");
        assert!(library.has_version(c"gnu_get_libc_version", version));
        assert!(!library.has_version(c"gnu_get_libc_version", c"GLIBC_9.9"));
        assert_eq!(program.version_needed(|name| name == c"no_such_function"), None);
        // The program's own have none.
        assert!(program.has_version(c"no_such_function", version));
        // SAFETY: `RTLD_DEFAULT` needs no handle.
        let found = [version, c"GLIBC_9.9"].map(|version| unsafe { dlvsym(libc::RTLD_DEFAULT, c"gnu_get_libc_version", version) });
        assert!(!found[0].is_null() && found[1].is_null());
    }

    #[test]
    fn an_object_has_an_identity() {
        let [own, same, other] = [c_library as *const c_void, map_of as *const c_void, libc::malloc as *const c_void].map(ObjectId::around);
        assert!(own.is_some() && own == same && other.is_some() && own != other);
        assert_eq!(ObjectId::around(ptr::null()), None);
    }

    /// A library without `DT_GNU_HASH` is searched by `DT_HASH`.
    #[test]
    fn both_kinds_of_hash_tables_are_read() {
        let library = c_library();
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
    fn an_object_is_found_by_any_address_in_it() {
        let inside = [map_of as *const c_void, libc::malloc as *const c_void, find_object as *const c_void, c"".as_ptr().cast()];
        for address in inside {
            assert!(!map_of(address).is_null());
            assert_eq!(map_of(address), map_by_symbol(address));
        }
        assert_eq!(map_of(inside[0]), map_of(inside[2]));
        assert_ne!(map_of(inside[0]), map_of(inside[1]));
        let stack = 0;
        assert!(map_of((&raw const stack).cast()).is_null() && map_of(ptr::null()).is_null());
        // SAFETY: `gnu_get_libc_version` returns a NUL-terminated text.
        let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_str().unwrap();
        let minor: u32 = version.split('.').nth(1).unwrap().parse().unwrap();
        assert_eq!(find_object().is_some(), minor >= 35, "glibc {version}");
    }

    #[test]
    fn a_library_is_found_by_its_handle() {
        // SAFETY: both are loaded already.
        unsafe {
            let of_library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            let of_program = libc::dlopen(ptr::null(), libc::RTLD_LAZY);
            let named = |handle| Loaded::behind(handle).is_some_and(|library| library.is_named(c"libc.so.6"));
            assert!(named(of_library) && !named(of_program));
        }
    }

    #[test]
    fn this_program_is_ours_and_its_libraries_come_later() {
        let (own, other) = (is_ours as *const c_void, in_c_library(c"dlsym").unwrap().cast_const());
        assert!(is_ours(own) && !is_ours(other) && !is_ours(ptr::null()));
        assert!(!is_before_us(own) && !is_before_us(other) && !is_before_us(ptr::null()));
    }
}
