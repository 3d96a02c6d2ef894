//! Processes that leave the GPU entirely and come back: real programs on a simulated machine, and the command line.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::Gpu;
use common::machine::{Machine, Program, Ran};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::HOST_PIECE;
use vramctl_core::memory::Memory;
use vramctl_host::exit;
use vramctl_intercept::{entries, hooks};
use vramctl_model::{Error, Kind, ObstacleKind, Policy, Report};

const MIB: u64 = 1 << 20;
/// A process's memory apart from its allocations.
const CONTEXT: u64 = 32 * MIB;
/// How long a process waits for a request.
const PATIENCE: Duration = Duration::from_secs(30);

impl Machine {
    /// GPUs of 256 MiB, on which contexts take some of it.
    fn with_gpus(gpus: u32) -> Self {
        Self { context_bytes: CONTEXT, engine_mib: [32, 16], ..Self::with(gpus, "256M") }
    }

    /// Two GPUs, and an engine on the first.
    fn with_an_engine() -> (Self, Program) {
        let machine = Self::with_gpus(2);
        let engine = machine.engine("engine");
        (machine, engine)
    }

    /// With faults of the driver in the command line's own process.
    fn vramctl_failing(&self, faults: &str, arguments: &str) -> Ran {
        Ran::of(self.cli(arguments).env("SIMGPU_FAIL", faults))
    }

    /// Stops the command line's own process at a call of the driver's (`FUNCTION:USE:stop-…`) for something to happen meanwhile. `None`
    /// if it does not make the call.
    fn vramctl_meanwhile(&self, stop: &str, arguments: &str, meanwhile: impl FnOnce()) -> Option<Ran> {
        let mut child = self.cli(arguments).env("SIMGPU_FAIL", stop).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut state: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // A process that has ended is left for the `wait` below.
        let what = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
        assert_eq!(unsafe { libc::waitid(libc::P_PID, child.id(), &raw mut state, what) }, 0);
        let has_stopped = state.si_code == libc::CLD_STOPPED;
        if has_stopped {
            meanwhile();
            unsafe { libc::kill(child.id() as i32, libc::SIGCONT) };
        }
        common::eventually("the command ends", || child.try_wait().unwrap().is_some());
        let said = Ran::end_of(child);
        has_stopped.then_some(said)
    }

    /// Another tool has the driver do this to a process.
    fn call_for(&self, pid: u32, calls: &[&str]) {
        let calls: Vec<_> = calls.iter().map(|call| format!("assert cuda.cuCheckpointProcess{call}({pid}, None) == 0")).collect();
        let program = format!("import ctypes\ncuda = ctypes.CDLL('libcuda.so.1')\nassert cuda.cuInit(0) == 0\n{}", calls.join("\n"));
        assert!(self.command("python3", &["-c", &program]).status().unwrap().success());
    }

    /// Resumes the engine, checks that it is as before, and moves it back to the first GPU if it is on the second.
    #[track_caller]
    fn comes_back(&self, engine: &mut Program, before: &[(u64, usize)], about: &str) {
        self.vramctl("resume").expect(0, "engine", "");
        let mut gpus = self.gpus();
        let has_moved = gpus[1].1 == 1;
        gpus.rotate_left(has_moved.into());
        assert_eq!(gpus, before, "{about}");
        engine.is_well();
        if has_moved {
            self.vramctl("move engine --to 0").expect(0, "moved", "");
        }
    }

    /// Runs the commands that a message tells after these words, in this order.
    #[track_caller]
    fn follow(&self, words: &str, said: &Ran) {
        let text = said.text();
        let (_, advice) = text.split_once(words).unwrap_or_else(|| panic!("{words:?} is not in {}", said.text()));
        let commands: Vec<_> = advice.split('`').filter_map(|word| word.strip_prefix("vramctl ")).collect();
        assert!(!commands.is_empty(), "{}", said.text());
        for command in commands {
            let done = self.vramctl(command);
            assert_eq!(done.code, Some(0), "{command}: {} after {}", done.text(), said.text());
        }
    }
}

impl Program {
    /// How often `polls` has made its call, of which none may have failed.
    #[track_caller]
    fn count(&mut self) -> u64 {
        let counts = self.ask("");
        let (made, failed) = counts.split_once(' ').unwrap_or_else(|| panic!("{counts:?}"));
        assert_eq!(failed, "0");
        made.parse().unwrap()
    }

    /// It works, its memory is as it was, and it answers as any other engine.
    #[track_caller]
    fn is_well(&mut self) {
        /// Each check has another token.
        static TOKEN: AtomicU32 = AtomicU32::new(1);
        let verified = self.ask("verify");
        assert!(verified.contains("weights ok") && verified.contains("kv ok"), "{verified}");
        let answer = self.ask(&format!("generate {}", TOKEN.fetch_add(1, Ordering::Relaxed)));
        assert!(answer.starts_with("answer"), "{answer}");
    }
}

#[test]
fn a_suspended_process_has_nothing_on_the_gpu_and_comes_back() {
    let (machine, mut engine) = Machine::with_an_engine();
    engine.is_well();
    let before = machine.gpus();
    assert!(before[0].0 > CONTEXT && before[0].1 == 1, "{before:?}");
    for round in 0..3 {
        machine.vramctl("suspend engine").expect(0, "suspended engine", "");
        assert_eq!(machine.gpus(), [(0, 0), (0, 0)]);
        let status = machine.status("engine");
        let process = &status["processes"][0];
        let needed = process["suspended"][0]["bytes"].as_u64().unwrap();
        assert_eq!(needed, before[0].0 - process["tags"][0]["bytes"].as_u64().unwrap(), "{status}");
        assert_eq!(process["tags"][0]["state"], "paused", "{status}");
        machine.vramctl("ps").expect(0, "suspended", "");
        machine.vramctl("pause").expect(0, "nothing to do: default of engine", "");
        machine.vramctl("suspend --dry-run").expect(0, "is suspended already", "");
        machine.vramctl("set-tag x").expect(5, "", "suspended");
        machine.vramctl("suspend --name engine").expect(0, "already suspended", "");
        engine.tell("verify");
        if round == 0 {
            machine.vramctl("resume").expect(0, "resumed default of engine", "");
        } else {
            let told = machine.vramctl("resume --json").json();
            let process = &told["processes"][0];
            assert_eq!(process["restored"]["bytes"], needed, "{told}");
            let stages = process["restored"]["stages"].as_object().unwrap();
            assert_eq!(stages.keys().collect::<Vec<_>>(), ["restore", "room", "unlock"], "{told}");
            assert!(process["report"]["stages"]["map"].is_number(), "{told}");
        }
        engine.expect("verify");
        assert_eq!(machine.gpus(), before);
        engine.is_well();
    }
    assert!(machine.status("engine")["processes"][0].get("suspended").is_none());
}

#[test]
fn a_resume_without_room_changes_nothing_and_waits_if_told() {
    let (machine, mut engine) = Machine::with_an_engine();
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let hog = machine.hog(0, 180);
    let short = machine.vramctl("resume");
    short.has(4, "", "nothing is lost");
    assert!(short.text().contains("needed") && short.text().contains("(hog) "), "{}", short.text());
    assert_eq!(machine.gpus()[0].1, 1, "the hog");
    let waiting = machine.cli("resume --timeout 60").stdout(Stdio::null()).spawn();
    thread::sleep(Duration::from_millis(50));
    drop(hog);
    assert!(waiting.unwrap().wait().unwrap().success());
    engine.is_well();
}

/// A process closes a connection that is not used for a while, and a step of a command may take longer.
#[test]
fn a_step_may_take_longer_than_a_process_waits_for_a_request() {
    // The kernel may end so long a wait an eighth late.
    let long = PATIENCE * 5 / 4;
    let calls = [
        ("the checkpoint", "cuCheckpointProcessCheckpoint:1:stop-after", "move engine --to 1", None),
        ("the restore", "cuCheckpointProcessRestore:1:stop-after", "resume", Some("suspend engine")),
    ];
    thread::scope(|scope| {
        for (about, stop, command, first) in calls {
            scope.spawn(move || {
                let (machine, mut engine) = Machine::with_an_engine();
                let before = machine.gpus();
                if let Some(first) = first {
                    machine.vramctl(first).expect(0, "suspended", "");
                }
                let said = machine.vramctl_meanwhile(stop, command, || thread::sleep(long)).unwrap();
                assert_eq!(said.code, Some(0), "{about}: {}", said.text());
                machine.comes_back(&mut engine, &before, about);
            });
        }
        scope.spawn(|| {
            let (machine, mut engine) = Machine::with_an_engine();
            machine.vramctl("suspend engine").expect(0, "suspended", "");
            let hog = machine.hog(0, 180);
            let waits = machine.begin("resume --timeout 120");
            thread::sleep(long);
            drop(hog);
            Ran::end_of(waits).expect(0, "resumed", "");
            engine.is_well();
        });
        // Nor does a job give up that is resumed next.
        scope.spawn(|| {
            let machine = Machine::with_gpus(2);
            let mut engines = ["first", "second"].map(|name| machine.engine(name));
            machine.vramctl("suspend --all").expect(0, "suspended second", "");
            let mut waits = None;
            let said = machine.vramctl_meanwhile("cuCheckpointProcessRestore:1:stop-after", "resume --name first", || {
                waits = Some(machine.begin("resume --name second"));
                thread::sleep(long);
            });
            said.unwrap().expect(0, "restored first", "");
            Ran::end_of(waits.unwrap()).expect(0, "restored second", "");
            engines.iter_mut().for_each(Program::is_well);
        });
    });
}

/// Waits until a command says that it is second in the queue.
#[track_caller]
fn is_second_in_the_queue(command: &mut Child) -> BufReader<ChildStderr> {
    let mut said = BufReader::new(command.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("number 2 in the queue for GPU memory, behind job first"), "{line}");
    said
}

