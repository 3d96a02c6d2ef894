//! How far the policy is from the best schedule in hindsight.
//!
//!     cargo run --release -p vramctl-scheduler --example ratio
//!
//! Programs of up to four on one GPU, each with a script of pauses and work: the sum of the times from the end of a pause to the end of its
//! work, against the least that an exhaustive search finds, which knows all scripts. And always busy programs, against a GPU that never
//! waits.

#![allow(dead_code)]

#[path = "../tests/simulation/process.rs"]
mod process;
#[path = "../tests/simulation/properties.rs"]
mod properties;
#[path = "../tests/simulation/random.rs"]
mod random;
#[path = "../tests/simulation/world.rs"]
mod world;

use process::{GIB, Kind, Spec};
use random::Random;
use std::time::Duration;
use vramctl_scheduler::{Policy, Priority};
use world::{Faults, World};

const TOTAL: u64 = 142 * GIB;
/// When all have started.
const STARTED: Duration = Duration::from_secs(20);

type Script = Vec<(Duration, Duration)>;

fn main() {
    println!("small: the sum of response times, policy / best in hindsight");
    for (name, busy) in [("seldom busy", 20), ("often busy", 100), ("always busy", 100_000)] {
        let mut ratios: Vec<f64> = (0..100).filter_map(|seed| small(seed, busy)).collect();
        ratios.sort_by(f64::total_cmp);
        let at = |part: usize| ratios[(ratios.len() - 1) * part / 100];
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        println!("  {name:12} {:3} runs: mean {mean:.2}, median {:.2}, 90% {:.2}, worst {:.2}", ratios.len(), at(50), at(90), at(100));
    }
    println!("always busy: work per time, policy / a GPU that never waits; the longest pause of one");
    for (count, size) in [(2, 90), (3, 60), (3, 90), (4, 50), (6, 30), (10, 19)] {
        let (share, longest) = trainers(count, size);
        println!("  {count:2} of {size:2} GiB: {share:.3}, {longest:.1} s");
    }
}

fn node(seed: u64) -> World {
    let mut world = World::new(seed, Policy::default(), 1, TOTAL, (100 * TOTAL, 0), Faults::default(), false);
    world.exact = true;
    world
}

/// Programs that are always busy, four minutes.
fn trainers(count: u64, size: u64) -> (f64, f64) {
    let mut world = node(count);
    for _ in 0..count {
        world.spawn(Spec::plain(Kind::Trainer, size * GIB, 4, Priority::Normal));
    }
    world.run(STARTED);
    world.computed.clear();
    let minutes = Duration::from_secs(240);
    let longest = world.run_and_watch(STARTED + minutes);
    let fit = ((TOTAL - world.policy.reserve) / (size * GIB)).min(count);
    let computed: Duration = world.computed.values().sum();
    (computed.as_secs_f64() / (minutes * fit as u32).as_secs_f64(), longest.as_secs_f64())
}

/// Policy and best, for one instance. `None` if the search takes too long.
fn small(seed: u64, busy: u64) -> Option<f64> {
    let mut random = Random(seed);
    let count = random.between(2, 4);
    let programs: Vec<(u64, Script)> = (0..count)
        .map(|_| {
            let size = random.between(30, 130) * GIB;
            let pause = |random: &mut Random| random.millis(1, 1 + 400_000 / busy);
            (size, (0..12 / count).map(|_| (pause(&mut random), random.millis(50, 4_000))).collect())
        })
        .collect();
    let mut world = node(seed);
    for (size, script) in &programs {
        let mut script = script.clone();
        // All have started by then, and the last have their place.
        script[0].0 += STARTED;
        world.spawn(Spec { script, ..Spec::plain(Kind::Scripted, *size, 20, Priority::Normal) });
        let until = world.now + Duration::from_secs(4);
        world.run(until);
    }
    world.run(Duration::from_secs(900));
    let policy: Duration = world.responses.iter().sum();
    let best = Search::new(world.policy.clone(), &programs).best(policy)?;
    Some(policy.as_secs_f64() / best.as_secs_f64())
}

/// Tries all that a scheduler could do, with what it would know only later.
struct Search {
    policy: Policy,
    capacity: u64,
    scripts: Vec<Script>,
    sizes: Vec<u64>,
    best: Duration,
    nodes: u64,
}

#[derive(Debug, Clone)]
enum Doing {
    Pauses(Duration),
    Wants { since: Duration, left: Duration },
    Works { since: Duration, until: Duration },
    Ended,
}

#[derive(Debug, Clone)]
struct Node {
    now: Duration,
    resident: Vec<u64>,
    doing: Vec<Doing>,
    next: Vec<usize>,
    spent: Duration,
    change: Option<Going>,
}

/// A change of places.
#[derive(Debug, Clone)]
struct Going {
    until: Duration,
    waiter: usize,
    leaving: Vec<(usize, u64)>,
}

impl Search {
    fn new(policy: Policy, programs: &[(u64, Script)]) -> Self {
        let capacity = TOTAL - policy.reserve - (programs.len() as u64 * (1 << 20));
        let (sizes, scripts) = programs.iter().cloned().unzip();
        Self { policy, capacity, scripts, sizes, best: Duration::ZERO, nodes: 0 }
    }

