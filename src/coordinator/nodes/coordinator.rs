//! One pause or resume of a job over several nodes: takes all participants through the steps together.
//!
//! What happens goes in, with the time, and [`Action`]s come out; without a network, a clock or threads. `vramctl coordinate` connects it with
//! whoever transports the messages (`vramctl.ray` does so on Ray).

use crate::barrier::{self, Barrier, Begins, Behind, Party, Phase, Step, Time};
use crate::nodes::Word;
use crate::nodes::messages::{Action, Event, Looked, NodeRank, Outcome, Reply, Say, Task};
use crate::patience::{
    Backoff, CHECK_NODES_EVERY, FIRST_DRAIN_OF_NODES, HOLD_AFTER, HOLD_AFTER_EACH, LEASE, LONGEST_REST, RENEW_EVERY, SETTLE_AGAIN,
    SETTLE_WITHIN, SHORTEST_REST, SILENT_NODE_WITHIN, STARTED_WITHIN, TURN_WITHIN, WAIT_FOR_MEMORY_AT_ONCE,
};
use crate::retry::{Limits, Retry};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_model::{Kind, Verb};

/// What is known of a node in an attempt.
#[derive(Debug)]
struct Taking {
    node: String,
    /// What it was told last, and when anything was said to it, and when it has answered.
    told: Say,
    spoken: Time,
    heard: Time,
    has_reached: bool,
    outcome: Option<Outcome>,
    /// When to look at its ranks, if its participant is lost; and whether its participant has ended without having committed.
    look: Option<Time>,
    has_given_up: bool,
}

/// One pause or resume. Ends when there is an [`outcome`](Self::outcome).
#[derive(Debug)]
pub struct Coordinator {
    task: Task,
    limits: Limits,
    /// Numbers for the rests between attempts.
    chance: u64,
    drain: Backoff,
    /// The nodes whose ranks are short of memory.
    short: BTreeSet<String>,
    /// How long to rest at most.
    rest: Backoff,
    /// The nodes that take part.
    part: BTreeSet<String>,
    /// The processes that were found, by node.
    found: BTreeMap<String, Vec<Value>>,
    /// Nodes that have left, with the ranks that they had; `None` if they had not said so yet.
    gone: BTreeMap<String, Option<Vec<NodeRank>>>,
    /// Those that have answered.
    known: BTreeSet<String>,
    is_cancelled: bool,
    fatal: Option<(&'static str, String)>,
    attempt: u32,
    /// Until when to rest before the next attempt; `None` during one.
    rests_until: Option<Time>,
    barrier: Barrier,
    taking: Vec<Taking>,
    has_checked: bool,
    /// When to set the record again, and since when that, or finding out what has become of the nodes, is tried.
    record_again: Time,
    settles_since: Time,
    outcome: Option<Value>,
}

impl Coordinator {
    /// Begins at time 0. `seed`: of the rests between attempts.
    pub fn new(task: Task, seed: u64) -> Self {
        let pauses = task.request.get("operation").is_some_and(|operation| operation == "pause");
        let time = |name: &str| task.request.get(name).and_then(Value::as_u64).map(Duration::from_millis);
        let holds = pauses && task.request.get("hold").is_none_or(|hold| hold == true);
        let timeout = if holds { time("hold_ms").or(Some(TURN_WITHIN)) } else { time("timeout_ms") };
        let verb = if pauses { Verb::Pause } else { Verb::Resume };
        Self {
            limits: Limits { verb, holds, timeout, first_drain: FIRST_DRAIN_OF_NODES },
            chance: seed,
            drain: Backoff::new(FIRST_DRAIN_OF_NODES, Duration::MAX),
            short: BTreeSet::new(),
            rest: Backoff::new(SHORTEST_REST * 5, LONGEST_REST),
            part: task.nodes.clone(),
            found: BTreeMap::new(),
            gone: BTreeMap::new(),
            known: BTreeSet::new(),
            is_cancelled: false,
            fatal: None,
            attempt: 0,
            rests_until: Some(Time::ZERO),
            barrier: Barrier::new([], Behind::Wait, Duration::ZERO),
            taking: Vec::new(),
            has_checked: false,
            record_again: Time::ZERO,
            settles_since: Time::ZERO,
            outcome: None,
            task,
        }
    }