/// A smaller job would fit before the first has room.
#[test]
fn suspended_jobs_queue_for_memory() {
    let machine = Machine::with_gpus(2);
    let mut first = machine.engine("first");
    let mut second = machine.engine_with("second", |command| _ = command.args(["--weights-mib", "4", "--kv-mib", "4"]));
    machine.vramctl("suspend --all").expect(0, "suspended second", "");
    let hog = machine.hog(0, 160);
    let resume = |name: &str| {
        let mut command = machine.cli(&["resume", "--name", name, "--timeout", "60"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let waits = resume("first");
    common::eventually_waits_for_memory(&machine.sockets());
    machine.vramctl("resume --name second").expect(5, "", "goes to job first first");
    let mut behind = resume("second");
    let _said = is_second_in_the_queue(&mut behind);
    assert_eq!(machine.gpus()[0].1, 1, "the hog");
    drop(hog);
    Ran::end_of(waits).expect(0, "resumed default of first", "");
    Ran::end_of(behind).has(0, "", "");
    first.is_well();
    second.is_well();
}

/// Its turn ends only when its memory is resumed, too.
#[test]
fn a_suspended_job_is_not_overtaken_between_its_context_and_its_memory() {
    let machine = Machine::with_gpus(2);
    let (mut first, mut second) = (machine.engine("first"), machine.engine("second"));
    machine.vramctl("suspend --all").expect(0, "suspended second", "");
    let _hog = machine.hog(0, 70);
    let mut behind = None;
    let said = machine.vramctl_meanwhile("cuCheckpointProcessUnlock:1:stop-after", "resume --name first --timeout 60", || {
        // Longer than the first needs on a busy machine.
        let mut waits = machine.begin("resume --name second --timeout 10");
        behind = Some((is_second_in_the_queue(&mut waits), waits));
    });
    said.unwrap().expect(0, "resumed default of first", "");
    let ((mut said, waits), mut rest) = (behind.unwrap(), String::new());
    said.read_to_string(&mut rest).unwrap();
    Ran { err: rest, ..Ran::end_of(waits) }.has(4, "", "needed");
    first.is_well();
    drop(first);
    machine.vramctl("resume --name second").expect(0, "resumed default of second", "");
    second.is_well();
}

/// Then it needs room there.
#[test]
fn a_job_may_move_while_a_resume_waits_for_room() {
    let (machine, mut engine) = Machine::with_an_engine();
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let _hog = machine.hog(0, 180);
    let waits = machine.begin("resume --timeout 20");
    thread::sleep(Duration::from_millis(500));
    let lock = machine.sockets().join(format!("{}.lock", engine.pid()));
    common::eventually("it is stopped between two looks", || {
        let mut state = 0;
        unsafe {
            libc::kill(waits.id() as i32, libc::SIGSTOP);
            libc::waitpid(waits.id() as i32, &raw mut state, libc::WUNTRACED);
        }
        let is_between = !lock.exists();
        if !is_between {
            unsafe { libc::kill(waits.id() as i32, libc::SIGCONT) };
        }
        is_between
    });
    machine.vramctl("move engine --to 1").expect(0, "moved", "");
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    unsafe { libc::kill(waits.id() as i32, libc::SIGCONT) };
    Ran::end_of(waits).expect(0, "restored engine", "");
    assert_eq!(machine.gpus()[1].1, 1);
    engine.is_well();
}

/// It is for all that a resume waits for: other commands, room for the context, and memory.
#[test]
fn a_timeout_is_for_the_whole_resume() {
    let machine = Machine::with_gpus(2);
    let engine = machine.engine("engine");
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let lock = fs::File::create(machine.folder.path().join("sockets/restore.lock")).unwrap();
    lock.lock().unwrap();
    machine.vramctl("resume --timeout 0.5").expect(5, "", "has been restoring a job");

    // Room for its context, but not for its memory.
    let _hog = machine.hog(0, 180);
    // With a time of its own for the memory, it would take one and three quarters of the timeout. A busy machine gets more.
    let is_for_all = |timeout: u64| {
        let begun = Instant::now();
        let waits = machine.begin(&format!("resume default --timeout {timeout}"));
        thread::sleep(Duration::from_secs(timeout * 3 / 4));
        lock.unlock().unwrap();
        let said = Ran::end_of(waits);
        let took = begun.elapsed();
        let is_restored = said.code == Some(4) && said.out.contains("restored engine");
        if is_restored {
            assert!(took < Duration::from_secs(timeout * 7 / 4), "{took:?}: {said:?}");
        } else {
            said.expect(5, "", "has been restoring a job");
            lock.lock().unwrap();
        }
        is_restored
    };
    assert!([8, 40].into_iter().any(is_for_all), "it is never restored in time");
    drop(engine);
}

/// What is suspended and has no memory on the GPU is not brought back, and memory on other GPUs needs no room.
#[test]
fn a_resume_on_one_gpu_leaves_the_others_alone() {
    let machine = Machine::with_gpus(2);
    let (mut first, mut second) = (machine.engine("first"), machine.engine("second"));
    machine.vramctl("move second --to 1").expect(0, "moved", "");
    let before = machine.gpus();
    machine.vramctl("suspend --all").expect(0, "suspended second", "");
    // No room for the first, which is not to come back.
    let hog = machine.hog(0, 200);
    let resumed = machine.vramctl("resume --gpu 1 --all");
    resumed.has(0, "restored second", "");
    assert!(!resumed.text().contains("first"), "{}", resumed.text());
    assert_eq!((machine.gpus()[0].1, machine.gpus()[1]), (1, before[1]));
    second.is_well();
    drop(hog);
    machine.vramctl("resume --gpu 0").expect(0, "restored first", "");
    assert_eq!(machine.gpus(), before);
    first.is_well();
    drop((first, second));

    // On both GPUs: 48 MiB of its own on each.
    let program = "
import ctypes, sys
cuda = ctypes.CDLL('libcudart.so')
for device in 0, 1:
    assert cuda.cudaSetDevice(device) == 0
    assert cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(48 << 20)) == 0
print('ready', flush=True)
sys.stdin.read()
";
    let mut command = machine.cli(&["run", "--name", "both", "--", "python3", "-c", program]);
    let _both = Program::ready(&mut command);
    machine.vramctl("suspend both").expect(0, "suspended both", "");
    // Room for its context, but not for its memory.
    let _hog = machine.hog(0, 164);
    machine.vramctl("resume").expect(4, "", "needed");
    machine.vramctl("resume --gpu 1").expect(0, "resumed default of both", "");
    machine.vramctl("resume --gpu 0").expect(4, "", "needed");
}

/// Arguments are checked before anything comes back, and a word that is no tag may be a process.
#[test]
fn a_resume_takes_the_name_that_a_suspend_takes() {
    let machine = Machine::with_gpus(2);
    let (mut engine, mut other) = (machine.engine("engine"), machine.engine("other"));
    let before = machine.gpus();
    machine.vramctl("suspend --all").expect(0, "suspended other", "");
    for (command, code, why) in [
        ("resume nosuch --all", 6, "no allocation has the tag nosuch"),
        ("resume nosuch --name engine", 6, "no allocation has the tag nosuch"),
        ("resume engine nosuch", 6, "no allocation has the tag nosuch"),
        ("resume engine --all", 6, "engine is a process: `vramctl resume --name=engine`"),
        ("resume engine --ranks 2", 3, "1 of 2 processes are there"),
    ] {
        machine.vramctl(command).expect(code, "", why);
        assert_eq!(machine.gpus(), [(0, 0), (0, 0)], "{command}");
    }
    let resumed = machine.vramctl("resume engine");
    resumed.has(0, "resumed default of engine", "");
    assert!(!resumed.text().contains("other"), "{}", resumed.text());
    engine.is_well();
    machine.vramctl(&format!("resume default {}", other.pid())).expect(0, "resumed default of other", "");
    assert_eq!(machine.gpus(), before);
    other.is_well();
    machine.vramctl("pause other").expect(0, "paused default of other", "");
    engine.is_well();
    machine.vramctl("resume other").expect(0, "resumed default of other", "");
    other.is_well();
}

/// Calls of the driver that a command makes for one process, in order: a name, and how often until then.
type Calls = &'static [(&'static str, u32)];

/// The first state is of nobody, to see whether the driver knows the call.
const SUSPEND: Calls = &[("GetState", 1), ("GetState", 2), ("GetState", 3), ("Lock", 1), ("GetState", 4), ("Checkpoint", 1)];
const RESUME: Calls = &[("GetState", 1), ("GetState", 2), ("GetState", 3), ("GetState", 4), ("Restore", 1), ("GetState", 5), ("Unlock", 1)];
const MOVE: Calls = &[
    ("GetState", 1),
    ("GetState", 2),
    ("GetState", 3),
    ("GetState", 4),
    ("Lock", 1),
    ("GetState", 5),
    ("Checkpoint", 1),
    ("GetState", 6),
    ("GetState", 7),
    ("GetState", 8),
    ("Restore", 1),
    ("GetState", 9),
    ("Unlock", 1),
];
/// The commands, each with what comes before it.
const COMMANDS: &[(&str, Option<&str>, Calls)] =
    &[("suspend engine", None, SUSPEND), ("resume", Some("suspend engine"), RESUME), ("move engine --to 1", None, MOVE)];

type Step = (&'static str, Option<&'static str>, String);

/// All steps of a command.
fn steps_of((command, first, steps): &'static (&'static str, Option<&'static str>, Calls)) -> impl Iterator<Item = Step> {
    steps.iter().map(move |(call, nth)| (*command, *first, format!("cuCheckpointProcess{call}:{nth}")))
}

/// All steps of all commands.
fn steps() -> impl Iterator<Item = Step> {
    COMMANDS.iter().flat_map(steps_of)
}

/// Runs cases that mostly wait at the same time, each on a machine of its own.
fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, case: impl Fn(T) + Sync) {
    thread::scope(|scope| {
        for one in cases {
            let case = &case;
            scope.spawn(move || case(one));
        }
    });
}

/// The list above contains exactly the calls that the commands make.
#[test]
fn the_tested_steps_are_those_of_the_commands() {
    let (machine, mut engine) = Machine::with_an_engine();
    for (command, first, steps) in COMMANDS {
        for name in ["GetState", "Lock", "Checkpoint", "Restore", "Unlock"] {
            let listed = steps.iter().filter(|(call, _)| *call == name).map(|(_, nth)| *nth).max().unwrap_or(0);
            for (nth, is_made) in [(listed, listed > 0), (listed + 1, false)].into_iter().filter(|(nth, _)| *nth > 0) {
                if let Some(first) = first {
                    machine.vramctl(first).expect(0, "engine", "");
                }
                let killed = machine.vramctl_failing(&format!("cuCheckpointProcess{name}:{nth}:kill-before"), command);
                assert_eq!(killed.code.is_none(), is_made, "{command}: {name} {nth}: {}", killed.text());
                machine.vramctl("resume").expect(0, "engine", "");
                engine.is_well();
                drop(engine);
                engine = machine.engine("engine");
            }
        }
    }
}

