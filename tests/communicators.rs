//! `--nccl`: NCCL gives its memory back with the tags and takes it back with them, in all processes of a job or in none. Also: the state of
//! the job when NCCL or a process fails. `tests/apps/nccl/communicators.c` stands in for NCCL.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::{Machine, Program};
use common::{eventually, own_folder, simulated_libraries};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// How much of a communicator the stand-in gives back, and how much it keeps.
const GIVEN: u64 = 10 << 20;
const KEPT: u64 = 2 << 20;

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = own_folder().join("communicators");
        fs::create_dir_all(folder.join("old")).unwrap();
        let compile = |name: &str, source: &str, options: &[&str]| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/apps/nccl").join(source);
            let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
            compiler.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-pedantic", "-Wl,--no-as-needed", "-o"]);
            compiler.arg(folder.join(name)).arg(source).args(options).arg(format!("-L{}", folder.display()));
            compiler.arg(format!("-L{}", simulated_libraries().display())).args(["-Wl,--allow-shlib-undefined", "-ldl"]);
            let done = compiler.output().unwrap_or_else(|error| panic!("a C compiler ($CC, else cc): {error}"));
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        let library = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"];
        compile("libnccl.so.2", "communicators.c", &library);
        compile("old/libnccl.so.2", "communicators.c", &[&library[..], &["-DVERSION=22703"]].concat());
        fs::create_dir_all(folder.join("oldest")).unwrap();
        compile("oldest/libnccl.so.2", "communicators.c", &[&library[..], &["-DVERSION=21210"]].concat());
        compile("ranks", "ranks.c", &["-l:libcudart.so.13", "-l:libnccl.so.2"]);
        folder
    })
}

