//! Fails every driver call on the paths of allocate, free, pause and resume: uses once or permanently, and pairs of uses (some of
//! them by default); and lets no thread start. Whatever fails, no byte is lost, no address moves, nothing leaks, and the next
//! attempt works.
#![allow(missing_docs)]

mod common;

use common::{Footprint, Gpu, MIB, Stream, free, malloc_tagged, pattern, pause, read, resume, write};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};
use vramctl_backup::CopyBy;
use vramctl_backup::quiet;
use vramctl_core::memory::{Memory, region};
use vramctl_driver::Driver;
use vramctl_intercept::hooks as interpose;
use vramctl_model::{Amount, Class, Error, Policy, Report};

/// The driver functions that the library calls. Each path skips those it does not use.
const CALLS: &[&str] = Driver::NAMES;

/// What a use of a call is answered with, and how often: out of memory or a code unknown to today's drivers, once; and unknown permanently. Each
/// call has many uses, on several paths, so it gets both.
fn answers(case: &str) -> [(u32, u64); 2] {
    [([2, 4242][part_of(case, 2) as usize], 1), (999, u64::MAX)]
}

/// Allocations kept in host memory, retained and hashed in host memory, and kept in a file; and some that are discarded.
struct Program {
    kept: Vec<(u64, &'static [u8])>,
    dropped: Vec<(u64, &'static [u8])>,
}

static ZEROES: [u8; MIB] = [0; MIB];

/// The contents of an allocation, made once: there are many hundred cases.
fn contents(seed: u64, bytes: usize) -> &'static [u8] {
    static MADE: Mutex<BTreeMap<(u64, usize), &'static [u8]>> = Mutex::new(BTreeMap::new());
    MADE.lock().unwrap().entry((seed, bytes)).or_insert_with(|| pattern(seed, bytes).leak())
}

impl Program {
    fn start() -> Self {
        let allocate = |seed: u64, tag: &str, backup, bytes: usize| {
            let address = malloc_tagged(tag, Some(backup), bytes).unwrap();
            let contents = contents(seed, bytes);
            assert_eq!(write(address, contents), 0);
            (address, contents)
        };
        let kept = vec![
            allocate(1, "weights", Policy::Host, MIB),
            allocate(2, common::RETAINED_TAG, Policy::Host, 3 * MIB),
            allocate(3, "cold", Policy::Disk, MIB),
        ];
        let dropped = (4..7).map(|seed| allocate(seed, "cache", Policy::Discard, MIB)).collect();
        let program = Self { kept, dropped };
        // Makes a retained copy, one piece of which has been written to since.
        pause(&[common::RETAINED_TAG]).unwrap();
        resume(&[common::RETAINED_TAG]).unwrap();
        let (address, wanted) = program.kept[1];
        assert_eq!(write(address, contents(5, 4096)), 0);
        assert_eq!(write(address, &wanted[..4096]), 0);
        program
    }

    /// Checks that everything is active at its address with its contents. Discarded contents may read as zero after a pause.
    fn check(&self, was_paused: bool, case: &str) {
        for (address, contents) in &self.kept {
            let found = read(*address, contents.len()).unwrap_or_else(|code| panic!("{case}: reading {address:#x}: {code}"));
            assert!(found == *contents, "{case}: contents at {address:#x} are not what they were");
        }
        for (address, contents) in &self.dropped {
            let found = read(*address, contents.len()).unwrap_or_else(|code| panic!("{case}: reading {address:#x}: {code}"));
            let zero = found == ZEROES;
            assert!(
                if was_paused { zero || found == *contents } else { found == *contents },
                "{case}: discarded memory is neither kept nor zero"
            );
        }
    }

    /// The allocations that the free paths free.
    fn doomed(&self) -> impl Iterator<Item = u64> {
        self.kept.iter().chain(&self.dropped).map(|(address, _)| *address)
    }

