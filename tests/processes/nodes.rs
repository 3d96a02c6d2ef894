//! A job whose ranks are on several nodes: the participant of each, which is `vramctl operate`, does what has been decided for all of them,
//! whoever dies at which step. The nodes are directories of one simulated machine.

use crate::common::eventually;
use crate::common::machine::{Killed, Machine, Program};
use serde_json::{Value, json};
use std::fs::{self, DirBuilder};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Two nodes with two ranks each.
struct Nodes {
    machine: Machine,
    /// Those of a node beside each other.
    ranks: [Program; 4],
}

impl Nodes {
    /// All ranks are in collectives with each other.
    fn new() -> Self {
        let machine = Machine::new();
        let ranks = std::array::from_fn(|place| {
            let node = node(&machine, place / 2);
            if place % 2 == 0 {
                DirBuilder::new().mode(0o700).create(&node).unwrap();
            }
            let arguments = ["rank", "1", &place.to_string(), "4"];
            machine
                .start_with("ring", "torture", |command| _ = command.args(arguments).env("VRAMCTL_DIR", &node).env("VRAMCTL_JOB", "ring"))
        });
        Self { machine, ranks }
    }

    /// Both participants in an attempt.
    fn attempt(&self, operation: &str, lease_ms: u64) -> [Participant; 2] {
        self.attempt_within(100, operation, lease_ms)
    }

    fn attempt_within(&self, drain_ms: u64, operation: &str, lease_ms: u64) -> [Participant; 2] {
        let record = self.machine.folder.path().join("record");
        _ = fs::remove_file(&record);
        [0, 1].map(|place| Participant::new(&self.machine, place, operation, drain_ms, lease_ms, &record))
    }

    /// Takes all through the steps, with further attempts as long as the ranks stand at different collectives.
    fn done(&self, operation: &str) {
        for attempt in 1.. {
            let mut both = self.attempt(operation, 30_000);
            let steps: &[_] = if operation == "pause" { &PAUSE } else { &["found", "prepared"] };
            if both.iter_mut().all(|one| one.reach("found")) && reach_all(&mut both, steps) {
                for one in &mut both {
                    one.say("commit");
                }
                for one in &mut both {
                    let outcome = one.outcome();
                    assert_eq!(outcome["committed"], true, "{outcome}");
                }
                return;
            }
            for one in &mut both {
                one.say("abort");
            }
            assert!(attempt < 300, "they do not align");
        }
    }

    /// The state of all ranks, once they have the same.
    fn settled(&self) -> String {
        let mut states = Vec::new();
        eventually("one state of all ranks", || {
            states = self.ranks.iter().enumerate().map(|(place, rank)| self.state(place, rank)).collect();
            states.iter().all(|state| *state == states[0] && (state == "active" || state == "paused, held"))
        });
        states.remove(0)
    }

    fn state(&self, place: usize, rank: &Program) -> String {
        let status = run(&self.machine, place / 2, &json!({"version": 1, "operation": "status", "target": "all"}));
        let of_rank =
            status["processes"].as_array().unwrap().iter().find(|one| one["pid"] == rank.pid()).unwrap_or_else(|| panic!("{status}"));
        let state = of_rank["tags"][0]["state"].as_str().unwrap().to_owned();
        if of_rank["held"] == true { state + ", held" } else { state }
    }

    /// How many rounds a rank has started.
    fn queued(&mut self, place: usize) -> u64 {
        self.ranks[place].ask("queued").trim().parse().unwrap()
    }

    /// They compute on, and together.
    fn go_on(&mut self) {
        let rounds = |rank: &mut Program| rank.ask("progress").split(' ').next().unwrap().parse::<u64>().unwrap();
        let before = self.ranks.each_mut().map(rounds);
        eventually("all go on", || self.ranks.each_mut().map(rounds).iter().zip(before).all(|(now, before)| *now > before));
    }
}

/// Sets the record to a commit, unless it is set already. Whoever reads it finds nothing, or all of it.
fn commit(machine: &Machine) -> bool {
    let (record, new) = (machine.folder.path().join("record"), machine.folder.path().join("record.new"));
    fs::write(&new, "commit\n").unwrap();
    let is_first = fs::hard_link(&new, record).is_ok();
    fs::remove_file(new).unwrap();
    is_first
}

