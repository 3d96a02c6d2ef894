//! The CUDA runtimes in this process, and which of them a call is for.
//!
//! A process may have several: a wheel bundles one, another library is linked with that of an older release. Each has a last error and a
//! current device of its own, so a call goes on to the runtime that the caller's library is linked with ([`Linked`]). That is found once
//! for each library and, without a lock, known by the return address from then on. If only one runtime fits, it is also found without the loader's
//! lock, which another thread may have that waits for this one; to choose among several takes that lock.

use crate::linked::{Linked, only_one_with};
use crate::table::{CudaError, CudaExtent, CudaPitchedPtr, IpcHandle};
use crate::{hooked_functions, reentrancy};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::{iter, mem};
use vramctl_driver::{CUdevice, Current, RelaxedCapture, StreamHandle};
use vramctl_host::symbols::{self, Loaded, ObjectId};
use vramctl_host::{guarded, opens};
use vramctl_model::code;

/// A runtime: the functions that a call reaches.
#[derive(Debug)]
pub struct Runtime {
    functions: [*mut c_void; NAMES.len()],
    /// Its library, if nothing but its users keeps it loaded.
    loaded: Option<ObjectId>,
    next: AtomicPtr<Runtime>,
}

// SAFETY: a function's address is the same for all threads.
unsafe impl Send for Runtime {}
// SAFETY: as above.
unsafe impl Sync for Runtime {}

macro_rules! runtime {
    ($($effect:ident $name:ident $flavour:ident $arguments:tt $handler:tt;)*) => {
        runtime! { @functions $($name $arguments)*
            cudaGetDevice(device: *mut c_int) cudaSetDevice(device: c_int) cudaGetLastError() cudaPeekAtLastError() }
    };
    (@functions $($name:ident($($argument:ident: $type:ty),*))*) => {
        /// The indices of the functions.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Function { $($name),* }

        const NAMES: [&CStr; [$(Function::$name),*].len()] = [$(crate::entry::symbol(concat!(stringify!($name), "\0"))),*];

        /// The runtime's own functions. A missing one returns [`code::SHARED_OBJECT_SYMBOL_NOT_FOUND`].
        #[allow(non_snake_case, clippy::missing_safety_doc)]
        impl Runtime {
            $(
                #[inline]
                #[doc = concat!("`", stringify!($name), "`.")]
                pub unsafe fn $name(&self $(, $argument: $type)*) -> CudaError {
                    let address = self.functions[Function::$name as usize];
                    if address.is_null() {
                        return code::SHARED_OBJECT_SYMBOL_NOT_FOUND;
                    }
                    // SAFETY: the type matches the runtime's function; the arguments are the caller's.
                    unsafe { mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> CudaError>(address)($($argument),*) }
                }
            )*
        }
    };
}
hooked_functions!(runtime);

