//! A process that another one checkpoints. States, codes and refusals are those of driver 580, where known.

// Every call here is a foreign function, with pointers to the test's own variables.
#![allow(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod common;
use common::{Gpu, Process, RestoreArgs, Scratch, command, isolated, prop};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::ptr;

const MACHINE: [(&str, &str); 2] = [("SIMGPU_MEMORY", "64M"), ("SIMGPU_DEVICES", "2")];
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const FAILED: u32 = 3;
const MIB: usize = 1 << 20;

/// The process to be checkpointed. It answers one line at a time.
struct Other(Child, BufReader<std::process::ChildStdout>);

impl Other {
    fn start() -> Self {
        let mut command = command("answers_another_process", &MACHINE);
        let directory = std::env::var("SIMGPU_DIR").unwrap();
        command.env("SIMGPU_DIR", directory).env("SIMGPU_CONTEXT_BYTES", "4M").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut other = Self(child, output);
        other.tell("hello");
        other.answer();
        other
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    fn tell(&mut self, request: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{request}").unwrap();
    }

    fn answer(&mut self) -> String {
        let answer = |line: std::io::Result<String>| line.unwrap().split_once("answer ").map(|(_, answer)| answer.to_owned());
        (&mut self.1).lines().find_map(answer).expect("an answer")
    }

    fn ask(&mut self, request: &str) -> String {
        self.tell(request);
        self.answer()
    }

    /// Whether it answers within a moment.
    fn has_answered(&self) -> bool {
        let mut waiting = libc::pollfd { fd: self.1.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        !self.1.buffer().is_empty() || unsafe { libc::poll(&raw mut waiting, 1, 30) } == 1
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the other process.
#[test]
#[ignore = "part of another test"]
fn answers_another_process() {
    if std::env::var_os("SIMGPU_DIR").is_none() {
        return;
    }
    let gpu = Gpu::start();
    let (mut memory, mut exported, mut location) = (0, 0, [1, 0]);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut handle = 0;
        let answer = match line.split_once(' ').unwrap_or((&line, "")) {
            ("hello", _) => 0,
            ("fill", byte) => {
                memory = gpu.map_new(16 * MIB);
                gpu.upload(memory, &vec![byte.parse().unwrap(); 16 * MIB]);
                0
            }
            ("read", _) => u64::from(gpu.download(memory, 16 * MIB)[16 * MIB - 1]),
            ("used", _) => {
                let (mut free, mut total) = (0, 0);
                ok!(gpu.cuMemGetInfo_v2(&raw mut free, &raw mut total));
                (total - free) as u64
            }
            ("device", _) => {
                let mut uuid = [0; 16];
                ok!(gpu.cuDeviceGetUuid_v2(&raw mut uuid, 0));
                u64::from(uuid[15] - b'0')
            }
            ("wait", _) => {
                unsafe { (gpu.simgpu_set_op_delay_ms)(300) };
                memory = gpu.alloc(MIB);
                ok!(gpu.cuMemsetD8Async(memory, 1, MIB, 0));
                ok!(gpu.cuCtxSynchronize());
                0
            }
            // From now on, memory that is exported is the host's.
            ("host", _) => {
                location = [3, 0];
                0
            }
            // A descriptor of memory at an address, which stays mapped.
            ("export", byte) => {
                ok!(gpu.cuMemCreate(&raw mut handle, 2 * MIB, &common::Prop { handle_types: 1, location, ..prop(0) }, 0));
                memory = if memory == 0 { gpu.reserve(2 * MIB) } else { memory };
                ok!(gpu.cuMemMap(memory, 2 * MIB, 0, handle, 0));
                gpu.access(memory, 2 * MIB, 3);
                gpu.upload(memory, &vec![byte.parse().unwrap(); 2 * MIB]);
                exported = handle;
                u64::from(gpu.descriptor_of(handle))
            }
            ("export_again", _) => u64::from(gpu.descriptor_of(exported)),
            ("release", _) => {
                ok!(gpu.cuMemUnmap(memory, 2 * MIB));
                ok!(gpu.cuMemRelease(exported));
                0
            }
            ("import", path) => {
                let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
                ok!(gpu.cuMemImportFromShareableHandle(&raw mut exported, file.as_raw_fd() as usize, 1));
                memory = if memory == 0 { gpu.reserve(2 * MIB) } else { memory };
                ok!(gpu.cuMemMap(memory, 2 * MIB, 0, exported, 0));
                gpu.access(memory, 2 * MIB, 3);
                memory
            }
            ("first", _) => u64::from(gpu.download(memory, 1)[0]),
            ("name", _) => {
                let mut name = [0_u8; 64];
                memory = gpu.alloc(MIB);
                ok!(gpu.cuIpcGetMemHandle(&raw mut name, memory));
                std::fs::write(name_file(), name).unwrap();
                0
            }
            ("open", _) => {
                let name = std::fs::read(name_file()).unwrap().try_into().unwrap();
                ok!(gpu.cuIpcOpenMemHandle_v2(&raw mut memory, common::Ipc(name), 1));
                0
            }
            other => panic!("{other:?}"),
        };
        println!("answer {answer}");
    }
}

/// Where a process leaves the name of its memory for another.
fn name_file() -> std::path::PathBuf {
    std::path::Path::new(&std::env::var_os("SIMGPU_DIR").unwrap()).join("name")
}

fn on_a_machine(test: &str, body: fn()) {
    if std::env::var_os("SIMGPU_DIR").is_some() {
        return body();
    }
    let scratch = Scratch::new(test);
    isolated(test, &[MACHINE[0], MACHINE[1], ("SIMGPU_DIR", scratch.text())], body);
}

impl Gpu {
    fn descriptor_of(&self, handle: u64) -> u32 {
        let (gpu, mut file) = (self, -1);
        ok!(gpu.cuMemExportToShareableHandle(&raw mut file, handle, 1, 0));
        file as u32
    }

    fn state(&self, pid: i32) -> u32 {
        let (gpu, mut state) = (self, 99);
        ok!(gpu.cuCheckpointProcessGetState(pid, &raw mut state));
        state
    }

    /// What NVML tells of a device: bytes in use, and the processes on it.
    fn seen(&self, index: u32) -> (u64, u32) {
        let (gpu, mut device, mut memory, mut count) = (self, 0, [0; 3], 8);
        ok!(gpu.nvmlInit_v2());
        ok!(gpu.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device));
        ok!(gpu.nvmlDeviceGetMemoryInfo(device, &raw mut memory));
        ok!(gpu.nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, [Process::default(); 8].as_mut_ptr()));
        (memory[2], count)
    }

    fn take(&self, pid: i32) {
        let gpu = self;
        ok!(gpu.cuCheckpointProcessLock(pid, ptr::null()));
        ok!(gpu.cuCheckpointProcessCheckpoint(pid, ptr::null()));
    }

    /// Locks a process for a moment; `false` if it does not get ready.
    fn lock_shortly(&self, pid: i32) -> bool {
        let gpu = self;
        match unsafe { (gpu.cuCheckpointProcessLock)(pid, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) } {
            600 => false,
            code => {
                assert_eq!(code, 0);
                ok!(gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
                true
            }
        }
    }

    fn restore(&self, pid: i32, pairs: &[(u8, u8)]) -> u32 {
        let uuid =
            |device: u8| -> [u8; 16] { [&b"sim"[..], &[b'u' + device], b"lated-gpu-0", &[b'0' + device]].concat().try_into().unwrap() };
        let pairs: Vec<_> = pairs.iter().map(|&(old, new)| [uuid(old), uuid(new)]).collect();
        let args = RestoreArgs { pairs: pairs.as_ptr(), count: pairs.len() as u32, reserved: [0; 44], reserved_too: 0 };
        unsafe { (self.cuCheckpointProcessRestore)(pid, &raw const args) }
    }
}

#[test]
fn a_checkpoint_takes_all_and_a_restore_gives_it_back() {
    on_a_machine("a_checkpoint_takes_all_and_a_restore_gives_it_back", || {
        let gpu = Gpu::load();
        let mut other = Other::start();
        let pid = other.pid();
        fails!(3, gpu.cuCheckpointProcessLock(pid, ptr::null()));
        ok!(gpu.cuInit(0));
        other.ask("fill 7");
        let before = gpu.seen(0);
        assert_eq!((before, gpu.state(pid)), ((20 << 20, 1), RUNNING));
        ok!(gpu.cuCheckpointProcessLock(pid, ptr::null()));
        assert_eq!((gpu.seen(0), gpu.state(pid)), (before, LOCKED));
        other.tell("read");
        assert!(!other.has_answered(), "a locked process's calls wait");
        ok!(gpu.cuCheckpointProcessCheckpoint(pid, ptr::null()));
        assert_eq!((gpu.seen(0), gpu.state(pid)), ((0, 0), CHECKPOINTED));
        ok!(gpu.cuCheckpointProcessRestore(pid, ptr::null()));
        assert_eq!((gpu.seen(0), gpu.state(pid)), (before, LOCKED));
        assert!(!other.has_answered());
        ok!(gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
        assert_eq!(other.answer(), "7");
        assert_eq!(gpu.state(pid), RUNNING);
    });
}

#[test]
fn calls_check_the_state_of_each_process() {
    on_a_machine("calls_check_the_state_of_each_process", || {
        let gpu = Gpu::load();
        ok!(gpu.cuInit(0));
        let other = Other::start();
        let pid = other.pid();
        fails!(401, gpu.cuCheckpointProcessCheckpoint(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessRestore(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
        fails!(1, gpu.cuCheckpointProcessLock(pid, &[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        ok!(gpu.cuCheckpointProcessLock(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessLock(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessRestore(pid, ptr::null()));
        ok!(gpu.cuCheckpointProcessCheckpoint(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
        let nobody = 1 << 22;
        fails!(1, gpu.cuCheckpointProcessLock(nobody, ptr::null()));
        fails!(1, gpu.cuCheckpointProcessGetState(-1, &mut 0));
        // A call that does not end in time keeps the lock away.
        let mut slow = Other::start();
        let is_kept_away = |slow: &mut Other| {
            slow.tell("wait");
            while !slow.has_answered() {
                if !gpu.lock_shortly(slow.pid()) {
                    return true;
                }
            }
            // It was over before anybody tried.
            slow.answer();
            false
        };
        while !is_kept_away(&mut slow) {}
        assert_eq!(gpu.state(slow.pid()), RUNNING);
        slow.answer();
        drop(other);
        fails!(1, gpu.cuCheckpointProcessGetState(pid, &mut 0));
    });
}

/// Such a process is not restored even when there is room (NVIDIA/cuda-checkpoint#44).
#[test]
fn a_restore_without_enough_memory_loses_the_process() {
    on_a_machine("a_restore_without_enough_memory_loses_the_process", || {
        let gpu = Gpu::start();
        let mut other = Other::start();
        let pid = other.pid();
        other.ask("fill 7");
        gpu.take(pid);
        let in_the_way = gpu.alloc(50 * MIB);
        fails!(2, gpu.cuCheckpointProcessRestore(pid, ptr::null()));
        assert_eq!(gpu.state(pid), CHECKPOINTED);
        ok!(gpu.cuMemFree_v2(in_the_way));
        fails!(304, gpu.cuCheckpointProcessRestore(pid, ptr::null()));
        fails!(401, gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
        assert_eq!(gpu.state(pid), CHECKPOINTED);
    });
}

/// What a descriptor of another process is opened as.
fn path_of(other: &Other, descriptor: &str) -> String {
    format!("import /proc/{}/fd/{descriptor}", other.pid())
}

/// Having exported memory is none; and whoever releases what it has imported, and imports it anew at the same address afterwards, comes back.
#[test]
fn imported_memory_makes_a_restore_fail_for_good() {
    on_a_machine("imported_memory_makes_a_restore_fail_for_good", || {
        imported_memory_is_lost(false);
        imported_memory_is_lost(true);
    });
}

/// `of_host`: the memory is in the host's. A checkpoint of the importer is as final.
fn imported_memory_is_lost(of_host: bool) {
    let gpu = Gpu::start();
    let (mut owner, mut importer) = (Other::start(), Other::start());
    if of_host {
        owner.ask("host");
    }
    let descriptor = owner.ask("export 7");
    let address = importer.ask(&path_of(&owner, &descriptor));
    for new_memory in [false, true] {
        importer.ask("release");
        gpu.take(owner.pid());
        gpu.take(importer.pid());
        assert_eq!(gpu.seen(0), (0, 0));
        for one in [&owner, &importer] {
            ok!(gpu.cuCheckpointProcessRestore(one.pid(), ptr::null()));
            ok!(gpu.cuCheckpointProcessUnlock(one.pid(), ptr::null()));
        }
        let again = if new_memory {
            owner.ask("release");
            owner.ask("export 9")
        } else {
            owner.ask("export_again")
        };
        assert_eq!(importer.ask(&path_of(&owner, &again)), address);
        let value = if new_memory { "9" } else { "7" };
        assert_eq!((owner.ask("first").as_str(), importer.ask("first").as_str()), (value, value));
    }
    gpu.take(owner.pid());
    gpu.take(importer.pid());
    ok!(gpu.cuCheckpointProcessRestore(owner.pid(), ptr::null()));
    fails!(801, gpu.cuCheckpointProcessRestore(importer.pid(), ptr::null()));
    assert_eq!((gpu.state(owner.pid()), gpu.state(importer.pid())), (LOCKED, FAILED));
    fails!(401, gpu.cuCheckpointProcessUnlock(importer.pid(), ptr::null()));
}

#[test]
fn memory_opened_by_name_makes_a_restore_fail_for_good() {
    on_a_machine("memory_opened_by_name_makes_a_restore_fail_for_good", || {
        let gpu = Gpu::start();
        let (mut owner, mut opener) = (Other::start(), Other::start());
        owner.ask("name");
        opener.ask("open");
        for one in [&owner, &opener] {
            gpu.take(one.pid());
            fails!(1, gpu.cuCheckpointProcessRestore(one.pid(), ptr::null()));
            assert_eq!(gpu.state(one.pid()), FAILED);
        }
    });
}

#[test]
fn a_restore_may_use_another_device() {
    on_a_machine("a_restore_may_use_another_device", || {
        let gpu = Gpu::start();
        let mut other = Other::start();
        let pid = other.pid();
        other.ask("fill 9");
        for round in 0..2_u8 {
            gpu.take(pid);
            assert_eq!(gpu.restore(pid, &[(0, 1)]), 1, "not all devices");
            assert_eq!(gpu.restore(pid, &[(0, 1), (1, 1)]), 1, "not one to one");
            assert_eq!(gpu.restore(pid, &[(0, 1), (1, 7)]), 1, "no such device");
            assert_eq!(gpu.state(pid), CHECKPOINTED);
            assert_eq!(gpu.restore(pid, &[(0, 1), (1, 0)]), 0);
            ok!(gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
            let there = u32::from(1 - round);
            assert_eq!((gpu.seen(there), gpu.seen(1 - there)), ((20 << 20, 1), (0, 0)));
            assert_eq!(
                (other.ask("read"), other.ask("used"), other.ask("device")),
                ("9".into(), (20 << 20).to_string(), there.to_string())
            );
        }
    });
}

#[test]
fn a_driver_of_cuda_12_4_does_not_checkpoint() {
    isolated("a_driver_of_cuda_12_4_does_not_checkpoint", &[("SIMGPU_CUDA", "12.4")], || {
        let (gpu, mut version, mut state) = (Gpu::start(), 0, 0);
        ok!(gpu.cuDriverGetVersion(&raw mut version));
        assert_eq!(version, 12040);
        fails!(500, gpu.cuCheckpointProcessGetState(std::process::id() as i32, &raw mut state));
    });
}

#[test]
fn a_driver_of_cuda_12_8_restores_only_where_it_was() {
    let scratch = Scratch::new("a_driver_of_cuda_12_8");
    let environment = [MACHINE[0], MACHINE[1], ("SIMGPU_CUDA", "12.8"), ("SIMGPU_DIR", scratch.text())];
    isolated("a_driver_of_cuda_12_8_restores_only_where_it_was", &environment, || {
        let (gpu, mut other) = (Gpu::load(), Other::start());
        ok!(gpu.cuInit(0));
        other.ask("fill 7");
        gpu.take(other.pid());
        assert_eq!(gpu.restore(other.pid(), &[(0, 1), (1, 0)]), 1);
        assert_eq!((gpu.state(other.pid()), gpu.restore(other.pid(), &[])), (CHECKPOINTED, 0));
        ok!(gpu.cuCheckpointProcessUnlock(other.pid(), ptr::null()));
        assert_eq!(other.ask("read"), "7");
    });
}

/// Not a test: opens the driver as it is told, and waits for the end of its input. A child inherits what it has.
#[test]
#[ignore = "part of another test"]
fn only_opens_the_driver() {
    let Ok(what) = std::env::var("OPENS") else { return };
    let gpu = Gpu::load();
    let open = |what: &str| match what {
        "cuda" => ok!(gpu.cuInit(0)),
        _ => ok!(gpu.nvmlInit_v2()),
    };
    let (before_fork, after_fork) = what.split_once(',').unwrap_or((&what, ""));
    open(before_fork);
    if !after_fork.is_empty() && unsafe { libc::fork() } == 0 {
        open(after_fork);
        println!("child {}", std::process::id());
        loop {
            unsafe { libc::pause() };
        }
    }
    println!("open");
    std::io::stdin().lines().for_each(drop);
    unsafe { libc::kill(0, libc::SIGKILL) };
}

/// How many of the driver's files a process has open.
fn driver_files(pid: i32) -> usize {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    files.filter(|file| file.to_string_lossy().contains("/dev/nvidia")).count()
}

#[test]
fn whoever_has_the_driver_open_can_be_checkpointed_and_a_fork_keeps_its_parents_files() {
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("not run: to make device nodes takes root");
    }
    on_a_machine("whoever_has_the_driver_open_can_be_checkpointed_and_a_fork_keeps_its_parents_files", || {
        let gpu = Gpu::start();
        // What is open, and of that what stays open: two GPUs, the control file, and CUDA's.
        for (opens, before, after) in [("cuda", 4, 0), ("nvml", 3, 0), ("nvml,nvml", 6, 3), ("nvml,cuda", 7, 3)] {
            let mut command = command("only_opens_the_driver", &MACHINE);
            command.env("SIMGPU_DIR", std::env::var("SIMGPU_DIR").unwrap()).env("SIMGPU_RESTORE_THREAD", "1").env("OPENS", opens);
            // It ends with its child.
            command.process_group(0);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
            let is_forked = opens.contains(',');
            let pid = if is_forked {
                said.find_map(|line| line.split_once("child ").map(|(_, pid)| pid.parse().unwrap())).unwrap()
            } else {
                assert!(said.any(|line| line.contains("open")));
                child.id() as i32
            };
            assert_eq!(driver_files(pid), before, "{opens}");
            gpu.take(pid);
            assert_eq!((gpu.state(pid), driver_files(pid)), (CHECKPOINTED, after), "{opens}");
            assert_eq!(gpu.restore(pid, &[]), 0, "{opens}");
            ok!(gpu.cuCheckpointProcessUnlock(pid, ptr::null()));
            assert_eq!((gpu.state(pid), driver_files(pid)), (RUNNING, before), "{opens}");
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    });
}
