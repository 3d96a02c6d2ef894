//! NCCL's functions that register memory, those that create and destroy communicators, and the one that explains errors, generated from the
//! table `nccl_functions!`. Memory that NCCL has registered must keep its physical pages ([`vramctl_core::memory`]), and the ranks of a
//! communicator share memory ([`vramctl_core::memory::communicators`]). All calls are passed on to NCCL, with unchanged results. Collectives and
//! groups are not hooked: their failures show when the program asks what an error means.
//!
//! A process may contain several NCCLs, each with its own communicators: a separate library, the one bundled with torch, or one linked into
//! torch. So a call must reach exactly the one that it would have reached without this library.
//!
//! - A linked call reaches the exported function first. Its original is in the NCCL that has made the communicator. If that is not known, or
//!   the call makes the communicator, it is the only one that is there. If there are several, it is searched in the linker's order: after this
//!   library, then in the libraries that the calling library was loaded with. A call by a jump seems to come from the library before.
//! - NCCL's functions may call each other by their exported names. Such a call is recognised because its thread is already inside an NCCL
//!   function, and stays in the same NCCL. The return address does not help: the call may be a jump.
//! - A lookup (`dlsym`) returns a different function, which calls the one that was found. There is one of these for each NCCL, up to a
//!   limit; beyond it, the found function itself is returned.
//!
//! Why not collectives and groups: `ncclGroupEnd` names no communicator, so a linked tail call could end a group in the wrong NCCL, and the
//! search for a caller's NCCL takes up to 0.4 µs. `ncclGetErrorString` is called when any function has failed, and a wrong NCCL would only
//! word the error differently.

use crate::copies;
use crate::entry::{jump, pass_caller, symbol};
use crate::linked::{in_loaded, only_one_with};
use crate::nccl_functions;
use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{mem, ptr, slice};
use vramctl_core::events::{self, Event};
use vramctl_core::memory::Memory;
use vramctl_core::memory::communicators::{self, Origin};
use vramctl_driver::nccl::NcclResult;
use vramctl_driver::nccl::answer::{CUDA_ERROR, IN_PROGRESS, INTERNAL_ERROR, SUCCESS, SYSTEM_ERROR};
use vramctl_host::guarded;
use vramctl_host::symbols::{self, Loaded};
use vramctl_model::Span;

fn is_done(answer: NcclResult) -> bool {
    matches!(answer, SUCCESS | IN_PROGRESS)
}

/// Calls `real`, and returns what it has written to each of `count` places. `None`: nothing. In a group, an NCCL before 2.14 writes a
/// communicator only at the end of the group, and every NCCL a window; until then, the program's variable may hold anything.
fn writing<R>(places: *mut usize, count: usize, real: impl FnOnce() -> R) -> (R, Vec<Option<usize>>) {
    // NCCL returns no address in this library.
    static UNWRITTEN: u8 = 0;
    let unwritten = (&raw const UNWRITTEN).expose_provenance();
    if places.is_null() {
        return (real(), vec![None; count]);
    }
    // SAFETY: here and below, the program has passed as many writable places, which need not be initialised yet.
    let place = |at| unsafe { places.cast::<MaybeUninit<usize>>().add(at) };
    let before: Vec<_> = (0..count)
        // SAFETY: as above.
        .map(|at| unsafe { mem::replace(&mut *place(at), MaybeUninit::new(unwritten)) })
        .collect();
    let answer = real();
    let take = |(at, before)| {
        // SAFETY: initialised above.
        let written = unsafe { place(at).read().assume_init() };
        if written == unwritten {
            // SAFETY: as above.
            unsafe { place(at).write(before) };
        }
        (written != unwritten).then_some(written)
    };
    (answer, before.into_iter().enumerate().map(take).collect())
}

