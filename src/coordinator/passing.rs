//! A swap on a host without room for the contents of both jobs: host memory passes from IN to OUT, through the system, piece by piece.
//!
//! OUT saves a piece when the host has memory for it, and releases GPU memory once an allocation is saved. IN takes that, fills it, and releases
//! the host memory. If it is undone, the two change roles. Neither can go on if the host has no piece for OUT and each GPU less than IN's next
//! allocation. That cannot be if host and GPUs together have, before the swap, as much free as the largest allocation of each of the two on
//! each GPU, and what is lost where host memory is counted in pieces. Otherwise the swap is refused before anything changes.
//!
//! A process with memory on several GPUs is refused: it moves its contents in one order, and might wait for the one GPU while the other is free.

use crate::failure::CommandError;
use crate::forecast::Forecast;
use crate::plan::Plan;
use crate::processes::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, fs};
use vramctl_host::limits;
use vramctl_host::system::folder_of;
use vramctl_model::{Bytes, Error, HandOver, Kind, Moving, Policy};

/// What passes, in bytes of host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passing {
    /// What the contents of OUT need.
    pub needed: u64,
    /// What is available for them at the start.
    pub available: u64,
    /// Of that, what is needed at the start.
    pub least: u64,
    /// What IN gives back before the commit.
    pub given: u64,
}

impl Passing {
    /// How host memory has to pass for this swap. `None` if the host has room for the contents of both, if others will give OUT some that they
    /// keep, or if OUT will be refused anyway. `forecast`: of OUT's pause. `free`: bytes free on each GPU.
    pub fn of(leaving: &Plan, coming: &Plan, forecast: &[Forecast], free: &BTreeMap<&str, u64>) -> Result<Option<Self>, CommandError> {
        let (mut needed, mut available, mut is_refused) = (0, u64::MAX, false);
        for one in forecast {
            let Some(plan) = &one.plan else { return Ok(None) };
            match &one.failure {
                Some(CommandError::Refused(refusal)) if refusal.code == Kind::HostMemory => is_refused = true,
                Some(_) => return Ok(None),
                None => (),
            }
            needed += plan.host.needed_bytes;
            available = available.min(plan.host.available_bytes);
        }
        if !is_refused && needed <= available || needed == 0 {
            return Ok(None);
        }
        match Self::planned(leaving, coming, free, needed, available) {
            Err(_) if needed <= available.saturating_add(kept_by_others(leaving)) => Ok(None),
            planned => planned.map(Some),
        }
    }

    fn planned(leaving: &Plan, coming: &Plan, free: &BTreeMap<&str, u64>, needed: u64, available: u64) -> Result<Self, CommandError> {
        let refused = |why: &str| {
            let [needed, available] = [needed, available].map(Bytes);
            let text = format!(
                "the host has too little memory for the contents of both jobs: {needed} needed, {available} available, and {why}. Free {}, or \
                 discard tags whose contents can be rebuilt (--discard). Nothing has changed",
                Bytes(needed.0.saturating_sub(available.0))
            );
            CommandError::from(&Error::HostMemory { needed: needed.0, available: available.0, capped: false }).saying(text)
        };
        let [out, into] = [leaving, coming].map(Plan::hand_overs);
        let (out, into) = (out?, into?);
        if let Some(process) = coming.processes().find(|process| !process.is_held()) {
            return Err(refused(&format!("{process} runs, because it was paused with --no-hold, so its host memory cannot pass")));
        }
        let mut all = Vec::new();
        for (process, answer) in out.iter().chain(&into) {
            let Some(hand_over) = answer.plan.hand_over.clone() else {
                return Err(refused(&format!("{process} has a library that cannot pass host memory on; start it with a newer one")));
            };
            let moving = if all.len() < out.len() { &hand_over.leaving } else { &hand_over.coming };
            if moving.largest.len() > 1 {
                return Err(refused(&format!("it cannot pass from one to the other, because {process} has memory on several GPUs")));
            }
            all.push(hand_over);
        }
        for (process, answer) in &out {
            if let Some(refusal) = answer.refused.clone() {
                return Err(CommandError::Refused(refusal));
            }
            if answer.plan.tags.iter().any(|tag| tag.backup.get(&Policy::Disk).is_some_and(|bytes| *bytes > 0)) {
                return Err(refused(&format!("host memory cannot pass while contents of {process} go to files")));
            }
        }
        let into_all = all.split_off(out.len());
        if let Some(apart) = groups_apart(out.iter().map(|(process, _)| *process), into.iter().map(|(process, _)| *process), needed) {
            return Err(refused(&apart));
        }
        let given = into_all.iter().map(|one| one.coming.host_bytes).sum();
        let passing = Self { needed, available, least: least(&all, &into_all, free), given };
        if passing.least > available {
            let short = Bytes(passing.least - available);
            return Err(refused(&format!(
                "to pass it from one to the other piece by piece, {} have to be available at the start: {short} are missing",
                Bytes(passing.least)
            )));
        }
        Ok(passing)
    }

    /// The most host memory for the contents of both at a time, as planned.
    pub fn most(&self) -> u64 {
        self.given + self.needed.min(self.available)
    }
}

