//! `vramctl ps`.

use crate::arguments::GpuArgs;
use crate::ui::output;
use std::collections::BTreeMap;
use vramctl_coordinator::checkpoint;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::gpus;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_coordinator::text;
use vramctl_driver::checkpoint::ProcessState;
use vramctl_model::{Bytes, short_uuid};

#[derive(clap::Args)]
#[command(after_help = "\
A process appears with its first allocation of GPU memory (1 MiB or more). One that does not answer is listed with the \
reason. A job is all processes of one `vramctl run`, or of one --name: \"engine 2/4\" is its second of four processes. They are \
paused and resumed as one. If a name has several runs, the column says which, and for how long the process has been running.

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
    let jobs = Jobs::of(&found.processes);
    found.keep_on(&args.gpu.gpu)?;
    if args.json {
        output::json(&found.processes)?;
    } else if found.processes.is_empty() {
        output::complain("note", &found.nothing());
    } else {
        let (indices, states) = (gpus::indices(), checkpoint::states(&found, &found.processes));
        let rows = found.processes.iter().map(|process| row(process, states.get(&process.pid), &jobs, &indices));
        output::say(&output::table(&["PID", "NAME", "STATE", "BYTES", "GPU", "JOB", "TAGS", "PROGRAM"], rows))?;
    }
    Ok(Exit::Done)
}

/// The processes of each job, in order, with the run of each.
struct Jobs(BTreeMap<String, Vec<(u32, Option<String>)>>);

impl Jobs {
    fn of(processes: &[Process]) -> Self {
        let mut jobs = BTreeMap::<_, Vec<_>>::new();
        for process in processes {
            jobs.entry(process.job().unwrap_or_default().to_owned()).or_default().push((process.pid, process.run().map(str::to_owned)));
        }
        Self(jobs)
    }

    /// The job, and which of its processes this is; also its run if the job has several.
    fn place_of(&self, process: &Process) -> String {
        let Some((job, members)) = process.job().and_then(|job| self.0.get_key_value(job)) else { return String::new() };
        let rank = 1 + members.iter().position(|(pid, _)| *pid == process.pid).unwrap_or_default();
        let is_of_several = members.iter().any(|(_, run)| run.as_deref() != process.run());
        let age = process
            .status
            .as_ref()
            .ok()
            .and_then(|status| status.process.age_s)
            .map_or_else(String::new, |age| format!(" for {}", text::age(age)));
        let run = if is_of_several { format!(" ({}{age})", process.run().unwrap_or("no run")) } else { String::new() };
        format!("{job} {rank}/{}{run}", members.len())
    }
}

/// `state`: what the driver says of a suspended process, if it can be asked.
fn row(process: &Process, state: Option<&ProcessState>, jobs: &Jobs, indices: &BTreeMap<String, u32>) -> Vec<String> {
    let pid = process.pid.to_string();
    match &process.status {
        Ok(status) => {
            let memory = &status.memory;
            let tags: Vec<_> = memory.tags.iter().map(|tag| format!("{} {}", tag.tag, Bytes(tag.bytes))).collect();
            let named = |uuid: &str| {
                let short = short_uuid(uuid);
                indices.get(uuid).map_or_else(|| short.to_owned(), |index| format!("{index} {short}"))
            };
            let gpus: Vec<_> = process.gpus().map(named).collect();
            let bytes = memory.tags.iter().map(|tag| tag.bytes).sum();
            vec![
                pid,
                status.process.name.clone(),
                match state {
                    Some(ProcessState::Failed) => "lost (FAILED)".into(),
                    Some(ProcessState::Running | ProcessState::Locked) => "partly suspended".into(),
                    Some(ProcessState::Checkpointed) | None => process.state(),
                },
                Bytes(bytes).to_string(),
                gpus.join(", "),
                jobs.place_of(process),
                tags.join(", "),
                status.process.program.clone(),
            ]
        }
        Err(failure) => {
            vec![
                pid,
                process.name().unwrap_or("?").into(),
                "?".into(),
                "?".into(),
                "?".into(),
                String::new(),
                String::new(),
                failure.to_string(),
            ]
        }
    }
}
