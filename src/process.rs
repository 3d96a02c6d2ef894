//! State that belongs to one process and must not survive `fork`.
//!
//! A CUDA context cannot be used in a forked child, and a lock that another thread of the parent held at the time of
//! the fork would stay locked for ever. So every global of this library lives in a [`PerProcess`], which a forked
//! child finds empty: it makes its own when it first needs it. The parent's value stays where it is in the child's
//! copy of the memory, untouched and never dropped, because dropping it would mean calling the driver.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;
use std::{io, mem, ptr, thread};

/// The inference engine that the program has said it is, if it has.
static ENGINE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Says which inference engine lives in this process; `None`: none does any more.
pub fn set_engine(name: Option<&str>) {
    *ENGINE.get().lock().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_owned);
}

/// The inference engine in this process, if it has said so.
pub fn engine() -> Option<String> {
    ENGINE.existing()?.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// How many forks lie between this process and the one that first used the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A lazily made global that a forked child does not inherit.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<Stamped<T>>,
    make: fn() -> T,
}

struct Stamped<T> {
    generation: u32,
    value: T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A global made by `make` at its first use in each process.
    pub const fn new(make: fn() -> T) -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// This process's value, made now if it is not there yet. Values are never freed.
    #[inline]
    pub fn get(&'static self) -> &'static T {
        self.existing().unwrap_or_else(|| self.create())
    }

    /// This process's value, if something made it already.
    #[inline]
    pub fn existing(&'static self) -> Option<&'static T> {
        // SAFETY: a non-null pointer comes from `Box::into_raw` in `create` and is never freed.
        let stamped = unsafe { self.current.load(Ordering::Acquire).as_ref() }?;
        (stamped.generation == GENERATION.load(Ordering::Relaxed)).then_some(&stamped.value)
    }

    #[cold]
    fn create(&'static self) -> &'static T {
        count_forks();
        let generation = GENERATION.load(Ordering::Relaxed);
        let before = self.current.load(Ordering::Acquire);
        // SAFETY: as in `existing`.
        if let Some(stamped) = unsafe { before.as_ref() }
            && stamped.generation == generation
        {
            return &stamped.value;
        }
        let fresh = Box::into_raw(Box::new(Stamped { generation, value: (self.make)() }));
        let winner = match self.current.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(winner) => {
                // SAFETY: `fresh` lost the race and was never published, so this is its only owner.
                drop(unsafe { Box::from_raw(fresh) });
                winner
            }
        };
        // SAFETY: published by this or another thread of this process, and never freed from then on.
        unsafe { &(*winner).value }
    }
}

/// From now on a fork makes a new generation. Called at the first use of a global and not earlier, so that a program
/// without CUDA has no fork handler of ours.
fn count_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| on_fork_in_child(next_generation));
}

extern "C" fn next_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Has `handler` run in every forked child, which may do async-signal-safe work only.
pub fn on_fork_in_child(handler: unsafe extern "C" fn()) {
    // SAFETY: `handler` lives in this library, which is never unloaded. Without memory for the list the handler is
    // not registered; a child that then uses CUDA state of its parent gets errors from the driver, as it does without us.
    unsafe { libc::pthread_atfork(None, None, Some(handler)) };
}

/// The file under a number above those of the standard streams. Where the program has closed one of these, a file of ours might
/// get its number, and then what the program prints.
pub fn above_standard<F: From<OwnedFd> + Into<OwnedFd>>(file: F) -> io::Result<F> {
    let file: OwnedFd = file.into();
    if file.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(file.into());
    }
    // SAFETY: the call touches no memory.
    let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) }.into())
}

/// The file behind a descriptor: its device and number there. `None`: there is none.
pub fn identity(descriptor: RawFd) -> Option<(u64, u64)> {
    // SAFETY: plain data, for which all zeroes is a value.
    let mut found: libc::stat64 = unsafe { mem::zeroed() };
    // SAFETY: writable.
    let answer = unsafe { libc::fstat64(descriptor, &raw mut found) };
    (answer == 0).then_some((found.st_dev, found.st_ino))
}

/// Descriptors that a forked child must not keep: its copies would keep a client waiting for a server that is not there, and
/// the space of a file whose owner was killed.
pub struct ClosedOnFork<const N: usize>([Place; N]);

#[derive(Debug)]
struct Place {
    /// `FREE`, `TAKEN` while the rest is being written, or the descriptor.
    descriptor: AtomicI32,
    /// The program may close what it does not know, and have a file of its own under the number.
    identity: [AtomicU64; 2],
}

const FREE: RawFd = -1;
const TAKEN: RawFd = -2;

impl<const N: usize> ClosedOnFork<N> {
    /// An empty list with room for `N`.
    #[expect(clippy::new_without_default, reason = "it is for statics alone")]
    pub const fn new() -> Self {
        Self([const { Place { descriptor: AtomicI32::new(FREE), identity: [const { AtomicU64::new(0) }; 2] } }; N])
    }

    /// Puts one in, until what is returned is dropped: before the descriptor is closed, for another file may have its number a
    /// moment after. `None`: the list is full.
    pub fn track(&'static self, descriptor: RawFd) -> Option<Tracked> {
        let take = |place: &&Place| place.descriptor.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let place = self.0.iter().find(take)?;
        let (device, number) = identity(descriptor).unwrap_or_default();
        place.identity[0].store(device, Ordering::Relaxed);
        place.identity[1].store(number, Ordering::Relaxed);
        place.descriptor.store(descriptor, Ordering::Release);
        Some(Tracked(&place.descriptor))
    }

