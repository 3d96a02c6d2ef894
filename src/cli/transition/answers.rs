//! The results of a pause or resume, as text and as JSON.

use super::task::Task;
use crate::failure::CommandError;
use crate::nccl;
use crate::output;
use crate::processes::{Found, Process};
use crate::shared;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::io::ErrorKind;
use vramctl_control::client::ClientError;
use vramctl_control::job::JobReport;
use vramctl_model::{Bytes, Report, Trimmed, Verb};

/// The result for one process.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub pid: u32,
    pub name: Option<String>,
    pub tags: Vec<String>,
    /// For a suspended process: how it was restored to the GPU, before its tags were resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restored: Option<Value>,
    /// With `--trim`: what its own allocator returned before the pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trimmed: Option<Trimmed>,
    #[serde(flatten)]
    pub result: Answer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    Report(Report),
    Error(CommandError),
}

/// The result for a job.
#[derive(Debug, Serialize)]
pub struct JobOutcome {
    pub job: Option<String>,
    pub pids: Vec<u32>,
    pub committed: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// From the request until the last process was done.
    pub ms: f64,
}

impl JobOutcome {
    pub fn of(processes: &[&Process], done: &JobReport) -> Self {
        Self {
            job: processes[0].job().map(str::to_owned),
            pids: processes.iter().map(|process| process.pid).collect(),
            committed: done.committed,
            attempts: done.attempts,
            ms: done.ms,
        }
    }

    fn text(&self, direction: Verb, outcomes: &[Outcome]) -> String {
        let reports = outcomes.iter().filter(|outcome| self.pids.contains(&outcome.pid)).filter_map(|outcome| outcome.result.report());
        let (done, bytes) = reports.fold((0, 0), |(done, bytes), report| (done + 1, bytes + report.bytes));
        let (did, moved) = match direction {
            Verb::Pause => ("paused", "freed"),
            Verb::Resume => ("resumed", "allocated"),
        };
        let job = self.job.as_deref().unwrap_or_default();
        let all = self.pids.len();
        let processes = if done == all { format!("{all} processes") } else { format!("{done} of {all} processes") };
        let mut text = format!("{did} job {job}: {processes}, {} {moved}, {} ms", Bytes(bytes), whole(self.ms));
        if self.attempts > 1 {
            let _ = write!(text, ", {} attempts", self.attempts);
        }
        text
    }
}

impl Answer {
    /// `committed`: whether the job as a whole is done.
    pub fn of(result: Result<Report, ClientError>, direction: Verb, committed: bool) -> Self {
        match result {
            Ok(report) => Self::Report(report),
            Err(error) => {
                let is_stopped = matches!(&error, ClientError::Io { error, .. } if error.kind() == ErrorKind::TimedOut);
                let later = format!("; the {} of its job is complete, and this process completes it when it continues", direction.name());
                Self::Error(CommandError::from(error).adding(if committed && is_stopped { &later } else { "" }))
            }
        }
    }

    pub fn report(&self) -> Option<&Report> {
        match self {
            Self::Report(report) => Some(report),
            Self::Error(_) => None,
        }
    }

    pub fn failure(&self) -> Option<&CommandError> {
        match self {
            Self::Report(_) => None,
            Self::Error(failure) => Some(failure),
        }
    }
}

/// Tells the user.
pub struct Telling {
    pub direction: Verb,
    /// Only of errors.
    pub quiet: bool,
    /// Whether only the memory of some GPUs is selected.
    pub on_some_gpus: bool,
}

impl Telling {
    pub fn tell(&self, task: &Task, answer: &Answer, found: &Found) -> Result<(), CommandError> {
        match answer {
            Answer::Report(report) => {
                if !self.quiet {
                    output::say(&success(self.direction, task, report, self.on_some_gpus))?;
                }
                if let Some(text) = nccl::success(self.direction, &task.process, &report.communicators).filter(|_| !self.quiet) {
                    output::say(&text)?;
                }
                for why in nccl::failures(&task.process, &report.communicators) {
                    output::complain("error", &why);
                }
                if report.late_bytes > 0 {
                    let late = Bytes(report.late_bytes);
                    let text = format!("{}: the driver has not taken {late} back yet; every pause and resume retries", task.process);
                    output::complain("warning", &text);
                }
                for text in guard_warnings(report) {
                    output::complain("warning", &format!("{}: {text}", task.process));
                }
                for missing in &report.missing {
                    output::complain("error", &task.process.stays_held(missing));
                }
            }
            Answer::Error(failure) => {
                output::complain("error", &format!("{}: {failure}", task.process));
                for hint in hints(&found.look_again(&holders(failure))) {
                    output::complain("hint", &hint);
                }
            }
        }
        Ok(())
    }