/// The caller may be killed at any step. The next caller continues from there, in either direction.
#[test]
fn a_caller_may_be_killed_at_any_step() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    for (round, (command, first, step)) in steps().enumerate() {
        for when in ["before", "after"] {
            if let Some(first) = first {
                machine.vramctl(first).expect(0, "suspended", "");
            }
            let killed = machine.vramctl_failing(&format!("{step}:kill-{when}"), command);
            assert_eq!(killed.code, None, "{command} {step} {when}: {}", killed.text());
            let state = machine.status("engine");
            assert!(state["processes"][0].get("error").is_none(), "{command} {step} {when}: {state}");
            if round % 2 == 0 {
                machine.vramctl("suspend engine").expect(0, "engine", "");
                assert_eq!(machine.gpus(), [(0, 0), (0, 0)], "{command} {step} {when}");
            }
            // A move may have been complete but for its tags.
            machine.comes_back(&mut engine, &before, &format!("{command} {step} {when}"));
        }
    }
}

/// Two commands for the same process: one waits for the other, so no step of one comes between two steps of the other that need each
/// other. Whatever each has done, the process answers and comes back.
#[test]
fn two_commands_at_once_lose_nothing() {
    const MEANWHILE: Duration = Duration::from_millis(700);
    at_once(["suspend engine", "resume"].into_iter().flat_map(|other| COMMANDS.iter().map(move |one| (one, other))), |(one, other)| {
        let (machine, mut engine) = Machine::with_an_engine();
        let before = machine.gpus();
        for (command, first, step) in steps_of(one) {
            if let Some(first) = first {
                machine.vramctl(first).expect(0, "suspended", "");
            }
            let mut second = None;
            let said = machine.vramctl_meanwhile(&format!("{step}:stop-after"), command, || {
                let mut child = machine.cli(other).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
                // It ends, or it waits for the first.
                let begun = Instant::now();
                while begun.elapsed() < MEANWHILE && child.try_wait().unwrap().is_none() {
                    thread::sleep(Duration::from_millis(10));
                }
                second = Some(child);
            });
            let about = format!("{command} {step}, {other} meanwhile");
            let said = said.unwrap_or_else(|| panic!("{command} makes no {step}"));
            assert!(matches!(said.code, Some(0 | 1 | 5)), "{about}: {:?} {}", said.code, said.text());
            let code = second.unwrap().wait().unwrap().code();
            assert!(matches!(code, Some(0 | 1 | 5)), "{about}: {code:?}");
            let status = machine.status("engine");
            assert!(status["processes"][0].get("error").is_none(), "{about}: {status}");
            machine.comes_back(&mut engine, &before, &about);
        }
    });
}

/// It says how to find out how far it has come, and how to go on.
#[test]
fn an_interrupted_command_says_how_to_continue() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    for (command, said) in [("suspend engine", "`vramctl suspend --name=engine` continues"), ("move engine --to 1", "to continue")] {
        let lock = fs::File::create(machine.sockets().join(format!("{}.lock", engine.pid()))).unwrap();
        lock.lock().unwrap();
        let mut running = machine.cli(command);
        let running = common::interruptible(&mut running).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        common::eventually("it is paused", || machine.status("engine")["processes"][0]["tags"][0]["state"] == "paused");
        unsafe { libc::kill(running.id() as i32, libc::SIGINT) };
        let interrupted = Ran::end_of(running);
        drop(lock);
        assert!(interrupted.text().contains("interrupted: the "), "{command}: {}", interrupted.text());
        assert!(interrupted.text().contains("`vramctl status`") && interrupted.text().contains(said), "{}", interrupted.text());
        machine.comes_back(&mut engine, &before, command);
    }
}

/// A command that has been stopped in the middle keeps others out, and they say who it is.
#[test]
fn a_stopped_command_is_named() {
    let (machine, mut engine) = Machine::with_an_engine();
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let lock = machine.sockets().join(format!("{}.lock", engine.pid()));
    let resumed = machine.vramctl_meanwhile("cuCheckpointProcessRestore:1:stop-after", "resume", || {
        let refused = machine.vramctl("suspend engine --hold-timeout 0.2");
        refused.has(5, "", "has been suspending or restoring engine");
        let pid = fs::read_to_string(&lock).unwrap();
        assert!(refused.text().contains(&format!("(if that is stopped: kill -CONT {pid})")), "{}", refused.text());
    });
    resumed.unwrap().expect(0, "restored engine", "");
    assert!(!lock.exists());
    engine.is_well();
}

/// Others may resume a job while a suspend waits: before its pause, as if it had been suspended already, or after it.
#[test]
fn a_job_that_is_resumed_during_a_suspend_is_said_to_run() {
    let (machine, mut engine) = Machine::with_an_engine();
    let pid = engine.pid();
    let runs =
        format!("engine (pid {pid}) has been resumed meanwhile, and runs; try again. What is paused stays paused until `vramctl resume`");
    machine.vramctl("suspend engine").expect(0, "suspended engine", "");
    let refused = machine.vramctl_meanwhile("cuInit:1:stop-before", "suspend engine", || {
        machine.vramctl("resume").expect(0, "resumed default of engine", "");
    });
    refused.unwrap().expect(5, "", &runs);
    engine.is_well();

    let lock = fs::File::create(machine.sockets().join(format!("{pid}.lock"))).unwrap();
    lock.lock().unwrap();
    let waits = machine.begin("suspend engine");
    common::eventually("it is paused", || machine.status("engine")["processes"][0]["tags"][0]["state"] == "paused");
    machine.vramctl("resume").expect(0, "resumed default of engine", "");
    drop(lock);
    Ran::end_of(waits).expect(5, "", &runs);
    engine.is_well();
    machine.vramctl("suspend engine").expect(0, "suspended engine", "");
    machine.vramctl("resume").expect(0, "resumed default of engine", "");
    engine.is_well();
}

/// It is held all the same: the driver would have to save what it allocates until the driver has locked it.
#[test]
fn a_program_without_memory_at_its_pause_is_suspended() {
    let machine = Machine::with_gpus(1);
    let mut program = machine.start("bare", "guest memory-comes-late");
    let is_held = || machine.status("bare")["processes"][0]["held"] == true;
    let lock = fs::File::create(machine.sockets().join(format!("{}.lock", program.pid()))).unwrap();
    lock.lock().unwrap();
    let suspend = machine.begin("suspend bare --hold-timeout 100");
    common::eventually("it is held", is_held);
    program.tell("allocate");
    common::eventually("it waits", || machine.status("bare")["processes"][0]["waiting_threads"] == 1);
    drop(lock);
    Ran::end_of(suspend).expect(0, "suspended bare", "");
    machine.done("resume bare");
    program.expect("saved");
    program.tell("end");
    program.end();

    // Nobody but a resume would let it continue if its suspend ends in the middle.
    let mut program = machine.start("bare", "guest memory-comes-late");
    assert_eq!(machine.vramctl_failing("cuCheckpointProcessLock:1:kill-before", "suspend bare").code, None);
    assert!(is_held());
    machine.done("resume bare");
    assert!(!is_held());
    for _ in 0..3 {
        let failed = "cuCheckpointProcessCheckpoint:1:999";
        machine.vramctl_failing(failed, "suspend bare").expect(1, "", "");
        assert!(!is_held(), "the suspend has failed");
        machine.done("suspend bare");
        machine.done("resume bare");
        assert!(!is_held());
    }
    assert_eq!(program.ask("allocate"), "saved");
    program.tell("end");
    program.end();
}

/// Somebody else has had the driver checkpoint the process, so its library does not know it, and waits in the driver.
#[test]
fn a_process_that_was_checkpointed_without_its_library_comes_back() {
    at_once([("Lock", None), ("Lock Checkpoint", None), ("Lock Checkpoint", Some(150))], |(calls, hog)| {
        let (machine, mut engine) = Machine::with_an_engine();
        let before = machine.gpus();
        let pid = engine.pid();
        machine.call_for(pid, &calls.split(' ').collect::<Vec<_>>());
        machine.vramctl("status engine").expect(5, "", "no answer");
        // Too little for whatever it may need.
        if let Some(hog) = hog.map(|mib| machine.hog(0, mib)) {
            let short = machine.vramctl("resume --name engine");
            short.has(4, "", "needed");
            short.has(4, "", "may need as much as it has in host memory, on any GPU");
            drop(hog);
        }
        machine.vramctl("resume --name engine").expect(0, "", "the driver had locked or checkpointed it; it is restored");
        assert_eq!(machine.gpus(), before);
        engine.is_well();
    });
}

/// The driver blocks most calls of a process that is checkpointed. Those that look at what the device has written end it (observed with 580), so
/// they wait for the resume, whoever makes them all the time: NCCL's watchdog, torch's allocator of pinned memory, a health check.
#[test]
fn calls_that_end_a_checkpointed_process_wait_for_its_resume() {
    let machine = Machine::with(1, "2G");
    let polls = common::built("polls", "polls.c", &["-l:libcuda.so.1"]);
    let calls = String::from_utf8(machine.command(&polls, &[]).output().unwrap().stdout).unwrap();
    let start = |call| (call, Program::ready(&mut machine.program(call, &format!("{} {call}", polls.display()))));
    let mut programs: Vec<_> = calls.lines().map(start).collect();
    assert!(programs.len() > 15, "{calls}");
    let since: Vec<_> = programs.iter_mut().map(|(_, program)| program.count()).collect();
    machine.vramctl("suspend --all").expect(0, "suspended", "");
    // Each would have made some calls. Another thread than the one that makes them answers.
    thread::sleep(Duration::from_millis(50));
    for (_, program) in &mut programs {
        program.count();
    }
    machine.vramctl("resume --all").expect(0, "resumed", "");
    for ((call, program), since) in programs.iter_mut().zip(since) {
        common::eventually(&format!("{call} goes on"), || program.count() > since);
    }
}

