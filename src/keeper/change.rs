//! Carries out a change of places: some leave while one comes.

use crate::books::Gpus;
use std::collections::BTreeMap;
use std::time::Duration;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Outcome, Plan, Scope, Swap, parallel};
use vramctl_model::{Amounts, Verb};
use vramctl_scheduler::{self as scheduler, Change, Leave, ProgramId};

/// A change in terms of processes.
#[derive(Debug, Clone)]
pub struct Task {
    leaving: Vec<Part>,
    coming: Vec<u32>,
    epoch: u64,
    drain: Duration,
}

/// A gang that leaves.
#[derive(Debug, Clone)]
struct Part {
    /// One of it, for the scheduler.
    program: ProgramId,
    /// What to take of each of its processes. Of some that is nothing: they are held with the others.
    taken: BTreeMap<u32, Amounts>,
}

/// How long the copies of a change may take in all.
const COPIES_WITHIN: Duration = Duration::from_secs(120);

impl Task {
    /// Names the processes of a change. `None`: some of them have ended.
    pub fn of(change: &Change, pids: &BTreeMap<ProgramId, u32>, gpus: &Gpus, epoch: u64, drain: Duration) -> Option<Self> {
        let pid = |program: &ProgramId| pids.get(program).copied();
        let part = |leave: &Leave| {
            let of = |program: &ProgramId| {
                let its = leave.taken.iter().filter(|((of, _), _)| of == program).map(|((_, gpu), holdings)| (*gpu, holdings));
                Some((pid(program)?, gpus.amounts(its)))
            };
            Some(Part { program: *leave.programs.first()?, taken: leave.programs.iter().map(of).collect::<Option<_>>()? })
        };
        let leaving = change.leaving.iter().map(part).collect::<Option<_>>()?;
        Some(Self { leaving, coming: change.coming.iter().map(pid).collect::<Option<_>>()?, epoch, drain })
    }

    /// Does it, or leaves all as it was.
    pub fn run(&self) -> scheduler::Outcome {
        match (&*self.leaving, self.coming.is_empty()) {
            ([one], false) => self.swap(one),
            _ => self.one_after_the_other(),
        }
    }

    fn swap(&self, part: &Part) -> scheduler::Outcome {
        // Without room for both copies, or where one is suspended, one goes before the other comes.
        let Ok(plan) = Swap::plan(self.pause(part), self.resume(&self.coming), &()) else { return self.one_after_the_other() };
        let Ok(consent) = plan.consent(&()) else { return scheduler::Outcome::Refused(part.program) };
        let swapped = plan.run(&consent, &());
        match () {
            () if swapped.committed => scheduler::Outcome::Changed,
            () if failed_for_a_victim(&swapped.left) => scheduler::Outcome::Refused(part.program),
            () => self.one_after_the_other(),
        }
    }

    /// All pauses at once, then the resume. What has been paused comes back if anything fails.
    fn one_after_the_other(&self) -> scheduler::Outcome {
        let paused = parallel::each_well(&self.leaving, |part| (part, run(self.pause(part))));
        let refused = paused.iter().find(|(_, done)| done.is_err()).map(|(part, _)| part.program);
        let outcome = match refused {
            Some(program) => scheduler::Outcome::Refused(program),
            None if self.bring(&self.coming).is_ok() => return scheduler::Outcome::Changed,
            None => scheduler::Outcome::Failed,
        };
        for (part, _) in paused.iter().filter(|(_, done)| done.is_ok()) {
            let _ = self.bring(&part.pids());
        }
        outcome
    }

    fn bring(&self, pids: &[u32]) -> Result<(), CommandError> {
        if pids.is_empty() { Ok(()) } else { run(self.resume(pids)) }
    }

    fn pause(&self, part: &Part) -> Operation {
        let how = HowToPause { hold: Hold::Within(self.drain), ..HowToPause::default() };
        self.operation(Verb::Pause, &part.pids(), Scope::Amounts(part.taken.clone()), how)
    }

    fn resume(&self, pids: &[u32]) -> Operation {
        let scope = Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() };
        self.operation(Verb::Resume, pids, scope, HowToPause::default())
    }

    fn operation(&self, verb: Verb, pids: &[u32], scope: Scope, how: HowToPause) -> Operation {
        let target = Target::of(pids.iter().map(|pid| Target::Pid(*pid)).collect()).unwrap_or(Target::Only);
        Operation { scheduler: Some(self.epoch), ..Operation::new(verb, target, scope, Deadline::new(Some(COPIES_WITHIN)), how) }
    }
}

impl Part {
    fn pids(&self) -> Vec<u32> {
        self.taken.keys().copied().collect()
    }
}

fn run(operation: Operation) -> Result<(), CommandError> {
    let plan = Plan::make(operation, &())?;
    let consent = plan.consent(&())?;
    let outcome = plan.run(&consent, &());
    match CommandError::original(outcome.all().filter_map(|one| one.result.as_ref().err())) {
        Some(failure) => Err(failure.clone()),
        None if outcome.exit() == Exit::Done => Ok(()),
        None => Err(CommandError::new(outcome.exit(), "some of it stays held".to_owned())),
    }
}

/// Whether it was the job that leaves which could not: it did not drain, say.
fn failed_for_a_victim(left: &Outcome) -> bool {
    let failure = CommandError::original(left.all().filter_map(|one| one.result.as_ref().err()));
    failure.is_some_and(|failure| failure.exit() == Exit::Busy)
}