fn register(
    _: *mut c_void,
    communicator: usize,
    address: *mut c_void,
    bytes: usize,
    handle: *mut usize,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    // NCCL returns no handle if it does not register, as with `NCCL_LOCAL_REGISTER=0`.
    let given = |handle: Option<usize>| handle.filter(|handle| *handle != 0);
    registering("NCCL: ncclCommRegister", communicator, address, bytes, handle, given, real)
}

fn register_window(
    _: *mut c_void,
    communicator: usize,
    address: *mut c_void,
    bytes: usize,
    window: *mut usize,
    _flags: c_int,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    // Inside `ncclGroupStart`, or with a non-blocking communicator, a window has no handle before the group ends. Then it counts as
    // registered until its communicator is destroyed.
    registering("NCCL: ncclCommWindowRegister", communicator, address, bytes, window, |window| Some(window.unwrap_or_default()), real)
}

fn registering(
    registrant: &'static str,
    communicator: usize,
    address: *mut c_void,
    bytes: usize,
    handle: *mut usize,
    given: impl FnOnce(Option<usize>) -> Option<usize>,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    let Some(memory) = Memory::existing() else { return real() };
    let mut answer = INTERNAL_ERROR;
    memory.registering(Span { address: address as u64, bytes }, registrant, communicator, || {
        let (answered, written) = writing(handle, 1, real);
        answer = answered;
        if is_done(answer) && !handle.is_null() { given(written[0]) } else { None }
    });
    answer
}

fn deregister(_: *mut c_void, communicator: usize, handle: usize, real: impl FnOnce() -> NcclResult) -> NcclResult {
    let Some(memory) = Memory::existing() else { return real() };
    let mut answer = INTERNAL_ERROR;
    memory.registrations.deregistering(communicator, handle, || {
        answer = real();
        is_done(answer)
    });
    answer
}

/// A communicator is destroyed, and with it its registrations.
fn destroy(_: *mut c_void, communicator: usize, real: impl FnOnce() -> NcclResult) -> NcclResult {
    let mut answer = INTERNAL_ERROR;
    communicators::ending(communicator, || {
        let Some(memory) = Memory::existing() else {
            answer = real();
            return is_done(answer);
        };
        memory.registrations.ending_communicator(communicator, || {
            answer = real();
            is_done(answer)
        });
        is_done(answer)
    });
    answer
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// Creates a communicator. `origin` says where the communicator comes from; it is called when NCCL has created one.
fn creating<'a>(
    found: *mut c_void,
    made: *mut usize,
    origin: impl FnOnce() -> Option<Origin<'a>>,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    let (answer, created) = writing(made, 1, real);
    let created = created[0].filter(|handle| is_done(answer) && *handle != 0);
    if let (Some(handle), Some(nccl)) = (created, Loaded::around(found))
        && let Some(origin) = origin()
    {
        communicators::created(nccl, handle, origin);
    }
    answer
}

fn init(
    found: *mut c_void,
    communicator: *mut usize,
    ranks: c_int,
    unique: UniqueId,
    rank: c_int,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    init_of_many(found, communicator, ranks, rank, 1, &raw const unique, ptr::null(), real)
}

fn init_with(
    found: *mut c_void,
    communicator: *mut usize,
    ranks: c_int,
    unique: UniqueId,
    rank: c_int,
    _config: *const c_void,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    init(found, communicator, ranks, unique, rank, real)
}

#[allow(clippy::too_many_arguments)] // NCCL's
fn init_of_many(
    found: *mut c_void,
    communicator: *mut usize,
    ranks: c_int,
    rank: c_int,
    ids: c_int,
    uniques: *const UniqueId,
    _config: *const c_void,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    let origin = || {
        // SAFETY: NCCL has accepted them: there are as many.
        let ids = (!uniques.is_null() && ids > 0)
            .then(|| unsafe { slice::from_raw_parts(uniques.cast::<u8>(), ids as usize * size_of::<UniqueId>()) })?;
        Some(Origin::Unique { ids, rank: rank as u32, ranks: ranks as u32 })
    };
    creating(found, communicator, origin, real)
}