const PAUSE: [&str; 4] = ["found", "held", "drained", "prepared"];

fn node(machine: &Machine, place: usize) -> PathBuf {
    machine.folder.path().join(format!("node-{place}"))
}

fn run(machine: &Machine, place: usize, request: &Value) -> Value {
    let mut command = machine.cli("operate");
    let mut child = command.env("VRAMCTL_DIR", node(machine, place)).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "{request}").unwrap();
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    serde_json::from_str(String::from_utf8(output.stdout).unwrap().lines().last().unwrap()).unwrap()
}

/// Takes them past the steps, and to the last one.
fn reach_all(both: &mut [Participant; 2], steps: &[&str]) -> bool {
    steps.windows(2).all(|pair| {
        assert!(both.iter().all(|one| one.step == pair[0]));
        for one in &mut *both {
            one.say("go");
        }
        // Both are asked: each has an outcome if the attempt fails.
        let reached = both.each_mut().map(|one| one.reach(pair[1]));
        reached == [true; 2]
    })
}

/// `vramctl operate` on a node.
struct Participant {
    _child: Killed,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    step: String,
    ended: Option<Value>,
}

impl Participant {
    fn new(machine: &Machine, place: usize, operation: &str, drain_ms: u64, lease_ms: u64, record: &Path) -> Self {
        let set_once = format!("set -C; (echo abort > {0}) 2>&-; cat {0}", record.display());
        let node_fields = json!({"drain_ms": drain_ms, "lease_ms": lease_ms, "record": ["sh", "-c", set_once]});
        let request = json!({"version": 1, "operation": operation, "target": {"name": "ring"}, "ranks": 0, "node": node_fields});
        let mut command = machine.cli("operate");
        let mut child = command.env("VRAMCTL_DIR", node(machine, place)).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut participant = Self { _child: Killed(child), stdin, stdout, step: String::new(), ended: None };
        participant.say(&request.to_string());
        participant
    }

    fn say(&mut self, line: &str) {
        _ = writeln!(self.stdin.as_mut().unwrap(), "{line}");
    }

    /// Whether it gets this far.
    fn reach(&mut self, step: &str) -> bool {
        let mut line = String::new();
        loop {
            line.clear();
            if self.stdout.read_line(&mut line).unwrap() == 0 {
                return false;
            }
            let told: Value = serde_json::from_str(&line).unwrap();
            if told["reply"] == "reached" {
                told["step"].as_str().unwrap().clone_into(&mut self.step);
                assert_eq!(self.step, step);
                return true;
            }
            if told["reply"] == "outcome" {
                self.ended = Some(told);
                return false;
            }
        }
    }

    fn outcome(&mut self) -> Value {
        while self.ended.is_none() {
            assert!(!self.reach("outcome"));
        }
        self.ended.clone().unwrap()
    }
}

#[test]
fn ranks_of_two_nodes_are_paused_and_resumed_as_one() {
    let mut nodes = Nodes::new();
    for _ in 0..3 {
        nodes.done("pause");
        assert_eq!(nodes.settled(), "paused, held");
        nodes.done("resume");
        assert_eq!(nodes.settled(), "active");
        nodes.go_on();
    }
}

/// In one attempt: those of node 0 are held before a collective that those of node 1 have started.
#[test]
fn ranks_that_are_behind_go_on_until_none_has_work_in_flight() {
    let mut nodes = Nodes::new();
    let mut both = nodes.attempt_within(100_000, "pause", 100_000);
    assert!(both.each_mut().map(|one| one.reach("found")) == [true; 2]);
    let [first, second] = &mut both;
    first.say("go");
    assert!(first.reach("held"));
    first.say("go");
    assert!(first.reach("drained"));
    eventually("node 1 is ahead", || nodes.queued(2).min(nodes.queued(3)) > nodes.queued(0).max(nodes.queued(1)));
    second.say("go");
    assert!(second.reach("held"));
    let [first, second] = both;
    let (drained, all_drained) = mpsc::channel();
    let mut said = Vec::new();
    for (place, mut one) in [first, second].into_iter().enumerate() {
        let (say, words) = mpsc::channel::<&str>();
        said.push(say);
        let drained = drained.clone();
        let mut stdin = one.stdin.take().unwrap();
        thread::spawn(move || words.into_iter().for_each(|word| _ = writeln!(stdin, "{word}")));
        thread::spawn(move || {
            while one.reach("drained") {
                drained.send((place, None)).unwrap();
            }
            _ = drained.send((place, Some(one.step.clone())));
        });
    }
    let say = |place: usize, word| said[place].send(word).unwrap();
    say(1, "go");
    let (mut are_drained, mut advances) = ([true, false], 0);
    while are_drained != [true; 2] {
        match all_drained.recv_timeout(Duration::from_millis(50)) {
            Ok((place, None)) => are_drained[place] = true,
            Ok((place, Some(step))) => panic!("node {place} has ended after {step}"),
            // Whoever has no work is behind. The others wait for them.
            Err(_) => {
                for place in [0, 1].into_iter().filter(|place| std::mem::take(&mut are_drained[*place])) {
                    say(place, "advance");
                    advances += 1;
                }
            }
        }
    }
    assert!(advances > 0);
    (0..2).for_each(|place| say(place, "abort"));
    assert_eq!(nodes.settled(), "active");
    nodes.go_on();
}