    /// What the fork handler of the list does.
    pub fn close_in_child(&self) {
        for Place { descriptor, identity: [device, number] } in &self.0 {
            let descriptor = descriptor.swap(FREE, Ordering::AcqRel);
            if descriptor >= 0 && identity(descriptor) == Some((device.load(Ordering::Relaxed), number.load(Ordering::Relaxed))) {
                // SAFETY: a descriptor of ours that the child inherited; the thread that used it does not exist here.
                unsafe { libc::close(descriptor) };
            }
        }
    }
}

/// A descriptor's place in such a list, given up on drop.
#[derive(Debug)]
pub struct Tracked(&'static AtomicI32);

impl Drop for Tracked {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Work of ours in the driver that nobody waits for. The driver must not be called while it is taken down, nor be taken down
/// under a thread that is in it: so nothing begins while the program is ending, and an exit handler waits for what has begun.
pub struct Busy(());

impl Busy {
    /// `None`: the program is ending.
    pub fn unless_ending() -> Option<Self> {
        let mut state = BACKGROUND.get().lock();
        if state.ending {
            return None;
        }
        state.busy += 1;
        Some(Self(()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let background = BACKGROUND.get();
        background.lock().busy -= 1;
        background.changed.notify_all();
    }
}

#[derive(Default)]
struct Background {
    state: Mutex<BackgroundState>,
    changed: Condvar,
}

#[derive(Default)]
struct BackgroundState {
    /// How many threads are in the driver.
    busy: usize,
    ending: bool,
}

static BACKGROUND: PerProcess<Background> = PerProcess::new(Background::default);

impl Background {
    fn lock(&self) -> MutexGuard<'_, BackgroundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// There will be threads of ours from now on. Exit handlers run in the opposite order of their registration: ours before those
/// of the driver, which is in use by now.
fn expect_background() {
    static ONCE: Once = Once::new();
    // In a forked child too, which has inherited the handler.
    BACKGROUND.get();
    // SAFETY: a function that lives as long as the process: the library is never unloaded. Without memory for the list it
    // does not run.
    ONCE.call_once(|| _ = unsafe { libc::atexit(end_background) });
}

extern "C" fn end_background() {
    /// Far more than any of it takes, unless the driver waits for the program.
    const LONGEST: Duration = Duration::from_secs(5);
    // A forked child has none before it has threads of ours.
    if let Some(background) = BACKGROUND.existing() {
        let mut state = background.lock();
        state.ending = true;
        drop(background.changed.wait_timeout_while(state, LONGEST, |state| state.busy > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Starts a thread of the library in the program: named, and with all signals blocked, so that the program's handlers
/// run where they always ran.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    start(builder(name), work)
}

/// The same for work in which the driver compiles code: with as large a stack as programs' threads usually have.
pub fn spawn_compiler(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    start(builder(name).stack_size((8 << 20) + thread_overhead()), work)
}

fn start(builder: thread::Builder, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    expect_background();
    with_signals_blocked(|| builder.spawn(work)).map(drop)
}

/// The same for a thread that ends with a scope.
pub fn spawn_scoped<'scope, 'env, R: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> R + Send + 'scope,
) -> io::Result<thread::ScopedJoinHandle<'scope, R>> {
    with_signals_blocked(|| builder(name).spawn_scoped(scope, work))
}

fn builder(name: &str) -> thread::Builder {
    /// Plenty for what these threads do.
    const STACK: usize = 512 << 10;
    thread::Builder::new().name(name.to_owned()).stack_size(STACK + thread_overhead())
}

/// A thread that is started meanwhile has the full mask from its first instruction on.
fn with_signals_blocked<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: both sets are plain data and writable. The mask is this thread's alone and restored below.
    let before = unsafe {
        let (mut all, mut before) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let result = work();
    // SAFETY: the set filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    result
}

/// Lets other threads go first, from now on: for work that nobody waits for. Concerns the calling thread alone.
pub fn step_back() {
    const NICE: libc::c_int = 10;
    // SAFETY: touches no memory. On Linux 0 means the calling thread and not its process. (`gettid` would need glibc 2.30.)
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// What glibc takes of a thread's stack before the thread begins: a program with large thread-local arrays would leave
/// nothing of a fixed size.
fn thread_overhead() -> usize {
    // SAFETY: a NUL-terminated name.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr()) };
    if symbol.is_null() {
        return 0;
    }
    // SAFETY: glibc's function of this name has this type and only reads initialised attributes.
    unsafe {
        let minimum = mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const libc::pthread_attr_t) -> libc::size_t>(symbol);
        let mut attributes = mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        let bytes = minimum(&raw const attributes);
        libc::pthread_attr_destroy(&raw mut attributes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// A child that could see its parent's locks or allocations would hang or hand a dead context to the driver.
    #[test]
    fn a_forked_child_starts_empty_and_the_parent_keeps_its_own() {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        static GLOBAL: PerProcess<usize> = PerProcess::new(|| MADE.fetch_add(1, Ordering::SeqCst));
        let mine = *GLOBAL.get();
        assert_eq!(GLOBAL.existing(), Some(&mine));

        // SAFETY: the child only touches atomics and allocates one box, then leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = GLOBAL.existing().is_none() && *GLOBAL.get() != mine;
            // SAFETY: ends the child without running the test harness's exit handlers.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = -1;
        // SAFETY: `child` is ours and `status` is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(GLOBAL.existing(), Some(&mine));
    }
}
