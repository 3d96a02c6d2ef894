//! `vramctl gpus`.

use crate::arguments::{GpuArgs, ProcessesOrAll};
use crate::everybody::EverybodyArgs;
use crate::execute::Execute;
use crate::ledger::{self, Usage};
use crate::ui::output;
use crate::ui::status::described;
use serde_json::json;
use vramctl_coordinator::failure::{CommandError, Exit};

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
    #[command(flatten)]
    everybody: EverybodyArgs,
    /// Print JSON: {"processes": […], "gpus": […], "host": …}, and "error" if the GPUs are not known
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let Usage { found, chosen, ledgers, host, failure } = Usage::take(&self.processes.target(), &self.gpu.gpu, self.everybody.look()?)?;
        if self.json {
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

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
