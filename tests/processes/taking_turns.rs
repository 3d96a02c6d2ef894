//! Programs that share a GPU by themselves (`vramctl run --share`): nobody gives a command, and each of them answers as if it were alone.

use crate::common::machine::{Machine, Program, Ran};
use crate::common::sharing::PROGRAM;
use crate::common::{cases, eventually, programs};
use crate::swap::SmallHost;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Engines that together need three times the GPU.
pub(crate) const ENGINES: [(&str, u32); 4] = [("a", 72), ("b", 72), ("c", 72), ("d", 72)];

/// Programs that are busy all the time, and wait for a limited time only: beside those of another such test, a small machine does not get far.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn crowded() -> Machine {
    let mut machine = Machine::new();
    machine.memory = "104M";
    machine
}

pub(crate) fn sharing(machine: &Machine, name: &str, mib: u32, options: &[&str]) -> Command {
    let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python"]);
    let (weights, seed) = ((mib - 8).to_string(), (u64::from(mib) + u64::from(name.as_bytes()[0])).to_string());
    command.args(options).arg("--").arg(programs().join("engine"));
    command.args(["--weights-mib", &weights, "--kv-mib", "8", "--seed", &seed]);
    command
}

pub(crate) fn start_all(machine: &Machine) -> Vec<Program> {
    let mut all: Vec<_> = ENGINES.iter().map(|(name, mib)| Program::spawn(&mut sharing(machine, name, *mib, &[]))).collect();
    for engine in &mut all {
        engine.expect("ready");
    }
    all
}

/// The keepers of a machine's runs.
pub(crate) fn keepers(machine: &Machine) -> Vec<i32> {
    let folder = machine.sockets();
    let of_machine = |pid: &i32| {
        let read = |file| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&read("cmdline")).contains("keeper\0--run\0")
            && String::from_utf8_lossy(&read("environ")).contains(folder.to_str().unwrap())
    };
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(of_machine).collect()
}

fn view(machine: &Machine) -> Value {
    machine.vramctl("share --json").expect(0, "", "").json()
}

/// What an engine alone answers to the same requests.
fn check_answers(machine: &Machine, at: usize, asked: &[(u32, String)]) {
    let alone = Machine::new();
    let (name, mib) = ENGINES[at];
    let mut command = sharing(&alone, name, mib, &[]);
    command.env("VRAMCTL_DIR", machine.sockets().join("nobody"));
    let mut engine = Program::ready(&mut command);
    for (request, answer) in asked {
        assert_eq!(engine.ask(&format!("generate {request}")), *answer, "{name}");
    }
}

/// They start at the same moment, and each may size itself as if it were alone.
#[test]
fn programs_that_do_not_fit_together_answer_as_if_alone() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engines = start_all(&machine);
    let mut asked = vec![Vec::new(); engines.len()];
    let mut random = 7_u32;
    for _ in 0..cases(24) {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (at, request) = ((random >> 16) as usize % engines.len(), random >> 28);
        let answer = engines[at].ask(&format!("generate {request}"));
        asked[at].push((request, answer));
    }
    engines.iter_mut().for_each(Program::verify);
    let view = view(&machine);
    assert_eq!(view["members"].as_array().unwrap().len(), ENGINES.len(), "{view}");
    assert!(view["changes"].as_array().unwrap().iter().any(|change| change["outcome"] == "changed"), "{view}");
    let listed = machine.vramctl("ps").expect(0, "SHARING", "").out;
    assert!(listed.contains("in place") && listed.contains("gave way to "), "{listed}");
    machine.vramctl("top --once").expect(0, " came: ", "");
    drop(engines);
    for (at, asked) in asked.iter().enumerate() {
        check_answers(&machine, at, asked);
    }
}

