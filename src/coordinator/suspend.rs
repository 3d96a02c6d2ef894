//! Suspends jobs, and brings suspended ones back before a resume.

use crate::Observer;
use crate::checkpoint::{self, Checkpoint, Done, Member};
use crate::failure::{CommandError, Exit};
use crate::forecast::Forecast;
use crate::nccl::ChosenCommunicators;
use crate::operation::Operation;
use crate::outcome::{Outcome, ProcessOutcome};
use crate::plan::Plan;
use crate::processes::{Found, Process, Target, check_whole};
use crate::retry::{Deadline, Patience};
use crate::shared::{self, Borrower};
use std::thread;
use std::time::Duration;
use vramctl_control::protocol::Transition;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_model::{Bytes, Kind, Report, TagState};

/// What a suspend will do.
pub struct Suspend {
    target: Target,
    checkpoint: Checkpoint,
    request: Transition,
    communicators: ChosenCommunicators,
    /// Those to hold as well, if that is wanted.
    borrowers: Option<Vec<Borrower>>,
}

impl Suspend {
    /// Finds the processes and plans. Changes nothing.
    pub fn plan(operation: &Operation, observer: &dyn Observer) -> Result<Self, CommandError> {
        let Operation { target, ranks, deadline, pause, .. } = operation;
        let found = Found::look(target)?;
        let checkpoint = whole(&found, target, *ranks, observer)?;
        let request = pause.request(deadline);
        let communicators = if pause.nccl { checkpoint.choose_communicators()? } else { ChosenCommunicators::default() };
        let lent = || shared::find(&found, shared::lent_by(&found, &checkpoint.pids(), &request));
        let borrowers = pause.shared.then(lent).transpose()?;
        let held = checkpoint.pids().into_iter().chain(borrowers.iter().flatten().map(|borrower| borrower.process.pid));
        pause.check_not_held(held)?;
        Ok(Self { target: target.clone(), checkpoint, request, communicators, borrowers })
    }

    /// Which processes are meant.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// A dry run: what would be paused, and what prevents a suspend.
    pub fn forecast(&mut self, observer: &dyn Observer) -> Result<Vec<Forecast>, CommandError> {
        self.communicators.note_what_is_left(observer);
        let borrowers = self.borrowers.iter().flatten();
        let request = Transition { borrowers: borrowers.clone().map(|borrower| borrower.process.pid).collect(), ..self.request.clone() };
        let own = self.checkpoint.forecast(&request, observer).map_err(|failure| self.advise(failure))?;
        let own = own.into_iter().map(|one| one.with_communicators(&self.communicators));
        Ok(own.chain(borrowers.map(|borrower| Forecast::borrower(&borrower.process, borrower.bytes))).collect())
    }

    /// Holds and pauses the tags, then has the driver take the rest. If only that fails, the tags stay paused.
    pub fn run(mut self, observer: &dyn Observer) -> Result<Outcome, CommandError> {
        // Loading the driver takes a while, so it happens during the pause.
        let gpus = self.checkpoint.found.gpus();
        let loading = thread::spawn(move || checkpoint::load(gpus));
        let mut patience = Patience::new(self.request.hold_ms.map(Duration::from_millis).unwrap_or_default());
        let borrowers = self.borrowers.take();
        let paused = self.checkpoint.pause(&self.request, &self.communicators, borrowers, &mut patience, observer);
        let held = paused.map_err(|failure| self.advise(failure))?;
        let Checkpoint { found, members, .. } = &self.checkpoint;
        found.tell_what_nvml_counts(members.iter().filter(|member| member.done.bytes() > 0).map(|member| &member.process));
        held.iter().for_each(|(process, report)| observer.done(&shared::text(process, report)));
        self.communicators.note_what_is_left(observer);
        members.iter().flat_map(Member::failures_of_nccl).for_each(|why| observer.fail(&why));
        let loaded = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let able = self.checkpoint.can_be_taken(observer).and(loaded);
        match able.and_then(|()| self.checkpoint.take(&mut patience, observer)) {
            Ok(()) => Ok(outcome(self.checkpoint, held)),
            Err(failure) if failure.is(Kind::Leased) => Err(failure.adding(". What is paused stays paused until `vramctl resume`")),
            Err(failure) => Err(failure.adding(&self.only_paused())),
        }
    }

    fn advise(&self, failure: CommandError) -> CommandError {
        let might_help = failure.is(Kind::Shared) && self.borrowers.is_none();
        failure.adding(if might_help { ". To suspend only this, and hold those that have it open, add --shared" } else { "" })
    }

