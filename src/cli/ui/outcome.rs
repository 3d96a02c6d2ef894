//! The outcome of an operation, as text and as JSON.

use crate::ui::Ui;
use crate::ui::output;
use serde_json::{Value, json};
use std::fmt::Write;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::outcome::{Done, JobOutcome, ProcessOutcome};
use vramctl_coordinator::processes::Process;
use vramctl_coordinator::{Hold, Operation, Outcome, Plan, Reporter, Scope, Swapped, shared};
use vramctl_model::{Bytes, Kind, Registered, Report, Verb};

/// Prints the outcome. Returns the exit code.
pub fn print(plan: &Plan, outcome: &Outcome, ui: &Ui) -> Result<Exit, CommandError> {
    let written = if ui.json {
        let jobs: Vec<_> = outcome.jobs.iter().map(job_json).collect();
        output::answer(json!({ "processes": outcome.all().map(process_json).collect::<Vec<_>>(), "jobs": jobs }))
    } else {
        write(plan, outcome, ui)
    };
    output::told(written, outcome.exit())
}

/// Writes it as text. What stdout does not take, such as that of a full disk, keeps nothing from stderr.
pub fn write(plan: &Plan, outcome: &Outcome, ui: &Ui) -> Result<(), CommandError> {
    let on_some_gpus = matches!(&plan.operation().scope, Scope::Tags { gpus, .. } if !gpus.is_empty());
    let printing = Printing { plan, quiet: ui.quiet, on_some_gpus };
    let processes = outcome.processes.iter().map(|one| printing.process(one));
    let borrowers = outcome.borrowers.iter().map(|one| printing.borrower(one));
    let jobs = outcome.jobs.iter().filter(|job| job.pids.len() > 1).map(|job| printing.job(job, &outcome.processes));
    processes.chain(borrowers).chain(jobs).fold(Ok(()), Result::and)
}

/// The outcome for a process, as JSON.
pub fn process_json(one: &ProcessOutcome) -> Value {
    let mut answer = json!({ "pid": one.process.pid, "name": one.process.name(), "tags": one.tags });
    if let Some(done) = &one.device {
        answer["restored"] = json!(done);
    }
    match &one.result {
        Ok(report) => answer["report"] = json!(report),
        Err(failure) => answer["error"] = json!(failure),
    }
    answer
}

/// The outcome for a job, as JSON.
pub fn job_json(JobOutcome { job, pids, committed, attempts, ms }: &JobOutcome) -> Value {
    json!({ "job": job, "pids": pids, "committed": committed, "attempts": attempts, "ms": ms })
}

/// Prints the outcome of a suspend or move, as JSON or one line per process from `line`. Returns the exit code.
pub fn print_device(outcome: &Outcome, ui: &Ui, line: impl Fn(&Process, &Done) -> String) -> Result<Exit, CommandError> {
    let own = || outcome.processes.iter().filter_map(|one| Some((&one.process, one.device.as_ref()?)));
    let held: Vec<_> = outcome.processes.iter().flat_map(ProcessOutcome::stays_held).collect();
    let lost: Vec<_> = outcome.processes.iter().flat_map(ProcessOutcome::has_lost).collect();
    let written = if ui.json {
        let answer = |process: &Process, done: &Done| json!({ "pid": process.pid, "name": process.name(), "report": done });
        let borrowers = outcome.borrowers.iter().filter_map(|one| Some(answer(&one.process, &Done::of_borrower(one.report()?))));
        output::json(&own().map(|(process, done)| answer(process, done)).chain(borrowers).collect::<Vec<_>>())
    } else {
        let written = own().filter(|_| !ui.quiet).try_for_each(|(process, done)| output::say(&line(process, done)));
        for why in held.iter().chain(&lost) {
            ui.fail(why);
        }
        written
    };
    output::told(written, outcome.exit())
}

/// As JSON, without a failure of both.
pub fn swap_json(swapped: &Swapped) -> Value {
    let (mut processes, mut jobs) = (Vec::new(), Vec::new());
    for (verb, Outcome { processes: all, borrowers, jobs: of }) in [(Verb::Pause, &swapped.left), (Verb::Resume, &swapped.came)] {
        let with_verb = |mut answer: Value| {
            answer["verb"] = json!(verb.name());
            answer
        };
        processes.extend(all.iter().chain(borrowers).map(|one| with_verb(process_json(one))));
        jobs.extend(of.iter().map(|job| with_verb(job_json(job))));
    }
    let mut answer = json!({ "committed": swapped.committed, "processes": processes, "jobs": jobs });
    if let Some(whereabouts) = &swapped.whereabouts {
        answer["whereabouts"] = json!(whereabouts);
    }
    if let Some(peak) = swapped.host_peak {
        answer["host_peak_bytes"] = json!(peak);
    }
    answer
}

