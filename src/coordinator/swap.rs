//! Two jobs change places: one leaves the GPUs while the other comes.
//!
//! Both are one job to `job/mod.rs`, with one decision:
//!
//! ```text
//! OUT   hold ─▶ drain ─▶ save, and give back what is saved, piece by piece ─▶ prepared ─┐
//!                 │                        ╎ memory                                     ├─▶ commit
//! IN              └────▶ take memory as it comes, and fill it ─▶ prepared ──────────────┘
//! ```
//!
//! The commit is the point of no return, for both at once: then OUT is paused, and IN runs once OUT has given back the rest of its memory, or
//! a second later. If anything fails or dies before that, both are undone: IN gives the new memory back (its contents are still on the host),
//! and OUT takes as much new memory, fills it, and runs on. If that memory is late, OUT stays held until the memory arrives
//! (`core/transition/unfinished.rs`). Memory that changes hands never holds the only copy of contents.
//!
//! If the host has no room for the contents of both, host memory passes the other way meanwhile, and the contents of IN that have arrived are
//! saved again if the swap is undone (`passing.rs`).
//!
//! A job that has ended cannot run. So if all of OUT has ended, IN is resumed, and if all of IN has, OUT is.

use crate::Reporter;
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::forecast::Forecast;
use crate::job::JobRequest;
use crate::operation::{Hold, Operation};
use crate::outcome::Outcome;
use crate::parallel;
use crate::passing::Passing;
use crate::plan::{Consent, Plan};
use crate::processes::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vramctl_driver as driver;
use vramctl_model::{
    Bytes, DeviceStatus, Error, GpuPlan, Holder, Needed, PauseRequest, ResumeRequest, Shortage, SwapIn, SwapOut, TagState, TagStatus,
    Transition, Verb,
};

/// What a swap will do.
pub struct Swap {
    leaving: Plan,
    coming: Plan,
    room: Vec<Room>,
    passing: Option<Passing>,
}

/// The memory of a GPU that changes hands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The GPU's UUID.
    pub uuid: String,
    /// Bytes free before.
    pub free: u64,
    /// Bytes that OUT gives back there.
    pub leaving: u64,
    /// Of those, bytes that OUT gives back at the commit, because others have them open or registered.
    pub late: u64,
    /// Bytes that IN needs there, at least.
    pub coming: u64,
    /// Bytes that IN may need there.
    coming_at_most: u64,
    /// Of those, bytes that may get contents.
    kept_at_most: u64,
}

/// The result of a swap.
#[derive(Debug)]
pub struct Swapped {
    /// For OUT.
    pub left: Outcome,
    /// For IN.
    pub came: Outcome,
    /// Whether the jobs have changed places; otherwise, what had begun was undone.
    pub committed: bool,
    /// Where the jobs are, if they have not changed places, or if IN has ended since.
    pub whereabouts: Option<String>,
    /// If host memory has passed from IN to OUT: the most bytes of it for the contents of both at a time.
    pub host_peak: Option<u64>,
}

impl Swap {
    /// Finds the processes and plans. Changes nothing. `leaving`: OUT's pause, with hold. `coming`: IN's resume.
    pub fn plan(leaving: Operation, coming: Operation, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        if leaving.pause.hold == Hold::No {
            return Err(usage("a swap holds the job that leaves"));
        }
        let mut plans = parallel::each_well([leaving, coming], |operation| Plan::again(operation, reporter)).into_iter();
        let mut next = || plans.next().unwrap_or_else(|| Err(usage("a swap is of two jobs")));
        let (leaving, coming) = (next()?, next()?);
        let out: BTreeSet<_> = leaving.processes().map(|process| process.pid).collect();
        if let Some(both) = coming.processes().find(|process| out.contains(&process.pid)) {
            return Err(usage(format!("{both} is meant as the one that leaves and as the one that comes")));
        }
        if let Some(suspended) = leaving.processes().chain(coming.processes()).find(|process| process.suspended().is_some()) {
            let text =
                format!("{suspended} is suspended. A swap is of tags; pause the one job, then resume the other. Nothing has changed");
            return Err(CommandError::new(Exit::Failed, text));
        }
        let forecast = leaving.forecast();
        let room = room(&leaving, &forecast, &coming);
        if let Some(short) = room.iter().find(|room| room.coming > (room.free + room.leaving).saturating_sub(room.late)) {
            let holders = driver::holders_of(&short.uuid);
            return Err(short.refusal(holders).adding(". Nothing has changed"));
        }
        let free = room.iter().map(|room| (&*room.uuid, room.free)).collect();
        let passing = Passing::of(&leaving, &coming, &forecast, &free)?;
        Ok(Self { leaving, coming, room, passing })
    }

