//! `--shared`: memory that processes of another job have open, between real processes under the preloaded library on a
//! simulated machine.

use crate::common::machine::{Machine, Program, Ran, Wire};
use crate::common::sharing::MIB;
use crate::common::{LONG_MS, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::decision::Decision;

const BYTES: u64 = 4 * MIB;
/// The engine's own memory.
const OWN: u64 = 2 * MIB;

/// What a process evaluates to pause itself.
const PAUSE: &str = "ctypes.CDLL(None).vramctl_pause(None, ctypes.c_longlong(-1), 0)";

/// A trainer, and an engine of another job that has the trainer's memory open and some of its own.
struct Scene {
    machine: Machine,
    trainer: Program,
    engine: Program,
    /// In the trainer, in the engine, and the engine's own.
    at: [u64; 3],
}

impl Scene {
    fn new() -> Self {
        let machine = Machine::pair();
        let mut trainer = machine.python("trainer");
        let weights = trainer.number(&format!("malloc({BYTES})"));
        assert_eq!(trainer.ask(&format!("fill({weights}, 7, {BYTES})")), "0");
        let mut engine = machine.python("engine");
        let handle = trainer.ask(&format!("get({weights})"));
        let opened = engine.number(&format!("open_('{handle}')"));
        let own = engine.number(&format!("malloc({OWN})"));
        assert_eq!(engine.ask(&format!("fill({own}, 9, {OWN})")), "0");
        Self { machine, trainer, engine, at: [weights, opened, own] }
    }

    fn held(&self) -> [bool; 2] {
        [&self.trainer, &self.engine].map(|process| self.machine.is_held(process))
    }

    /// Checks that everything is active, the same in both, and that writes of one are visible to the other.
    #[track_caller]
    fn works(&mut self, value: u8) {
        let [weights, opened, own] = self.at;
        self.machine.goes_on(&self.engine);
        assert!(!self.machine.is_held(&self.trainer));
        assert_eq!(self.engine.ask(&format!("read({opened}, {BYTES}), read({own}, {OWN})")), format!("([{value}], [9])"));
        assert_eq!(self.trainer.ask(&format!("read({weights}, {BYTES})")), format!("[{value}]"));
        assert_eq!(self.engine.ask(&format!("fill({opened}, {}, {BYTES})", value + 1)), "0");
        assert_eq!(
            self.trainer.ask(&format!("read({weights}, {BYTES}), fill({weights}, {value}, {BYTES})")),
            format!("([{}], 0)", value + 1)
        );
        assert_eq!(self.machine.used(), BYTES + OWN);
    }

    /// A pause that is refused, with this exit code and text, and has changed nothing.
    #[track_caller]
    fn refuses(&mut self, arguments: &[&str], code: i32, said: &str) {
        let text = self.machine.vramctl(&[&["pause", "--name", "trainer"], arguments].concat()).expect(code, "", "").text();
        assert!(text.contains(said), "{arguments:?}: {text}");
        assert_eq!(self.machine.used(), BYTES + OWN);
        assert_eq!(self.held(), [false; 2]);
    }
}

#[test]
fn borrowers_are_held_and_continue_by_themselves() {
    let mut scene = Scene::new();
    let [weights, opened, own] = scene.at;
    scene.works(7);
    for round in 0..3 {
        scene.refuses(&[], 5, &format!("pid {}", scene.engine.pid()));
        let said = scene.machine.done("pause --name trainer --shared");
        let aside = format!("held engine (pid {}): 4.00 MiB that it has opened from process {}", scene.engine.pid(), scene.trainer.pid());
        assert!(said.contains(&aside) && said.contains("paused default of trainer"), "{said}");
        assert_eq!(scene.machine.used(), OWN, "its own memory stays");
        assert_eq!(scene.held(), [true; 2]);
        // Work that begins meanwhile waits.
        scene.engine.ask(&format!("globals().update(end=start(lambda: fill({opened}, {round}, {BYTES})))"));
        let status = scene.machine.done("status engine");
        assert!(
            status.contains(&format!("It waits for memory of process {0}: `vramctl resume --pid {0}`", scene.trainer.pid())),
            "{status}"
        );
        assert!(scene.machine.done("ps").contains(&format!("waits for {}", scene.trainer.pid())));
        scene.machine.done("resume --name trainer");
        scene.machine.goes_on(&scene.engine);
        assert_eq!(scene.engine.ask("end()"), "0");
        // Nothing is left to ask for.
        let tasks = format!("/proc/{}/task", scene.engine.pid());
        let names = || fs::read_dir(&tasks).unwrap().filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        eventually("its worker ends", || names().all(|name| name.trim() != "vramctl-borrow"));
        assert_eq!(scene.trainer.ask(&format!("read({weights}, {BYTES}), fill({weights}, 7, {BYTES})")), format!("([{round}], 0)"));
        scene.works(7);
    }
    assert_eq!(scene.engine.ask(&format!("close({opened}), free({own})")), "(0, 0)");
    scene.machine.done("pause --name trainer --shared");
    assert!(!scene.machine.is_held(&scene.engine), "it has nothing to do with it");
    assert_eq!(scene.machine.used(), 0);
}

/// Both jobs have several processes, and only those with the memory open are held.
#[test]
fn several_owners_and_several_borrowers() {
    let machine = Machine::pair();
    let mut owners: Vec<_> = (0..2).map(|_| machine.python("trainer")).collect();
    let mut others: Vec<_> = (0..3).map(|_| machine.python("engine")).collect();
    let handles: Vec<_> = owners
        .iter_mut()
        .zip(1..)
        .map(|(owner, value)| {
            let pointer = owner.number(&format!("malloc({BYTES})"));
            assert_eq!(owner.ask(&format!("fill({pointer}, {value}, {BYTES})")), "0");
            owner.ask(&format!("get({pointer})"))
        })
        .collect();
    let opened = [(0, 0), (0, 1), (1, 1)].map(|(by, of)| (by, of + 1, others[by].number(&format!("open_('{}')", handles[of]))));
    let unrelated = others[2].number(&format!("malloc({OWN})"));
    for _ in 0..2 {
        let paused = machine.vramctl("pause --name trainer --shared --json").expect(0, "", "").json();
        let missing = |process: &Value| process["report"]["missing"].as_array().map_or(0, Vec::len);
        let told: Vec<_> =
            paused["processes"].as_array().unwrap().iter().map(|process| (process["name"].as_str().unwrap(), missing(process))).collect();
        assert_eq!(told.iter().filter(|one| **one == ("trainer", 0)).count(), 2, "{paused}");
        assert!(told.contains(&("engine", 2)) && told.contains(&("engine", 1)) && told.len() == 4, "{paused}");
        assert_eq!(machine.used(), OWN);
        assert_eq!([0, 1, 2].map(|other| machine.is_held(&others[other])), [true, true, false]);
        assert_eq!(others[2].ask(&format!("fill({unrelated}, 1, 10)")), "0");
        machine.done("resume --name trainer");
        for (by, value, at) in &opened {
            machine.goes_on(&others[*by]);
            assert_eq!(others[*by].ask(&format!("read({at}, {BYTES})")), format!("[{value}]"));
        }
    }
}

#[test]
fn a_dry_run_lists_the_borrowers() {
    let mut scene = Scene::new();
    scene.refuses(&["--dry-run"], 5, "--shared");
    let said = scene.machine.done("pause --name trainer --shared --dry-run");
    let engine = format!("engine (pid {}): would be held, too, until 4.00 MiB that it has open is resumed", scene.engine.pid());
    assert!(said.contains(&engine) && said.contains("a pause would free 4.00 MiB"), "{said}");
    let told = scene.machine.vramctl("pause --name trainer --shared --dry-run --json").expect(0, "", "").json();
    let engine = told["processes"].as_array().unwrap().iter().find(|process| process["name"] == "engine").unwrap();
    assert_eq!((&engine["aside_bytes"], &engine["pid"]), (&json!(BYTES), &json!(scene.engine.pid())), "{told}");
    assert_eq!(scene.held(), [false; 2]);
    scene.works(7);
    scene.refuses(&["--shared", "--no-hold"], 2, "--no-hold");
}

/// Has a process start no threads any more.
fn refuse_threads(process: &mut Program) {
    let refuse = format!(
        "
import struct
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
def refuse_threads():
    lines = [(0x20, 0, 0, 0), (0x15, 1, 0, {}), (0x15, 0, 1, {}), (0x06, 0, 0, 0x50000 | {}), (0x06, 0, 0, 0x7fff0000)]
    code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in lines))
    program = Program(len(lines), ctypes.addressof(code))
    return cuda.prctl({}, 1, 0, 0, 0) or cuda.syscall({}, 1, 1, ctypes.byref(program))
",
        libc::SYS_clone,
        libc::SYS_clone3,
        libc::EAGAIN,
        libc::PR_SET_NO_NEW_PRIVS,
        libc::SYS_seccomp,
    );
    assert_eq!(process.ask(&format!("exec({refuse:?}, globals()) or refuse_threads()")), "0");
}

