//! Jobs: processes that are paused and resumed as one, no matter which of them dies at which step. Real programs under the preloaded
//! library on a simulated machine.

use crate::common;
use crate::common::machine::{Machine, Program, Ran, Wire, proxy, row_of};
use crate::common::{eventually, in_parallel};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::decision::Decision;
use vramctl_control::descriptors;

#[test]
fn a_job_is_paused_and_resumed_as_one() {
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    let ps = machine.vramctl("ps").expect(0, "", "");
    for rank in 1..=3 {
        let of_rank = |line: &str| line.contains("engine") && line.contains("active") && line.contains(&format!("engine {rank}/3"));
        let line = ps.out.lines().find(|line| of_rank(line)).unwrap_or_else(|| panic!("{}", ps.out));
        let cells: Vec<_> = line.split_whitespace().collect();
        assert!(cells.windows(3).any(|cells| cells[0].ends_with("iB") && cells[1..] == ["0", "engine"]), "GPU 0: {line}");
    }
    let paused = machine.vramctl("pause --name engine --json").expect(0, "", "").json();
    assert_eq!(paused["processes"].as_array().unwrap().len(), 3, "{paused}");
    assert_eq!((&paused["jobs"][0]["job"], &paused["jobs"][0]["committed"]), (&json!("engine"), &json!(true)), "{paused}");
    assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
    machine.vramctl("resume --name engine").expect(0, "resumed job engine: 3 processes, ", "");
    assert_eq!(machine.settled(&ranks.each_ref()), "active");
    ranks.iter_mut().for_each(Program::verify);
    machine.vramctl("pause").expect(0, "paused job engine: 3 processes, ", "");
    machine.vramctl("resume").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// In containers without the binary.
#[test]
fn the_scripts_hold_a_process_and_refuse_half_a_job() {
    let machine = Machine::new();
    let script = |name: &str, arguments: &[&str]| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name);
        Ran::of(&mut machine.command(path, arguments))
    };
    let [first] = machine.job("engine");
    script("pause.sh", &[]).expect(0, "\"reply\":\"done\"", "");
    assert_eq!(machine.state(&first), "paused, held");
    script("resume.sh", &[]).expect(0, "\"reply\":\"done\"", "");
    script("pause.sh", &["--no-hold"]).expect(0, "", "");
    assert_eq!(machine.state(&first), "paused");
    script("resume.sh", &[]).expect(0, "", "");
    let [second] = machine.job("engine");
    script("pause.sh", &["--all"]).expect(2, "", "one job");
    assert_eq!(machine.settled(&[&first, &second]), "active");
    machine.vramctl("pause").expect(0, "", "");
    script("resume.sh", &["--all"]).expect(0, "", "");
    let mut ranks = [first, second];
    assert_eq!(machine.settled(&ranks.each_ref()), "active");
    ranks.iter_mut().for_each(Program::verify);
    drop(ranks);
    // Two runs of one name are one job, and of two names they are two.
    let run = |name: &str, run: &str| machine.engine_with(name, |command| _ = command.env("VRAMCTL_JOB", run));
    let [first, second] = [run("pair", "one"), run("pair", "two")];
    script("pause.sh", &["--all"]).expect(2, "", "one job");
    assert_eq!(machine.settled(&[&first, &second]), "active");
    drop(second);
    // Whose name begins the same.
    let other = run("pai", "three");
    script("pause.sh", &["--all"]).expect(0, "", "");
    assert_eq!(machine.settled(&[&first, &other]), "paused, held");
}

/// How far a coordinator gets before it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Until {
    HeldAll,
    PreparedOne,
    PreparedAll,
    /// And has told nobody.
    Decided,
    ToldOne,
}

/// A coordinator that gets this far.
struct Coordinator {
    wires: Vec<Wire>,
    decision: Decision,
}

/// Asks a process for the next step. `None` if its lease has ended meanwhile.
fn step(wire: &mut Wire, request: &Value, file: Option<BorrowedFd<'_>>, wanted: &str) -> Option<()> {
    wire.send(request, file);
    let answer = wire.answer();
    if answer["code"] == "aborted" {
        return None;
    }
    assert_eq!(answer["reply"], wanted, "{answer}");
    Some(())
}

impl Coordinator {
    /// `None` if this machine is too slow for the lease.
    fn of(machine: &Machine, ranks: &[Program], until: Until, lease_ms: u64) -> Option<Self> {
        let mut wires: Vec<_> = ranks.iter().map(|rank| machine.connect(rank)).collect();
        let (decision, file) = Decision::create().unwrap();
        for wire in &mut wires {
            step(wire, &json!({"request": "hold", "lease_ms": lease_ms}), None, "held")?;
        }
        let prepared = if until == Until::HeldAll { 0 } else { ranks.len() };
        for wire in &mut wires[..prepared] {
            step(wire, &json!({"request": "drain", "limit_ms": 10_000}), None, "drained")?;
        }
        for wire in &mut wires[..if until == Until::PreparedOne { 1 } else { prepared }] {
            let prepare = json!({"request": "prepare", "of": "pause", "lease_ms": lease_ms, "timeout_ms": 10_000});
            step(wire, &prepare, Some(file.as_fd()), "prepared")?;
        }
        if until >= Until::Decided && !decision.commit() {
            return None;
        }
        if until == Until::ToldOne {
            step(&mut wires[0], &json!({"request": "commit"}), None, "done")?;
        }
        Some(Self { wires, decision })
    }
}

