//! Random schedules: programs that are never idle are paused, resumed, disturbed and killed at random moments.
//!
//! Invariants:
//!
//! 1. **No work runs on memory that is gone.** The simulated GPU fails work whose memory disappears meanwhile, and the programs check every
//!    result and all contents.
//! 2. **No rank stays paused alone.** Once no transition is in progress, the living processes of a job are all active, or all paused. If
//!    the command reports a commit, they are in the requested state; otherwise they are in the previous state.
//! 3. **Nothing waits forever**, except a collective whose rank has died. Commands end, and paused memory can be resumed by the next one.
//!    After the last resume every thread makes progress, and nothing is held.
//!
//! Each test prints its seed if it fails. `TORTURE_SEED` sets it, and `TORTURE_ROUNDS` makes them longer. A seed repeats what happens,
//! not the order in which threads and processes run. For an hour of everything at once, with copies while a second device is current:
//! `TORTURE_ROUNDS=400 TORTURE_BOTH=1 cargo test --test torture -- --nocapture survives_everything`.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::{Machine, NEVER, Program, Ran};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};
use vramctl_driver::Driver;

struct Random(u64);

impl Random {
    fn new(test: u64) -> Self {
        let given = std::env::var("TORTURE_SEED").ok().map(|seed| seed.parse().expect("TORTURE_SEED is a number"));
        let seed: u64 = given.unwrap_or_else(|| UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64) * 100 + test);
        println!("TORTURE_SEED={seed}");
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    fn sleep(&mut self, most_ms: u64) {
        thread::sleep(Duration::from_micros(self.below(most_ms * 1000)));
    }
}

/// How much longer than usual.
fn rounds(usual: u64) -> u64 {
    usual * std::env::var("TORTURE_ROUNDS").map_or(1, |times| times.parse().expect("TORTURE_ROUNDS is a number"))
}

fn run(machine: &Machine, arguments: &str) -> Ran {
    Ran::end_of(machine.begin(arguments))
}

/// Begins a command, now and then where it gets few threads or none, as at `ulimit -u`.
fn begin_anyhow(machine: &Machine, arguments: &str, random: &mut Random) -> Child {
    if random.one_in(4) {
        let mut command = machine.with_few_threads(random.below(12) as usize, arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    } else {
        machine.begin(arguments)
    }
}

fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace().map_while(|word| word.parse().ok()).collect()
}

