//! `vramctl move`: a job leaves its GPUs and comes back on others.

use crate::checkpoint::{self, Member, Patience};
use crate::completions;
use crate::failure::{CommandError, Exit};
use crate::gpus;
use crate::interrupt;
use crate::output;
use crate::processes::{Found, Target, check_whole};
use crate::target::{TargetArgs, WaitingArgs, checked_gpu, count, milliseconds, seconds};
use clap_complete::ArgValueCandidates;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_control::protocol::Transition;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_driver::{Card, cards, holders_of};

#[derive(clap::Args)]
#[command(after_help = "\
Holds and suspends the job, restores it on other GPUs of the same model, and resumes it with the same addresses and contents; its \
work continues. A job on several GPUs needs as many others; they are assigned in the order of their indices. If the job cannot be \
moved, nothing changes, and the message says why. If the driver refuses to restore some of the processes, the message names those \
that have moved. If the command is interrupted, the job stays suspended: `vramctl resume` brings it back where it was.

A job that the driver cannot restore is refused with exit code 7, see `vramctl help suspend`. Programs that have memory of each other \
open (CUDA IPC) move together, with --all or a common name; what each has open must be on its own GPU. Programs keep what they have \
stored about the old GPU; even the driver still reports its bus id.

Examples:
  vramctl move engine --to 1
  vramctl move engine --to GPU-0f5c2b8e,GPU-93d44a6b
  vramctl move engine --to 1 --swap other # exchange places with `other`")]