/// The path of an NCCL that cannot suspend.
fn old() -> String {
    built().join("old/libnccl.so.2").to_str().unwrap().to_owned()
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
            // In a job, NCCL's memory is managed otherwise.
            command.env("VRAMCTL_EXCLUDE", "libnccl");
            change(command);
        })
    };
    thread::scope(|scope| {
        let starting: Vec<_> = which.iter().map(|rank| scope.spawn(move || one(rank))).collect();
        starting.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

fn job(machine: &Machine, ranks: u32) -> Vec<Program> {
    start(machine, "train", &(0..ranks).collect::<Vec<_>>(), ranks, &[])
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

/// The states of a process's communicators.
fn states(machine: &Machine, rank: &Program) -> Vec<String> {
    let told = status(machine, rank);
    told["communicators"].as_array().into_iter().flatten().map(|one| one["state"].as_str().unwrap().to_owned()).collect()
}

/// Bytes of NCCL that a process has in addition to its tags.
fn of_nccl(machine: &Machine, rank: &Program) -> u64 {
    let told = status(machine, rank);
    let left = told["left_alone"].as_array().into_iter().flatten();
    left.filter(|left| left["owner"].as_str().unwrap().starts_with("libnccl")).map(|left| left["bytes"].as_u64().unwrap()).sum()
}

fn set_failure(machine: &Machine, failure: &str) {
    fs::write(machine.folder.path().join("gpu/nccl-fail"), failure).unwrap();
}

fn clear_failure(machine: &Machine) {
    fs::remove_file(machine.folder.path().join("gpu/nccl-fail")).unwrap();
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
    assert_eq!(states(&machine, &ranks[0]), ["active"; 2]);
    assert_sums(&mut ranks);
}

/// NCCL answers "unhandled cuda error" when memory runs out, and no more. The log says what was free.
#[test]
fn the_log_says_how_much_was_free_when_nccl_failed() {
    let mut machine = Machine::new();
    machine.memory = "64M";
    let (mut rank, log) = alone(&machine, &[]);
    let answers = (0..8).map(|_| rank.ask("config")).collect::<Vec<_>>();
    assert!(answers.iter().any(|answer| answer.trim() == "config 1"), "{answers:?}");
    let line = &failures(&log, 1)[0];
    assert!(line.contains("ncclCommInitRankConfig failed (code 1); free now: ") && line.contains(" of 64.00 MiB on device 0. "), "{line}");
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
    for more in [vec![], vec![old()]] {
        let mut machine = Machine::new();
        machine.memory = "64M";
        let (mut rank, log) = alone(&machine, &more.iter().map(String::as_str).collect::<Vec<_>>());
        set_failure(&machine, "sum 0 1");
        let (sum, explained) = (rank.ask("sum"), rank.ask("explain 1"));
        assert!(sum.ends_with(", answer 1") && explained == "unhandled cuda error", "{sum}; {explained}");
        let said = failures(&log, 1);
        assert!(
            said[0].contains("a call of NCCL failed (code 1); free now: ") && said[0].contains(" of 64.00 MiB on device 0. "),
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
        assert_eq!(failures(&log, 3).len(), 3, "the rate is limited");
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
    assert_eq!(rank.ask("slow 30000").trim(), "slow 0");
    assert_eq!(rank.ask("explain 1").trim(), "unhandled cuda error");
    assert!(failures(&log, 0).is_empty());
    rank.ask("slow 0");
    assert_eq!(failures(&log, 1).len(), 1);
    // Nor does its exit, at most briefly. The simulated driver then complains of the call in progress.
    rank.ask("slow 30000");
    rank.ask("explain 1");
    let begun = Instant::now();
    rank.tell("exit");
    rank.child.wait().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
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

#[test]
fn nccl_gives_its_memory_back_and_takes_it_back() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    assert_sums(&mut ranks);
    let foretold =
        machine.vramctl("pause --nccl --dry-run").expect(0, "NCCL would give back 10.00 MiB of 1 communicator; it keeps 2.00 MiB.", "");
    assert_eq!(foretold.out.matches("NCCL would").count(), 2, "{}", foretold.out);
    for round in 0..3 {
        assert_eq!(of_nccl(&machine, &ranks[0]), GIVEN + KEPT, "round {round}");
        let paused = machine.vramctl("pause --nccl").expect(0, "paused job train: 2 processes", "");
        assert_eq!(paused.out.matches("gave back 10.00 MiB of 1 communicator; it keeps 2.00 MiB").count(), 2, "{}", paused.out);
        assert!(paused.out.contains(", nccl "), "{}", paused.out);
        for rank in &ranks {
            assert_eq!((of_nccl(&machine, rank), states(&machine, rank)), (KEPT, vec!["suspended".to_owned()]));
        }
        machine.vramctl("status").expect(0, "NCCL has given back 10.00 MiB of a communicator of 2 ranks (NCCL 2.29.7)", "");
        // Nothing is left to do.
        machine.vramctl("pause --nccl").expect(0, "nothing to do", "");
        let resumed = machine.vramctl("resume --json").expect(0, "", "").json();
        let told = &resumed["processes"][0]["report"]["communicators"][0];
        assert_eq!((&told["state"], &told["bytes"], &told["ranks"]), (&json!("active"), &json!(GIVEN), &json!(2)), "{resumed}");
        assert_sums(&mut ranks);
    }
    // Only with `--nccl`.
    machine.vramctl("pause").expect(0, "paused", "");
    assert_eq!(of_nccl(&machine, &ranks[0]), GIVEN + KEPT);
    machine.vramctl("resume").expect(0, "resumed", "");
    assert_sums(&mut ranks);
}

/// A held program waits until NCCL has its memory, too.
#[test]
fn a_collective_of_a_held_program_waits() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    let said = thread::scope(|scope| {
        let asked: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || rank.ask("sum"))).collect();
        eventually("they wait", || {
            machine.vramctl("status").out.matches("Held until everything is resumed: 1 thread waits to start GPU work.").count() == 2
        });
        machine.vramctl("resume").expect(0, "took back 10.00 MiB of 1 communicator", "");
        asked.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(said.iter().all(|said| said.trim() == "sum 3, answer 0"), "{said:?}");
}

/// Whichever function created it.
#[test]
fn communicators_are_known_however_they_are_made() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    for how in ["config", "many", "split 2"] {
        all_say(&mut ranks, how);
    }
    // Of one rank each.
    assert_eq!(ranks[0].ask("split 0").trim(), "split 0 one");
    assert_eq!(ranks[1].ask("split -1").trim(), "split 0 none");
    assert_eq!(ranks[0].ask("shrink").trim(), "shrink 0");
    assert_eq!((states(&machine, &ranks[0]).len(), states(&machine, &ranks[1]).len()), (6, 4));
    let what = status(&machine, &ranks[0])["obstacles"][0]["what"].as_str().unwrap().to_owned();
    assert_eq!(what, "communicators of libnccl.so.2: 2 of 1 rank, 4 of 2 ranks");
    let paused = machine.vramctl("pause --nccl").expect(0, "gave back 60.00 MiB of 6 communicators", "");
    assert!(paused.out.contains("gave back 40.00 MiB of 4 communicators"), "{}", paused.out);
    machine.vramctl("resume").expect(0, "took back 60.00 MiB of 6 communicators", "");
    assert_sums(&mut ranks);
    all_say(&mut ranks, "destroy");
    assert_eq!((states(&machine, &ranks[0]).len(), states(&machine, &ranks[1]).len()), (5, 3));
}

#[test]
fn communicators_that_cannot_be_suspended_at_all_ranks_are_left_alone() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    all_say(&mut ranks, "late");
    all_say(&mut ranks, "share");
    let paused = machine.vramctl("pause --nccl").expect(0, "paused job train", "its calls do not wait for their work");
    assert_eq!(paused.err.matches("it shares its memory with another one").count(), 1, "{}", paused.err);
    assert!(!paused.out.contains("gave back"), "{}", paused.out);
    machine.vramctl("resume").expect(0, "", "");
    assert_sums(&mut ranks);
}

/// NCCL would wait for a rank that is not asked to suspend.
#[test]
fn a_rank_of_another_job_is_not_waited_for() {
    let machine = Machine::new();
    let (mut first, mut second) = thread::scope(|scope| {
        let first = scope.spawn(|| start(&machine, "train", &[0], 2, &[]));
        let second = scope.spawn(|| start(&machine, "serve", &[1], 2, &[]));
        (first.join().unwrap(), second.join().unwrap())
    });
    machine.vramctl("pause --name train --nccl").expect(0, "paused", "this job has 1 of its ranks, and NCCL would wait for the others");
    assert_eq!(states(&machine, &first[0]), ["active"]);
    machine.vramctl("resume --name train").expect(0, "", "");
    let said = thread::scope(|scope| {
        let first = scope.spawn(|| first[0].ask("sum"));
        (second[0].ask("sum"), first.join().unwrap())
    });
    assert_eq!((said.0.trim(), said.1.trim()), ("sum 3, answer 0", "sum 3, answer 0"));
}

#[test]
fn an_old_nccl_is_reported() {
    let machine = Machine::new();
    let mut ranks = start(&machine, "train", &[0, 1], 2, &[&old()]);
    let paused = machine.vramctl("pause --nccl").expect(0, "paused", "NCCL 2.27.3 cannot give memory back; 2.29.7 and later can");
    assert!(!paused.out.contains("gave back"), "{}", paused.out);
    machine.vramctl("resume").expect(0, "", "");
    assert_sums(&mut ranks);
}

#[test]
fn a_program_without_communicators_is_named() {
    let machine = Machine::new();
    let _engine = machine.engine("engine");
    machine.vramctl("pause --nccl").expect(0, "paused", "job engine has no communicators of NCCL; --nccl changes nothing");
}

/// Each is asked for its own communicators.
#[test]
fn two_nccls_in_a_process_are_kept_apart() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    // Like torch's and another package's: files with the same name.
    let other = built().join("other/libnccl.so.2");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::copy(built().join("libnccl.so.2"), &other).unwrap();
    all_say(&mut ranks, &format!("other {}", other.display()));
    all_say(&mut ranks, &format!("other {}", old()));
    let versions =
        status(&machine, &ranks[0])["communicators"].as_array().unwrap().iter().map(|one| one["nccl"].clone()).collect::<Vec<_>>();
    assert_eq!(versions.iter().filter(|version| **version == "2.29.7").count(), 2, "{versions:?}");
    machine.vramctl("pause --nccl").expect(0, "gave back 20.00 MiB of 2 communicators", "NCCL 2.27.3 cannot give memory back");
    machine.vramctl("resume").expect(0, "took back 20.00 MiB of 2 communicators", "");
    assert_sums(&mut ranks);
}

#[test]
fn communicators_suspended_by_the_program_are_left_alone() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    assert!(all_say(&mut ranks, "suspend").iter().all(|said| said.trim() == "suspend 0"));
    machine.vramctl("pause --nccl").expect(0, "paused", "the program itself has suspended it");
    machine.vramctl("resume").expect(0, "", "");
    assert!(all_say(&mut ranks, "resume").iter().all(|said| said.trim() == "resume 0"));
    assert_sums(&mut ranks);
}