fn job_text(verb: Verb, job: &JobOutcome, processes: &[ProcessOutcome]) -> String {
    let reports = processes.iter().filter(|one| job.pids.contains(&one.process.pid)).filter_map(ProcessOutcome::report);
    let (done, bytes) = reports.fold((0, 0), |(done, bytes), report| (done + 1, bytes + report.bytes));
    let (did, moved) = match verb {
        Verb::Pause => ("paused", "freed"),
        Verb::Resume => ("resumed", "allocated"),
    };
    let name = job.job.as_deref().unwrap_or_default();
    let all = job.pids.len();
    let count = if done == all { format!("{all} processes") } else { format!("{done} of {all} processes") };
    let mut text = format!("{did} job {name}: {count}, {} {moved}, {} ms", Bytes(bytes), whole(job.ms));
    if job.attempts > 1 {
        let _ = write!(text, ", {} attempts", job.attempts);
    }
    text
}

/// As text.
struct Printing<'a> {
    plan: &'a Plan,
    /// Only errors.
    quiet: bool,
    /// Whether only the memory of some GPUs is selected.
    on_some_gpus: bool,
}

impl Printing<'_> {
    fn verb(&self) -> Verb {
        self.plan.operation().verb
    }

    /// Whether all that was due is registered memory, which was to be kept.
    fn has_left_out(&self, one: &ProcessOutcome, report: &Report) -> bool {
        let keeps = self.verb() == Verb::Pause && self.plan.operation().pause.options.registered == Registered::Keep;
        keeps && report.allocations == 0 && !one.due.is_empty()
    }

    fn process(&self, one: &ProcessOutcome) -> Result<(), CommandError> {
        let process = &one.process;
        let mut written = Ok(());
        match &one.result {
            Ok(report) => {
                if !self.quiet {
                    let mut text = if self.has_left_out(one, report) {
                        format!("nothing was paused: {} of {process} is registered, or others have it open", one.due.join(", "))
                    } else {
                        success(self.verb(), one, report, self.on_some_gpus)
                    };
                    if self.is_held_from_now_on(process, report) {
                        text += "; the program is held from now on";
                    }
                    written = output::say(&text);
                }
                if report.late_bytes > 0 {
                    let late = Bytes(report.late_bytes);
                    let text = format!("{process}: the driver has not taken {late} back yet; every pause and resume retries");
                    output::complain("warning", &text);
                }
                for text in guard_warnings(report).into_iter().chain(refusals(report)) {
                    output::complain("warning", &format!("{process}: {text}"));
                }
                for why in report.missing.iter().map(|missing| process.stays_held(missing)).chain(one.has_lost()) {
                    output::complain("error", &why);
                }
            }
            Err(failure) => {
                output::complain("error", &format!("{process}: {failure}"));
                for hint in hints(process, &self.plan.found().look_again(&holders(failure))) {
                    output::complain("hint", &hint);
                }
            }
        }
        written
    }

    /// Whether a pause that has taken nothing holds a program that has paused all of it itself.
    fn is_held_from_now_on(&self, process: &Process, report: &Report) -> bool {
        let Operation { verb, pause, .. } = self.plan.operation();
        let has_taken_nothing = *verb == Verb::Pause && report.allocations == 0 && report.unchanged > 0;
        has_taken_nothing && pause.hold != Hold::No && !process.is_held()
    }

    fn borrower(&self, one: &ProcessOutcome) -> Result<(), CommandError> {
        match &one.result {
            Ok(report) if !self.quiet => output::say(&shared::text(&one.process, report)),
            Ok(_) => Ok(()),
            Err(failure) => {
                output::complain("error", &format!("{}: {failure}", one.process));
                Ok(())
            }
        }
    }

    fn job(&self, job: &JobOutcome, processes: &[ProcessOutcome]) -> Result<(), CommandError> {
        if job.committed {
            return if self.quiet { Ok(()) } else { output::say(&job_text(self.verb(), job, processes)) };
        }
        let name = job.job.as_deref().unwrap_or_default();
        let mut failures = processes.iter().filter(|one| job.pids.contains(&one.process.pid)).filter_map(|one| one.result.as_ref().err());
        // It has ended, or does not answer.
        let others = if failures.any(|failure: &CommandError| matches!(failure, CommandError::Here { .. }) || failure.is(Kind::Ending)) {
            "other "
        } else {
            ""
        };
        let left = match self.verb() {
            Verb::Pause => format!("nothing was paused; its {others}processes go on as before"),
            Verb::Resume => format!("nothing was resumed; its {others}processes stay as they were, and can be resumed again"),
        };
        output::complain("note", &format!("job {name}: {left}"));
        Ok(())
    }
}

