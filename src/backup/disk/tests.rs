use super::faults::Fault;
use super::*;
use proptest::prelude::*;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{fs, iter, panic, ptr};
use vramctl_host::Unpoison;

const PAGE: usize = ALIGNMENT;

/// The tests count the whole process's threads, change its limits, and fork children that keep all locks, so only one runs at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unpoisoned()
}

/// Staging memory as callers provide it: page-aligned and not inherited by forked children.
struct Memory {
    address: NonNull<u8>,
    sizes: Vec<usize>,
}

impl Memory {
    fn new(sizes: &[usize]) -> Self {
        let bytes = sizes.iter().sum();
        // SAFETY: a fresh mapping that touches no other memory.
        let address = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let address = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(address, libc::MAP_FAILED);
            libc::madvise(address, bytes, libc::MADV_DONTFORK);
            address
        };
        Self { address: NonNull::new(address.cast()).unwrap(), sizes: sizes.to_vec() }
    }

    fn staging(&mut self) -> Vec<StagingPiece<'_>> {
        let starts = self.sizes.iter().scan(0, |start, bytes| Some(std::mem::replace(start, *start + bytes)));
        // SAFETY: separate parts of our own mapping, borrowed as long as the staging memory lives.
        starts.zip(&self.sizes).map(|(start, &bytes)| unsafe { StagingPiece::new(self.address.add(start), bytes) }).collect()
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: our own mapping, borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.sizes.iter().sum()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.sizes.iter().sum()) };
    }
}

/// Contents in which every page is different.
fn contents(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut word = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    iter::repeat_with(|| word().to_le_bytes()).take(bytes / 8).flatten().collect()
}

/// Whether a test's requests bypass the page cache (if the file system allows) or use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Cached,
}

const WAYS: [Way; 2] = [Way::Direct, Way::Cached];

fn spill_in(directory: &Path, bytes: usize, way: Way) -> Spill {
    let mut spill = Spill::create(directory, bytes as u64).unwrap();
    if way == Way::Cached {
        spill.direct = !file::set_direct(&spill.file().unwrap(), false);
    }
    spill
}

fn spill(bytes: usize, way: Way) -> Spill {
    spill_in(&std::env::temp_dir(), bytes, way)
}

fn write(spill: &Spill, memory: &mut Memory, offset: u64, from: &[u8]) -> Result<(), SpillError<&'static str>> {
    spill.write(&mut memory.staging(), offset, from.len() as u64, &mut |at, piece| {
        let at = (at - offset) as usize;
        piece.copy_from_slice(&from[at..at + piece.len()]);
        Ok(())
    })
}

fn read(spill: &Spill, memory: &mut Memory, offset: u64, bytes: usize) -> Result<Vec<u8>, SpillError<&'static str>> {
    let mut to = Vec::with_capacity(bytes);
    spill.read(&mut memory.staging(), offset, bytes as u64, &mut |at, piece| {
        assert_eq!(at, offset + to.len() as u64, "pieces come in order");
        to.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(to)
}

fn io_error<T: std::fmt::Debug>(result: Result<T, SpillError<&'static str>>) -> io::Error {
    match result {
        Err(SpillError::Io(error)) => error,
        other => panic!("an error of the file expected, got {other:?}"),
    }
}

/// Number of this process's threads that write or read files.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == engine::NAME).count()
}

/// Asserts that no worker is left. A joined thread may remain visible for a moment.
fn assert_idle() {
    let start = Instant::now();
    while threads() > 0 {
        assert!(start.elapsed() < Duration::from_secs(100), "{} left", threads());
        thread::sleep(Duration::from_millis(1));
    }
}