/// Programs size themselves by the free memory that they are shown, as vLLM does at its start, when others may just be loading. What others have that
/// share the GPU makes way, so it counts as free; what programs have that do not share does not.
#[test]
fn a_program_is_shown_as_free_what_others_make_way_for() {
    const INFO: &str = "(lambda free, all: (cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(all)), free.value >> 20, all.value >> 20))(ctypes.c_size_t(), ctypes.c_size_t())";
    let machine = Machine::with(1, "1G");
    let start = |name| Program::ready(&mut machine.cli(&["run", "--share", "--name", name, "--", "python3", "-c", PROGRAM]));
    let free = |program: &mut Program| {
        let shown = program.ask(INFO);
        let figures: Vec<u64> = shown.trim_matches(['(', ')']).split(", ").map(|word| word.parse().unwrap()).collect();
        assert_eq!((figures[0], figures[2]), (0, 1024), "{shown}");
        figures[1]
    };
    let [mut first, mut second] = ["first", "second"].map(start);
    first.number("malloc(600 << 20)");
    // A fiftieth is kept free.
    eventually("what the first has counts as free", || (900..=1024 - 20).contains(&free(&mut second)));
    let before = free(&mut second);
    second.number("malloc(300 << 20)");
    assert_eq!(before - free(&mut second), 300);
    // Also while it is away.
    second.number("malloc(500 << 20)");
    assert_eq!(before - free(&mut second), 800);
    first.ask("1");
    assert!((300..=1024 - 20 - 600).contains(&free(&mut first)));
    drop(second);
    let hog = machine.hog(0, 200);
    eventually("what does not share is not free", || free(&mut first) < 1024 - 20 - 600 - 200);
    drop(hog);
    eventually("it is free again", || free(&mut first) > 1024 - 20 - 600 - 100);
}

/// Two programs that each need 0.65 of the GPU exchange what is missing, and the rest stays where it is.
#[test]
fn only_what_is_missing_changes_places() {
    const MIB: u64 = 1 << 20;
    // Of the engines' tensors.
    const LARGEST: u64 = 12 * MIB;
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    machine.memory = "192M";
    let mut engines: Vec<_> = ["a", "b"].iter().map(|name| Program::ready(&mut sharing(&machine, name, 120, &[]))).collect();
    for round in 0..cases(6) {
        for engine in &mut engines {
            engine.ask(&format!("generate {round}"));
            engine.verify();
        }
    }
    let now = view(&machine);
    let bytes = |of: &Value, what: &str| of[what].as_u64().unwrap_or_default();
    let (members, changes) = (now["members"].as_array().unwrap(), now["changes"].as_array().unwrap());
    let all: u64 = members.iter().map(|member| bytes(member, "resident_bytes") + bytes(member, "away_bytes")).sum();
    // The scheduler keeps a fiftieth of a small GPU free.
    let missing = all + 192 * MIB / 50 - 192 * MIB;
    assert!(changes.len() > 6 && changes.iter().all(|change| bytes(change, "bytes") < missing + LARGEST), "{missing}: {now:#}");

    // Who came last is in place, and what is seen of the other one agrees.
    assert_eq!((&members[0]["place"], &members[1]["place"]), (&json!("partly away"), &json!("in place")), "{now:#}");
    let away = bytes(&members[0], "away_bytes");
    assert!((missing..missing + LARGEST).contains(&away), "{now:#}");
    let status = machine.vramctl("status a --json").expect(0, "", "").json();
    let (tag, device) = (&status["processes"][0]["tags"][0], &status["processes"][0]["devices"][0]);
    assert_eq!([bytes(tag, "paused_bytes"), bytes(tag, "away_bytes")], [away; 2], "{status:#}");
    assert_eq!([bytes(device, "paused_bytes"), bytes(device, "away_bytes")], [away; 2], "{status:#}");
    assert_eq!(bytes(device, "active_bytes"), bytes(&members[0], "resident_bytes"), "{status:#}");
    machine.vramctl("ps").expect(0, "default partly away", "");
    machine.vramctl("status a").expect(0, "A call brings it back.", "");

    // A person may pause the rest. Then all of it is the person's.
    machine.vramctl("pause a").expect(0, "paused", "");
    engines[0].tell("generate 7");
    engines[1].verify();
    assert_eq!(machine.settled(&[&engines[0]]), "paused, held");
    assert_eq!(bytes(&view(&machine)["members"][0], "away_bytes"), 0);
    engines.pop();
    machine.vramctl("resume a").expect(0, "resumed", "");
    engines[0].expect("answer 7");
    engines[0].verify();
}

