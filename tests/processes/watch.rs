//! The watch: when little of a device is free, the library logs who uses it, once per fall. Real programs on a simulated machine.

use crate::common::eventually;
use crate::common::machine::{Machine, Program, Ran};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

const GPU: &str = "GPU-73696d75-6c61-7465-642d-6770752d3030";

/// Long enough for ten samples.
const A_WHILE: Duration = Duration::from_millis(500);

struct Watched {
    machine: Machine,
}

impl Watched {
    fn new() -> Self {
        Self { machine: Machine::new() }
    }

    fn log(&self, name: &str) -> PathBuf {
        self.machine.folder.path().join(name)
    }

    /// An engine of 16 MiB whose log is kept.
    fn engine(&self, name: &str, watch: &str) -> Program {
        let log = File::create(self.log(name)).unwrap();
        self.machine.engine_with(name, |command| {
            command.env("VRAMCTL_WATCH", watch).stderr(log.try_clone().unwrap());
        })
    }

    /// Another program that takes most of the 1 GiB, until it is dropped.
    fn hog(&self) -> Program {
        self.machine.hog(0, 900)
    }

    fn falls(&self, name: &str) -> Vec<String> {
        let log = fs::read_to_string(self.log(name)).unwrap();
        log.lines().filter(|line| line.contains("is free on GPU 0 (GPU-")).map(str::to_owned).collect()
    }

    #[track_caller]
    fn expect(&self, name: &str, count: usize) -> Vec<String> {
        eventually("logged", || self.falls(name).len() >= count);
        thread::sleep(A_WHILE);
        let falls = self.falls(name);
        assert_eq!(falls.len(), count, "{falls:?}");
        falls
    }

    /// Whether some process asks the driver on behalf of all.
    fn is_asked_for(&self) -> bool {
        let path = self.machine.folder.path().join(format!("sockets/free-{GPU}"));
        let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { return false };
        let (l_type, l_whence) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
        let mut lock = libc::flock64 { l_type, l_whence, l_start: 0, l_len: 1, l_pid: 0 };
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) }, 0);
        lock.l_type != libc::F_UNLCK as libc::c_short
    }

    #[track_caller]
    fn until(&self, wanted: bool) {
        eventually("asked, or not", || self.is_asked_for() == wanted);
    }

    /// Waits until the process that asks has seen that this much is free again.
    #[track_caller]
    fn recovers(&self, enough: u64) {
        let path = self.machine.folder.path().join(format!("sockets/free-{GPU}"));
        let mut seen = BTreeSet::new();
        // With the second sample it is done with the first one.
        eventually("two samples with enough", || {
            let words: Vec<_> = fs::read(&path).unwrap().chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
            if let [free, time, _] = words[..]
                && free > enough
            {
                seen.insert(time);
            }
            seen.len() > 1
        });
    }
}