    /// How it has ended: as the outcome of `vramctl operate`, with [`NodeRank`]s as `pid`, and the nodes that are `behind`: they could not do what had
    /// been decided, so the job is to be resumed.
    pub fn outcome(&self) -> Option<&Value> {
        self.outcome.as_ref()
    }

    /// How far the attempt is.
    pub fn phase(&self) -> Phase {
        self.barrier.phase()
    }

    /// The number of the attempt.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The ranks that were found.
    pub fn there(&self) -> BTreeSet<NodeRank> {
        self.found.keys().flat_map(|node| self.ranks_of(node)).collect()
    }

    /// Members on nodes that do not belong to the cluster.
    pub fn away(&self) -> BTreeSet<NodeRank> {
        let is_away = |rank: &&NodeRank| !self.task.nodes.contains(&rank.0) || self.gone.contains_key(&rank.0);
        self.task.members.iter().filter(is_away).cloned().chain(self.left()).collect()
    }

    /// The ranks that were found on nodes that have left since.
    fn left(&self) -> BTreeSet<NodeRank> {
        self.gone.values().flatten().flatten().cloned().collect()
    }

    fn ranks_of(&self, node: &str) -> Vec<NodeRank> {
        let pid = |process: &Value| Some(NodeRank(node.to_owned(), process["pid"].as_u64()? as u32));
        self.found.get(node).into_iter().flatten().filter_map(pid).collect()
    }

    /// When to call [`tick`](Self::tick) at the latest.
    pub fn next_tick(&self, now: Time) -> Time {
        let next = self.rests_until.or_else(|| self.barrier.next_tick()).unwrap_or(Time::MAX);
        next.min(now + CHECK_NODES_EVERY).max(now)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) -> Vec<Action> {
        if self.outcome.is_some() {
            return Vec::new();
        }
        if let Some(until) = self.rests_until {
            return if now >= until { self.begin(now) } else { Vec::new() };
        }
        let ticked = self.barrier.tick(now);
        let mut actions = self.carry_out(now, ticked);
        if self.barrier.phase() == Phase::Deciding && now >= self.record_again {
            actions.push(self.record(now));
        }
        for place in 0..self.taking.len() {
            let one = &self.taking[place];
            let silent = if self.known.contains(&one.node) { SILENT_NODE_WITHIN } else { STARTED_WITHIN };
            if one.outcome.is_none() && one.look.is_none() && now.saturating_sub(one.heard) > silent {
                actions.extend(self.lose(now, place, &format!("it has not answered for {} s", silent.as_secs())));
            }
        }
        if self.rests_until.is_some() || self.outcome.is_some() {
            return actions;
        }
        for one in self.taking.iter_mut().filter(|one| one.outcome.is_none()) {
            // Each word renews the lease, too.
            if one.look.is_none() && now.saturating_sub(one.spoken) >= RENEW_EVERY {
                one.spoken = now;
                actions.push(renew(one));
            }
            if one.look.is_some_and(|at| now >= at) {
                one.look = Some(now + SILENT_NODE_WITHIN);
                actions.push(Action::Look { node: one.node.clone() });
            }
        }
        actions
    }

