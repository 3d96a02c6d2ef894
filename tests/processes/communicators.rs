//! NCCL's communicators: which of their ranks are where, their memory in jobs that leave their GPUs, and what the log says of NCCL's failures.
//! `tests/apps/nccl/communicators.c` stands in for NCCL.

use crate::common::machine::{Machine, Program};
use crate::common::{self, LONG_MS, SHARED, compile, eventually, own_folder, simulated_libraries};
use serde_json::{Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fs, thread};

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("communicators");
        fs::create_dir_all(folder.join("oldest")).unwrap();
        let library = [&SHARED[..], &["-Wl,-soname,libnccl.so.2"]].concat();
        compile(&folder.join("libnccl.so.2"), &["nccl/communicators.c"], &library);
        compile(&folder.join("oldest/libnccl.so.2"), &["nccl/communicators.c"], &[&library[..], &["-DVERSION=21210"]].concat());
        let linked = ["-Wl,--no-as-needed", "-l:libcudart.so.13", "-l:libnccl.so.2"];
        compile(&folder.join("ranks"), &["nccl/ranks.c"], &linked);
        folder
    })
}

/// Starts some ranks of a communicator, which wait for each other.
fn start(machine: &Machine, name: &str, which: &[u32], of: u32, more: &[&str]) -> Vec<Program> {
    start_with(machine, name, which, of, more, |_| ())
}