/// Whatever clients ask of a process that waits in the driver, and whether they wait for the answer or hang up, the next one is served.
#[test]
fn clients_of_a_process_that_waits_in_the_driver_use_up_nothing() {
    let (machine, mut engine) = Machine::with_an_engine();
    let (pid, before) = (engine.pid(), machine.gpus());
    machine.call_for(pid, &["Lock"]);
    let socket = machine.sockets().join(format!("{pid}.sock"));
    let ask = |request: &str| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        // A full process refuses without reading.
        let _ = stream.write_all(format!("{{\"version\":1,\"request\":\"{request}\"}}\n").as_bytes());
        stream
    };
    let answer = |stream: &UnixStream| {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    };
    // More of each than there are connections. A thread of the process has begun with each when it has taken the next connection.
    for request in ["status", "plan", "pause", "resume", "suspend", "communicators", "counted\",\"gpus\":{},\"x\":\"", "events", "trim"] {
        for _ in 0..20 {
            drop(ask(request));
        }
        assert!(answer(&ask("hello")).contains("\"hello\""), "{request}");
    }
    // These stay.
    let waiting: Vec<_> = (0..12).map(|_| ask("pause")).collect();
    let refusal = answer(&ask("status"));
    assert!(refusal.contains("no answer from the driver"), "{refusal}");
    machine.vramctl("resume --name engine").expect(0, "", "the driver had locked or checkpointed it; it is restored");
    drop(waiting);
    // Nothing that was asked for by those who are gone is done now. Those that stayed may have been served.
    machine.vramctl("resume --name engine").expect(0, "engine", "");
    common::eventually("all have ended", || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
        !names.into_iter().any(|name| ["vramctl-client", "vramctl-status"].contains(&name.trim()))
    });
    machine.vramctl("resume --name engine").expect(0, "engine", "");
    assert_eq!(machine.gpus(), before);
    engine.is_well();
}

/// Nobody would wake the library again: the next command finds a process that can be resumed.
#[test]
fn a_suspend_whose_client_has_hung_up_sets_nothing_aside() {
    let (machine, mut engine) = Machine::with_an_engine();
    machine.vramctl("pause --name engine").expect(0, "paused", "");
    let socket = machine.sockets().join(format!("{}.sock", engine.pid()));
    // Stopped, it reads no request before its client has hung up.
    engine.stop();
    for _ in 0..5 {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(b"{\"version\":1,\"request\":\"suspend\"}\n").unwrap();
        drop(stream);
    }
    engine.go_on();
    // Its request waits for the earlier ones.
    let mut last = UnixStream::connect(&socket).unwrap();
    last.write_all(b"{\"version\":1,\"request\":\"plan\"}\n").unwrap();
    BufReader::new(last).read_line(&mut String::new()).unwrap();
    common::eventually("the library is awake", || machine.status("engine")["processes"][0]["suspended"].is_null());
    machine.vramctl("resume --name engine").expect(0, "resumed", "");
    engine.is_well();
}

/// The process may be killed at any step: the command reports that it is gone, and nothing of it is left.
#[test]
fn a_process_may_be_killed_at_any_step() {
    at_once(COMMANDS, |one| {
        let machine = Machine::with_gpus(2);
        for ((command, first, step), when) in steps_of(one).flat_map(|step| ["before", "after"].map(|when| (step.clone(), when))) {
            let mut engine = machine.engine("engine");
            if let Some(first) = first {
                machine.vramctl(first).expect(0, "suspended", "");
            }
            let said = machine.vramctl_meanwhile(&format!("{step}:stop-{when}"), command, || {
                engine.kill();
            });
            let said = said.unwrap_or_else(|| panic!("{command} makes no {step}"));
            // With nothing left to do, it may not have noticed.
            let is_last = step.contains("Checkpoint:1") && when == "after" && command.starts_with("suspend");
            if !is_last {
                assert!(matches!(said.code, Some(1 | 3)), "{command} {step} {when}: {:?} {}", said.code, said.text());
                let is_told =
                    ["has ended", "ended before it answered", "does not answer", "no process"].iter().any(|why| said.text().contains(why));
                assert!(is_told, "{command} {step} {when}: {}", said.text());
            }
            assert_eq!(machine.gpus(), [(0, 0), (0, 0)], "{command} {step} {when}: {}", said.text());
            machine.vramctl("resume --name engine").expect(3, "", "no process is managed");
        }
    });
}

/// A driver that refuses a call: the message names it and what to do next, and that brings everything back.
#[test]
fn a_driver_that_refuses_leaves_a_process_that_can_be_resumed() {
    at_once(COMMANDS, |one| {
        let (machine, mut engine) = Machine::with_an_engine();
        let before = machine.gpus();
        for ((command, first, step), code) in steps_of(one).flat_map(|step| [999, 600, 1, 2].map(|code| (step.clone(), code))) {
            if let Some(first) = first {
                machine.vramctl(first).expect(0, "suspended", "");
            }
            let refused = machine.vramctl_failing(&format!("{step}:{code}"), command);
            let about = format!("{command} {step} {code}: {:?} {}", refused.code, refused.text());
            // Whether the driver knows the call is asked of a process that does not exist, and any other answer will do.
            if step.ends_with("GetState:1") {
                assert_eq!(refused.code, Some(0), "{about}");
            } else if refused.code != Some(0) {
                assert!(matches!(refused.code, Some(1 | 5)), "{about}");
                assert!(refused.text().contains("cuCheckpointProcess") || refused.text().contains("has not ended"), "{about}");
                let next = ["is where it was", "The job is on GPU 1", "`vramctl resume`", "Nothing has changed"];
                assert!(next.iter().any(|next| refused.text().contains(next)), "{about}");
            }
            machine.comes_back(&mut engine, &before, &about);
        }
    });
}

/// A driver that refuses a call from then on, also the next command's: a program that has not left its GPU comes back without that call.
#[test]
fn a_driver_that_goes_on_refusing_leaves_no_program_held() {
    // Two processes are suspended, so the first may be set aside when the second is refused.
    at_once([("suspend pair", SUSPEND, 2), ("move pair --to 1", MOVE, 1)], |(command, calls, processes)| {
        let machine = Machine::with_gpus(2);
        let mut pair: Vec<_> = (0..processes).map(|_| machine.engine("pair")).collect();
        let before = machine.gpus();
        for (call, nth) in calls {
            // The first state is of nobody.
            let first = u32::from(*call == "GetState");
            let uses = (1..=processes).map(|process| first + (nth - first).saturating_sub(1) * processes + process);
            for nth in uses {
                let about = format!("{command}: {call} {nth}");
                let refused = machine.vramctl_failing(&format!("cuCheckpointProcess{call}:{nth}:801:*"), command);
                assert!(matches!(refused.code, Some(0 | 1)), "{about}: {:?} {}", refused.code, refused.text());
                // A process that has left its GPU needs all that a restore needs, and a locked one must be unlocked.
                let is_there = machine.gpus()[0].1 == pair.len() && *call != "Unlock";
                let fault = if is_there { format!("cuCheckpointProcess{call}:1:801:*") } else { String::new() };
                let resumed = machine.vramctl_failing(&fault, "resume --name pair");
                assert_eq!(resumed.code, Some(0), "{about}: {} after {}", resumed.text(), refused.text());
                pair.iter_mut().for_each(Program::is_well);
                if machine.gpus()[1].1 > 0 {
                    machine.vramctl("move pair --to 0").expect(0, "moved", "");
                }
                assert_eq!(machine.gpus(), before, "{about}: {}", refused.text());
            }
        }
    });
}

/// Nothing is set aside that the driver has not been asked about, and a dry run tells it.
#[test]
fn a_driver_that_tells_no_state_is_asked_before_anything_changes() {
    let (machine, mut engine) = Machine::with_an_engine();
    let silent = "cuCheckpointProcessGetState:1:801:*";
    machine.vramctl_failing(silent, "suspend engine --dry-run").expect(
        1,
        "",
        "the driver does not report its state: cuCheckpointProcessGetState",
    );
    machine.vramctl_failing(silent, "move engine --to 1").expect(1, "", "Nothing has changed");
    assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "active");
    machine.vramctl_failing(silent, "suspend engine").expect(1, "", "All tags are paused");
    machine.vramctl("ps").expect(0, "paused", "");
    machine.vramctl_failing(silent, "resume").expect(0, "resumed", "");
    engine.is_well();
}

/// The program has found its driver, and the command finds none.
#[test]
fn a_driver_that_cannot_be_loaded_is_known_before_anything_changes() {
    let machine = Machine::with_gpus(1);
    let mut engine = machine.engine("engine");
    let folder = machine.folder.path().join("broken");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("libcuda.so.1"), "").unwrap();
    let broken = format!("{}:{}", folder.display(), common::simulated_libraries().display());
    let refused = Ran::of(machine.cli("suspend engine").env("LD_LIBRARY_PATH", broken));
    refused.expect(7, "", "the driver cannot be used from here: dlopen(libcuda.so.1)").has(7, "", "Nothing has changed");
    assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "active");
    engine.is_well();
}

/// As many as a request of 64 KiB had no room for. One that was paused before stays so.
#[test]
fn a_program_with_many_tags_moves() {
    const PROGRAM: &str = r#"
import ctypes, sys
ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
cuda, pointer = ctypes.CDLL(None), ctypes.c_void_p()
for number in range(600):
    assert cuda.vramctl_region_begin(b"%0128d" % number, 1) == 0
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 << 20)) == 0
    assert cuda.vramctl_region_end() == 0
print("ready", flush=True)
sys.stdin.read()
"#;
    let machine = Machine { memory: "1300M", ..Machine::with_gpus(2) };
    let mut command = machine.cli(&["run", "--name", "many", "--no-python", "--", "python3", "-c", PROGRAM]);
    let _program = Program::ready(&mut command);
    let paused = || {
        let status = machine.status("many");
        let tags = status["processes"][0]["tags"].as_array().unwrap();
        tags.iter().filter(|tag| tag["state"] == "paused").count()
    };
    machine.vramctl("move many --to 1").expect(0, "moved many", "");
    assert_eq!(paused(), 0);
    machine.vramctl(&format!("pause {:0128} --no-hold", 7)).expect(0, "paused", "");
    machine.vramctl("move many --to 0").expect(0, "moved many", "");
    assert_eq!((paused(), machine.gpus()[1]), (1, (0, 0)));
}

#[test]
fn a_job_moves_to_another_gpu_and_back() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    engine.is_well();
    for (round, gpu) in ["1", "0000:10:00.0", "GPU-73696d76-6c61-7465-642d-6770752d3031", "0"].iter().enumerate() {
        machine.vramctl(&format!("move engine --to {gpu}")).expect(0, "moved engine", "");
        let there = 1 - round % 2;
        let gpus = machine.gpus();
        assert_eq!((gpus[there], gpus[1 - there]), (before[0], (0, 0)));
        let status = machine.status("engine");
        let uuid = status["processes"][0]["devices"][0]["uuid"].as_str().unwrap();
        assert!(uuid.ends_with(&format!("3{there}")), "{status}");
        assert_eq!(status["processes"][0]["tags"][0]["state"], "active");
        engine.is_well();
        // Commands that name the GPU by its UUID find it there.
        machine.vramctl(&format!("pause --gpu {there}")).expect(0, "paused", "");
        assert!(machine.gpus()[there].0 < before[0].0);
        machine.vramctl(&format!("resume --gpu {there}")).expect(0, "resumed", "");
        engine.is_well();
    }
}

