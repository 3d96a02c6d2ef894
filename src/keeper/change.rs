//! Carries out a change of places: some leave while one comes.

use crate::books::Gpus;
use std::collections::BTreeMap;
use std::time::Duration;
use vramctl_control::client::{Client, ClientError};
use vramctl_control::discovery::Directory;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Outcome, Plan, Scope, Swap, parallel};
use vramctl_model::{Amounts, Class, Kind, Verb};
use vramctl_scheduler::{self as scheduler, Change, Leave, ProgramId};

/// A change in terms of processes.
#[derive(Debug, Clone)]
pub struct Task {
    directory: Directory,
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

/// How a change has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// In the scheduler's terms.
    pub outcome: scheduler::Outcome,
    /// Why, if it has not changed anything.
    pub why: Option<String>,
}

impl Ended {
    /// It has failed for this reason.
    pub fn failed_for(why: &str) -> Self {
        Self { outcome: scheduler::Outcome::Failed, why: Some(why.to_owned()) }
    }

    fn failed(failure: &CommandError) -> Self {
        Self::failed_for(&failure.to_string())
    }

    /// A part's pause has failed.
    fn refused(part: &Part, failure: &CommandError) -> Self {
        let outcome = if is_its_own(failure) { scheduler::Outcome::Refused(part.program) } else { scheduler::Outcome::Failed };
        Self { outcome, ..Self::failed(failure) }
    }
}

/// How long the copies of a change may take in all: whoever comes waits for the room that others leave meanwhile.
const COPIES_WITHIN: Duration = Duration::from_secs(120);
/// How long whoever comes may wait for room that nobody has to leave. If it is not there by then, it was another's, and the scheduler thinks again.
const ROOM_WITHIN: Duration = Duration::from_secs(5);

impl Task {
    /// Names the processes of a change. `None`: some of them have ended.
    pub fn of(
        change: &Change,
        directory: Directory,
        pids: &BTreeMap<ProgramId, u32>,
        gpus: &Gpus,
        epoch: u64,
        drain: Duration,
    ) -> Option<Self> {
        let pid = |program: &ProgramId| pids.get(program).copied();
        let part = |leave: &Leave| {
            let of = |program: &ProgramId| {
                let its = leave.taken.iter().filter(|((of, _), _)| of == program).map(|((_, gpu), holdings)| (*gpu, holdings));
                Some((pid(program)?, gpus.amounts(its)))
            };
            Some(Part { program: *leave.programs.first()?, taken: leave.programs.iter().map(of).collect::<Option<_>>()? })
        };
        let leaving = change.leaving.iter().map(part).collect::<Option<_>>()?;
        Some(Self { directory, leaving, coming: change.coming.iter().map(pid).collect::<Option<_>>()?, epoch, drain })
    }

    /// Does it, or leaves all as it was, and says why.
    pub fn run(&self) -> Ended {
        if let Err(failure) = self.reset_prefix_caches() {
            return Ended::failed(&failure);
        }
        if self.leaving.is_empty() || self.coming.is_empty() { self.one_after_the_other() } else { self.swap() }
    }

