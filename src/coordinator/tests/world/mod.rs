//! Jobs in virtual time: ranks, nodes and coordinators that exist in this program only, around the real [`Barrier`], [`Participation`] and
//! [`Coordinator`]. Everything follows from a seed: events have a time and a number, and whatever happens goes into a digest.
//!
//! Ranks keep to what the library does: one client at a time, a lease, and a decision that they share with the command which drives them. Agents
//! and drivers do what `python/vramctl/ray.py` does.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use vramctl_coordinator::barrier::{self, Barrier, Begins, Behind, Party, Step, Time};
use vramctl_coordinator::nodes::coordinator::Coordinator;
use vramctl_coordinator::nodes::messages::{Action, Event as Told, Looked, NodeRank, Say, Task};
use vramctl_coordinator::nodes::{Next, Participation, Word};

/// Numbers from a seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Another factor than below: each seed's numbers would be the one's before it without the first.
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// From 0 to 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn between(&mut self, least: f64, most: f64) -> f64 {
        least + (most - least) * self.fraction()
    }

    pub fn happens(&mut self, chance: f64) -> bool {
        self.fraction() < chance
    }
}

/// How long things take, in seconds, and how reliable they are.
#[derive(Debug, Clone)]
pub struct Conditions {
    /// What a command takes to find its ranks, and a rank to be held, to drain, to save contents, and to release or undo.
    pub find: f64,
    pub hold: f64,
    pub drain: f64,
    pub save: f64,
    pub release: f64,
    /// A message's way, and a put into the store.
    pub way: f64,
    pub put: f64,
    pub ranks_per_node: usize,
    /// How often messages are lost, or whatever takes time takes some seconds more, and how many times as long everything takes.
    pub lost: f64,
    pub late: f64,
    pub slow: f64,
    /// Whether ranks stand at different collectives.
    pub are_apart: bool,
    /// Instead of these three: as planned for many nodes, whose ranks count as one.
    pub planned: Option<Planned>,
}

/// What was measured, for `scripts/simulate-nodes`: on two cores with Ray 2.60, a cluster of four nodes on one machine, 1000 calls of actors in 0.49 s,
/// one there and back 1.1 ms, a put into the key-value store 0.3 ms.
#[derive(Debug, Clone)]
pub struct Planned {
    pub ranks: usize,
    /// Seconds from one collective to the next.
    pub gap: f64,
}

/// The driver's processor for a call, and the same for its answer.
const SEND: f64 = 0.00025;
/// One in so many is late: a rank's step by its processor, a message by a retransmission. Seconds, on average.
const LATE: f64 = 0.001;
const TAIL: f64 = 0.02;
const RETRANSMITTED: f64 = 0.2;
/// Calls that start work, from one collective to the next.
const CALLS: usize = 100;

impl Default for Conditions {
    fn default() -> Self {
        Self {
            find: 0.03,
            hold: 0.004,
            drain: 0.02,
            save: 0.1,
            release: 0.06,
            way: 0.0005,
            put: 0.0005,
            ranks_per_node: 1,
            lost: 0.0,
            late: 0.0,
            slow: 1.0,
            are_apart: false,
            planned: None,
        }
    }
}

/// A driver's attempt.
pub type Key = (usize, u32);

#[derive(Debug, Clone, Copy)]
pub enum Fault {
    KillDriver(usize),
    KillAgent(usize),
    /// The commands that drive ranks of a node.
    KillCommands(usize),
    KillRank(usize, usize),
    Stop(usize, f64),
    LoseNode(usize),
    /// The node leaves the cluster, which notices it so much later; its ranks and commands live on.
    LoseRaylet(usize, f64),
}

#[derive(Debug, Clone)]
enum Event {
    Tick(usize),
    /// To a driver.
    Hears(usize, Told),
    Record(Key),
    Look(usize, usize),
    /// A word for a node's agent, from its generation.
    Arrives(usize, Say, Key),
    Says(usize, Say, Key),
    /// Of a command.
    Found(usize, Key),
    Poll(usize, Key),
    RecordRead(usize, Key),
    RankDone(usize, Key, usize, u32),
    RankLate(usize, Key, usize, u32),
    RankEnds(usize, Key, usize),
    Lease(usize, Key, usize),
    Fault(Fault),
}

/// A rank, with the library in it.
#[derive(Debug, Clone, Default)]
pub struct SimRank {
    pub is_paused: bool,
    pub is_dead: bool,
    /// Who takes it through an attempt.
    pub owner: Option<Key>,
}

/// What a command knows of a rank.
#[derive(Debug, Clone, Default)]
#[allow(clippy::struct_excessive_bools)] // a model, not an interface
struct Driven {
    /// Of the last step that it was taken to; what comes of an earlier one is late.
    turn: u32,
    is_under_way: bool,
    is_ending: bool,
    has_ended: bool,
    heard: Time,
    collective: usize,
    is_draining: bool,
    drains_until: Time,
    /// As planned: how many calls passed last, and how many come before the next collective; whether its work has waited for others since.
    calls: usize,
    calls_left: Option<usize>,
    has_waited: bool,
}