/// Another program takes the room on the other GPU in the middle of a move.
#[test]
fn a_move_whose_room_is_taken_says_where_the_job_is() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    let short = "too little memory on GPU 1 (GPU-73696d76): ";
    let move_meanwhile = |mib| {
        let mut hog = None;
        let stop = "cuCheckpointProcessCheckpoint:1:stop-after";
        let moved = machine.vramctl_meanwhile(stop, "move engine --to 1", || hog = Some(machine.hog(1, mib)));
        (moved.unwrap(), hog)
    };
    // Not enough for anything.
    let (moved, hog) = move_meanwhile(200);
    moved.has(4, "", short);
    moved.has(4, "", ". The job is where it was");
    assert!(!moved.text().contains("stays suspended"), "{}", moved.text());
    assert_eq!(machine.gpus()[0], before[0]);
    engine.is_well();
    drop(hog);
    // Enough for its context, but not for its tags.
    let (moved, hog) = move_meanwhile(164);
    moved.has(4, "", short);
    moved.has(4, "", ". The job is on GPU 1, paused and held; to continue: `vramctl resume --name=engine`");
    assert_eq!((machine.gpus()[0].1, machine.gpus()[1].1), (0, 2));
    drop(hog);
    machine.vramctl("resume --name=engine").expect(0, "resumed", "");
    assert_eq!(machine.gpus()[1], before[0]);
    engine.is_well();
}

/// What is suspended needs as much room as what is active.
#[test]
fn a_suspended_job_moves_only_where_it_fits_with_its_tags() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    // Room for its context, with what a restore wants beyond that, but not for its tags as well.
    let hog = machine.hog(1, 144);
    for prepared in [None, Some("pause"), Some("suspend")] {
        if let Some(verb) = prepared {
            machine.vramctl(&format!("{verb} engine")).expect(0, "", "");
        }
        let there = machine.gpus();
        machine.vramctl("move engine --to 1").expect(4, "", "too little memory on GPU 1 (GPU-73696d76): ");
        assert_eq!(machine.gpus(), there, "{prepared:?}");
        machine.vramctl("resume").expect(0, "", "");
        assert_eq!(machine.gpus()[0], before[0]);
    }
    drop(hog);
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let foretold = machine.vramctl("move engine --to 1 --dry-run");
    foretold.has(0, "a move would take it from GPU 0 to GPU 1, with ", "");
    foretold.has(0, "; it would not stay suspended", "");
    assert_eq!(machine.gpus(), [(0, 0), (0, 0)], "a dry run changes nothing");
    machine.vramctl("move engine --to 1").expect(0, "which was suspended and is resumed, to GPU 1", "");
    assert_eq!(machine.gpus()[1], before[0]);
    engine.is_well();
}

/// There would be room for what it has now, but a restore wants more.
#[test]
fn a_move_is_refused_before_a_restore_would_be() {
    let (machine, mut engine) = Machine::with_an_engine();
    let free = machine.gpus()[0].0 + CONTEXT / 8;
    let _hog = machine.hog(1, ((256 * MIB - CONTEXT - free) / MIB) as u32);
    machine.vramctl_failing("cuCheckpointProcessLock:1:999", "move engine --to 1").expect(4, "", ". Nothing has changed");
    engine.is_well();
}

/// The past stays where it was, and what follows is on the new GPU.
#[test]
fn the_trace_of_a_job_that_has_moved_tells_the_gpu_of_each_time() {
    let machine = Machine::with_gpus(2);
    let mut engine = machine.engine_with("engine", |command| _ = command.env("VRAMCTL_TRACE", "1M"));
    let file = machine.folder.path().join("trace.json");
    for gpu in [1, 0, 1] {
        machine.vramctl(&format!("move engine --to {gpu}")).expect(0, "moved engine", "");
        engine.is_well();
        let devices = machine.status("engine")["processes"][0]["devices"].clone();
        machine.vramctl(&format!("trace engine -o {}", file.display())).expect(0, "", "");
        let trace: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let counters = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "C");
        let now: BTreeMap<_, _> =
            counters.map(|event| (event["name"].as_str().unwrap(), event["args"]["bytes"].as_u64().unwrap())).collect();
        let on = |gpu| now.iter().filter(|(name, _)| name.contains(&format!("GPU {gpu} "))).map(|(_, bytes)| bytes).sum::<u64>();
        assert!(on(gpu) > 0, "{now:?}");
        assert_eq!((on(gpu), on(1 - gpu)), (devices[0]["active_bytes"].as_u64().unwrap(), 0), "{now:?}");
        assert!(now.keys().any(|name| name.contains("GPU 0 ")), "where it was at first: {now:?}");
    }
}

/// `examples/empty_gpu.py`: jobs that fit elsewhere move there, the others are suspended.
#[test]
fn a_gpu_is_emptied_for_maintenance() {
    let machine = Machine::with_gpus(2);
    // Two have room on a GPU, three have not.
    let start = |name| machine.engine_with(name, |command| _ = command.args(["--weights-mib", "40"]));
    let third = start("c");
    machine.vramctl("move c --to 1").expect(0, "moved", "");
    let mut engines = [start("a"), start("b"), third];
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/empty_gpu.py");
    let path = format!("{}:{}", Path::new(common::command_line()).parent().unwrap().display(), std::env::var("PATH").unwrap());
    let said = Ran::of(machine.command("python3", &[example.to_str().unwrap(), "0", "1"]).env("PATH", path));
    said.has(0, "moved a", "");
    assert!(said.text().contains("b does not go to GPU 1") && said.text().contains("suspended b"), "{}", said.text());
    assert_eq!((machine.gpus()[0], machine.gpus()[1].1), ((0, 0), 2));
    machine.vramctl("resume --name b").expect(0, "resumed", "");
    engines.iter_mut().for_each(Program::is_well);
}

#[test]
fn an_impossible_move_is_refused_before_anything_changes() {
    let machine = Machine::with_gpus(2);
    let (mut engine, mut other) = (machine.engine("engine"), machine.engine("other"));
    machine.vramctl("move other --to 1").expect(0, "moved", "");
    let before = machine.gpus();
    for (command, code, why) in [
        ("move engine --to 0", 0, ""),
        ("move engine --to 7", 2, "no GPU 7"),
        ("move engine --to 0,1", 2, "the job is on GPU 0, but --to names GPU 0, GPU 1"),
        ("move engine --to 1 --swap engine", 2, "itself"),
        ("move nobody --to 1", 3, "nobody"),
        ("move engine --to 0 --swap other", 2, "is on GPU 1"),
    ] {
        machine.vramctl(command).expect(code, "", why);
    }
    machine.vramctl("move engine --to 0").expect(0, &format!("nothing to do: engine (pid {}) is on GPU 0 already", engine.pid()), "");
    // A third one does not fit, unless it swaps with another.
    let filler = machine.engine("filler");
    machine.vramctl("move filler --to 1").expect(0, "moved", "");
    machine.vramctl("move engine --to 1").expect(4, "", "Nothing has changed");
    machine.vramctl("move engine --swap other").expect(0, "moved other", "");
    machine.vramctl("move engine --to 0 --swap other").expect(0, "moved engine", "");
    drop(filler);
    machine.vramctl("move engine --to 1 --swap other").expect(0, "moved other (pid", "");
    machine.vramctl("move engine --to 0 --swap other").expect(0, "moved engine", "");
    assert_eq!(machine.gpus(), before);
    // The driver refuses to restore it there: it returns to its own GPU.
    let refused = machine.vramctl_failing("cuCheckpointProcessRestore:1:801", "move engine --to 1");
    refused.has(1, "", "The job is where it was");
    assert_eq!(machine.gpus(), before);
    engine.is_well();
    // A paused one stays paused.
    machine.vramctl("pause --name engine").expect(0, "paused", "");
    let refused = machine.vramctl_failing("cuCheckpointProcessRestore:1:801", "move engine --to 1");
    refused.has(1, "", "The job is where it was");
    assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "paused");
    assert!(!refused.text().contains("run"), "{}", refused.text());
    machine.vramctl("resume --name engine").expect(0, "resumed", "");
    engine.is_well();
    other.is_well();
}

/// It stays paused, so it needs no room where the job goes.
#[test]
fn memory_that_a_job_has_paused_itself_is_not_in_the_way_of_its_move() {
    let machine = Machine::with_gpus(2);
    let mut engine = machine.start("engine", "engine_regions --weights-mib 48 --kv-mib 64");
    let other = machine.hog(1, 100);
    machine.vramctl("move engine --to 1").expect(4, "", "Nothing has changed");
    assert_eq!(engine.ask("pause kv_cache"), "paused kv_cache");
    machine.vramctl("move engine --to 1").expect(0, "moved engine", "");
    drop(other);
    assert_eq!(engine.ask("resume kv_cache"), "resumed kv_cache");
    engine.verify();
}

#[test]
fn a_job_changes_places_with_a_whole_job_only() {
    let machine = Machine::with_gpus(2);
    let start = |name| machine.engine_with(name, |command| _ = command.args(["--weights-mib", "8", "--kv-mib", "8"]));
    let (mut engines, mut ends) = ([start("engine"), start("other")], start("other"));
    machine.vramctl("move other --to 1").expect(0, "moved", "");
    ends.kill();
    let before = machine.gpus();
    let refused = machine.vramctl("move engine --to 1 --swap other");
    refused.has(3, "", "1 of 2 processes are there: process ");
    refused.has(3, "", "To do without the rest, add --ranks 1 to a pause or resume of the other job first");
    assert_eq!(machine.gpus(), before);
    machine.vramctl("pause other --ranks 1").expect(0, "paused", "");
    machine.vramctl("resume other").expect(0, "resumed", "");
    machine.vramctl("move engine --to 1 --swap other").expect(0, "moved", "");
    engines.iter_mut().for_each(Program::is_well);
}