fn success(direction: Verb, one: &ProcessOutcome, report: &Report, on_some_gpus: bool) -> String {
    let process = &one.process;
    if report.allocations == 0 && report.self_paused_bytes > 0 {
        let goes_on = process.is_held() && report.missing.is_empty() && !on_some_gpus;
        let done = if goes_on { format!("{process} is not held any more") } else { "nothing to do".into() };
        return format!("{done}: {}", self_paused(process, report));
    }
    if report.allocations == 0 {
        let state = direction.end().name();
        return match &one.tags[..] {
            // A tag's state covers all GPUs.
            [_, ..] if on_some_gpus => format!("nothing to do: {process} has nothing there to {}", direction.name()),
            [] if process.has_memory() => format!("nothing to do: {process} has none of these tags"),
            [] => format!("nothing to do: {process} has no managed memory"),
            [tag] => format!("nothing to do: {tag} of {process} is already {state}"),
            tags => format!("nothing to do: {} of {process} are already {state}", tags.join(", ")),
        };
    }
    // If nothing was due, the state of a matching tag has changed since.
    let tags = if one.due.is_empty() { &one.tags } else { &one.due }.join(", ");
    let (did, moved) = match direction {
        Verb::Pause => ("paused", "freed"),
        Verb::Resume => ("resumed", "allocated"),
    };
    let mut text = format!("{did} {tags} of {process}: {} {moved} in {} ms", Bytes(report.bytes), whole(report.ms));
    let stages: Vec<_> = report.stages.iter().map(|(stage, ms)| format!("{} {}", stage.name(), whole(*ms))).collect();
    for below in [fate_of_contents(direction, report).join(", "), stages.join(", ")].iter().filter(|below| !below.is_empty()) {
        let _ = write!(text, "\n  {below}");
    }
    if !stages.is_empty() {
        text += " ms";
    }
    if report.self_paused_bytes > 0 {
        let _ = write!(text, "\n  {}", self_paused(process, report));
    }
    text
}

/// What a resume has left, and how to bring it back.
fn self_paused(process: &Process, report: &Report) -> String {
    format!(
        "{} stay paused, because {process} has paused them itself; name their tags to bring them back: vramctl resume --pid {} TAG",
        Bytes(report.self_paused_bytes),
        process.pid
    )
}

/// Where the contents are, or have come from.
fn fate_of_contents(direction: Verb, report: &Report) -> Vec<String> {
    let fates = match direction {
        Verb::Pause => ["kept in host memory", "kept in files", "discarded"],
        Verb::Resume => ["restored from host memory", "restored from files", "not kept, now zero"],
    };
    let in_memory = report.kept_bytes.saturating_sub(report.disk_bytes);
    let contents = [in_memory, report.disk_bytes, report.discarded_bytes].into_iter().zip(fates);
    let unchanged = (report.unchanged_bytes, "unchanged and not copied again");
    let mut texts: Vec<_> =
        contents.chain([unchanged]).filter(|(bytes, _)| *bytes > 0).map(|(bytes, fate)| format!("{} {fate}", Bytes(bytes))).collect();
    if report.guarded_bytes > 0 {
        texts.push(format!("{} guarded by {} on the GPU", Bytes(report.guarded_bytes), Bytes(report.guard_bytes)));
    }
    texts
}

