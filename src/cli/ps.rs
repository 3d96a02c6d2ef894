//! `vramctl ps`.

use crate::failure::{Exit, Failure};
use crate::output;
use crate::target::{Found, Process, Target};
use vramctl_model::Bytes;

#[derive(clap::Args)]
#[command(after_help = "\
A process is listed from its first managed allocation on. One that does not answer is listed with the reason.

Examples:
  vramctl ps
  vramctl ps --json | jq -r '.processes[].pid'")]
pub struct Args {
    /// Print JSON: {"processes": […]}, each as in `vramctl status --json`
    #[arg(long)]
    pub json: bool,
}

pub fn ps(args: &Args) -> Result<Exit, Failure> {
    let found = Found::look(&Target::All)?;
    if args.json {
        output::json(&found.processes)?;
    } else if found.processes.is_empty() {
        output::say(&found.nothing())?;
    } else {
        output::say(&output::table(&["PID", "NAME", "STATE", "BYTES", "TAGS", "PROGRAM"], found.processes.iter().map(row)))?;
    }
    Ok(Exit::Done)
}

fn row(process: &Process) -> Vec<String> {
    let pid = process.pid.to_string();
    match &process.status {
        Ok(status) => {
            let memory = &status.memory;
            let tags: Vec<_> = memory.tags.iter().map(|tag| format!("{} {}", tag.tag, Bytes(tag.bytes))).collect();
            let bytes = memory.tags.iter().map(|tag| tag.bytes).sum();
            let state = process.state().map_or("empty", |state| state.name());
            vec![pid, status.process.name.clone(), state.into(), Bytes(bytes).to_string(), tags.join(", "), status.process.program.clone()]
        }
        Err(failure) => vec![pid, "?".into(), "?".into(), "?".into(), String::new(), failure.to_string()],
    }
}