/// A stopped coordinator is as good as dead, but its connections stay open.
#[test]
fn whenever_its_coordinator_is_stopped_a_job_is_in_one_state() {
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    for until in [Until::HeldAll, Until::PreparedOne, Until::PreparedAll, Until::Decided, Until::ToldOne] {
        let mut lease_ms = 500;
        let mut stopped = loop {
            lease_ms *= 2;
            if let Some(stopped) = Coordinator::of(&machine, &ranks, until, lease_ms) {
                break stopped;
            }
            assert_eq!(machine.settled(&ranks.each_ref()), "active");
        };
        let wanted = if until >= Until::Decided { "paused, held" } else { "active" };
        assert_eq!(machine.settled(&ranks.each_ref()), wanted, "{until:?}");
        let told = stopped.wires[1].answer();
        if until >= Until::Decided {
            assert_eq!(told["reply"], "done", "{told}");
        } else {
            assert!(told["code"] == "aborted", "{told}");
            // It continues, and learns that it is too late.
            let prepared = until >= Until::PreparedOne;
            assert!(!prepared || !stopped.decision.commit(), "{until:?}");
            let late = stopped.wires[0].ask(&json!({"request": "status"}));
            assert!(["error", "status"].contains(&late["reply"].as_str().unwrap()), "{late}");
        }
        machine.vramctl("resume").expect(0, "", "");
    }
    ranks.iter_mut().for_each(Program::verify);
}

/// Any other request between the steps ends the lease. Nothing has changed, and the program continues.
#[test]
fn garbage_between_the_steps_undoes_everything() {
    let machine = Machine::new();
    let mut ranks: [Program; 1] = machine.job("engine");
    let (hold, drain) = (json!({"request": "hold"}), json!({"request": "drain", "limit_ms": 10_000}));
    let prepare = json!({"request": "prepare", "of": "pause", "timeout_ms": 10_000});
    for steps in [&[][..], &[(&hold, "held")], &[(&hold, "held"), (&drain, "drained")], &[(&hold, "held"), (&prepare, "prepared")]] {
        for garbage in ["no request\n", "{}\n", "{\"version\":1,\"request\":\"resume\"}\n", "{\"version\":1,\"request\":\"status\"}\n"] {
            let mut wire = machine.connect(&ranks[0]);
            for (request, wanted) in steps {
                wire.step(request, None, wanted);
            }
            descriptors::send_line(wire.0.get_ref(), garbage.as_bytes(), &[], 0).unwrap();
            // The connection is still usable, but the lease is over.
            wire.send(&json!({"request": "commit"}), None);
            let answer = [wire.answer(), wire.answer()][1].clone();
            assert_eq!((&answer["reply"], &answer["code"]), (&json!("error"), &json!("invalid")), "{steps:?} {garbage:?}: {answer}");
            assert_eq!(machine.settled(&ranks.each_ref()), "active");
        }
    }
    ranks.iter_mut().for_each(Program::verify);
}

/// A client that needs longer for a step says that it is alive. There is no answer to that.
#[test]
fn a_lease_can_be_renewed_between_the_steps() {
    let machine = Machine::new();
    let [mut rank] = machine.job("engine");
    let mut wire = machine.connect(&rank);
    let steps = [
        (json!({"request": "hold", "lease_ms": 30_000}), "held"),
        (json!({"request": "drain", "limit_ms": 10_000}), "drained"),
        (json!({"request": "prepare", "of": "pause", "timeout_ms": 10_000}), "prepared"),
        (json!({"request": "commit"}), "done"),
    ];
    for (request, wanted) in &steps {
        wire.step(request, None, wanted);
        if *wanted != "done" {
            wire.send(&json!({"request": "renew"}), None);
            // So that the process finds nothing else to read for now.
            thread::sleep(Duration::from_millis(50));
        }
    }
    assert_eq!(machine.settled(&[&rank]), "paused, held");
    machine.vramctl("resume").expect(0, "", "");
    rank.verify();
}

/// A client may say commit after another rank has aborted: the decision counts.
#[test]
fn a_commit_after_another_rank_has_aborted_changes_nothing() {
    let machine = Machine::new();
    let [rank] = machine.job("engine");
    let (decision, file) = Decision::create().unwrap();
    let mut wire = machine.connect(&rank);
    wire.step(&json!({"request": "prepare", "of": "pause", "timeout_ms": 10_000}), Some(file.as_fd()), "prepared");
    assert!(decision.abort());
    wire.send(&json!({"request": "commit"}), None);
    assert_eq!(wire.answer()["code"], "aborted");
    assert_eq!(machine.settled(&[&rank]), "active");
}

/// The file's owner could truncate it, and accessing the mapping would then kill the program.
#[test]
fn a_decision_file_that_could_do_harm_is_refused() {
    let machine = Machine::new();
    let mut ranks: [Program; 1] = machine.job("engine");
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    for verb in ["pause", "resume"] {
        let mut wire = machine.connect(&ranks[0]);
        wire.send(&json!({"request": "prepare", "of": verb}), Some(file.as_fd()));
        let answer = wire.answer();
        assert!(answer["code"] == "invalid" && answer["message"].as_str().unwrap().contains("sealed memfd"), "{answer}");
    }
    assert_eq!(machine.settled(&ranks.each_ref()), "active");
    // Without one, the connection alone decides.
    for verb in ["pause", "resume"] {
        let mut wire = machine.connect(&ranks[0]);
        wire.step(&json!({"request": "prepare", "of": verb}), None, "prepared");
        assert_eq!(machine.connect(&ranks[0]).ask(&json!({"request": "prepare", "of": verb}))["code"], "leased");
        wire.step(&json!({"request": "commit"}), None, "done");
    }
    ranks.iter_mut().for_each(Program::verify);
}