    fn end(self, case: &str) {
        for (address, _) in self.kept.iter().chain(&self.dropped) {
            assert_eq!(free(*address), 0, "{case}");
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Path {
    Allocate,
    FreeActive,
    FreePaused,
    /// Paused, with a guard.
    FreeGuarded,
    /// In stream order.
    AllocateAsync,
    FreeAsync,
    Pause,
    /// Pauses all but the disk tag, into host memory that is ready.
    PauseInMemory,
    /// With a guard.
    PauseGuarded,
    /// A scheduler takes some of it.
    Take,
    Resume,
    /// Of memory with a guard, to which something has written.
    ResumeGuarded,
    /// A kernel copies the contents back, as while the copy engines are slow.
    ResumeByKernel,
    /// A scheduler brings back what it has taken.
    BringBack,
}

/// What it takes: a class, the bytes of each, and how many.
const TAKEN: [(Class, u64, u64); 3] =
    [(Class::Discardable, 2 * MIB as u64, 2), (Class::Retained, 4 * MIB as u64, 1), (Class::Kept, 2 * MIB as u64, 1)];

const PATHS: [Path; 14] = [
    Path::Allocate,
    Path::FreeActive,
    Path::FreePaused,
    Path::FreeGuarded,
    Path::AllocateAsync,
    Path::FreeAsync,
    Path::Pause,
    Path::PauseInMemory,
    Path::PauseGuarded,
    Path::Take,
    Path::Resume,
    Path::ResumeGuarded,
    Path::ResumeByKernel,
    Path::BringBack,
];

impl Path {
    /// The tags that it pauses or resumes.
    fn tags(self) -> &'static [&'static str] {
        if self == Self::PauseInMemory { &["weights", common::RETAINED_TAG, "cache"] } else { &[] }
    }

    fn is_free(self) -> bool {
        matches!(self, Self::FreeActive | Self::FreePaused | Self::FreeGuarded | Self::FreeAsync)
    }

    fn is_resume(self) -> bool {
        matches!(self, Self::Resume | Self::ResumeGuarded | Self::ResumeByKernel | Self::BringBack)
    }

    fn is_guarded(self) -> bool {
        matches!(self, Self::FreeGuarded | Self::PauseGuarded | Self::ResumeGuarded)
    }

    fn is_pause(self) -> bool {
        matches!(self, Self::Pause | Self::PauseInMemory | Self::PauseGuarded | Self::Take)
    }

    fn pause(self) -> Result<Report, vramctl_model::Error> {
        let wanted = common::pausing_with(self.tags(), |request| {
            request.options.guard = self.is_guarded();
            if self.is_by_scheduler() {
                let amounts = TAKEN.map(|(class, bytes, count)| Amount { class, bytes, count });
                request.amounts = Some([(vramctl_driver::uuid(0).unwrap(), amounts.into())].into());
                request.scheduler = Some(1);
            }
        });
        Memory::get().pause(&wanted, &mut ())
    }

    fn resume(self) -> Result<Report, vramctl_model::Error> {
        let scheduler = self.is_by_scheduler().then_some(1);
        Memory::get().resume(&common::resuming_with(&[], |request| request.scheduler = scheduler), &mut ())
    }

    fn is_by_scheduler(self) -> bool {
        matches!(self, Self::Take | Self::BringBack)
    }

    fn choose_who_copies(self) {
        vramctl_backup::set_copy_by(if self == Self::ResumeByKernel { CopyBy::Kernel } else { CopyBy::Auto }, None);
    }
}

#[derive(Debug, Clone, Copy)]
struct Fault {
    call: &'static str,
    nth: u64,
    code: u32,
    times: u64,
}

fn malloc_async(tag: &str, bytes: usize, stream: &Stream) -> Option<u64> {
    region::begin(Some(tag), None).unwrap();
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is writable, and the stream exists.
    let answer = unsafe { interpose::cudaMallocAsync(&raw mut pointer, bytes, stream.handle()) };
    region::end().unwrap();
    (answer == 0).then_some(pointer as u64)
}

fn free_async(address: u64, stream: &Stream) -> u32 {
    // SAFETY: the address is not in use, and the stream exists.
    unsafe { interpose::cudaFreeAsync(address as *mut _, stream.handle()) }
}

/// Whether `cudaMalloc` and `cudaFree` do without a call.
fn is_of_virtual_memory(call: &str) -> bool {
    let beginnings = ["cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemAddress", "cuMemGetAllocation"];
    // Nor do they ask about pools, or how much memory is free. Events are for `cudaFreeAsync`.
    let others = ["cuDeviceGetMemPool", "cuDeviceGetDefaultMemPool", "cuMemGetInfo_v2", "cuEvent", "cuStreamIsCapturing", "cuThread"];
    beginnings.iter().chain(&others).any(|beginning| call.starts_with(beginning))
}

/// Counts the uses of each call on a path.
fn uses(gpu: &Gpu, path: Path) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    run(gpu, path, &[], Some(&mut counts));
    assert!(!counts.is_empty());
    counts
}

/// Creates everything that is created once per process.
fn warm_up(gpu: &Gpu) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for path in [Path::Resume, Path::ResumeGuarded, Path::ResumeByKernel, Path::BringBack] {
            run(gpu, path, &[], None);
        }
    });
}

