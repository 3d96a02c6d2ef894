//! Unused host memory stays ready for the next pause for a while, and is freed as soon as somebody needs it.

use crate::common::machine::Machine;
use crate::common::{self, Gpu, MIB, eventually, free, malloc_tagged, pattern, pause, read, resume, set_device, write};
use proptest::prelude::*;
use std::time::{Duration, Instant};
use vramctl_backup::{HOST_PIECE, set_host_keep};
use vramctl_core::memory::Memory;
use vramctl_model::{Bytes, Error, HostStatus, Policy};

/// Longer than any test.
const LONG: Option<Duration> = Some(Duration::from_secs(600));

fn host() -> HostStatus {
    vramctl_backup::settle();
    Memory::get().status().host
}

fn is_ready(bytes: usize) -> bool {
    host().ready_bytes == bytes as u64
}

fn no_thread_is_left() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    !names.into_iter().any(|name| name.trim() == "vramctl-release")
}

/// Frees the kept memory and restores the defaults when a test ends.
struct Kept;

impl Kept {
    fn for_long() -> Self {
        set_host_keep(LONG, Some(u64::MAX));
        Self
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        set_host_keep(None, Some(0));
        if !std::thread::panicking() {
            eventually("given back at the end", || is_ready(0) && no_thread_is_left());
        }
        set_host_keep(None, None);
    }
}

fn allocation(bytes: usize) -> u64 {
    let address = malloc_tagged("t", None, bytes).unwrap();
    assert_eq!(write(address, &pattern(5, bytes)), 0);
    address
}

#[test]
fn host_memory_is_kept_for_the_next_pause() {
    let gpu = Gpu::take();
    let address = allocation(40 * MIB);
    let pieces = (40 * MIB).div_ceil(HOST_PIECE);
    let _kept = Kept::for_long();
    // Everything else that a pause registers is the same each time.
    let registered = || {
        gpu.reset_counts();
        pause(&[]).unwrap();
        let calls = gpu.calls("cuMemHostRegister_v2");
        resume(&[]).unwrap();
        let status = host();
        let all = (pieces * HOST_PIECE) as u64;
        assert_eq!((status.used_bytes, status.ready_bytes, status.pinned_bytes), (0, all, all), "kept, and not in use");
        assert!(read(address, 40 * MIB).unwrap() == pattern(5, 40 * MIB));
        calls
    };
    let (first, second) = (registered(), registered());
    assert_eq!(first - second, pieces as u64);
    assert_eq!(free(address), 0);
    assert!(is_ready(pieces * HOST_PIECE), "it outlives its allocation");
}

/// A thread more than copying and registering need is in the program's way.
#[test]
fn a_resume_takes_the_threads_that_its_own_contents_need() {
    const ENTER_AND_LEAVE: u64 = 2;
    let gpu = Gpu::take();
    for (tag, bytes) in [("small", HOST_PIECE), ("large", 2 * HOST_PIECE)] {
        malloc_tagged(tag, None, bytes).unwrap();
    }
    let _kept = Kept::for_long();
    let suspend_and_awake = || {
        Memory::get().suspend(|| false).unwrap();
        Memory::get().awake();
    };
    // Each thread enters the relaxed capture mode once, and so does each registration.
    let threads_to_resume_small = || {
        gpu.reset_counts();
        assert_eq!(resume(&["small"]).unwrap().allocations, 1);
        gpu.calls("cuThreadExchangeStreamCaptureMode") / ENTER_AND_LEAVE - gpu.calls("cuMemHostRegister_v2")
    };
    pause(&[]).unwrap();
    let from_ready = threads_to_resume_small();
    pause(&["small"]).unwrap();
    resume(&["large"]).unwrap();
    suspend_and_awake();
    let registering = threads_to_resume_small();
    assert!(registering > from_ready, "{registering} {from_ready}");
    pause(&["small"]).unwrap();
    let status = host();
    assert!(status.pinned_bytes < status.ready_bytes, "not all that is spare is registered: {status:?}");
    assert_eq!(threads_to_resume_small(), from_ready, "what others' contents lay in does not count");

    pause(&["small"]).unwrap();
    suspend_and_awake();
    gpu.fail("cuMemHostRegister_v2", 1, 2, 1);
    threads_to_resume_small();
    gpu.clear_faults();
    pause(&["small"]).unwrap();
    suspend_and_awake();
    assert_eq!(threads_to_resume_small(), registering, "the driver has registered memory since it refused some");
}