    /// The plans of OUT and IN.
    pub fn plans(&self) -> [&Plan; 2] {
        [&self.leaving, &self.coming]
    }

    /// A dry run: what would leave, what would come, and the GPUs on which that is.
    pub fn forecast(&self) -> (Vec<Forecast>, Vec<(&Process, u64)>, &[Room]) {
        let coming = self.coming.processes().map(|process| (process, coming_bytes(process, self.coming.request()))).collect();
        (self.leaving.forecast(), coming, &self.room)
    }

    /// How host memory passes from IN to OUT, if the host has no room for the contents of both.
    pub fn passing(&self) -> Option<&Passing> {
        self.passing.as_ref()
    }

    /// Asks the engines of OUT, as before a pause.
    pub fn consent(&self, reporter: &dyn Reporter) -> Result<Consent, CommandError> {
        self.leaving.consent(reporter)
    }

    /// Has the jobs change places, or leaves both as they are.
    pub fn run(&self, consent: &Consent, reporter: &dyn Reporter) -> Swapped {
        let Self { leaving, coming, passing, .. } = self;
        let (nobody_asked, mut job) = (Consent::default(), leaving.as_one_job(consent));
        let others = coming.as_one_job(&nobody_asked);
        let host = passing.as_ref().map(|_| self.next_piece_within());
        let needed = match host {
            None => self.room.iter().map(|room| (room.uuid.clone(), room.needed())).collect(),
            // Each waits for the other's memory piece by piece, so nothing may be held back.
            Some(_) => BTreeMap::new(),
        };
        if let (JobRequest::Pause(pause), JobRequest::Resume(resume)) = (&job.request, &others.request) {
            job.request = JobRequest::Swap(
                PauseRequest { swap: Some(SwapOut { needed, host }), ..pause.clone() },
                ResumeRequest { swap: Some(SwapIn { host: host.is_some() }), timeout: Some(self.next_piece_within()), ..resume.clone() },
            );
        }
        job.is_whole &= others.is_whole;
        job.ticket.clone_from(&others.ticket);
        let count = job.ranks.len();
        job.ranks.extend(others.ranks);
        let figures = leaving.figures();
        let mut report = job.run(reporter);
        let committed = report.committed;
        let came = report.share(count);
        let (left, came) = (leaving.outcome_as_one(report), coming.outcome_as_one(came));
        let taken = left.processes.iter().filter_map(|one| one.report()).map(|report| report.host_taken_bytes).max();
        let host_peak = passing.as_ref().zip(taken).map(|(passing, taken)| passing.given + taken);
        let mut swapped = Swapped { left, came, committed, whereabouts: None, host_peak };
        figures.send(swapped.left.paused(), reporter);
        self.after_deaths(&mut swapped, reporter);
        swapped
    }

    /// How long IN waits for the next piece of memory: the time left for OUT's work (at least 10 s), and the time that a slow link takes for all
    /// of OUT's memory.
    fn next_piece_within(&self) -> Duration {
        const SLOWEST_PER_SECOND: u64 = 1 << 30;
        const AT_LEAST: Duration = Duration::from_secs(10);
        let bytes: u64 = self.room.iter().map(|room| room.leaving).sum();
        let left = self.leaving.operation().deadline.left().unwrap_or_default();
        AT_LEAST.max(left) + Duration::from_secs(bytes / SLOWEST_PER_SECOND)
    }