    fn best(mut self, known: Duration) -> Option<Duration> {
        self.best = known;
        let mut resident = vec![0; self.sizes.len()];
        let mut free = self.capacity;
        // Where the policy's run began: the last to start have their place.
        for index in (0..self.sizes.len()).rev() {
            resident[index] = self.sizes[index].min(free);
            free -= resident[index];
        }
        let doing = self.scripts.iter().map(|script| Doing::Pauses(script[0].0)).collect();
        let start = Node { now: Duration::ZERO, resident, doing, next: vec![0; self.sizes.len()], spent: Duration::ZERO, change: None };
        self.visit(start);
        (self.nodes < 3_000_000).then_some(self.best)
    }

    /// The least that this may come to.
    fn at_least(&self, node: &Node) -> Duration {
        let of = |(index, doing): (usize, &Doing)| {
            let later: Duration = self.scripts[index].iter().skip(node.next[index] + 1).map(|(_, work)| *work).sum();
            match doing {
                Doing::Pauses(_) => later + self.scripts[index][node.next[index]].1,
                Doing::Wants { since, left } => later + node.now.saturating_sub(*since) + *left,
                Doing::Works { since, until } => later + until.saturating_sub(*since),
                Doing::Ended => Duration::ZERO,
            }
        };
        node.spent + node.doing.iter().enumerate().map(of).sum::<Duration>()
    }

    fn visit(&mut self, mut node: Node) {
        self.nodes += 1;
        if self.nodes >= 3_000_000 || self.at_least(&node) >= self.best {
            return;
        }
        if node.doing.iter().all(|doing| matches!(doing, Doing::Ended)) {
            self.best = node.spent;
            return;
        }
        if node.change.is_none() {
            for waiter in 0..self.sizes.len() {
                if matches!(node.doing[waiter], Doing::Wants { .. }) {
                    self.serve(&node, waiter);
                }
            }
        }
        // Or nothing until something happens.
        if self.pass(&mut node) {
            self.visit(node);
        }
    }

    /// Each smallest set of others that makes room.
    fn serve(&mut self, node: &Node, waiter: usize) {
        let count = self.sizes.len();
        let missing = self.sizes[waiter] - node.resident[waiter];
        let need = missing.saturating_sub(self.capacity - node.resident.iter().sum::<u64>());
        for set in 0..1u32 << count {
            let members: Vec<usize> = (0..count).filter(|index| set >> index & 1 == 1).collect();
            let sum: u64 = members.iter().map(|index| node.resident[*index]).sum();
            let superfluous = members.iter().any(|index| sum - node.resident[*index] >= need);
            if members.contains(&waiter) || sum < need || superfluous {
                continue;
            }
            let (mut after, mut left, mut leaving) = (node.clone(), need, Vec::new());
            for index in members {
                let bytes = node.resident[index].min(left);
                left -= bytes;
                leaving.push((index, bytes));
                if let Doing::Works { since, until } = node.doing[index] {
                    after.doing[index] = Doing::Wants { since, left: until.saturating_sub(node.now) };
                }
            }
            let took = self.policy.overhead + self.policy.copy(missing.max(need));
            after.change = Some(Going { until: node.now + took, waiter, leaving });
            if self.pass(&mut after) {
                self.visit(after);
            }
        }
    }

    /// To the next moment at which something happens.
    fn pass(&self, node: &mut Node) -> bool {
        let times = node.doing.iter().filter_map(|doing| match doing {
            Doing::Pauses(until) | Doing::Works { until, .. } => Some(*until),
            _ => None,
        });
        let Some(now) = times.chain(node.change.as_ref().map(|going| going.until)).min() else { return false };
        node.now = now;
        if let Some(Going { waiter, leaving, .. }) = node.change.take_if(|going| going.until == now) {
            for (index, bytes) in leaving {
                node.resident[index] -= bytes;
            }
            node.resident[waiter] = self.sizes[waiter];
        }
        let moves = |node: &Node, index: usize| {
            node.change.as_ref().is_some_and(|going| going.waiter == index || going.leaving.iter().any(|(other, _)| *other == index))
        };
        for index in 0..node.doing.len() {
            match node.doing[index] {
                Doing::Pauses(until) if until == now => {
                    node.doing[index] = Doing::Wants { since: now, left: self.scripts[index][node.next[index]].1 };
                }
                Doing::Works { since, until } if until == now => {
                    node.spent += now.saturating_sub(since);
                    node.next[index] += 1;
                    node.doing[index] =
                        self.scripts[index].get(node.next[index]).map_or(Doing::Ended, |(pause, _)| Doing::Pauses(now + *pause));
                }
                _ => (),
            }
            if let Doing::Wants { since, left } = node.doing[index]
                && node.resident[index] == self.sizes[index]
                && !moves(node, index)
            {
                node.doing[index] = Doing::Works { since, until: now + left };
            }
        }
        true
    }
}