/// Pauses two partners. Without contents, because the simulated GPU needs a thread for a copy.
fn pause_without_contents(machine: &Machine, owner: &Program, other: &Program) {
    for (process, partner) in [(owner, other), (other, owner)] {
        let pause = json!({ "request": "pause", "partners": [partner.pid()], "hold_ms": 60_000, "backup": "discard" });
        let answer = machine.answer(process, &pause);
        assert_eq!(answer["reply"], "done", "{answer}");
    }
}

/// A process that can start no threads asks for the memory all the same.
#[test]
fn a_borrower_without_threads_continues() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    let own = other.number(&format!("malloc({BYTES})"));
    other.number(&format!("open_('{handle}')"));
    let used = machine.used();
    pause_without_contents(&machine, &owner, &other);
    assert_eq!(machine.used(), 0);
    refuse_threads(&mut other);
    assert_eq!(machine.request(&owner, "resume", &[&other])["reply"], "done");
    let answer = machine.request(&other, "resume", &[&owner]);
    assert_eq!((&answer["reply"], &answer["missing"]), (&json!("done"), &json!(null)), "{answer}");
    assert!(!machine.is_held(&other));
    assert_eq!(machine.used(), used);
    assert_eq!(other.ask(&format!("free({own})")), "0");
}

/// If the owner cannot lend it either, the resume has an end, as with threads.
#[test]
fn a_borrower_and_an_owner_without_threads() {
    let machine = Machine::pair();
    let (mut owner, mut other, _, handle) = machine.sharing();
    // Without memory of its own, a thread would ask all the time.
    other.number(&format!("malloc({BYTES})"));
    other.number(&format!("open_('{handle}')"));
    pause_without_contents(&machine, &owner, &other);
    refuse_threads(&mut owner);
    refuse_threads(&mut other);
    // As a daemon closes what it does not know: it connects again, and the owner has no thread for that.
    let close = "
def close_sockets():
    names = ['/proc/self/fd/' + name for name in os.listdir('/proc/self/fd')]
    for name in names:
        if os.path.exists(name) and 'socket' in os.readlink(name):
            os.close(int(os.path.basename(name)))
";
    assert_eq!(other.ask(&format!("exec({close:?}, globals()) or close_sockets()")), "None");
    let status = ["status", "--pid", &other.pid().to_string()];
    eventually("it listens again", || machine.vramctl(&status).code == Some(0));
    assert_eq!(machine.request(&owner, "resume", &[&other])["reply"], "done");
    let answer = machine.request(&other, "resume", &[&owner]);
    assert_eq!((&answer["reply"], &answer["missing"][0]["owner"]), (&json!("done"), &json!(owner.pid())), "{answer}");
    assert!(machine.is_held(&other));
}

