//! Programs of a simulated node: what they have, and what they do.

use crate::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_scheduler::{
    Activity, AskId, Asked, ChangeId, Class, GpuId, Holdings, JobId, Memory, PerGpu, Priority, ProgramId, Remembered, Report, Settings,
};

pub const GIB: u64 = 1 << 30;

/// What a program is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Serves requests, with pauses. With an adapter, it says when it has none.
    Engine { adapter: bool },
    /// Always busy.
    Trainer,
    /// Does what its script says, a pause and then work, and ends.
    Scripted,
    /// Seldom busy.
    Notebook,
    /// Calls as soon as its memory is away, and has nothing to do then.
    Flapper,
    /// Its work never drains.
    Hog,
    /// Allocates until it gets no more.
    Grower,
    /// Captures graphs for long.
    Capturer,
}

/// What a program is.
#[derive(Debug, Clone)]
pub struct Spec {
    pub kind: Kind,
    pub job: Option<JobId>,
    pub gpus: Vec<GpuId>,
    pub context: u64,
    /// Bytes on each GPU after its start, and in how many pieces.
    pub target: u64,
    pub pieces: u64,
    pub several_nodes: bool,
    pub settings: Settings,
    /// Of [`Kind::Scripted`]: pauses, each with the work that follows.
    pub script: Vec<(Duration, Duration)>,
}

impl Spec {
    /// Of one GPU, alone.
    pub fn plain(kind: Kind, target: u64, pieces: u64, priority: Priority) -> Self {
        let settings = Settings { priority, ..Settings::default() };
        Self { kind, job: None, gpus: vec![GpuId(0)], context: 1 << 20, target, pieces, several_nodes: false, settings, script: Vec::new() }
    }
}

/// What a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    Computes(Duration),
    /// Stopped at the gate in the middle, with so much left.
    Halted(Duration),
    Idles,
    WaitsAtGate(Duration),
    WaitsForRoom(AskId),
    /// Spins until the other ranks of its job have come as far.
    Spins,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Context,
    Allocation(Class),
    Resume,
}

#[derive(Debug, Clone)]
pub struct RealAsk {
    pub room: PerGpu,
    pub what: What,
    pub since: Duration,
    /// Since when the scheduler knows of it.
    pub seen: Option<Duration>,
    /// The scheduler has granted it.
    pub granted: bool,
    /// The scheduler has refused it.
    pub refused: bool,
}

impl RealAsk {
    /// Whether the scheduler knows of it and has not answered.
    pub fn waits(&self) -> bool {
        self.seen.is_some() && !self.granted && !self.refused
    }
}

#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // independent
pub struct Process {
    pub spec: Spec,
    pub memory: PerGpu<Memory>,
    pub held: bool,
    pub paused: bool,
    pub paused_seen: bool,
    pub capturing: bool,
    pub watched: bool,
    pub calls: Option<Duration>,
    /// Since when the scheduler knows that a call waits.
    pub calls_seen: Option<Duration>,
    pub asks: BTreeMap<AskId, RealAsk>,
    pub doing: Doing,
    /// Counts what it does, so that a moment of something past is told apart.
    pub generation: u64,
    pub in_change: Option<(u64, ChangeId)>,
    pub partners: BTreeSet<ProgramId>,
    /// What it has, as far as the scheduler knows.
    pub known: PerGpu<Memory>,
    /// What a person's pause has taken.
    pub with_person: PerGpu<Holdings>,
    pub remembered: Remembered,
    pub next_ask: u64,
    /// Since when it is in place, and what the change that brought it has to be paid with.
    pub came: (Duration, Duration),
    /// How the changes that brought it compare to what was expected, in percent. As expected, before the first.
    pub paces: Vec<u64>,
    /// It has left the GPU before.
    pub has_left: bool,
    /// When its script came to the work that it is at.
    pub asked_at: Option<Duration>,
    pub script_begun: bool,
    /// Since when it has been idle, or busy.
    pub works_since: Duration,
}