/// The driver refuses one of two that change places. The message says where the other is, and its commands bring both back.
#[test]
fn a_swap_of_which_half_fails_says_what_has_moved() {
    let machine = Machine::with_gpus(2);
    let (mut engine, mut other) = (machine.engine("engine"), machine.engine("other"));
    machine.vramctl("move other --to 1").expect(0, "moved", "");
    let before = machine.gpus();
    // The second fault refuses its way home, too: it stays suspended.
    for (faults, resumes) in [("2:999", false), ("2:999:2", true)] {
        let refused = machine.vramctl_failing(&format!("cuCheckpointProcessRestore:{faults}"), "move engine --to 1 --swap other");
        // They are restored at once, and the second to arrive is refused.
        let is_other_refused = refused.text().contains("did not restore other");
        let (moved, pid, now) = if is_other_refused { ("engine", engine.pid(), 1) } else { ("other", other.pid(), 0) };
        refused.has(1, "", &format!(". {moved} (pid {pid}) is on GPU {now} now. No other has moved. "));
        assert_eq!(machine.gpus()[now].1, if resumes { 1 } else { 2 }, "{}", refused.text());
        let back = format!("`vramctl move --pid={pid} --to {}`", 1 - now);
        if resumes {
            refused.has(1, "", &format!("To continue: {back}, then `vramctl resume --name=engine`, then `vramctl resume --name=other`"));
            machine.follow("To continue: ", &refused);
        } else {
            refused.has(1, "", &format!("The way back: {back}"));
            machine.follow("The way back: ", &refused);
        }
        assert_eq!(machine.gpus(), before);
        engine.is_well();
        other.is_well();
    }
}

/// The same with jobs of two processes, of which two do not fit on one GPU: those that have changed places are in each other's way.
#[test]
fn the_way_back_of_half_a_swap_is_told_in_an_order_that_works() {
    let machine = Machine::with_gpus(4);
    let large = |name| machine.engine_with(name, |command| _ = command.args(["--weights-mib", "120"]));
    let mut engines: Vec<_> = [("engine", 3), ("engine", 2), ("other", 1)]
        .into_iter()
        .map(|(name, gpu)| {
            let engine = large(name);
            machine.vramctl(&format!("move --pid={} --to {gpu}", engine.pid())).expect(0, "moved", "");
            engine
        })
        .collect();
    engines.push(large("other"));
    let before = machine.gpus();
    let refused = machine.vramctl_failing("cuCheckpointProcessRestore:4:999", "move engine --to 0,1 --swap other");
    refused.has(1, "", ". No other has moved. To continue: ");
    machine.follow("To continue: ", &refused);
    assert_eq!(machine.gpus(), before, "{}", refused.text());
    engines.iter_mut().for_each(Program::is_well);
    machine.vramctl("move engine --to 0,1 --swap other").expect(0, "moved", "");
}

/// The driver restores all, refuses to unlock one, and then does.
#[test]
fn a_move_that_was_complete_after_all_says_where_the_job_is() {
    let machine = Machine::with_gpus(3);
    let (mut stays, mut goes) = (machine.engine("job"), machine.engine("job"));
    machine.vramctl(&format!("move --pid={} --to 1", goes.pid())).expect(0, "moved", "");
    let refused = machine.vramctl_failing("cuCheckpointProcessUnlock:1:999", "move job --to 0,2");
    refused.has(1, "", ". The job is on GPU 0, GPU 2\n");
    stays.is_well();
    goes.is_well();

    let other = machine.engine("other");
    machine.vramctl("move other --to 1").expect(0, "moved", "");
    let swap = format!("move --pid={} --to 1 --swap other", goes.pid());
    machine.vramctl_failing("cuCheckpointProcessUnlock:1:999", &swap).expect(1, "", ". The jobs have changed places\n");
    assert_eq!(machine.gpus().iter().map(|gpu| gpu.1).collect::<Vec<_>>(), [1, 1, 1]);
    [stays, goes, other].iter_mut().for_each(Program::is_well);
}

/// Of two processes, the driver does not restore the one that moves.
#[test]
fn a_process_that_stays_on_its_gpu_is_not_said_to_have_moved() {
    let machine = Machine::with_gpus(4);
    let mut engines = [0, 1, 2].map(|gpu| {
        let engine = machine.engine("job");
        if gpu > 0 {
            machine.vramctl(&format!("move --pid={} --to {gpu}", engine.pid())).expect(0, "moved", "");
        }
        engine
    });
    let before = machine.gpus();
    // They are restored at once, and the last to arrive is refused, which may be the one that stays.
    let refused = loop {
        let refused = machine.vramctl_failing("cuCheckpointProcessRestore:3:999", "move job --to 0,2,3");
        if !refused.text().contains("The job is on GPU 0, GPU 2, GPU 3") {
            break refused;
        }
        machine.vramctl("move job --to 0,1,2").expect(0, "moved", "");
    };
    refused.has(1, "", " now. No other has moved");
    assert!(!refused.text().contains("is on GPU 0 now"), "{}", refused.text());
    machine.follow("The way back: ", &refused);
    assert_eq!(machine.gpus(), before, "{}", refused.text());
    engines.iter_mut().for_each(Program::is_well);
}

#[test]
fn a_process_may_be_killed_while_it_is_suspended() {
    let machine = Machine::with_gpus(2);
    let engine = machine.engine("engine");
    let mut other = machine.engine("other");
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    drop(engine);
    machine.vramctl("resume --name engine").expect(3, "", "engine");
    machine.vramctl("suspend other").expect(0, "suspended", "");
    machine.vramctl("resume --name other").expect(0, "resumed", "");
    other.is_well();
    assert_eq!(machine.gpus()[0].1, 1, "nothing of the others is left");
}

/// An obstacle that the library cannot know. The message says that the process is lost, and what to do.
#[test]
fn a_process_lost_by_the_driver_is_reported() {
    let machine = Machine::with_gpus(2);
    let lost = machine.engine_with("lost", |command| _ = command.env("SIMGPU_UNRESTORABLE", "1"));
    machine.vramctl("suspend lost").expect(0, "suspended", "");
    for command in ["resume", "resume", "suspend lost"] {
        machine.vramctl(command).expect(1, "", "reports the process as FAILED. It is lost: end it and start it again");
        machine.vramctl("ps -o wide").expect(0, "lost (FAILED)", "");
        machine.vramctl("doctor").expect(1, &format!("as FAILED, so that they are lost: lost (pid {})", lost.pid()), "");
        machine.vramctl("ps").expect(0, "suspended", "");
    }
    // Room would not help it.
    let hog = machine.hog(0, 200);
    let without_room = machine.vramctl("resume --timeout 60");
    without_room.has(1, "", "reports the process as FAILED. It is lost: end it and start it again");
    assert!(!without_room.text().contains("too little memory"), "{}", without_room.text());
    drop((hog, lost));
    let mut engine = machine.engine("engine");
    machine.vramctl("suspend engine").expect(0, "suspended", "");
    let spoilt = machine.vramctl_failing("cuCheckpointProcessRestore:1:304", "resume");
    spoilt.has(1, "", "an earlier restore has failed for lack of memory");
    machine.vramctl("resume").expect(0, "resumed", "");
    engine.is_well();
}

/// A job is suspended as one: if one process fails, the others undo their steps.
#[test]
fn several_processes_are_suspended_as_one() {
    let machine = Machine::with_gpus(2);
    let mut engines = [machine.engine("pair"), machine.engine("pair")];
    let before = machine.gpus();
    for fault in ["cuCheckpointProcessLock:2:999", "cuCheckpointProcessCheckpoint:2:999"] {
        machine.vramctl_failing(fault, "suspend pair").expect(1, "", "All tags are paused");
        assert_eq!(machine.gpus()[0].1, 2, "{fault}: both are there, paused");
        machine.vramctl("resume --name pair").expect(0, "resumed", "");
    }
    machine.vramctl("suspend pair").expect(0, "suspended pair", "");
    assert_eq!(machine.gpus()[0], (0, 0));
    // A dry run says of each process what a pause would do.
    let other = machine.engine("other");
    let foretold = machine.vramctl("pause --all --dry-run");
    foretold.has(5, &format!("other (pid {}): a pause would free", other.pid()), "");
    for engine in &engines {
        foretold.has(5, "", &format!("error: pair (pid {}): the process is suspended", engine.pid()));
    }
    drop(other);
    // One comes back, the other does not: the next resume goes on.
    machine.vramctl_failing("cuCheckpointProcessRestore:2:999", "resume --name pair").expect(1, "", "cuCheckpointProcessRestore");
    assert_eq!(machine.gpus()[0].1, 1);
    machine.vramctl("resume --name pair").expect(0, "resumed", "");
    assert_eq!(machine.gpus(), before);
    machine.vramctl("move pair --to 1").expect(0, "moved pair", "");
    assert_eq!(machine.gpus()[1], before[0]);
    // The death of one is not that of the other.
    machine.vramctl("suspend pair").expect(0, "suspended pair", "");
    let [survivor, killed] = &mut engines;
    killed.kill();
    machine.vramctl("resume --name pair").expect(0, "resumed", "");
    survivor.is_well();
    machine.vramctl("suspend pair --ranks 2").expect(3, "", "1 of 2 processes are there");
    survivor.is_well();
}

/// While a suspend waits for its turn, one process is resumed, and another is killed.
#[test]
fn a_process_that_was_resumed_meanwhile_is_not_said_to_be_paused() {
    let machine = Machine::with_gpus(2);
    let mut engines = [machine.engine("pair"), machine.engine("pair")];
    engines.sort_by_key(Program::pid);
    let [dies, runs] = &mut engines;
    let pid = runs.pid();
    let lock = fs::File::create(machine.sockets().join(format!("{pid}.lock"))).unwrap();
    lock.lock().unwrap();
    let waits = machine.begin("suspend pair --hold-timeout 100");
    let is_paused = |process: &Value| process["tags"][0]["state"] == "paused";
    common::eventually("both are paused", || machine.status("pair")["processes"].as_array().unwrap().iter().all(is_paused));
    machine.vramctl(&format!("resume --pid {pid}")).expect(0, "resumed default of pair", "");
    dies.kill();
    drop(lock);
    let refused = Ran::end_of(waits);
    refused.has(3, "", &format!(". Resumed meanwhile: pair (pid {pid}). All other tags are paused; the CUDA context"));
    runs.is_well();
}

