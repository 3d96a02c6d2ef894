//! `vramctl completions`, and the answers to what its scripts ask: a shell completes tags and processes by asking `vramctl`.

use crate::failure::{CommandError, Exit};
use crate::output;
use crate::processes::{Found, Process, Target};
use clap::CommandFactory;
use clap_complete::engine::CompletionCandidate;
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};
use std::collections::BTreeMap;

/// What a script sets where it asks for candidates.
const VARIABLE: &str = "VRAMCTL_COMPLETE";

#[derive(clap::Args)]
#[command(after_help = "\
The shell then completes tags, names, process ids and GPUs, too: it asks `vramctl`, which must be on PATH.

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
    let shell = shells.completer(&args.shell.to_string()).ok_or_else(|| failed("the shell is not known".into()))?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "vramctl", "vramctl", "vramctl", &mut script).map_err(|error| failed(error.to_string()))?;
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}

/// Answers a shell that asks for candidates, and ends the process. Comes before everything else.
pub fn answer_shell() {
    CompleteEnv::with_factory(crate::Cli::command).var(VARIABLE).complete();
}

/// The tags that there are, each with whose they are.
pub fn tags() -> Vec<CompletionCandidate> {
    let mut owners = BTreeMap::<_, Vec<_>>::new();
    for process in &processes() {
        for tag in process.tags() {
            owners.entry(tag.tag.clone()).or_default().push(format!("{process}: {}", tag.state.name()));
        }
    }
    owners.into_iter().map(|(tag, of)| CompletionCandidate::new(tag).help(Some(of.join(", ").into()))).collect()
}

/// The names of processes.
pub fn names() -> Vec<CompletionCandidate> {
    let processes = processes();
    let names: BTreeMap<_, _> = processes.iter().filter_map(|process| Some((process.name()?, process.state()))).collect();
    names.into_iter().map(|(name, state)| CompletionCandidate::new(name).help(Some(state.into()))).collect()
}

/// Their ids.
pub fn pids() -> Vec<CompletionCandidate> {
    let candidate =
        |process: &Process| CompletionCandidate::new(process.pid.to_string()).help(process.name().map(|name| name.to_owned().into()));
    processes().iter().map(candidate).collect()
}

/// Names and ids.
pub fn targets() -> Vec<CompletionCandidate> {
    names().into_iter().chain(pids()).collect()
}

/// The UUIDs of the GPUs that they have memory on.
pub fn gpus() -> Vec<CompletionCandidate> {
    let processes = processes();
    let users: BTreeMap<_, _> = processes.iter().flat_map(|process| process.gpus().map(move |gpu| (gpu, process.to_string()))).collect();
    users.into_iter().map(|(gpu, user)| CompletionCandidate::new(gpu).help(Some(user.into()))).collect()
}

/// Nobody complains while a key is pressed: where there is nothing to be found there are no candidates.
fn processes() -> Vec<Process> {
    Found::look(&Target::All).map_or_else(|_| Vec::new(), |found| found.processes)
}