#[test]
fn a_forked_child_has_no_communicators() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    assert_eq!(ranks[0].ask("fork").trim(), "fork 0");
    assert_eq!(states(&machine, &ranks[0]), ["suspended"]);
    machine.vramctl("resume").expect(0, "", "");
    assert_sums(&mut ranks);
}

/// Nothing has been done, so the program continues.
#[test]
fn a_communicator_that_nccl_refuses_to_suspend_stays_usable() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    set_failure(&machine, "suspend -1 5");
    machine.vramctl("pause --nccl").expect(5, "paused", "which can be used as before: invalid usage: told to fail at rank 0");
    clear_failure(&machine);
    assert_eq!(states(&machine, &ranks[1]), ["active"]);
    machine.vramctl("resume").expect(0, "", "");
    assert_sums(&mut ranks);
}

/// The others have given their memory back, so there is no way back.
#[test]
fn a_failure_in_the_middle_is_reported_and_the_program_stays_held() {
    let machine = Machine::new();
    let ranks = job(&machine, 2);
    set_failure(&machine, "half 1 1");
    let paused = machine.vramctl("pause --nccl");
    let end = format!("unhandled cuda error: told to fail at rank 1. It can never be used again: end the job (kill {})", ranks[1].pid());
    paused.expect(5, "gave back 10.00 MiB", &end);
    clear_failure(&machine);
    assert_eq!((states(&machine, &ranks[0]), states(&machine, &ranks[1])), (vec!["suspended".into()], vec!["broken".into()]));
    machine.vramctl("status").expect(0, "is broken: end the job and start it again. The last attempt failed: unhandled cuda error", "");
    assert_eq!(status(&machine, &ranks[1])["held"], true);
    // Its tags are resumed anyway. The other one waits for it, and stays held.
    machine.vramctl("resume").expect(5, "resumed", "stays held");
    assert!(ranks.iter().all(|rank| status(&machine, rank)["held"] == true));
}

