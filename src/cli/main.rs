//! `vramctl`: starts programs under the library, shows the memory they hold, and pauses and resumes them.

mod arguments;
mod ask;
mod candidates;
mod commands;
mod everybody;
mod execute;
mod hints;
mod installation;
mod interruptible;
mod ledger;
mod logs;
mod preloading;
mod settings;
mod syntax;
mod ui;

use clap::{FromArgMatches, Parser, Subcommand};
use commands::{
    completions, config, coordinate, demo, doctor, events, gpus, image_guard, image_init, images, keeper, load, logs as log, metrics,
    operate, pause, ps, python_path, ray, relocate, resume, run, save, set_tag, share, status, stop, suspend, swap, top, trace, trim, wait,
    watch,
};
use execute::Execute;
use settings::Settings;
use std::process::ExitCode;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::text;
use vramctl_host::system::raise_descriptor_limit;

/// Take GPU memory away from running, unmodified CUDA programs, by tag, and give it back at the same addresses.
#[derive(Parser)]
#[command(name = "vramctl", version, max_term_width = 110, subcommand_required = true, after_long_help = syntax::after_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Makes an enum of the commands, each of which is its arguments.
macro_rules! commands {
    ($($(#[$attribute:meta])* $name:ident($arguments:ty),)*) => {
        #[derive(Subcommand)]
        enum Command {
            $($(#[$attribute])* $name($arguments),)*
        }

        impl Command {
            fn get(&self) -> &dyn Execute {
                match self {
                    $(Self::$name(arguments) => arguments,)*
                }
            }
        }
    };
}

commands! {
    /// Start a program whose GPU memory can be paused
    Run(run::Args),
    /// List the managed processes
    #[command(alias = "list")]
    Ps(ps::Args),
    /// Show the memory of processes, by tag and by GPU
    Status(status::Args),
    /// Show who uses the memory of each GPU
    Gpus(gpus::Args),
    /// Show the GPUs and the processes live; pause, resume and suspend by key
    Top(top::Args),
    /// Return the GPU memory of processes to the driver
    Pause(pause::Args),
    /// Give processes their GPU memory back, with its contents
    Resume(resume::Args),
    /// Have two jobs change places: pause one and resume the other at once
    Swap(swap::Args),
    /// Take processes off their GPUs entirely, context included; `resume` brings them back
    Suspend(suspend::Args),
    /// Move processes to other GPUs: suspend, restore there, resume
    Move(relocate::Args),
    /// Save a running program to disk as an image
    Save(save::Args),
    /// Start a program from an image, where it was saved
    Load(load::Args),
    /// List, remove, verify, clean up and export images
    Images(images::Args),
    /// End programs: resume what is paused, SIGTERM, then SIGKILL
    Stop(stop::Args),
    /// Wait until processes have memory, are active, paused or gone
    Wait(wait::Args),
    /// Show what programs print that run in the background
    Logs(log::Args),
    /// Print what happens to processes: started, paused, resumed, ended
    Events(events::Args),
    /// Print or serve metrics for Prometheus
    Metrics(metrics::Args),
    /// Have torch return the GPU memory that it has cached
    Trim(trim::Args),
    /// Have processes log who uses the GPU memory when little of it is free
    Watch(watch::Args),
    /// Write a timeline of the memory, for Perfetto or as an HTML page
    Trace(trace::Args),
    /// Show the programs that share GPUs, who waits, and why
    Share(share::Args),
    /// Set the tag for a process's future allocations
    SetTag(set_tag::Args),
    /// Show the settings that hold, and where each comes from
    Config(config::Args),
    /// Try it without a GPU: a program on a simulated one
    Demo(demo::Args),
    /// The program of a demo
    #[command(hide = true)]
    DemoProgram(demo::program::Args),
    /// Check this machine, and report what would fail
    Doctor(doctor::Args),
    /// Print the directories that `run` puts on PYTHONPATH
    #[command(hide = true)]
    PythonPath(python_path::Args),
    /// Pause, resume, suspend or move a job over the nodes of a Ray cluster, or show its memory
    Ray(ray::Args),
    /// Run one operation for a program: a request and its outcome as JSON
    #[command(hide = true)]
    Operate(operate::Args),
    /// Coordinate the nodes of a job for a program: events and actions as JSON
    #[command(hide = true)]
    Coordinate(coordinate::Args),
    /// Keep a run of `run --share`: schedule, or wait to be needed for that
    #[command(hide = true)]
    Keeper(keeper::Args),
    /// Let a program go on whose save was killed
    #[command(hide = true)]
    ImageGuard(image_guard::Args),
    /// The first process of a loaded program's namespace
    #[command(hide = true)]
    ImageInit(image_init::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
}

fn main() -> ExitCode {
    // First, and before there is another thread: whatever reads variables need not know of files.
    Settings::get().apply(None);
    candidates::answer_shell();
    let matches = syntax::syntax().try_get_matches().unwrap_or_else(|error| syntax::explained(error).exit());
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let command = cli.command.get();
    // There may be hundreds of processes, each with a connection.
    if !command.becomes_program() {
        raise_descriptor_limit();
    }
    if command.drives_checkpoints() {
        see_all_gpus();
    }
    let exit = prepared(command).and_then(|()| command.execute()).unwrap_or_else(|failure| {
        let failure = with_log(failure);
        ui::output::fail(&failure, command.wants_json());
        failure.exit()
    });
    exit.into()
}

/// A failure to find a program, with what is left of one that `run -d` has started under a name of this command line.
fn with_log(failure: CommandError) -> CommandError {
    if failure.exit() != Exit::NoProcess {
        return failure;
    }
    let logs = logs::names();
    let has_ended = |name: &String| logs.contains(name) && logs::open(name).is_ok_and(|file| !logs::is_written(&file));
    match std::env::args().skip(2).find(has_ended) {
        Some(name) => {
            let name = text::quoted(&name);
            let text = format!("{name} has run in the background, and has ended: `vramctl logs {name}` has what it has printed; {failure}");
            failure.saying(text)
        }
        None => failure,
    }
}

/// Applies the settings of a program's name, and tells what is wrong in their files. What can bring a program back is never refused for that.
fn prepared(command: &dyn Execute) -> Result<(), CommandError> {
    let settings = Settings::get();
    settings.apply(command.program_name().as_deref());
    if let Some(first) = settings.mistakes.first().filter(|_| command.becomes_program()) {
        return Err(CommandError::new(Exit::Usage, first.to_string()));
    }
    if !command.tells_mistakes() {
        for mistake in &settings.mistakes {
            ui::output::complain("warning", &format!("{mistake}; this line is left out"));
        }
    }
    Ok(())
}

/// Makes all GPUs visible: a job may be on a GPU that `CUDA_VISIBLE_DEVICES` hides from this command.
fn see_all_gpus() {
    // SAFETY: there is no other thread yet.
    unsafe { std::env::remove_var("CUDA_VISIBLE_DEVICES") };
}
