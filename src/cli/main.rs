//! `vramctl`: starts programs under the library, shows what they have, pauses and resumes them.

mod completions;
mod doctor;
mod engine;
mod failure;
mod interrupt;
mod output;
mod places;
mod processes;
mod progress;
mod ps;
mod python_path;
mod run;
mod status;
mod tag;
mod target;
mod transition;

use clap::{Parser, Subcommand};
use failure::{CommandError, Exit};
use std::fmt::Write;
use std::process::ExitCode;

/// Take the GPU memory of a running, unmodified CUDA program away by tag, and give it back at the same addresses.
#[derive(Parser)]
#[command(name = "vramctl", version, max_term_width = 110, subcommand_required = true, after_help = after_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program whose GPU memory can be paused
    Run(run::Args),
    /// List the managed processes
    Ps(ps::Args),
    /// Show what processes have, by tag and by device
    Status(status::Args),
    /// Give the GPU memory of processes back to the driver
    Pause(transition::PauseArgs),
    /// Give processes their GPU memory and its contents again
    Resume(transition::ResumeArgs),
    /// Set the tag of a process's allocations from now on
    SetTag(tag::Args),
    /// Look whether this machine has what it takes, and say what would fail
    Doctor(doctor::Args),
    /// Print the directories that `run` puts on PYTHONPATH
    PythonPath(python_path::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

fn main() -> ExitCode {
    completions::answer_shell();
    let command = Cli::parse().command;
    let json = command.wants_json();
    let exit = command.carry_out().unwrap_or_else(|failure| {
        output::fail(&failure, json);
        failure.exit()
    });
    exit.into()
}

impl Command {
    fn carry_out(self) -> Result<Exit, CommandError> {
        match self {
            Self::Run(args) => run::run(&args),
            Self::Ps(args) => ps::ps(&args),
            Self::Status(args) => status::status(args),
            Self::Pause(args) => transition::pause(args),
            Self::Resume(args) => transition::resume(args),
            Self::SetTag(args) => tag::set_tag(args),
            Self::Doctor(args) => doctor::doctor(&args),
            Self::PythonPath(args) => python_path::python_path(&args),
            Self::Completions(args) => completions::completions(&args),
        }
    }

    fn wants_json(&self) -> bool {
        match self {
            Self::Ps(args) => args.json,
            Self::Status(args) => args.json,
            Self::Pause(args) => args.transition.json,
            Self::Resume(args) => args.transition.json,
            Self::SetTag(args) => args.json,
            Self::Doctor(args) => args.json,
            Self::Run(_) | Self::PythonPath(_) | Self::Completions(_) => false,
        }
    }
}

fn after_help() -> String {
    let mut text = String::from(
        "Examples:
  vramctl run --name engine -- python serve.py     start a program
  vramctl status engine                            what it has
  vramctl pause kv_cache --discard                 give memory back; the contents may go
  vramctl pause && vramctl resume                  all tags of the one managed process
  vramctl doctor                                   what this machine has, and what would fail

Environment:
  VRAMCTL_DIR      where the control sockets are; $XDG_RUNTIME_DIR/vramctl, else /tmp/vramctl-<uid>
  VRAMCTL_LIB      the library that `run` preloads; else libvramctl.so beside this binary, in
                   ../lib, or in the Python package that this binary was installed with
  VRAMCTL_PYTHON   the Python package that `run` puts on PYTHONPATH; else the one that this binary
                   was installed with, or python/vramctl of the checkout that it was built in

Exit codes:",
    );
    for exit in Exit::ALL {
        let _ = write!(text, "\n  {:>3}  {}", exit as u8, exit.meaning());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Among other things: no option name twice, no conflict with an option that is not there.
    #[test]
    fn the_options_are_sound() {
        Cli::command().debug_assert();
    }
}