/// If it is resumed alone, it stays held, and the message names the owner.
#[test]
fn a_borrower_resumed_alone_stays_held() {
    let mut scene = Scene::new();
    scene.machine.done("pause --name trainer --shared");
    let said = format!("stays held: 4.00 MiB that it has opened from process {} is still paused", scene.trainer.pid());
    scene.machine.vramctl("resume --name engine").expect(5, "", &said);
    assert_eq!(scene.held(), [true; 2]);
    scene.machine.done("resume --name trainer");
    scene.works(7);
}

/// In whatever way it is brought back: all interfaces have the same exit code.
#[test]
fn a_borrower_that_a_swap_brings_back_stays_held_and_that_is_no_success() {
    let mut scene = Scene::new();
    let mut other = scene.machine.python("other");
    other.number(&format!("malloc({BYTES})"));
    scene.machine.done("pause trainer engine --shared");
    let said = format!("opened from process {} is still paused", scene.trainer.pid());
    scene.machine.vramctl("swap other engine").expect(5, "swapped in ", &said);
    scene.machine.done("swap engine other");
    let swapped = scene.machine.vramctl("swap other engine --json").expect(5, "", "").json();
    let missing = &swapped["processes"][1]["report"]["missing"][0];
    assert_eq!((&missing["owner"], missing["gpu_index"].is_u64()), (&json!(scene.trainer.pid()), true), "{swapped}");
    scene.machine.done("swap engine other");
    let mut operating = scene.machine.cli("operate").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // Then the end of stdin is no cancellation.
    let request = json!({"version": 1, "operation": "resume", "target": {"name": "engine"}, "detached": true});
    writeln!(operating.stdin.take().unwrap(), "{request}").unwrap();
    Ran::end_of(operating).expect(5, "\"committed\":true", "");
    drop(other);
    scene.machine.done("resume trainer");
    scene.works(7);
}