/// NCCL continues with what is missing.
#[test]
fn a_resume_is_retried_after_a_failure_of_nccl() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    set_failure(&machine, "resume -1 1");
    machine.vramctl("resume").expect(
        5,
        "resumed",
        "stays held: NCCL could not take back the memory of a communicator of 2 ranks: unhandled cuda error",
    );
    clear_failure(&machine);
    assert_eq!((states(&machine, &ranks[0]), status(&machine, &ranks[0])["held"].clone()), (vec!["suspended".into()], json!(true)));
    machine.vramctl("resume").expect(0, "took back 10.00 MiB of 1 communicator", "");
    assert_sums(&mut ranks);
}

/// NCCL counts a communicator as resumed before it waits for the other ranks a last time. If that fails, no resume helps.
#[test]
fn a_resume_that_nccl_fails_at_the_very_end_breaks_the_communicator() {
    let machine = Machine::new();
    let ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    set_failure(&machine, "late -1 6");
    machine.vramctl("resume").expect(5, "resumed", "It can never be used again: end the job");
    clear_failure(&machine);
    assert_eq!((states(&machine, &ranks[0]), status(&machine, &ranks[0])["held"].clone()), (vec!["broken".into()], json!(true)));
}

/// NCCL must not run out of memory in the middle, so there must be room for it before anything begins.
#[test]
fn a_resume_needs_room_for_nccl_too() {
    let machine = Machine { memory: "64M", ..Machine::new() };
    let mut ranks = start(&machine, "train", &[0], 1, &[]);
    machine.vramctl("pause --nccl").expect(0, "", "");
    let free = status(&machine, &ranks[0])["devices"][0]["free_bytes"].as_u64().unwrap();
    let mib = |bytes: u64| (bytes >> 20).to_string();
    // Room for the tags, and not for what NCCL needs.
    let mut hog = machine.command(common::programs().join("hog"), &["--mib", &mib(free - (9 << 20))]);
    let mut hog = hog.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(hog.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.starts_with("holding"), "{said}");
    machine.vramctl("resume --name train").expect(4, "", "");
    assert_eq!(states(&machine, &ranks[0]), ["suspended"]);
    hog.kill().unwrap();
    hog.wait().unwrap();
    machine.vramctl("resume --name train --timeout 60").expect(0, "resumed", "");
    assert_sums(&mut ranks);
}