/// The file's pages in the page cache.
fn cached_pages(spill: &Spill) -> usize {
    let bytes = spill.bytes as usize;
    let mut pages = vec![0_u8; bytes / PAGE];
    // SAFETY: our own mapping of the file, which only the kernel inspects, with one byte for each of its pages.
    unsafe {
        let address = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, spill.file().unwrap().as_raw_fd(), 0);
        assert_ne!(address, libc::MAP_FAILED);
        assert_eq!(libc::mincore(address, bytes, pages.as_mut_ptr()), 0);
        libc::munmap(address, bytes);
    }
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// How many cases a random test has: `PROPTEST_CASES`, or else this many.
fn cases(otherwise: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(otherwise)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(48)))]

    /// Data written in any ranges, through any staging memory and with a kernel that delivers short, reads back in any other
    /// ranges.
    #[test]
    fn what_is_written_is_read(
        way in prop::sample::select(&WAYS[..]),
        written in prop::collection::vec(prop::collection::vec(1_usize..40, 1..20), 1..4),
        out in prop::collection::vec(1_usize..9, 1..24),
        back in prop::collection::vec(1_usize..9, 1..24),
        every in 1_usize..8,
        seed: u64,
    ) {
        let _alone = alone();
        let ranges: Vec<_> = written.iter().map(|pages| pages.iter().sum::<usize>() * PAGE).collect();
        let whole = contents(ranges.iter().sum(), seed);
        let mut spill = spill(whole.len(), way);
        let calls = AtomicUsize::new(0);
        spill.faults.request = Some(Box::new(move |_, _, bytes| match calls.fetch_add(1, Ordering::Relaxed) {
            call if call % every != 0 => Fault::None,
            call => [Fault::Short(PAGE), Fault::Short(PAGE + 17), Fault::Fail(libc::EINTR), Fault::Fail(libc::EAGAIN), Fault::Short(bytes / 2)]
                [if every == 1 { 0 } else { call % 5 }],
        }));
        let sizes = |pages: &[usize]| pages.iter().map(|pages| pages * PAGE).collect::<Vec<_>>();
        let mut memory = Memory::new(&sizes(&out));
        let mut at = 0;
        for bytes in ranges {
            write(&spill, &mut memory, at as u64, &whole[at..at + bytes]).unwrap();
            at += bytes;
        }
        let mut memory = Memory::new(&sizes(&back));
        prop_assert!(read(&spill, &mut memory, 0, whole.len()).unwrap() == whole);
        assert_idle();
    }
}

/// Whichever request fails, the call ends with that error, nothing stays in flight, and the file remains usable.
#[test]
fn a_failed_request_ends_the_call_and_leaves_nothing_in_flight() {
    let _alone = alone();
    let whole = contents(40 * 4 * PAGE, 7);
    for way in WAYS {
        for (code, kind) in [(libc::ENOSPC, io::ErrorKind::StorageFull), (libc::EIO, io::Error::from_raw_os_error(libc::EIO).kind())] {
            for failing in [0, 1, 17, 39] {
                let mut spill = spill(whole.len(), way);
                let broken = Arc::new(AtomicI32::new(code));
                let now = Arc::clone(&broken);
                let failing = failing * 4 * PAGE as u64;
                spill.faults.request = Some(Box::new(move |_, at, _| match now.load(Ordering::Relaxed) {
                    code if code != 0 && at == failing => Fault::Fail(code),
                    _ => Fault::None,
                }));
                let mut memory = Memory::new(&[4 * PAGE; 8]);
                let error = io_error(write(&spill, &mut memory, 0, &whole));
                assert_eq!(error.kind(), kind);
                assert!(error.to_string().contains(&format!("cannot write the backup file in {}", std::env::temp_dir().display())));
                assert!(error.to_string().contains(&format!("at byte {failing}")), "{error}");
                assert_idle();

                broken.store(0, Ordering::Relaxed);
                write(&spill, &mut memory, 0, &whole).unwrap();
                broken.store(code, Ordering::Relaxed);
                let error = io_error(read(&spill, &mut memory, 0, whole.len()));
                assert_eq!(error.kind(), kind);
                assert!(error.to_string().contains("cannot read the backup file"));
                // A read still in flight would show in the memory.
                memory.all().fill(0xa5);
                assert_idle();
                thread::sleep(Duration::from_millis(2));
                assert!(memory.all().iter().all(|byte| *byte == 0xa5));

                broken.store(0, Ordering::Relaxed);
                assert!(read(&spill, &mut memory, 0, whole.len()).unwrap() == whole, "the contents are still in the file");
            }
        }
    }
}

/// A truncated file, a drive that accepts nothing, a kernel that asks to retry forever.
#[test]
fn requests_that_never_get_anywhere_are_an_error() {
    let _alone = alone();
    for way in WAYS {
        for (fault, kind) in [
            (Fault::Nothing, io::ErrorKind::UnexpectedEof),
            (Fault::Short(17), io::ErrorKind::UnexpectedEof),
            (Fault::Fail(libc::EAGAIN), io::ErrorKind::WouldBlock),
        ] {
            let mut spill = spill(4 * PAGE, way);
            spill.faults.request = Some(Box::new(move |_, at, _| if at == 0 { fault } else { Fault::None }));
            let mut memory = Memory::new(&[PAGE; 2]);
            assert_eq!(io_error(read(&spill, &mut memory, 0, 4 * PAGE)).kind(), kind);
            assert_idle();
        }
    }
}