/// Each goes on when its own memory is back and that of the other, in any order.
#[test]
fn a_borrower_may_be_paused_itself() {
    let mut scene = Scene::new();
    for order in [["engine", "trainer"], ["trainer", "engine"]] {
        for first in 0..2 {
            let pauses = [&["pause", "--name", "engine"][..], &["pause", "--name", "trainer", "--shared"]];
            scene.machine.done(pauses[first]);
            scene.machine.done(pauses[1 - first]);
            assert_eq!((scene.machine.used(), scene.held()), (0, [true; 2]), "{order:?} {first}");
            let output = scene.machine.vramctl(&["resume", "--name", order[0]]);
            assert_eq!(output.code, Some(if order[0] == "engine" { 5 } else { 0 }), "{output:?}");
            assert!(scene.machine.is_held(&scene.engine));
            scene.machine.done(&["resume", "--name", order[1]]);
            scene.works(7);
        }
    }
}

/// The owner alone could not pause memory that others have open. If it tries to while all are paused, the memory comes back nevertheless.
#[test]
fn an_owner_cannot_keep_lent_memory_away_from_its_borrowers() {
    let mut scene = Scene::new();
    assert_ne!(scene.trainer.ask(PAUSE), "0");
    scene.machine.done("pause --name trainer --shared");
    assert_eq!(scene.trainer.ask(PAUSE), "0");
    scene.machine.done("resume --name trainer");
    scene.works(7);
}

/// A borrower whose own memory sleeps is held for the owner's, and continues asleep.
#[test]
fn a_borrower_may_sleep() {
    let mut scene = Scene::new();
    assert_eq!(scene.engine.ask(PAUSE), "0");
    assert_eq!((scene.machine.used(), scene.held()), (BYTES, [false; 2]));
    scene.machine.done("pause --name trainer --shared");
    assert_eq!((scene.machine.used(), scene.held()), (0, [true; 2]));
    assert!(scene.machine.done("ps").contains(&format!("waits for {}", scene.trainer.pid())));
    scene.machine.done("resume --name trainer");
    scene.machine.goes_on(&scene.engine);
    assert_eq!(scene.machine.used(), BYTES);
    assert_eq!(scene.engine.ask("ctypes.CDLL(None).vramctl_resume(None, ctypes.c_longlong(-1))"), "0");
    scene.works(7);
}

/// Memory that is set aside is not open, so its owner need not include the borrower.
#[test]
fn the_owner_may_be_paused_again_before_the_borrower_is_back() {
    let mut scene = Scene::new();
    scene.machine.done("pause --name engine");
    scene.machine.done("pause --name trainer --shared");
    for _ in 0..2 {
        scene.machine.done("resume --name trainer");
        scene.machine.done("pause --name trainer");
        assert_eq!(scene.machine.used(), 0);
    }
    scene.machine.done("resume --name trainer");
    scene.machine.done("resume --name engine");
    scene.works(7);
    scene.refuses(&[], 5, &format!("pid {}", scene.engine.pid()));
}

/// If it were held, it would stay held until its own memory is resumed, too, although it was paused to run without it.
#[test]
fn a_borrower_paused_without_hold_is_refused() {
    let mut scene = Scene::new();
    scene.machine.done("pause --name engine --no-hold");
    let said = format!("engine (pid {}): some of its own memory was paused with --no-hold", scene.engine.pid());
    scene.machine.vramctl("pause --name trainer --shared").expect(1, "", &said);
    assert_eq!((scene.machine.used(), scene.held()), (BYTES, [false; 2]));
    scene.machine.done("resume --name engine");
    scene.works(7);
}

#[test]
fn a_borrower_that_cannot_be_asked_is_named() {
    let mut scene = Scene::new();
    let pid = scene.engine.pid();
    scene.engine.stop();
    let output = scene.machine.vramctl(&["pause", "--pid", &scene.trainer.pid().to_string(), "--shared"]);
    output.expect(5, "", &format!("engine (pid {pid}) has 4.00 MiB of it open")).has(5, "", "is it stopped?");
    scene.engine.go_on();
    scene.works(7);
    // As one that was started with another directory for its socket.
    let socket = scene.machine.folder.path().join(format!("sockets/{pid}.sock"));
    let away = socket.with_extension("away");
    fs::rename(&socket, &away).unwrap();
    let said = format!("process {pid} has 4.00 MiB of it open and cannot be held: it does not listen");
    scene.machine.vramctl("pause --name trainer --shared").expect(5, "", &said);
    assert_eq!(scene.machine.used(), BYTES + OWN);
    fs::rename(away, socket).unwrap();
    scene.works(7);
}

