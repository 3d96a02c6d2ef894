//! What an operation has done, also if it was interrupted, and the way back.

use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::job::JobReport;
use crate::operation::{HowToPause, Operation};
use crate::outcome::{self, JobOutcome, Outcome, ProcessOutcome};
use crate::parallel::Joined;
use crate::patience::INTERRUPTION_NOTICED_WITHIN;
use crate::plan::{Plan, ProcessPlan, any_members, is_due, without_borrowers};
use crate::processes::Process;
use crate::shared::{Borrower, Group};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::thread;
use std::time::Instant;
use vramctl_model::{Report, ResumeRequest, Selection, TagStatus, Transition, Verb};

/// How an interrupted operation leaves a process.
#[derive(Debug, PartialEq)]
pub enum Left {
    /// It is being undone; the tag has its progress.
    Undoing(Box<TagStatus>),
    /// It is complete.
    Done,
    /// Nothing has changed.
    AsItWas,
    /// Why nobody knows.
    Unknown(String),
}

impl Plan {
    /// A thread that panicked has no report.
    pub(super) fn outcome(&self, reports: Vec<Joined<JobReport>>) -> Outcome {
        let verb = self.operation.verb;
        let (mut results, mut outcome) = (BTreeMap::new(), Outcome::default());
        for (group, report) in self.groups.iter().zip(reports) {
            let Ok(report) = report else { continue };
            let processes: Vec<_> = group.members.iter().map(|place| &self.members[*place].process).collect();
            outcome.jobs.push(JobOutcome::new(&processes, &report));
            let JobReport { results: own, borrowers, committed, .. } = report;
            results.extend(group.members.iter().copied().zip(own.into_iter().map(|result| outcome::result(result, verb, committed))));
            outcome.borrowers.extend(
                borrowers
                    .into_iter()
                    .map(|(borrower, result)| ProcessOutcome::borrower(borrower.process, outcome::result(result, verb, committed))),
            );
        }
        let unasked = |member: &ProcessPlan| {
            let broken = CommandError::new(Exit::Failed, "vramctl itself failed here; please report it");
            if member.meant.is_empty() { Ok(Report::default()) } else { Err(broken) }
        };
        let of_process = |(place, member): (usize, &ProcessPlan)| ProcessOutcome {
            process: member.process.clone(),
            tags: member.meant.clone(),
            due: member.changing(&self.request),
            device: self.restored.get(&member.process.pid).cloned(),
            result: results.remove(&place).unwrap_or_else(|| unasked(member)),
        };
        outcome.processes = self.members.iter().enumerate().map(of_process).collect();
        outcome
    }

    /// The outcome of [`as_one_job`](Self::as_one_job).
    pub(crate) fn outcome_as_one(&self, report: JobReport) -> Outcome {
        let JobReport { results, borrowers, committed, attempts, ms, waited } = report;
        let (mut results, mut borrowers) = (results.into_iter(), Some(borrowers));
        let of_group = |group: &Group<Borrower>| JobReport {
            results: results.by_ref().take(group.members.len()).collect(),
            borrowers: borrowers.take().unwrap_or_default(),
            committed,
            attempts,
            ms,
            waited,
        };
        let reports = self.groups.iter().map(of_group).map(Ok).collect();
        self.outcome(reports)
    }

    /// How an operation whose connections have been closed leaves its processes. Requests that only wait are cancelled by that; processes
    /// notice it within this time.
    pub fn left_behind(&self) -> Vec<(&Process, Left)> {
        let asked: Vec<_> = self.members.iter().filter(|member| !member.meant.is_empty()).collect();
        let pids: Vec<_> = asked.iter().map(|member| member.process.pid).collect();
        let deadline = Instant::now() + INTERRUPTION_NOTICED_WITHIN;
        loop {
            let now = self.found.look_again(&pids);
            let found = |member: &ProcessPlan| now.iter().find(|process| process.pid == member.process.pid);
            let left: Vec<_> = asked.iter().map(|member| member.left(&self.request, found(member))).collect();
            // It may be just about to start.
            if !left.contains(&Left::AsItWas) || Instant::now() >= deadline {
                return asked.into_iter().map(|member| &member.process).zip(left).collect();
            }
            thread::sleep(INTERRUPTION_NOTICED_WITHIN / 10);
        }
    }

    /// The plan of a resume of what this one was to change, for those of its processes that still answer. `None` if that is nothing.
    pub(crate) fn resume_of_due(&self, deadline: Deadline) -> Option<Self> {
        let tags: Vec<_> = self.due_tags().into_iter().map(str::to_owned).collect();
        let selection = Selection { lenient: true, tags, gpus: self.request.selection().gpus.clone(), nccl: false };
        let self_paused = self.request.self_paused();
        let scheduler = self.operation.scheduler;
        let request = Transition::Resume(ResumeRequest { selection, self_paused, scheduler, ..ResumeRequest::default() });
        let pids: Vec<_> = self.processes().map(|process| process.pid).collect();
        let answering = self.found.look_again(&pids).into_iter().filter(|process| process.status.is_ok()).collect();
        let operation = Operation { verb: Verb::Resume, deadline, pause: HowToPause::default(), ..self.operation.clone() };
        let mut plan = Self {
            operation,
            found: self.found.clone(),
            target: self.target.clone(),
            members: any_members(answering, &request),
            groups: Vec::new(),
            request,
            is_whole: false,
            command: RandomState::new().build_hasher().finish(),
            queue_place: None,
            restored: BTreeMap::new(),
        };
        plan.groups = without_borrowers(plan.jobs());
        (!plan.request.selection().tags.is_empty() && !plan.groups.is_empty()).then_some(plan)
    }
}

impl ProcessPlan {
    /// The state in which an interrupted operation leaves the process.
    fn left(&self, request: &Transition, now: Option<&Process>) -> Left {
        let status = match now.map(|process| &process.status) {
            Some(Ok(status)) => status,
            Some(Err(failure)) => return Left::Unknown(failure.to_string()),
            None => return Left::Unknown("the process has ended".into()),
        };
        let meant: Vec<_> = status.memory.tags.iter().filter(|tag| self.meant.contains(&tag.tag)).collect();
        match meant.iter().find(|tag| tag.state.is_under_way()) {
            Some(tag) => Left::Undoing(Box::new((*tag).clone())),
            None if !meant.iter().any(|tag| is_due(tag, request)) => Left::Done,
            None => Left::AsItWas,
        }
    }
}
