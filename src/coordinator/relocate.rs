//! Moves jobs: they leave their GPUs and come back on others.

use crate::Reporter;
use crate::checkpoint::{self, Checkpoint, Member};
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::gpus;
use crate::operation::{Operation, Scope};
use crate::outcome::Outcome;
use crate::processes::{Found, Process, Target};
use crate::suspend;
use std::collections::{BTreeMap, BTreeSet};
use vramctl_driver::checkpoint::GpuMap;
use vramctl_driver::{self as driver, Card};
use vramctl_model::{PauseRequest, support};

/// What a move will do.
pub struct Move {
    checkpoint: Checkpoint,
    request: PauseRequest,
    cards: Vec<Card>,
    /// All GPUs, each with the one that its memory goes to.
    map: GpuMap,
    /// Whether all are where they are to go, so that nothing is to be done.
    is_there: bool,
    /// For messages: what is true once all have moved.
    arrived: String,
    /// The commands that continue it where the jobs are.
    again: Vec<String>,
}

/// Where a process would go.
#[derive(Debug)]
pub struct Relocation {
    /// The process.
    pub process: Process,
    /// The indices of its GPUs.
    pub from: Vec<u32>,
    /// Those that they would be replaced by, in the same order.
    pub to: Vec<u32>,
    /// The memory of its tags.
    pub bytes: u64,
}

impl Move {
    /// Finds the processes and their way, and checks that they could go it. Changes nothing.
    pub fn plan(operation: &Operation, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let Operation { target, ranks, deadline, pause, .. } = operation;
        let Scope::Elsewhere { to, swap } = &operation.scope else { return Err(usage("a move needs GPUs to go to")) };
        let swap = swap.as_ref();
        let found = Found::look_in_turn(&Target::All, deadline)?;
        let mut checkpoint = Checkpoint::of(&found, target)?.with_ranks_elsewhere(&pause.everywhere);
        checkpoint.check_whole(*ranks, reporter)?;
        let cards = driver::cards().map_err(|none| CommandError::new(Exit::Failed, format!("{none}. Nothing has changed")))?;
        let from = places(&checkpoint.members, &cards)?;
        let mut to = to.iter().map(|gpu| gpus::named(gpu, &cards)).collect::<Result<Vec<_>, _>>()?;
        if let Some(other) = swap {
            let others = Checkpoint::of(&found, other)?;
            let first = " to a pause or resume of the other job first";
            others.check_whole(None, reporter).map_err(|failure| failure.adding(first))?;
            let own = checkpoint.pids();
            if others.pids().iter().any(|pid| own.contains(pid)) {
                return Err(usage("a job cannot change places with itself"));
            }
            let there = places(&others.members, &cards)?;
            if to.is_empty() {
                to.clone_from(&there);
            }
            if there.iter().map(|card| &card.uuid).collect::<BTreeSet<_>>() != to.iter().map(|card| &card.uuid).collect() {
                return Err(usage(format!("the other job is on {}, not where this one is to go", list(&there))));
            }
            checkpoint.join(others);
        }
        let request = pause.request(deadline);
        let is_there = from.len() == to.len() && from.iter().zip(&to).all(|(from, to)| from.uuid == to.uuid);
        if is_there && checkpoint.members.iter().all(|member| member.process.suspended().is_none()) {
            let map = from.iter().map(|card| (card.uuid.clone(), card.uuid.clone())).collect();
            return Ok(Self { checkpoint, request, cards, map, is_there, arrived: String::new(), again: Vec::new() });
        }
        pause.check_not_held(checkpoint.pids().into_iter())?;
        let able = [&support::SUSPEND, &support::MOVE].into_iter().try_for_each(checkpoint::check_driver);
        able.map_err(|failure| failure.adding(". Nothing has changed"))?;
        let map = permutation(&cards, &from, &to)?;
        check_able(&mut checkpoint, &request, reporter)?;
        check_room(&checkpoint.members, &cards, &map)?;
        let arrived = if swap.is_some() { "The jobs have changed places".into() } else { format!("The job is on {}", list(&to)) };
        let again = [Some(target), swap].into_iter().flatten().map(|target| target.command("resume")).collect();
        Ok(Self { checkpoint, request, cards, map, is_there: false, arrived, again })
    }

    /// The commands that continue an interrupted move where the jobs are.
    pub fn way_on(&self) -> String {
        steps(&self.again)
    }

    /// A dry run: where each process would go. Whether it could is checked with the plan.
    pub fn forecast(&self) -> Vec<Relocation> {
        let moving = |member: &Member| {
            let (from, to) = moves(member, &self.map, &self.cards).into_iter().map(|(old, new)| (old.index, new.index)).unzip();
            let bytes = member.process.tags().iter().map(|tag| tag.bytes).sum();
            Relocation { process: member.process.clone(), from, to, bytes }
        };
        self.checkpoint.members.iter().map(moving).collect()
    }