/// Two coordinators would block each other.
#[test]
fn jobs_that_share_are_paused_as_one() {
    let mut scene = Scene::new();
    let mut alone = scene.machine.python("alone");
    let pointer = alone.number(&format!("malloc({OWN})"));
    assert_eq!(scene.machine.vramctl("pause --all").code, Some(5));
    scene.machine.done("resume --all");
    let paused = scene.machine.vramctl("pause --all --shared --json").expect(0, "", "").json();
    let mut jobs: Vec<_> = paused["jobs"].as_array().unwrap().iter().map(|job| job["pids"].as_array().unwrap().len()).collect();
    jobs.sort_unstable();
    assert_eq!(jobs, [1, 2], "{paused}");
    assert_eq!((scene.machine.used(), scene.held()), (0, [true; 2]));
    scene.machine.done("resume --all");
    assert_eq!(alone.ask(&format!("free({pointer})")), "0");
    scene.works(7);
}

/// Memory that the owner does not pause after all comes back to the borrower at once.
#[test]
fn registered_memory_can_be_left_out_of_a_shared_pause() {
    let mut scene = Scene::new();
    let more = scene.trainer.number(&format!("malloc({OWN})"));
    let [weights, opened, _] = scene.at;
    let driver = "ctypes.CDLL('libcuda.so.1')";
    let register = format!("{driver}.cuPointerSetAttribute(ctypes.byref(ctypes.c_int(1)), 6, ctypes.c_uint64({weights}))");
    assert_eq!(scene.trainer.ask(&register), "0");
    scene.machine.vramctl("pause --name trainer --shared").expect(1, "", "registered");
    scene.machine.done("pause --name trainer --shared --registered keep");
    assert_eq!(scene.machine.used(), BYTES + OWN, "the rest is paused");
    scene.machine.goes_on(&scene.engine);
    assert_eq!(scene.engine.ask(&format!("read({opened}, {BYTES})")), "[7]");
    scene.machine.done("resume --name trainer");
    assert_eq!(scene.trainer.ask(&format!("free({more})")), "0");
    scene.works(7);
}

/// Even if it has no memory of its own there.
#[test]
fn the_work_of_a_borrower_is_waited_for() {
    let machine = Machine::pair();
    let (mut trainer, mut engine) = (machine.python("trainer"), machine.python("engine"));
    let weights = trainer.number(&format!("malloc({BYTES})"));
    let handle = trainer.ask(&format!("get({weights})"));
    let opened = engine.number(&format!("open_('{handle}')"));
    // The first allocation starts the socket.
    assert_eq!(engine.ask(&format!("free(malloc({OWN}))")), "0");
    engine.ask(&format!("ctypes.CDLL('libcuda.so.1').simgpu_set_op_delay_ms(ctypes.c_uint64({LONG_MS}))"));
    assert_eq!(engine.ask(&format!("cuda.cudaMemsetAsync(ctypes.c_void_p({opened}), 1, ctypes.c_size_t(10), None)")), "0");
    let mut wire = machine.connect(&engine);
    wire.step(&json!({"request": "hold", "lease_ms": 30_000}), None, "held");
    wire.step(&json!({"request": "drain", "limit_ms": 200}), None, "error");
}

/// One that ends while all wait for its work: the pause goes on without it.
#[test]
fn a_borrower_that_ends_meanwhile_does_not_prevent_the_pause() {
    let mut scene = Scene::new();
    let own = scene.at[2];
    scene.engine.ask(&format!("ctypes.CDLL('libcuda.so.1').simgpu_set_op_delay_ms(ctypes.c_uint64({LONG_MS}))"));
    assert_eq!(scene.engine.ask(&format!("cuda.cudaMemsetAsync(ctypes.c_void_p({own}), 1, ctypes.c_size_t(10), None)")), "0");
    let pausing = scene.machine.begin("pause --name trainer --shared");
    eventually("it is held", || scene.machine.is_held(&scene.engine));
    scene.engine.kill();
    let ran = Ran::end_of(pausing).expect(0, "paused default of trainer", "");
    assert!(!ran.out.contains("engine"), "{ran:?}");
    assert_eq!(scene.machine.used(), 0);
    scene.machine.done("resume --name trainer");
}

/// How far a coordinator gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Until {
    HeldOne,
    Drained,
    PreparedOwner,
    PreparedBorrower,
    PreparedBoth,
    Decided,
    ToldOwner,
    ToldBorrower,
    ToldBoth,
}

impl Until {
    const ALL: [Self; 9] = [
        Self::HeldOne,
        Self::Drained,
        Self::PreparedOwner,
        Self::PreparedBorrower,
        Self::PreparedBoth,
        Self::Decided,
        Self::ToldOwner,
        Self::ToldBorrower,
        Self::ToldBoth,
    ];
}