    /// Something has happened.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        if self.outcome.is_some() {
            return Vec::new();
        }
        match event {
            Event::Heard { node, attempt, reply } if attempt == self.attempt => {
                self.place(&node).map_or_else(Vec::new, |place| self.heard(now, place, reply))
            }
            Event::Lost { node, why } => self.place(&node).map_or_else(Vec::new, |place| self.lose(now, place, &why)),
            Event::Gone { node } => {
                let has_said = self.found.contains_key(&node) || !self.part.contains(&node);
                let ranks = has_said.then(|| self.ranks_of(&node));
                self.gone.entry(node.clone()).or_insert(ranks);
                let why = "it does not belong to the cluster any more";
                self.place(&node).map_or_else(Vec::new, |place| self.lose(now, place, why))
            }
            Event::Recorded { attempt, committed } if attempt == self.attempt => self.recorded(now, committed),
            Event::Heard { .. } | Event::Recorded { .. } => Vec::new(),
            Event::Looked { node, state } => self.place(&node).map_or_else(Vec::new, |place| self.looked(now, place, state)),
            Event::Cancel => self.cancel(now),
        }
    }

    /// Where a node is among those that take part in this attempt. `None` between two.
    fn place(&self, node: &str) -> Option<usize> {
        self.taking.iter().position(|one| one.node == node).filter(|_| self.rests_until.is_none() && self.part.contains(node))
    }

    fn heard(&mut self, now: Time, place: usize, reply: Reply) -> Vec<Action> {
        let one = &mut self.taking[place];
        one.heard = now;
        self.known.insert(one.node.clone());
        if one.outcome.is_some() {
            return Vec::new();
        }
        let number = one.told.number;
        match reply {
            // A message is lost, or late.
            Reply::None { told } | Reply::Reached { told, .. } if told.is_some_and(|told| told < number) => {
                vec![Action::Say(one.told.clone())]
            }
            Reply::None { .. } => Vec::new(),
            Reply::Reached { told, number: of, .. } if of != number || !self.barrier.takes_step(place) => {
                if told == Some(number) {
                    self.barrier.note_unfinished(place);
                }
                Vec::new()
            }
            Reply::Reached { processes, .. } => {
                one.has_reached = true;
                if let Some(processes) = processes {
                    self.found.insert(one.node.clone(), processes);
                }
                let actions = self.barrier.reached(now, place);
                self.carry_out(now, actions)
            }
            Reply::Outcome(outcome) => self.ended(now, place, outcome),
        }
    }

    fn ended(&mut self, now: Time, place: usize, outcome: Outcome) -> Vec<Action> {
        let one = &mut self.taking[place];
        let phase = self.barrier.phase();
        if phase == Phase::Steps && !one.has_reached && codes(&outcome) == ["no_process"] {
            let node = one.node.clone();
            self.part.remove(&node);
            self.found.remove(&node);
            let actions = self.barrier.leave_out(now, place);
            if self.part.is_empty() {
                self.fatal = self.problem();
            }
            return self.carry_out(now, actions);
        }
        if matches!(phase, Phase::Committing(_)) && outcome.committed != Some(true) {
            one.has_given_up = true;
            one.look.get_or_insert(now);
            return Vec::new();
        }
        self.end(now, place, outcome)
    }

    /// A participant cannot be reached any more.
    fn lose(&mut self, now: Time, place: usize, why: &str) -> Vec<Action> {
        let one = &mut self.taking[place];
        if one.outcome.is_some() {
            return Vec::new();
        }
        if matches!(self.barrier.phase(), Phase::Committing(_)) {
            one.look.get_or_insert(now);
            return Vec::new();
        }
        let error = json!({ "code": "disconnected", "message": format!("node {} is lost: {why}", one.node) });
        self.end(now, place, Outcome { committed: Some(false), processes: Vec::new(), error: Some(error), is_gone: false })
    }

    /// A participant has ended.
    fn end(&mut self, now: Time, place: usize, outcome: Outcome) -> Vec<Action> {
        self.taking[place].outcome = Some(outcome);
        let actions = match self.barrier.phase() {
            Phase::Steps => self.barrier.failed(now, place),
            // What has been decided will be heard of.
            Phase::Deciding => Vec::new(),
            Phase::Committing(_) | Phase::Aborting => self.barrier.ended(now, place),
        };
        self.carry_out(now, actions)
    }

    fn recorded(&mut self, now: Time, committed: Option<bool>) -> Vec<Action> {
        if self.barrier.phase() != Phase::Deciding {
            return Vec::new();
        }
        let Some(committed) = committed else {
            if now.saturating_sub(self.settles_since) < SETTLE_WITHIN {
                self.record_again = now + SETTLE_AGAIN;
            } else {
                let why = "the record of the decision cannot be reached: each node follows it once it can";
                self.fail(now, "disconnected", why, None);
            }
            return Vec::new();
        };
        self.settles_since = now;
        let actions = self.barrier.decide(now, committed);
        self.carry_out(now, actions)
    }

    fn looked(&mut self, now: Time, place: usize, state: Looked) -> Vec<Action> {
        let one = &mut self.taking[place];
        if one.outcome.is_some() || one.look.is_none() {
            return Vec::new();
        }
        // Its participant may be about to read the record, unless there is none any more.
        let is_open = state == Looked::Unknown || (state == Looked::AsItWas && !one.has_given_up);
        if is_open && now.saturating_sub(self.settles_since) < SETTLE_WITHIN {
            one.look = Some(now + SETTLE_AGAIN);
            return Vec::new();
        }
        one.look = None;
        let is_gone = state == Looked::Gone;
        self.end(now, place, Outcome { committed: Some(state == Looked::Done), processes: Vec::new(), error: None, is_gone })
    }

    fn cancel(&mut self, now: Time) -> Vec<Action> {
        if self.rests_until.is_some() {
            self.fail(now, "cancelled", "cancelled", Some(false));
            return Vec::new();
        }
        self.is_cancelled |= matches!(self.barrier.phase(), Phase::Steps | Phase::Aborting);
        let actions = self.barrier.abort();
        self.carry_out(now, actions)
    }

    fn begin(&mut self, now: Time) -> Vec<Action> {
        self.attempt += 1;
        if self.has_checked && self.limits.verb == Verb::Pause {
            // This attempt is to find the same.
            self.task.members = self.there();
        }
        self.has_checked = false;
        let stays = |node: &String| !self.gone.contains_key(node);
        self.part.retain(stays);
        if self.part.is_empty() {
            self.part = self.task.nodes.iter().filter(|node| stays(node)).cloned().collect();
        }
        self.found.retain(|node, _| !self.gone.contains_key(node));
        if self.part.is_empty() {
            let why = format!("none of {} nodes belongs to the cluster any more", self.task.nodes.len());
            self.fail(now, "disconnected", &why, Some(false));
            return Vec::new();
        }
        self.rests_until = None;
        let steps: &[Step] = if self.limits.holds { &Step::ALL } else { &[Step::Found, Step::Prepared] };
        let party = |node: &String| Party { steps, begins: if self.short.contains(node) { Begins::First } else { Begins::Together } };
        self.barrier = Barrier::new(self.part.iter().map(party), Behind::GoOnIfAsked, self.drain_within(now));
        let begin = |node: &String| Taking {
            node: node.clone(),
            told: Say {
                node: node.clone(),
                attempt: self.attempt,
                word: None,
                number: 0,
                request: Some(self.request(now, node)),
                after_ms: None,
            },
            spoken: now,
            heard: now,
            has_reached: false,
            outcome: None,
            look: None,
            has_given_up: false,
        };
        self.taking = self.part.iter().map(begin).collect();
        // It takes all of them to the step at which they are found.
        self.barrier.begin(now);
        self.taking.iter().map(|one| Action::Say(one.told.clone())).collect()
    }

    /// What a participant is asked for.
    fn request(&self, now: Time, node: &str) -> Value {
        let is_short = self.short.contains(node);
        let record: Vec<_> = self.task.record.iter().cloned().chain([self.attempt.to_string()]).collect();
        let terms = json!({
            "lease_ms": LEASE.as_millis() as u64,
            "record": record,
            "early": is_short,
            "drain_ms": self.drain_within(now).as_millis() as u64,
        });
        let mut request = self.task.request.clone();
        request.extend([("version".into(), json!(1)), ("ranks".into(), json!(0)), ("node".into(), terms)]);
        if let (Some(timeout), Verb::Resume) = (self.limits.timeout, self.limits.verb) {
            let left = if is_short { timeout.saturating_sub(now).min(WAIT_FOR_MEMORY_AT_ONCE) } else { Duration::ZERO };
            request.insert("timeout_ms".into(), json!(left.as_millis() as u64));
        }
        request.into()
    }

    fn drain_within(&self, now: Time) -> Duration {
        if !self.limits.holds {
            return Duration::ZERO;
        }
        let left = self.limits.timeout.unwrap_or_default().saturating_sub(now);
        self.limits.drain_within(self.drain.now(), left, true)
    }

    /// Does what the barrier wants.
    fn carry_out(&mut self, now: Time, mut wanted: Vec<barrier::Action>) -> Vec<Action> {
        let mut actions = Vec::new();
        while !wanted.is_empty() {
            let count = wanted.iter().filter(|action| matches!(action, barrier::Action::Take(..))).count();
            for action in std::mem::take(&mut wanted) {
                match action {
                    barrier::Action::Take(place, step) => {
                        let after = (step == Step::Held).then(|| (HOLD_AFTER + HOLD_AFTER_EACH * count as u32).as_secs_f64() * 1e3);
                        actions.push(self.tell(now, place, Word::Go, after));
                    }
                    barrier::Action::Advance(place) => actions.push(self.tell(now, place, Word::Advance, None)),
                    barrier::Action::Ask(place) => actions.push(renew(&self.taking[place])),
                    barrier::Action::Commit(place) => match self.taking[place].outcome.take() {
                        // Its participant is lost, or has ended without having heard of the decision.
                        Some(_) => self.taking[place].look = Some(now),
                        None => actions.push(self.tell(now, place, Word::Commit, None)),
                    },
                    barrier::Action::Abort(place) => match self.taking[place].outcome {
                        Some(_) => wanted.extend(self.barrier.ended(now, place)),
                        None => actions.push(self.tell(now, place, Word::Abort, None)),
                    },
                    barrier::Action::Reached(step) => wanted.extend(self.all_have_reached(now, step, &mut actions)),
                }
            }
        }
        if self.barrier.is_over() && self.rests_until.is_none() && self.outcome.is_none() {
            if matches!(self.barrier.phase(), Phase::Committing(_)) {
                self.finish(now);
            } else {
                self.retry(now);
            }
        }
        actions
    }

    fn all_have_reached(&mut self, now: Time, step: Step, actions: &mut Vec<Action>) -> Vec<barrier::Action> {
        if step == Step::Found {
            if let Some(problem) = self.problem() {
                self.fatal = Some(problem);
                return self.barrier.abort();
            }
            self.has_checked = true;
        }
        if step == Step::Prepared {
            self.settles_since = now;
            actions.push(self.record(now));
        }
        self.barrier.go_on(now, step)
    }

    fn tell(&mut self, now: Time, place: usize, word: Word, after_ms: Option<f64>) -> Action {
        let one = &mut self.taking[place];
        one.spoken = now;
        one.told = Say { word: Some(word), number: one.told.number + 1, request: None, after_ms, ..one.told.clone() };
        Action::Say(one.told.clone())
    }

    fn record(&mut self, now: Time) -> Action {
        self.record_again = now + 10 * RENEW_EVERY;
        Action::Record { attempt: self.attempt }
    }

    /// Why nothing is to be done: a rank is missing or new, or nobody has a tag.
    fn problem(&self) -> Option<(&'static str, String)> {
        let there = self.there();
        if there.is_empty() {
            return Some(("no_process", format!("no process of the job is managed on any of {} nodes", self.task.nodes.len())));
        }
        let tags: BTreeSet<_> = self.found.values().flatten().flat_map(|process| strings(&process["tags"])).collect();
        let wanted = self.task.request.get("tags").map(strings).unwrap_or_default();
        let unknown: Vec<_> = wanted.into_iter().filter(|tag| !tags.contains(tag)).collect();
        if !unknown.is_empty() {
            let tags: Vec<_> = tags.into_iter().collect();
            return Some(("unknown_tag", format!("no allocation has the tag {}; the tags are {}", unknown.join(", "), tags.join(", "))));
        }
        let left = self.left();
        let mut known = self.task.members.clone();
        if known.is_disjoint(&there) {
            // Of an earlier job, of which nothing is left.
            known = if left.is_empty() { BTreeSet::new() } else { there.clone() };
        }
        known.extend(left);
        let (missing, new): (Vec<_>, Vec<_>) = (known.difference(&there).collect(), there.difference(&known).collect());
        let count = there.len();
        let text = match self.task.ranks {
            Some(wanted) if count >= wanted => return None,
            Some(wanted) => format!("{count} of {wanted} processes are there"),
            None if self.limits.verb == Verb::Resume => return None,
            None if known.is_empty() => {
                let silent: Vec<_> = self.gone.iter().filter(|(_, ranks)| ranks.is_none()).map(|(node, _)| &**node).collect();
                let text = format!(
                    "nothing was done: node {} has left the cluster and has not said whether it has ranks of the job. To do with those of the \
                     others, say that there are {count} ranks",
                    silent.join(", ")
                );
                return (!silent.is_empty()).then_some(("disconnected", text));
            }
            None if missing.is_empty() && new.is_empty() => return None,
            None => format!("{count} processes are there, and the job had {}", known.len()),
        };
        let named = |what: &str, ranks: &[&NodeRank]| {
            let names: Vec<_> = ranks.iter().map(|NodeRank(node, pid)| format!("process {pid} of node {node}")).collect();
            if ranks.is_empty() || known.is_empty() { String::new() } else { format!("; {what}: {}", names.join(", ")) }
        };
        let rest = named("missing", &missing) + &named("new", &new);
        Some(("no_process", format!("nothing was done: {text}{rest}. To do with these, say that there are {count} ranks")))
    }

    /// An attempt that was aborted has changed nothing.
    fn retry(&mut self, now: Time) {
        if self.is_cancelled {
            return self.fail(now, "cancelled", "cancelled", Some(false));
        }
        if let Some((code, why)) = self.fatal.take() {
            return self.fail(now, code, &why, Some(false));
        }
        let rest = SHORTEST_REST + self.rest.now().saturating_sub(SHORTEST_REST).mul_f64(self.random());
        let kinds: Vec<_> = self.taking.iter().filter_map(|one| one.outcome.as_ref()).flat_map(codes).map(|code| kind_of(&code)).collect();
        match self.limits.retry(kinds, now + rest) {
            None => return self.finish(now),
            Some(Retry::Memory) => {
                let is_short =
                    |one: &&Taking| one.outcome.as_ref().is_some_and(|outcome| codes(outcome).iter().any(|code| code == "device_memory"));
                self.short.extend(self.taking.iter().filter(is_short).map(|one| one.node.clone()));
            }
            Some(Retry::Work) => self.drain.grow(),
            // Two operations that are in each other's way on different nodes.
            Some(_) => self.rest.grow(),
        }
        self.rests_until = Some(now + rest);
    }

    /// From 0 to 1.
    fn random(&mut self) -> f64 {
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) as f64 / (1u64 << 31) as f64
    }

    /// All participants have ended.
    fn finish(&mut self, now: Time) {
        let is_committed = matches!(self.barrier.phase(), Phase::Committing(_));
        let outcomes: Vec<_> =
            self.taking.iter().filter_map(|one| one.outcome.clone().map(|outcome| (one.node.clone(), outcome))).collect();
        let gone: Vec<_> = outcomes.iter().filter(|(_, outcome)| outcome.is_gone).map(|(node, _)| node.clone()).collect();
        let is_behind = |outcome: &Outcome| is_committed && outcome.committed != Some(true) && !outcome.is_gone;
        let behind: Vec<_> = outcomes.iter().filter(|(_, outcome)| is_behind(outcome)).map(|(node, _)| node.clone()).collect();
        let error = if gone.is_empty() && behind.is_empty() {
            let is_consequence = |error: &Value| error["code"] == "aborted" || error["code"] == "cancelled";
            let failures = outcomes.iter().filter_map(|(node, outcome)| Some((node, outcome.error.clone()?)));
            failures.min_by_key(|(_, error)| is_consequence(error)).map(|(node, mut error)| {
                let tries = match self.attempt {
                    1 => String::new(),
                    tries => format!(", {tries} attempts in {:.1} s", now.as_secs_f64()),
                };
                error["message"] = json!(format!("{} (node {node}{tries})", error["message"].as_str().unwrap_or_default()));
                error
            })
        } else {
            let lost = (!gone.is_empty()).then(|| format!("the ranks of {} are lost with the node", gone.join(", ")));
            let late = (!behind.is_empty()).then(|| format!("node {} could not do what was decided", behind.join(", ")));
            let why: Vec<_> = lost.into_iter().chain(late).collect();
            let done = if self.limits.verb == Verb::Pause { "paused" } else { "resumed" };
            Some(json!({ "code": "disconnected", "message": format!("{}. All others are {done}, and can be resumed", why.join("; ")) }))
        };
        self.answer(now, Some(is_committed && behind.is_empty()), &behind, error);
    }

    fn fail(&mut self, now: Time, code: &str, why: &str, committed: Option<bool>) {
        self.answer(now, committed, &[], Some(json!({ "code": code, "message": why })));
    }

    fn answer(&mut self, now: Time, committed: Option<bool>, behind: &[String], error: Option<Value>) {
        let mut processes = Vec::new();
        for one in &self.taking {
            for process in one.outcome.iter().flat_map(|outcome| &outcome.processes) {
                let mut process = process.clone();
                process["pid"] = json!([one.node, process["pid"]]);
                processes.push(process);
            }
        }
        let job = json!({
            "job": self.task.request.get("target").map(|target| &target["name"]),
            "attempts": self.attempt,
            "ms": now.as_secs_f64() * 1e3,
            "committed": committed,
        });
        let mut outcome = json!({ "committed": committed, "processes": processes, "jobs": [job], "behind": behind });
        if let Some(error) = error {
            outcome["error"] = error;
        }
        self.outcome = Some(outcome);
    }
}

fn renew(one: &Taking) -> Action {
    Action::Say(Say { word: Some(Word::Renew), number: 0, request: None, after_ms: None, ..one.told.clone() })
}

/// Why a participant has failed: each code once.
fn codes(outcome: &Outcome) -> Vec<String> {
    let errors = outcome.error.iter().chain(outcome.processes.iter().map(|process| &process["error"]));
    let codes: BTreeSet<_> = errors.filter_map(|error| error["code"].as_str()).map(str::to_owned).collect();
    codes.into_iter().collect()
}

/// What a code means for another attempt. An agent that has died is there again soon, and what was cancelled follows from another failure.
fn kind_of(code: &str) -> Option<Kind> {
    match code {
        "cancelled" => Some(Kind::Aborted),
        "disconnected" => Some(Kind::Leased),
        code => serde_json::from_value(json!(code)).ok(),
    }
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