/// `vramctl operate`, for one attempt: of nodes, or of ranks alone.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // a model, not an interface
struct Command {
    part: Option<Participation>,
    barrier: Barrier,
    /// Which ranks of the node, and what each does.
    ranks: Vec<usize>,
    driven: Vec<Driven>,
    pauses: Vec<bool>,
    holds: bool,
    drain_within: Duration,
    /// The word that it shares with its ranks. Set once.
    decision: Option<bool>,
    has_voted: bool,
    has_begun: bool,
    is_dead: bool,
    next_poll: Time,
    reads: bool,
    /// What it has said, and the words that wait for an answer.
    reached: Vec<Value>,
    outcome: Option<Value>,
    told: u32,
    waiting: Vec<(u32, bool)>,
    code: Option<&'static str>,
}

impl Command {
    fn new(
        part: Option<Participation>,
        barrier: Barrier,
        ranks: Vec<usize>,
        pauses: Vec<bool>,
        holds: bool,
        drain_within: Duration,
    ) -> Self {
        Self {
            part,
            barrier,
            driven: vec![Driven::default(); ranks.len()],
            ranks,
            pauses,
            holds,
            drain_within,
            decision: None,
            has_voted: false,
            has_begun: false,
            is_dead: false,
            next_poll: Time::MAX,
            reads: false,
            reached: Vec::new(),
            outcome: None,
            told: 0,
            waiting: Vec::new(),
            code: None,
        }
    }

    /// Decides, unless it is decided. Returns whether it is committed.
    fn decide(&mut self, commits: bool) -> bool {
        *self.decision.get_or_insert(commits)
    }
}

#[derive(Debug)]
pub struct Node {
    pub ranks: Vec<SimRank>,
    pub is_gone: bool,
    stopped_until: Time,
    was_stopped: bool,
    leaves_at: Option<Time>,
    /// How many agents it has had.
    agents: u32,
    /// The attempts that the agent there is now has begun.
    begun: Vec<Key>,
    commands: BTreeMap<Key, Command>,
    /// Whether ranks here may have undone what had been decided: their command was killed, or was stopped for longer than a lease.
    pub may_run: bool,
}

impl Node {
    /// The state of its ranks that live. All are in the same.
    pub fn is_paused(&self) -> Option<bool> {
        let mut states = self.ranks.iter().filter(|rank| !rank.is_dead).map(|rank| rank.is_paused);
        let first = states.next()?;
        assert!(states.all(|state| state == first), "a node does half of it: {:?}", self.ranks);
        Some(first)
    }

    pub fn is_held(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.is_dead && rank.owner.is_some())
    }
}

/// Whoever asks for an operation, with its coordinator.
pub struct Driver {
    pub coordinator: Coordinator,
    pauses: bool,
    begun: Time,
    pub is_alive: bool,
    next_tick: Time,
}

impl Driver {
    pub fn outcome(&self) -> Option<&Value> {
        self.coordinator.outcome()
    }

    pub fn has_ended(&self) -> bool {
        self.outcome().is_some() || !self.is_alive
    }
}

pub struct World {
    pub now: Time,
    pub conditions: Conditions,
    pub random: Random,
    /// Of all that has happened.
    pub digest: u64,
    pub nodes: Vec<Node>,
    pub drivers: Vec<Driver>,
    queue: BTreeMap<(Time, u64), Event>,
    number: u64,
    records: BTreeMap<Key, bool>,
    /// The outcomes of commands that drive ranks for themselves.
    pub alone: BTreeMap<Key, bool>,
    pub messages: usize,
    /// Faults that come after so many events.
    pub faults: Vec<(u64, Fault)>,
    events: u64,
    /// As planned: when the driver's processor is free, and the first collective of each attempt.
    free_at: Time,
    first: BTreeMap<u32, usize>,
}

/// How long a rank waits for a sign of its command.
const LEASE: Time = Duration::from_secs(5);
const RENEW_EVERY: Time = Duration::from_secs(1);
const POLL_EVERY: Time = Duration::from_millis(250);

fn seconds(seconds: f64) -> Time {
    Duration::from_secs_f64(seconds)
}

pub fn name(node: usize) -> String {
    format!("{node:04}")
}

impl World {
    pub fn new(nodes: usize, seed: u64, conditions: Conditions) -> Self {
        let node = || Node {
            ranks: vec![SimRank::default(); conditions.ranks_per_node],
            is_gone: false,
            stopped_until: Time::ZERO,
            was_stopped: false,
            leaves_at: None,
            agents: 0,
            begun: Vec::new(),
            commands: BTreeMap::new(),
            may_run: false,
        };
        Self {
            now: Time::ZERO,
            nodes: (0..nodes).map(|_| node()).collect(),
            conditions,
            random: Random::new(seed),
            digest: 0xcbf2_9ce4_8422_2325,
            drivers: Vec::new(),
            queue: BTreeMap::new(),
            number: 0,
            records: BTreeMap::new(),
            alone: BTreeMap::new(),
            messages: 0,
            faults: Vec::new(),
            events: 0,
            free_at: Time::ZERO,
            first: BTreeMap::new(),
        }
    }