/// A coordinator. Dropping it simulates its death.
struct Coordinator {
    trainer: Wire,
    engine: Wire,
    decision: (Decision, OwnedFd),
}

impl Coordinator {
    fn of(scene: &Scene, until: Until) -> Self {
        let (mut trainer, mut engine) = (scene.machine.connect(&scene.trainer), scene.machine.connect(&scene.engine));
        let decision = Decision::create().unwrap();
        let hold = json!({"request": "hold", "lease_ms": 30_000});
        let drain = json!({"request": "drain", "limit_ms": 10_000});
        trainer.step(&hold, None, "held");
        if until > Until::HeldOne {
            engine.step(&hold, None, "held");
            trainer.step(&drain, None, "drained");
            engine.step(&drain, None, "drained");
        }
        if until >= Until::PreparedOwner && until != Until::PreparedBorrower {
            let prepare = json!({"request": "prepare", "of": "pause", "borrowers": [scene.engine.pid()], "timeout_ms": 10_000});
            trainer.step(&prepare, Some(decision.1.as_fd()), "prepared");
        }
        if until >= Until::PreparedBorrower {
            let aside = json!({"request": "set-aside", "partners": [scene.trainer.pid()], "timeout_ms": 10_000});
            engine.step(&aside, Some(decision.1.as_fd()), "prepared");
        }
        if until >= Until::Decided {
            assert!(decision.0.commit());
        }
        let commit = json!({"request": "commit"});
        if until == Until::ToldOwner || until == Until::ToldBoth {
            trainer.step(&commit, None, "done");
        }
        if until >= Until::ToldBorrower {
            engine.step(&commit, None, "done");
        }
        Self { trainer, engine, decision }
    }

    /// Goes on after the end of one.
    fn end(mut self) {
        let request = if self.decision.0.abort() { "abort" } else { "commit" };
        for wire in [&mut self.trainer, &mut self.engine] {
            // One may be gone, or done.
            let _ = vramctl_control::descriptors::send_line(
                wire.0.get_ref(),
                format!("{}\n", json!({"version": 1, "request": request})).as_bytes(),
                &[],
                0,
            );
        }
    }
}

#[test]
fn whenever_the_coordinator_dies_both_are_in_one_state() {
    let mut scene = Scene::new();
    for until in Until::ALL {
        drop(Coordinator::of(&scene, until));
        if until >= Until::Decided {
            eventually("both paused", || scene.machine.used() == OWN && scene.held() == [true; 2]);
            scene.machine.done("resume --name trainer");
        } else {
            eventually("both active", || scene.held() == [false; 2]);
        }
        scene.works(7);
    }
}

#[test]
fn whenever_the_borrower_dies_the_owner_can_be_resumed() {
    for until in Until::ALL {
        let mut scene = Scene::new();
        let coordinator = Coordinator::of(&scene, until);
        scene.engine.kill();
        coordinator.end();
        let is_paused = until >= Until::Decided;
        eventually("one of both", || scene.machine.is_held(&scene.trainer) == is_paused);
        eventually("freed", || scene.machine.used() == if is_paused { 0 } else { BYTES });
        scene.machine.done("resume --name trainer");
        assert_eq!(scene.trainer.ask(&format!("read({}, {BYTES})", scene.at[0])), "[7]", "{until:?}");
        // Nobody has it open any more.
        scene.machine.done("pause --name trainer");
        assert_eq!(scene.machine.used(), 0);
    }
}

/// Its open memory is unchanged, or lost. It continues in both cases.
#[test]
fn whenever_the_owner_dies_the_borrower_continues() {
    for until in Until::ALL {
        let mut scene = Scene::new();
        let [_, opened, own] = scene.at;
        let coordinator = Coordinator::of(&scene, until);
        scene.trainer.kill();
        coordinator.end();
        scene.machine.goes_on(&scene.engine);
        let found = scene.engine.ask(&format!("read({opened}, {BYTES})"));
        assert_eq!(found == "[7]", until < Until::Decided, "{until:?}: {found}");
        assert_eq!(scene.engine.ask(&format!("read({own}, {OWN}), close({opened})")), "([9], 0)", "{until:?}");
        assert_eq!(scene.machine.used(), OWN, "{until:?}");
    }
}

/// The owner ends long after the pause, while the borrower waits for it.
#[test]
fn an_owner_that_ends_while_paused_releases_its_borrowers() {
    let mut scene = Scene::new();
    let [_, opened, own] = scene.at;
    scene.machine.done("pause --name trainer --shared");
    scene.trainer.kill();
    scene.machine.goes_on(&scene.engine);
    assert_ne!(scene.engine.ask(&format!("read({opened}, {BYTES})")), "[7]", "it is lost");
    assert_eq!(scene.engine.ask(&format!("read({own}, {OWN}), close({opened})")), "([9], 0)");
    assert_eq!(scene.machine.used(), OWN);
}