fn init_all(
    found: *mut c_void,
    communicators: *mut usize,
    ranks: c_int,
    _devices: *const c_int,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    let (answer, created) = writing(communicators, usize::try_from(ranks).unwrap_or_default(), real);
    if let Some(nccl) = Loaded::around(found).filter(|_| is_done(answer)) {
        communicators::created_here(nccl, &created);
    }
    answer
}

#[allow(clippy::too_many_arguments)] // NCCL's
fn split(
    found: *mut c_void,
    communicator: usize,
    _color: c_int,
    _key: c_int,
    made: *mut usize,
    _config: *const c_void,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    creating(found, made, || Some(Origin::Child(communicator)), real)
}

#[allow(clippy::too_many_arguments)] // NCCL's
fn shrink(
    found: *mut c_void,
    communicator: usize,
    _excluded: *const c_int,
    _count: c_int,
    made: *mut usize,
    _config: *const c_void,
    _flags: c_int,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    creating(found, made, || Some(Origin::Child(communicator)), real)
}

#[allow(clippy::too_many_arguments)] // NCCL's
fn grow(
    found: *mut c_void,
    communicator: usize,
    ranks: c_int,
    unique: *const UniqueId,
    rank: c_int,
    made: *mut usize,
    config: *const c_void,
    real: impl FnOnce() -> NcclResult,
) -> NcclResult {
    // Those that join come as to a new one.
    if communicator == 0 {
        return init_of_many(found, made, ranks, rank, 1, unique, config, real);
    }
    let origin = || {
        // SAFETY: NCCL has accepted it, or does not look at it.
        let id = (!unique.is_null()).then(|| unsafe { slice::from_raw_parts(unique.cast::<u8>(), size_of::<UniqueId>()) });
        Some(Origin::Grown { from: communicator, members: size_of_communicator(found, communicator), id, ranks: ranks as u32 })
    };
    creating(found, made, origin, real)
}

/// How many ranks a communicator has, as its NCCL says; 0 if it does not say.
fn size_of_communicator(found: *mut c_void, communicator: usize) -> u32 {
    type Count = unsafe extern "C" fn(usize, *mut c_int) -> NcclResult;
    let Some(count) = Loaded::around(found).and_then(|nccl| nccl.symbol(c"ncclCommCount")) else { return 0 };
    let mut ranks = 0;
    // SAFETY: NCCL's function of this name has this type, and has just accepted the communicator.
    let answer = unsafe { mem::transmute::<*mut c_void, Count>(count)(communicator, &raw mut ranks) };
    if answer == SUCCESS { u32::try_from(ranks).unwrap_or(0) } else { 0 }
}

/// Programs ask this of every error, no matter which function has returned it.
fn explain(_: *mut c_void, code: NcclResult, real: impl FnOnce() -> *const c_char) -> *const c_char {
    if matches!(code, CUDA_ERROR | SYSTEM_ERROR | INTERNAL_ERROR) {
        events::publish(Event::NcclFailed(None, code));
    }
    real()
}

thread_local! {
    /// The NCCL function that this thread is in, or null.
    static INSIDE: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}

/// Marks the thread as inside an NCCL function.
struct InNccl;

impl InNccl {
    fn enter(found: *mut c_void) -> Self {
        INSIDE.set(found);
        Self
    }
}

impl Drop for InNccl {
    fn drop(&mut self) {
        INSIDE.set(ptr::null_mut());
    }
}

/// The function of this name in the NCCL that the thread is in.
fn of_the_same(name: &CStr) -> Option<*mut c_void> {
    let inside = INSIDE.get();
    if inside.is_null() { None } else { Loaded::around(inside)?.symbol(name) }
}