/// The caller has been killed, or is on its way: what the process still has on the GPU is not denied.
#[test]
fn the_middle_of_a_suspend_is_no_suspend() {
    let (machine, mut engine) = Machine::with_an_engine();
    for (death, state, text) in [
        ("Lock:1:kill-before", "partly suspended", "its CUDA context is on the GPU"),
        ("Checkpoint:1:kill-before", "partly suspended", "its CUDA context is on the GPU"),
        ("Checkpoint:1:kill-after", " suspended", "it has nothing on any GPU"),
    ] {
        assert_eq!(machine.vramctl_failing(&format!("cuCheckpointProcess{death}"), "suspend engine").code, None);
        machine.vramctl("ps").expect(0, state, "");
        machine.vramctl("status engine").expect(0, text, "");
        let pause = machine.vramctl("pause");
        if state == " suspended" {
            pause.has(0, "nothing to do: default of engine", "");
        } else {
            pause.has(5, "", "suspended, or is being suspended or restored");
        }
        // No driver is asked, nor started.
        machine.vramctl_failing("cuInit:1:999:*", "status engine").expect(0, text, "");
        machine.vramctl_failing("cuInit:1:999:*", "ps").expect(0, state, "");
        machine.vramctl("ps -o wide").expect(0, state, "");
        machine.vramctl("resume").expect(0, "resumed", "");
        engine.is_well();
    }
}

/// Without room for one that has left, another that has not goes on all the same.
#[test]
fn what_has_not_left_needs_no_room() {
    let machine = Machine::with_gpus(2);
    let mut engines = [machine.engine("pair"), machine.engine("pair")];
    let mut hog = None;
    let fault = "cuCheckpointProcessCheckpoint:1:stop-after,cuCheckpointProcessCheckpoint:2:999";
    let refused = machine.vramctl_meanwhile(fault, "suspend pair", || hog = Some(machine.hog(0, 170)));
    let refused = refused.unwrap();
    refused.has(1, "", "All tags are paused");
    assert!(refused.text().contains("too little memory") && refused.text().contains("`vramctl resume` tries again"), "{}", refused.text());
    let listed = machine.vramctl("ps");
    assert_eq!((listed.text().matches(" suspended").count(), listed.text().matches(" paused").count()), (1, 1), "{}", listed.text());
    drop(hog);
    machine.vramctl("resume --name pair").expect(0, "resumed", "");
    engines.iter_mut().for_each(Program::is_well);
}

/// The process is lost with such a restore, so it must not come to that.
#[test]
fn a_process_that_cannot_be_restored_is_paused_by_tag() {
    let (machine, mut engine) = Machine::with_an_engine();
    let old = machine.vramctl_failing("cuCheckpointProcessGetState:1:500", "suspend engine");
    old.has(7, "", "older than 570");
    assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "paused");
    machine.vramctl("resume").expect(0, "resumed", "");
    engine.is_well();
}

/// The process reports MPS, even without memory. MIG is detected from outside.
#[test]
fn suspend_is_refused_with_mps_and_mig() {
    let (machine, mut engine) = Machine::with_an_engine();
    let on_mig = |arguments: &str| Ran::of(machine.cli(arguments).env("SIMGPU_MIG", "1"));
    let before = machine.gpus();
    machine.vramctl("suspend engine --dry-run").expect(0, ", and its CUDA context", "");
    let foretold = on_mig("suspend engine --dry-run");
    foretold.has(7, "", "GPU 0 is in MIG mode");
    assert_eq!(foretold.text().lines().last().unwrap().matches("engine (pid").count(), 1, "{}", foretold.text());
    let refused = on_mig("move engine --to 1");
    refused.has(7, "", "GPU 0 is in MIG mode (`nvidia-smi -i 0 -mig 0` ends that");
    assert_eq!(refused.text().matches("engine (pid").count(), 1, "{}", refused.text());
    assert_eq!((machine.gpus(), machine.status("engine")["processes"][0]["tags"][0]["state"].as_str()), (before, Some("active")));
    let refused = on_mig("suspend engine");
    refused.has(7, "", "GPU 0 is in MIG mode");
    assert!(refused.text().contains("Nothing has changed") && !refused.text().contains("GPU 1"), "{}", refused.text());
    assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "active");
    engine.is_well();
    drop(engine);

    let mut command = machine.cli("run --name empty -- python3 -c");
    let program = "import ctypes\nctypes.CDLL('libcudart.so.13', mode=ctypes.RTLD_GLOBAL)\ncuda = ctypes.CDLL(None)\npointer = ctypes.c_void_p()\nassert \
                   cuda.cudaMalloc(ctypes.byref(pointer), 4 << 20) == cuda.cudaFree(pointer) == 0\nprint('ready', flush=True)\ninput()";
    let _empty = Program::ready(command.arg(program).env("SIMGPU_MPS", "1"));
    machine.vramctl("suspend empty").expect(7, "", "a GPU behind MPS");
    machine.vramctl("status empty").expect(0, "Cannot be suspended: a GPU behind MPS", "");
}

/// Plain memory that the program has passed to others by CUDA IPC cannot be paused away, so the program need not be paused to know.
#[test]
fn a_process_that_cannot_be_restored_is_neither_moved_nor_paused() {
    let machine = Machine::with_gpus(2);
    let mut command = machine.cli("run --name giver -- python3 -c");
    let program = "import ctypes\ncuda = ctypes.CDLL('libcudart.so.13', mode=ctypes.RTLD_GLOBAL)\ncuda = ctypes.CDLL(None)\nmanaged, plain = \
                   ctypes.c_void_p(), ctypes.c_void_p()\nhandle = (ctypes.c_char * 64)()\nassert cuda.cudaMalloc(ctypes.byref(managed), 4 << 20) \
                   == cuda.cudaMalloc(ctypes.byref(plain), 4096) == cuda.cudaIpcGetMemHandle(handle, plain) == 0\nprint('ready', \
                   flush=True)\ninput()";
    let _giver = Program::ready(command.arg(program));
    let before = machine.gpus();
    let refused = machine.vramctl("move giver --to 1");
    refused.has(7, "", "Nothing has changed");
    assert!(refused.text().contains("shared with other processes"), "{}", refused.text());
    assert_eq!((machine.gpus(), machine.status("giver")["processes"][0]["tags"][0]["state"].as_str()), (before, Some("active")));
}

/// The program keeps running until the driver has locked it. Obstacles that it creates until then are found, and nothing is checkpointed.
#[test]
fn an_obstacle_that_appears_in_the_middle_is_found() {
    let (machine, mut engine) = Machine::with_an_engine();
    let before = machine.gpus();
    for command in ["suspend engine", "move engine --to 1"] {
        let refused = machine.vramctl_meanwhile("cuCheckpointProcessLock:1:stop-before", command, || {
            engine.tell("unified");
            engine.expect("unified 0");
        });
        refused.unwrap().expect(7, "", "1 allocation of unified memory, new or in progress");
        assert_eq!(machine.gpus()[0].1, 1, "{command}: it is there");
        if command.starts_with("suspend") {
            assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "paused", "as if it had been there before");
            machine.vramctl("resume").expect(0, "resumed", "");
        }
        engine.is_well();
        let unified = "1 allocation of unified memory (cudaMallocManaged)";
        // Which is said before anything changes, too.
        machine.vramctl("suspend engine --dry-run").expect(7, "", unified);
        let told = machine.vramctl("suspend engine --dry-run --json").json();
        let process = &told["processes"][0];
        assert_eq!(process["plan"]["obstacles"][0]["kind"], "unified", "{told}");
        assert_eq!(
            (&process["error"]["code"], &process["plan"]["tags"][0]["tag"]),
            (&"not_restorable".into(), &"default".into()),
            "{told}"
        );
        assert_eq!(machine.status("engine")["processes"][0]["tags"][0]["state"], "active", "{command}");
        machine.vramctl(command).expect(7, "", unified);
        drop(engine);
        engine = machine.engine("engine");
    }
    assert_eq!(machine.gpus(), before);
}

// ---- within the process ----

/// Ends a suspend when a test fails; otherwise the cleanup would wait for the driver.
struct Awake;

impl Drop for Awake {
    fn drop(&mut self) {
        Memory::get().awake();
    }
}

/// Some paused memory, without which a suspend is refused.
fn paused() -> u64 {
    let address = common::malloc_tagged("paused", None, 2 << 20).unwrap();
    assert_eq!(common::pause(&["paused"]).unwrap().allocations, 1);
    address
}

fn obstacles() -> Vec<ObstacleKind> {
    let status = Memory::get().status();
    status.obstacles.into_iter().map(|obstacle| obstacle.kind).collect()
}

/// Each obstacle is reported as long as it exists, and prevents a suspend.
#[test]
fn obstacles_to_a_restore_are_known_in_advance() {
    let gpu = Gpu::take();
    let _awake = Awake;
    let managed = common::malloc_tagged("managed", None, 2 << 20).unwrap();
    paused();
    assert_eq!(obstacles(), []);
    let refused = |kind: ObstacleKind| {
        assert_eq!(obstacles(), [kind]);
        let error = Memory::get().suspend(|| false).unwrap_err();
        assert_eq!(error.kind(), Kind::NotRestorable, "{error}");
        // It goes on as before.
        assert_eq!(common::pause(&["managed"]).and_then(|_| common::resume(&["managed"])).map(|report| report.allocations).unwrap(), 1);
    };
    let (mut unified, mut handle) = (0, [0_u8; 64]);
    unsafe {
        assert_eq!(entries::cuMemAllocManaged(&raw mut unified, 4096, 1), 0);
        refused(ObstacleKind::Unified);
        assert_eq!(Memory::get().status().obstacles[0].what, "1 allocation of unified memory (cuMemAllocManaged)");
        // A free that fails ends nothing.
        gpu.fail("cuMemFree_v2", 1, 1, 1);
        assert_eq!(entries::cuMemFree_v2(unified), 1);
        refused(ObstacleKind::Unified);
        assert_eq!(entries::cuMemFree_v2(unified), 0);

        let mut plain = 0;
        assert_eq!(entries::cuMemAlloc_v2(&raw mut plain, 4096), 0);
        assert_eq!(entries::cuIpcGetMemHandle(handle.as_mut_ptr().cast(), plain), 0);
        refused(ObstacleKind::Shared);
        assert_eq!(entries::cuMemFree_v2(plain), 0);

        // A process that uses two devices comes back, whether they have access to each other or not.
        assert_eq!(hooks::cudaDeviceEnablePeerAccess(1 as c_int, 0), 0);
        assert_eq!(obstacles(), []);
        assert_eq!(hooks::cudaDeviceDisablePeerAccess(1), 0);
    }
    assert_eq!(obstacles(), []);
    // What comes when it stands aside already is told too, with none of the library's calls: the driver may have locked the process.
    let meanwhile = |kind, make: &dyn Fn()| {
        Memory::get().suspend(|| false).unwrap();
        assert_eq!(obstacles(), []);
        make();
        assert_eq!(obstacles(), [kind]);
        Memory::get().awake();
    };
    unsafe {
        meanwhile(ObstacleKind::Unified, &|| {
            let mut unified = 0;
            assert_eq!((entries::cuMemAllocManaged(&raw mut unified, 4096, 1), entries::cuMemFree_v2(unified)), (0, 0));
        });
        meanwhile(ObstacleKind::Shared, &|| {
            let (mut plain, mut handle) = (0, [0_u8; 64]);
            assert_eq!(entries::cuMemAlloc_v2(&raw mut plain, 4096), 0);
            assert_eq!((entries::cuIpcGetMemHandle(handle.as_mut_ptr().cast(), plain), entries::cuMemFree_v2(plain)), (0, 0));
        });
        let on = 1_u32;
        meanwhile(ObstacleKind::Registered, &|| {
            assert_eq!(entries::cuPointerSetAttribute((&raw const on).cast(), 6, managed), 0);
        });
    }
}