impl Runtime {
    /// The runtime that a call is for. `caller`: its return address. `None` if none is loaded.
    #[inline]
    pub fn of(caller: *const c_void) -> Option<&'static Self> {
        let begun = opens::begun();
        known_at(caller, begun).or_else(|| guarded(|| find(caller, begun)).flatten())
    }

    /// Its current device on this thread.
    pub fn current_device(&self) -> Option<CUdevice> {
        let mut device = 0;
        // SAFETY: `device` is writable.
        (unsafe { self.cudaGetDevice(&raw mut device) } == code::SUCCESS).then_some(device)
    }

    /// Sets its current device on this thread. Returns whether that succeeded.
    pub fn set_device(&self, device: CUdevice) -> bool {
        // SAFETY: takes any number.
        unsafe { self.cudaSetDevice(device) == code::SUCCESS }
    }

    /// The context in which the runtime would allocate on this thread. The runtime creates it if it does not exist yet or was reset, as it
    /// would for a real allocation.
    ///
    /// The hooked driver functions cannot replace this: only the runtime knows which context it would use on a thread without one, and a
    /// runtime whose driver calls do not reach the entries (`RTLD_DEEPBIND`) is seen only through the runtime's functions.
    pub fn current_context(&self) -> Result<Current, CudaError> {
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: freeing null only initialises the context.
        match reentrancy::forward(|| unsafe { self.cudaFree(ptr::null_mut()) }) {
            code::SUCCESS => Current::of_thread().map_err(|failure| failure.code)?.ok_or(code::INVALID_CONTEXT),
            error => Err(error),
        }
    }

    /// The program has got this error of one of the runtime's functions: `cudaGetLastError` tells it, whoever has answered.
    #[cold]
    pub fn note_error(&self, error: CudaError) {
        // At exit the runtime may have ended.
        if error == code::DEINITIALIZED {
            return;
        }
        guarded(|| {
            if self.last_error() != error {
                self.leave_as_last_error(error);
            }
        });
    }

    /// The last error of this thread.
    pub fn last_error(&self) -> CudaError {
        // SAFETY: no arguments.
        unsafe { self.cudaPeekAtLastError() }
    }

    /// Has the runtime forget what has failed since its last error was this one.
    #[cold]
    pub fn restore_last_error(&self, before: CudaError) {
        guarded(|| {
            if self.last_error() != before {
                // SAFETY: no arguments.
                unsafe { self.cudaGetLastError() };
                if before != code::SUCCESS {
                    self.leave_as_last_error(before);
                }
            }
        });
    }

    /// Only the runtime can set its last error, to what the driver has answered. So it calls the driver, whose entry answers this. A runtime
    /// whose calls do not reach the entry gets an error nevertheless, because no device has this much memory.
    fn leave_as_last_error(&self, error: CudaError) {
        let _relaxed = RelaxedCapture::enter();
        let mut never = ptr::null_mut();
        // SAFETY: `never` is writable.
        let is_taken =
            reentrancy::answer_next(error, || reentrancy::forward(|| unsafe { self.cudaMalloc(&raw mut never, usize::MAX >> 2) }));
        if !is_taken && error != code::OUT_OF_MEMORY {
            // No error rather than a wrong one.
            // SAFETY: no arguments.
            unsafe { self.cudaGetLastError() };
        }
    }

    /// Whether this is the name by which libraries need it.
    fn is_named(&self, soname: &CStr) -> bool {
        Loaded::around(self.functions[Function::cudaGetLastError as usize]).is_some_and(|library| library.is_named(soname))
    }

    /// Those that are loaded.
    fn list() -> impl Iterator<Item = &'static Self> {
        let mut next = &FIRST;
        // SAFETY: null, or never freed.
        iter::from_fn(move || unsafe { next.load(Ordering::Acquire).as_ref() }.inspect(|runtime| next = &runtime.next))
            .filter(|runtime| runtime.is_loaded())
    }

    fn is_loaded(&self) -> bool {
        self.loaded.is_none_or(|library| ObjectId::around(self.functions[Function::cudaGetLastError as usize]) == Some(library))
    }

    /// The runtime in this library, which is loaded as long as its callers are. To keep it longer, as plain CUDA does not, would need the
    /// loader's lock.
    fn within(library: Loaded) -> Option<&'static Self> {
        let functions = NAMES.map(|name| library.symbol(name).unwrap_or(ptr::null_mut()));
        let loaded = ObjectId::around(functions[Function::cudaGetLastError as usize])?;
        let known = Self::list().find(|runtime| runtime.functions == functions);
        Some(known.unwrap_or_else(|| Self::add(functions, Some(loaded))))
    }

    /// The runtime with these functions, which stay loaded.
    fn with(functions: [*mut c_void; NAMES.len()]) -> &'static Self {
        if let Some(known) = Self::list().find(|runtime| runtime.functions == functions) {
            return known;
        }
        let mut kept = ptr::null();
        for function in functions {
            let path = symbols::path_around(function);
            if path != kept && !path.is_null() {
                // SAFETY: NUL-terminated. The library is loaded already, so no initialiser runs.
                unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
                kept = path;
            }
        }
        Self::add(functions, None)
    }

    fn add(functions: [*mut c_void; NAMES.len()], loaded: Option<ObjectId>) -> &'static Self {
        let new: &'static Self = Box::leak(Box::new(Self { functions, loaded, next: AtomicPtr::default() }));
        let mut last = &FIRST;
        while let Err(other) = last.compare_exchange(ptr::null_mut(), ptr::from_ref(new).cast_mut(), Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: never freed.
            last = unsafe { &(*other).next };
        }
        new
    }
}