/// Two programs that exchange a third of what they have whenever they are asked in turns, and have done so twice. `change`: of the command that
/// starts each. What the scheduler keeps free of the GPU suffices for what the library loads there.
fn changing_places(machine: &mut Machine, change: impl Fn(&mut Command)) -> Vec<Program> {
    machine.memory = "320M";
    let start = |name: &&str| {
        let mut command = sharing(machine, name, 200, &[]);
        change(&mut command);
        Program::ready(&mut command)
    };
    let mut engines: Vec<_> = ["a", "b"].iter().map(start).collect();
    for _ in 0..2 {
        engines.iter_mut().for_each(Program::verify);
    }
    engines
}

/// Bytes of the contents that have left a program so far, and of those that host memory had already.
fn left(machine: &Machine, name: &str) -> [u64; 2] {
    let status = machine.status(name);
    let pauses = &status["processes"][0]["totals"]["pause"];
    ["kept_bytes", "unchanged_bytes"].map(|what| pauses[what].as_u64().unwrap_or_else(|| panic!("{status:#}")))
}

/// Bytes of the first one's contents that are in host memory while all of it is on the GPU.
fn copies(machine: &Machine, a: &mut Program) -> u64 {
    a.verify();
    let status = machine.status("a");
    let tags = status["processes"][0]["tags"].as_array().unwrap();
    assert!(tags.iter().all(|tag| tag["paused_bytes"] == 0), "{status:#}");
    tags.iter().map(|tag| tag["host_bytes"].as_u64().unwrap()).sum()
}

/// Weights leave by a copy once. From then on, host memory still has what leaves.
#[test]
fn what_has_not_changed_is_copied_out_once() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    let mut engines = changing_places(&mut machine, |_| ());
    let before = ["a", "b"].map(|name| left(&machine, name));
    for _ in 0..3 {
        engines.iter_mut().for_each(Program::verify);
    }
    for (name, [kept_before, unchanged_before]) in ["a", "b"].iter().zip(before) {
        let [kept, unchanged] = left(&machine, name);
        let (left, copied) = (kept - kept_before, kept - kept_before - (unchanged - unchanged_before));
        assert!(left > 0 && copied < left / 4, "{name}: {copied} of {left} were copied");
    }
}

/// Copies of what is on a GPU are cache: they go where anybody on the host needs the memory.
#[test]
fn copies_go_when_the_host_is_short() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    let host = SmallHost::on(&machine);
    host.leave(1 << 34);
    let mut engines = changing_places(&mut machine, |command| host.join(command));
    assert!(copies(&machine, &mut engines[0]) > 0);
    host.leave(0);
    eventually("they go", || copies(&machine, &mut engines[0]) == 0);
    // With nothing to spare, the programs go on by what they have.
    engines[0].verify();
}

/// One that wants no copies has none.
#[test]
fn nothing_is_retained_if_nobody_wants_it() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    let mut engines = changing_places(&mut machine, |command| _ = command.env("VRAMCTL_RETAIN", ""));
    assert_eq!(copies(&machine, &mut engines[0]), 0);
    assert_eq!(left(&machine, "a")[1], 0);
}