impl fmt::Display for Passing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [needed, available, least, most] = [self.needed, self.available, self.least, self.most()].map(Bytes);
        write!(
            out,
            "Host memory passes from one to the other, because the host has no room for both: {needed} needed, {available} available, of which \
             {least} are needed at the start; at most {most} would be in use for both"
        )
    }
}

/// Host memory that other processes keep for later, and release when somebody needs it.
fn kept_by_others(leaving: &Plan) -> u64 {
    let own: BTreeSet<_> = leaving.processes().map(|process| process.pid).collect();
    let others = leaving.found().processes.iter().filter(|process| !own.contains(&process.pid));
    let kept = |process: &Process| {
        process.status.as_ref().map_or(0, |status| status.memory.host.ready_bytes.saturating_sub(status.memory.host.used_bytes))
    };
    others.map(kept).sum()
}

/// Why host memory that IN releases is none for OUT: OUT's container has too little, and IN is in another one.
fn groups_apart<'a>(out: impl Iterator<Item = &'a Process>, into: impl Iterator<Item = &'a Process>, needed: u64) -> Option<String> {
    let group = |process: &Process| fs::read_to_string(folder_of(process.pid).join("cgroup")).unwrap_or_default();
    let theirs: BTreeSet<_> = into.map(group).collect();
    let is_apart = |process: &&Process| theirs.len() > 1 || !theirs.contains(&group(process));
    let apart = out.filter(is_apart).find(|process| limits::limit_of(process.pid).is_some_and(|room| room.free < needed))?;
    Some(format!("what is freed elsewhere is none for {apart}, whose container has a limit of its own"))
}

/// The host memory that must be available at the start, so that one of the two can always go on.
fn least(out: &[HandOver], into: &[HandOver], free: &BTreeMap<&str, u64>) -> u64 {
    /// Of one job on one GPU.
    #[derive(Default)]
    struct Side {
        processes: u64,
        largest: u64,
        late: u64,
        host: u64,
        /// Where host memory is counted in pieces, or is not kept for all of the device memory.
        difference: u64,
    }
    fn add<'a>(sides: &mut BTreeMap<&'a str, [Side; 2]>, place: usize, moving: &'a Moving, late: u64) {
        for (gpu, largest) in &moving.largest {
            let side = &mut sides.entry(gpu).or_default()[place];
            side.processes += 1;
            side.largest += largest;
            side.late += late;
            side.host += moving.host_bytes;
            side.difference += moving.device_bytes.abs_diff(moving.host_bytes);
        }
    }
    let mut sides = BTreeMap::new();
    for one in out {
        add(&mut sides, 0, &one.leaving, one.late_bytes);
    }
    for one in into {
        add(&mut sides, 1, &one.coming, 0);
    }
    let piece = out.iter().chain(into).map(|one| one.piece_bytes).max().unwrap_or_default();
    let of_gpu = |(gpu, [out, into]): (&str, [Side; 2])| {
        let free = free.get(gpu).copied().unwrap_or_default();
        let step = out.largest + out.late + into.largest + out.difference.max(into.difference) + piece * out.processes.max(into.processes);
        step.saturating_sub(free).max(out.host.saturating_sub(into.host))
    };
    // Each process that leaves looks whether there is a whole piece for it.
    piece * out.len() as u64 + sides.into_iter().map(of_gpu).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 64;

    fn one(gpu: &str, largest: u64, device_bytes: u64, host_bytes: u64) -> HandOver {
        let moving = Moving { largest: BTreeMap::from([(gpu.to_owned(), largest)]), device_bytes, host_bytes };
        HandOver { leaving: moving.clone(), coming: moving, late_bytes: 0, piece_bytes: PIECE }
    }

    /// With less, both could wait for each other.
    #[test]
    fn room_for_the_largest_allocation_of_each_must_be_free_on_the_host_or_the_gpu() {
        let least_of =
            |out: &[HandOver], into: &[HandOver], free: &[(&'static str, u64)]| least(out, into, &free.iter().copied().collect());
        let of_same = [one("a", 100, 1000, 1024)];
        assert_eq!(least_of(&of_same, &of_same, &[]), PIECE + 100 + 100 + 24 + PIECE);
        assert_eq!(least_of(&of_same, &of_same, &[("a", 80)]), PIECE + 100 + 100 + 24 + PIECE - 80);
        assert_eq!(least_of(&of_same, &of_same, &[("a", 1 << 20)]), PIECE, "each piece is taken by itself");
        let larger = [one("a", 100, 3000, 3000)];
        assert_eq!(least_of(&larger, &of_same, &[]), PIECE + 3000 - 1024, "what does not pass must be there");
        let late = [HandOver { late_bytes: 500, ..one("a", 100, 1000, 1024) }];
        assert_eq!(least_of(&late, &of_same, &[]), PIECE + 100 + 500 + 100 + 24 + PIECE);
        let two = [one("a", 100, 1000, 1000), one("b", 200, 1000, 1000)];
        assert_eq!(least_of(&two, &two, &[("b", 1 << 20)]), 2 * PIECE + 100 + 100 + PIECE, "free on one GPU is nothing to another");
        assert_eq!(least_of(&of_same, &[], &[]), PIECE + 1024);
    }
}
