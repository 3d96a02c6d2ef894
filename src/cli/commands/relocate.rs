//! `vramctl move`.

use crate::arguments::{HoldTimeoutArgs, ProcessesOrOnly, checked_gpu, count};
use crate::candidates;
use crate::execute::Execute;
use crate::ui::Ui;
use crate::ui::{interrupt, outcome, output};
use clap_complete::ArgValueCandidates;
use serde_json::json;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Move, Operation, Relocation, Scope};
use vramctl_model::{Bytes, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
Holds and suspends the job, restores it on other GPUs of the same model, and resumes it with the same addresses and contents; its \
work continues. A job on several GPUs needs as many others; they are assigned in the order of their indices. If the job cannot be \
moved, nothing changes, and the message says why. If the driver refuses to restore some of the processes, the message names those \
that have moved. If the command is interrupted, the job stays suspended: `vramctl resume` brings it back where it was.

A suspended job comes back on the new GPUs, and runs there.

A job that the driver cannot restore is refused with exit code 7, see `vramctl help suspend`. Programs that have memory of each other \
open (CUDA IPC) move together, with --all or a common name; what each has open must be on its own GPU. Programs keep what they have \
stored about the old GPU; even the driver still reports its bus id.

Examples:
  vramctl move engine --to 1
  vramctl move engine --to 1 --dry-run    # could it be moved?
  vramctl move engine --to GPU-0f5c2b8e,GPU-93d44a6b
  vramctl move engine --swap other        # exchange places with `other`")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// The GPUs: index in `nvidia-smi`, UUID or a prefix of it, or bus id [with --swap: those of the other]
    #[arg(long, value_name = "GPU,…", value_delimiter = ',', required_unless_present = "swap", value_parser = checked_gpu, add = ArgValueCandidates::new(candidates::other_gpus))]
    to: Vec<String>,
    /// Only check that it can be moved, and show from where to where
    #[arg(long, conflicts_with = "quiet")]
    dry_run: bool,
    /// How many processes there must be [default: as many as when the job was last paused or resumed]
    #[arg(long, value_name = "N", value_parser = count)]
    ranks: Option<usize>,
    /// Swap GPUs with the processes of this name
    #[arg(long, value_name = "NAME", add = ArgValueCandidates::new(candidates::names))]
    swap: Option<String>,
    #[command(flatten)]
    hold: HoldTimeoutArgs,
    /// Print JSON: {"processes": [{"pid", "name", "report"}]}; with --dry-run, "from", "to" and "bytes" in place of "report"
    #[arg(long)]
    json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.quiet);
        let plan = Move::plan(&self.operation(), &ui)?;
        if self.dry_run {
            return print_forecast(&plan, self.json);
        }
        interrupt::hold();
        let back = plan.way_on();
        interrupt::watch(move || {
            let next = format!("`vramctl status` shows how far it has come; to continue where the job is: {back}");
            output::complain("interrupted", &format!("the move is not complete; {next}"));
        });
        let outcome = plan.run(&ui)?;
        outcome::print_device(&outcome, &ui, |process, done| {
            if done.ms() == 0.0 {
                return format!("nothing to do: {process} is on {} already", list(&done.now_on));
            }
            let was = if process.suspended().is_some() { ", which was suspended and is resumed," } else { "" };
            format!("moved {process}{was} to {}: {} {}", list(&done.now_on), Bytes(done.bytes()), done.took())
        })
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

/// Prints what the move would do.
fn print_forecast(plan: &Move, as_json: bool) -> Result<Exit, CommandError> {
    let all = plan.forecast();
    if as_json {
        let moves = all.iter().map(|Relocation { process, from, to, bytes }| {
            let (pid, name) = (process.pid, process.name());
            json!({ "pid": pid, "name": name, "from": from, "to": to, "bytes": bytes })
        });
        output::json(&moves.collect::<Vec<_>>())?;
        return Ok(Exit::Done);
    }
    for Relocation { process, from, to, bytes } in all {
        if from == to {
            output::say(&format!("{process} is on {} already", list(&from)))?;
            continue;
        }
        let resumed = if process.suspended().is_some() { "; it would not stay suspended" } else { "" };
        output::say(&format!(
            "{process}: a move would take it from {} to {}, with {} in tags{resumed}",
            list(&from),
            list(&to),
            Bytes(bytes)
        ))?;
    }
    Ok(Exit::Done)
}

fn list(gpus: &[u32]) -> String {
    gpus.iter().map(|index| format!("GPU {index}")).collect::<Vec<_>>().join(", ")
}

impl Args {
    /// The operation that they ask for.
    fn operation(&self) -> Operation {
        let scope = Scope::Elsewhere { to: self.to.clone(), swap: self.swap.clone().map(Target::parse) };
        let pause = HowToPause { hold: Hold::Within(self.hold.hold_timeout), ..HowToPause::default() };
        let operation = Operation::new(Verb::Pause, self.processes.target(), scope, Deadline::new(None), pause);
        Operation { ranks: self.ranks, ..operation }
    }
}