/// Two leave while a third comes, in one operation: what the one has given back, the other fills while the rest is still being saved.
#[test]
fn two_leave_while_one_comes() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let start = |(name, mib): &(&str, u32)| Program::ready(&mut sharing(&machine, name, *mib, &["--trace"]));
    let mut engines: Vec<_> = [("a", 30), ("b", 30), ("c", 72)].iter().map(start).collect();
    // The large one leaves for both of the others, and comes back.
    for at in [0, 1, 2] {
        engines[at].verify();
    }
    let last = || view(&machine)["changes"].as_array().unwrap().last().unwrap().clone();
    eventually("the scheduler has noted its end", || last()["outcome"] != "");
    let last = last();
    let left: Vec<_> = last["left"].as_array().unwrap().iter().map(|one| one[0].as_str().unwrap()).collect();
    assert_eq!((left, &last["came"], &last["outcome"]), (vec!["a", "b"], &json!(["c"]), &json!("changed")), "{last:#}");
    let path = machine.folder.path().join("trace.json");
    machine.done(&format!("trace -o {}", path.display()));
    let trace: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let last_of = |engine: &Program, name: &str| {
        let events = trace["traceEvents"].as_array().unwrap();
        let slices = events.iter().filter(|event| event["ph"] == "X" && event["name"] == name && event["pid"] == engine.pid());
        let spans = slices.map(|event| (event["ts"].as_f64().unwrap(), event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap()));
        spans.max_by(|one, other| one.0.total_cmp(&other.0)).unwrap()
    };
    // Who gave way to whom, and why.
    let of_change = |engine: &Program, name: &str| {
        let is_it = |event: &&Value| event["cat"] == "change" && event["name"] == name && event["pid"] == engine.pid();
        trace["traceEvents"].as_array().unwrap().iter().rfind(is_it).unwrap().clone()
    };
    for engine in &engines[..2] {
        let gave_way = &of_change(engine, "gives way");
        let args = &gave_way["args"];
        assert_eq!((&args["to"], &args["outcome"], &args["bytes"]), (&json!("c"), &json!("changed"), &last["bytes"]), "{gave_way:#}");
        assert!(args["why"].is_string() && gave_way["dur"].as_f64().unwrap() > 0.0, "{gave_way:#}");
    }
    assert_eq!(of_change(&engines[2], "comes")["args"]["in place of"], "a, b");
    let page = machine.folder.path().join("page.html");
    machine.done(&format!("trace -o {}", page.display()));
    assert!(fs::read_to_string(page).unwrap().contains("a gives way to c ("));
    let (comes, _) = last_of(&engines[2], "resume");
    for engine in &engines[..2] {
        let (_, gone) = last_of(engine, "pause");
        assert!(comes < gone, "the resume begins at {comes}, when the pause has ended at {gone}");
    }
}

/// A rank of which nothing is taken is held with the others of its job, and a call of either brings back both.
#[test]
fn a_job_gives_way_as_one_and_more_than_once() {
    let _alone = one_at_a_time();
    let machine = Machine::with(2, "192M");
    let start = |name: &str, mib: u32, device: &str| Program::ready(sharing(&machine, name, mib, &[]).args(["--device", device]));
    let mut job = ["0", "1"].map(|device| start("job", 120, device));
    let away = |rank: usize| -> u64 {
        let view = view(&machine);
        let rank = view["members"].as_array().unwrap().iter().find(|member| member["pid"] == job[rank].pid()).unwrap();
        rank["away_bytes"].as_u64().unwrap()
    };
    let mut others = vec![start("other", 120, "0")];
    let first = away(0);
    others.push(start("more", 40, "0"));
    assert!(first > 0 && away(0) > first && away(1) == 0, "{}", view(&machine));
    assert!(machine.status("job")["processes"].as_array().unwrap().iter().all(|rank| rank["held"] == true));
    for rank in [1, 0] {
        job[rank].verify();
        others.iter_mut().for_each(Program::verify);
    }
}

