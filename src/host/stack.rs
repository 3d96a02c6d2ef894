//! A thread's call stack: its native frames and, if it runs Python, Python's.
//!
//! For messages, so best effort, and safe wherever a program may call us. Nothing waits. Of Python's data, only the calling thread's frames
//! are read, by the interpreter itself, in the same way as its `faulthandler` does; that needs no interpreter lock.

pub use crate::system::thread_id;
use crate::{Held, symbols};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, mem, ptr};

/// A call stack, innermost call first.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stack {
    /// Return addresses.
    native: Vec<usize>,
    /// `FILE:LINE in FUNCTION`.
    python: Vec<String>,
}

impl Stack {
    /// The calling thread's stack, with at most this many frames of each kind. Native frames begin with the call that returns to the
    /// address `from`, if there is one.
    pub fn here(most: usize, from: usize) -> Self {
        Self { native: native_frames(most, from), python: python_frames(most) }
    }

    /// Python's frames; none if the thread runs no Python, or the interpreter does not offer them.
    pub fn python(&self) -> &[String] {
        &self.python
    }

    /// The native frames by name. The names are looked up here, which takes the loader's lock: on a thread of the library's.
    pub fn native(&self) -> Vec<String> {
        self.native.iter().map(|address| named(*address)).collect()
    }
}

/// The name of a thread of this process; `None` if it has ended.
pub fn name_of_thread(id: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/self/task/{id}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// The calling thread's name.
pub fn thread_name() -> String {
    let mut name = [0 as c_char; 16];
    // SAFETY: the kernel writes at most 16 bytes, NUL-terminated.
    unsafe {
        libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr());
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    }
}

/// The unwinder of `libgcc_s`, which Rust's own panics use, too.
mod unwinder {
    use super::{c_int, c_void};
    unsafe extern "C" {
        pub fn _Unwind_Backtrace(each: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int, with: *mut c_void) -> c_int;
        pub fn _Unwind_GetIP(context: *mut c_void) -> usize;
    }
    pub const GO_ON: c_int = 0;
    pub const STOP: c_int = 4;
}

/// The frames without the library's own, which come before `from`.
fn native_frames(most: usize, from: usize) -> Vec<usize> {
    /// An upper limit for the library's own frames.
    const OWN: usize = 32;
    struct Walk {
        addresses: Vec<usize>,
        room: usize,
    }
    unsafe extern "C" fn note(context: *mut c_void, walk: *mut c_void) -> c_int {
        // SAFETY: the unwinder's context, and what is passed below.
        unsafe {
            let walk = &mut *walk.cast::<Walk>();
            let address = unwinder::_Unwind_GetIP(context);
            // A thread's first frame may have no address.
            if address == 0 || walk.addresses.len() == walk.room {
                return unwinder::STOP;
            }
            walk.addresses.push(address);
        }
        unwinder::GO_ON
    }
    let mut walk = Walk { addresses: Vec::with_capacity(most + OWN), room: most + OWN };
    // SAFETY: the callback gets what it expects, does not unwind and, since there is room, does not allocate.
    unsafe { unwinder::_Unwind_Backtrace(note, (&raw mut walk).cast()) };
    let own = walk.addresses.iter().position(|address| *address == from).unwrap_or(0);
    walk.addresses.drain(..own);
    walk.addresses.truncate(most);
    walk.addresses
}

/// `LIBRARY+OFFSET FUNCTION`, as far as the loader knows.
fn named(address: usize) -> String {
    // SAFETY: plain data and writable; the names belong to a loaded library.
    unsafe {
        let mut info: libc::Dl_info = mem::zeroed();
        // A return address may be the first of the next function.
        if libc::dladdr(ptr::without_provenance(address.wrapping_sub(1)), &raw mut info) == 0 || info.dli_fname.is_null() {
            return format!("{address:#x}");
        }
        let path = CStr::from_ptr(info.dli_fname).to_string_lossy();
        let place = format!("{}+{:#x}", path.rsplit('/').next().unwrap_or_default(), address.wrapping_sub(info.dli_fbase as usize));
        if info.dli_sname.is_null() {
            return place;
        }
        format!("{place} {}", readable(CStr::from_ptr(info.dli_sname)))
    }
}

/// A demangled symbol, if the program has a C++ library.
fn readable(symbol: &CStr) -> String {
    type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;
    /// Template names can be very long.
    const LONGEST: usize = 120;
    // SAFETY: the library is loaded already, the function has this type, and it returns text from `malloc`.
    let text = unsafe {
        let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        let found = if library.is_null() { ptr::null_mut() } else { symbols::dlsym(library, c"__cxa_demangle") };
        let text = if found.is_null() {
            ptr::null_mut()
        } else {
            mem::transmute::<*mut c_void, Demangle>(found)(symbol.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut())
        };
        if !library.is_null() {
            libc::dlclose(library);
        }
        if text.is_null() {
            symbol.to_string_lossy().into_owned()
        } else {
            let readable = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            readable
        }
    };
    if text.chars().count() <= LONGEST { text } else { text.chars().take(LONGEST).chain(['…']).collect() }
}