/// Runs a program down one path with the faults injected, then to its end without them.
fn run(gpu: &Gpu, path: Path, faults: &[Fault], counts: Option<&mut BTreeMap<&'static str, u64>>) {
    let case = format!("{path:?} with {faults:?}");
    path.choose_who_copies();
    let program = Program::start();
    if path.is_resume() || matches!(path, Path::FreePaused | Path::FreeGuarded) {
        assert_eq!(path.pause().unwrap().unguarded_bytes, 0);
    }
    if path.is_guarded() && path.is_resume() {
        assert_eq!(write(program.kept[0].0, &[7; 64]), 0);
    }
    let stream = Stream::create();
    // Background work is not part of the path.
    vramctl_backup::settle();
    gpu.reset_counts();
    for fault in faults {
        gpu.fail(fault.call, fault.nth, fault.code, fault.times);
    }
    let (mut extra, mut answer) = (Vec::new(), None);
    match path {
        Path::Allocate => extra.extend(malloc_tagged("extra", None, 4 * MIB)),
        Path::AllocateAsync => extra.extend(malloc_async("extra", 4 * MIB, &stream)),
        Path::FreeActive | Path::FreePaused | Path::FreeGuarded | Path::FreeAsync => (),
        Path::Pause | Path::PauseInMemory | Path::PauseGuarded | Path::Take => answer = Some(path.pause()),
        Path::Resume | Path::ResumeGuarded | Path::ResumeByKernel | Path::BringBack => answer = Some(path.resume()),
    }
    let mut freed = Vec::new();
    if path.is_free() {
        let release = |address| if path == Path::FreeAsync { free_async(address, &stream) } else { free(address) };
        freed = program.doomed().filter(|address| release(*address) == 0).collect();
    }
    // What plain CUDA would not have refused, the program gets.
    if !faults.is_empty() && faults.iter().all(|fault| fault.code != 2 && is_of_virtual_memory(fault.call)) {
        match path {
            Path::Allocate | Path::AllocateAsync => assert_eq!(extra.len(), 1, "{case}: the program gets no memory"),
            _ if path.is_free() => assert_eq!(freed.len(), program.doomed().count(), "{case}: the program cannot free its memory"),
            _ => (),
        }
    }
    vramctl_backup::settle();
    if let Some(counts) = counts {
        counts.extend(CALLS.iter().map(|call| (*call, gpu.calls(call))).filter(|(_, count)| *count > 0));
    }
    gpu.clear_faults();
    if let Some(answer) = answer
        && matches!(faults, [] | [Fault { times: 1, .. }])
    {
        check_all_or_nothing(path, &answer, &case);
    }

    // The next attempt works, whatever state the first one left.
    if path.is_free() {
        for address in program.doomed().filter(|address| !freed.contains(address)) {
            assert_eq!(free(address), 0, "{case}: the second free of what is still there");
        }
        // The next call releases what was freed in stream order.
        assert_eq!((stream.synchronize(), free(0)), (0, 0), "{case}");
        return;
    }
    if path.is_pause() && Memory::get().status().tags.iter().all(|tag| tag.paused_bytes == 0) {
        // A refused pause has changed nothing.
        program.check(false, &case);
    }
    resume(&[]).unwrap_or_else(|error| panic!("{case}: resume: {error}"));
    program.check(true, &case);
    pause(&[]).unwrap_or_else(|error| panic!("{case}: pause: {error}"));
    resume(&[]).unwrap_or_else(|error| panic!("{case}: resume again: {error}"));
    program.check(true, &case);
    for address in extra {
        assert_eq!(free(address), 0, "{case}");
    }
    program.end(&case);
}