    /// Says where the jobs are, unless both are where they should be. If one of them has ended as a whole, brings the other one back.
    fn after_deaths(&self, swapped: &mut Swapped, reporter: &dyn Reporter) {
        let Self { leaving, coming, .. } = self;
        if swapped.committed {
            swapped.whereabouts = has_ended(coming).then(|| format!("{} has ended; {}", who(coming), self.bring(leaving, reporter).0));
            return;
        }
        swapped.whereabouts = match (has_ended(leaving), has_ended(coming)) {
            (true, false) => {
                let (text, came) = self.bring(coming, reporter);
                swapped.came = came.unwrap_or_else(|| std::mem::take(&mut swapped.came));
                Some(format!("{} has ended; {text}", who(leaving)))
            }
            _ => Some(format!("{}, {}", after_undoing(leaving), stays(coming))),
        };
    }

    /// Resumes what a plan pauses or resumes, and says whether that job runs.
    fn bring(&self, plan: &Plan, reporter: &dyn Reporter) -> (String, Option<Outcome>) {
        // The driver may not have cleared the memory of the job that has ended yet.
        let deadline = Deadline::new(Some(self.next_piece_within()));
        let came = plan.resume_of_due(deadline).map(|plan| plan.run(&Consent::default(), reporter));
        // It ran before, with all that was meant.
        let nothing_to_come = plan.operation().verb == Verb::Resume && plan.due_tags().is_empty();
        let runs = came.as_ref().map_or(nothing_to_come, |came| came.processes.iter().all(|one| one.result.is_ok()));
        let text = match () {
            () if has_ended(plan) => format!("{} has ended, too", who(plan)),
            () if runs => format!("{} runs", who(plan)),
            () => format!("{} is paused, with its contents; to bring it back: `{}`", who(plan), resume_command(plan)),
        };
        (text, came)
    }
}

impl Swapped {
    /// The exit code, for all interfaces.
    pub fn exit(&self) -> Exit {
        self.failure().map_or_else(|| self.left.exit().or(self.came.exit()), |failure| failure.exit())
    }

    /// Why they have not changed places, or no longer have, with what became of them. `None` if they have.
    pub fn failure(&self) -> Option<CommandError> {
        let failures =
            [&self.left, &self.came].into_iter().flat_map(|outcome| &outcome.processes).filter_map(|one| one.result.as_ref().err());
        match (CommandError::original(failures), &self.whereabouts) {
            (first, None) => first.cloned(),
            (Some(first), Some(whereabouts)) => Some(first.clone().adding(&format!(". {whereabouts}"))),
            (None, Some(whereabouts)) => Some(CommandError::new(Exit::Failed, whereabouts)),
        }
    }
}

impl Room {
    /// How much memory IN needs there.
    fn needed(&self) -> Needed {
        // IN's contexts, page tables and rounding take some more.
        let beyond_free = |bytes: u64| if bytes > self.free { bytes - self.free + self.coming_at_most / 32 } else { 0 };
        Needed { for_contents: beyond_free(self.kept_at_most), for_all: beyond_free(self.coming_at_most) }
    }

    /// The swap is refused, because IN would not fit. `holders`: who else has memory there.
    fn refusal(&self, holders: Vec<Holder>) -> CommandError {
        let (index, free) = (self.index(), (self.free + self.leaving).saturating_sub(self.late));
        let device = index.map_or(-1, |index| index as i32);
        let shortage = Shortage { device, uuid: Some(self.uuid.clone()), index, needed: self.coming, free, holders };
        CommandError::from(&Error::DeviceMemory(shortage)).saying(self.to_string())
    }

    /// The GPU's index in `nvidia-smi`, if NVML says it. To load NVML takes a while.
    pub fn index(&self) -> Option<u32> {
        driver::index_of(&self.uuid)
    }
}