/// Without the decision, the connection alone would decide: if its coordinator died, this rank would abort what the others commit.
#[test]
fn a_rank_that_cannot_receive_the_decision_refuses() {
    let machine = Machine::new();
    let mut ranks: [Program; 2] = machine.job("engine");
    for request in [json!({"request": "hold"}), json!({"request": "prepare", "of": "pause"})] {
        let (_decision, file) = Decision::create().unwrap();
        let mut wire = machine.connect(&ranks[0]);
        assert_eq!(wire.ask(&json!({"request": "hello"}))["reply"], "hello");
        let limit = without_descriptors(ranks[0].pid());
        wire.send(&request, Some(file.as_fd()));
        let answer = wire.answer();
        set_limit_of_descriptors(ranks[0].pid(), limit);
        let refusal = answer["message"].as_str().unwrap_or_default();
        assert!(answer["reply"] == "error" && refusal.contains("limit of open files"), "{answer}");
        assert_eq!(machine.settled(&ranks.each_ref()), "active", "{request}");
    }
    machine.vramctl("pause").expect(0, "paused job engine: 2 processes", "");
    machine.vramctl("resume").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// Lets a process open no more files, not even under the numbers that the library has in reserve. Returns the limit as it was.
fn without_descriptors(pid: u32) -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    assert_eq!(unsafe { libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) }, 0);
    set_limit_of_descriptors(pid, libc::rlimit { rlim_cur: 3, ..limit });
    limit
}

fn set_limit_of_descriptors(pid: u32, limit: libc::rlimit) {
    assert_eq!(unsafe { libc::prlimit(pid as i32, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) }, 0);
}

/// A moment in the dialogue of the coordinator and a process: a request, or its answer, is on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Moment {
    request: &'static str,
    is_answered: bool,
}

/// What happens then.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    RankKilled,
    RankStopped,
    CoordinatorKilled,
}

/// A [`proxy`] that, at one moment of the second process, waits until the test has done something.
struct Between {
    folder: tempfile::TempDir,
    reached: Receiver<Instant>,
    go_on: SyncSender<()>,
}

struct Stage {
    moment: Moment,
    /// Signals that the moment has come, and waits for the test.
    reached: Mutex<Option<(SyncSender<Instant>, Receiver<()>)>>,
    passed: Mutex<bool>,
    changed: Condvar,
}

impl Stage {
    fn come_to(&self, rank: usize, request: &str, is_answered: bool) -> bool {
        if rank == 1 && request == self.moment.request && is_answered == self.moment.is_answered {
            if let Some((reached, go_on)) = self.reached.lock().unwrap().take() {
                reached.send(Instant::now()).unwrap();
                let _ = go_on.recv();
            }
            *self.passed.lock().unwrap() = true;
            self.changed.notify_all();
        }
        match (rank, request, is_answered) {
            // All others have arrived and wait for this one: their leases are renewed.
            (0, "prepare", true) if self.moment.request == "renew" => {
                drop(self.changed.wait_while(self.passed.lock().unwrap(), |passed| !*passed).unwrap());
                true
            }
            // This one fails: the others are asked to abort.
            (2, "prepare", true) => self.moment.request != "abort",
            _ => true,
        }
    }
}

impl Between {
    fn of(machine: &Machine, ranks: &[Program; 3], moment: Moment) -> Self {
        let ((tell, reached), (go_on, asked)) = (sync_channel(1), sync_channel(1));
        let (reached_or_not, passed) = (Mutex::new(Some((tell, asked))), Mutex::default());
        let stage = Stage { moment, reached: reached_or_not, passed, changed: Condvar::new() };
        let folder = proxy(machine, ranks, move |place, request, _, is_answer| stage.come_to(place, request, is_answer));
        Self { folder, reached, go_on }
    }
}

/// One rank is killed or stopped, or the command itself is killed, while any step is on its way or answered: the others end up in the same
/// state, the message says which, and all survivors can be resumed.
#[test]
fn whatever_happens_at_any_step_the_others_are_in_one_state_and_the_message_says_which() {
    let of_resume = ["prepare", "renew", "commit", "abort"];
    let steps = ["hold", "drain"].into_iter().chain(of_resume).map(|request| ("pause", request));
    let mut cases = Vec::new();
    for (verb, request) in steps.chain(of_resume.map(|request| ("resume", request))) {
        for is_answered in [false, true] {
            for event in [Event::RankKilled, Event::RankStopped, Event::CoordinatorKilled] {
                // Nobody answers that.
                if !(request == "renew" && is_answered) {
                    cases.push((verb, Moment { request, is_answered }, event));
                }
            }
        }
    }
    assert_eq!(cases.len(), 54);
    in_parallel(cases, 6, |(verb, moment, event)| {
        assert!((0..100).any(|_| happens(verb, moment, event)), "{verb}, {moment:?}: it never comes to that");
    });
}