pub struct Args {
    /// The processes with this name, or the one with this id [default: the only managed process]
    #[arg(value_name = "NAME", conflicts_with = "target", add = ArgValueCandidates::new(completions::names))]
    process: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
    /// The GPUs: index in `nvidia-smi`, UUID or a prefix of it, or bus id
    #[arg(long, value_name = "GPU,…", value_delimiter = ',', required = true, value_parser = checked_gpu, add = ArgValueCandidates::new(completions::gpus))]
    to: Vec<String>,
    /// How many processes there must be [default: as many as when the job was last paused or resumed]
    #[arg(long, value_name = "N", value_parser = count)]
    ranks: Option<usize>,
    /// Swap GPUs with the processes of this name
    #[arg(long, value_name = "NAME", add = ArgValueCandidates::new(completions::names))]
    swap: Option<String>,
    /// How many seconds to wait for GPU work in flight; after that, nothing has changed and the program continues
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    hold_timeout: Duration,
    #[command(flatten)]
    waiting: WaitingArgs,
    /// Print JSON: {"processes": [{"pid", "name", "report"}]}
    #[arg(long)]
    pub json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

pub fn relocate(args: Args) -> Result<Exit, CommandError> {
    checkpoint::see_all_gpus();
    let target = args.process.map_or_else(|| Target::from(args.target), Target::parse);
    let found = Found::look(&Target::All)?;
    let mut members = checkpoint::join(&found, &target)?;
    if !matches!(target, Target::Pid(_)) || args.ranks.is_some() {
        check_whole(members.iter().map(|member| &member.process), true, args.ranks)?;
    }
    let cards = cards().map_err(|none| CommandError::new(Exit::Failed, format!("{none}. Nothing has changed")))?;
    let from = places(&members, &cards)?;
    let to = args.to.iter().map(|gpu| named(gpu, &cards)).collect::<Result<Vec<_>, _>>()?;
    let swapped = args.swap.map(Target::parse);
    if let Some(other) = &swapped {
        let others = checkpoint::join(&found, other)?;
        if !matches!(other, Target::Pid(_)) {
            check_whole(others.iter().map(|other| &other.process), true, None)
                .map_err(|failure| failure.adding(" to a pause or resume of the other job first"))?;
        }
        if others.iter().any(|other| members.iter().any(|member| member.process.pid == other.process.pid)) {
            return Err(usage("a job cannot change places with itself"));
        }
        let there = places(&others, &cards)?;
        if there.iter().map(|card| &card.uuid).collect::<BTreeSet<_>>() != to.iter().map(|card| &card.uuid).collect() {
            return Err(usage(format!("the other job is on {}, not where this one is to go", list(&there))));
        }
        members.extend(others);
    }
    args.waiting.check_not_held(members.iter().map(|member| member.process.pid))?;
    let map = permutation(&cards, &from, &to)?;
    let request = Transition { hold_ms: Some(milliseconds(args.hold_timeout)), ..Transition::default() };
    check_able(&mut members, &request)?;
    check_room(&members, &cards, &map)?;

    let again: Vec<_> = [Some(&target), swapped.as_ref()].into_iter().flatten().map(|target| target.command("resume")).collect();
    interrupt::hold();
    let back = steps(&again);
    interrupt::watch(move || {
        let next = format!("`vramctl status` shows how far it has come; to continue where the job is: {back}");
        output::complain("interrupted", &format!("the move is not complete; {next}"));
    });
    let patience = Patience::new(args.hold_timeout);
    checkpoint::pause(&found, &mut members, &request, &crate::nccl::ChosenCommunicators::default(), None, &patience)?;
    let moved = checkpoint::take(&mut members, &patience).and_then(|()| {
        checkpoint::restore(&mut members, &map, None).map_err(|failure| {
            // Restore processes that the driver has refused to restore there to their old GPUs.
            let home = checkpoint::restore(&mut members, &GpuMap::new(), None);
            home.err().map_or(failure.clone(), |second| failure.adding(&format!("; and back: {second}")))
        })
    });
    let resumed = checkpoint::resume(&found, &mut members);
    let arrived = if swapped.is_some() { "The jobs have changed places".into() } else { format!("The job is on {}", list(&to)) };
    if let Err(failure) = moved {
        let (place, back) = whereabouts(&members, &map, &cards, &arrived);
        let left = match resumed {
            Ok(()) => {
                let place = place.unwrap_or_else(|| "The job is where it was".into());
                let back = if back.is_empty() { String::new() } else { format!(". The way back: {}", steps(&back)) };
                [vec![format!(". {place}{back}")], checkpoint::stay_held(&members)].concat().join("; ")
            }
            Err(second) => {
                let place = place.map_or_else(String::new, |place| format!(". {place}"));
                format!("; and {second}{place}. To continue: {}", steps(&[back, again].concat()))
            }
        };
        return Err(failure.adding(&left));
    }
    resumed.map_err(|failure| failure.adding(&format!(". {arrived}, paused and held; to continue: {}", steps(&again))))?;
    let line = |member: &Member| {
        let now: Vec<_> = moves(member, &map, &cards).into_iter().map(|(_, new)| new).collect();
        format!("moved {} to {}: {} {}", member.process, list(&now), member.bytes(), member.done.took())
    };
    checkpoint::tell(&members, Vec::new(), args.json, args.quiet, line)
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

/// The GPU that the user has named.
fn named<'a>(gpu: &str, cards: &'a [Card]) -> Result<&'a Card, CommandError> {
    let bus = |text: &str| text.to_ascii_lowercase().trim_start_matches(['0', ':']).to_owned();
    let is_it = |card: &&Card| match gpu.parse::<u32>() {
        Ok(index) => card.index == index,
        Err(_) if gpu.contains(':') => bus(&card.bus) == bus(gpu),
        Err(_) => gpus::begins_as(&card.uuid, gpu),
    };
    let mut meant = cards.iter().filter(is_it);
    match (meant.next(), meant.next()) {
        (Some(card), None) => Ok(card),
        (None, _) => Err(usage(format!("NVML reports no GPU {gpu}; `nvidia-smi -L` lists them"))),
        _ => Err(usage(format!("{gpu} matches several GPUs; `nvidia-smi -L` lists them"))),
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
        return Err(usage(format!("the job is on {} already", list(from))));
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
fn check_able(members: &mut [Member], request: &Transition) -> Result<(), CommandError> {
    let foretold = checkpoint::foretell(members, request)?;
    let refusal = foretold.into_iter().find_map(|foretold| Some((foretold.process, foretold.failure?)));
    refusal.map_or(Ok(()), |(process, failure)| Err(failure.adding(&format!(" ({process}). Nothing has changed"))))
}

/// Checks that everything fits once all moving jobs have left.
fn check_room(members: &[Member], cards: &[Card], map: &GpuMap) -> Result<(), CommandError> {
    let (mut arriving, mut leaving) = (BTreeMap::<&str, u64>::new(), BTreeMap::<&str, u64>::new());
    for (old, new) in map {
        let holders = holders_of(old);
        for member in members {
            let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
            let device = devices.iter().find(|device| device.uuid.as_ref() == Some(old));
            let (active, paused) = device.map_or((0, 0), |device| (device.active_bytes, device.paused_bytes));
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

    #[test]
    fn a_gpu_is_named_by_index_uuid_or_bus() {
        let cards = cards(&["H200"; 3]);
        let found = |gpu| named(gpu, &cards).map(|card| card.index).map_err(|failure| failure.to_string());
        for gpu in ["1", "GPU-1111", "GPU-11", "gpu-1111", "00000000:18:00.0", "0000:18:00.0", "18:00.0"] {
            assert_eq!(found(gpu), Ok(1), "{gpu}");
        }
        assert!(found("7").unwrap_err().contains("no GPU 7"));
        assert!(found("GPU-").unwrap_err().contains("several"));
    }
}