#[test]
fn kept_host_memory_is_released_in_time_and_the_worker_ends() {
    let _gpu = Gpu::take();
    allocation(40 * MIB);
    set_host_keep(Some(Duration::from_millis(30)), Some(u64::MAX));
    common::cycle(&[]);
    eventually("given back in time", || is_ready(0) && no_thread_is_left());
    set_host_keep(Some(Duration::ZERO), Some(u64::MAX));
    common::cycle(&[]);
    assert!(is_ready(0), "kept for no time at all");
}

#[test]
fn kept_host_memory_is_released_when_memory_is_short() {
    let _gpu = Gpu::take();
    allocation(40 * MIB);
    let _kept = Kept::for_long();
    common::cycle(&[]);
    assert!(!is_ready(0));
    set_host_keep(LONG, Some(0));
    eventually("given back because memory is short", || is_ready(0));
}

/// Memory kept ready only saves time. It must not prevent a backup.
#[test]
fn kept_host_memory_makes_room_for_a_pause_under_the_cap() {
    let _gpu = Gpu::take();
    let _kept = Kept::for_long();
    let make = |tag: &str, bytes| malloc_tagged(tag, None, bytes).unwrap();
    make("first", 64 * MIB);
    make("between", 32 * MIB);
    set_device(1);
    make("large", 128 * MIB);
    set_device(0);
    pause(&["first"]).unwrap();
    pause(&["between"]).unwrap();
    resume(&["first"]).unwrap();
    assert!(is_ready(96 * MIB));
    // Too long for the memory kept ready, so it must go behind the memory in use.
    const { assert!((96 + 128) * MIB as u64 > common::HOST_CAP && (32 + 128) * MIB as u64 <= common::HOST_CAP) };
    pause(&["large"]).unwrap();
    assert!(is_ready((32 + 128) * MIB));
    resume(&[]).unwrap();
}

/// Who asks before a pause must be told what the pause then finds.
#[test]
fn a_dry_run_tells_what_a_pause_takes_and_what_there_is() {
    const ROOM: u64 = 100 << 20;
    let _gpu = Gpu::take();
    let make = |tag: &str, policy, mib| malloc_tagged(tag, policy, mib * MIB).unwrap();
    let plan = || {
        let room = Memory::get().plan_pause(&common::pausing(&[])).unwrap().0.host;
        (room.needed_bytes >> 20, room.available_bytes >> 20)
    };
    let _kept = Kept::for_long();
    set_host_keep(LONG, Some(ROOM));
    let all = [make(common::RETAINED_TAG, None, 40), make("d", Some(Policy::Discard), 6), make("file", Some(Policy::Disk), 4)];
    // With the file's staging memory, in whole pieces.
    assert_eq!(plan(), (64, 100));
    set_host_keep(LONG, Some(u64::MAX));
    assert_eq!(plan(), (64, common::HOST_CAP >> 20));
    pause(&[common::RETAINED_TAG]).unwrap();
    assert_eq!((host().used_bytes, host().ready_bytes), (40 << 20, 64 << 20));
    resume(&[]).unwrap();
    assert_eq!(plan(), (0, (common::HOST_CAP >> 20) - 64), "it goes over the retained copy, and the file's into the end of its last piece");
    set_host_keep(LONG, Some(ROOM));
    assert_eq!(plan(), (0, 100));
    assert_eq!(all.map(free), [0; 3]);
}

