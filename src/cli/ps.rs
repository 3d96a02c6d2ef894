//! `vramctl ps`.

use crate::failure::{CommandError, Exit};
use crate::output;
use crate::processes::{Found, Process, Target};
use crate::target::GpuArgs;
use vramctl_model::Bytes;

#[derive(clap::Args)]
#[command(after_help = "\
A process appears with its first managed allocation. One that does not answer is listed with the reason.

Examples:
  vramctl ps
  vramctl ps --gpu 0
  vramctl ps --json | jq -r '.processes[].pid'")]
pub struct Args {
    #[command(flatten)]
    gpu: GpuArgs,
    /// Print JSON: {"processes": […]}, each as in `vramctl status --json`
    #[arg(long)]
    pub json: bool,
}

pub fn ps(args: &Args) -> Result<Exit, CommandError> {
    let mut found = Found::look(&Target::All)?;
    found.keep_on(&args.gpu.gpu)?;
    if args.json {
        output::json(&found.processes)?;
    } else if found.processes.is_empty() {
        output::complain("note", &found.nothing());
    } else {
        output::say(&output::table(&["PID", "NAME", "STATE", "BYTES", "GPU", "TAGS", "PROGRAM"], found.processes.iter().map(row)))?;
    }
    Ok(Exit::Done)
}

fn row(process: &Process) -> Vec<String> {
    let pid = process.pid.to_string();
    match &process.status {
        Ok(status) => {
            let memory = &status.memory;
            let tags: Vec<_> = memory.tags.iter().map(|tag| format!("{} {}", tag.tag, Bytes(tag.bytes))).collect();
            // Enough of the UUID to tell GPUs apart.
            let gpus: Vec<_> = process.gpus().map(|uuid| uuid.get(..12).unwrap_or(uuid)).collect();
            let bytes = memory.tags.iter().map(|tag| tag.bytes).sum();
            vec![
                pid,
                status.process.name.clone(),
                process.state(),
                Bytes(bytes).to_string(),
                gpus.join(", "),
                tags.join(", "),
                status.process.program.clone(),
            ]
        }
        Err(failure) => {
            vec![pid, process.name().unwrap_or("?").into(), "?".into(), "?".into(), "?".into(), String::new(), failure.to_string()]
        }
    }
}