/// If any driver call of the library fails during a suspend request, the process is suspended or continues as before.
#[test]
fn a_driver_that_refuses_the_library_loses_nothing() {
    const CALLS: &[&str] = &[
        "cuCtxGetDevice",
        "cuCtxGetId",
        "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2",
        "cuCtxRecordEvent",
        "cuDeviceGetAttribute",
        "cuDeviceGetCount",
        "cuDeviceGetUuid",
        "cuDevicePrimaryCtxGetState",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuEventQuery",
        "cuMemGetInfo_v2",
        "cuMemHostUnregister",
        "cuThreadExchangeStreamCaptureMode",
    ];
    let gpu = Gpu::take();
    let _awake = Awake;
    let address = common::malloc_tagged("tag", None, 2 << 20).unwrap();
    let bytes = common::pattern(5, 2 << 20);
    assert_eq!(common::write(address, &bytes), 0);
    common::pause(&[]).unwrap();
    gpu.reset_counts();
    Memory::get().suspend(|| false).unwrap();
    let made: Vec<_> = CALLS.iter().map(|call| (*call, common::calls(call))).collect();
    assert_eq!(made.iter().map(|(_, count)| count).sum::<u64>(), common::calls(""), "all of them are listed: {made:?}");
    Memory::get().awake();
    let every = made.into_iter().flat_map(|(call, count)| (1..=count).map(move |nth| (call, nth)));
    for (call, nth) in every {
        gpu.fail(call, nth, 999, 1);
        // On a thread of the library's, as always: where the driver leaves a context current, the program is not to see it.
        let suspended = thread::spawn(|| Memory::get().suspend(|| false).is_ok()).join().unwrap();
        gpu.clear_faults();
        assert_eq!(Memory::get().status().suspended.is_some(), suspended, "{call} {nth}");
        Memory::get().awake();
        assert_eq!(common::resume(&[]).unwrap().allocations, 1, "{call} {nth}");
        assert_eq!(common::read(address, bytes.len()), Ok(bytes.clone()), "{call} {nth}");
        common::pause(&[]).unwrap();
    }
    assert_eq!((common::resume(&[]).unwrap().allocations, common::free(address)), (1, 0));
}

/// The driver would release and register it on one thread, for 73 ms a GiB. What it refuses to unregister stays as it is, and what it refuses to
/// register again goes through a small buffer.
#[test]
fn a_suspend_leaves_the_driver_no_registered_host_memory() {
    /// Three with contents, and one through which others go to their file and back.
    const PIECES: usize = 4;
    const BYTES: usize = 3 * HOST_PIECE;
    let gpu = Gpu::take();
    let _awake = Awake;
    let address = common::malloc_tagged("tag", None, BYTES).unwrap();
    let in_file = common::malloc_tagged("cold", Some(Policy::Disk), 2 << 20).unwrap();
    let bytes = common::pattern(5, BYTES);
    assert_eq!((common::write(address, &bytes), common::write(in_file, &bytes[..2 << 20])), (0, 0));
    let host = || {
        let host = Memory::get().status().host;
        (host.ready_bytes, host.pinned_bytes)
    };
    for (fails, stay) in [(None, 0), (Some("cuMemHostUnregister"), 1), (Some("cuMemHostRegister_v2"), 0)] {
        common::pause(&[]).unwrap();
        let all = (PIECES * HOST_PIECE) as u64;
        assert_eq!(host(), (all, all), "{fails:?}");
        if let Some(call) = fails {
            gpu.fail(call, 2, 2, 1);
        }
        Memory::get().suspend(|| false).unwrap();
        assert_eq!(host(), (all, (stay * HOST_PIECE) as u64), "{fails:?}");
        Memory::get().awake();
        gpu.reset_counts();
        assert_eq!(common::resume(&[]).unwrap().allocations, 2, "{fails:?}");
        gpu.clear_faults();
        assert_eq!(common::calls("cuMemHostRegister_v2"), (PIECES - stay) as u64, "{fails:?}");
        assert!(common::read(address, BYTES).as_ref() == Ok(&bytes), "{fails:?}");
        assert!(common::read(in_file, 2 << 20).is_ok_and(|read| read == bytes[..2 << 20]), "{fails:?}");
    }
}

/// From the suspend request until `awake`, a status needs no driver, and a second request returns what the first one found.
#[test]
fn a_suspended_process_makes_no_driver_calls() {
    let gpu = Gpu::take();
    let _awake = Awake;
    common::malloc_tagged("tag", None, 8 << 20).unwrap();
    common::pause(&[]).unwrap();
    let before = Memory::get().status();
    let gpus = Memory::get().suspend(|| false).unwrap();
    assert_eq!(gpus.len(), common::DEVICES as usize);
    gpu.reset_counts();
    let status = Memory::get().status();
    assert_eq!((status.suspended.as_ref(), &status.tags), (Some(&gpus), &before.tags));
    assert_eq!(Memory::get().suspend(|| false).unwrap(), gpus, "again");
    assert_eq!(common::calls(""), 0);
    Memory::get().awake();
    assert!(Memory::get().status().suspended.is_none());
    assert_eq!(common::resume(&[]).unwrap().allocations, 1);
}

/// A pause or resume that was on its way when the process was suspended says so, instead of waiting with its locks held until it is
/// awake.
#[test]
fn a_transition_of_a_suspended_process_is_refused() {
    let _gpu = Gpu::take();
    let _awake = Awake;
    common::malloc_tagged("tag", None, 8 << 20).unwrap();
    common::pause(&[]).unwrap();
    common::malloc_tagged("late", None, 2 << 20).unwrap();
    Memory::get().suspend(|| false).unwrap();
    let in_time = |work: fn() -> Result<Report, Error>| {
        thread::scope(|scope| {
            let answer = scope.spawn(work);
            let answered = common::patiently(|| if answer.is_finished() { Ok(()) } else { Err(()) }).is_ok();
            Memory::get().awake();
            let answer = answer.join().unwrap();
            Memory::get().suspend(|| false).unwrap();
            (answered, answer.map_err(|error| error.kind()).map(|report| report.allocations))
        })
    };
    assert_eq!(in_time(|| common::resume(&[])), (true, Err(Kind::Suspended)));
    // It waits for the device's work, in the driver, before it takes the lock.
    let limited = || Memory::get().pause(&common::pausing_with(&[], |request| request.timeout = Some(Duration::from_secs(60))), &mut ());
    assert_eq!(in_time(limited), (true, Err(Kind::Suspended)));
    Memory::get().awake();
    assert_eq!(common::resume(&[]).unwrap().allocations, 1);
}

/// Somebody has resumed the process between the pause and the suspend.
#[test]
fn a_process_that_runs_is_not_suspended() {
    let _gpu = Gpu::take();
    let _awake = Awake;
    common::malloc_tagged("tag", None, 2 << 20).unwrap();
    paused();
    assert_eq!(common::resume(&[]).unwrap().allocations, 1);
    assert_eq!(Memory::get().suspend(|| false).unwrap_err().kind(), Kind::Leased);
    assert!(Memory::get().status().suspended.is_none());
    common::pause(&[]).unwrap();
    Memory::get().suspend(|| false).unwrap();
    Memory::get().awake();
    assert_eq!(common::resume(&[]).unwrap().allocations, 2);
}

/// While a suspend waits for a call of the library in the driver, others still get their answers.
#[test]
fn a_suspend_that_waits_delays_no_answer() {
    let _gpu = Gpu::take();
    let _awake = Awake;
    let paused = paused();
    let in_driver = exit::as_worker(exit::enter_driver).unwrap();
    thread::scope(|scope| {
        let suspended = scope.spawn(|| Memory::get().suspend(|| false).map(drop).map_err(|error| error.kind()));
        common::eventually("it waits", exit::is_quiesced);
        let status = Memory::get().status();
        assert!(!suspended.is_finished(), "the status has waited for the suspend");
        assert_eq!(status.tags.len(), 1);
        drop(in_driver);
        assert_eq!(suspended.join().unwrap(), Ok(()));
    });
    Memory::get().awake();
    // It gives up: as before.
    let in_driver = exit::as_worker(exit::enter_driver).unwrap();
    assert_eq!(Memory::get().suspend(|| false).unwrap_err().kind(), Kind::Busy);
    drop(in_driver);
    assert!(Memory::get().status().suspended.is_none());
    assert_eq!((common::resume(&[]).unwrap().allocations, common::free(paused)), (1, 0));
}

/// If a call of the library does not return from the driver, the suspend is refused, and the program continues.
#[test]
fn a_call_in_the_driver_prevents_a_suspend() {
    let gpu = Gpu::take();
    let _awake = Awake;
    let (address, paused) = (common::malloc_tagged("tag", None, 8 << 20).unwrap(), paused());
    let (blocked, stream) = (common::Gate::new(), common::Stream::create());
    stream.wait_for(&blocked);
    gpu.reset_counts();
    let opened = thread::scope(|scope| {
        let handle = stream.handle();
        // As a worker of the library's would.
        scope.spawn(move || exit::as_worker(|| handle.wait()).unwrap());
        common::eventually("it is in the driver", || gpu.calls("cuStreamSynchronize") > 0);
        let suspended = scope.spawn(|| Memory::get().suspend(|| false));
        thread::sleep(Duration::from_millis(30));
        let waits = !suspended.is_finished();
        blocked.open();
        let is_suspended = suspended.join().unwrap().is_ok();
        // The worker's next call waits for that.
        Memory::get().awake();
        (waits, is_suspended)
    });
    assert_eq!(opened, (true, true));
    assert_eq!((common::free(address), common::free(paused)), (0, 0));
    drop(gpu);
}