    /// Engines whose KV caches are to go without a copy have their prefix caches reset. One that has requests by now keeps its own, which the
    /// scheduler did not count on.
    fn reset_prefix_caches(&self) -> Result<(), CommandError> {
        let is_discarded = |taken: &Amounts| taken.values().flatten().any(|amount| amount.class == Class::Discardable);
        let taken = self.leaving.iter().flat_map(|part| &part.taken);
        let pids: Vec<_> = taken.filter(|(_, taken)| is_discarded(taken)).map(|(pid, _)| *pid).collect();
        let reset = |pid| Client::connect(&self.directory, pid).and_then(|mut process| process.reset_prefix_cache(Some(self.epoch)));
        // The pause itself finds out all else.
        let is_late = |failure: &ClientError| matches!(failure, ClientError::Refused(refusal) if refusal.code == Kind::Busy);
        let failure = parallel::each_well(pids, reset).into_iter().filter_map(Result::err).find(is_late);
        failure.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// All that leave are one side of it: they are prepared together, and have one decision.
    fn swap(&self) -> Ended {
        // Where one is suspended, say, one goes before the other comes.
        let plan = match Swap::plan(self.pause(&self.leaving), self.resume(&self.coming, COPIES_WITHIN), &()) {
            Ok(plan) => plan,
            // The host has no room for the contents of both, and they cannot pass each other: nor can one go first.
            Err(failure) if failure.is(Kind::HostMemory) => return Ended::failed(&failure),
            Err(_) => return self.one_after_the_other(),
        };
        let consent = match plan.consent(&()) {
            Ok(consent) => consent,
            Err(failure) => return self.refused(None, &failure),
        };
        let swapped = plan.run(&consent, &());
        match original(&swapped.left) {
            _ if swapped.committed => Ended { outcome: scheduler::Outcome::Changed, why: None },
            Some(failure) if is_its_own(&failure) => self.refused(refuses(&swapped.left), &failure),
            // One cannot go first: the host has no room for both.
            _ if plan.passing().is_some() => Ended { outcome: scheduler::Outcome::Failed, why: swapped.whereabouts },
            _ => self.one_after_the_other(),
        }
    }

    /// All pauses at once, then the resume. What has been paused comes back if anything fails.
    fn one_after_the_other(&self) -> Ended {
        let paused = parallel::each_well(&self.leaving, |part| (part, run(self.pause(std::slice::from_ref(part)))));
        let refused = paused.iter().find_map(|(part, done)| Some(Ended::refused(part, done.as_ref().err()?)));
        let ended = match refused {
            Some(ended) => ended,
            None => match self.bring(&self.coming) {
                Ok(()) => return Ended { outcome: scheduler::Outcome::Changed, why: None },
                Err(failure) => Ended::failed(&failure),
            },
        };
        for (part, _) in paused.iter().filter(|(_, done)| done.is_ok()) {
            let _ = self.bring(&part.pids());
        }
        ended
    }

    /// A pause has failed because of a process; without one, because of whoever leaves first.
    fn refused(&self, pid: Option<u32>, failure: &CommandError) -> Ended {
        let of_process = |part: &&Part| pid.is_some_and(|pid| part.taken.contains_key(&pid));
        let part = self.leaving.iter().find(of_process).or_else(|| self.leaving.first());
        part.map_or_else(|| Ended::failed(failure), |part| Ended::refused(part, failure))
    }

    fn bring(&self, pids: &[u32]) -> Result<(), CommandError> {
        if pids.is_empty() { Ok(()) } else { run(self.resume(pids, ROOM_WITHIN)) }
    }

    fn pause(&self, parts: &[Part]) -> Operation {
        let how = HowToPause { hold: Hold::Within(self.drain), ..HowToPause::default() };
        let taken: BTreeMap<_, _> = parts.iter().flat_map(|part| part.taken.clone()).collect();
        let pids: Vec<_> = taken.keys().copied().collect();
        self.operation(Verb::Pause, &pids, Scope::Amounts(taken), how, COPIES_WITHIN)
    }

    fn resume(&self, pids: &[u32], room_within: Duration) -> Operation {
        let scope = Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() };
        self.operation(Verb::Resume, pids, scope, HowToPause::default(), room_within)
    }

    fn operation(&self, verb: Verb, pids: &[u32], scope: Scope, how: HowToPause, within: Duration) -> Operation {
        let target = Target::of(pids.iter().map(|pid| Target::Pid(*pid)).collect()).unwrap_or(Target::Only);
        Operation { scheduler: Some(self.epoch), ..Operation::new(verb, target, scope, Deadline::new(Some(within)), how) }
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
    match original(&outcome) {
        Some(failure) => Err(failure),
        None if outcome.exit() == Exit::Done => Ok(()),
        None => Err(CommandError::new(outcome.exit(), "some of it stays held".to_owned())),
    }
}

/// Whether a pause has failed because of the program: it did not drain, say, and not because the host is short of memory.
fn is_its_own(failure: &CommandError) -> bool {
    failure.exit() == Exit::Busy || failure.is(Kind::PrefixCache)
}

/// The first process that has failed because of its program.
fn refuses(outcome: &Outcome) -> Option<u32> {
    outcome.all().find(|one| one.result.as_ref().is_err_and(is_its_own)).map(|one| one.process.pid)
}

fn original(outcome: &Outcome) -> Option<CommandError> {
    CommandError::original(outcome.all().filter_map(|one| one.result.as_ref().err())).cloned()
}
