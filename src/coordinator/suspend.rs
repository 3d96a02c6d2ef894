//! Suspends jobs: pauses their tags, then has the driver take the rest.

use crate::Reporter;
use crate::checkpoint::{self, Checkpoint, Member, Transitioned};
use crate::deadline::Deadline;
use crate::failure::CommandError;
use crate::figures::Figures;
use crate::forecast::Forecast;
use crate::operation::Operation;
use crate::outcome::{Outcome, ProcessOutcome};
use crate::parallel;
use crate::processes::{Found, Process, Target};
use crate::shared::{self, Borrower};
use vramctl_model::{Bytes, Kind, Participants, PauseRequest, Report, TagState};

/// What a suspend will do.
pub struct Suspend {
    target: Target,
    checkpoint: Checkpoint,
    request: PauseRequest,
    /// Those to hold as well, if that is wanted.
    borrowers: Option<Vec<Borrower>>,
}

impl Suspend {
    /// Finds the processes and plans. Changes nothing.
    pub fn plan(operation: &Operation, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let Operation { target, ranks, deadline, pause, .. } = operation;
        let found = Found::look_in_turn(target, deadline)?;
        let checkpoint = Checkpoint::of(&found, target)?.with_ranks_elsewhere(&pause.everywhere);
        checkpoint.check_whole(*ranks, reporter)?;
        let request = pause.request(deadline);
        let borrowers = pause.shared.then(|| shared::find(&found, shared::lent_by(&found, &checkpoint.pids(), &request))).transpose()?;
        let held = checkpoint.pids().into_iter().chain(borrowers.iter().flatten().map(|borrower| borrower.process.pid));
        pause.check_not_held(held)?;
        Ok(Self { target: target.clone(), checkpoint, request, borrowers })
    }

    /// Which processes are meant.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// A dry run: what would be paused, and what prevents a suspend.
    pub fn forecast(&mut self, reporter: &dyn Reporter) -> Vec<Forecast> {
        let own = self.checkpoint.forecast(&self.wanted(), reporter).into_iter();
        let own = own.map(|one| Forecast { failure: one.failure.map(|failure| self.advise(failure)), ..one });
        let borrowers = self.borrowers.iter().flatten();
        own.chain(borrowers.map(|borrower| Forecast::borrower(&borrower.process, borrower.bytes))).collect()
    }

    /// Fails if the driver could not restore the processes. Nothing has changed then.
    pub fn check(mut self, reporter: &dyn Reporter) -> Result<Restorable, CommandError> {
        let failed = |failure: CommandError| failure.adding(". Nothing has changed; `vramctl pause` frees the tags");
        self.checkpoint.check_restorable(&self.wanted(), reporter).map_err(failed)?;
        Ok(Restorable(self))
    }

    /// With those that are held as well.
    fn wanted(&self) -> PauseRequest {
        let borrowers = self.borrowers.iter().flatten().map(|borrower| borrower.process.pid).collect();
        PauseRequest { participants: Participants { partners: Vec::new(), borrowers }, ..self.request.clone() }
    }

    fn run(mut self, reporter: &dyn Reporter) -> Result<Outcome, CommandError> {
        // Loading the driver takes a while, so it happens during the pause.
        let loading = parallel::spawn(checkpoint::load);
        let figures = Figures::prepare(&self.checkpoint.found, self.checkpoint.members.iter().map(|member| &member.process));
        let borrowers = self.borrowers.take();
        let paused = self.checkpoint.pause(&self.request, borrowers, reporter);
        let taken = self.checkpoint.members.iter().filter(|member| member.done.bytes() > 0);
        figures.send(taken.map(|member| &member.process), reporter);
        let Transitioned { borrowers: held, waited } = paused.map_err(|failure| self.advise(failure))?;
        for (process, report) in &held {
            reporter.done(&shared::text(process, report));
        }
        let loaded =
            loading.map_or_else(|_| checkpoint::load(), |loading| loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        // Neither the pause itself nor loading the driver counts.
        let deadline = Deadline::new(self.request.hold).after(waited);
        match loaded.and_then(|()| self.checkpoint.leave_gpus(deadline, reporter)) {
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
        let libraries = if left > 0 { format!(" and {} of libraries", Bytes(left)) } else { String::new() };
        let resumed = resumed_meanwhile(found, &self.checkpoint.pids());
        let paused = match resumed.len() {
            0 => "All tags are paused".into(),
            all if all == members.len() => format!("Resumed meanwhile: {}", resumed.join(", ")),
            _ => format!("Resumed meanwhile: {}. All other tags are paused", resumed.join(", ")),
        };
        format!(". {paused}; the CUDA context{libraries} may still be on the GPU. `vramctl resume` brings back what was taken")
    }
}

/// A suspend of processes that the driver can restore, as far as they know.
pub struct Restorable(Suspend);

impl Restorable {
    /// Holds and pauses the tags, then has the driver take the rest. If only that fails, the tags stay paused.
    pub fn run(self, reporter: &dyn Reporter) -> Result<Outcome, CommandError> {
        self.0.run(reporter)
    }
}

/// The outcome of a suspend or move.
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