/// Contents of 16 MiB need a whole piece of host memory, whose size the cap does not reach. The messages are the same, with the next step.
#[test]
fn the_command_line_foretells_what_the_pause_says() {
    let machine = Machine::new();
    for (cap, next_step) in [("20M", "Start the program again with 12.00 MiB more"), ("1M", "Start the program again with 31.00 MiB more")]
    {
        let _rank = machine.engine_with("engine", |command| _ = command.env("VRAMCTL_HOST_CAP", cap));
        let foretold = machine.vramctl("pause engine --dry-run").expect(4, "", next_step);
        let refused = machine.vramctl("pause engine").expect(4, "", next_step);
        assert_eq!(foretold.err, refused.err);
        machine.vramctl("pause engine --discard --dry-run").expect(0, "0 B needed", "");
        machine.vramctl("pause engine --discard").expect(0, "", "");
    }
    let limited = machine.engine("limited");
    let limit = libc::rlimit { rlim_cur: 16 << 20, rlim_max: libc::RLIM_INFINITY };
    assert_eq!(unsafe { libc::prlimit(limited.pid() as i32, libc::RLIMIT_DATA, &raw const limit, std::ptr::null_mut()) }, 0);
    let foretold = machine.vramctl("pause limited --dry-run").expect(4, "", "ulimit -d");
    // There may be no room for the stack of a thread either. Those of threads that have ended are used again.
    let refused = common::patiently(|| match machine.vramctl("pause limited") {
        refused if refused.err.contains("could not start a thread") => Err(refused),
        refused => Ok(refused),
    });
    let refused = refused.unwrap_or_else(|refused| refused).expect(4, "", "ulimit -d");
    assert!(foretold.err.ends_with(&refused.err), "{} {}", foretold.err, refused.err);
    drop(limited);
    let _rank = machine.engine_with("engine", |command| _ = command.env("VRAMCTL_DISK_DIR", "/nowhere"));
    let remedy = "No such file or directory (os error 2). Create it (mkdir -m 700), or start the program with another VRAMCTL_DISK_DIR";
    let foretold = machine.vramctl("pause engine --backup disk --dry-run").expect(1, "", "/nowhere");
    let refused = machine.vramctl("pause engine --backup disk").expect(1, "", remedy);
    assert_eq!(foretold.err, refused.err);
}

/// Contents that go to files pass through host memory behind those that stay there, wherever that is. The driver refuses a copy across two
/// of its pieces.
#[test]
fn contents_in_files_pass_wherever_the_others_end() {
    let _gpu = Gpu::take();
    let _kept = Kept::for_long();
    for kept in [2, 18, 30] {
        let sizes = [("kept", None, kept * MIB), ("file", Some(Policy::Disk), 40 * MIB), ("file", Some(Policy::Disk), 6 * MIB)];
        let all = sizes.map(|(tag, policy, bytes)| {
            let (address, contents) = (malloc_tagged(tag, policy, bytes).unwrap(), common::pattern(bytes as u64, bytes));
            assert_eq!(common::write(address, &contents), 0);
            (address, contents)
        });
        common::cycle(&[]);
        for (address, contents) in all {
            assert!(common::read(address, contents.len()).unwrap() == contents, "{kept}");
            assert_eq!(free(address), 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(12), failure_persistence: None, ..ProptestConfig::default() })]

    /// Otherwise a script that asks first pauses half of what it should, or nothing.
    #[test]
    fn a_dry_run_says_yes_exactly_if_the_pause_succeeds(
        sizes in prop::collection::vec((1usize..40, 0usize..4), 1..6), retained in any::<bool>(), host in 0u64..260, disk in 0u64..60
    ) {
        let _gpu = Gpu::take();
        let _kept = Kept::for_long();
        let (mut host, mut disk) = (host << 20, disk << 20);
        // What is released does not add to what the test says is available, so nothing is kept.
        let set = |host, disk| {
            set_host_keep(Some(Duration::ZERO), Some(host));
            vramctl_backup::disk::set_available(Some(disk));
            vramctl_backup::settle();
        };
        let make = |&(mib, kind): &(usize, usize)| {
            let (tag, policy) = [("kept", None), (common::RETAINED_TAG, None), ("file", Some(Policy::Disk)), ("d", Some(Policy::Discard))][kind];
            malloc_tagged(tag, policy, mib * MIB).unwrap()
        };
        let before: Vec<_> = sizes[..1].iter().map(make).collect();
        if retained {
            set(u64::MAX, u64::MAX - 1);
            common::cycle(&[]);
        }
        let all: Vec<_> = before.into_iter().chain(sizes[1..].iter().map(make)).collect();
        let done = loop {
            set(host, disk);
            let (_, foretold) = Memory::get().plan_pause(&common::pausing(&[])).unwrap();
            let paused = pause(&[]).map(drop);
            let text = |result: &Result<(), Error>| result.as_ref().map_err(ToString::to_string).err();
            if text(&foretold) != text(&paused) {
                break Err(format!("foretold {:?}, then {:?}", text(&foretold), text(&paused)));
            }
            // What the message asks for must be enough.
            match paused {
                Err(Error::HostMemory { needed, available, capped: false }) => host += needed - available,
                Err(Error::Disk(why)) if disk == u64::MAX - 1 => break Err(why),
                Err(Error::Disk(why)) => {
                    let wanted: u64 = sizes.iter().filter(|(_, kind)| *kind == 2).map(|(mib, _)| (mib.next_multiple_of(2) * MIB) as u64).sum();
                    if !why.contains(&format!("Free {}", Bytes(wanted - disk))) {
                        break Err(why);
                    }
                    disk = wanted;
                }
                Err(Error::HostMemory { capped: true, .. }) | Ok(()) => break Ok(()),
                Err(other) => break Err(other.to_string()),
            }
        };
        vramctl_backup::disk::set_available(None);
        set_host_keep(LONG, None);
        let _ = resume(&[]);
        for address in all {
            free(address);
        }
        prop_assert_eq!(done, Ok(()));
    }
}