/// Program by rank: the first one continues when the last one is resumed.
#[test]
fn a_rank_that_is_resumed_first_waits_for_the_others() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    let [first, second] = [ranks[0].pid(), ranks[1].pid()];
    let waited = machine.vramctl(&format!("resume --pid {first}"));
    waited.expect(5, "resumed", "because it waits for the other ranks. `vramctl resume` them, too, and this one continues by itself");
    assert_eq!(states(&machine, &ranks[0]), ["resuming"]);
    machine.vramctl(&format!("resume --pid {second}")).expect(0, "resumed", "");
    eventually("both go on", || ranks.iter().all(|rank| status(&machine, rank)["held"] != true));
    assert_sums(&mut ranks);
}

#[test]
fn a_rank_that_dies_between_pause_and_resume_is_reported() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("pause --nccl").expect(0, "", "");
    ranks[1].signal(libc::SIGKILL);
    ranks[1].child.wait().unwrap();
    let end = format!(
        "rank 1 has ended. If GPU memory was short, free some and `vramctl resume` again; if a rank has ended, end this one, too (kill {})",
        ranks[0].pid()
    );
    machine.vramctl("resume").expect(5, "resumed", &end);
    assert_eq!(status(&machine, &ranks[0])["held"], true);
    drop(ranks.remove(0));
}

/// The command is gone; a committed transition continues without it, in all ranks.
#[test]
fn after_a_killed_command_status_shows_the_state_and_resume_undoes_it() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    for after_ms in [0, 5, 10, 20, 30, 40, 60, 80, 120] {
        let mut command = machine.cli(&["pause", "--nccl", "--quiet"]);
        let mut killed = command.spawn().unwrap();
        thread::sleep(Duration::from_millis(after_ms));
        killed.kill().unwrap();
        killed.wait().unwrap();
        machine.settled(&ranks.iter().collect::<Vec<_>>());
        eventually("NCCL is done", || {
            let [first, second] = [0, 1].map(|rank| states(&machine, &ranks[rank]));
            first == second && ["active", "suspended"].contains(&first[0].as_str())
        });
        machine.vramctl("resume").expect(0, "", "");
        assert_sums(&mut ranks);
    }
}

/// A program that the driver could not restore is paused by tag, and NCCL gives back what it can.
#[test]
fn a_suspend_that_nccl_prevents_still_takes_its_memory() {
    let machine = Machine::new();
    let mut ranks = job(&machine, 2);
    machine.vramctl("suspend --nccl --dry-run").expect(7, "NCCL would give back 10.00 MiB", "communicators of libnccl.so.2: 1 of 2 ranks");
    machine.vramctl("suspend --nccl").expect(7, "", "All tags are paused; NCCL has given back 20.00 MiB; the CUDA context");
    assert!(ranks.iter().all(|rank| states(&machine, rank) == ["suspended"]));
    machine.vramctl("resume").expect(0, "took back 10.00 MiB of 1 communicator", "");
    assert_sums(&mut ranks);
}

#[test]
fn a_communicator_destroyed_while_suspended_does_not_hold_the_program() {
    let machine = Machine::new();
    let mut ranks = start(&machine, "train", &[0], 1, &[]);
    machine.vramctl("pause --nccl").expect(0, "gave back 10.00 MiB", "");
    assert_eq!(ranks[0].ask("destroy").trim(), "destroy 0");
    assert_eq!((states(&machine, &ranks[0]).len(), status(&machine, &ranks[0])["held"].clone()), (0, json!(true)));
    machine.vramctl("resume").expect(0, "resumed", "");
    assert_ne!(status(&machine, &ranks[0])["held"], true);
}

#[test]
fn nccl_is_only_called_while_the_program_is_held() {
    let machine = Machine::new();
    let ranks = start(&machine, "train", &[0], 1, &[]);
    machine.vramctl("pause --nccl --no-hold").expect(2, "", "cannot be used with");
    let id = status(&machine, &ranks[0])["communicators"][0]["id"].clone();
    let told = machine.connect(&ranks[0]).ask(&json!({"request": "pause", "communicators": [id]}));
    assert_eq!(told["code"], "invalid", "{told}");
    let told = machine.connect(&ranks[0]).ask(&json!({"request": "pause", "hold_ms": 5000, "communicators": ["0123456789abcdef"]}));
    assert!(told["message"].as_str().unwrap().contains("has ended meanwhile; try again"), "{told}");
    assert_eq!(machine.state(&ranks[0]), "active");
}