/// The runtimes that have been found, in the order in which that was. A forked child has its parent's.
static FIRST: AtomicPtr<Runtime> = AtomicPtr::new(ptr::null_mut());

/// A library that calls a runtime.
struct Caller {
    object: ObjectId,
    runtime: AtomicPtr<Runtime>,
    /// It is linked with none, so that another may be better once more is loaded.
    is_guess: AtomicBool,
    next: AtomicPtr<Caller>,
}

static FIRST_CALLER: AtomicPtr<Caller> = AtomicPtr::new(ptr::null_mut());

impl Caller {
    fn runtime(&self) -> &'static Runtime {
        // SAFETY: never null, and never freed.
        unsafe { &*self.runtime.load(Ordering::Acquire) }
    }

    /// The entry of an object, made if it is not known.
    fn of(object: ObjectId, make: impl FnOnce() -> Option<(&'static Runtime, bool)>) -> Option<&'static Self> {
        let mut place = &FIRST_CALLER;
        // SAFETY: null, or never freed.
        while let Some(known) = unsafe { place.load(Ordering::Acquire).as_ref() } {
            if known.object == object {
                // One that has come in the place of another may have brought its runtime along.
                if known.is_guess.load(Ordering::Relaxed) || !known.runtime().is_loaded() {
                    let (runtime, is_guess) = make()?;
                    known.runtime.store(ptr::from_ref(runtime).cast_mut(), Ordering::Release);
                    known.is_guess.store(is_guess, Ordering::Relaxed);
                }
                return Some(known);
            }
            place = &known.next;
        }
        let (runtime, is_guess) = make()?;
        let new: &'static Self = Box::leak(Box::new(Self {
            object,
            runtime: AtomicPtr::new(ptr::from_ref(runtime).cast_mut()),
            is_guess: is_guess.into(),
            next: AtomicPtr::default(),
        }));
        // Two threads may make the same one: then the later is not found again.
        while let Err(other) = place.compare_exchange(ptr::null_mut(), ptr::from_ref(new).cast_mut(), Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: never freed.
            place = unsafe { &(*other).next };
        }
        Some(new)
    }
}

/// A call site, in one line of the processor's cache.
#[repr(align(32))]
struct Site {
    /// 0 if there is none yet.
    address: AtomicUsize,
    /// [`opens::begun`] when the runtime was found: only as long as that stays the same, the address is in the same library.
    begun: AtomicU64,
    runtime: AtomicPtr<Runtime>,
}

/// [`Site::begun`] before the runtime is known, and while it is being written.
const UNKNOWN: u64 = u64::MAX;
const CHANGING: u64 = UNKNOWN - 1;

impl Site {
    const fn new() -> Self {
        Self { address: AtomicUsize::new(0), begun: AtomicU64::new(UNKNOWN), runtime: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Notes the runtime, unless another thread is about to.
    fn note(&self, runtime: &'static Runtime, begun: u64) {
        let before = self.begun.load(Ordering::Relaxed);
        if before != CHANGING && self.begun.compare_exchange(before, CHANGING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            self.runtime.store(ptr::from_ref(runtime).cast_mut(), Ordering::Relaxed);
            self.begun.store(begun, Ordering::Release);
        }
    }
}

/// The known call sites. If the table is full, other call sites need a search each time.
static SITES: [Site; 512] = [const { Site::new() }; 512];

/// Where a call site may be in the table.
fn places_of(site: usize) -> impl Iterator<Item = &'static Site> {
    let first = (site >> 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (usize::BITS - 9);
    (first..first + 8).map(|place| &SITES[place % SITES.len()])
}

#[inline]
fn known_at(caller: *const c_void, begun: u64) -> Option<&'static Runtime> {
    for site in places_of(caller.addr()) {
        match site.address.load(Ordering::Relaxed) {
            0 => break,
            address if address == caller.addr() => {
                let is_current = site.begun.load(Ordering::Acquire) == begun;
                // SAFETY: written before, and never freed. The caller's library stays loaded meanwhile, so a later runtime is right, too.
                return is_current.then(|| unsafe { &*site.runtime.load(Ordering::Relaxed) });
            }
            _ => (),
        }
    }
    None
}

#[cold]
fn find(caller: *const c_void, begun: u64) -> Option<&'static Runtime> {
    let Some(object) = ObjectId::around(caller) else { return guess() };
    let runtime = Caller::of(object, || search(caller))?.runtime();
    let site = places_of(caller.addr()).find(|site| {
        let before = site.address.compare_exchange(0, caller.addr(), Ordering::Relaxed, Ordering::Relaxed);
        before.is_ok() || before == Err(caller.addr())
    });
    if let Some(site) = site {
        site.note(runtime, begun);
    }
    Some(runtime)
}