/// Two training loops that do not fit together start at the same moment, and take their memory step by step. Both come as far as they want, and
/// both go on and on.
#[test]
fn busy_programs_that_start_together_take_turns() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut both = ["a", "b"].map(|name| {
        let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
        Program::spawn(command.arg(programs().join("trainer")).args(["--mib", "56", "--step-mib", "4"]))
    });
    for trainer in &mut both {
        trainer.expect("ready");
    }
    let mut steps = both.each_mut().map(|trainer| trainer.number("steps"));
    for _ in 0..2 {
        for (trainer, steps) in both.iter_mut().zip(&mut steps) {
            eventually("it goes on", || trainer.number("steps") > *steps);
            *steps = trainer.number("steps");
        }
    }
    both.iter_mut().for_each(Program::verify);
}

/// The scheduler is killed, again and again: another keeper takes its place, with a greater epoch, and no answer is lost.
#[test]
fn another_keeper_takes_over_from_a_scheduler_that_dies() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engines = start_all(&machine);
    let mut epoch = 0;
    for _ in 0..3 {
        eventually("a scheduler", || Ran::of(&mut machine.cli("share --json")).out.trim() != "null");
        let now = view(&machine);
        assert!(now["epoch"].as_u64().unwrap() > epoch, "{now}");
        epoch = now["epoch"].as_u64().unwrap();
        // SAFETY: touches no memory.
        unsafe { libc::kill(now["scheduler"].as_i64().unwrap() as i32, libc::SIGKILL) };
        engines.iter_mut().for_each(Program::verify);
    }
}

/// What a scheduler knew of a program, the next one knows: here, that the program did not drain, and is to be left alone for some minutes.
#[test]
fn a_new_scheduler_knows_what_the_last_one_has_left() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engine = Program::ready(&mut sharing(&machine, "a", 72, &[]));
    let now = view(&machine);
    let mut last = machine.connect(&engine);
    last.step(&json!({ "request": "share", "epoch": now["epoch"].as_u64().unwrap() + 1 }), None, "member");
    let time = |secs: u64| json!({ "secs": secs, "nanos": 0 });
    let pace = json!({ "last": [100, 100] });
    let remembered = json!({
        "held": false, "turn": [time(0), time(0), "Normal"], "backoff": [time(300), time(600)],
        "paces": { "coming": pace, "growing": pace }, "unserved": {},
    });
    let what = json!({ "remembered": remembered, "peaks": {} }).to_string();
    last.send(&json!({ "request": "order", "order": "remember", "what": what }), None);
    // What it answers to the next order, it answers after this one.
    last.send(&json!({ "request": "order", "order": "watch", "on": true }), None);
    while last.answer()["idle_ms"].is_null() {}
    // SAFETY: touches no memory.
    unsafe { libc::kill(now["scheduler"].as_i64().unwrap() as i32, libc::SIGKILL) };
    let _waits = Program::spawn(&mut sharing(&machine, "b", 72, &[]));
    let why = || {
        let now: Value = serde_json::from_str(&Ran::of(&mut machine.cli("share --json")).out).unwrap_or_default();
        let members = now["members"].as_array().into_iter().flatten();
        members.filter_map(|one| one["because"].as_str().filter(|_| one["name"] == "b")).map(str::to_owned).next()
    };
    eventually("the idle one is left alone", || why().is_some_and(|why| why == "nobody can give way"));
    engine.verify();
}

/// A member that has no connection to spare for the scheduler's question is still known by its name.
#[test]
fn a_member_that_does_not_answer_keeps_its_name() {
    let machine = crowded();
    let engine = Program::ready(&mut sharing(&machine, "a", 72, &[]));
    let name = || view(&machine)["members"][0]["name"].clone();
    eventually("it is a member", || name() == "a");
    let socket = machine.socket(engine.pid());
    let others: Vec<_> = (0..16).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let mut refused = String::new();
    BufReader::new(UnixStream::connect(&socket).unwrap()).read_line(&mut refused).unwrap();
    assert!(refused.contains("\"busy\""), "{refused}");
    assert_eq!(name(), "a");
    drop(others);
}