/// Warnings about what the program runs on without.
fn refusals(report: &Report) -> impl Iterator<Item = String> {
    report.refused.iter().map(|what| format!("the memory is back without what the driver refuses: {what}"))
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

/// For a shortage of a process: the holders that can be paused, or change places with it.
fn hints(of: &Process, holders: &[Process]) -> Vec<String> {
    holders
        .iter()
        .filter(|process| process.active_bytes() > 0)
        .map(|process: &Process| {
            let bytes = Bytes(process.active_bytes());
            format!(
                "{process} is managed too; `vramctl pause --pid {0}` frees {bytes}, and `vramctl swap {0} {1}` brings {of} in its place",
                process.pid, of.pid
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_control::protocol::Refusal;
    use vramctl_coordinator::failure::Exit;
    use vramctl_coordinator::process::made_up::process;
    use vramctl_model::{Error, Holder, Shortage, Stage, TagState};

    fn names(tags: &[&str]) -> Vec<String> {
        tags.iter().map(ToString::to_string).collect()
    }

    fn outcome(process: Process, tags: &[&str], due: &[&str]) -> ProcessOutcome {
        ProcessOutcome { tags: names(tags), due: names(due), ..ProcessOutcome::borrower(process, Ok(Report::default())) }
    }

    fn engine(state: TagState) -> Process {
        process(4711, "engine", &[("kv_cache", state), ("weights", state)])
    }

    #[test]
    fn a_success_reports_bytes_and_milliseconds() {
        let both = ["kv_cache", "weights"];
        let paused = outcome(engine(TagState::Active), &both, &both);
        let report = Report {
            allocations: 3,
            bytes: 40 << 30,
            kept_bytes: 38 << 30,
            disk_bytes: 8 << 30,
            discarded_bytes: 2 << 30,
            unchanged_bytes: 0,
            unchanged: 0,
            late_bytes: 0,
            missing: Vec::new(),
            lost: Vec::new(),
            refused: Vec::new(),
            guarded_bytes: 0,
            unguarded_bytes: 0,
            guard_bytes: 0,
            guard_written_bytes: 0,
            host_taken_bytes: 0,
            self_paused_bytes: 0,
            stages: [(Stage::Wait, 3.2), (Stage::Save, 850.4), (Stage::Unmap, 19.8), (Stage::Release, 38.9)].into(),
            ms: 912.3,
        };
        assert_eq!(
            success(Verb::Pause, &paused, &report, false),
            "paused kv_cache, weights of engine (pid 4711): 40.00 GiB freed in 912 ms\n  \
             30.00 GiB kept in host memory, 8.00 GiB kept in files, 2.00 GiB discarded\n  \
             wait 3, save 850, unmap 20, release 39 ms"
        );
        let resumed = outcome(engine(TagState::Paused), &["weights"], &["weights"]);
        let report = Report { stages: [(Stage::Map, 1.0)].into(), discarded_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Resume, &resumed, &report, false),
            "resumed weights of engine (pid 4711): 40.00 GiB allocated in 912 ms\n  \
             30.00 GiB restored from host memory, 8.00 GiB restored from files\n  map 1 ms"
        );
        assert!(guard_warnings(&report).is_empty());
        let guarded = Report { guarded_bytes: 40 << 30, guard_bytes: 62 << 20, kept_bytes: 0, disk_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Pause, &resumed, &guarded, false),
            "paused weights of engine (pid 4711): 40.00 GiB freed in 912 ms\n  40.00 GiB guarded by 62.00 MiB on the GPU\n  map 1 ms"
        );
        let stray = guard_warnings(&Report { unguarded_bytes: 1 << 30, guard_written_bytes: 4096, ..Report::default() });
        assert!(stray[0].starts_with("1.00 GiB are paused without a guard"), "{stray:?}");
        assert!(stray[1].starts_with("something wrote to paused memory: 4.00 KiB of its guard"), "{stray:?}");
    }

    #[test]
    fn nothing_to_do_is_reported() {
        let text = |process, tags: &[&str]| success(Verb::Pause, &outcome(process, tags, &[]), &Report::default(), false);
        assert_eq!(
            text(engine(TagState::Paused), &["kv_cache", "weights"]),
            "nothing to do: kv_cache, weights of engine (pid 4711) are already paused"
        );
        assert_eq!(text(engine(TagState::Paused), &["weights"]), "nothing to do: weights of engine (pid 4711) is already paused");
        assert_eq!(text(engine(TagState::Active), &[]), "nothing to do: engine (pid 4711) has none of these tags");
        assert_eq!(text(process(2, "idle", &[]), &[]), "nothing to do: idle (pid 2) has no managed memory");
    }

    #[test]
    fn a_holder_under_vramctl_can_be_paused() {
        let holder = |pid| Holder { pid, bytes: None, program: None };
        let shortage = Shortage { device: 0, uuid: None, index: None, needed: 2, free: 1, holders: vec![holder(7), holder(8)] };
        let failure = CommandError::Refused(Box::new(Refusal::from(&Error::DeviceMemory(shortage))));
        assert_eq!(failure.exit(), Exit::NoMemory);
        assert_eq!(holders(&failure), [7, 8]);
        let paused = process(7, "paused", &[("x", TagState::Paused)]);
        let active = process(8, "trainer", &[("x", TagState::Paused), ("y", TagState::Active)]);
        let wanted = "trainer (pid 8) is managed too; `vramctl pause --pid 8` frees 1.00 GiB, and `vramctl swap 8 9` brings engine (pid 9) in its \
                      place";
        assert_eq!(hints(&process(9, "engine", &[]), &[paused, active]), [wanted]);
    }
}