    /// Suspends, restores elsewhere, resumes. If the driver refuses that, the jobs come back where they were.
    pub fn run(mut self, reporter: &dyn Reporter) -> Result<Outcome, CommandError> {
        if self.is_there {
            return Ok(self.arrived());
        }
        let at_once = Deadline::new(None);
        let Self { checkpoint, request, map, .. } = &mut self;
        let paused = checkpoint.pause(request, None, reporter)?;
        let moved = checkpoint.leave_gpus(Deadline::new(request.hold).after(paused.waited), reporter).and_then(|()| {
            checkpoint.restore(map, &at_once, reporter).map_err(|failure| {
                // Restore processes that the driver has refused to restore there to their old GPUs.
                let home = checkpoint.restore(&GpuMap::new(), &at_once, reporter);
                home.err().map_or(failure.clone(), |second| failure.adding(&format!("; and back: {second}")))
            })
        });
        let resumed = checkpoint.resume(reporter);
        if let Err(failure) = moved {
            return Err(failure.adding(&self.after_a_failure(resumed)));
        }
        resumed.map_err(|failure| failure.adding(&format!(". {}, paused and held; to continue: {}", self.arrived, self.way_on())))?;
        Ok(self.arrived())
    }

    /// The outcome of one that is complete.
    fn arrived(self) -> Outcome {
        let Self { mut checkpoint, map, cards, .. } = self;
        for member in &mut checkpoint.members {
            member.done.now_on = moves(member, &map, &cards).into_iter().map(|(_, new)| new.index).collect();
        }
        suspend::outcome(checkpoint, Vec::new())
    }

    /// Where the jobs are now, and how to continue.
    fn after_a_failure(&self, resumed: Result<(), CommandError>) -> String {
        let (place, back) = whereabouts(&self.checkpoint.members, &self.map, &self.cards, &self.arrived);
        match resumed {
            Ok(()) => {
                let place = place.unwrap_or_else(|| "The job is where it was".into());
                let back = if back.is_empty() { String::new() } else { format!(". The way back: {}", steps(&back)) };
                [vec![format!(". {place}{back}")], self.checkpoint.stay_held()].concat().join("; ")
            }
            Err(second) => {
                let place = place.map_or_else(String::new, |place| format!(". {place}"));
                format!("; and {second}{place}. To continue: {}", steps(&[back, self.again.clone()].concat()))
            }
        }
    }
}

/// The GPUs of a process that `map` moves, each with its new one, in the new order.
fn moves<'a>(member: &Member, map: &GpuMap, cards: &'a [Card]) -> Vec<(&'a Card, &'a Card)> {
    let card = |uuid: &str| cards.iter().find(|card| card.uuid == uuid);
    let is_its_own = |old: &str| member.process.gpus().any(|gpu| gpu == old);
    let mut moves: Vec<_> = map.iter().filter(|(old, _)| is_its_own(old)).filter_map(|(old, new)| Some((card(old)?, card(new)?))).collect();
    moves.sort_by_key(|(_, new)| new.index);
    moves
}

/// After a failed move: where the processes are, if any has moved, and, if only some have, the commands that bring them back. This does not
/// bring them back: they work, and another checkpoint by a driver that has just refused a restore could lose them. `arrived`: the text if
/// all have moved.
fn whereabouts(members: &[Member], map: &GpuMap, cards: &[Card], arrived: &str) -> (Option<String>, Vec<String>) {
    let moving = members
        .iter()
        .map(|member| (member, moves(member, map, cards)))
        .filter(|(_, moves)| moves.iter().any(|(old, new)| old.index != new.index));
    let (away, stayed): (Vec<_>, Vec<_>) = moving.partition(|(member, _)| member.has_moved);
    if away.is_empty() {
        return (None, Vec::new());
    }
    if stayed.is_empty() {
        return (Some(arrived.into()), Vec::new());
    }
    let (mut texts, mut to_bring_back) = (Vec::new(), Vec::new());
    for (member, moves) in away {
        let (home, on): (Vec<_>, Vec<_>) = moves.into_iter().unzip();
        texts.push(format!("{} is on {} now", member.process, list(&on)));
        let indices = |cards: Vec<&Card>| cards.into_iter().map(|card| card.index).collect();
        to_bring_back.push(Away { pid: member.process.pid, on: indices(on), home: indices(home) });
    }
    (Some(format!("{}. No other has moved", texts.join(", "))), way_back(to_bring_back))
}

/// A process on other GPUs than its own, by their indices.
struct Away {
    pid: u32,
    on: Vec<u32>,
    home: Vec<u32>,
}

