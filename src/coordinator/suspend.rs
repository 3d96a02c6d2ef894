//! Suspends jobs: pauses their tags, then has the driver take the rest.

use crate::Observer;
use crate::checkpoint::{self, Checkpoint, Member};
use crate::failure::CommandError;
use crate::forecast::Forecast;
use crate::nccl::ChosenCommunicators;
use crate::operation::Operation;
use crate::outcome::{Outcome, ProcessOutcome};
use crate::processes::{Found, Process, Target};
use crate::retry::Patience;
use crate::shared::{self, Borrower};
use std::thread;
use vramctl_model::{Bytes, Kind, Report, TagState, TransitionRequest};

/// What a suspend will do.
pub struct Suspend {
    target: Target,
    checkpoint: Checkpoint,
    request: TransitionRequest,
    communicators: ChosenCommunicators,
    /// Those to hold as well, if that is wanted.
    borrowers: Option<Vec<Borrower>>,
}

impl Suspend {
    /// Finds the processes and plans. Changes nothing.
    pub fn plan(operation: &Operation, observer: &dyn Observer) -> Result<Self, CommandError> {
        let Operation { target, ranks, deadline, pause, .. } = operation;
        let found = Found::look_on(operation.machine, target)?;
        let checkpoint = Checkpoint::of(&found, target)?;
        checkpoint.check_whole(*ranks, observer)?;
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
        let request =
            TransitionRequest { borrowers: borrowers.clone().map(|borrower| borrower.process.pid).collect(), ..self.request.clone() };
        let own = self.checkpoint.forecast(&request, observer).map_err(|failure| self.advise(failure))?;
        let own = own.into_iter().map(|one| one.with_communicators(&self.communicators));
        Ok(own.chain(borrowers.map(|borrower| Forecast::borrower(&borrower.process, borrower.bytes))).collect())
    }

    /// Holds and pauses the tags, then has the driver take the rest. If only that fails, the tags stay paused.
    pub fn run(mut self, observer: &dyn Observer) -> Result<Outcome, CommandError> {
        // Loading the driver takes a while, so it happens during the pause.
        let machine = self.checkpoint.found.machine();
        let loading = thread::spawn(move || checkpoint::load(machine));
        let mut patience = Patience::new(self.request.hold.unwrap_or_default());
        let borrowers = self.borrowers.take();
        let paused = self.checkpoint.pause(&self.request, &self.communicators, borrowers, &mut patience, observer);
        let held = paused.map_err(|failure| self.advise(failure))?;
        let Checkpoint { found, members, .. } = &self.checkpoint;
        found.tell_what_nvml_counts(members.iter().filter(|member| member.done.bytes() > 0).map(|member| &member.process));
        for (process, report) in &held {
            observer.done(&shared::text(process, report));
        }
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
        let left: u64 = members.iter().map(Member::unmanaged).sum();
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