    /// The state after the driver's refusal.
    fn only_paused(&self) -> String {
        let Checkpoint { found, members, .. } = &self.checkpoint;
        let left: u64 = members.iter().map(Member::left_alone).sum();
        let given: u64 = members.iter().map(Member::given_back).sum();
        let given = if given > 0 { format!("; NCCL has given back {}", Bytes(given)) } else { String::new() };
        let libraries = if left > 0 { format!(" and {} of libraries", Bytes(left)) } else { String::new() };
        let resumed = resumed_meanwhile(found, &self.checkpoint.pids());
        let paused = match resumed.len() {
            0 => "All tags are paused".into(),
            all if all == members.len() => format!("Resumed meanwhile: {}", resumed.join(", ")),
            _ => format!("Resumed meanwhile: {}. All other tags are paused", resumed.join(", ")),
        };
        format!(". {paused}{given}; the CUDA context{libraries} may still be on the GPU. `vramctl resume` brings back what was taken")
    }
}

/// The processes of a suspend or move. Fails if some of their job are missing.
pub(crate) fn whole(found: &Found, target: &Target, ranks: Option<usize>, observer: &dyn Observer) -> Result<Checkpoint, CommandError> {
    let checkpoint = Checkpoint::of(found, target)?;
    if !matches!(target, Target::Pid(_)) || ranks.is_some() {
        check_whole(checkpoint.members.iter().map(|member| &member.process), true, ranks, observer)?;
    }
    Ok(checkpoint)
}

/// What came of a suspend or move.
pub(crate) fn outcome(checkpoint: Checkpoint, held: Vec<(Process, Report)>) -> Outcome {
    let own =
        |member: Member| ProcessOutcome { device: Some(member.done), ..ProcessOutcome::borrower(member.process, Ok(Report::default())) };
    let borrower = |(process, report)| ProcessOutcome::borrower(process, Ok(report));
    let processes = checkpoint.members.into_iter().map(own).collect();
    Outcome { processes, borrowers: held.into_iter().map(borrower).collect(), jobs: Vec::new() }
}

/// Those whose memory another operation has brought back since it was paused.
fn resumed_meanwhile(found: &Found, pids: &[u32]) -> Vec<String> {
    // A held program may allocate, so a tag that is not paused is not enough.
    let runs = |process: &&Process| !process.is_held() && process.tags().iter().any(|tag| tag.state != TagState::Paused);
    found.look_again(pids).iter().filter(runs).map(ToString::to_string).collect()
}

/// Restores those of these processes that do not answer because the driver has locked or checkpointed them without their libraries' knowledge.
/// Returns whether there were any.
pub(crate) fn free_stuck(found: &Found, target: &Target, deadline: &Deadline, observer: &dyn Observer) -> Result<bool, CommandError> {
    let Ok(chosen) = found.choose(target) else { return Ok(false) };
    let mut stuck = Checkpoint::stuck(found, &chosen);
    if stuck.members.is_empty() {
        return Ok(false);
    }
    stuck.restore(&GpuMap::new(), deadline, observer).map_err(|failure| {
        let is_short = failure.exit() == Exit::NoMemory;
        let why = if is_short { ". A process that does not answer may need as much as it has in host memory, on any GPU" } else { "" };
        failure.adding(&format!("{why}. Processes that are not back stay suspended; `vramctl resume` tries again"))
    })?;
    for member in &stuck.members {
        let why = "did not answer because the driver had locked or checkpointed it; it is restored";
        observer.note(&format!("{} {why}", member.process));
    }
    Ok(true)
}

impl Plan {
    /// Before a resume: waits for a turn in the queue and brings the suspended processes back to their GPUs. Returns the plan for what is left
    /// to resume.
    pub fn bring_back(self, observer: &dyn Observer) -> Result<Self, CommandError> {
        let mut turn = self.queue(observer)?;
        let (found, target) = (self.found(), self.target());
        if found.choose(target)?.iter().all(|process| process.suspended().is_none()) {
            return Ok(self);
        }
        let mut checkpoint = Checkpoint::of(found, target)?;
        checkpoint.members.retain(|member| member.process.suspended().is_some());
        checkpoint.can_be_seen()?;
        checkpoint::load(found.gpus())?;
        // The memory on other GPUs stays paused, so it needs no room.
        let tags_on = self.request().tags.is_empty().then_some(&*self.request().gpus);
        let deadline = &self.operation().deadline;
        let restored = checkpoint.restore_with_room(&GpuMap::new(), tags_on, deadline, turn.as_mut(), observer);
        restored.map_err(|failure| {
            let lost = checkpoint.members.iter().filter(|member| member.is_lost).count();
            failure.adding(match checkpoint.members.len() - lost {
                0 => "",
                _ if lost > 0 => ". Any others that are not back stay suspended; `vramctl resume` tries again",
                _ => ". Processes that are not back stay suspended, and nothing is lost; `vramctl resume` tries again",
            })
        })?;
        for Member { process, done, .. } in &checkpoint.members {
            observer.done(&format!("restored {process} {}", done.took()));
        }
        let restored: Vec<(u32, Done)> = checkpoint.members.into_iter().map(|member| (member.process.pid, member.done)).collect();
        let mut rest = Self::again(self.into_operation(), observer)?;
        rest.restored = restored.into_iter().collect();
        rest.turn = turn;
        Ok(rest)
    }
}
