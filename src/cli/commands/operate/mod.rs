//! `vramctl operate`: one operation for a program, such as Python's `vramctl.Job`. It reads a request from stdin, as JSON, and writes lines
//! of JSON. `docs/protocol.md` describes both.

mod request;

use crate::execute::Execute;
use crate::ledger::Usage;
use crate::ui::lines::Lines;
use crate::ui::outcome::{job_json, process_json, swap_json};
use crate::ui::output;
use request::{Nothing, Request, Which};
use serde_json::{Value, json};
use std::io::{self, BufRead};
use std::process;
use std::sync::Arc;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::nodes::{Aborted, Participant};
use vramctl_coordinator::outcome::{Done, ProcessOutcome};
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_coordinator::{Consent, Left};
use vramctl_coordinator::{Move, Operation, Outcome, Plan, Suspend, Swap, Swapped};
use vramctl_model::Error;

#[derive(clap::Args)]
#[command(after_help = "Runs one operation for a program: docs/protocol.md, \"Operations\".")]
pub struct Args {}

/// The answer to a request.
enum Answer {
    /// Of a pause or resume.
    Tags(Outcome),
    /// Of a swap.
    Places(Box<Swapped>),
    /// Of a suspend or move.
    Device(Outcome),
    /// What was asked for.
    Found(Value),
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map_err(|error| CommandError::new(Exit::Failed, format!("stdin: {error}")))?;
        let request = Request::parse(&line);
        let progress = request.as_ref().is_ok_and(Request::wants_progress);
        let is_detached = request.as_ref().is_ok_and(Request::is_detached);
        let lines = Arc::new(Lines::new(progress, Box::new(|| cancelled(Some(false), &[]))));
        let (request, nodes) = match request.and_then(|request| Ok((request.participant()?, request))) {
            Ok((nodes, request)) => (Ok(request), nodes),
            Err(failure) => (Err(failure), None),
        };
        let (cancelling, listening) = (Arc::clone(&lines), nodes.clone());
        let is_over_nodes = nodes.is_some();
        let listening = parallel::spawn(move || {
            let is_cancelled = match listening {
                Some(nodes) => listen(&nodes),
                // Another line says the same as the end: the program may have forked, and its child keeps the pipe open.
                None => !(next_line().is_empty() && is_detached),
            };
            if is_cancelled {
                cancelling.cancel();
                process::exit(i32::from(Exit::Failed as u8));
            }
        });
        // Without a thread, nobody hears of a cancellation, or of the other nodes.
        let deaf = listening.err().filter(|_| is_over_nodes).map(|error| parallel::refused(&error));
        let request = deaf.map_or(request, Err);
        let answer = request.map_err(|failure| (failure, Some(false))).and_then(|request| request.run(nodes, &lines));
        let (outcome, exit) = match answer {
            Ok(Answer::Found(found)) => (outcome_of(found, Some(true)), Exit::Done),
            Ok(Answer::Tags(outcome)) => outcome_and_exit(&outcome, process_json),
            Ok(Answer::Places(swapped)) => swap_outcome(&swapped),
            Ok(Answer::Device(outcome)) => outcome_and_exit(&outcome, device_json),
            Err((failure, committed)) => {
                let mut outcome = outcome_of(json!({ "processes": [], "jobs": [] }), committed);
                outcome["error"] = json!(failure);
                (outcome, failure.exit())
            }
        };
        output::told(lines.end(&outcome), exit)
    }

    fn wants_json(&self) -> bool {
        true
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

/// Passes on what the coordinator of the nodes says, until it says nothing any more. Returns whether that cancels the operation.
fn listen(nodes: &Participant) -> bool {
    while let Ok(word) = serde_json::from_value(json!(next_line().trim())) {
        nodes.hear(word);
    }
    nodes.hang_up()
}

/// The next line of stdin. Empty at its end.
fn next_line() -> String {
    let mut line = String::new();
    _ = io::stdin().lock().read_line(&mut line);
    line
}

/// A failure, and whether what was asked for is done all the same; `None` if that is not known, or only a part of it is.
type Failed = (CommandError, Option<bool>);

/// Nothing has changed before it.
fn unchanged(failure: CommandError) -> Failed {
    (failure, Some(false))
}

impl Request {
    fn run(self, nodes: Option<Arc<Participant>>, lines: &Arc<Lines>) -> Result<Answer, Failed> {
        match self {
            Self::Pause(pause) => {
                let operation = Operation { nodes, ..pause.operation().map_err(unchanged)? };
                let plan = Plan::make(operation, &**lines).map_err(unchanged)?;
                begin(&plan).map_err(unchanged)?;
                let consent = plan.consent(&**lines).map_err(unchanged)?;
                Ok(transition(plan, &consent, lines))
            }
            Self::Resume(resume) => {
                let plan = Plan::make(Operation { nodes, ..resume.operation() }, &**lines).map_err(unchanged)?;
                begin(&plan).map_err(unchanged)?;
                // It may have brought some processes back to their GPUs, and others not.
                lines.leaves(|| cancelled(None, &[]));
                let plan = plan.restore_suspended(&**lines).map_err(|failure| (failure, None))?;
                Ok(transition(plan, &Consent::default(), lines))
            }
            Self::Swap(swap) => {
                let [leaving, coming] = swap.operations().map_err(unchanged)?;
                let plan = Arc::new(Swap::plan(leaving, coming, &**lines).map_err(unchanged)?);
                let consent = plan.consent(&**lines).map_err(unchanged)?;
                let cancelled_plan = Arc::clone(&plan);
                lines.leaves(move || left_behind(&cancelled_plan.plans()));
                Ok(Answer::Places(Box::new(plan.run(&consent, &**lines))))
            }
            Self::Suspend(suspend) => {
                let is_dry_run = suspend.is_dry_run();
                let plan = Suspend::plan(&suspend.operation().map_err(unchanged)?, &**lines)
                    .and_then(|plan| plan.check(&**lines))
                    .map_err(unchanged)?;
                if is_dry_run {
                    return Ok(Answer::Found(json!({ "processes": [], "jobs": [] })));
                }
                lines.leaves(|| cancelled(None, &[]));
                // What the driver refuses, it refuses once all tags are paused.
                plan.run(&**lines).map(Answer::Device).map_err(|failure| {
                    let is_paused = failure.exit() == Exit::Unsuspendable;
                    (failure, is_paused.then_some(true))
                })
            }
            Self::Move(relocate) => {
                let is_dry_run = relocate.is_dry_run();
                let plan = Move::plan(&relocate.operation(), &**lines).map_err(unchanged)?;
                if is_dry_run {
                    return Ok(Answer::Found(json!({ "processes": [], "jobs": [] })));
                }
                lines.leaves(|| cancelled(None, &[]));
                plan.run(&**lines).map(Answer::Device).map_err(|failure| (failure, None))
            }
            Self::Status(Which { target }) => status(&Target::from(target)).map_err(unchanged),
            Self::Gpus(Nothing {}) => gpus().map_err(unchanged),
        }
    }
}

/// If the job has ranks on other nodes, waits until all may begin.
fn begin(plan: &Plan) -> Result<(), CommandError> {
    let Some(nodes) = &plan.operation().nodes else { return Ok(()) };
    Lines::found(plan.taking_part().into_iter().filter_map(|pid| plan.process(pid)));
    nodes.begin().map_err(|Aborted| CommandError::from(&Error::Aborted("the ranks on other nodes could not begin".into())))
}

fn transition(plan: Plan, consent: &Consent, lines: &Arc<Lines>) -> Answer {
    let plan = Arc::new(plan);
    let cancelled_plan = Arc::clone(&plan);
    lines.leaves(move || left_behind(&[&cancelled_plan]));
    Answer::Tags(plan.run(consent, &**lines))
}

fn gpus() -> Result<Answer, CommandError> {
    let Usage { ledgers, failure, .. } = Usage::take(&Target::All, &[], None)?;
    failure.map_or(Ok(Answer::Found(json!({ "gpus": ledgers }))), Err)
}

fn status(target: &Target) -> Result<Answer, CommandError> {
    let chosen = Found::look(target)?.choose(target)?;
    match chosen.iter().find_map(|process| Some((process, process.status.as_ref().err()?))) {
        Some((process, failure)) => Err(failure.clone().adding(&format!(" ({process})"))),
        None => Ok(Answer::Found(json!({ "processes": chosen }))),
    }
}

/// What the driver's part did to a process.
fn device_json(one: &ProcessOutcome) -> Value {
    let done = one.device.clone().or_else(|| one.report().map(Done::of_borrower));
    json!({ "pid": one.process.pid, "name": one.process.name(), "report": done })
}

/// The outcome of an operation as its last line, and the exit code.
fn outcome_and_exit(outcome: &Outcome, of_process: impl Fn(&ProcessOutcome) -> Value) -> (Value, Exit) {
    let Outcome { processes, borrowers, jobs } = outcome;
    let all = || processes.iter().chain(borrowers);
    let answer = |one: &ProcessOutcome| {
        let mut answer = of_process(one);
        if let Err(failure) = &one.result {
            answer["error"] = json!(failure);
        }
        answer
    };
    let found = json!({ "processes": all().map(answer).collect::<Vec<_>>(), "jobs": jobs.iter().map(job_json).collect::<Vec<_>>() });
    let failures = || all().filter_map(|one| one.result.as_ref().err());
    let Some(cause) = CommandError::original(failures()) else { return (outcome_of(found, Some(true)), outcome.exit()) };
    // Of several jobs, each is paused or resumed as a whole.
    let committed = match (jobs.iter().any(|job| job.committed), jobs.iter().all(|job| job.committed)) {
        (true, false) => None,
        (any, _) => Some(any),
    };
    let mut answer = outcome_of(found, committed);
    answer["error"] = json!(cause);
    answer["error"]["pid"] = json!(all().find(|one| one.result.as_ref().err() == Some(cause)).map(|one| one.process.pid));
    (answer, cause.exit())
}

/// The outcome of a swap as its last line, and the exit code.
fn swap_outcome(swapped: &Swapped) -> (Value, Exit) {
    let mut answer = outcome_of(swap_json(swapped), Some(swapped.committed));
    if let Some(failure) = swapped.failure() {
        answer["error"] = json!(failure);
    }
    (answer, swapped.exit())
}

fn outcome_of(mut found: Value, committed: Option<bool>) -> Value {
    found["reply"] = json!("outcome");
    found["committed"] = json!(committed);
    found
}

/// The answer to a cancellation.
fn cancelled(committed: Option<bool>, processes: &[Value]) -> Value {
    let mut answer = outcome_of(json!({ "processes": processes, "jobs": [] }), committed);
    answer["error"] = json!({ "code": "cancelled", "message": "cancelled; `vramctl status` shows how everything is" });
    answer
}

/// The answer to the cancellation of a pause or resume.
fn left_behind(plans: &[&Plan]) -> Value {
    let left: Vec<_> = plans.iter().flat_map(|plan| plan.left_behind()).collect();
    let all = |wanted: &Left| left.iter().all(|(_, left)| left == wanted);
    let committed = if all(&Left::AsItWas) { Some(false) } else { all(&Left::Done).then_some(true) };
    let process = |(process, left): &(&Process, Left)| {
        let how = match left {
            Left::Undoing(_) => "undoing",
            Left::Done => "done",
            Left::AsItWas => "as_it_was",
            Left::Unknown(_) => "unknown",
        };
        json!({ "pid": process.pid, "name": process.name(), "left": how })
    };
    cancelled(committed, &left.iter().map(process).collect::<Vec<_>>())
}