    /// Prints the result of a borrower.
    pub fn tell_along(&self, process: &Process, answer: &Answer) -> Result<(), CommandError> {
        match answer {
            Answer::Report(report) if !self.quiet => output::say(&shared::text(process, report)),
            Answer::Report(_) => Ok(()),
            Answer::Error(failure) => {
                output::complain("error", &format!("{process}: {failure}"));
                Ok(())
            }
        }
    }

    /// Prints the result of a job as a whole.
    pub fn tell_job(&self, job: &JobOutcome, outcomes: &[Outcome]) -> Result<(), CommandError> {
        if job.committed {
            return if self.quiet { Ok(()) } else { output::say(&job.text(self.direction, outcomes)) };
        }
        let name = job.job.as_deref().unwrap_or_default();
        let left = match self.direction {
            Verb::Pause => "nothing was paused; its processes go on as before",
            Verb::Resume => "nothing was resumed; its processes stay as they were, and can be resumed again",
        };
        output::complain("note", &format!("job {name}: {left}"));
        Ok(())
    }
}

fn success(direction: Verb, task: &Task, report: &Report, on_some_gpus: bool) -> String {
    let process = &task.process;
    if report.allocations == 0 {
        let state = direction.end().name();
        return match &task.meant[..] {
            // A tag's state covers all GPUs.
            [_, ..] if on_some_gpus => format!("nothing to do: {process} has nothing there to {}", direction.name()),
            [] if process.has_memory() => format!("nothing to do: {process} has none of these tags"),
            [] => format!("nothing to do: {process} has no managed memory"),
            [tag] => format!("nothing to do: {tag} of {process} is already {state}"),
            tags => format!("nothing to do: {} of {process} are already {state}", tags.join(", ")),
        };
    }
    // If nothing was due, the state of a matching tag has changed since.
    let tags = if task.due.is_empty() { &task.meant } else { &task.due }.join(", ");
    let (did, moved, kept, discarded) = match direction {
        Verb::Pause => ("paused", "freed", "kept", "discarded"),
        Verb::Resume => ("resumed", "allocated", "restored", "zeroed"),
    };
    let mut text = format!("{did} {tags} of {process}: {} {moved} in {} ms", Bytes(report.bytes), whole(report.ms));
    let stages: Vec<_> = report.stages.iter().map(|(stage, ms)| format!("{} {}", stage.name(), whole(*ms))).collect();
    if !stages.is_empty() {
        let _ = write!(text, " ({})", stages.join(", "));
    }
    let unchanged = "of that unchanged and not copied again";
    let contents = [(report.kept_bytes, kept), (report.unchanged_bytes, unchanged), (report.discarded_bytes, discarded)];
    let contents: Vec<_> =
        contents.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, fate)| format!("{} {fate}", Bytes(*bytes))).collect();
    if !contents.is_empty() {
        let _ = write!(text, "; {}", contents.join(", "));
    }
    if report.guarded_bytes > 0 {
        let _ = write!(text, "; {} guarded by {} on the GPU", Bytes(report.guarded_bytes), Bytes(report.guard_bytes));
    }
    text
}

/// Warnings about guards.
fn guard_warnings(report: &Report) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.unguarded_bytes > 0 {
        warnings.push(format!(
            "{} are paused without a guard, for which there was no memory: GPU work that touches them destroys the CUDA context",
            Bytes(report.unguarded_bytes)
        ));
    }
    if report.guard_written_bytes > 0 {
        warnings.push(format!(
            "something wrote to paused memory: {} of its guard has changed. What is resumed is as it was; what was written is lost, \
             and what was read there was garbage. Pause without --no-hold, or when the program is idle",
            Bytes(report.guard_written_bytes)
        ));
    }
    warnings
}

/// Milliseconds, rounded.
fn whole(ms: f64) -> String {
    format!("{ms:.0}")
}

/// The processes that hold the missing memory.
fn holders(failure: &CommandError) -> Vec<u32> {
    let CommandError::Refused(refusal) = failure else { return Vec::new() };
    refusal.shortage.iter().flat_map(|shortage| &shortage.holders).map(|holder| holder.pid).collect()
}

/// For a shortage: the holders that can be paused.
fn hints(holders: &[Process]) -> Vec<String> {
    let hint = |process: &Process| {
        let bytes = Bytes(process.active_bytes());
        format!("{process} is managed too; `vramctl pause --pid {}` frees {bytes}", process.pid)
    };
    holders.iter().filter(|process| process.active_bytes() > 0).map(hint).collect()
}