/// The commands that bring these back, in an order in which none is in another's way. Where each is in the way of the next in a circle, one
/// is suspended first.
fn way_back(mut away: Vec<Away>) -> Vec<String> {
    let mut commands = Vec::new();
    while !away.is_empty() {
        // GPUs that it has not left are no reason to move it.
        let is_in_the_way = |other: &Away, one: &Away| {
            other.pid != one.pid && other.on.iter().zip(&other.home).any(|(on, home)| on != home && one.home.contains(on))
        };
        if let Some(place) = away.iter().position(|one| !away.iter().any(|other| is_in_the_way(other, one))) {
            let Away { pid, home, .. } = away.remove(place);
            let home: Vec<_> = home.iter().map(ToString::to_string).collect();
            commands.push(format!("{} --to {}", Target::Pid(pid).command("move"), home.join(",")));
        } else {
            let one = away.remove(0);
            commands.push(Target::Pid(one.pid).command("suspend"));
            away.push(Away { on: Vec::new(), ..one });
        }
    }
    commands
}

fn steps(commands: &[String]) -> String {
    format!("`{}`", commands.join("`, then `"))
}

fn usage(why: impl Into<String>) -> CommandError {
    CommandError::new(Exit::Usage, why)
}

fn list(gpus: &[&Card]) -> String {
    let names: Vec<_> = gpus.iter().map(|card| format!("GPU {}", card.index)).collect();
    names.join(", ")
}

/// The GPUs that a job is on, by index.
fn places<'a>(members: &[Member], cards: &'a [Card]) -> Result<Vec<&'a Card>, CommandError> {
    let uuids: BTreeSet<&str> = members.iter().flat_map(|member| member.process.gpus()).collect();
    let places: Vec<_> = cards.iter().filter(|card| uuids.contains(&*card.uuid)).collect();
    match (places.len() == uuids.len(), places.is_empty()) {
        (true, false) => Ok(places),
        (true, true) => Err(CommandError::new(Exit::NoProcess, "the job has no managed memory on any GPU, so there is nothing to move")),
        _ => Err(CommandError::new(Exit::Failed, "NVML does not show all GPUs of the job here, so it cannot be moved")),
    }
}

/// The driver requires a one-to-one map of all GPUs, each to one of its own model. A GPU that the job only comes to is mapped back along the
/// pairs that lead there.
fn permutation(cards: &[Card], from: &[&Card], to: &[&Card]) -> Result<GpuMap, CommandError> {
    if from.len() != to.len() {
        return Err(usage(format!("the job is on {}, but --to names {}; give one for each of its GPUs", list(from), list(to))));
    }
    let targets: BTreeSet<_> = to.iter().map(|card| &card.uuid).collect();
    if targets.len() < to.len() {
        return Err(usage("a GPU is named twice"));
    }
    if from.iter().zip(to).all(|(from, to)| from.uuid == to.uuid) {
        return Err(usage(format!("the job is on {} already, and suspended: `vramctl resume` brings it back", list(from))));
    }
    if let Some((from, to)) = from.iter().zip(to).find(|(from, to)| from.name != to.name) {
        let text = format!(
            "GPU {} is a {}, GPU {} a {}: the driver moves only between GPUs of one model",
            from.index, from.name, to.index, to.name
        );
        return Err(CommandError::new(Exit::Failed, text));
    }
    let mut map: BTreeMap<_, _> = from.iter().zip(to).map(|(from, to)| (&from.uuid, &to.uuid)).collect();
    let origins: BTreeMap<_, _> = map.iter().map(|(from, to)| (*to, *from)).collect();
    for card in cards.iter().filter(|card| from.iter().all(|from| from.uuid != card.uuid)) {
        let mut onto = &card.uuid;
        while let Some(origin) = origins.get(onto) {
            onto = origin;
        }
        map.insert(&card.uuid, onto);
    }
    Ok(map.into_iter().map(|(old, new)| (old.clone(), new.clone())).collect())
}

/// Fails if one of them could not be paused, checkpointed and restored.
fn check_able(checkpoint: &mut Checkpoint, request: &PauseRequest, reporter: &dyn Reporter) -> Result<(), CommandError> {
    let refusal = checkpoint.forecast(request, reporter).into_iter().find_map(|one| Some((one.process, one.failure?)));
    refusal.map_or(Ok(()), |(process, failure)| Err(failure.adding(&format!(" ({process}). Nothing has changed"))))
}