/// A pause or resume that fails leaves everything as it was. (Unless undoing fails too.)
fn check_all_or_nothing(path: Path, answer: &Result<Report, vramctl_model::Error>, case: &str) {
    let status = Memory::get().status();
    let chosen = status.tags.iter().filter(|tag| path.tags().is_empty() || path.tags().contains(&&*tag.tag));
    let all: u64 =
        if path.is_by_scheduler() { TAKEN.iter().map(|(_, bytes, count)| bytes * count).sum() } else { chosen.map(|tag| tag.bytes).sum() };
    let paused: u64 = status.tags.iter().map(|tag| tag.paused_bytes).sum();
    assert_eq!(paused, if path.is_resume() == answer.is_ok() { 0 } else { all }, "{case}: {answer:?}");
}

/// Once the program has freed everything, only what the driver refused to release is left, and a sweep gets that back.
fn check_nothing_left(gpu: &Gpu, before: &Footprint, case: &str) {
    let left: u64 = gpu.footprint().used().iter().zip(before.used()).map(|(now, before)| now.saturating_sub(*before)).sum();
    assert!(left <= vramctl_driver::leftover_bytes(), "{case}: {left} bytes are in use, and nobody counts them");
    vramctl_driver::sweep();
    // A stream that the driver refused to destroy is not retried.
    assert_eq!(gpu.footprint().without_streams(), before.without_streams(), "{case}: something is left");
}

/// Which of several processes runs a case.
fn part_of(case: &str, parts: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    case.hash(&mut hasher);
    hasher.finish() % parts
}

const PART: &str = "FAULTS_PART";
/// Cases by default, about half of them.
const SOME: u32 = 1400;

#[test]
#[ignore = "run by the test below, in processes of its own"]
fn each_call_of_a_part_fails() {
    let place = std::env::var(PART).expect("a part");
    let (part, parts) = place.split_once('/').expect("PART/PARTS");
    let (part, parts): (u64, u64) = (part.parse().unwrap(), parts.parse().unwrap());
    let gpu = Gpu::take();
    warm_up(&gpu);
    let before = gpu.footprint();
    let faults_on = |path| {
        let uses = uses(&gpu, path).into_iter().flat_map(|(call, count)| (1..=count).map(move |nth| (call, nth)));
        let each =
            move |(call, nth)| answers(&format!("{path:?} {call} {nth}")).map(|(code, times)| (path, Fault { call, nth, code, times }));
        uses.flat_map(each)
    };
    let all: Vec<_> = PATHS.into_iter().flat_map(faults_on).collect();
    assert!(all.len() > 600, "only {} cases: the paths are not what this test thinks they are", all.len());
    let mut cases = 0;
    for (path, fault) in common::some(all, SOME) {
        let case = format!("{path:?} with {fault:?}");
        if part_of(&case, parts) == part {
            run(&gpu, path, &[fault], None);
            check_nothing_left(&gpu, &before, &case);
            cases += 1;
        }
    }
    println!("{cases} cases");
}

/// The simulated driver serves one test at a time, so one process uses at most one processor.
#[test]
fn every_call_may_fail_at_each_use() {
    common::artifacts();
    let parts = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let start = |part| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "each_call_of_a_part_fails"]).env(PART, format!("{part}/{parts}"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut cases = 0;
    for part in (0..parts).map(start).collect::<Vec<_>>() {
        let ended = part.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success(), "{said}{}", String::from_utf8_lossy(&ended.stderr));
        let number = said.lines().find_map(|line| line.strip_suffix(" cases")?.split_whitespace().last()?.parse::<u32>().ok());
        cases += number.expect("the number of cases");
    }
    println!("{cases} cases");
    assert!(cases > common::cases(SOME).min(600) / 2, "only {cases} cases: the paths are not what this test thinks they are");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(120), failure_persistence: None, ..ProptestConfig::default() })]

    /// Undoing may fail too. An allocation may then stay paused against its will, with its contents intact.
    #[test]
    fn two_calls_fail(path in 0..PATHS.len(), calls in (0..CALLS.len(), 0..CALLS.len()), nth in (1u64..8, 1u64..8), times in 1u64..4) {
        let gpu = Gpu::take();
        warm_up(&gpu);
        let before = gpu.footprint();
        let faults = [
            Fault { call: CALLS[calls.0], nth: nth.0, code: 999, times },
            Fault { call: CALLS[calls.1], nth: nth.1, code: 2, times },
        ];
        run(&gpu, PATHS[path], &faults, None);
        check_nothing_left(&gpu, &before, &format!("{:?} with {faults:?}", PATHS[path]));
    }
}