#[cfg(test)]
mod tests {
    use super::super::task::plan;
    use super::*;
    use crate::failure::Exit;
    use crate::processes::tests::process;
    use vramctl_control::protocol::Refusal;
    use vramctl_model::{Error, Holder, Shortage, Stage, TagState};

    fn names(tags: &[&str]) -> Vec<String> {
        tags.iter().map(ToString::to_string).collect()
    }

    fn engine(state: TagState) -> Process {
        process(4711, "engine", &[("kv_cache", state), ("weights", state)])
    }

    #[test]
    fn a_success_reports_bytes_and_milliseconds() {
        let tasks = plan(Verb::Pause, vec![engine(TagState::Active)], &[]).unwrap();
        let report = Report {
            allocations: 3,
            bytes: 40 << 30,
            kept_bytes: 38 << 30,
            discarded_bytes: 2 << 30,
            unchanged_bytes: 0,
            unchanged: 0,
            late_bytes: 0,
            missing: Vec::new(),
            guarded_bytes: 0,
            unguarded_bytes: 0,
            guard_bytes: 0,
            guard_written_bytes: 0,
            communicators: Vec::new(),
            stages: [(Stage::Wait, 3.2), (Stage::Save, 850.4), (Stage::Unmap, 19.8), (Stage::Release, 38.9)].into(),
            ms: 912.3,
        };
        assert_eq!(
            success(Verb::Pause, &tasks[0], &report, false),
            "paused kv_cache, weights of engine (pid 4711): 40.00 GiB freed in 912 ms (wait 3, save 850, unmap 20, release 39); \
             38.00 GiB kept, 2.00 GiB discarded"
        );
        let tasks = plan(Verb::Resume, vec![engine(TagState::Paused)], &names(&["weights"])).unwrap();
        let report = Report { stages: [(Stage::Map, 1.0)].into(), discarded_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Resume, &tasks[0], &report, false),
            "resumed weights of engine (pid 4711): 40.00 GiB allocated in 912 ms (map 1); 38.00 GiB restored"
        );
        assert!(guard_warnings(&report).is_empty());
        let guarded = Report { guarded_bytes: 40 << 30, guard_bytes: 62 << 20, kept_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Pause, &tasks[0], &guarded, false),
            "paused weights of engine (pid 4711): 40.00 GiB freed in 912 ms (map 1); 40.00 GiB guarded by 62.00 MiB on the GPU"
        );
        let stray = guard_warnings(&Report { unguarded_bytes: 1 << 30, guard_written_bytes: 4096, ..Report::default() });
        assert!(stray[0].starts_with("1.00 GiB are paused without a guard"), "{stray:?}");
        assert!(stray[1].starts_with("something wrote to paused memory: 4.00 KiB of its guard"), "{stray:?}");
    }

    #[test]
    fn nothing_to_do_is_reported() {
        let text = |process: Process, tags: &[&str]| {
            let other = self::process(1, "other", &[("x", TagState::Active)]);
            let tasks = plan(Verb::Pause, vec![process, other], &names(tags)).unwrap();
            success(Verb::Pause, &tasks[0], &Report::default(), false)
        };
        assert_eq!(text(engine(TagState::Paused), &[]), "nothing to do: kv_cache, weights of engine (pid 4711) are already paused");
        assert_eq!(text(engine(TagState::Paused), &["weights"]), "nothing to do: weights of engine (pid 4711) is already paused");
        assert_eq!(text(engine(TagState::Active), &["x"]), "nothing to do: engine (pid 4711) has none of these tags");
        assert_eq!(text(process(2, "idle", &[]), &[]), "nothing to do: idle (pid 2) has no managed memory");
    }

    #[test]
    fn a_holder_under_vramctl_can_be_paused() {
        let holder = |pid| Holder { pid, bytes: None, program: None };
        let shortage = Shortage { device: 0, uuid: None, needed: 2, free: 1, holders: vec![holder(7), holder(8)] };
        let failure = CommandError::Refused(Box::new(Refusal::from(&Error::DeviceMemory(shortage))));
        assert_eq!(failure.exit(), Exit::NoMemory);
        assert_eq!(holders(&failure), [7, 8]);
        let paused = process(7, "paused", &[("x", TagState::Paused)]);
        let active = process(8, "trainer", &[("x", TagState::Paused), ("y", TagState::Active)]);
        assert_eq!(hints(&[paused, active]), ["trainer (pid 8) is managed too; `vramctl pause --pid 8` frees 1.00 GiB"]);
    }
}