/// The status tells the GPU on which it is now.
#[test]
fn open_memory_moves_with_the_processes() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("job"), machine.python("job"));
    let pointer = owner.number(&format!("malloc({BYTES})"));
    let handle = owner.ask(&format!("get({pointer})"));
    other.number(&format!("open_('{handle}')"));
    let gpus = || {
        let told = machine.request(&owner, "status", &[])["devices"][0]["uuid"].clone();
        (told, machine.request(&other, "status", &[])["borrowed"][0]["gpu"].clone())
    };
    let (before, its) = gpus();
    assert_eq!(before, its);
    machine.done("move job --to 1");
    let (after, its) = gpus();
    assert_ne!(before, after);
    assert_eq!(after, its);
}

/// The lock of open memory is free meanwhile.
#[test]
fn a_slow_mapping_delays_nobody() {
    let mut scene = Scene::new();
    let slow = |milliseconds| format!("ctypes.CDLL('libcuda.so.1').simgpu_slow_down(b'cuMemMap', ctypes.c_uint64({milliseconds}))");
    scene.machine.done("pause --name trainer --shared");
    assert_eq!(scene.engine.ask(&slow(LONG_MS)), "0");
    scene.machine.done("resume --name trainer");
    // Until it has the trainer's memory, and is mapping it.
    eventually("mapping", || scene.engine.ask("ctypes.CDLL('libcuda.so.1').simgpu_calls(b'cuMemImportFromShareableHandle')") != "1");
    let told = scene.machine.request(&scene.engine, "status", &[]);
    assert_eq!((&told["held"], &told["borrowed"][0]["paused_bytes"]), (&json!(true), &json!(BYTES)), "{told}");
    assert_eq!(scene.engine.ask(&slow(0)), "0");
    scene.works(7);
}

/// A close waits neither for a stopped owner nor for a thread that is waiting for that owner.
#[test]
fn memory_of_an_owner_that_is_stopped_can_be_closed() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let handles: Vec<_> = (0..4)
        .map(|_| {
            let pointer = owner.number(&format!("malloc({OWN})"));
            owner.ask(&format!("get({pointer})"))
        })
        .collect();
    let opened: Vec<_> = handles[..3].iter().map(|handle| other.number(&format!("open_('{handle}')"))).collect();
    owner.stop();
    other.ask(&format!("globals().update(end=start(lambda: open_('{}')))", handles[3]));
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    assert_eq!(other.ask(&format!("close({}), close({})", opened[0], opened[1])), "(0, 0)");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(machine.used(), 4 * OWN, "the owner's");
    owner.go_on();
    let last = other.number("end()");
    assert_eq!(other.ask(&format!("read({last}, 10)")), "[0]");
    // The owner knows of all.
    assert_eq!(other.ask(&format!("close({last}), close({})", opened[2])), "(0, 0)");
    machine.done("pause --name owner");
    machine.done("resume --name owner");
    // Nobody is asking it for anything.
    let again = other.number(&format!("open_('{}')", handles[0]));
    owner.stop();
    let begun = Instant::now();
    assert_eq!(other.ask(&format!("close({again})")), "0");
    assert!(begun.elapsed() < Duration::from_secs(30));
    owner.go_on();
    machine.done("pause --name owner");
    assert_eq!(machine.used(), 0);
}

/// A suspend does not include other processes by itself, so its message says how to include them.
#[test]
fn a_suspend_says_what_to_do_about_memory_that_others_have_open_and_that_works() {
    let mut scene = Scene::new();
    let said = |arguments: &[&str], code: i32, wanted: &str| {
        let text = scene.machine.vramctl(arguments).expect(code, "", "").text();
        assert!(text.contains(wanted), "{arguments:?}: {text}");
        // A move does not have the option, nor would it help a borrower.
        assert_eq!(text.contains("add --shared"), arguments[..2] == ["suspend", "trainer"], "{text}");
        assert!(!text.contains("--registered"), "{text}");
    };
    let open = format!("other processes have memory of trainer (pid {}) open (CUDA IPC): default by pid", scene.trainer.pid());
    let together = "all of these processes (--all, or a name that they have in common)";
    for arguments in [&["suspend", "trainer"][..], &["suspend", "trainer", "--dry-run"], &["move", "trainer", "--to", "1"]] {
        said(arguments, 5, &open);
        said(arguments, 5, "--all, or a name that they have in common");
    }
    for arguments in [&["suspend", "engine", "--dry-run"][..], &["move", "engine", "--to", "1"]] {
        said(arguments, 7, &format!("1 piece of other processes' memory, unless one command takes {together}"));
    }
    said(
        &["status", "trainer"],
        0,
        &format!("memory that other processes have open, unless one command takes {together}, or --shared holds them (4.00 MiB)"),
    );
    scene.works(7);
    for steps in [["suspend --all", "resume --all"], ["move --all --to 1", "move --all --to 0"]] {
        for step in steps {
            scene.machine.done(step);
        }
        scene.works(7);
    }
}

