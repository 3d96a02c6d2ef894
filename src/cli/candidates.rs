//! What a shell can complete: tags, processes, GPUs. The scripts of `vramctl completions` call `vramctl` for it.

use clap::CommandFactory;
use clap_complete::CompleteEnv;
use clap_complete::engine::{CompletionCandidate, PathCompleter, ValueCompleter};
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::os::unix::fs::PermissionsExt;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_driver::{Card, cards};
use vramctl_model::Bytes;

/// The variable that a script sets when it asks for candidates.
pub const VARIABLE: &str = "VRAMCTL_COMPLETE";

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

/// The names of programs that have a log.
pub fn logs() -> Vec<CompletionCandidate> {
    crate::logs::names().into_iter().map(CompletionCandidate::new).collect()
}

/// Process ids.
pub fn pids() -> Vec<CompletionCandidate> {
    processes()
        .iter()
        .map(|process: &Process| CompletionCandidate::new(process.pid.to_string()).help(process.name().map(|name| name.to_owned().into())))
        .collect()
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

/// The GPUs that a move may go to: all but those of the processes that the command line names, or of the only job.
pub fn other_gpus() -> Vec<CompletionCandidate> {
    let words: Vec<_> = env::args().collect();
    let processes = processes();
    let mut moving: Vec<_> = processes
        .iter()
        .filter(|process: &&Process| words.iter().any(|word| process.name() == Some(word) || process.pid.to_string() == *word))
        .collect();
    if moving.is_empty() && processes.iter().all(|process| process.job() == processes[0].job()) {
        moving = processes.iter().collect();
    }
    let is_left = |card: &&Card| moving.iter().any(|process| process.gpus().any(|gpu| gpu == card.uuid));
    cards()
        .unwrap_or_default()
        .iter()
        .filter(|card| !is_left(card))
        .map(|card: &Card| {
            let help = format!("{}, {} free", card.name, Bytes(card.free));
            CompletionCandidate::new(card.index.to_string()).help(Some(help.into()))
        })
        .collect()
}

/// Completes a command and its arguments: a program on PATH or a path, then paths.
pub struct CommandLine;

impl ValueCompleter for CommandLine {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        let begun = current.to_string_lossy();
        let mut found = if begun.contains('/') { Vec::new() } else { programs(&begun) };
        found.extend(PathCompleter::any().complete(current));
        found
    }

    fn complete_at(&self, index: usize, current: &OsStr) -> Vec<CompletionCandidate> {
        if index == 0 { self.complete(current) } else { PathCompleter::any().complete(current) }
    }
}

/// The programs on PATH that begin so.
fn programs(begun: &str) -> Vec<CompletionCandidate> {
    let path = env::var_os("PATH").unwrap_or_default();
    let entries = env::split_paths(&path).filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let is_program =
        |entry: &DirEntry| fs::metadata(entry.path()).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    let programs: BTreeSet<_> = entries
        .filter_map(|entry: DirEntry| {
            entry.file_name().to_str().filter(|name| name.starts_with(begun) && is_program(&entry)).map(str::to_owned)
        })
        .collect();
    programs.into_iter().map(CompletionCandidate::new).collect()
}

/// No processes on errors: a completion must not print messages.
fn processes() -> Vec<Process> {
    Found::look(&Target::All).map_or_else(|_| Vec::new(), |found| found.processes)
}