impl std::fmt::Display for Room {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { uuid, free, leaving, late, coming, coming_at_most, .. } = self;
        let at_least = if coming < coming_at_most { "at least " } else { "" };
        let [free, leaving, late, coming] = [*free, *leaving, *late, *coming].map(Bytes);
        let late =
            if late.0 > 0 { format!(" ({late} of them at the commit, because others have it open or registered)") } else { String::new() };
        let gpu = self.index().map_or_else(|| uuid.clone(), |index| format!("GPU {index} ({uuid})"));
        write!(out, "{gpu}: {at_least}{coming} would come, {leaving} would leave{late}, and {free} are free")
    }
}

fn usage(why: impl Into<String>) -> CommandError {
    CommandError::new(Exit::Usage, why)
}

/// The tags of a process that a resume means, and the bytes that it brings back of each.
fn coming_tags<'a>(process: &'a Process, request: &Transition) -> impl Iterator<Item = (&'a TagStatus, u64)> {
    let tags = &request.selection().tags;
    let is_meant = |tag: &&TagStatus| tags.is_empty() || tags.contains(&tag.tag);
    let comes = |tag: &TagStatus| match request.scheduler() {
        Some(_) => tag.away_bytes,
        None if request.self_paused() => tag.paused_bytes,
        None => tag.coming_bytes(),
    };
    process.tags().iter().filter(is_meant).map(move |tag| (tag, comes(tag)))
}

fn coming_bytes(process: &Process, request: &Transition) -> u64 {
    coming_tags(process, request).map(|(_, bytes)| bytes).sum()
}

/// What changes hands on each GPU, as the processes see it. Where they do not know what is free, only the attempt shows whether there is room.
/// `forecast`: of OUT's pause.
fn room(leaving: &Plan, forecast: &[Forecast], coming: &Plan) -> Vec<Room> {
    let mut rooms = BTreeMap::<String, Room>::new();
    for process in leaving.processes() {
        let Ok(status) = &process.status else { continue };
        let request = leaving.request();
        let planned = forecast.iter().find(|one| one.process.pid == process.pid).and_then(|one| one.plan.as_ref());
        for device in &status.memory.devices {
            let not_meant = device.tags.iter().filter(|(tag, _)| !request.selection().selects(tag)).map(|(_, bytes)| bytes).sum();
            // An older library does not say it by GPU.
            let by_status = GpuPlan { bytes: device.active_bytes.saturating_sub(not_meant), late_bytes: 0 };
            if let Some(room) = room_on(&mut rooms, device, leaving) {
                let planned = planned.filter(|plan| !plan.gpus.is_empty() || plan.tags.is_empty());
                let goes = planned.map_or(by_status, |plan| plan.gpus.get(&room.uuid).copied().unwrap_or_default());
                room.leaving += goes.bytes;
                room.late += goes.late_bytes;
            }
        }
    }
    for process in coming.processes() {
        let Ok(status) = &process.status else { continue };
        let all: u64 = status.memory.devices.iter().map(|device| device.paused_bytes).sum();
        let comes = coming_bytes(process, coming.request());
        let kept: u64 =
            coming_tags(process, coming.request()).filter(|(tag, _)| tag.host_bytes + tag.disk_bytes > 0).map(|(_, bytes)| bytes).sum();
        for device in &status.memory.devices {
            if let Some(room) = room_on(&mut rooms, device, coming) {
                if coming.request().scheduler().is_some() {
                    room.coming += device.away_bytes;
                    room.coming_at_most += device.away_bytes;
                    room.kept_at_most += kept.min(device.away_bytes);
                    continue;
                }
                // A process does not report on which GPU the paused memory of a tag was.
                let elsewhere = all - device.paused_bytes;
                room.coming += comes.saturating_sub(elsewhere).min(device.paused_bytes);
                room.coming_at_most += comes.min(device.paused_bytes);
                room.kept_at_most += kept.min(device.paused_bytes);
            }
        }
    }
    rooms.into_values().filter(|room| room.leaving + room.coming > 0).collect()
}