#[test]
fn each_fall_is_logged_once_with_the_owners() {
    let watched = Watched::new();
    let mut engine = watched.engine("engine", "256M");
    watched.until(true);
    watched.expect("engine", 0);
    for fall in 1..=2 {
        let hog = watched.hog();
        let line = watched.expect("engine", fall).pop().unwrap();
        for part in [
            "of 1.00 GiB",
            "less than 256.00 MiB",
            "GPU 0 (GPU-73696d75)",
            "default: 22.00 MiB",
            "the driver and other processes: 9",
            "vramctl gpus",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        drop(hog);
        watched.recovers(512 << 20);
    }
    engine.verify();
    assert_eq!(engine.ask("quit"), "bye");
    assert!(engine.ended().success());
    assert!(!watched.is_asked_for());
}

/// A fall is often a resume's own: what is on its way back must not look like somebody else's.
#[test]
fn a_fall_in_the_middle_of_a_resume_names_what_is_resumed() {
    let watched = Watched::new();
    let log = File::create(watched.log("engine")).unwrap();
    let mut engine = watched.machine.start_with("engine", "engine", |command| {
        // The copy back takes a second.
        command.args(["--weights-mib", "200", "--kv-mib", "8"]).env("SIMGPU_LINK", "200M");
        command.env("VRAMCTL_WATCH", "850M").stderr(log.try_clone().unwrap());
    });
    watched.expect("engine", 1);
    watched.machine.vramctl("pause --name engine").expect(0, "paused", "");
    watched.recovers(940 << 20);
    watched.machine.vramctl("resume --name engine").expect(0, "resumed", "");
    let line = watched.expect("engine", 2).pop().unwrap();
    assert!(line.contains("default: 222.00 MiB; the driver and other processes: 266.00 KiB."), "{line}");
    engine.verify();
}

#[test]
fn a_program_that_takes_all_memory_itself_logs_it_and_so_do_the_others() {
    let watched = Watched::new();
    let _other = watched.engine("other", "256M");
    let log = File::create(watched.log("large")).unwrap();
    let large = |command: &mut std::process::Command| {
        command.args(["--weights-mib", "8", "--kv-mib", "900"]);
        command.env("VRAMCTL_WATCH", "256M").stderr(log.try_clone().unwrap());
    };
    let _large = watched.machine.start_with("large", "engine", large);
    assert!(watched.expect("large", 1)[0].contains("default: 9"));
    assert!(watched.expect("other", 1)[0].contains("default: 22"));
}

/// The first process that watches asks the driver on behalf of all.
#[test]
fn another_process_takes_over_when_the_asking_one_is_gone() {
    for is_killed in [true, false] {
        let watched = Watched::new();
        let mut first = watched.engine("first", "256M");
        watched.until(true);
        let mut second = watched.engine("second", "256M");
        if is_killed {
            first.kill();
        } else {
            first.stop();
        }
        let _hog = watched.hog();
        watched.expect("second", 1);
        second.verify();
    }
}

#[test]
fn the_watch_is_set_from_outside_and_ended() {
    let watched = Watched::new();
    let engine = watched.engine("engine", "");
    let hog = watched.hog();
    let watch = |arguments: &str| watched.machine.vramctl(&format!("watch engine {arguments}")).expect(0, "", "").out;
    assert!(watch("").contains("does not watch"));
    watched.expect("engine", 0);
    assert!(watch("--below 256M --trim").contains("logs when less than 256.00 MiB is free, and has its allocator return"));
    watched.expect("engine", 1);
    assert!(watch("--off").contains("does not watch"));
    watched.until(false);
    drop(hog);
    let _hog = watched.hog();
    watched.expect("engine", 1);
    let told = watched.machine.connect(&engine).ask(&json!({"request": "watch", "below_bytes": 512 << 20}));
    assert_eq!(told, json!({"reply": "watch", "below_bytes": 512 << 20, "trim": false}));
    watched.expect("engine", 2);
    watched.machine.vramctl("watch engine --below much").expect(2, "", "not a size: give bytes, or a number with K, M, G, ");
}

/// Its driver calls would wait, and whoever checkpoints it waits for those in flight.
#[test]
fn a_suspended_process_asks_nothing_and_resumes_watching_afterwards() {
    let watched = Watched::new();
    let mut engine = watched.engine("engine", "256M");
    watched.until(true);
    watched.machine.vramctl("suspend").expect(0, "suspended engine", "");
    watched.until(false);
    let hog = watched.hog();
    watched.expect("engine", 0);
    drop(hog);
    watched.machine.vramctl("resume").expect(0, "", "");
    watched.until(true);
    engine.verify();
    let _hog = watched.hog();
    watched.expect("engine", 1);
}

/// A look at a device is several driver calls. The suspend comes in the middle of one of them.
#[test]
fn a_suspend_in_the_middle_of_a_look_leaves_the_asking_to_others() {
    const SCRIPT: &str = "
import ctypes, time
cuda = ctypes.CDLL('libcuda.so.1')
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4 << 20)) == 0
assert cuda.simgpu_slow_down(b'cuMemGetInfo_v2', ctypes.c_uint64(1000)) == 0
print('ready', flush=True)
time.sleep(600)
";
    let watched = Watched::new();
    let mut command = watched.machine.cli(&["run", "--name", "slow", "--no-python", "--", "python3", "-c", SCRIPT]);
    let _slow = Program::ready(command.env("VRAMCTL_WATCH", "256M"));
    watched.until(true);
    watched.machine.vramctl("suspend").expect(0, "suspended slow", "");
    watched.until(false);
    watched.machine.vramctl("resume").expect(0, "", "");
    watched.until(true);
}

#[test]
fn without_a_watch_there_is_no_thread_and_no_file() {
    let watched = Watched::new();
    let engine = watched.engine("engine", "");
    let threads = fs::read_dir(format!("/proc/{}/task", engine.pid())).unwrap();
    // One may end meanwhile.
    let names: Vec<_> = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("comm")).ok()).collect();
    assert!(!names.is_empty() && names.iter().all(|name| name.trim() != "vramctl-watch"), "{names:?}");
    assert!(!Path::new(&watched.machine.folder.path().join(format!("sockets/free-{GPU}"))).exists());
}

/// Across a move, the devices are other GPUs: what is told of the old one would be the new one's.
#[test]
fn a_process_that_has_moved_watches_its_new_gpu() {
    let watched = Watched::new();
    let mut engine = watched.machine.engine_with("engine", |command| {
        command.env("VRAMCTL_WATCH", "64M").env("SIMGPU_DEVICES", "2");
    });
    watched.until(true);
    Ran::of(watched.machine.cli(&["move", "engine", "--to", "1"]).env("SIMGPU_DEVICES", "2")).expect(0, "moved engine", "");
    let gauges = || -> Vec<_> {
        let files = fs::read_dir(format!("/proc/{}/fd", engine.pid())).unwrap();
        let names = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).filter_map(|path| Some(path.file_name()?.to_owned()));
        names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.starts_with("free-GPU-")).collect()
    };
    eventually("another gauge", || matches!(&gauges()[..], [gauge] if *gauge != format!("free-{GPU}")));
    engine.verify();
}

/// A thread of the library's that is there before the driver would outlive it.
#[test]
fn a_watch_that_is_set_before_the_first_allocation_ends_before_the_driver() {
    const SCRIPT: &str = "
import ctypes, time
assert ctypes.CDLL(None).vramctl_set_watch(ctypes.c_uint64(1 << 20), 0) == 0
cuda = ctypes.CDLL('libcuda.so.1')
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4 << 20)) == 0
time.sleep(0.2)
";
    let machine = Machine::new();
    let mut command = machine.cli(&["run", "--no-python", "--", "python3", "-c", SCRIPT]);
    Ran::of(command.env("SIMGPU_END_MS", "300")).expect(0, "", "");
}
