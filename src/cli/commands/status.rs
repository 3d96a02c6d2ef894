//! `vramctl status`.

use crate::arguments::{GpuArgs, ProcessesOrAll};
use crate::execute::Execute;
use crate::ui::output;
use crate::ui::status::described;
use vramctl_coordinator::checkpoint;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::Found;

#[derive(clap::Args)]
#[command(after_long_help = "\
Without a target, shows all managed processes.

Examples:
  vramctl status
  vramctl status engine
  vramctl status --gpu 0  # processes with memory on this GPU
  vramctl status --pid 4711 --json | jq '.processes[0].tags'")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Also show who kept how much GPU memory in the last pauses; without this, only if something grows
    #[arg(long)]
    history: bool,
    /// Print JSON: {"processes": […]}, each with the fields of a `status` reply (docs/protocol.md)
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        let mut found = Found::look(&target)?;
        found.keep_on(&self.gpu.gpu)?;
        let mut chosen = found.choose(&target)?;
        checkpoint::look_for_obstacles(&found, &mut chosen);
        if self.json {
            output::json(&chosen)?;
        } else {
            let texts = described(&found, &chosen, self.history);
            if !texts.is_empty() {
                output::show(&texts.join("\n\n"))?;
            }
        }
        let mut exit = Exit::Done;
        for process in &chosen {
            let Err(failure) = &process.status else { continue };
            if !self.json {
                output::complain("error", &format!("{process}: {failure}"));
            }
            exit = exit.or(failure.exit());
        }
        Ok(exit)
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