/// Each run leaves one, and nothing of it stays.
#[test]
fn keepers_end_with_the_last_program_of_their_run() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let keepers = || keepers(&machine).len();
    let mut engines = start_all(&machine);
    eventually("a keeper for each", || keepers() == ENGINES.len());
    engines.pop();
    eventually("one less", || keepers() == ENGINES.len() - 1);
    drop(engines);
    // A run whose processes never came is kept for ten seconds.
    eventually("none", || keepers() == 0);
}

/// A scheduler that connects once more is served, however late the end of its first connection is noticed.
#[test]
fn the_end_of_an_old_connection_does_not_end_the_new_one() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let engine = Program::ready(&mut sharing(&machine, "a", 48, &[]));
    let share = json!({ "request": "share", "epoch": u64::MAX });
    let [mut first, mut second] = [0, 1].map(|_| machine.connect(&engine));
    first.step(&share, None, "member");
    second.step(&share, None, "member");
    drop(first);
    for _ in 0..2 {
        let told = second.answer();
        assert_eq!(told["reply"], "member", "{told}");
        second.send(&json!({ "request": "order", "order": "beat" }), None);
    }
}

/// Whoever has a program stopped, or kills all keepers, finds that where people look: nothing is shown as in place that may not be, and what nobody
/// brings back by itself has its way back.
#[test]
fn what_nobody_answers_for_is_said() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engine = Program::ready(&mut sharing(&machine, "a", 48, &[]));
    let mut other = Program::ready(&mut sharing(&machine, "b", 72, &[]));
    other.verify();
    let signal = |pid: i32, signal| {
        // SAFETY: touches no memory.
        unsafe { libc::kill(pid, signal) };
    };
    signal(other.pid() as i32, libc::SIGSTOP);
    eventually("it does not answer", || Ran::of(&mut machine.cli("share")).out.contains("normal priority, does not answer\n"));
    signal(other.pid() as i32, libc::SIGCONT);
    eventually("it answers", || {
        Ran::of(&mut machine.cli("share")).out.contains("b (pid") && view(&machine)["members"][1]["place"] == "in place"
    });
    eventually("no scheduler", || {
        for keeper in keepers(&machine) {
            signal(keeper, libc::SIGKILL);
        }
        Ran::of(&mut machine.cli("share --json")).out.trim() == "null"
    });
    let says = "The memory of a stays away until `vramctl resume a`";
    machine.vramctl("share").expect(0, says, "");
    machine.vramctl("ps").expect(0, "a 1/1", says);
    let seen = machine.vramctl("top --once").expect(0, "Share", "").out;
    assert!(seen.contains("nobody schedules"), "{seen}");
    drop(other);
    machine.vramctl("resume a").expect(0, "resumed", "");
    engine.verify();
}

/// What a person pauses stays paused: no call brings it back, and the scheduler leaves it alone.
#[test]
fn what_a_person_pauses_stays_paused() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engine = Program::ready(&mut sharing(&machine, "a", 48, &[]));
    machine.vramctl("pause a").expect(0, "paused", "");
    engine.tell("generate 1");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(machine.settled(&[&engine]), "paused, held");
    let mut other = Program::ready(&mut sharing(&machine, "b", 72, &[]));
    other.verify();
    assert_eq!(machine.settled(&[&engine]), "paused, held");
    machine.vramctl("share").expect(0, "held by somebody else: 0 B there", "");
    drop(other);
    machine.vramctl("resume a").expect(0, "resumed", "");
    engine.expect("answer 1");
}

/// A program that is idle for as long as it says gives its memory back even if nobody shares the GPU, and comes back when it is called.
#[test]
fn an_idle_program_makes_room_for_programs_that_do_not_share() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engine = Program::ready(&mut sharing(&machine, "a", 72, &["--idle", "1"]));
    eventually("its memory is away", || view(&machine)["members"][0]["place"] == "away");
    drop(machine.hog(0, 72));
    engine.verify();
}
