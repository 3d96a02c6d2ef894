//! `vramctl stop`.

use crate::arguments::{ProcessesOrOnly, seconds};
use crate::execute::Execute;
use crate::ui::{Ui, output};
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::address::hidden;
use vramctl_coordinator::audit::Deed;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::HowToPause;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_coordinator::starting::starting;
use vramctl_coordinator::{Consent, Operation, Plan, Scope, proc, text};
use vramctl_model::Verb;

#[derive(clap::Args)]
#[command(after_long_help = "\
Resumes the processes if they are paused or suspended, because a program that stands still could not save anything at its end; then SIGTERM, \
and after --timeout SIGKILL. Those that run end first, and then one job after another that was away comes back, and ends: programs that take \
turns need not fit on the GPU together. What cannot be resumed is left as it is.

Examples:
  vramctl stop engine
  vramctl stop 'eng*' --timeout 60")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// How long they may take to end before they are killed
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    timeout: Duration,
    /// Print errors and warnings only
    #[arg(long, short)]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        if target == Target::Only {
            return Err(CommandError::new(Exit::Usage, "name what to stop, or give --all"));
        }
        let found = Found::look_in_turn(&target, &Deadline::new(None))?;
        let beginning: Vec<_> = starting(&target, &found.processes).into_iter().map(|one| (one.pid, one.to_string())).collect();
        let chosen = found.choose_answering(&target).or_else(|none| if beginning.is_empty() { Err(none) } else { Ok(Vec::new()) })?;
        if let Some(unseen) = chosen.iter().find(|process| hidden(process.pid).is_some()) {
            return Err(CommandError::new(Exit::Failed, format!("{unseen}: it can only be stopped where it runs. Nothing was done")));
        }
        let mut jobs = BTreeMap::<_, Vec<_>>::new();
        for process in chosen {
            jobs.entry(process.job_or_itself()).or_default().push(process);
        }
        let is_away = |job: &Vec<Process>| job.iter().any(|process| process.is_held() || process.suspended().is_some());
        let (away, there): (Vec<_>, Vec<_>) = jobs.into_values().partition(is_away);
        let named = |process: &Process| (process.pid, process.to_string());
        let there: Vec<_> = there.iter().flatten().map(named).chain(beginning).collect();
        if !there.is_empty() {
            self.end(&there)?;
        }
        for (at, job) in away.iter().enumerate() {
            self.resume(job).map_err(|failure| {
                let is_first = there.is_empty() && at == 0;
                failure.adding(if is_first {
                    ". Nothing was stopped: `kill -KILL` ends it without a resume"
                } else {
                    ". It was not stopped: `kill -KILL` ends it without a resume"
                })
            })?;
            self.end(&job.iter().map(named).collect::<Vec<_>>())?;
        }
        Ok(Exit::Done)
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

impl Args {
    /// Ends these, and tells of it.
    fn end(&self, all: &[(u32, String)]) -> Result<(), CommandError> {
        let begun = Instant::now();
        let ended = end(all, self.timeout);
        Deed {
            what: "stop",
            job: all.first().map_or("", |(_, name)| name),
            pids: &all.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(),
            owner: None,
            result: ended.as_ref().map(|_| 0).map_err(ToString::to_string),
            ms: begun.elapsed().as_secs_f64() * 1e3,
        }
        .tell();
        let killed = ended?;
        if !self.quiet {
            for (pid, name) in all {
                output::say(&format!("{} {name}", if killed.contains(pid) { "killed" } else { "stopped" }))?;
            }
        }
        Ok(())
    }

    fn resume(&self, chosen: &[Process]) -> Result<(), CommandError> {
        let ui = Ui::new(false, true);
        let target = Target::of(chosen.iter().map(|process| Target::Pid(process.pid)).collect()).unwrap_or(Target::Only);
        let scope = Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() };
        let operation = Operation::new(Verb::Resume, target, scope, Deadline::new(Some(self.timeout)), HowToPause::default());
        let outcome = Plan::make(operation, &ui)?.restore_suspended(&ui)?.run(&Consent::default(), &ui);
        let failed = CommandError::original(outcome.all().filter_map(|one| one.result.as_ref().err())).cloned();
        failed.map_or(Ok(()), Err)
    }
}

/// Asks them to end, waits for that, and kills those that have not. Returns the killed ones.
fn end(all: &[(u32, String)], within: Duration) -> Result<Vec<u32>, CommandError> {
    const LOOK_EVERY: Duration = Duration::from_millis(50);
    /// A killed process that is in the driver takes a while to end.
    const KILLED_WITHIN: Duration = Duration::from_secs(30);
    let living = || all.iter().filter(|(pid, _)| !proc::has_ended(*pid)).map(|(pid, _)| *pid).collect::<Vec<_>>();
    let mut killed = Vec::new();
    for (signal, limit) in [(libc::SIGTERM, within), (libc::SIGKILL, KILLED_WITHIN)] {
        let begun = Instant::now();
        let due = living();
        if signal == libc::SIGKILL {
            killed.clone_from(&due);
        }
        for pid in due {
            // SAFETY: touches no memory.
            unsafe { libc::kill(pid.cast_signed(), signal) };
        }
        while !living().is_empty() && begun.elapsed() < limit {
            thread::sleep(LOOK_EVERY);
        }
    }
    let left = living();
    if left.is_empty() {
        return Ok(killed);
    }
    let left: Vec<_> = left.iter().map(ToString::to_string).collect();
    Err(CommandError::new(
        Exit::Busy,
        format!("{} {} not ended", text::count(left.len(), "process has", "processes have"), left.join(", ")),
    ))
}