/// The room on a GPU. `None` if it is not of the plan, or its process does not know it.
fn room_on<'a>(rooms: &'a mut BTreeMap<String, Room>, device: &DeviceStatus, plan: &Plan) -> Option<&'a mut Room> {
    let uuid = device.uuid.clone().filter(|uuid| plan.wants(uuid))?;
    let empty = Room { uuid: uuid.clone(), free: device.free_bytes?, leaving: 0, late: 0, coming: 0, coming_at_most: 0, kept_at_most: 0 };
    Some(rooms.entry(uuid).or_insert(empty))
}

/// The jobs of a plan, in words, and which processes they have lost, unless they have ended as a whole.
fn who(plan: &Plan) -> String {
    let jobs: BTreeSet<_> = plan.processes().map(Process::job_or_itself).collect();
    let jobs = jobs.into_iter().collect::<Vec<_>>().join(", ");
    let (ended, live): (Vec<_>, Vec<_>) = plan.processes().map(|process| process.pid).partition(|pid| plan.found().has_ended(*pid));
    if ended.is_empty() || live.is_empty() {
        return jobs;
    }
    let ended: Vec<_> = ended.iter().map(ToString::to_string).collect();
    format!("{jobs} (without pid {}, which has ended)", ended.join(", "))
}

/// The processes of a plan that live, as they are now.
fn now(plan: &Plan) -> Vec<Process> {
    let pids: Vec<_> = plan.processes().map(|process| process.pid).filter(|pid| !plan.found().has_ended(*pid)).collect();
    plan.found().look_again(&pids)
}

fn has_ended(plan: &Plan) -> bool {
    plan.processes().all(|process| plan.found().has_ended(process.pid))
}

fn resume_command(plan: &Plan) -> String {
    plan.target().command("resume")
}

/// How OUT is after an undone swap.
fn after_undoing(plan: &Plan) -> String {
    if has_ended(plan) {
        return format!("{} has ended", who(plan));
    }
    let due = plan.due_tags();
    let is_away = |process: &Process| {
        let is_away = |tag: &TagStatus| due.contains(&*tag.tag) && (tag.state.is_under_way() || tag.paused_bytes > tag.self_paused_bytes);
        process.status.is_err() || process.tags().iter().any(is_away)
    };
    let away: Vec<_> = now(plan).into_iter().filter(is_away).map(|process| process.to_string()).collect();
    if away.is_empty() {
        return format!("{} runs on", who(plan));
    }
    let (away, command) = (away.join(", "), resume_command(plan));
    format!(
        "{away} is not back as a whole, because its memory was taken meanwhile or it does not answer; nothing is lost: it comes back once it \
         answers and has room, or with `{command}`"
    )
}

/// How IN is after an undone swap.
fn stays(plan: &Plan) -> String {
    if has_ended(plan) {
        return format!("{} has ended", who(plan));
    }
    let due = plan.due_tags();
    if due.is_empty() {
        return format!("{} runs, too", who(plan));
    }
    let is_half_here = |process: &Process| process.tags().iter().any(|tag| due.contains(&*tag.tag) && tag.state != TagState::Paused);
    let half_here: Vec<_> = now(plan).into_iter().filter(is_half_here).map(|process| process.to_string()).collect();
    if half_here.is_empty() {
        return format!("{} stays paused, with its contents", who(plan));
    }
    format!(
        "{} stays held, with its contents, and is not paused as a whole, because its host memory was taken meanwhile; nothing is lost: the rest is \
         paused once the host has room",
        half_here.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_lacks_what_does_not_fit_into_free_memory_and_some_more() {
        const GIB: u64 = 1 << 30;
        let room = |free: u64| Room {
            uuid: String::new(),
            free: free * GIB,
            leaving: 47 * GIB,
            late: 0,
            coming: 16 * GIB,
            coming_at_most: 32 * GIB,
            kept_at_most: 20 * GIB,
        };
        let gib = |gib: u64, more: u64| (gib + more) * GIB;
        assert_eq!(room(40).needed(), Needed { for_contents: 0, for_all: 0 });
        assert_eq!(room(30).needed(), Needed { for_contents: 0, for_all: gib(2, 1) });
        assert_eq!(room(15).needed(), Needed { for_contents: gib(5, 1), for_all: gib(17, 1) });
    }
}