/// `false`, and nothing is checked, if the moment has not come, or if this machine was so slow that the coordinator may have given up waiting in
/// the meantime.
fn happens(verb: &str, moment: Moment, event: Event) -> bool {
    let case = format!("{verb}, {moment:?}, {event:?}");
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    if verb == "resume" {
        machine.vramctl("pause").expect(0, "", "");
    }
    let between = Between::of(&machine, &ranks, moment);
    let mut command = machine.cli(&[verb, "--name", "engine"]);
    command.env("VRAMCTL_DIR", between.folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut coordinator = command.spawn().unwrap();
    let reached = common::patiently(|| match between.reached.try_recv() {
        Ok(reached) => Ok(Some(reached)),
        // A rank that hears of the abort from another rank answers before the coordinator asks it to abort. The request may still be on its way.
        Err(_) if moment.request == "abort" && coordinator.try_wait().unwrap().is_some() => {
            Ok(between.reached.recv_timeout(Duration::from_secs(2)).ok())
        }
        Err(_) => Err(()),
    });
    let Some(reached) = reached.unwrap_or_else(|()| panic!("{case}: it does not come to that")) else { return false };
    match event {
        Event::RankKilled => {
            ranks[1].signal(libc::SIGKILL);
            ranks[1].ended();
        }
        Event::RankStopped => ranks[1].stop(),
        Event::CoordinatorKilled => coordinator.kill().unwrap(),
    }
    between.go_on.send(()).unwrap();
    let is_late = reached.elapsed() > Duration::from_secs(2);
    let ran = Ran::end_of(coordinator);
    if is_late {
        return false;
    }

    let survivors: &[&Program] =
        if event == Event::CoordinatorKilled { &[&ranks[0], &ranks[1], &ranks[2]] } else { &[&ranks[0], &ranks[2]] };
    let state = machine.settled(survivors);
    let done = state == if verb == "pause" { "paused, held" } else { "active" };
    assert!(["paused, held", "active"].contains(&state.as_str()), "{case}: {state}");
    let is_prepared = moment.request == "renew" || moment == Moment { request: "prepare", is_answered: true };
    match event {
        _ if moment.request == "commit" => assert!(done, "{case}: {state}"),
        // No further request is needed.
        Event::RankStopped if is_prepared => assert!(done, "{case}: {state}"),
        // Its end is noticed before all have decided, or after.
        Event::RankKilled if is_prepared => (),
        _ => assert!(!done, "{case}: {state}"),
    }
    if event != Event::CoordinatorKilled {
        let told = format!("{case}, {state}: {:?}: {}{}", ran.code, ran.out, ran.err);
        // It had completed everything by then.
        let all_well = moment == Moment { request: "commit", is_answered: true };
        assert_eq!(ran.code == Some(0), all_well, "{told}");
        let processes = if all_well { "3 processes, " } else { "2 of 3 processes, " };
        assert_eq!(ran.out.contains(&format!("{verb}d job engine: {processes}")), done, "{told}");
        assert_eq!(ran.err.contains(&format!("job engine: nothing was {verb}d; its other processes ")), !done, "{told}");
        let culprit = if moment.request == "abort" { &ranks[2] } else { &ranks[1] };
        let why = match event {
            Event::RankStopped if moment.request != "abort" => "no answer within",
            _ => "it ended before it answered",
        };
        let of_culprit = ran.err.lines().any(|line| line.contains(&format!("engine (pid {})", culprit.pid())) && line.contains(why));
        assert!(all_well || of_culprit, "{told}");
        if !done {
            // Aborted by the command, or by itself when its lease has ended, which may be faster.
            let taken_back = [&*format!("process {} failed", culprit.pid()), "another process of the job could not prepare"];
            assert!(taken_back.iter().any(|why| ran.err.contains(&format!("engine (pid {}): undone: {why}", ranks[0].pid()))), "{told}");
        }
    }
    if event == Event::RankStopped {
        ranks[1].go_on();
        assert_eq!(machine.settled(&ranks.each_ref()), state, "{case}");
    }
    let told = machine.vramctl("status").expect(0, "", "");
    assert!(told.out.contains(if state == "active" { "active" } else { "paused" }), "{case}: {}", told.out);
    machine.vramctl("resume").expect(0, "", "");
    for (place, rank) in ranks.iter_mut().enumerate() {
        if place != 1 || event != Event::RankKilled {
            rank.verify();
        }
    }
    true
}

/// One process fails: nothing is paused, and the message says which and why.
#[test]
fn one_failing_rank_keeps_the_others_active() {
    let machine = Machine::new();
    let [first, second] = machine.job("engine");
    let third = machine.engine_with("engine", |command| _ = command.env("VRAMCTL_HOST_CAP", "1M"));
    let mut ranks = [first, second, third];
    for hold in ["", " --no-hold"] {
        let ran = machine.vramctl(&format!("pause --name engine{hold}"));
        let ran = ran.expect(4, "", &format!("engine (pid {}): too little host memory", ranks[2].pid()));
        // Whether the command tells it why, or it sees the job's decision first.
        ran.expect(4, "", &format!("engine (pid {}): undone: ", ranks[0].pid()));
        assert_eq!(machine.settled(&ranks.each_ref()), "active");
    }
    let told = machine.vramctl("pause --json").json();
    assert_eq!((&told["processes"][0]["error"]["code"], &told["jobs"][0]["committed"]), (&json!("aborted"), &json!(false)), "{told}");
    ranks.iter_mut().for_each(Program::verify);
}

/// A job with a missing process is not paused: otherwise only half of it would be.
#[test]
fn a_missing_rank_is_named() {
    let machine = Machine::new();
    let [first, second, third] = machine.job("engine");
    machine.vramctl("pause --ranks 4").expect(3, "", "nothing was done: 3 of 4 processes are there. To do without the rest, add --ranks 3");
    machine.vramctl("pause --ranks 3").expect(0, "", "");
    let pid = third.pid();
    drop(third);
    // The others must not stay paused because of it.
    machine.vramctl("resume").expect(0, "resumed job engine: 2 processes", "");
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    let fourth = machine.engine("engine");
    machine.vramctl("pause").expect(0, "paused job engine: 3 processes", "");
    machine.vramctl("resume").expect(0, "", "");
    let gone = fourth.pid();
    drop(fourth);
    let ran = machine.vramctl("pause").expect(3, "", &format!("2 of 3 processes are there: process {gone} has ended"));
    assert!(!ran.err.contains(&pid.to_string()), "{}", ran.err);
    assert_eq!(machine.settled(&[&first, &second]), "active");
    machine.vramctl("pause --ranks 2").expect(0, "", "");
    assert_eq!(machine.settled(&[&first, &second]), "paused, held");
}

/// While another client uses one process, the command line lets all of them continue, and retries. If it is killed meanwhile, it leaves
/// nothing behind.
#[test]
fn the_command_retries_and_may_be_killed_at_any_time() {
    let machine = Machine::new();
    let mut ranks: [Program; 2] = machine.job("engine");
    let mut other = machine.connect(&ranks[1]);
    other.step(&json!({"request": "hold", "lease_ms": 30_000}), None, "held");
    let start = || machine.cli("pause --hold-timeout 60 --json").stdout(Stdio::piped()).spawn().unwrap();
    let is_held = |rank: &Program| machine.state(rank).ends_with("held");
    for _ in 0..5 {
        let mut command = start();
        eventually("it is held", || is_held(&ranks[0]));
        command.kill().unwrap();
        command.wait().unwrap();
        assert_eq!(machine.settled(&[&ranks[0]]), "active");
    }
    let command = start();
    eventually("it is held", || is_held(&ranks[0]));
    // Between two attempts it runs.
    eventually("it runs", || !is_held(&ranks[0]));
    other.send(&json!({"request": "abort"}), None);
    let told = Ran::end_of(command).expect(0, "", "").json();
    assert!(told["jobs"][0]["attempts"].as_u64().unwrap() > 1, "{told}");
    assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
    machine.vramctl("resume").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// As above, while the other coordinator keeps the process for longer than a lease.
#[test]
fn the_command_waits_for_another_coordinator() {
    let machine = Machine::new();
    let mut ranks: [Program; 2] = machine.job("engine");
    let mut other = machine.connect(&ranks[1]);
    other.step(&json!({"request": "hold", "lease_ms": 30_000}), None, "held");
    let command = machine.cli("pause --hold-timeout 100 --json").stdout(Stdio::piped()).spawn().unwrap();
    // The attempts as the first process sees them, or some of them.
    let (mut seen, mut was_held) = (0, false);
    eventually("many attempts", || {
        other.send(&json!({"request": "renew"}), None);
        let is_held = machine.state(&ranks[0]).ends_with("held");
        seen += u32::from(is_held && !was_held);
        was_held = is_held;
        seen > 16
    });
    other.send(&json!({"request": "abort"}), None);
    let told = Ran::end_of(command).expect(0, "", "").json();
    // More attempts than a process accepts connections: each attempt closes its own.
    assert!(told["jobs"][0]["attempts"].as_u64().unwrap() > 16, "{told}");
    machine.vramctl("resume").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// The command is stopped until the process has given it up: the message says why the process did.
#[test]
fn a_lease_that_ends_at_the_commit_is_the_cause() {
    let machine = Machine::new();
    let [mut engine] = machine.job("engine");
    let ((tell, prepared), (go_on, asked)) = (sync_channel(1), sync_channel(1));
    let asked = Mutex::new(asked);
    let between = proxy(&machine, [&engine], move |_, request, _, is_answer| {
        if request == "prepare" && is_answer {
            let _ = tell.try_send(());
            let _ = asked.lock().unwrap().recv();
        }
        true
    });
    let mut command = machine.cli(&["pause", "--name", "engine"]);
    let coordinator = command.env("VRAMCTL_DIR", between.path()).stderr(Stdio::piped()).spawn().unwrap();
    prepared.recv_timeout(Duration::from_secs(100)).unwrap();
    common::machine::stop(&coordinator);
    go_on.send(()).unwrap();
    drop(go_on);
    assert_eq!(machine.settled(&[&engine]), "active");
    common::machine::go_on(&coordinator);
    let ran = Ran::end_of(coordinator);
    assert!(ran.code != Some(0) && ran.err.contains("undone: the client has been silent for 5000 ms"), "{}", ran.err);
    engine.verify();
}

/// Each attempt finds the devices as busy as the one before, because the loops queue again what was done.
#[test]
fn a_job_that_runs_far_ahead_is_held() {
    let machine = Machine::new();
    let mut ranks: [Program; 2] = std::array::from_fn(|_| {
        machine.start_with("loop", "torture", |command| _ = command.args(["ahead", "25"]).env("SIMGPU_OP_DELAY_MS", "100"))
    });
    let paused = machine.vramctl("pause --hold-timeout 20 --json").expect(0, "", "").json();
    assert!(paused["jobs"][0]["attempts"].as_u64().unwrap() > 1, "{paused}");
    assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
    machine.vramctl("resume").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// Two ranks whose devices wait for a third one that is not there.
fn without_the_third(machine: &Machine) -> [Program; 2] {
    std::array::from_fn(|place| {
        let arguments = ["rank", "1", &place.to_string(), "3"];
        let mut rank = machine.start_with("ring", "torture", |command| _ = command.args(arguments));
        // Before, its device is idle.
        eventually("it waits for the others", || rank.ask("queued") == "1");
        rank
    })
}

/// Its work cannot end while another rank is missing, so it would be held for nothing.
#[test]
fn a_rank_does_not_wait_for_its_work_once_another_has_aborted() {
    let machine = Machine::new();
    let ranks = without_the_third(&machine);
    let (decision, file) = Decision::create().unwrap();
    let mut wires = ranks.each_ref().map(|rank| machine.connect(rank));
    for wire in &mut wires {
        wire.step(&json!({"request": "hold", "lease_ms": 30_000}), Some(file.as_fd()), "held");
        wire.send(&json!({"request": "drain", "limit_ms": 90_000}), None);
    }
    assert!(decision.abort());
    for wire in &mut wires {
        let told = wire.answer();
        assert_eq!(told["code"], "aborted", "{told}");
    }
    assert_eq!(machine.settled(&ranks.each_ref()), "active");
}

/// The command has it stop waiting, and says whose end it was.
#[test]
fn the_death_of_a_rank_ends_the_wait_of_the_others_for_their_work() {
    let machine = Machine::new();
    let mut ranks = without_the_third(&machine);
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let between = proxy(&machine, &ranks, move |place, request, line, is_answer| {
        if place == 0 && request == "drain" {
            let _ = tell.lock().unwrap().send(is_answer.then(|| serde_json::from_slice::<Value>(line).unwrap()));
        }
        true
    });
    let next = || told.recv_timeout(Duration::from_secs(100)).unwrap();
    let mut command = machine.cli(&["pause", "--hold-timeout", "600"]);
    let command = command.env("VRAMCTL_DIR", between.path()).stderr(Stdio::piped()).spawn().unwrap();
    // The rank whose time is up first aborts for the other one.
    for _ in 0..6 {
        assert_eq!(next(), None);
        assert!(["busy", "aborted"].contains(&next().unwrap()["code"].as_str().unwrap()));
    }
    // Both are held now, for seconds: each attempt waits for twice as long as the one before.
    assert_eq!(next(), None);
    ranks[1].signal(libc::SIGKILL);
    ranks[1].ended();
    let taken_back = format!("ring (pid {}): undone: process {} failed", ranks[0].pid(), ranks[1].pid());
    Ran { out: String::new(), ..Ran::end_of(command) }.expect(1, "", &taken_back);
    assert_eq!(next().unwrap()["code"], "aborted");
    assert_eq!(machine.settled(&[&ranks[0]]), "active");
}

/// The devices wait for a third rank that is not there.
#[test]
fn a_job_whose_work_does_not_end_is_told_how_long_that_took() {
    let machine = Machine::new();
    let ranks = without_the_third(&machine);
    for seconds in ["0.3", "0.5", "3"] {
        let begun = Instant::now();
        let ran = machine.vramctl(&format!("pause --hold-timeout {seconds}")).expect(5, "", "has not ended");
        assert!(begun.elapsed().as_secs_f64() >= seconds.parse::<f64>().unwrap() - 0.2, "{}", ran.err);
        assert!(ran.err.contains("raise --hold-timeout"), "{}", ran.err);
        // A loaded machine may have time for one only.
        assert!(ran.err.contains(" attempts in ") || seconds != "3", "{}", ran.err);
        let (_, after) = ran.err.split_once("after ").unwrap();
        let ms: u32 = after.split_once(" ms, the work").unwrap().0.parse().unwrap();
        assert!(ms >= 100, "{}", ran.err);
        assert_eq!(machine.settled(&ranks.each_ref()), "active");
    }
}

/// Too little memory for one of them: all stay paused. With --timeout they wait, and the others take no memory meanwhile.
#[test]
fn a_resume_that_finds_too_little_for_one_leaves_all_paused() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    let mut ranks: [Program; 3] = machine.job("engine");
    machine.vramctl("pause").expect(0, "", "");
    let hog = machine.engine_with("hog", |command| _ = command.args(["--weights-mib", "64"]));
    machine.vramctl("resume --name engine").expect(4, "", "too little memory");
    assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
    let waiting = machine.cli(&["resume", "--name", "engine", "--timeout", "60"]).stdout(Stdio::piped()).spawn();
    common::eventually_waits_for_memory(&machine.sockets());
    drop(hog);
    Ran::end_of(waiting.unwrap()).expect(0, "resumed job engine: 3 processes", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// A resume that waits for memory and gets it is not out of memory. One that waits in vain is, once.
#[test]
fn only_a_shortage_that_lasts_is_reported() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    let reports = machine.folder.path().join("reports");
    let mut engine = machine.engine_with("engine", |command| _ = command.env("VRAMCTL_REPORT_DIR", &reports));
    let count = || fs::read_dir(&reports).map_or(0, Iterator::count);
    machine.vramctl("pause").expect(0, "", "");
    let hog = machine.engine_with("hog", |command| _ = command.args(["--weights-mib", "92"]));
    let command = machine.cli(&["resume", "--name", "engine", "--timeout", "60"]).spawn().unwrap();
    common::eventually_waits_for_memory(&machine.sockets());
    drop(hog);
    Ran::end_of(command).expect(0, "", "");
    assert_eq!(count(), 0);
    engine.verify();
    machine.vramctl("pause").expect(0, "", "");
    let _hog = machine.engine_with("hog", |command| _ = command.args(["--weights-mib", "92"]));
    machine.vramctl("resume --name engine --timeout 0.3").expect(4, "", "too little memory");
    eventually("a report", || count() > 0);
}

/// As at `ulimit -u`, or in a container with `pids.max`: what is paused must come back.
#[test]
fn a_job_is_paused_and_resumed_however_few_threads_the_command_gets() {
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    let ran = |threads: usize, words: &str| Ran::of(&mut machine.with_few_threads(threads, words));
    // None at all; some for the search; for the ranks none, one, and all but one that needs none.
    for threads in [0, 4, 7, 8, 9] {
        ran(threads, "pause engine").expect(0, "paused job engine: 3 processes, ", "");
        assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
        ran(threads, "resume engine --timeout 30").expect(0, "resumed job engine: 3 processes, ", "");
        assert_eq!(machine.settled(&ranks.each_ref()), "active");
    }
    ranks.iter_mut().for_each(Program::verify);
    for words in ["ps", "status", "gpus", "metrics", "suspend engine", "resume engine", "watch engine --below 1M", "pause --dry-run"] {
        ran(0, words).expect(0, "", "");
    }
    // Nor descriptors: what cannot be had is named. Two beside the standard streams are too few for three connections.
    let command = format!("ulimit -n 5; exec {} pause engine", common::command_line());
    Ran::of(&mut machine.command("sh", &["-c", &command])).expect(1, "", "this command has reached its limit of open files (ulimit -n)");
    assert_eq!(machine.settled(&ranks.each_ref()), "active");
    ran(0, "top --once").expect(1, "", "this command gets no further thread: the limit of the user (ulimit -u)");
    ranks.iter_mut().for_each(Program::verify);
}

/// All or nothing, here as well.
#[test]
fn a_job_whose_ranks_are_asked_in_turn_is_undone_as_a_whole() {
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    machine.vramctl("pause engine").expect(0, "", "");
    // Room for one.
    let hog = machine.hog(0, 1000);
    Ran::of(&mut machine.with_few_threads(0, "resume engine --timeout 0.3")).expect(4, "", "nothing was resumed");
    assert_eq!(machine.settled(&ranks.each_ref()), "paused, held");
    drop(hog);
    Ran::of(&mut machine.with_few_threads(0, "resume engine")).expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// It has no thread that could say what came of it; the processes undo what was begun.
#[test]
fn a_command_without_threads_can_be_interrupted() {
    let machine = Machine::new();
    let mut ranks: [Program; 2] = machine.job("engine");
    machine.vramctl("pause engine").expect(0, "", "");
    let hog = machine.hog(0, 1000);
    let mut command = machine.with_few_threads(0, "resume engine --timeout 50");
    // `timeout` passes it on.
    let waiting = common::interruptible(&mut command).stderr(Stdio::piped()).spawn().unwrap();
    common::eventually_waits_for_memory(&machine.sockets());
    // SAFETY: touches no memory; the child has not been waited for.
    unsafe { libc::kill(waiting.id() as i32, libc::SIGINT) };
    let ended = Ran::end_of(waiting);
    assert_ne!(ended.code, Some(0), "{ended:?}");
    drop(hog);
    machine.vramctl("resume engine --timeout 30").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// Two jobs want the memory of one GPU: the first in the queue gets it, and the other is told its place.
#[test]
fn memory_goes_to_the_first_job_in_the_queue() {
    let mut machine = Machine::new();
    machine.memory = "128M";
    let mut first = machine.engine("first");
    let mut second = machine.engine("second");
    machine.vramctl("pause --all").expect(0, "", "");
    let hog = machine.engine_with("hog", |command| _ = command.args(["--weights-mib", "76"]));
    let resume = |name: &str| {
        let mut child = machine.begin(&["resume", "--name", name, "--timeout", "60"]);
        let said = BufReader::new(child.stderr.take().unwrap());
        (child, said)
    };
    let (waiting, _) = resume("first");
    // Until it waits, a second one may still fail for lack of memory.
    common::eventually_waits_for_memory(&machine.sockets());
    machine.vramctl("resume --name second").expect(5, "", "goes to job first first; this is number 2 in the queue");
    // One that has all of its memory waits for nobody.
    machine.vramctl("resume --name hog").expect(0, "nothing to do: default of hog", "");
    let (patient, mut said) = resume("second");
    let mut note = String::new();
    said.read_line(&mut note).unwrap();
    assert!(note.contains("number 2 in the queue for GPU memory, behind job first"), "{note}");
    drop(hog);
    for (name, child) in [("first", waiting), ("second", patient)] {
        Ran::end_of(child).expect(0, &format!("of {name}"), "");
    }
    first.verify();
    second.verify();
}

/// One command's jobs come one after the other, which is no news if there is room for all.
#[test]
fn jobs_with_room_for_all_are_resumed_without_a_word_about_the_queue() {
    let machine = Machine::new();
    let mut jobs = ["first", "second", "third"].map(|name| machine.engine(name));
    machine.vramctl("pause --all").expect(0, "", "");
    let ran = machine.vramctl("resume --all").expect(0, "of third", "");
    assert_eq!(ran.err, "");
    jobs.iter_mut().for_each(Program::verify);
}

/// Processes that wait for memory give up when another one dies, and say so.
#[test]
fn a_rank_that_gives_up_because_of_another_names_it() {
    let mut machine = Machine::new();
    machine.memory = "160M";
    let mut ranks: [Program; 2] = machine.job("engine");
    machine.vramctl("pause").expect(0, "", "");
    let hogs: Vec<_> = [56, 48]
        .into_iter()
        .map(|mib| machine.engine_with("hog", |command| _ = command.args(["--weights-mib", &mib.to_string()])))
        .collect();
    let waiting = machine.cli("resume --name engine --timeout 60").stderr(Stdio::piped()).spawn().unwrap();
    // In the first attempt, which does not wait, the other rank reports the shortage.
    common::eventually_waits_for_memory(&machine.sockets());
    let is_resuming = |rank: &Program| machine.connect(rank).ask(&json!({"request": "prepare", "of": "resume"}))["code"] == "leased";
    eventually("both wait", || ranks.iter().all(is_resuming));
    ranks[1].signal(libc::SIGKILL);
    ranks[1].ended();
    let taken_back = format!("engine (pid {}): undone: process {} failed", ranks[0].pid(), ranks[1].pid());
    let ran = Ran { out: String::new(), ..Ran::end_of(waiting) };
    assert!(ran.err.contains(&taken_back), "{}", ran.err);
    assert_eq!(machine.settled(&[&ranks[0]]), "paused, held");
    drop(hogs);
    machine.vramctl("resume --name engine --ranks 1").expect(0, "", "");
    ranks[0].verify();
}

/// A worker outlives its killed parent, paused, and blocks the program's restart under the same name.
#[test]
fn two_runs_of_one_name_are_told_apart() {
    let machine = Machine::new();
    let engine = |command: &mut Command| _ = command.args(["--weights-mib", "500", "--kv-mib", "64"]);
    let mut left = machine.start_with("eng", "engine", engine);
    machine.vramctl("pause --name eng").expect(0, "", "");
    // While this starts, `run` warns.
    let mut again = machine.cli(&["run", "--name", "eng", "--no-python", "--"]);
    again.arg(common::programs().join("engine")).args(["--weights-mib", "500", "--kv-mib", "64"]);
    let mut again = again.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(again.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with("ready"), "{ready}");

    let ps = machine.vramctl("ps").out;
    let of = |pid: u32| row_of(&ps, pid).unwrap().to_owned();
    let run = |pid: u32| of(pid).split("(run-").nth(1).unwrap()[..8].to_owned();
    assert_ne!(run(left.pid()), run(again.id()), "{ps}");
    let both = "2 runs have the name eng, and count as one job: ";
    let refused = machine.vramctl("resume --name eng").expect(4, "", both);
    for (pid, state) in [(left.pid(), "held, paused"), (again.id(), "active")] {
        assert!(refused.err.contains(&format!("run-{} (pid {pid}, running for ", run(pid))), "{}", refused.err);
        assert!(refused.err.contains(state), "{}", refused.err);
    }
    assert_eq!(machine.vramctl("pause --name eng --ranks 2").expect(0, "", "").err, "", "they are meant");
    // The rest of its job is named.
    machine.vramctl(&format!("resume --pid {}", left.pid())).expect(0, "", "");
    left.verify();
    let rest = format!("one of 2 processes of the job eng; the others are not paused (pid {})", again.id());
    machine.vramctl(&format!("pause --pid {}", left.pid())).expect(0, "", &rest);
    again.kill().unwrap();
    let warned = String::from_utf8(again.wait_with_output().unwrap().stderr).unwrap();
    assert!(warned.contains(&format!("the name eng is in use: pid {}, running for ", left.pid())), "{warned}");
}

/// A GPU chooses processes, as an id does: the rest of the job goes on, and may soon wait.
#[test]
fn a_pause_of_a_gpu_names_the_rest_of_the_job() {
    let machine = Machine::with(2, "256M");
    let mut ranks: [Program; 2] = std::array::from_fn(|device| {
        machine.engine_with("engine", |command| _ = command.args(["--device", &device.to_string()]).env("VRAMCTL_JOB", "one"))
    });
    let rest = format!("one of 2 processes of the job engine; the others are not paused (pid {})", ranks[0].pid());
    machine.vramctl("pause --gpu 1").expect(0, "paused ", &rest);
    machine.vramctl("resume --gpu 1").expect(0, "resumed ", "");
    assert_eq!(machine.vramctl("pause --gpu 0 --gpu 1").expect(0, "", "").err, "", "that is all of it");
    machine.vramctl("resume engine").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// Ranks that separate commands start are one job without a word.
#[test]
fn ranks_that_share_a_run_belong_together() {
    let machine = Machine::new();
    let _ranks = [(); 2].map(|()| machine.engine_with("engine", |command| _ = command.env("VRAMCTL_JOB", "mine")));
    let paused = machine.vramctl("pause --name engine").expect(0, "", "");
    assert_eq!(paused.err, "");
    let ps = machine.vramctl("ps").expect(0, "engine 2/2", "");
    assert!(!ps.out.contains("(mine"), "{}", ps.out);
}

/// No process knows yet which others are of its job. Half of it would be paused.
#[test]
fn a_first_pause_waits_for_ranks_whose_sockets_were_just_deleted() {
    let machine = Machine::new();
    // One, all but one, and the directory with all of them.
    for deleted in 1..=3 {
        let mut ranks: [Program; 3] = machine.job("engine");
        if deleted < 3 {
            ranks[..deleted].iter().for_each(|rank| fs::remove_file(machine.socket(rank.pid())).unwrap());
        } else {
            fs::remove_dir_all(machine.sockets()).unwrap();
            eventually("one has noticed", || machine.sockets().exists());
        }
        machine.vramctl("pause --name engine").expect(0, "paused job engine: 3 processes, ", "");
        machine.vramctl("resume --name engine").expect(0, "resumed job engine: 3 processes, ", "");
        ranks.iter_mut().for_each(Program::verify);
    }
    // One that does not create it again in time is named, and nothing is paused without it.
    let mut ranks: [Program; 3] = machine.job("engine");
    ranks[2].stop();
    fs::remove_file(machine.socket(ranks[2].pid())).unwrap();
    let named = format!("engine (pid {}) (it lives, but somebody has deleted its socket", ranks[2].pid());
    machine.vramctl("pause --name engine").expect(5, "", &named);
    machine.vramctl("status").expect(5, "", "it lives, but somebody has deleted its socket");
    assert_eq!(machine.settled(&[&ranks[0], &ranks[1]]), "active");
    // Nobody else waits for it.
    machine.vramctl("status --name another").expect(3, "", "");
    ranks[2].go_on();
    machine.vramctl("pause --name engine").expect(0, "paused job engine: 3 processes, ", "");
    machine.vramctl("resume --name engine").expect(0, "", "");
    ranks.iter_mut().for_each(Program::verify);
}

/// Half of the job would stay paused, although the resume says that it has succeeded.
#[test]
fn a_rank_whose_socket_was_just_deleted_is_not_left_behind() {
    let machine = Machine::new();
    let mut ranks: [Program; 3] = machine.job("engine");
    machine.vramctl("pause --name engine").expect(0, "paused job engine: 3 processes, ", "");
    fs::remove_file(machine.socket(ranks[1].pid())).unwrap();
    machine.vramctl("resume --name engine").expect(0, "resumed job engine: 3 processes, ", "");
    ranks.iter_mut().for_each(Program::verify);
    // One that does not create it again in time is named, and nothing is resumed without it.
    machine.vramctl("pause --name engine").expect(0, "", "");
    ranks[2].stop();
    fs::remove_file(machine.socket(ranks[2].pid())).unwrap();
    let named = format!("engine (pid {}) (it lives, but somebody has deleted its socket", ranks[2].pid());
    machine.vramctl("resume --name engine").expect(5, "", &named);
    assert_eq!(machine.settled(&[&ranks[0], &ranks[1]]), "paused, held");
    ranks[2].go_on();
    machine.vramctl("resume --name engine").expect(0, "resumed job engine: 3 processes, ", "");
    ranks.iter_mut().for_each(Program::verify);
}