/// The runtime that a library is linked with, or else one that is a guess.
fn search(caller: *const c_void) -> Option<(&'static Runtime, bool)> {
    // Without the loader's lock, with which another thread of the program's may wait for this one.
    let library = Loaded::around(caller);
    let known = library.and_then(|library| Runtime::list().find(|runtime| library.needed().any(|name| runtime.is_named(name))));
    let only_one = || {
        let is_meant = |name: &CStr| NAMES.contains(&name);
        let library = library.filter(|library| library.uses(is_meant))?;
        only_one_with(&NAMES, library.version_needed(is_meant)).and_then(Runtime::within)
    };
    let linked = || {
        let linked = Linked::of(caller, |name| NAMES.contains(&name));
        let mut functions = NAMES.map(|name| linked.function(name));
        // Another copy of this library may be in front of the runtime, but has no function of this name.
        if let Some(runtime) = Loaded::around(functions[Function::cudaGetLastError as usize]) {
            for (function, name) in functions.iter_mut().zip(NAMES).filter(|(function, _)| function.is_null()) {
                *function = runtime.symbol(name).unwrap_or(ptr::null_mut());
            }
        }
        functions.iter().any(|function| !function.is_null()).then(|| Runtime::with(functions))
    };
    known.or_else(only_one).or_else(linked).map(|runtime| (runtime, false)).or_else(|| guess().map(|runtime| (runtime, true)))
}

/// For a caller that is linked with no runtime: it has got the function from another, or by a look-up.
fn guess() -> Option<&'static Runtime> {
    Runtime::list().next().or_else(|| Some(Runtime::with(in_loaded()?)))
}

/// Whether a runtime is loaded. Allocates nothing.
pub fn is_loaded() -> bool {
    Runtime::list().next().is_some() || path_of_loaded().is_some()
}

/// The functions of a libcudart that is loaded outside the global scope, as Python's are.
fn in_loaded() -> Option<[*mut c_void; NAMES.len()]> {
    let path = path_of_loaded()?;
    // SAFETY: a NUL-terminated path. The library is loaded already, so no initialiser runs.
    unsafe {
        let library = libc::dlopen(path.bytes.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        if library.is_null() { None } else { Some(NAMES.map(|name| symbols::dlsym(library, name))) }
    }
}

fn path_of_loaded() -> Option<Path> {
    let mut path = Path { bytes: [0; libc::PATH_MAX as usize] };
    // SAFETY: the callback copies into `path`, which outlives the call.
    (unsafe { libc::dl_iterate_phdr(Some(note_runtime), (&raw mut path).cast()) } != 0).then_some(path)
}

struct Path {
    bytes: [c_char; libc::PATH_MAX as usize],
}

/// Records the path of the first loaded libcudart. Must not allocate, because the loader's lock is held.
unsafe extern "C" fn note_runtime(info: *mut libc::dl_phdr_info, _size: libc::size_t, path: *mut c_void) -> c_int {
    // SAFETY: the loader passes a complete entry whose name is null or NUL-terminated.
    let name = unsafe {
        let name = (*info).dlpi_name;
        if name.is_null() {
            return 0;
        }
        CStr::from_ptr(name)
    };
    let file = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // SAFETY: `path` is the `Path` that `path_of_loaded` passed.
    let bytes = unsafe { &mut (*path.cast::<Path>()).bytes };
    let name = name.to_bytes_with_nul();
    // `libcudart.so.13`, or `libcudart-d0da41ae.so.11.0` as bundled in wheels.
    if !(file.starts_with(b"libcudart.so") || file.starts_with(b"libcudart-")) || name.len() > bytes.len() {
        return 0;
    }
    for (to, from) in bytes.iter_mut().zip(name) {
        *to = *from as c_char;
    }
    1
}
