//! `vramctl completions`. Its scripts call `vramctl` back to complete tags and processes.

use crate::ui::output;
use clap::CommandFactory;
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};
use std::collections::BTreeMap;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process, Target};

/// The variable that a script sets when it asks for candidates.
const VARIABLE: &str = "VRAMCTL_COMPLETE";

#[derive(clap::Args)]
#[command(after_long_help = "\
The shell then also completes tags, names, process ids and GPUs. It asks `vramctl`, which must be on PATH.

Examples:
  vramctl completions bash > ~/.local/share/bash-completion/completions/vramctl
  vramctl completions zsh > \"${fpath[1]}/_vramctl\"
  vramctl completions fish > ~/.config/fish/completions/vramctl.fish")]
pub struct Args {
    /// The shell
    shell: Shell,
}

pub fn completions(args: &Args) -> Result<Exit, CommandError> {
    let failed = |why: String| CommandError::new(Exit::Failed, format!("no completions for {}: {why}", args.shell));
    let shells = Shells::builtins();
    let shell = shells.completer(&args.shell.to_string()).ok_or_else(|| failed("unknown shell".into()))?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "vramctl", "vramctl", "vramctl", &mut script).map_err(|error| failed(error.to_string()))?;
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}

/// If a shell asks for candidates, answers it and ends the process. Must run first.
pub fn answer_shell() {
    CompleteEnv::with_factory(crate::Cli::command).var(VARIABLE).complete();
}

/// All tags, each with its processes.
pub fn tags() -> Vec<CompletionCandidate> {
    let mut owners = BTreeMap::<_, Vec<_>>::new();
    for process in &processes() {
        for tag in process.tags() {
            owners.entry(tag.tag.clone()).or_default().push(format!("{process}: {}", tag.state.name()));
        }
    }
    owners.into_iter().map(|(tag, of)| CompletionCandidate::new(tag).help(Some(of.join(", ").into()))).collect()
}

/// All tags, then process names.
pub fn tags_and_names() -> Vec<CompletionCandidate> {
    tags().into_iter().chain(names()).collect()
}

/// Process names.
pub fn names() -> Vec<CompletionCandidate> {
    let processes = processes();
    let names: BTreeMap<_, _> = processes.iter().filter_map(|process| Some((process.name()?, process.state()))).collect();
    names.into_iter().map(|(name, state)| CompletionCandidate::new(name).help(Some(state.into()))).collect()
}

/// Process ids.
pub fn pids() -> Vec<CompletionCandidate> {
    let candidate =
        |process: &Process| CompletionCandidate::new(process.pid.to_string()).help(process.name().map(|name| name.to_owned().into()));
    processes().iter().map(candidate).collect()
}

/// Process names and ids.
pub fn targets() -> Vec<CompletionCandidate> {
    names().into_iter().chain(pids()).collect()
}

/// The UUIDs of the GPUs on which processes have memory.
pub fn gpus() -> Vec<CompletionCandidate> {
    let processes = processes();
    let users: BTreeMap<_, _> = processes.iter().flat_map(|process| process.gpus().map(move |gpu| (gpu, process.to_string()))).collect();
    users.into_iter().map(|(gpu, user)| CompletionCandidate::new(gpu).help(Some(user.into()))).collect()
}

/// No processes on errors: a completion must not print messages.
fn processes() -> Vec<Process> {
    Found::look(&Target::All).map_or_else(|_| Vec::new(), |found| found.processes)
}