/// A lock on a byte of the socket directory, as if held by another process.
struct Lock(std::fs::File);

impl Lock {
    fn call(&self, command: i32, kind: i32, byte: i64) -> i32 {
        let whence = libc::SEEK_SET as i16;
        let mut lock = libc::flock64 { l_type: kind as i16, l_whence: whence, l_start: byte, l_len: 1, l_pid: 0 };
        assert_eq!(unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&self.0), command, &raw mut lock) }, 0);
        lock.l_type.into()
    }

    fn open() -> Self {
        Self(std::fs::File::open(vramctl_config::socket_directory()).unwrap())
    }

    fn take(byte: i64) -> Self {
        let lock = Self::open();
        lock.call(libc::F_OFD_SETLK, libc::F_RDLCK, byte);
        lock
    }

    fn is_taken(byte: i64) -> bool {
        Self::open().call(libc::F_OFD_GETLK, libc::F_WRLCK, byte) != libc::F_UNLCK
    }
}

const KEEPS: i64 = 0;
const NEEDS: i64 = 1;

/// The control thread creates the directory.
fn expect_directory() {
    eventually("the sockets' directory", || vramctl_config::socket_directory().is_dir());
}

#[test]
fn kept_host_memory_goes_to_another_process_that_needs_it() {
    let _gpu = Gpu::take();
    allocation(40 * MIB);
    expect_directory();
    let _kept = Kept::for_long();
    common::cycle(&[]);
    eventually("it says that it keeps some", || Lock::is_taken(KEEPS));
    assert!(!is_ready(0));
    let _needs = Lock::take(NEEDS);
    eventually("given to another", || is_ready(0) && !Lock::is_taken(KEEPS));
}

#[test]
fn a_pause_gets_host_memory_that_another_process_keeps() {
    let _gpu = Gpu::take();
    let address = allocation(40 * MIB);
    expect_directory();
    set_host_keep(None, Some(0));
    assert!(matches!(pause(&[]), Err(Error::HostMemory { capped: false, .. })), "nobody has any");
    let keeps = Lock::take(KEEPS);
    let other = std::thread::spawn(move || {
        eventually("it asks for it", || Lock::is_taken(NEEDS));
        set_host_keep(None, Some(u64::MAX));
        drop(keeps);
    });
    pause(&[]).unwrap();
    other.join().unwrap();
    assert!(!Lock::is_taken(NEEDS));
    resume(&[]).unwrap();
    assert!(read(address, 40 * MIB).unwrap() == pattern(5, 40 * MIB));
}

/// There is nothing left to wait for.
#[test]
fn a_pause_is_refused_as_soon_as_the_other_process_has_given_back_too_little() {
    let _gpu = Gpu::take();
    allocation(40 * MIB);
    expect_directory();
    set_host_keep(None, Some(0));
    let keeps = Lock::take(KEEPS);
    let other = std::thread::spawn(move || {
        eventually("it asks for it", || Lock::is_taken(NEEDS));
        drop(keeps);
        Instant::now()
    });
    assert!(matches!(pause(&[]), Err(Error::HostMemory { capped: false, .. })));
    assert!(other.join().unwrap().elapsed() < Duration::from_secs(5));
    set_host_keep(None, None);
}