    /// Somebody asks for a pause or a resume of all nodes.
    pub fn drive(&mut self, operation: &str, members: &[NodeRank], ranks: Option<usize>) -> usize {
        let limit = if operation == "pause" { "hold_ms" } else { "timeout_ms" };
        let request = json!({ "operation": operation, "target": { "name": "job" }, limit: 60_000 });
        let nodes = (0..self.nodes.len()).filter(|node| !self.nodes[*node].is_gone).map(name).collect();
        let request = request.as_object().unwrap().clone();
        let task = Task { request, nodes, members: members.iter().cloned().collect(), ranks, record: Vec::new() };
        let coordinator = Coordinator::new(task, self.random.next());
        let driver = self.drivers.len();
        self.drivers.push(Driver { coordinator, pauses: operation == "pause", begun: self.now, is_alive: true, next_tick: self.now });
        self.at(self.now, Event::Tick(driver));
        driver
    }

    /// Ranks of one node are paused or resumed by a command: which, and whether to pause each. Those that are resumed by a pause come.
    pub fn drive_alone(&mut self, which: &[(usize, bool)], holds: bool, waits: &[usize]) -> Key {
        let key = (1000 + self.nodes[0].commands.len(), 0);
        let pauses = which[0].1;
        let party = |(rank, is_paused): &(usize, bool)| Party {
            steps: if *is_paused && holds { &[Step::Held, Step::Drained, Step::Prepared] } else { &[Step::Prepared] },
            begins: match () {
                () if *is_paused != pauses => Begins::OnceDrained,
                () if waits.contains(rank) => Begins::First,
                () => Begins::Together,
            },
        };
        let barrier = Barrier::new(which.iter().map(party), Behind::Wait, seconds(2.0));
        let (ranks, pauses) = which.iter().copied().unzip();
        let command = Command::new(None, barrier, ranks, pauses, holds, seconds(2.0));
        self.nodes[0].commands.insert(key, command);
        let actions = self.change(0, key, |command, now| {
            command.has_begun = true;
            command.barrier.begin(now)
        });
        self.carry_out(0, key, actions);
        key
    }

    /// After so many events: they crowd where something can go wrong.
    pub fn fault_at(&mut self, event: u64, fault: Fault) {
        self.faults.push((event, fault));
    }

    pub fn fault(&mut self, after: f64, fault: Fault) {
        self.at(self.now + seconds(after), Event::Fault(fault));
    }