impl Process {
    pub fn new(spec: Spec, now: Duration) -> Self {
        Self {
            memory: spec.gpus.iter().map(|&gpu| (gpu, Memory::default())).collect(),
            spec,
            held: false,
            paused: false,
            paused_seen: false,
            capturing: false,
            watched: false,
            calls: None,
            calls_seen: None,
            asks: BTreeMap::new(),
            doing: Doing::Idles,
            generation: 0,
            in_change: None,
            partners: BTreeSet::new(),
            known: PerGpu::new(),
            with_person: PerGpu::new(),
            remembered: Remembered::default(),
            next_ask: 0,
            came: (now, Duration::ZERO),
            paces: vec![100; 2],
            has_left: false,
            asked_at: None,
            script_begun: false,
            works_since: now,
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.held || self.paused
    }

    pub fn works(&self) -> Activity {
        match self.doing {
            Doing::Computes(_) | Doing::Halted(_) | Doing::WaitsAtGate(_) | Doing::WaitsForRoom(_) | Doing::Spins => Activity::Busy,
            Doing::Idles if self.spec.kind == (Kind::Engine { adapter: true }) => Activity::Empty,
            Doing::Idles => Activity::Idle(Duration::ZERO),
        }
    }

    pub fn report(&self, id: ProgramId, now: Duration) -> Report {
        let asks = self.asks.iter().map(|(&ask, it)| Asked {
            ask,
            room: it.room.clone(),
            waited: now.saturating_sub(it.since),
            granted: it.granted,
        });
        Report {
            program: id,
            job: self.spec.job,
            partners: self.partners.clone(),
            several_nodes: self.spec.several_nodes,
            settings: self.spec.settings.clone(),
            memory: self.memory.clone(),
            held: self.held,
            paused: self.paused,
            capturing: self.capturing,
            activity: self.works(),
            called: self.calls.map(|since| now.saturating_sub(since)),
            asks: asks.collect(),
            remembered: self.remembered.clone(),
        }
    }

    /// Bytes that it lacks to run and go on, by GPU, as far as the scheduler knows.
    pub fn lack(&self) -> PerGpu {
        let mut lack = PerGpu::new();
        if !self.paused_seen {
            self.known.iter().for_each(|(&gpu, memory)| *lack.entry(gpu).or_default() += memory.away.bytes());
        }
        let asks = self.asks.values().filter(|ask| ask.waits());
        asks.flat_map(|ask| &ask.room).for_each(|(&gpu, bytes)| *lack.entry(gpu).or_default() += bytes);
        lack.retain(|_, bytes| *bytes > 0);
        lack
    }

    /// Since when it waits; `paused`: a person has paused its gang, and its calls are theirs.
    pub fn wants(&self, paused: bool) -> Option<Duration> {
        let asks = self.asks.values().filter(|ask| ask.waits()).filter_map(|ask| ask.seen);
        asks.chain(self.calls_seen.filter(|_| self.held && !paused)).min()
    }
}

/// A program on these GPUs, one of so many on a node.
pub fn any_spec(random: &mut Random, gpus: &[GpuId], total: u64, crowd: u64) -> Spec {
    let kinds = [
        (30, Kind::Engine { adapter: false }),
        (15, Kind::Engine { adapter: true }),
        (25, Kind::Trainer),
        (10, Kind::Notebook),
        (5, Kind::Flapper),
        (5, Kind::Hog),
        (5, Kind::Grower),
        (5, Kind::Capturer),
    ];
    let mut draw = random.next() % 100;
    let kind = kinds.iter().find(|(share, _)| {
        let hit = draw < *share;
        draw = draw.saturating_sub(*share);
        hit
    });
    let small = (total / crowd.max(1)).max(GIB);
    let target = if random.percent(50) { random.between(GIB / 2, small) } else { random.between(GIB, total * 11 / 12) };
    let most = *random.pick(&[1, 1, 4, 20]);
    Spec {
        kind: kind.expect("the shares are of a hundred").1,
        job: None,
        gpus: gpus.to_vec(),
        context: random.between(100 << 20, 600 << 20).min(total / 3 / crowd.max(1)),
        target,
        pieces: random.between(1, most),
        several_nodes: random.percent(5),
        settings: Settings {
            priority: *random.pick(&[Priority::Low, Priority::Normal, Priority::Normal, Priority::Normal, Priority::High]),
            limit: random.percent(20).then(|| random.between(target, total)),
            idle: random.percent(15).then(|| random.millis(500, 30_000)),
            wait: None,
        },
        script: Vec::new(),
    }
}