/// A line of the table.
#[derive(Debug)]
pub struct NcclFunction {
    /// Its symbol.
    pub symbol: &'static CStr,
    /// The functions that lookups return, and what each of these calls.
    looked_up: [(*const c_void, &'static AtomicPtr<c_void>); LIBRARIES],
}

/// The most NCCLs that are distinguished when programs look functions up.
const LIBRARIES: usize = 4;

// SAFETY: a function's address is the same for all threads.
unsafe impl Sync for NcclFunction {}

impl NcclFunction {
    /// The function to return for a lookup that has found this one.
    pub(crate) fn in_place_of(&self, found: *mut c_void) -> *mut c_void {
        let place = self.looked_up.iter().find(|(_, original)| {
            let before = original.compare_exchange(ptr::null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
            before.is_ok() || before == Err(found)
        });
        place.map_or(found, |(function, _)| function.cast_mut())
    }
}

/// The line of a symbol.
pub(crate) fn of_symbol(symbol: &CStr) -> Option<&'static NcclFunction> {
    FUNCTIONS.iter().find(|function| function.symbol == symbol)
}

/// The function that a linked call would reach without this library; null if none.
pub(crate) fn linked_for(caller: *const c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `RTLD_NEXT` needs no handle.
    let next = unsafe { symbols::dlsym(libc::RTLD_NEXT, name) };
    // Skip copies of this library: one would in turn look for what this one finds.
    if !next.is_null() && !copies::contain(next) {
        return next;
    }
    // The last one is for callers that are not identified correctly because they made the call by a jump.
    let around = [symbols::path_around(caller), c"libnccl.so.2".as_ptr()].into_iter().map(|library| in_loaded(library, name));
    around.into_iter().find(|found| !found.is_null() && !copies::contain(*found)).unwrap_or(next)
}

/// The same without the loader's lock, if only one library has the function.
fn only_one(name: &CStr) -> Option<*mut c_void> {
    only_one_with(&[name], None)?.symbol(name)
}

/// The first argument of NCCL's functions.
trait OfCommunicator {
    /// The function of this name in the NCCL that has made the communicator, if it exists already and is known.
    fn in_its_nccl(self, name: &CStr) -> Option<*mut c_void>;
}

/// An error.
impl OfCommunicator for NcclResult {
    fn in_its_nccl(self, _: &CStr) -> Option<*mut c_void> {
        None
    }
}

/// A communicator.
impl OfCommunicator for usize {
    fn in_its_nccl(self, name: &CStr) -> Option<*mut c_void> {
        communicators::nccl_of(self)?.symbol(name)
    }
}

/// A place for one.
impl OfCommunicator for *mut usize {
    fn in_its_nccl(self, _: &CStr) -> Option<*mut c_void> {
        None
    }
}

/// What NCCL's functions answer.
trait NcclAnswer: Sized {
    /// The answer if NCCL gives none, for this reason.
    fn instead(error: NcclResult) -> Self;
    /// The error, if it is one.
    fn error(&self) -> Option<NcclResult>;
}

impl NcclAnswer for NcclResult {
    fn instead(error: NcclResult) -> Self {
        error
    }

    fn error(&self) -> Option<NcclResult> {
        (!is_done(*self)).then_some(*self)
    }
}

/// A text.
impl NcclAnswer for *const c_char {
    fn instead(_: NcclResult) -> Self {
        c"unknown error".as_ptr()
    }

    fn error(&self) -> Option<NcclResult> {
        None
    }
}

macro_rules! first {
    ($first:ident $($rest:ident)*) => {
        $first
    };
}

macro_rules! functions {
    ($($symbol:ident ($($argument:ident: $type:ty),*) -> $answer:ty => $handler:ident;)*) => {
        $(
            /// NCCL's function of this name, for a linked call.
            ///
            /// # Safety
            /// As NCCL's.
            #[allow(non_snake_case, clippy::too_many_arguments)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $symbol($($argument: $type),*) -> $answer {
                naked_asm!(".cfi_startproc", pass_caller!($($argument)*), jump!(), ".cfi_endproc", to = sym linked::$symbol)
            }
        )*

        /// The Rust functions behind the exported ones.
        #[allow(non_snake_case, clippy::wildcard_imports, clippy::too_many_arguments)]
        mod linked {
            use super::*;
            $( pub unsafe extern "C" fn $symbol($($argument: $type,)* caller: *const c_void) -> $answer {
                if let Some(same) = of_the_same(names::$symbol) {
                    // SAFETY: NCCL's function of this name, and its own arguments.
                    return unsafe { types::$symbol(same)($($argument),*) };
                }
                let found = guarded(|| {
                    let own = first!($($argument)*).in_its_nccl(names::$symbol).or_else(|| only_one(names::$symbol));
                    own.unwrap_or_else(|| linked_for(caller, names::$symbol))
                }).unwrap_or(ptr::null_mut());
                // SAFETY: as above, with the arguments of the program.
                unsafe { behind::$symbol(found, $($argument),*) }
            } )*
        }

        /// The functions that lookups return.
        #[allow(non_snake_case, clippy::wildcard_imports, clippy::too_many_arguments)]
        mod looked_up {
            use super::*;
            $( pub unsafe extern "C" fn $symbol<const LIBRARY: usize>($($argument: $type),*) -> $answer {
                // SAFETY: as above.
                unsafe { behind::$symbol(originals::$symbol[LIBRARY].load(Ordering::Relaxed), $($argument),*) }
            } )*
        }

        /// What both do.
        #[allow(non_snake_case, clippy::wildcard_imports, clippy::too_many_arguments)]
        mod behind {
            use super::*;
            $( pub unsafe fn $symbol(found: *mut c_void, $($argument: $type),*) -> $answer {
                if found.is_null() {
                    return NcclAnswer::instead(SYSTEM_ERROR);
                }
                let real = || {
                    let _inside = InNccl::enter(found);
                    // SAFETY: NCCL's function of this name; the arguments are the caller's.
                    unsafe { types::$symbol(found)($($argument),*) }
                };
                guarded(|| {
                    if !copies::activate() {
                        return real();
                    }
                    let answer = $handler(found, $($argument,)* real);
                    if let Some(error) = answer.error() {
                        events::publish(Event::NcclFailed(Some(names::$symbol), error));
                    }
                    answer
                }).unwrap_or_else(|| NcclAnswer::instead(INTERNAL_ERROR))
            } )*
        }

        /// NCCL functions by their addresses.
        #[allow(non_snake_case, clippy::wildcard_imports, clippy::too_many_arguments)]
        mod types {
            use super::*;
            $( pub unsafe fn $symbol(found: *mut c_void) -> unsafe extern "C" fn($($type),*) -> $answer {
                // SAFETY: the caller's promise that it is NCCL's function of this name, which has this type.
                unsafe { mem::transmute(found) }
            } )*
        }

        /// What the returned functions call.
        #[allow(non_upper_case_globals)]
        mod originals {
            use super::{AtomicPtr, LIBRARIES, c_void, ptr};
            $( pub static $symbol: [AtomicPtr<c_void>; LIBRARIES] = [const { AtomicPtr::new(ptr::null_mut()) }; LIBRARIES]; )*
        }

        #[allow(non_upper_case_globals)]
        mod names {
            use super::{CStr, symbol};
            $( pub const $symbol: &CStr = symbol(concat!(stringify!($symbol), "\0")); )*
        }

        /// The table.
        pub static FUNCTIONS: &[NcclFunction] = &[$( NcclFunction {
            symbol: names::$symbol,
            looked_up: [
                (looked_up::$symbol::<0> as *const c_void, &originals::$symbol[0]),
                (looked_up::$symbol::<1> as *const c_void, &originals::$symbol[1]),
                (looked_up::$symbol::<2> as *const c_void, &originals::$symbol[2]),
                (looked_up::$symbol::<3> as *const c_void, &originals::$symbol[3]),
            ],
        } ),*];
    };
}
nccl_functions!(functions);