/// How the participants lose the one who decides.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    /// Its agent has died.
    EndOfInput,
    /// Nothing is heard any more.
    Silence,
}

/// Takes both to a step. `None` if the ranks stand at different collectives too often.
fn taken_to(nodes: &Nodes, operation: &str, steps: &[&str], lease_ms: u64) -> [Participant; 2] {
    loop {
        let mut both = nodes.attempt(operation, lease_ms);
        if both.iter_mut().all(|one| one.reach("found")) && reach_all(&mut both, steps) {
            return both;
        }
    }
}

#[test]
fn whoever_hears_nothing_any_more_does_as_the_record_says() {
    let mut nodes = Nodes::new();
    for loss in [Loss::EndOfInput, Loss::Silence] {
        for (operation, steps) in [("pause", &PAUSE[..]), ("resume", &["found", "prepared"][..])] {
            let (before, after) = if operation == "pause" { ("active", "paused, held") } else { ("paused, held", "active") };
            for last in 1..=steps.len() {
                let is_voted = last == steps.len();
                if loss == Loss::Silence && !(is_voted || steps[last - 1] == "held") {
                    continue;
                }
                for decided in [false, true] {
                    if decided && !is_voted {
                        continue;
                    }
                    let lease_ms = if loss == Loss::Silence { 2000 } else { 60_000 };
                    let mut both = taken_to(&nodes, operation, &steps[..last], lease_ms);
                    if decided {
                        // On a busy machine, both may have heard nothing for so long by now that they have aborted.
                        while !commit(&nodes.machine) {
                            assert_eq!(both.each_mut().map(|one| one.outcome()["committed"] == true), [false; 2]);
                            assert_eq!(nodes.settled(), before);
                            both = taken_to(&nodes, operation, &steps[..last], lease_ms);
                        }
                        // One has heard of it.
                        both[0].say("commit");
                    }
                    if loss == Loss::EndOfInput {
                        for one in &mut both {
                            one.stdin = None;
                        }
                    }
                    for one in &mut both {
                        let outcome = one.outcome();
                        assert_eq!(outcome["committed"], decided, "{loss:?} after {:?} of a {operation}: {outcome}", steps[last - 1]);
                    }
                    // The last one leaves the ranks as the next operation needs them.
                    assert_eq!(nodes.settled(), if decided { after } else { before }, "{loss:?} after {:?}", steps[last - 1]);
                }
            }
        }
    }
    nodes.go_on();
}

/// It must not abort by itself: the other node may have heard that all commit.
#[test]
fn a_rank_that_dies_after_the_vote_does_not_change_the_decision() {
    let mut nodes = Nodes::new();
    let mut both = taken_to(&nodes, "pause", &PAUSE, 60_000);
    assert!(commit(&nodes.machine));
    nodes.ranks[3].signal(libc::SIGKILL);
    nodes.ranks[3].ended();
    both[0].say("commit");
    assert_eq!(both[0].outcome()["committed"], true);
    let outcome = both[1].outcome();
    assert!(outcome["committed"] == true && outcome["error"]["code"].is_string(), "{outcome}");
    for place in 0..3 {
        eventually("paused", || nodes.state(place, &nodes.ranks[place]) == "paused, held");
    }
}