type ThreadState = unsafe extern "C" fn() -> *mut c_void;
type DumpTraceback = unsafe extern "C" fn(c_int, *mut c_void);

/// As in `faulthandler`'s signal handler, the interpreter itself writes the frames into a file. It needs no lock, and a thread that is in a
/// call does not change its frames. `_Py_DumpTraceback` is exported by Python 3.11 and 3.12.
fn python_frames(most: usize) -> Vec<String> {
    static STATE: AtomicUsize = AtomicUsize::new(0);
    static DUMP: AtomicUsize = AtomicUsize::new(0);
    let (Some(state), Some(dump)) = (function(&STATE, c"PyGILState_GetThisThreadState"), function(&DUMP, c"_Py_DumpTraceback")) else {
        return Vec::new();
    };
    // SAFETY: the interpreter's functions of these names have these types. A thread without a state is not a Python thread.
    unsafe {
        let (state, dump) = (mem::transmute::<usize, ThreadState>(state), mem::transmute::<usize, DumpTraceback>(dump));
        let own = state();
        if own.is_null() {
            return Vec::new();
        }
        // A file in memory: a pipe may be too small and block.
        let file = libc::syscall(libc::SYS_memfd_create, c"vramctl-stack".as_ptr(), libc::MFD_CLOEXEC) as c_int;
        if file < 0 {
            return Vec::new();
        }
        let Ok(held) = Held::new(OwnedFd::from_raw_fd(file)) else { return Vec::new() };
        let Ok(file) = held.as_type::<std::fs::File>() else { return Vec::new() };
        dump(file.as_raw_fd(), own);
        let mut text = vec![0; file.metadata().map_or(0, |data| data.len()).min(1 << 20) as usize];
        if file.read_exact_at(&mut text, 0).is_err() {
            return Vec::new();
        }
        String::from_utf8_lossy(&text).lines().filter_map(python_frame).take(most).collect()
    }
}

/// `  File "x.py", line 1 in main` as `x.py:1 in main`.
fn python_frame(line: &str) -> Option<String> {
    let (file, rest) = line.trim_start().strip_prefix("File ")?.rsplit_once(", line ")?;
    let (number, function) = rest.split_once(" in ")?;
    Some(format!("{}:{number} in {function}", file.trim_matches('"')))
}

/// A function of the interpreter, which is the program or a library. A failed lookup is repeated, because Python may be loaded later.
fn function(known: &AtomicUsize, name: &CStr) -> Option<usize> {
    let mut found = known.load(Ordering::Relaxed);
    if found == 0 {
        found = symbols::in_program_or(b"libpython", name) as usize;
        known.store(found, Ordering::Relaxed);
    }
    (found != 0).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn recursion(left: usize, most: usize) -> Stack {
        let stack = if left == 0 { Stack::here(most, 0) } else { recursion(left - 1, most) };
        std::hint::black_box(stack)
    }

    #[test]
    fn a_stack_has_the_innermost_calls_by_name_up_to_the_limit() {
        let stack = recursion(3, 8);
        let native = stack.native();
        assert_eq!(native.len(), 8);
        let this = std::env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        assert!(native.iter().any(|frame| frame.starts_with(&format!("{this}+0x"))), "{native:?}");
        assert_eq!(recursion(100, 64).native().len(), 64);
        let (all, last) = (native_frames(8, 0), native_frames(64, 0).pop().unwrap());
        assert_eq!(native_frames(8, last), [last], "where the thread began");
        assert_eq!(native_frames(8, all[3])[0], all[3]);
        assert!(stack.python().is_empty(), "this is no Python");
    }

    #[test]
    fn only_python_frames_are_parsed() {
        let read = |line: &str| python_frame(line);
        assert_eq!(read(r#"  File "/a b/x.py", line 12 in <module>"#).as_deref(), Some("/a b/x.py:12 in <module>"));
        assert_eq!(read(r#"  File "/x, line 3 in y.py", line 7 in f"#).as_deref(), Some("/x, line 3 in y.py:7 in f"));
        assert_eq!(read("  File ???, line ??? in ???").as_deref(), Some("???:??? in ???"));
        for other in ["Stack (most recent call first):", "  <no Python frame>", "  ...", "", "File "] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn a_threads_id_and_name_are_reported() {
        let thread = std::thread::Builder::new().name("a-thread".into()).spawn(|| (thread_id(), thread_name())).unwrap().join().unwrap();
        assert_eq!(thread.1, "a-thread");
        assert_ne!(thread.0, thread_id());
        assert_eq!((name_of_thread(thread_id()), name_of_thread(0)), (Some(thread_name()), None));
    }

    #[test]
    fn an_unknown_address_is_reported_as_a_number() {
        assert_eq!(named(0x1234), "0x1234");
        assert!(named(libc::malloc as *const () as usize + 1).contains('+'));
    }
}