    /// Until it is so, or nothing happens any more.
    pub fn run(&mut self, limit: f64, until: impl Fn(&Self) -> bool) {
        while !until(self) {
            let Some(((now, _), event)) = self.queue.pop_first() else { return };
            assert!(now < seconds(limit), "it does not end");
            self.now = now;
            for byte in format!("{now:?} {event:?}").bytes() {
                self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            self.happen(event);
            self.events += 1;
            for (_, fault) in self.faults.extract_if(.., |(event, _)| *event == self.events).collect::<Vec<_>>() {
                self.happens(fault);
            }
        }
    }

    fn at(&mut self, when: Time, event: Event) {
        self.number += 1;
        self.queue.insert((when, self.number), event);
    }

    fn later(&mut self, takes: f64, event: Event) {
        let ranks = self.conditions.planned.as_ref().map_or(1, |planned| planned.ranks);
        let count = if matches!(event, Event::Found(..) | Event::RankDone(..) | Event::RankEnds(..)) { ranks } else { 1 };
        let takes = self.takes(takes, count);
        self.at(self.now + takes, event);
    }

    /// How long something does take: as long as the slowest of so many.
    fn takes(&mut self, time: f64, count: usize) -> Time {
        if self.conditions.planned.is_some() {
            let slowest = time * (0.9 + 0.4 * self.random.fraction().powf(1.0 / count as f64));
            return seconds(slowest + self.tail(1.0 - (1.0 - LATE).powi(count as i32), TAIL));
        }
        let late = if self.random.happens(self.conditions.late) { self.random.between(0.0, 8.0) } else { 0.0 };
        seconds(time * self.random.between(0.9, 1.3) * self.conditions.slow + late)
    }

    fn tail(&mut self, chance: f64, mean: f64) -> f64 {
        if self.random.happens(chance) { -mean * (1.0 - self.random.fraction()).ln() } else { 0.0 }
    }

    /// A message between a driver and a node.
    fn send(&mut self, is_answer: bool, event: Event) {
        self.messages += 1;
        if self.conditions.planned.is_none() {
            return self.later(self.conditions.way, event);
        }
        let way = self.planned_way();
        // The driver's processor sends one after the other, and reads one answer after the other.
        let ready = if is_answer { self.now + way } else { self.now };
        self.free_at = self.free_at.max(ready) + seconds(SEND);
        self.at(if is_answer { self.free_at } else { self.free_at + way }, event);
    }

    fn planned_way(&mut self) -> Time {
        let late = self.tail(LATE, RETRANSMITTED);
        self.takes(self.conditions.way, 1) + seconds(late)
    }

    /// Which collective a rank has started when it is held.
    fn collective(&mut self, attempt: u32) -> usize {
        let Some(Planned { gap, .. }) = self.conditions.planned else {
            return if self.conditions.are_apart && attempt % 2 == 1 { self.random.below(4) } else { 0 };
        };
        // All begin one at regular moments, and none begins the one after a collective that another has not begun.
        let number = (self.now.as_secs_f64() / gap + Random::new(u64::from(attempt)).fraction()) as usize;
        let first = self.first.entry(attempt).or_insert(number);
        *first = number.min(*first);
        number.min(*first + 1)
    }

    /// A rank goes on for a moment: a call passes, then two, four and so on, until its work has waited for others.
    fn let_go_on(&mut self, node: usize, key: Key, rank: usize) {
        let (more, left) = (self.random.of(&[0, 1, 1, 2]), self.random.below(CALLS));
        let is_planned = self.conditions.planned.is_some();
        let driven = self.driven(node, key, rank);
        if is_planned {
            driven.calls = if std::mem::take(&mut driven.has_waited) { 1 } else { (2 * driven.calls).clamp(1, 1024) };
            let passed = CALLS - 1 - driven.calls_left.unwrap_or(left) + driven.calls;
            driven.collective += passed / CALLS;
            driven.calls_left = Some(CALLS - 1 - passed % CALLS);
        } else {
            driven.collective += more;
        }
        self.drain(node, key, rank);
    }

    fn loses(&mut self) -> bool {
        self.random.happens(self.conditions.lost)
    }

    /// The node where an event takes place.
    fn node_of(event: &Event) -> Option<usize> {
        match event {
            Event::Arrives(node, ..)
            | Event::Says(node, ..)
            | Event::Found(node, _)
            | Event::Poll(node, _)
            | Event::RecordRead(node, _)
            | Event::RankDone(node, ..)
            | Event::RankLate(node, ..)
            | Event::RankEnds(node, ..)
            | Event::Lease(node, ..) => Some(*node),
            Event::Tick(_) | Event::Hears(..) | Event::Record(_) | Event::Look(..) | Event::Fault(_) => None,
        }
    }

    fn happen(&mut self, event: Event) {
        if let Some(node) = Self::node_of(&event) {
            let node = &self.nodes[node];
            if node.is_gone {
                return;
            }
            if self.now < node.stopped_until {
                return self.at(self.nodes[Self::node_of(&event).unwrap()].stopped_until, event);
            }
        }
        match event {
            Event::Tick(driver) => self.tick(driver),
            Event::Hears(driver, told) => self.tell_driver(driver, told),
            Event::Record(key) => {
                let committed = Some(*self.records.entry(key).or_insert(true));
                let committed = committed.filter(|_| !self.loses());
                self.tell_driver(key.0, Told::Recorded { attempt: key.1, committed });
            }
            Event::Look(driver, node) => {
                let state = self.look(driver, node);
                self.tell_driver(driver, Told::Looked { node: name(node), state });
            }
            Event::Arrives(node, say, key) => self.arrives(node, say, key),
            Event::Says(node, say, key) => self.says(node, &say, key),
            Event::Found(node, key) => self.found(node, key),
            Event::Poll(node, key) => {
                if self.nodes[node].commands.get(&key).is_some_and(|command| command.next_poll == self.now) {
                    self.poll(node, key);
                }
            }
            Event::RecordRead(node, key) => {
                let said = *self.records.entry(key).or_insert(false);
                if let Some(part) = self.nodes[node].commands.get_mut(&key).and_then(|command| command.part.as_mut()) {
                    part.settle(said);
                }
                self.poll(node, key);
            }
            Event::RankDone(node, key, rank, turn) => self.rank_done(node, key, rank, turn),
            Event::RankLate(node, key, rank, turn) => {
                if self.is_at(node, key, rank, turn) && self.nodes[node].commands[&key].driven[rank].is_draining {
                    self.rank_fails(node, key, rank, "busy");
                }
            }
            Event::RankEnds(node, key, rank) => self.rank_ends(node, key, rank),
            Event::Lease(node, key, rank) => self.check_lease(node, key, rank),
            Event::Fault(fault) => self.happens(fault),
        }
    }

    fn happens(&mut self, fault: Fault) {
        match fault {
            Fault::KillDriver(driver) => self.drivers[driver].is_alive = false,
            Fault::KillAgent(node) => self.kill_agent(node),
            Fault::KillCommands(node) => {
                let keys: Vec<_> = self.nodes[node].commands.keys().copied().collect();
                for key in keys {
                    let command = &self.nodes[node].commands[&key];
                    self.nodes[node].may_run |= command.has_voted && command.outcome.is_none();
                    self.kill(node, key);
                }
            }
            Fault::KillRank(node, rank) => {
                let Some(rank_there) = self.nodes[node].ranks.get_mut(rank).filter(|rank| !rank.is_dead) else { return };
                rank_there.is_dead = true;
                let Some(key) = rank_there.owner.take() else { return };
                let place = self.nodes[node].commands[&key].ranks.iter().position(|one| *one == rank).unwrap();
                self.rank_fails(node, key, place, "disconnected");
            }
            Fault::Stop(node, time) => {
                (self.nodes[node].stopped_until, self.nodes[node].was_stopped) = (self.now + seconds(time), true);
            }
            Fault::LoseNode(node) => {
                if self.nodes.iter().filter(|node| !node.is_gone).count() > 1 {
                    self.nodes[node].is_gone = true;
                }
            }
            Fault::LoseRaylet(node, noticed_after) => {
                self.nodes[node].leaves_at = Some(self.now + seconds(noticed_after));
                self.kill_agent(node);
            }
        }
    }

    // Drivers.

    fn tick(&mut self, driver: usize) {
        let one = &mut self.drivers[driver];
        if one.has_ended() || one.next_tick != self.now {
            return;
        }
        let actions = one.coordinator.tick(self.now.saturating_sub(one.begun));
        self.carry_out_driver(driver, actions);
    }

    fn tell_driver(&mut self, driver: usize, told: Told) {
        let one = &mut self.drivers[driver];
        if !one.has_ended() {
            let actions = one.coordinator.handle(self.now.saturating_sub(one.begun), told);
            self.carry_out_driver(driver, actions);
        }
    }

    fn carry_out_driver(&mut self, driver: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Say(say) => self.say(driver, say),
                Action::Record { attempt } => self.later(self.conditions.put, Event::Record((driver, attempt))),
                Action::Look { node } => self.later(0.1, Event::Look(driver, node.parse().unwrap())),
            }
        }
        let one = &mut self.drivers[driver];
        if !one.has_ended() {
            let now = self.now.saturating_sub(one.begun);
            one.next_tick = one.begun + one.coordinator.next_tick(now).max(now + Duration::from_micros(1));
            let next = one.next_tick;
            self.at(next, Event::Tick(driver));
        }
    }

    fn say(&mut self, driver: usize, say: Say) {
        let node: usize = say.node.parse().unwrap();
        let one = &self.nodes[node];
        if one.is_gone || one.leaves_at.is_some() {
            let noticed = self.takes(0.5, 1) + self.now;
            let noticed = one_or(self.nodes[node].leaves_at, noticed);
            self.later(0.3, Event::Hears(driver, Told::Lost { node: say.node.clone(), why: "the node has died".into() }));
            self.at(noticed, Event::Hears(driver, Told::Gone { node: say.node }));
        } else if !self.loses() {
            let key = (driver, say.attempt);
            self.send(false, Event::Arrives(node, say, key));
        }
    }

    fn answer(&mut self, node: usize, key: Key, reply: &Value) {
        let (driver, attempt) = key;
        let told = |reply: &Value| Told::Heard { node: name(node), attempt, reply: serde_json::from_value(reply.clone()).unwrap() };
        if self.loses() {
            // It is noticed sooner or later, or never.
            if self.random.happens(0.5) {
                let lost = Told::Lost { node: name(node), why: "a message is lost".into() };
                self.at(self.now + seconds(1.0), Event::Hears(driver, lost));
            }
            return;
        }
        self.send(true, Event::Hears(driver, told(reply)));
    }

    fn look(&self, driver: usize, node: usize) -> Looked {
        let one = &self.nodes[node];
        match one.leaves_at {
            _ if one.is_gone => Looked::Gone,
            Some(at) if self.now >= at => Looked::Gone,
            Some(_) => Looked::Unknown,
            None if self.now < one.stopped_until || one.is_held() => Looked::Unknown,
            None => match one.is_paused() {
                None => Looked::Gone,
                Some(is_paused) if is_paused == self.drivers[driver].pauses => Looked::Done,
                Some(_) => Looked::AsItWas,
            },
        }
    }

    // Agents.

    fn arrives(&mut self, node: usize, say: Say, key: Key) {
        let after = say.after_ms.map_or(Duration::ZERO, |after| seconds(after / 1000.0));
        if say.request.is_some() {
            self.begin(node, &say, key);
        } else if !self.nodes[node].begun.contains(&key) {
            let why = "the agent has been started anew".into();
            self.later(self.conditions.way, Event::Hears(key.0, Told::Lost { node: name(node), why }));
        } else {
            self.at(self.now + after, Event::Says(node, say, key));
        }
    }

    fn begin(&mut self, node: usize, say: &Say, key: Key) {
        let request = say.request.as_ref().unwrap();
        let pauses = request["operation"] == "pause";
        let terms = &request["node"];
        let drain_within = Duration::from_millis(terms["drain_ms"].as_u64().unwrap());
        let ranks: Vec<_> = (0..self.nodes[node].ranks.len()).filter(|rank| !self.nodes[node].ranks[*rank].is_dead).collect();
        let begins = if terms["early"] == true { Begins::First } else { Begins::Together };
        let steps: &[Step] = if pauses { &[Step::Held, Step::Drained, Step::Prepared] } else { &[Step::Prepared] };
        let barrier = Barrier::new(ranks.iter().map(|_| Party { steps, begins }), Behind::GoOn, drain_within);
        let lease = Duration::from_millis(terms["lease_ms"].as_u64().unwrap());
        let part = Some(Participation::new(lease, self.now));
        let count = ranks.len();
        let mut command = Command::new(part, barrier, ranks, vec![pauses; count], pauses, drain_within);
        command.waiting.push((0, false));
        self.nodes[node].begun.push(key);
        self.nodes[node].commands.insert(key, command);
        self.later(self.conditions.find, Event::Found(node, key));
    }

    fn says(&mut self, node: usize, say: &Say, key: Key) {
        let now = self.now;
        let Some(command) = self.nodes[node].commands.get_mut(&key) else { return };
        let word = say.word.unwrap();
        let is_new = say.number > command.told;
        if word == Word::Renew {
            let mut last = command.outcome.as_ref().or(command.reached.last()).cloned().unwrap_or_else(|| json!({ "reply": "none" }));
            last["told"] = json!(command.told);
            self.answer(node, key, &last);
        } else {
            command.told = command.told.max(say.number);
            command.waiting.push((say.number, matches!(word, Word::Commit | Word::Abort)));
        }
        let command = self.nodes[node].commands.get_mut(&key).unwrap();
        if !command.is_dead
            && (is_new || word == Word::Renew)
            && let Some(part) = &mut command.part
        {
            part.hear(now, word);
        }
        self.answer_those_that_wait(node, key);
        self.poll(node, key);
    }

    fn answer_those_that_wait(&mut self, node: usize, key: Key) {
        let has_agent = self.nodes[node].begun.contains(&key);
        let Some(command) = self.nodes[node].commands.get_mut(&key) else { return };
        let mut answers = Vec::new();
        let (reached, outcome) = (&command.reached, &command.outcome);
        command.waiting.retain(|(number, is_last)| {
            let step = reached.get(*number as usize).filter(|_| !is_last).or(outcome.as_ref());
            answers.extend(step.cloned());
            step.is_none()
        });
        for answer in answers.into_iter().filter(|_| has_agent) {
            self.answer(node, key, &answer);
        }
    }

    fn kill_agent(&mut self, node: usize) {
        self.nodes[node].agents += 1;
        for key in std::mem::take(&mut self.nodes[node].begun) {
            let Some(command) = self.nodes[node].commands.get_mut(&key) else { continue };
            command.waiting.clear();
            if command.is_dead || command.outcome.is_some() {
                continue;
            }
            if command.part.as_mut().is_some_and(Participation::hang_up) {
                self.kill(node, key);
            } else {
                self.poll(node, key);
            }
        }
    }

    // Commands.

    fn change(&mut self, node: usize, key: Key, change: impl FnOnce(&mut Command, Time) -> Vec<barrier::Action>) -> Vec<barrier::Action> {
        let now = self.now;
        self.nodes[node].commands.get_mut(&key).filter(|command| !command.is_dead).map_or_else(Vec::new, |command| change(command, now))
    }

    fn found(&mut self, node: usize, key: Key) {
        let command = &self.nodes[node].commands[&key];
        if command.is_dead {
            return;
        }
        if command.ranks.iter().all(|rank| self.nodes[node].ranks[*rank].is_dead) {
            return self.end(node, key, Some(false), Some("no_process"));
        }
        let processes: Vec<_> = command.ranks.iter().map(|rank| json!({ "pid": rank + 1, "tags": ["default"] })).collect();
        self.reach(node, key, Step::Found, Some(processes));
        self.poll(node, key);
    }

    fn reach(&mut self, node: usize, key: Key, step: Step, processes: Option<Vec<Value>>) -> bool {
        let now = self.now;
        let command = self.nodes[node].commands.get_mut(&key).unwrap();
        if !command.part.as_mut().unwrap().reach(now, step) {
            return false;
        }
        let mut reply = json!({ "reply": "reached", "step": step, "number": command.reached.len() });
        if let Some(processes) = processes {
            reply["processes"] = json!(processes);
        }
        command.reached.push(reply);
        self.answer_those_that_wait(node, key);
        true
    }

    /// What the loop of `job/attempt.rs` does when something has happened.
    fn poll(&mut self, node: usize, key: Key) {
        let now = self.now;
        let Some(command) = self.nodes[node].commands.get_mut(&key).filter(|one| !one.is_dead && one.outcome.is_none()) else { return };
        let mut actions = Vec::new();
        if let Some(part) = &mut command.part {
            if part.needs_record() && !std::mem::replace(&mut command.reads, true) {
                self.later(self.conditions.put, Event::RecordRead(node, key));
            }
            let command = self.nodes[node].commands.get_mut(&key).unwrap();
            match command.part.as_mut().unwrap().next(now) {
                Next::GoOn(Step::Found) => {
                    command.has_begun = true;
                    actions = command.barrier.begin(now);
                }
                Next::GoOn(step) => actions = command.barrier.go_on(now, step),
                Next::Advance => actions = command.barrier.advance(now),
                Next::Decided(_) if !command.has_begun => return self.end(node, key, Some(false), Some("aborted")),
                Next::Decided(commits) => {
                    let commits = command.decide(commits);
                    actions = command.barrier.decide(now, commits);
                }
                Next::Wait => (),
            }
        }
        self.carry_out(node, key, actions);
        let Node { commands, ranks, .. } = &mut self.nodes[node];
        let Some(command) = commands.get_mut(&key) else { return };
        if command.has_begun && !command.is_dead {
            for (driven, rank) in command.driven.iter_mut().zip(&command.ranks) {
                let is_due = ranks[*rank].owner == Some(key) && now >= driven.heard + RENEW_EVERY;
                if is_due && !driven.is_under_way {
                    driven.heard = now;
                }
            }
            let actions = command.barrier.tick(now);
            self.carry_out(node, key, actions);
        }
        self.finish(node, key);
    }

    /// Ends the command if its attempt is over, or looks again later.
    fn finish(&mut self, node: usize, key: Key) {
        let Some(command) = self.nodes[node].commands.get_mut(&key).filter(|one| !one.is_dead && one.outcome.is_none()) else { return };
        if command.has_begun && command.barrier.is_over() {
            let committed = command.decide(false);
            let code = (!committed).then(|| command.code.unwrap_or("aborted"));
            return self.end(node, key, Some(committed), code);
        }
        let next = command.barrier.next_tick().unwrap_or(Time::MAX).clamp(self.now + Duration::from_micros(1), self.now + POLL_EVERY);
        command.next_poll = next;
        self.at(next, Event::Poll(node, key));
    }

    fn end(&mut self, node: usize, key: Key, committed: Option<bool>, code: Option<&str>) {
        let command = self.nodes[node].commands.get_mut(&key).unwrap();
        let mut outcome = json!({ "reply": "outcome", "committed": committed, "processes": [] });
        if let Some(code) = code {
            outcome["error"] = json!({ "code": code, "message": code });
        }
        if command.part.is_none() {
            self.alone.insert(key, committed == Some(true));
        }
        command.outcome = Some(outcome);
        self.answer_those_that_wait(node, key);
    }

    /// Its ranks notice, and do what has been decided, or undo it.
    fn kill(&mut self, node: usize, key: Key) {
        let command = self.nodes[node].commands.get_mut(&key).unwrap();
        if command.is_dead || command.outcome.is_some() {
            return;
        }
        command.is_dead = true;
        command.decide(false);
        let ranks = 0..command.ranks.len();
        for rank in ranks {
            self.later(self.conditions.release, Event::RankEnds(node, key, rank));
        }
        self.end(node, key, None, Some("internal"));
    }

    fn carry_out(&mut self, node: usize, key: Key, mut actions: Vec<barrier::Action>) {
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                match action {
                    barrier::Action::Take(rank, step) => self.take(node, key, rank, step),
                    barrier::Action::Advance(rank) => self.let_go_on(node, key, rank),
                    barrier::Action::Ask(_) => (),
                    barrier::Action::Commit(rank) | barrier::Action::Abort(rank) => {
                        let driven = self.driven(node, key, rank);
                        (driven.is_ending, driven.is_draining, driven.turn) = (true, false, driven.turn + 1);
                        self.later(self.conditions.release, Event::RankEnds(node, key, rank));
                    }
                    barrier::Action::Reached(step) => actions.extend(self.all_have_reached(node, key, step)),
                }
            }
        }
    }

    fn driven(&mut self, node: usize, key: Key, rank: usize) -> &mut Driven {
        &mut self.nodes[node].commands.get_mut(&key).unwrap().driven[rank]
    }

    fn all_have_reached(&mut self, node: usize, key: Key, step: Step) -> Vec<barrier::Action> {
        if self.nodes[node].commands[&key].part.is_some() {
            let takes_part = self.reach(node, key, step, None);
            let is_vote = takes_part && step == Step::Prepared;
            return self.change(node, key, |command, now| {
                command.has_voted |= is_vote;
                if is_vote { command.barrier.go_on(now, step) } else { Vec::new() }
            });
        }
        self.change(node, key, |command, now| {
            let mut actions = command.barrier.go_on(now, step);
            if step == Step::Prepared {
                let commits = command.decide(true);
                actions.extend(command.barrier.decide(now, commits));
            }
            actions
        })
    }

    // Ranks.

    fn take(&mut self, node: usize, key: Key, rank: usize, step: Step) {
        let now = self.now;
        let command = &self.nodes[node].commands[&key];
        let place = command.ranks[rank];
        let is_first = step == Step::Held || !command.holds || !command.pauses[rank];
        let owner = &mut self.nodes[node].ranks[place];
        if owner.is_dead || (is_first && owner.owner.is_some()) {
            let code = if owner.is_dead { "disconnected" } else { "leased" };
            return self.rank_fails(node, key, rank, code);
        }
        owner.owner = Some(key);
        let driven = self.driven(node, key, rank);
        (driven.turn, driven.is_under_way, driven.heard) = (driven.turn + 1, true, now);
        let turn = driven.turn;
        match step {
            Step::Found => (),
            Step::Held => {
                let collective = self.collective(key.1);
                self.driven(node, key, rank).collective = collective;
                self.later(self.conditions.hold, Event::RankDone(node, key, rank, turn));
            }
            Step::Drained => {
                let within = self.nodes[node].commands[&key].drain_within;
                self.driven(node, key, rank).drains_until = now + within;
                self.drain(node, key, rank);
            }
            Step::Prepared => self.later(self.conditions.save, Event::RankDone(node, key, rank, turn)),
        }
    }

    /// The work of a rank ends when all others have started the same collective, too.
    fn drain(&mut self, node: usize, key: Key, rank: usize) {
        let now = self.now;
        let driven = self.driven(node, key, rank);
        (driven.turn, driven.is_under_way, driven.is_draining) = (driven.turn + 1, true, true);
        let (turn, until) = (driven.turn, driven.drains_until.max(now + Duration::from_millis(50)));
        self.at(until, Event::RankLate(node, key, rank, turn));
        let mut draining = Vec::new();
        let mut first = usize::MAX;
        for (node, one) in self.nodes.iter_mut().enumerate() {
            let Some(command) = one.commands.get_mut(&key).filter(|command| command.has_begun) else { continue };
            for (rank, driven) in command.driven.iter_mut().enumerate().filter(|(_, driven)| driven.drains_until > Time::ZERO) {
                first = first.min(driven.collective);
                if driven.is_draining {
                    draining.push((node, rank, driven.collective, driven.turn));
                }
            }
        }
        for (node, rank, collective, turn) in draining {
            if collective > first {
                self.driven(node, key, rank).has_waited = true;
            } else {
                self.driven(node, key, rank).is_draining = false;
                self.later(self.conditions.drain, Event::RankDone(node, key, rank, turn));
            }
        }
    }

    /// Whether a rank still does what it was asked for in this turn.
    fn is_at(&self, node: usize, key: Key, rank: usize, turn: u32) -> bool {
        let Some(command) = self.nodes[node].commands.get(&key).filter(|command| !command.is_dead) else { return false };
        let driven = &command.driven[rank];
        driven.turn == turn && driven.is_under_way && self.nodes[node].ranks[command.ranks[rank]].owner == Some(key)
    }

    fn rank_done(&mut self, node: usize, key: Key, rank: usize, turn: u32) {
        if !self.is_at(node, key, rank, turn) {
            return;
        }
        let now = self.now;
        let driven = self.driven(node, key, rank);
        (driven.is_under_way, driven.heard) = (false, now);
        self.at(now + LEASE, Event::Lease(node, key, rank));
        let actions = self.change(node, key, |command, now| command.barrier.reached(now, rank));
        self.carry_out(node, key, actions);
        self.poll(node, key);
    }

    fn rank_fails(&mut self, node: usize, key: Key, rank: usize, code: &'static str) {
        let place = self.nodes[node].commands[&key].ranks[rank];
        if self.nodes[node].ranks[place].owner == Some(key) && !self.driven(node, key, rank).is_ending {
            // It undoes by itself what it has done.
            self.driven(node, key, rank).is_ending = true;
            self.later(self.conditions.release, Event::RankEnds(node, key, rank));
        }
        let actions = self.change(node, key, |command, now| {
            if let Some(part) = &mut command.part {
                part.fail();
            }
            if !command.has_voted && !command.decide(false) {
                command.code.get_or_insert(code);
            }
            (command.driven[rank].is_under_way, command.driven[rank].has_ended) = (false, true);
            command.barrier.failed(now, rank)
        });
        self.carry_out(node, key, actions);
        self.poll(node, key);
    }

    fn check_lease(&mut self, node: usize, key: Key, rank: usize) {
        let now = self.now;
        let Node { commands, ranks, .. } = &mut self.nodes[node];
        let Some(command) = commands.get_mut(&key) else { return };
        let (place, driven) = (command.ranks[rank], &command.driven[rank]);
        if command.is_dead || driven.is_under_way || driven.is_ending || ranks[place].owner != Some(key) {
            return;
        }
        if now < driven.heard + LEASE {
            let next = driven.heard + LEASE;
            return self.at(next, Event::Lease(node, key, rank));
        }
        if !command.decide(false) {
            self.nodes[node].may_run |= self.nodes[node].was_stopped;
            self.rank_fails(node, key, rank, "aborted");
        }
    }

    fn rank_ends(&mut self, node: usize, key: Key, rank: usize) {
        let Some(command) = self.nodes[node].commands.get_mut(&key) else { return };
        let (place, committed, pauses) = (command.ranks[rank], command.decide(false), command.pauses[rank]);
        let one = &mut self.nodes[node].ranks[place];
        if one.owner == Some(key) {
            one.owner = None;
            if committed {
                one.is_paused = pauses;
            }
        }
        let actions = self.change(node, key, |command, now| {
            let has_ended = std::mem::replace(&mut command.driven[rank].has_ended, true);
            if has_ended { Vec::new() } else { command.barrier.ended(now, rank) }
        });
        self.carry_out(node, key, actions);
        self.poll(node, key);
    }
}

fn one_or(one: Option<Time>, other: Time) -> Time {
    one.map_or(other, |one| one.max(other))
}