/// What the kernel itself refuses, not a fault that the tests put in its place.
#[test]
fn the_kernels_own_errors_are_reported() {
    let _alone = alone();
    for way in WAYS {
        let spill = spill(4 * PAGE, way);
        let mut memory = Memory::new(&[PAGE; 2]);
        // SAFETY: our own mapping, which nobody reads or writes meanwhile.
        unsafe { libc::mprotect(memory.address.as_ptr().cast(), 2 * PAGE, libc::PROT_NONE) };
        let error = io_error(read(&spill, &mut memory, 0, 4 * PAGE));
        assert!(error.to_string().contains("Bad address"), "{error}");
        // SAFETY: as above.
        unsafe { libc::mprotect(memory.address.as_ptr().cast(), 2 * PAGE, libc::PROT_READ | libc::PROT_WRITE) };
        // One page is missing, not two: of two requests in flight, the kernel may fail either first.
        spill.file().unwrap().set_len(3 * PAGE as u64).unwrap();
        let error = io_error(read(&spill, &mut memory, 0, 4 * PAGE));
        assert!(error.to_string().contains(&format!("no progress at byte {}", 3 * PAGE)), "{error}");
        assert_idle();
    }
}

/// A kernel that delivers little at a time may still be interrupted after that.
#[test]
fn patience_begins_again_with_each_progress() {
    let _alone = alone();
    let pages = engine::PATIENCE as usize + 2;
    let mut spill = spill(pages * PAGE, Way::Direct);
    let interrupted = AtomicUsize::new(0);
    spill.faults.request = Some(Box::new(move |_, at, _| {
        let is_last = at == (pages - 1) as u64 * PAGE as u64;
        if is_last && interrupted.fetch_add(1, Ordering::Relaxed) == 0 { Fault::Fail(libc::EINTR) } else { Fault::Short(PAGE) }
    }));
    read(&spill, &mut Memory::new(&[pages * PAGE]), 0, pages * PAGE).unwrap();
}

#[test]
fn the_closures_error_stays_apart_and_ends_the_call() {
    let _alone = alone();
    for way in WAYS {
        let spill = spill(64 * PAGE, way);
        let mut memory = Memory::new(&[PAGE; 4]);
        let mut calls = 0;
        let mut fail_at = |limit: usize| {
            calls += 1;
            if calls % limit == 0 { Err("the link is down") } else { Ok(()) }
        };
        let result = spill.write(&mut memory.staging(), 0, 64 * PAGE as u64, &mut |_, _| fail_at(9));
        assert!(matches!(result, Err(SpillError::Copy("the link is down"))));
        assert_idle();
        let result = spill.read(&mut memory.staging(), 0, 64 * PAGE as u64, &mut |_, _| fail_at(9));
        assert!(matches!(result, Err(SpillError::Copy("the link is down"))));
        assert_eq!(calls, 18);
        assert_idle();
    }
}

#[test]
fn a_panic_in_a_closure_leaves_nothing_in_flight() {
    let _alone = alone();
    for way in WAYS {
        let spill = spill(64 * PAGE, way);
        let mut memory = Memory::new(&[PAGE; 4]);
        let result = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            spill.read::<()>(&mut memory.staging(), 0, 64 * PAGE as u64, &mut |at, _| {
                if at == 5 * PAGE as u64 {
                    panic::resume_unwind(Box::new("a panic"));
                }
                Ok(())
            })
        }));
        assert!(result.is_err());
        assert_idle();
    }
}

#[test]
fn unaligned_direct_requests_are_refused_before_anything_happens() {
    let _alone = alone();
    let spill = spill(4 * PAGE, Way::Direct);
    let mut memory = Memory::new(&[PAGE, 0, PAGE + 8]);
    let no = |staging: &mut [StagingPiece], offset: usize, bytes: usize| {
        let error = io_error(spill.read(staging, offset as u64, bytes as u64, &mut |_, _| panic!("nothing is read")));
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    };
    no(&mut [], 0, PAGE);
    no(&mut memory.staging()[2..], 0, PAGE);
    no(&mut memory.staging()[1..2], 0, PAGE);
    no(&mut memory.staging()[..1], 8, PAGE);
    no(&mut memory.staging()[..1], 0, PAGE / 2);
    no(&mut memory.staging()[..1], 3 * PAGE, 2 * PAGE);
    no(&mut memory.staging()[..1], usize::MAX / PAGE * PAGE, PAGE);
    read(&spill, &mut Memory::new(&[PAGE]), 4 * PAGE as u64, 0).unwrap();
}

