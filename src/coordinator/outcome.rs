//! The result of an operation.

use crate::failure::{CommandError, Exit};
use crate::job::JobReport;
use crate::processes::Process;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;
use vramctl_control::client::ClientError;
use vramctl_model::{Borrowed, Report, Verb};

/// The result of an operation.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The selected processes, in order.
    pub processes: Vec<ProcessOutcome>,
    /// The borrowers that were held as well.
    pub borrowers: Vec<ProcessOutcome>,
    /// The jobs.
    pub jobs: Vec<JobOutcome>,
}

impl Outcome {
    /// All processes that took part.
    pub fn all(&self) -> impl Iterator<Item = &ProcessOutcome> {
        self.processes.iter().chain(&self.borrowers)
    }

    /// The exit code, for all interfaces: a program that stays held, or has lost something, is no success.
    pub fn exit(&self) -> Exit {
        let otherwise = match () {
            () if self.all().any(|one| !one.has_lost().is_empty()) => Exit::Failed,
            () if self.processes.iter().any(|one| !one.stays_held().is_empty()) => Exit::Busy,
            () => Exit::Done,
        };
        let cause = CommandError::original(self.all().filter_map(|one| one.result.as_ref().err()));
        cause.map_or(otherwise, CommandError::exit)
    }

    /// The processes of which a pause has taken memory.
    pub fn paused(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|one| one.report().is_some_and(|report| report.allocations > 0)).map(|one| &one.process)
    }
}

/// The result for one process.
#[derive(Debug)]
pub struct ProcessOutcome {
    /// As it was before.
    pub process: Process,
    /// Its selected tags.
    pub tags: Vec<String>,
    /// Those of them that were not in the wanted state yet.
    pub due: Vec<String>,
    /// What the driver's checkpoint did: for a suspend, all of it; for a resume, how it was restored before its tags.
    pub device: Option<Done>,
    /// What was done to its tags.
    pub result: Result<Report, CommandError>,
}

impl ProcessOutcome {
    /// Its report, if it did not fail.
    pub fn report(&self) -> Option<&Report> {
        self.result.as_ref().ok()
    }

    /// Why the program stays held after this.
    pub fn stays_held(&self) -> Vec<String> {
        let of_tags = self.report().map(|report| &report.missing);
        let of_device = self.device.as_ref().map(|done| &done.missing);
        of_tags.into_iter().chain(of_device).flat_map(|missing| stays_held(&self.process, missing)).collect()
    }

    /// What the program has lost.
    pub fn has_lost(&self) -> Vec<String> {
        let lost = self.report().into_iter().flat_map(|report| &report.lost);
        lost.chain(self.device.iter().flat_map(|done| &done.lost)).map(|lost| self.process.has_lost(lost)).collect()
    }

    /// A borrower's.
    pub fn borrower(process: Process, result: Result<Report, CommandError>) -> Self {
        Self { process, tags: Vec::new(), due: Vec::new(), device: None, result }
    }
}

/// What was done to one process.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// Bytes of its tags that were paused or resumed.
    pub tag_bytes: u64,
    /// Bytes of the rest that were checkpointed or restored.
    pub rest_bytes: u64,
    /// Memory of other processes: after a resume, what is not back yet, so the program stays held; of a borrower, what it has set aside.
    pub missing: Vec<Borrowed>,
    /// Memory of other processes that it has lost.
    pub lost: Vec<Borrowed>,
    /// After a move: the GPUs that it is on, by their indices.
    pub now_on: Vec<u32>,
    /// Milliseconds in each step, in order.
    pub(crate) stages: Vec<(&'static str, f64)>,
}

impl Serialize for Done {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stages: BTreeMap<_, _> = self.stages.iter().copied().collect();
        let mut report =
            json!({ "bytes": self.bytes(), "tag_bytes": self.tag_bytes, "rest_bytes": self.rest_bytes, "stages": stages, "ms": self.ms() });
        if !self.missing.is_empty() {
            report["missing"] = json!(self.missing);
        }
        if !self.lost.is_empty() {
            report["lost"] = json!(self.lost);
        }
        report.serialize(serializer)
    }
}

impl Done {
    /// A borrower's.
    pub fn of_borrower(report: &Report) -> Self {
        let Report { bytes, missing, ms, .. } = report;
        Self { tag_bytes: *bytes, missing: missing.clone(), stages: vec![(Verb::Pause.name(), *ms)], ..Self::default() }
    }

    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.tag_bytes + self.rest_bytes
    }

    pub(crate) fn add(&mut self, stage: &'static str, took: Duration) {
        self.stages.push((stage, took.as_secs_f64() * 1e3));
    }

    /// The total; the steps run one after another.
    pub fn ms(&self) -> f64 {
        self.stages.iter().map(|(_, ms)| ms).sum()
    }

    /// The times as text.
    pub fn took(&self) -> String {
        let stages: Vec<_> = self.stages.iter().map(|(stage, ms)| format!("{stage} {ms:.0}")).collect();
        format!("in {:.0} ms\n  {} ms", self.ms(), stages.join(", "))
    }
}

/// The result for a job as a whole.
#[derive(Debug)]
pub struct JobOutcome {
    /// Its name.
    pub job: Option<String>,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Whether all of it is done; else nothing is.
    pub committed: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// From the request until the last process was done.
    pub ms: f64,
}

impl JobOutcome {
    /// From its report.
    pub fn new(processes: &[&Process], report: &JobReport) -> Self {
        Self {
            job: processes.first().and_then(|process| process.job()).map(str::to_owned),
            pids: processes.iter().map(|process| process.pid).collect(),
            committed: report.committed,
            attempts: report.attempts,
            ms: report.ms,
        }
    }
}

/// A process's result. `committed`: whether its job as a whole is done.
pub fn result(result: Result<Report, ClientError>, verb: Verb, committed: bool) -> Result<Report, CommandError> {
    result.map_err(|error| {
        let is_stopped = matches!(&error, ClientError::Io { error, .. } if error.kind() == ErrorKind::TimedOut);
        let later = format!("; the {} of its job is complete, and this process completes it when it continues", verb.name());
        CommandError::from(error).adding(if committed && is_stopped { &later } else { "" })
    })
}

/// Why a program stays held after a resume: other processes' memory is missing.
pub fn stays_held(process: &Process, missing: &[Borrowed]) -> Vec<String> {
    missing.iter().map(|missing| process.stays_held(missing)).collect()
}