/// Checks that everything fits once all moving jobs have left.
fn check_room(members: &[Member], cards: &[Card], map: &GpuMap) -> Result<(), CommandError> {
    let (mut arriving, mut leaving) = (BTreeMap::<&str, u64>::new(), BTreeMap::<&str, u64>::new());
    for (old, new) in map {
        let holders = driver::holders_of(old);
        for member in members {
            let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
            let device = devices.iter().find(|device| device.uuid.as_ref() == Some(old));
            let (active, paused) = device.map_or((0, 0), |device| (device.active_bytes, device.coming_bytes()));
            let all = holders.iter().find(|holder| holder.pid == member.pid as u32).and_then(|holder| holder.bytes);
            let now = all.unwrap_or(active);
            let suspended = member.gpus.iter().find(|gpu| gpu.uuid == *old).map(|gpu| gpu.bytes);
            let rest = suspended.unwrap_or(now.saturating_sub(active));
            *leaving.entry(old).or_default() += now;
            *arriving.entry(new).or_default() += active + paused + checkpoint::room_for(rest);
        }
    }
    for card in cards {
        let needed = arriving.get(&*card.uuid).copied().unwrap_or(0);
        let free = card.free + leaving.get(&*card.uuid).copied().unwrap_or(0);
        if needed > free {
            return Err(checkpoint::short(&Card { free, ..card.clone() }, needed).adding(". Nothing has changed"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards(names: &[&str]) -> Vec<Card> {
        let card = |(index, name): (usize, &&str)| Card {
            index: index as u32,
            uuid: format!("GPU-{index}{index}{index}{index}"),
            name: (*name).into(),
            bus: format!("00000000:{index}8:00.0"),
            free: 1 << 30,
            ..Card::default()
        };
        names.iter().enumerate().map(card).collect()
    }

    fn map(cards: &[Card], from: &[usize], to: &[usize]) -> Result<Vec<usize>, String> {
        let pick = |places: &[usize]| places.iter().map(|place| &cards[*place]).collect::<Vec<_>>();
        let map = permutation(cards, &pick(from), &pick(to)).map_err(|failure| failure.to_string())?;
        Ok(map.iter().map(|(_, new)| cards.iter().position(|card| card.uuid == *new).unwrap()).collect())
    }

    #[test]
    fn every_gpu_has_a_place_in_the_map() {
        let four = cards(&["H200"; 4]);
        assert_eq!(map(&four, &[0], &[1]), Ok(vec![1, 0, 2, 3]));
        assert_eq!(map(&four, &[0, 1], &[2, 3]), Ok(vec![2, 3, 0, 1]));
        assert_eq!(map(&four, &[0, 1], &[1, 2]), Ok(vec![1, 2, 0, 3]));
        assert_eq!(map(&four, &[0, 1], &[1, 0]), Ok(vec![1, 0, 2, 3]));
        // Different models are never mapped to each other.
        let mixed = cards(&["H200", "L4", "L4", "H200"]);
        assert_eq!(map(&mixed, &[0, 1], &[3, 2]), Ok(vec![3, 2, 1, 0]));
        for (from, to) in [(&[0][..], &[1, 2][..]), (&[0, 1], &[2, 2]), (&[1], &[1])] {
            assert!(map(&four, from, to).is_err(), "{from:?} {to:?}");
        }
        let text = map(&cards(&["H200", "L4"]), &[0], &[1]).unwrap_err();
        assert!(text.contains("GPU 0 is a H200, GPU 1 a L4"), "{text}");
    }

    #[test]
    fn each_finds_its_gpu_empty_on_the_way_back() {
        let back = |away: &[(u32, &[u32], &[u32])]| {
            way_back(away.iter().map(|(pid, on, home)| Away { pid: *pid, on: on.to_vec(), home: home.to_vec() }).collect())
                .iter()
                .map(|command| command.replace("vramctl ", "").replace("--pid=", ""))
                .collect::<Vec<_>>()
                .join("; ")
        };
        assert_eq!(back(&[(1, &[1], &[0])]), "move 1 --to 0");
        assert_eq!(back(&[(1, &[2], &[1]), (2, &[1], &[0])]), "move 2 --to 0; move 1 --to 1", "a row");
        assert_eq!(back(&[(1, &[1], &[0]), (2, &[0], &[1])]), "suspend 1; move 2 --to 1; move 1 --to 0", "a circle");
        assert_eq!(back(&[(1, &[0, 1], &[1, 0])]), "move 1 --to 1,0", "in its own way");
        assert_eq!(back(&[(1, &[0, 2], &[0, 1]), (2, &[0, 4], &[0, 3])]), "move 1 --to 0,1; move 2 --to 0,3", "GPU 0 stays shared");
        let two_circles = back(&[(1, &[1], &[0]), (2, &[0], &[1]), (3, &[3], &[2]), (4, &[2], &[3])]);
        assert_eq!(two_circles, "suspend 1; move 2 --to 1; move 1 --to 0; suspend 3; move 4 --to 3; move 3 --to 2");
    }
}