fn start_with(machine: &Machine, name: &str, which: &[u32], of: u32, more: &[&str], change: impl Fn(&mut Command) + Sync) -> Vec<Program> {
    let one = |rank: &u32| {
        let arguments = [rank.to_string(), of.to_string(), "world".to_owned()];
        machine.start_with(name, built().join("ranks").to_str().unwrap(), |command| {
            let libraries = format!("{}:{}", simulated_libraries().display(), built().display());
            command.args(&arguments).args(more).env("LD_LIBRARY_PATH", libraries).env("VRAMCTL_TAG", "default");
            change(command);
        })
    };
    thread::scope(|scope| {
        let starting: Vec<_> = which.iter().map(|rank| scope.spawn(move || one(rank))).collect();
        starting.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Sends the same line to all, and returns their answers.
fn all_say(ranks: &mut [Program], line: &str) -> Vec<String> {
    thread::scope(|scope| {
        let asked: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || rank.ask(line))).collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

#[track_caller]
fn assert_sums(ranks: &mut [Program]) {
    let wanted: usize = (1..=ranks.len()).sum();
    for said in all_say(ranks, "sum") {
        assert_eq!(said.trim(), format!("sum {wanted}, answer 0"));
    }
}

fn status(machine: &Machine, rank: &Program) -> Value {
    machine.connect(rank).ask(&json!({"request": "status"}))
}

/// The ranks of communicators that a process has.
fn communicators(machine: &Machine, rank: &Program) -> Vec<Value> {
    status(machine, rank)["communicators"].as_array().cloned().unwrap_or_default()
}

fn set_failure(machine: &Machine, failure: &str) {
    fs::write(machine.folder.path().join("gpu/nccl-fail"), failure).unwrap();
}

/// NCCL before 2.14 writes a communicator only at the end of the group, into a variable that need not be initialised.
#[test]
fn a_communicator_that_an_old_nccl_has_not_made_yet_is_not_asked() {
    let machine = Machine::new();
    let libraries = format!("{}:{}", built().join("oldest").display(), simulated_libraries().display());
    let mut ranks = start_with(&machine, "train", &[0], 1, &[], |command| _ = command.env("LD_LIBRARY_PATH", &libraries));
    for group in ["group", "group all"] {
        assert_eq!(ranks[0].ask(group).trim(), "group 0, not written, 0, written");
        assert_sums(&mut ranks);
    }
    // Of a newer one it is there at once, and known.
    let mut ranks = start(&machine, "new", &[0], 1, &[]);
    assert_eq!(ranks[0].ask("group").trim(), "group 0, written, 0, written");
    assert_eq!(communicators(&machine, &ranks[0]).len(), 2);
    assert_sums(&mut ranks);
}

/// NCCL answers "unhandled cuda error" when memory runs out, and no more. The log says what was free.
#[test]
fn the_log_says_how_much_was_free_when_nccl_failed() {
    let mut machine = Machine::new();
    machine.memory = "64M";
    let (mut rank, log) = alone(&machine, &[]);
    let answers = (0..40).map(|_| rank.ask("config")).collect::<Vec<_>>();
    assert!(answers.iter().any(|answer| answer.trim() == "config 1"), "{answers:?}");
    let line = &failures(&log, 1)[0];
    assert!(
        line.contains("ncclCommInitRankConfig failed (code 1); free now: ") && line.contains(" of 64.00 MiB on GPU 0 (GPU-73696d75). "),
        "{line}"
    );
}

/// A rank that is alone, and the file with its log.
fn alone(machine: &Machine, more: &[&str]) -> (Program, PathBuf) {
    let log = machine.folder.path().join("log");
    let mut ranks = start_with(machine, "train", &[0], 1, more, |command| _ = command.stderr(fs::File::create(&log).unwrap()));
    (ranks.remove(0), log)
}

/// The warnings of failures, once there are at least this many: the program waits for each only briefly.
#[track_caller]
fn failures(log: &Path, least: usize) -> Vec<String> {
    let mut said = Vec::new();
    eventually("the warning", || {
        let log = fs::read_to_string(log).unwrap();
        said = log.lines().filter(|line| line.contains("failed (code ")).map(str::to_owned).collect();
        said.len() >= least
    });
    said
}

/// Collectives are not hooked, but programs ask NCCL what their errors mean.
#[test]
fn the_log_says_how_much_was_free_when_a_collective_failed() {
    let other = built().join("libnccl.so.2");
    // Linked, and looked up.
    for more in [&[][..], &[other.to_str().unwrap()]] {
        let mut machine = Machine::new();
        machine.memory = "64M";
        let (mut rank, log) = alone(&machine, more);
        let begun = Instant::now();
        set_failure(&machine, "sum 0 1");
        let (sum, explained) = (rank.ask("sum"), rank.ask("explain 1"));
        assert!(sum.ends_with(", answer 1") && explained == "unhandled cuda error", "{sum}; {explained}");
        let said = failures(&log, 1);
        assert!(
            said[0].contains("a call of NCCL failed (code 1); free now: ") && said[0].contains(" of 64.00 MiB on GPU 0 (GPU-73696d75). "),
            "{said:?}"
        );
        // Not for want of memory.
        for code in [0, 4, 5, 6, 7, 99] {
            rank.ask(&format!("explain {code}"));
        }
        assert_eq!(failures(&log, 1), said);
        for _ in 0..10 {
            rank.ask("explain 3");
        }
        // Three at once, and one every ten seconds.
        let (said, most) = (failures(&log, 3).len(), 3 + begun.elapsed().as_secs() as usize / 10);
        assert!(said <= most, "the rate is limited: {said}");
    }
}

#[test]
fn a_failure_is_logged_once_if_the_call_is_known() {
    let mut machine = Machine::new();
    machine.memory = "64M";
    let (mut rank, log) = alone(&machine, &[]);
    while rank.ask("config").trim() != "config 1" {}
    rank.ask("explain 1");
    rank.ask("explain 1");
    let said = failures(&log, 2);
    let calls = ["ncclCommInitRankConfig", "a call of NCCL"]
        .map(|call| said.iter().filter(|line| line.contains(&format!("{call} failed (code 1)"))).count());
    assert_eq!(calls, [1, 1], "{said:?}");
}

/// The driver may be waiting for the collective that the program is about to abort.
#[test]
fn a_program_that_asks_about_an_error_does_not_wait_for_the_driver() {
    let machine = Machine::new();
    let (mut rank, log) = alone(&machine, &[]);
    assert_eq!(rank.ask(&format!("slow {LONG_MS}")).trim(), "slow 0");
    assert_eq!(rank.ask("explain 1").trim(), "unhandled cuda error");
    assert!(failures(&log, 0).is_empty());
    rank.ask("slow 0");
    assert_eq!(failures(&log, 1).len(), 1);
    // Nor does its exit, at most briefly. The simulated driver then complains of the call in progress.
    rank.ask(&format!("slow {LONG_MS}"));
    rank.ask("explain 1");
    rank.tell("exit");
    rank.ended();
}

/// Then the library has no business in the driver, and nothing to say.
#[test]
fn a_failure_before_the_first_use_of_cuda_is_not_logged() {
    let machine = Machine::new();
    let (mut rank, log) = alone(&machine, &[]);
    // It cannot be opened as a file.
    fs::create_dir(machine.folder.path().join("gpu/nccl-world-config")).unwrap();
    assert_eq!(rank.ask("child"), "child 2");
    assert!(failures(&log, 0).is_empty(), "{:?}", failures(&log, 0));
    assert_eq!(rank.ask("config"), "config 2");
    assert_eq!(failures(&log, 1).len(), 1);
}

/// What NCCL may share memory by: descriptors, CUDA IPC, memory of the host, and descriptors of the host's.
const TRANSPORTS: [&[(&str, &str)]; 4] =
    [&[], &[("NCCL_CUMEM_ENABLE", "0")], &[("NCCL_P2P_DISABLE", "1")], &[("NCCL_P2P_DISABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "1")]];

/// A job of as many ranks.
fn job(machine: &Machine, ranks: u32, transport: &[(&str, &str)]) -> Vec<Program> {
    start_with(machine, "train", &(0..ranks).collect::<Vec<_>>(), ranks, &[], |command| _ = command.envs(transport.iter().copied()))
}

/// Whichever way its ranks reach each other, a job leaves the GPU with its communicators, and its collectives go on afterwards.
#[test]
fn a_job_leaves_the_gpu_with_its_communicators() {
    for transport in TRANSPORTS {
        let machine = Machine { devices: 2, ..Machine::new() };
        let mut ranks = job(&machine, 3, transport);
        assert_sums(&mut ranks);
        for one in ["status", "status train", &format!("status --pid {}", ranks[0].pid())] {
            let told = machine.vramctl(one).text();
            assert!(!told.contains("Cannot be suspended"), "as one, they can: {told}");
        }
        for (away, back) in
            [("suspend train", "resume train"), ("move train --to 1", "move train --to 0"), ("suspend train", "resume train")]
        {
            machine.vramctl(away).expect(0, "train", "");
            machine.vramctl(back).expect(0, "train", "");
            assert_sums(&mut ranks);
        }
        all_say(&mut ranks, "destroy");
        machine.vramctl("suspend train").expect(0, "suspended", "");
        machine.vramctl("resume train").expect(0, "resumed", "");
    }
}

/// Suspends and resumes a job that trains, at random moments. `TRAIN_SUSPENDS` sets how often.
fn train_through_suspends(ranks: u32, transport: &[(&str, &str)], how: &str) {
    let machine = Machine { devices: 2, ..Machine::new() };
    let set = |command: &mut Command| _ = command.envs(transport.iter().copied()).env("SPREAD", "1");
    let mut ranks = start_with(&machine, "train", &(0..ranks).collect::<Vec<_>>(), ranks, &[], set);
    for rank in &mut ranks {
        rank.tell(how);
    }
    let suspends = std::env::var("TRAIN_SUSPENDS").map_or(3, |count| count.parse().unwrap());
    for nth in 0..suspends {
        thread::sleep(Duration::from_millis(RandomState::new().build_hasher().finish() % 150));
        // A rank that is held in a collective waits for the other one, which may take several attempts on a busy machine.
        machine.vramctl("suspend train --hold-timeout 60").expect(0, "", "");
        assert!(machine.gpus().iter().all(|gpu| *gpu == (0, 0)), "{transport:?} {how}, suspend {nth}: {:?}", machine.gpus());
        machine.vramctl("resume train").expect(0, "", "");
    }
    fs::write(machine.folder.path().join("gpu/stop"), "").unwrap();
    let said: Vec<_> = ranks.iter_mut().map(|rank| rank.expect("train ").trim().to_owned()).collect();
    let steps: u64 = said[0].split(' ').nth(1).unwrap().parse().unwrap();
    // Of an undisturbed run.
    let (mut weights, values) = (1, (1..=ranks.len() as u64).sum::<u64>());
    (0..steps).for_each(|_| weights = (weights * 31 + weights % 1000 * values) % 1_000_003);
    assert_eq!(said, vec![format!("train {steps} steps, {weights}, answer 0"); ranks.len()], "{transport:?} {how}");
    println!("{transport:?} {how}: {suspends} suspends in {steps} steps");
}

/// Whichever way NCCL's ranks reach each other.
#[test]
fn a_job_is_suspended_at_any_moment_of_its_training() {
    for transport in &TRANSPORTS {
        train_through_suspends(2, transport, "train");
    }
}

/// As inference engines with tensor parallelism do it.
#[test]
fn a_job_with_an_all_reduce_of_its_own_is_suspended_at_any_moment() {
    train_through_suspends(2, TRANSPORTS[0], "train own");
    train_through_suspends(2, TRANSPORTS[2], "train own");
}

/// Each rank is where another one was, and has that one's memory where it had it.
#[test]
fn ranks_change_places() {
    let machine = Machine { devices: 2, ..Machine::new() };
    let mut ranks = start_with(&machine, "train", &[0, 1], 2, &[], |command: &mut Command| _ = command.env("SPREAD", "1"));
    let gpu = |rank: &Program| status(&machine, rank)["devices"][0]["uuid"].clone();
    let before = [gpu(&ranks[0]), gpu(&ranks[1])];
    assert_ne!(before[0], before[1]);
    for round in 0..4 {
        machine.vramctl("move train --to 1,0").expect(0, "moved", "");
        assert_eq!([gpu(&ranks[round % 2]), gpu(&ranks[1 - round % 2])], [before[1].clone(), before[0].clone()]);
        assert_sums(&mut ranks);
    }
}

/// Each of eight ranks has memory of the seven others.
#[test]
fn eight_ranks_leave_together() {
    for transport in &TRANSPORTS[..2] {
        let machine = Machine::new();
        let mut ranks = job(&machine, 8, transport);
        for _ in 0..2 {
            machine.vramctl("suspend train").expect(0, "", "");
            machine.vramctl("resume train").expect(0, "", "");
            assert_sums(&mut ranks);
        }
    }
}

/// A collective that is to begin while the job is away begins when the job is back.
#[test]
fn a_collective_of_a_held_program_waits() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2, &[]);
    machine.vramctl("pause nccl --name train").expect(0, "", "");
    let said = thread::scope(|scope| {
        let asked: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || rank.ask("sum"))).collect();
        eventually("they wait", || {
            machine.vramctl("status").out.matches("Held until it is resumed: 1 thread waits to start GPU work.").count() == 2
        });
        machine.vramctl("resume").expect(0, "resumed", "");
        asked.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(said.iter().all(|said| said.trim() == "sum 3, answer 0"), "{said:?}");
}

/// Whichever function created it.
#[test]
fn communicators_are_known_however_they_are_made() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2, &[]);
    for how in ["config", "many"] {
        all_say(&mut ranks, how);
    }
    let known = communicators(&machine, &ranks[0]);
    assert!(known.len() == 3 && known.iter().all(|one| (&one["rank"], &one["ranks"]) == (&json!(0), &json!(2))), "{known:?}");
    let others: Vec<_> = communicators(&machine, &ranks[1]).iter().map(|one| one["id"].clone()).collect();
    assert!(known.iter().all(|one| others.contains(&one["id"])), "{known:?} {others:?}");
    // Those that are split off have ranks of the others.
    all_say(&mut ranks, "split 2");
    assert_eq!(ranks[0].ask("split 0").trim(), "split 0 one");
    assert_eq!(ranks[1].ask("split -1").trim(), "split 0 none");
    assert_eq!(ranks[0].ask("shrink").trim(), "shrink 0");
    assert_eq!(communicators(&machine, &ranks[0]), known);
    assert_sums(&mut ranks);
    machine.vramctl("suspend train").expect(0, "", "");
    machine.vramctl("resume train").expect(0, "", "");
    assert_sums(&mut ranks);
    all_say(&mut ranks, "destroy");
    // What was split off the last one is still there.
    assert_eq!(communicators(&machine, &ranks[0]).len(), 3);
}

/// Those that join know the id, and of those that were there, only one does. All leave together, or none.
#[test]
fn a_communicator_that_grows_has_all_of_its_ranks() {
    let machine = Machine { devices: 2, ..Machine::new() };
    let mut ranks = job(&machine, 2, &[]);
    let (joined, grown) = thread::scope(|scope| {
        let joined = scope.spawn({
            let machine = &machine;
            move || start_with(machine, "later", &[2], 3, &[], |command: &mut Command| _ = command.env("JOINS", "1"))
        });
        let grown = all_say(&mut ranks, "grow");
        (joined.join().unwrap(), grown)
    });
    assert_eq!(grown.iter().map(|said| said.trim()).collect::<Vec<_>>(), ["grow 0"; 2]);
    // Without those that have joined, and the other way round.
    machine.vramctl("suspend train").expect(7, "", "a communicator of NCCL with 1 of 3 ranks elsewhere");
    machine.vramctl("suspend later").expect(7, "", "a communicator of NCCL with 2 of 3 ranks elsewhere");
    let one = format!("suspend {} {}", joined[0].pid(), ranks[0].pid());
    machine.vramctl(&one).expect(7, "", "a communicator of NCCL with 1 of 2 ranks elsewhere");
    ranks.extend(joined);
    for _ in 0..2 {
        machine.vramctl("suspend --all").expect(0, "", "");
        machine.vramctl("resume --all").expect(0, "", "");
        assert_sums(&mut ranks);
    }
}

/// Its memory is theirs, too. Nothing changes before that is known.
#[test]
fn ranks_elsewhere_prevent_a_suspend_and_a_pause_of_nccls_memory() {
    let machine = Machine { devices: 2, ..Machine::new() };
    let (mut first, mut second) = thread::scope(|scope| {
        let first = scope.spawn(|| start(&machine, "train", &[0], 2, &[]));
        let second = scope.spawn(|| start(&machine, "serve", &[1], 2, &[]));
        (first.join().unwrap(), second.join().unwrap())
    });
    let why = "a communicator of NCCL with 1 of 2 ranks elsewhere: NCCL's memory is theirs, too";
    for command in ["suspend train", "suspend train --dry-run", "move train --to 1"] {
        machine.vramctl(command).expect(7, "", why);
    }
    for command in ["pause nccl --name train", "pause --nccl --name train"] {
        machine.vramctl(command).expect(1, "", why);
    }
    assert_eq!(machine.state(&first[0]), "active");
    let told = machine.vramctl("status train").text();
    assert!(told.contains(&format!("Cannot be suspended: {why}")), "{told}");
    // Whoever knows those on other nodes says that they take part.
    let id = communicators(&machine, &first[0])[0]["id"].clone();
    for (everywhere, expected) in [(json!([id]), Value::Null), (json!(["another"]), json!("not_restorable"))] {
        let request = json!({"version": 1, "operation": "suspend", "target": {"name": "train"}, "everywhere": everywhere, "dry_run": true});
        let mut child = machine.cli("operate").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Its end would cancel the operation.
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{request}").unwrap();
        let told = child.wait_with_output().unwrap().stdout;
        let asked: Value = serde_json::from_str(String::from_utf8(told).unwrap().lines().last().unwrap()).unwrap();
        assert_eq!(asked["error"]["code"], expected, "{asked}");
    }
    assert_eq!(machine.state(&first[0]), "active");
    let said = thread::scope(|scope| {
        let first = scope.spawn(|| first[0].ask("sum"));
        (second[0].ask("sum"), first.join().unwrap())
    });
    assert_eq!((said.0.trim(), said.1.trim()), ("sum 3, answer 0", "sum 3, answer 0"));
    // Together they can.
    machine.vramctl("suspend --all").expect(0, "", "");
    assert!(!machine.vramctl("status").text().contains("elsewhere"), "it has no obstacles while it is suspended");
    machine.vramctl("resume --all").expect(0, "", "");
    machine.vramctl("pause --name train").expect(0, "paused", "");
    machine.vramctl("resume --name train").expect(0, "resumed", "");
}

/// Where NCCL's memory is left to CUDA, the driver could not restore it.
#[test]
fn nccls_memory_that_is_not_managed_prevents_a_suspend() {
    let machine = Machine::new();
    let mut ranks = start_with(&machine, "train", &[0, 1], 2, &[], |command: &mut Command| _ = command.env("VRAMCTL_EXCLUDE", "libnccl"));
    let refused = machine.vramctl("suspend train");
    refused.expect(7, "", "communicators of libnccl.so.2: 1 of 2 ranks (2.00 MiB)");
    assert_eq!(machine.state(&ranks[0]), "active");
    assert_sums(&mut ranks);
}

/// Each call reaches the NCCL that has made the communicator.
#[test]
fn two_nccls_in_a_process_are_kept_apart() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2, &[]);
    // Like torch's and another package's: files with the same name.
    let other = built().join("other/libnccl.so.2");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::copy(built().join("libnccl.so.2"), &other).unwrap();
    all_say(&mut ranks, &format!("other {}", other.display()));
    assert_eq!(communicators(&machine, &ranks[0]).len(), 2);
    machine.vramctl("suspend train").expect(0, "", "");
    machine.vramctl("resume train").expect(0, "", "");
    assert_sums(&mut ranks);
}

#[test]
fn a_forked_child_has_no_communicators() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2, &[]);
    machine.vramctl("suspend train").expect(0, "", "");
    machine.vramctl("resume train").expect(0, "", "");
    assert_eq!(ranks[0].ask("fork").trim(), "fork 0");
    assert_eq!(communicators(&machine, &ranks[0]).len(), 1);
    assert_sums(&mut ranks);
}