/// How many threads may still be started, and how many were not.
static THREADS: Mutex<(usize, usize)> = Mutex::new((usize::MAX, 0));

type CreateThread = unsafe extern "C" fn(*mut libc::pthread_t, *const libc::c_void, *const libc::c_void, *mut libc::c_void) -> i32;

/// Takes the place of the system's function in this program, and refuses as where a limit is reached (`ulimit -u`).
///
/// # Safety
/// As for the system's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::c_void,
    start: *const libc::c_void,
    argument: *mut libc::c_void,
) -> i32 {
    let module_of = |address: *const libc::c_void| {
        // SAFETY: plain data, and writable.
        unsafe {
            let mut found: libc::Dl_info = std::mem::zeroed();
            libc::dladdr(address, &raw mut found);
            found.dli_fbase
        }
    };
    // The simulated driver's do not count.
    if module_of(start) == module_of((&raw const THREADS).cast()) {
        let mut threads = THREADS.lock().unwrap();
        if threads.0 == 0 {
            threads.1 += 1;
            return libc::EAGAIN;
        }
        threads.0 -= 1;
    }
    // SAFETY: the system's function has this type; the rest is the caller's promise.
    unsafe {
        let create = libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr());
        std::mem::transmute::<*mut libc::c_void, CreateThread>(create)(thread, attributes, start, argument)
    }
}

/// What waits for a quiet moment is not done before, and is done later.
#[test]
fn without_a_thread_nothing_is_freed_under_work() {
    struct Freed(Arc<AtomicBool>);
    impl Drop for Freed {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let _gpu = Gpu::take();
    let (stream, blocked) = (Stream::create(), common::Gate::new());
    stream.wait_for(&blocked);
    let is_freed = Arc::new(AtomicBool::new(false));
    let staging = Freed(Arc::clone(&is_freed));
    *THREADS.lock().unwrap() = (0, 0);
    quiet::soon(move || drop(staging));
    let (_, missing) = std::mem::replace(&mut *THREADS.lock().unwrap(), (usize::MAX, 0));
    assert_eq!((missing, is_freed.load(Ordering::SeqCst)), (1, false));
    quiet::soon(|| ());
    assert!(!is_freed.load(Ordering::SeqCst));
    blocked.open();
    assert_eq!(stream.synchronize(), 0);
    common::eventually("it is freed", || is_freed.load(Ordering::SeqCst));
}

#[test]
fn without_any_thread_a_transition_is_slower() {
    let gpu = Gpu::take();
    warm_up(&gpu);
    // The calling thread does what others would have helped with.
    let alone = |work: &dyn Fn() -> Result<Report, Error>| {
        *THREADS.lock().unwrap() = (0, 0);
        let done = work();
        let (_, missing) = std::mem::replace(&mut *THREADS.lock().unwrap(), (usize::MAX, 0));
        done.unwrap();
        assert!(missing > 0, "none was wanted");
    };
    for policy in [Policy::Host, Policy::Disk] {
        let address = malloc_tagged("t", Some(policy), 40 * MIB).unwrap();
        let contents = contents(8, 40 * MIB);
        assert_eq!(write(address, contents), 0);
        alone(&|| pause(&[]));
        alone(&|| resume(&[]));
        assert!(read(address, 40 * MIB).unwrap() == contents, "{policy:?}");
        assert_eq!(free(address), 0);
    }
}
