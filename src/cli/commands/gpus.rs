//! `vramctl gpus`.

use crate::arguments::{GpuArgs, ProcessesOrAll};
use crate::commands::ledger::{self, Host, Ledger};
use crate::commands::status::described;
use crate::ui::output;
use serde_json::{Value, json};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process, Target};

#[derive(clap::Args)]
#[command(after_long_help = "\
Shows who uses the memory of each GPU, and the processes' host memory. With a target, shows the GPUs on which the target has memory, \
and everybody's memory there. docs/out-of-memory.md explains the rows.

Examples:
  vramctl gpus
  vramctl gpus engine  # the GPUs on which it has memory
  vramctl gpus --gpu 0
  vramctl gpus --json | jq '.gpus[0].shares'")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Print JSON: {"processes": […], "gpus": […], "host": …}, and "error" if the GPUs are not known
    #[arg(long)]
    pub json: bool,
}

pub fn gpus(args: &Args) -> Result<Exit, CommandError> {
    let target = args.processes.target();
    show(&target, &args.gpu.gpu, args.json)
}

/// Prints who uses the memory of these GPUs.
pub fn show(target: &Target, gpus: &[String], as_json: bool) -> Result<Exit, CommandError> {
    let Gpus { found, chosen, ledgers, host, failure } = Gpus::look(target, gpus)?;
    if as_json {
        let mut answer = json!({ "processes": chosen, "gpus": ledgers, "host": host });
        if let Some(failure) = &failure {
            answer["error"] = json!(failure);
        }
        output::print(&format!("{answer}\n"))?;
    } else {
        // Without ledgers, what the processes themselves know.
        let known = if failure.is_some() { described(&found, &chosen, false) } else { Vec::new() };
        let texts: Vec<_> = ledgers.iter().map(ledger::describe).chain(known).chain([ledger::describe_host(&host)]).collect();
        output::show(&texts.join("\n\n"))?;
        if let Some(failure) = &failure {
            output::complain("error", &failure.to_string());
        }
    }
    Ok(failure.map_or(Exit::Done, |failure| failure.exit()))
}

/// The ledgers of all GPUs, for a program.
pub fn ledgers() -> Result<Value, CommandError> {
    let Gpus { ledgers, failure, .. } = Gpus::look(&Target::All, &[])?;
    failure.map_or(Ok(json!({ "gpus": ledgers })), Err)
}

/// Who uses the memory of some GPUs.
struct Gpus {
    found: Found,
    /// The processes that are meant.
    chosen: Vec<Process>,
    ledgers: Vec<Ledger>,
    host: Host,
    /// Why there is no ledger.
    failure: Option<CommandError>,
}

impl Gpus {
    fn look(target: &Target, gpus: &[String]) -> Result<Self, CommandError> {
        // All processes: one that is left out would look like a process without the library.
        let mut found = Found::look(&Target::All)?;
        found.ask_allocators();
        let mut gpus = found.uuids(gpus)?;
        // Even if nothing is managed, other programs may have memory.
        let chosen = if *target == Target::All { found.processes.clone() } else { found.choose(target)? };
        if gpus.is_empty() && *target != Target::All {
            gpus = chosen.iter().flat_map(Process::gpus).map(str::to_owned).collect();
        }
        let host = ledger::host(&chosen, &found.processes);
        let (ledgers, why) = match ledger::take(&found.processes, &gpus) {
            Ok(ledgers) if ledgers.is_empty() => {
                let gpus = gpus.join(", ");
                (ledgers, Some(format!("NVML does not report {gpus} here; `nvidia-smi -L` lists the GPUs that it reports")))
            }
            Ok(ledgers) => (ledgers, None),
            Err(none) => (Vec::new(), Some(none.to_string())),
        };
        let failure = why.map(|why| CommandError::new(Exit::Failed, why));
        Ok(Self { found, chosen, ledgers, host, failure })
    }
}