/// A rank that dies while the job is away takes its memory with it; the others come back with what is theirs.
#[test]
fn the_others_come_back_if_one_dies_meanwhile() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 3, &[]);
    machine.vramctl("suspend train").expect(0, "", "");
    let mut dead = ranks.remove(1);
    dead.signal(libc::SIGKILL);
    dead.ended();
    let lost = format!("that it had opened from process {}, which has ended", dead.pid());
    machine.vramctl("resume train").expect(1, "resumed job train: 2 processes", &lost);
    assert!(ranks.iter().all(|rank| machine.state(rank) == "active" && status(&machine, rank)["held"] != true));
    // Its memory is gone.
    assert!(all_say(&mut ranks, "sum").iter().all(|said| said.trim().ends_with("answer 1")));
}

/// Killed at any moment: the next command continues what the first one began, or takes it back.
#[test]
fn a_killed_command_leaves_a_job_that_comes_back() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 3, &[]);
    for after_ms in [0, 10, 20, 40, 60, 80, 120, 160, 240] {
        let mut killed = machine.command(common::command_line(), &["suspend", "train", "--quiet"]).spawn().unwrap();
        thread::sleep(Duration::from_millis(after_ms));
        killed.kill().unwrap();
        killed.wait().unwrap();
        eventually("it is back", || machine.vramctl("resume train").code == Some(0));
        assert_sums(&mut ranks);
    }
}