/// What refuses does not hide what the others would do.
#[test]
fn a_dry_run_of_a_suspend_lists_those_that_would_refuse_and_the_others() {
    let scene = Scene::new();
    let mut other = scene.machine.python("other");
    other.number(&format!("malloc({OWN})"));
    let others = format!("other (pid {}): a suspend would free 2.00 MiB", other.pid());
    scene.machine.vramctl("suspend trainer other --dry-run").expect(5, &others, "add --shared");
    let told = scene.machine.vramctl("suspend trainer other --dry-run --json").expect(5, "", "").only_json();
    let of = |name: &str| told["processes"].as_array().unwrap().iter().find(|process| process["name"] == name).unwrap();
    assert_eq!((&of("trainer")["error"]["code"], of("other")["plan"].is_object()), (&json!("shared"), true), "{told}");
}

/// The engine stays on the GPU, and is held until the trainer is back. It may be suspended, too.
#[test]
fn an_owner_is_suspended_while_its_borrowers_are_held() {
    let mut scene = Scene::new();
    let [trainer, engine] = [scene.trainer.pid(), scene.engine.pid()];
    let foretold = scene.machine.done("suspend trainer --shared --dry-run");
    assert!(foretold.contains(&format!("engine (pid {engine}): would be held, too, until 4.00 MiB")), "{foretold}");
    assert_eq!(scene.held(), [false; 2]);
    for engine_too in [false, true] {
        let said = scene.machine.done("suspend trainer --shared");
        let held = format!("held engine (pid {engine}): 4.00 MiB that it has opened from process {trainer} is paused");
        assert!(said.contains(&held) && said.contains(&format!("suspended trainer (pid {trainer})")), "{said}");
        assert_eq!(scene.machine.used(), OWN);
        assert_eq!(scene.held(), [true; 2]);
        if engine_too {
            scene.machine.done("suspend engine");
            assert_eq!(scene.machine.used(), 0);
            // It has its own memory again, and waits for the trainer's.
            assert_eq!(scene.machine.vramctl("resume --name engine").code, Some(5));
            assert_eq!((scene.machine.used(), scene.held()), (OWN, [true; 2]));
        }
        scene.machine.done("resume --name trainer");
        scene.works(7);
    }
    let told = scene.machine.vramctl("suspend trainer --shared --json").expect(0, "", "").json();
    let of = |pid: u32| told["processes"].as_array().unwrap().iter().find(|process| process["pid"] == pid).unwrap()["report"].clone();
    assert!(of(trainer)["bytes"].as_u64() > Some(BYTES) && of(trainer)["missing"].is_null(), "{told}");
    assert_eq!((&of(engine)["bytes"], &of(engine)["missing"][0]["paused_bytes"]), (&json!(0), &json!(BYTES)), "{told}");
    scene.machine.done("resume --name trainer");
    scene.works(7);
}

#[test]
fn an_owner_that_cannot_be_suspended_with_its_borrowers_runs_on() {
    let mut scene = Scene::new();
    let suspend = |scene: &Scene, faults: &str| {
        let ran = Ran::of(scene.machine.cli("suspend trainer --shared").env("SIMGPU_FAIL", faults));
        (ran.code, ran.text())
    };
    // The driver refuses: both stay held until the resume, as after a pause.
    let (code, text) = suspend(&scene, "cuCheckpointProcessCheckpoint:1:999");
    assert!(code == Some(1) && text.contains("held engine") && text.contains("All tags are paused"), "{code:?} {text}");
    assert_eq!((scene.machine.used(), scene.held()), (OWN, [true; 2]));
    scene.machine.done("resume --name trainer");
    scene.works(7);
    // The engine does not answer.
    scene.engine.stop();
    let (code, text) = suspend(&scene, "");
    scene.engine.go_on();
    assert!(code == Some(5) && text.contains("has 4.00 MiB of it open and cannot be held: no answer"), "{code:?} {text}");
    scene.works(7);
}