/// Waits until all threads of all programs have made progress.
fn all_get_on(ranks: &mut [Program]) {
    let mut progress = || ranks.iter_mut().flat_map(|rank| numbers(&rank.ask("progress"))).collect::<Vec<_>>();
    let (before, begun) = (progress(), Instant::now());
    assert!(!before.is_empty());
    loop {
        let now = progress();
        if now.iter().zip(&before).all(|(now, before)| now > before) {
            break;
        }
        assert!(begun.elapsed() < NEVER, "somebody stands still: {before:?}, {now:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Calls of a pause, a resume, and of the program's own allocations.
const MAY_FAIL: [&str; 9] = [
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemExportToShareableHandle",
    "cuMemHostRegister_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
];

/// One program, with threads that do everything at once.
fn a_busy_program(random: &mut Random, with_faults: bool) {
    let machine = Machine::new();
    let seed = random.below(1 << 40).to_string();
    let mut program = machine.start_with("busy", "torture", |command| _ = command.args(["threads", &seed, "5"]));
    let (mut paused, mut tried, mut failed) = (0, 0, 0);
    let wanted = rounds(12);
    while paused < wanted {
        tried += 1;
        assert!(tried < 20 * wanted, "{paused} of {tried} pauses succeeded");
        // Rather too short, but on a slow machine not always.
        let limit = 100 + random.below(400) + 20 * (tried - paused);
        random.sleep(15);
        let tags: &[&str] = [&[][..], &["even"], &["odd", "default"]][random.below(3) as usize];
        let mut faults = with_faults.then(|| Random(random.0.rotate_left(32) | 1));
        let is_done = match random.below(if with_faults { 8 } else { 4 }) {
            0 => run(&machine, &format!("pause --name busy --hold-timeout {} {}", limit as f64 / 1e3, tags.join(" "))).code == Some(0),
            1 | 2 => {
                let wanted = json!({"request": "pause", "tags": tags, "lenient": true, "hold_ms": limit});
                machine.connect(&program).ask(&wanted)["reply"] == "done"
            }
            _ => in_steps(&machine, &mut program, tags, limit, random, &mut faults),
        };
        paused += u64::from(is_done);
        random.sleep(10);
        // Resume a part first; the program continues only when everything is back.
        if random.one_in(2) {
            let _ = machine.connect(&program).ask(&json!({"request": "resume", "tags": ["odd"], "lenient": true}));
        }
        if let Some(faults) = &mut faults {
            fail(&mut program, faults);
            let answer = machine.connect(&program).ask(&json!({"request": "resume"}));
            failed += u64::from(answer["reply"] == "error");
            assert_eq!(program.ask("clear"), "ok");
        }
        Ran::end_of(begin_anyhow(&machine, "resume --name busy", random)).expect(0, "", "");
        let status = machine.connect(&program).ask(&json!({"request": "status"}));
        assert!(status["held"] != true && status["tags"].as_array().unwrap().iter().all(|tag| tag["state"] == "active"), "{status}");
    }
    all_get_on(std::slice::from_mut(&mut program));
    assert_eq!(program.ask("stop"), "ok");
    let status = machine.connect(&program).ask(&json!({"request": "status"}));
    assert!(status["held"] != true && status["waiting_threads"].as_u64().unwrap_or(0) == 0, "{status}");
    println!("{paused} of {tried} pauses succeeded, {failed} resumes failed");
    assert_eq!(program.ask("quit"), "");
    assert!(program.ended().success());
}

/// Makes the driver fail at one of the next calls: the program's, or those of the pause or resume that follows.
fn fail(program: &mut Program, random: &mut Random) {
    let call = MAY_FAIL[random.below(MAY_FAIL.len() as u64) as usize];
    assert_eq!(program.ask(&format!("fail {call} {}", 1 + random.below(6))), "ok", "{call}");
}

/// A pause step by step, by a coordinator that may give up or die at any of them. Whether it was done.
fn in_steps(machine: &Machine, program: &mut Program, tags: &[&str], limit: u64, random: &mut Random, faults: &mut Option<Random>) -> bool {
    let mut wire = machine.connect(program);
    let steps = [
        json!({"request": "hold"}),
        json!({"request": "drain", "limit_ms": limit}),
        json!({"request": "prepare", "of": "pause", "tags": tags, "lenient": true, "timeout_ms": limit}),
        json!({"request": "commit"}),
    ];
    for step in &steps {
        if random.one_in(8) {
            return false;
        }
        if let Some(faults) = faults.as_mut().filter(|_| step["request"] == "prepare") {
            fail(program, faults);
        }
        let answer = wire.ask(step);
        match answer["reply"].as_str().unwrap() {
            "error" => return false,
            "done" => return true,
            _ => random.sleep(3),
        }
    }
    unreachable!("commit is answered with done or an error")
}

#[test]
fn a_program_that_does_everything_at_once_is_paused_at_any_moment() {
    a_busy_program(&mut Random::new(1), false);
}

#[test]
fn a_program_that_does_everything_at_once_is_paused_while_the_driver_fails() {
    a_busy_program(&mut Random::new(2), true);
}

/// A job in collectives.
fn in_collectives(machine: &Machine, last: u64) -> [Program; 4] {
    static COMMUNICATORS: AtomicU64 = AtomicU64::new(1);
    let communicator = COMMUNICATORS.fetch_add(1, Ordering::Relaxed).to_string();
    std::array::from_fn(|rank| {
        let arguments = ["rank", &communicator, &rank.to_string(), "4", &last.to_string()];
        machine.start_with("ring", "torture", |command| _ = command.args(arguments))
    })
}

/// The final position and result of each.
fn results(ranks: &mut [Program]) -> Vec<String> {
    let begun = Instant::now();
    let mut wait = |rank: &mut Program| loop {
        let told = rank.ask("progress");
        if told.contains("over") {
            return told;
        }
        assert!(begun.elapsed() < NEVER, "{told}");
        thread::sleep(Duration::from_millis(5));
    };
    ranks.iter_mut().map(&mut wait).collect()
}

/// Ranks in collectives stand at different places at any moment. Either all are paused, in the end at the same place, or none is,
/// also if the coordinator is killed or a driver fails; and the results are those of an undisturbed run.
fn a_job_in_collectives(random: &mut Random, with_faults: bool) {
    let machine = Machine::new();
    let mut ranks = in_collectives(&machine, 0);
    let (mut paused, mut tried, mut attempts, mut failed) = (0, 0, 0, [0; 2]);
    let wanted = rounds(8);
    while paused < wanted {
        tried += 1;
        assert!(tried < 20 * wanted, "{paused} of {tried} pauses succeeded");
        random.sleep(20);
        let case = if with_faults { fail_some(&mut ranks, &OF_PAUSE, random) } else { String::new() };
        let mut command = machine.begin("pause --name ring --hold-timeout 5 --json");
        if random.one_in(3) {
            random.sleep(100);
            let _ = command.kill();
            Ran::end_of(command);
            let state = machine.settled(&ranks.each_ref());
            assert!(["active", "paused, held"].contains(&state.as_str()), "{case}: {state}");
            paused += u64::from(state != "active");
        } else {
            let ran = Ran::end_of(command);
            let is_done = ran.code == Some(0);
            let state = machine.settled(&ranks.each_ref());
            assert_eq!(state, if is_done { "paused, held" } else { "active" }, "{case}: {}{}", ran.out, ran.err);
            attempts += ran.json()["jobs"][0]["attempts"].as_u64().unwrap_or(0);
            paused += u64::from(is_done);
            failed[0] += u64::from(!is_done);
        }
        random.sleep(10);
        if with_faults {
            let before = machine.settled(&ranks.each_ref());
            let case = fail_some(&mut ranks, &OF_RESUME, random);
            let ran = Ran::end_of(begin_anyhow(&machine, "resume --name ring", random));
            let state = machine.settled(&ranks.each_ref());
            assert_eq!(state, if ran.code == Some(0) { "active" } else { before.as_str() }, "{case}: {}{}", ran.out, ran.err);
            failed[1] += u64::from(ran.code != Some(0));
            clear_faults(&mut ranks);
        }
        Ran::end_of(begin_anyhow(&machine, "resume --name ring", random)).expect(0, "", "");
        assert_eq!(machine.settled(&ranks.each_ref()), "active");
    }
    all_get_on(&mut ranks);
    println!("{paused} of {tried} pauses succeeded, in {attempts} attempts; pauses and resumes that failed: {failed:?}");
    assert!(!with_faults || failed != [0; 2], "no fault had an effect");
    assert_eq!(ranks[0].ask("stop"), "ok");
    let found = results(&mut ranks);
    for rank in &mut ranks {
        assert_eq!(rank.ask("verify"), "ok");
    }
    drop(ranks);
    let mut undisturbed = in_collectives(&machine, numbers(&found[0])[0]);
    assert_eq!(results(&mut undisturbed), found);
}

#[test]
fn a_job_in_collectives_is_paused_as_one_at_any_moment() {
    a_job_in_collectives(&mut Random::new(3), false);
}

#[test]
fn a_job_in_collectives_is_paused_as_one_while_a_driver_fails() {
    a_job_in_collectives(&mut Random::new(5), true);
}

/// The calls of a pause and of undoing it, and those of a resume, that it cannot do without.
const OF_PAUSE: [&str; 4] = ["cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"];
const OF_RESUME: [&str; 4] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2"];

/// Makes the drivers of one or two ranks fail at one of these calls, or at any other. Returns what will happen.
fn fail_some(ranks: &mut [Program], usual: &[&str], random: &mut Random) -> String {
    clear_faults(ranks);
    let (count, first) = (ranks.len() as u64, random.below(ranks.len() as u64));
    let both = random.one_in(2);
    let mut fail = |rank: u64| {
        let calls = if random.one_in(4) { Driver::NAMES } else { usual };
        let (call, nth) = (calls[random.below(calls.len() as u64) as usize], 1 + random.below(2));
        assert_eq!(ranks[rank as usize].ask(&format!("fail {call} {nth}")), "ok", "{call}");
        format!("rank {rank} fails in call {nth} of {call}")
    };
    let will = fail(first);
    if both { format!("{will}, {}", fail((first + 1) % count)) } else { will }
}

fn clear_faults(ranks: &mut [Program]) {
    for rank in ranks {
        assert_eq!(rank.ask("clear"), "ok");
    }
}

/// A rank that is killed in the middle leaves the others in a collective that never ends. Either they are not paused, or all of them can be
/// resumed.
#[test]
fn a_killed_rank_in_collectives_does_not_kill_the_others() {
    let mut random = Random::new(4);
    for _ in 0..rounds(4) {
        let machine = Machine::new();
        let mut ranks = in_collectives(&machine, 0);
        all_get_on(&mut ranks);
        let command = machine.begin("pause --name ring --hold-timeout 2");
        random.sleep(100);
        let mut survivors = Vec::from(ranks);
        let mut killed = survivors.remove(random.below(4) as usize);
        killed.signal(libc::SIGKILL);
        killed.ended();
        let ran = Ran::end_of(command);
        let state = machine.settled(&survivors.iter().collect::<Vec<_>>());
        if ran.code != Some(0) && ran.out.is_empty() {
            assert_eq!(state, "active", "{}", ran.err);
        }
        run(&machine, "resume --name ring").expect(0, "", "");
        assert_eq!(machine.settled(&survivors.iter().collect::<Vec<_>>()), "active");
        for rank in &mut survivors {
            assert_eq!(rank.ask("verify"), "ok");
        }
    }
}

/// What comes to a job from outside.
#[derive(Debug, Clone, Copy)]
enum Event {
    Pause,
    PausePart,
    Suspend,
    Move,
    Resume,
}

impl Event {
    fn of(random: &mut Random) -> Self {
        [Self::Pause, Self::Pause, Self::PausePart, Self::Suspend, Self::Move, Self::Resume][random.below(6) as usize]
    }

    fn command(self, random: &mut Random) -> String {
        let limit = 0.2 + random.below(3000) as f64 / 1e3;
        match self {
            Self::Pause => format!("pause --name busy --hold-timeout {limit}"),
            Self::PausePart => format!("pause --name busy --hold-timeout {limit} even"),
            Self::Suspend => format!("suspend busy --hold-timeout {limit}"),
            Self::Move => format!("move busy --to {} --hold-timeout {limit}", random.below(2)),
            Self::Resume => "resume --name busy".into(),
        }
    }
}

/// What disturbs a command and its job meanwhile.
fn disturb(machine: &Machine, ranks: &mut [Program], random: &mut Random) -> String {
    let rank = random.below(ranks.len() as u64) as usize;
    match random.below(6) {
        0 => {
            ranks[rank].signal(libc::SIGSTOP);
            random.sleep(300);
            ranks[rank].signal(libc::SIGCONT);
            format!("rank {rank} was stopped for a while")
        }
        1 => {
            let _ = fs::remove_file(machine.socket(ranks[rank].pid()));
            format!("rank {rank}'s socket was deleted")
        }
        2 => {
            // More than a process has seats for. Some never end their line, others do not read the answer.
            let own = machine.socket(ranks[rank].pid());
            let guests: Vec<_> = (0..24).filter_map(|_| UnixStream::connect(&own).ok()).collect();
            for (number, mut guest) in guests.iter().enumerate() {
                let said: &[u8] = [&b"{\"version\":1,\"request\":\"status\"}\n"[..], b"{\"version\":1,\"req", b"\xff\0]\n"][number % 3];
                let _ = guest.write_all(said);
            }
            random.sleep(50);
            format!("{} guests came to rank {rank}", guests.len())
        }
        3 => {
            let others = ["ps", "status", "metrics", "gpus"].map(|command| machine.begin(command));
            for other in others {
                Ran::end_of(other);
            }
            "others looked".into()
        }
        4 => fail_some(ranks, &OF_PAUSE, random),
        _ => "nothing".into(),
    }
}

/// Waits until all are held and have paused memory, or none of them. They may allocate and free meanwhile.
fn end_as_one(machine: &Machine, ranks: &[Program]) -> &'static str {
    let of = |rank: &Program| {
        let status = machine.connect(rank).ask(&json!({"request": "status"}));
        let is_paused = status["tags"].as_array()?.iter().any(|tag| tag["paused_bytes"] != 0);
        let is_changing =
            status["tags"].as_array()?.iter().any(|tag| ["pausing", "resuming", "undoing"].iter().any(|state| tag["state"] == *state));
        match (status["held"] == true, is_paused, is_changing) {
            (true, true, false) => Some("paused"),
            (false, false, false) => Some("active"),
            _ => None,
        }
    };
    let settled = common::patiently(|| {
        let states: Vec<_> = ranks.iter().map(of).collect();
        states[0].filter(|_| states.iter().all(|state| *state == states[0])).ok_or(states)
    });
    settled.unwrap_or_else(|states| panic!("split: {states:?}"))
}

/// Everything at once: programs that do everything, in one job, paused, suspended, moved and resumed at any moment, while commands are
/// killed or get no threads, ranks stop, drivers fail, sockets are deleted and guests misbehave. Whatever happens, a resume brings the whole job back.
#[test]
fn a_job_that_does_everything_survives_everything() {
    let mut random = Random::new(20);
    let machine = Machine { devices: 2, ..Machine::new() };
    // TORTURE_BOTH=1: they also copy while a second device is current, and cannot be moved to one of them.
    let kind = if std::env::var_os("TORTURE_BOTH").is_some() { "both" } else { "ahead" };
    let mut ranks: [Program; 2] = std::array::from_fn(|_| {
        let seed = random.below(1 << 40).to_string();
        machine.start_with("busy", "torture", |command| _ = command.env("VRAMCTL_JOB", "busy").args(["threads", &seed, "3", kind]))
    });
    // Since then, each knows of the other: the first command of a job cannot know of a rank whose socket has just been deleted.
    run(&machine, "pause --name busy --hold-timeout 60").expect(0, "", "");
    run(&machine, "resume --name busy").expect(0, "", "");
    let (mut done, mut killed) = (BTreeMap::<String, u64>::new(), 0);
    for round in 0..rounds(16) {
        let event = Event::of(&mut random);
        let line = event.command(&mut random);
        // A program that ends in the middle is noticed somewhere, without the round's name.
        println!("round {round}, {line}");
        let is_killed = random.one_in(4);
        let mut command = if is_killed { machine.begin(&line) } else { begin_anyhow(&machine, &line, &mut random) };
        random.sleep(60);
        let disturbance = disturb(&machine, &mut ranks, &mut random);
        if is_killed {
            random.sleep(200);
            let _ = command.kill();
        }
        let ran = Ran::end_of(command);
        killed += u64::from(is_killed);
        let case = format!("round {round}, {line}, {disturbance}: {:?} {}{}", ran.code, ran.out, ran.err);
        clear_faults(&mut ranks);
        // A part that one of them has nothing of is paused in the others only.
        let state = if matches!(event, Event::PausePart) { "" } else { end_as_one(&machine, &ranks) };
        if ran.code == Some(0) {
            *done.entry(format!("{event:?}")).or_default() += 1;
            let wanted = match event {
                Event::Pause | Event::Suspend => "paused",
                Event::PausePart => "",
                Event::Move | Event::Resume => "active",
            };
            assert_eq!(state, wanted, "{case}");
        }
        println!("{case} -> {state}");
        let back = Ran::end_of(begin_anyhow(&machine, "resume --name busy --timeout 20", &mut random));
        assert_eq!(back.code, Some(0), "{case}: {}{}", back.out, back.err);
        assert_eq!(end_as_one(&machine, &ranks), "active", "{case}");
        all_get_on(&mut ranks);
    }
    println!("done: {done:?}; {killed} commands were killed");
    for rank in &mut ranks {
        assert_eq!(rank.ask("stop"), "ok");
        assert_eq!(rank.ask("quit"), "");
        assert!(rank.ended().success());
    }
}