#[test]
fn the_page_cache_is_left_empty() {
    let _alone = alone();
    let whole = contents(4096 * PAGE, 5);
    for way in WAYS {
        let spill = spill(whole.len(), way);
        // SAFETY: plain data, and writable.
        let kind = unsafe {
            let mut statistics: libc::statfs64 = std::mem::zeroed();
            libc::fstatfs64(spill.file().unwrap().as_raw_fd(), &raw mut statistics);
            statistics.f_type
        };
        if kind == libc::TMPFS_MAGIC {
            return; // A tmpfs consists of page cache.
        }
        let mut memory = Memory::new(&[64 * PAGE; 8]);
        write(&spill, &mut memory, 0, &whole).unwrap();
        assert_eq!(cached_pages(&spill), 0, "{way:?}");
        assert!(read(&spill, &mut memory, 0, whole.len()).unwrap() == whole);
        assert_eq!(cached_pages(&spill), 0, "{way:?}");
    }
}

#[test]
fn the_file_has_no_name_and_its_space_is_set_aside() {
    let directory = tempfile::tempdir().unwrap();
    // The last takes more than one request to set aside.
    for bytes in [0, PAGE, 64 << 20, 257 << 20] {
        let spill = spill_in(directory.path(), bytes, Way::Direct);
        let metadata = spill.file().unwrap().metadata().unwrap();
        assert_eq!((metadata.nlink(), metadata.len(), metadata.mode() & 0o077), (0, bytes as u64, 0));
        assert!(metadata.blocks() * 512 >= bytes as u64);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        // SAFETY: the call touches no memory.
        assert_eq!(unsafe { libc::fcntl(spill.file().unwrap().as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
    }
    let named = file::open_and_unlink(directory.path()).unwrap();
    assert_eq!(named.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Whether requests on this file bypass the page cache, as the kernel sees it.
fn is_direct(file: &File) -> bool {
    // SAFETY: the call touches no memory.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) & libc::O_DIRECT != 0 }
}

/// The page cache is host memory, which the policy `disk` is to save.
#[test]
fn requests_bypass_the_page_cache_where_the_file_system_lets_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = fs::OpenOptions::new();
    let can = options.write(true).create(true).custom_flags(libc::O_DIRECT).open(directory.path().join("probe")).is_ok();
    let flags = |bytes| {
        let spill = spill_in(directory.path(), bytes, Way::Direct);
        let file = spill.file().unwrap();
        // SAFETY: the call touches no memory.
        let status = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        (spill.direct, is_direct(&file), status & (libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK))
    };
    assert_eq!(flags(PAGE), (can, can, libc::O_RDWR));
    assert_eq!(flags(0), (false, false, libc::O_RDWR), "nothing to try it with");
    let spill = spill(PAGE, Way::Cached);
    assert!(!spill.direct && !is_direct(&spill.file().unwrap()));
}

#[test]
fn a_copied_descriptor_does_not_keep_the_space() {
    let spill = spill(1 << 20, Way::Direct);
    let copy = spill.file().unwrap().try_clone().unwrap();
    drop(spill);
    assert_eq!(copy.metadata().unwrap().len(), 0);
}

/// Otherwise the child of a killed program would keep the space for as long as it lives.
#[test]
fn a_forked_child_has_no_copy() {
    let _alone = alone();
    let spill = spill(1 << 20, Way::Direct);
    let descriptor = spill.file().unwrap().as_raw_fd();
    // SAFETY: the child only makes calls that are safe after a fork of a threaded program.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(libc::fcntl(descriptor, libc::F_GETFD) != -1)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child and writes to `status`.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has it");
    assert_eq!(spill.file().unwrap().metadata().unwrap().len(), 1 << 20, "the parent still has it");
}

/// A daemonizing program closes descriptors it does not know. A file that then gets the number is its own, and must be
/// neither read nor truncated.
#[test]
fn the_programs_file_under_the_same_number_is_left_alone() {
    let _alone = alone();
    for way in WAYS {
        let spill = spill(8 * PAGE, way);
        let mut memory = Memory::new(&[PAGE; 2]);
        write(&spill, &mut memory, 0, &contents(8 * PAGE, 1)).unwrap();
        let programs = tempfile::tempfile().unwrap();
        programs.set_len(16 * PAGE as u64).unwrap();
        let number = spill.file().unwrap().as_raw_fd();
        // SAFETY: replaces our descriptor, as a program that closed it would.
        assert_eq!(unsafe { libc::dup2(programs.as_raw_fd(), number) }, number);
        let error = io_error(read(&spill, &mut memory, 0, 8 * PAGE));
        assert!(error.to_string().contains("closed a descriptor"), "{way:?}: {error}");
        drop(spill);
        assert_eq!(programs.metadata().unwrap().len(), 16 * PAGE as u64, "{way:?}");
        // SAFETY: the program's descriptor, and it is open.
        assert_eq!(unsafe { libc::close(number) }, 0, "{way:?}: it was closed");
    }
}

#[test]
fn an_unusable_directory_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for directory in [Path::new("/nowhere/to/be/found"), file.path(), Path::new("/proc/self")] {
        let error = Spill::create(directory, 1 << 20).unwrap_err();
        assert!(error.to_string().contains(&directory.display().to_string()), "{error}");
    }
}

/// Somebody looks into this directory, and files of others are in it.
#[test]
fn a_named_file_that_could_not_be_made_leaves_no_name_and_takes_none_away() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let names = || fs::read_dir(directory.path()).unwrap().flatten().map(|entry| entry.file_name()).collect::<Vec<_>>();
    assert!(Spill::create_named(directory.path(), 1, 1 << 50).is_err());
    assert!(names().is_empty());
    let first = Spill::create_named(directory.path(), 1, PAGE as u64).unwrap();
    let name = names();
    let error = Spill::create_named(directory.path(), 1, PAGE as u64).unwrap_err();
    assert_eq!((error.kind(), names()), (io::ErrorKind::AlreadyExists, name));
    drop(first);
    assert!(names().is_empty());
    let error = Spill::create_named(&directory.path().join("nowhere"), 1, PAGE as u64).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_full_disk_is_known_at_once_with_what_is_needed_and_available() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let error = Spill::create(directory.path(), 1 << 50).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let text = error.to_string();
    let available = text.strip_prefix(&format!("too little space in {} for a backup: 1048576.00 GiB needed, ", directory.path().display()));
    assert!(available.is_some_and(|text| text.contains(" available. Free ") && !text.starts_with("0 ")), "{text}");
    // Others need the space meanwhile.
    let file = tempfile::tempfile_in(directory.path()).unwrap();
    assert!(file::reserve(&file, directory.path(), 1 << 50).is_err());
    assert_eq!(file.metadata().unwrap().blocks(), 0, "the disk was filled up before the error");
}

/// Two backups at once may each take what the other needs. The first to give up leaves room for the other.
#[test]
fn space_that_others_let_go_is_taken() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let file = tempfile::tempfile_in(directory.path()).unwrap();
    // Enough by what the file system says, each time.
    super::set_available(Some(1 << 30));
    let reserve = |refusals: usize| {
        let mut left = refusals;
        file::reserve_by(&file, directory.path(), 1 << 30, |_, at, _| {
            let is_full = at >= 512 << 20 && left > 0;
            left -= usize::from(is_full);
            if is_full { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
        })
    };
    let (once, always) = (reserve(1), reserve(usize::MAX));
    super::set_available(None);
    assert!(once.is_ok(), "{once:?}");
    let text = always.unwrap_err().to_string();
    assert!(text.contains("1.00 GiB needed, 512.00 MiB available. Free 512.00 MiB"), "{text}");
}

/// Beyond the process's limit, the kernel would kill it.
#[test]
fn the_limit_of_file_sizes_is_an_error_and_no_signal() {
    const LIMIT: u64 = 1 << 40;
    let _alone = alone();
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structures are readable and writable. No other test uses a file as large as the limit.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) };
    let lower = libc::rlimit { rlim_cur: LIMIT, ..before };
    // SAFETY: as above.
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const lower) };
    let error = Spill::create(&std::env::temp_dir(), LIMIT + 1).unwrap_err();
    // SAFETY: as above.
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const before) };
    assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
}

/// `/proc` has no unnamed files, reports no space, and reserves none. A backup's directory may be of any such kind.
#[test]
fn what_a_file_system_lacks_is_done_without() {
    let proc = Path::new("/proc");
    let error = Spill::create(proc, PAGE as u64).unwrap_err();
    assert_ne!(error.kind(), io::ErrorKind::Unsupported, "a named file was not tried: {error}");
    let file = File::open("/proc/self/status").unwrap();
    assert_ne!(file::reserve(&file, proc, PAGE as u64).unwrap_err().kind(), io::ErrorKind::StorageFull);
    // The answer of one that cannot write a part back.
    assert!(file::leave_no_cache(&file, u64::MAX, 1).is_ok());
}
