//! Programs that share a GPU by themselves, while somebody kills and stops them, their keepers and the scheduler: whoever is left goes on, and
//! answers as if nothing had happened.

use crate::common::machine::{Machine, Program};
use crate::common::sharing::{MIB, PROGRAM};
use crate::common::{SetOnDrop, built, eventually, in_parallel, patiently, programs, some};
use crate::taking_turns::{crowded, keepers, one_at_a_time, sharing, start_all};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// What `vramctl share` shows, once there is a scheduler that answers.
fn seen<T>(machine: &Machine, what: impl Fn(&Value) -> Option<T>) -> T {
    let ask = || what(&serde_json::from_str(&machine.vramctl("share --json").out).ok()?);
    patiently(|| ask().ok_or(())).unwrap_or_else(|()| panic!("no scheduler answers"))
}

/// The scheduler's process and its epoch.
fn scheduler(machine: &Machine) -> (i32, u64) {
    seen(machine, |view| Some((view["scheduler"].as_i64()? as i32, view["epoch"].as_u64()?)))
}

fn signal(pid: i32, signal: libc::c_int) {
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// It is stopped for so long that another keeper takes over. When it continues, it schedules no more, and takes over again when there is need.
#[test]
fn another_keeper_takes_over_from_a_scheduler_that_stands_still() {
    let _alone = one_at_a_time();
    let machine = crowded();
    let mut engines = start_all(&machine);
    let (first, before) = scheduler(&machine);
    signal(first, libc::SIGSTOP);
    engines.iter_mut().for_each(Program::verify);
    let (second, after) = scheduler(&machine);
    assert!(second != first && after > before, "{first} {second}, {before} {after}");
    signal(first, libc::SIGCONT);
    for _ in 0..2 {
        engines.iter_mut().for_each(Program::verify);
    }
    assert_ne!(scheduler(&machine).0, first);
    // Only that one is left to take over.
    for pid in keepers(&machine).into_iter().filter(|pid| *pid != first) {
        signal(pid, libc::SIGKILL);
    }
    engines.iter_mut().for_each(Program::verify);
    assert_eq!(scheduler(&machine).0, first);
}

/// The same for one that may have ended by itself. Whether it has not.
fn may_send(pid: i32, signal: libc::c_int) -> bool {
    unsafe { libc::kill(pid, signal) == 0 }
}

/// The keeper of the run that a program has begun.
fn keeper_of(machine: &Machine, program: &Program) -> i32 {
    let pid = format!("\0--pid\0{}\0", program.pid());
    let keeps = |keeper: &i32| fs::read_to_string(format!("/proc/{keeper}/cmdline")).is_ok_and(|line| line.contains(&pid));
    keepers(machine).into_iter().find(keeps).expect("its keeper")
}

/// The state of a process, as the kernel has it: `T` if it is stopped.
fn state_of(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// A program of `tests/apps/room.c`.
fn asking(machine: &Machine, name: &str) -> Program {
    let room = built("room", "room.c", &["-l:libcuda.so.1", "-l:libcudart.so.13"]);
    let mut command: Command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
    let mut program = Program::ready(command.arg(room));
    assert_eq!(program.ask("first"), "0");
    program
}

/// What a program calls while it leaves its GPU, and while it comes back.
const LEAVES: [&str; 3] = ["cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemRelease"];
const COMES: [&str; 4] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    Scheduler,
    /// All keepers, the scheduler too, except one.
    Keepers,
    WhoLeaves,
    WhoComes,
}

/// Two programs change places, and one of them stands still at a step of that. Meanwhile somebody is killed.
fn is_killed_at(step: &str, killed: Killed) {
    let about = format!("{killed:?} at {step}");
    let mut machine = Machine::new();
    machine.memory = "96M";
    let mut programs = ["a", "b", "c"].map(|name| asking(&machine, name));
    let [leaves, comes, other] = &mut programs;
    for program in [&mut *comes, &mut *leaves] {
        for _ in 0..3 {
            assert_eq!(program.ask("take 20"), "0", "{about}");
        }
    }
    let (first, before) = scheduler(&machine);
    let stops = if LEAVES.contains(&step) { &mut *leaves } else { &mut *comes };
    assert_eq!(stops.ask(&format!("stop {step}")), "0", "{about}");
    let stopped = stops.pid();
    comes.tell("check");
    eventually(&format!("{about}: it stops"), || state_of(stopped) == Some('T'));
    match killed {
        Killed::Scheduler => signal(first, libc::SIGKILL),
        Killed::Keepers => {
            let mut all = keepers(&machine);
            all.sort_by_key(|pid| *pid != first);
            assert_eq!(all.len(), 3, "{about}");
            for pid in &all[..2] {
                signal(*pid, libc::SIGKILL);
            }
        }
        Killed::WhoLeaves => leaves.kill(),
        Killed::WhoComes => comes.kill(),
    }
    if state_of(stopped) == Some('T') {
        signal(stopped as i32, libc::SIGCONT);
    }
    if killed != Killed::WhoComes {
        assert_eq!(comes.line(), "ok", "{about}");
    }
    if killed != Killed::WhoLeaves {
        assert_eq!(leaves.ask("check"), "ok", "{about}");
    }
    // What was promised to the dead is there for another one.
    for _ in 0..4 {
        assert_eq!(other.ask("take 20"), "0", "{about}");
    }
    let alive = programs.iter_mut().filter(|program| !program.is_silent());
    for program in alive {
        assert_eq!(program.ask("check"), "ok", "{about}");
    }
    let (_, after) = scheduler(&machine);
    assert!(after > before || matches!(killed, Killed::WhoLeaves | Killed::WhoComes), "{about}");
}

/// `PROPTEST_CASES` sets how many of them.
#[test]
fn whoever_is_killed_at_any_step_of_a_change_the_others_go_on() {
    let _alone = one_at_a_time();
    let of = |step: &&'static str| [Killed::Scheduler, Killed::Keepers, Killed::WhoLeaves, Killed::WhoComes].map(|killed| (*step, killed));
    let all: Vec<_> = LEAVES.iter().chain(&COMES).flat_map(of).collect();
    in_parallel(some(all, 6), 3, |(step, killed)| is_killed_at(step, killed));
}

/// A person's resume queues with those that wait for room: it takes none that is promised to others, waits instead of failing, and has its turn.
#[test]
fn a_resume_by_a_person_waits_for_its_turn() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    machine.memory = "96M";
    let [mut paused, mut leaves, mut comes] = ["paused", "leaves", "comes"].map(|name| asking(&machine, name));
    assert_eq!(paused.ask("take 30"), "0");
    machine.vramctl("pause paused").expect(0, "paused", "");
    assert_eq!(leaves.ask("take 50"), "0");
    // It stands still while it gives way, and there would be room for the paused one meanwhile.
    assert_eq!(leaves.ask("stop cuMemUnmap"), "0");
    comes.tell("take 60");
    eventually("it stops", || state_of(leaves.pid()) == Some('T'));
    machine.vramctl("resume paused --timeout 1").expect(5, "", "there was no room yet for paused");
    assert_eq!(machine.settled(&[&paused]), "paused, held");
    signal(leaves.pid() as i32, libc::SIGCONT);
    comes.expect("0");
    // Those that are idle give way to it.
    machine.vramctl("resume paused").expect(0, "resumed", "");
    for program in [&mut paused, &mut leaves, &mut comes] {
        assert_eq!(program.ask("check"), "ok");
    }
}

/// A program of Python's ([`PROGRAM`]).
fn python(machine: &Machine, name: &str) -> Program {
    let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--", "python3", "-c", PROGRAM]);
    Program::ready(command.env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// Has it take so much, filled with a number. Returns the request that reads it.
fn taken(program: &mut Program, mib: u64, number: u8) -> String {
    let pointer = program.number(&format!("malloc({})", mib * MIB));
    assert_eq!(program.ask(&format!("fill({pointer}, {number}, {})", mib * MIB)), "0");
    format!("read({pointer}, {})", mib * MIB)
}

fn members(machine: &Machine) -> Vec<(u64, String)> {
    let member = |one: &Value| Some((one["pid"].as_u64()?, one["name"].as_str()?.to_owned()));
    seen(machine, |view| view["members"].as_array()?.iter().map(member).collect())
}

/// While its memory is away and while a call of it waits. Its children have nothing of all that, and outlive it.
#[test]
fn a_member_forks_and_nobody_waits_for_its_children() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    machine.memory = "96M";
    let [mut a, mut b] = ["a", "b"].map(|name| python(&machine, name));
    let [read_a, read_b] = [(&mut a, 7), (&mut b, 8)].map(|(program, number)| taken(program, 60, number));
    let child: i32 = a.ask("(child := os.fork()) or signal.pause()").parse().unwrap();
    let (scheduler, _) = scheduler(&machine);
    signal(scheduler, libc::SIGSTOP);
    assert_eq!(a.ask(&format!("globals().update(reads=start(lambda: {read_a}))")), "None");
    let no_cuda = format!("fork(lambda: int(malloc({MIB})[6:]))");
    assert_eq!([a.ask(&no_cuda), a.ask(&no_cuda)], ["3", "3"], "CUDA's answer in a forked child");
    signal(scheduler, libc::SIGCONT);
    assert_eq!([a.ask("reads()"), b.ask(&read_b), a.ask(&read_a)], ["[7]", "[8]", "[7]"]);
    a.kill();
    let read_more = taken(&mut b, 30, 9);
    assert_eq!([b.ask(&read_b), b.ask(&read_more)], ["[8]", "[9]"]);
    assert_eq!(members(&machine), [(u64::from(b.pid()), "b".to_owned())]);
    eventually("the keeper of its run ends", || keepers(&machine).len() == 1);
    signal(child, libc::SIGKILL);
}

/// While its memory is away and a request waits for room. The next program of the process begins anew, under the same name and keeper.
#[test]
fn a_member_becomes_another_program() {
    let _alone = one_at_a_time();
    let mut machine = Machine::new();
    machine.memory = "96M";
    let [mut a, mut b] = ["a", "b"].map(|name| python(&machine, name));
    taken(&mut a, 60, 7);
    let read_b = taken(&mut b, 60, 8);
    let (scheduler, _) = scheduler(&machine);
    signal(scheduler, libc::SIGSTOP);
    assert_eq!(a.ask(&format!("globals().update(waits=start(lambda: malloc({})))", 30 * MIB)), "None");
    a.tell("os.execvp(sys.orig_argv[0], sys.orig_argv)");
    a.expect("ready");
    signal(scheduler, libc::SIGCONT);
    let read_a = taken(&mut a, 60, 9);
    assert_eq!([b.ask(&read_b), a.ask(&read_a), b.ask(&read_b)], ["[8]", "[9]", "[8]"]);
    let mut both = members(&machine);
    both.sort();
    let mut expected = [(u64::from(a.pid()), "a".to_owned()), (u64::from(b.pid()), "b".to_owned())];
    expected.sort();
    assert_eq!(both, expected);
    assert_eq!(keepers(&machine).len(), 2);
    a.kill();
    eventually("the keeper of its run ends", || keepers(&machine).len() == 1);
}

/// Each of two jobs has a rank on each of two GPUs, on which only one of the jobs fits. The ranks of a job wait for each other in collectives all the
/// time, also while one of them waits for more memory.
#[test]
fn jobs_that_cross_on_two_gpus_take_turns_also_while_one_grows() {
    let _alone = one_at_a_time();
    let machine = Machine::with(2, "48M");
    let rank = |name: &str, communicator: &str, rank: usize, gpu: usize, last: u64| {
        let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
        command.arg(programs().join("torture")).args(["rank", communicator, &rank.to_string(), "2", &last.to_string(), "3000"]);
        Program::spawn(command.env("CUDA_VISIBLE_DEVICES", gpu.to_string()))
    };
    let mut ranks = [("x", "71", 0, 0), ("x", "71", 1, 1), ("y", "72", 0, 1), ("y", "72", 1, 0)]
        .map(|(name, id, place, gpu)| rank(name, id, place, gpu, 0));
    for rank in &mut ranks {
        rank.expect("ready");
    }
    let grow = |ranks: &mut [Program], mib: u32| {
        for rank in ranks.iter_mut() {
            rank.tell(&format!("grow {mib}"));
        }
        for rank in ranks {
            rank.expect("grown");
        }
    };
    for job in ranks.chunks_mut(2) {
        grow(job, 24);
    }
    let rounds = |rank: &mut Program| rank.ask("progress").split(' ').next().unwrap().parse::<u64>().unwrap();
    let all_get_on = |ranks: &mut [Program]| {
        let before: Vec<_> = ranks.iter_mut().map(rounds).collect();
        for (rank, before) in ranks.iter_mut().zip(before) {
            eventually("it gets on", || rounds(rank) > before);
        }
    };
    all_get_on(&mut ranks);
    // One rank of one job, while the other job is in place or comes.
    grow(&mut ranks[..1], 12);
    all_get_on(&mut ranks);
    for rank in &mut ranks {
        assert_eq!(rank.ask("check"), "ok");
    }
    for first in [0, 2] {
        assert_eq!(ranks[first].ask("stop"), "ok");
    }
    let over =
        |rank: &mut Program| patiently(|| Some(rank.ask("progress")).filter(|told| told.contains("over")).ok_or(())).expect("its end");
    let found: Vec<_> = ranks.iter_mut().map(over).collect();
    drop(ranks);
    let last = |found: &str| found.split(' ').next().unwrap().parse::<u64>().unwrap();
    let alone = [("y", "73", 2), ("x", "74", 0)].map(|(name, id, at)| {
        let mut both = [0, 1].map(|place| rank(name, id, place, place, last(&found[at])));
        both.each_mut().map(|rank| {
            rank.expect("ready");
            over(rank)
        })
    });
    assert_eq!([&found[2..], &found[..2]], [&alone[0][..], &alone[1][..]]);
}

/// A small generator of random numbers: whoever knows the seed knows them all.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}

/// Engines, which have 17 MiB beside, and a trainer: together they need 3.5 times the GPU.
const NAMES: [&str; 3] = ["a", "b", "c"];
const GPU: &str = "95M";
const ENGINE_MIB: u32 = 64;
const TRAINER_MIB: &str = "80";

/// What one engine was asked in its life, and what it has answered.
type Asked = Vec<(u64, String)>;

/// An engine that is asked at random until the end. When it has been killed, another one takes its place. Returns what all of them have answered.
fn asked_at_random(
    machine: &Machine,
    name: &str,
    mut random: Random,
    pid: &AtomicU32,
    answered: &AtomicU32,
    is_over: &AtomicBool,
) -> Vec<Asked> {
    let mut lives = Vec::new();
    let start = || Program::spawn(&mut sharing(machine, name, ENGINE_MIB, &[]));
    let mut engine = start();
    while !is_over.load(Ordering::Relaxed) || lives.is_empty() {
        let mut asked = Asked::new();
        pid.store(engine.pid(), Ordering::Relaxed);
        // It may be killed at any moment, also before.
        let mut lives_on = engine.line().starts_with("ready");
        while lives_on && !is_over.load(Ordering::Relaxed) {
            // Several in a row, then none for a while.
            if random.below(6) == 0 {
                thread::sleep(Duration::from_millis(random.below(2000)));
            }
            let request = random.below(64);
            match engine.ask_if_alive(&format!("generate {request}")) {
                Some(answer) => {
                    asked.push((request, answer));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                None => lives_on = false,
            }
        }
        if lives_on {
            // From now on, nobody kills it.
            pid.store(0, Ordering::Relaxed);
            lives_on = engine.ask_if_alive("verify").is_some_and(|answer| {
                assert!(answer.contains("ok") && !answer.contains("corrupt") && !answer.contains("zero"), "{name}: {answer}");
                true
            });
        }
        if !lives_on {
            let status = engine.ended();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "{name} has ended by itself: {status}");
            engine = start();
        }
        lives.push(asked);
    }
    lives
}

/// For `SHARING_SECONDS`, engines beside a trainer that is always busy are asked at random, while the scheduler and engines are killed and the
/// scheduler is stopped. Each answer is what the engine alone says to the same requests. `SHARING_SEED` repeats what happens, not when.
#[test]
fn engines_beside_a_trainer_answer_as_if_alone_whoever_is_killed() {
    let _alone = one_at_a_time();
    let setting = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    let seconds = setting("SHARING_SECONDS").unwrap_or(10);
    let seed = setting("SHARING_SEED").unwrap_or_else(|| UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64));
    println!("SHARING_SEED={seed}");
    let random = |part: u64| Random((seed + part).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut machine = Machine::new();
    machine.memory = GPU;
    let (is_over, done) = (AtomicBool::new(false), Mutex::new(BTreeMap::new()));
    let [pids, answers] = [const { [const { AtomicU32::new(0) }; 3] }; 2];
    let mut command = machine.cli(&["run", "--share", "--name", "train", "--no-python", "--"]);
    let mut trainer = Program::spawn(command.arg(programs().join("trainer")).args(["--mib", TRAINER_MIB, "--step-mib", "8"]));
    let mut killed = [0_u32; 3];
    let lives = thread::scope(|scope| {
        let _end = SetOnDrop(&is_over);
        let asks = |(at, name): (usize, &'static str)| {
            let (machine, is_over, [pid, answered], random) = (&machine, &is_over, [&pids[at], &answers[at]], random(at as u64));
            scope.spawn(move || (at, asked_at_random(machine, name, random, pid, answered, is_over)))
        };
        let engines: Vec<_> = NAMES.into_iter().enumerate().map(asks).collect();
        trainer.expect("ready");
        let last = keeper_of(&machine, &trainer);
        let (mut random, begun) = (random(9), Instant::now());
        while begun.elapsed() < Duration::from_secs(seconds) {
            thread::sleep(Duration::from_millis(500 + random.below(2500)));
            let (scheduler, epoch) = scheduler(&machine);
            if let Some(changed) = serde_json::from_str::<Value>(&machine.vramctl("share --json").out)
                .ok()
                .and_then(|view| view["totals"]["changes"]["changed"].as_u64())
            {
                done.lock().unwrap().insert(epoch, changed);
            }
            match random.below(8) {
                // Somebody must be left to take over.
                0 if scheduler != last => killed[0] += u32::from(may_send(scheduler, libc::SIGKILL)),
                1 => {
                    killed[1] += u32::from(may_send(scheduler, libc::SIGSTOP));
                    thread::sleep(Duration::from_millis(random.below(10_000)));
                    may_send(scheduler, libc::SIGCONT);
                }
                2 => {
                    let pid = pids[random.below(3) as usize].load(Ordering::Relaxed) as i32;
                    killed[2] += u32::from(pid != 0 && may_send(pid, libc::SIGKILL));
                }
                _ => (),
            }
            trainer.number("steps");
        }
        // The slower a change of places, the longer the turns. On a busy machine, the others' turns may last for minutes, as long as places are changed.
        let all_are_served = || answers.iter().all(|answered| answered.load(Ordering::Relaxed) > 0);
        while !all_are_served() {
            let changes = |view: &Value| Some((view["epoch"].as_u64()?, view["totals"]["changes"]["changed"].as_u64().unwrap_or(0)));
            let before = seen(&machine, changes);
            eventually("places are changed, or each has been served", || all_are_served() || seen(&machine, changes) != before);
        }
        is_over.store(true, Ordering::Relaxed);
        engines.into_iter().map(|engine| engine.join().unwrap()).collect::<Vec<_>>()
    });
    trainer.verify();
    let steps = trainer.number("steps");
    drop(trainer);
    let mut requests = 0;
    for (at, lives) in lives {
        for asked in lives.into_iter().filter(|asked| !asked.is_empty()) {
            let alone = Machine::new();
            let mut engine = Program::ready(&mut sharing(&alone, NAMES[at], ENGINE_MIB, &[]));
            requests += asked.len();
            for (request, answer) in asked {
                assert_eq!(engine.ask(&format!("generate {request}")), answer, "{}", NAMES[at]);
            }
        }
    }
    let changes: u64 = done.lock().unwrap().values().sum();
    let [schedulers, stopped, engines] = killed;
    println!(
        "{requests} requests, {steps} steps of the trainer, at least {changes} changes of places; killed: {schedulers} schedulers, {engines} engines; \
         stopped: {stopped} schedulers"
    );
    assert!(requests > 0 && steps > 0);
}
