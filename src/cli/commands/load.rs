//! `vramctl load`.

use crate::arguments::{checked_gpu, seconds};
use crate::candidates;
use crate::execute::Execute;
use crate::ui::Ui;
use crate::ui::output;
use clap_complete::ArgValueCandidates;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, Command, Stdio};
use std::time::Duration;
use std::{env, io};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_images::{Agreement, Copies, Copy, Load, LoadOptions, NoCopies, Port, Streams, gpus_of_copies, init, known_of};

#[derive(clap::Args)]
#[command(after_long_help = "\
The program goes on where it was saved, with its GPU memory at the same addresses and a new control socket. The command stays as its \
parent: it passes signals on, and ends with the program's exit code. Its standard streams become the program's where those led to a \
terminal, a file or another process. One image can be loaded several times at once.

With --port or --copies, each program gets a network of its own: nobody reaches it but by the ports that are given, and it reaches nobody: no \
names are resolved, and no connection leads out. So copies of one server run side by side. They go on together: if one cannot be loaded, none \
is left. Once they run, each is a program of its own, and the others go on when one ends.

The program has the GPUs that it had. On a machine where those are not, it gets the others of the same model if there are exactly as many; else \
--gpus names one for each, in the order of their indices. The dry run shows which. Copies get as many of the GPUs that are named as a program has, \
in turn.

The image is read before anything is started: one that is incomplete, damaged, or could have been changed by another user is refused.

Examples:
  vramctl load /images/llama --name e1
  vramctl load /images/llama --dry-run    # could it be loaded here?
  vramctl load /images/llama --gpus 2,3   # a program of two GPUs, on others
  vramctl load /images/llama --name e2 --detach --log /var/log/e2.log
  vramctl load /images/llama --copies 4 --port 8000=9001 # e-1 at 9001 and so on")]
#[allow(clippy::struct_excessive_bools)] // options
pub struct Args {
    /// The image
    #[arg(value_name = "DIR")]
    image: PathBuf,
    /// The program's name from now on [default: the one that it had]
    #[arg(long, short)]
    name: Option<String>,
    /// End once the program runs, and leave it running
    #[arg(long, short)]
    detach: bool,
    /// The file to which the program's output goes
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The GPUs: index in `nvidia-smi`, UUID or a prefix of it, or bus id [default: those that it had]
    #[arg(long, value_name = "GPU,…", value_delimiter = ',', value_parser = checked_gpu, add = ArgValueCandidates::new(candidates::gpus))]
    gpus: Vec<String>,
    /// Try it with another driver than that of the save
    #[arg(long)]
    any_driver: bool,
    /// Give it a network of its own, in which its port OLD is reached at NEW of this machine (or ADDRESS:NEW); may be repeated
    #[arg(long, value_name = "OLD=NEW")]
    port: Vec<Port>,
    /// Start this many, named NAME-1 and so on, each with the next port, and none with input
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    copies: Option<u16>,
    /// Only check whether it can be loaded, and name all that is in the way; starts nothing
    #[arg(long)]
    dry_run: bool,
    /// Wait at most this many seconds for room on the GPUs
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Print errors and warnings only
    #[arg(long, short)]
    quiet: bool,
    /// One of several copies, and how they agree
    #[arg(long, hide = true)]
    is_copy: Option<Agreement>,
}

impl Args {
    fn options(&self) -> LoadOptions {
        LoadOptions {
            name: self.name.clone(),
            streams: Streams { log: self.log.clone(), detached: self.detach },
            gpus: self.gpus.clone(),
            any_driver: self.any_driver,
            copies: self.copies,
            timeout: self.timeout,
        }
    }

    /// Says whether it can be loaded, and what is in the way.
    fn look(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(false, true);
        let (load, mut obstacles) = Load::look(&self.image, &self.options(), &ui);
        let load = load
            .map(|load| if self.port.is_empty() && self.copies.is_none() { load } else { load.with_own_network(self.port.clone(), &ui) });
        obstacles.extend(load.iter().flat_map(|load| load.look_for_room(self.copies)));
        for obstacle in &obstacles {
            output::complain("error", &obstacle.to_string());
        }
        match (load, obstacles.first()) {
            (Some(load), None) => output::told(output::say(&load.in_words()), Exit::Done),
            (_, first) => Ok(first.map_or(Exit::Failed, CommandError::exit)),
        }
    }

    /// Each is a load of its own, and a child of this one, which ends when all have. All programs go on together, or none is left.
    fn start_copies(&self, copies: u16) -> Result<Exit, CommandError> {
        let failed = |error: io::Error| CommandError::new(Exit::Failed, format!("cannot start a copy: {error}"));
        let (old, own) = known_of(&self.image)?;
        let name = self.name.clone().unwrap_or(old);
        let beyond = || CommandError::new(Exit::Usage, "there are not so many ports");
        let mut all = Copies::default();
        for (number, gpus) in (0..copies).zip(gpus_of_copies(&self.gpus, own, self.copies).collect::<Vec<_>>().into_iter().cycle()) {
            let mut command = Command::new(env::current_exe().map_err(failed)?);
            let name = format!("{name}-{}", number + 1);
            command.arg("load").arg(&self.image).args(["--name", &name]);
            for port in &self.port {
                let port = port.further(number).ok_or_else(beyond)?;
                command.args(["--port", &format!("{}={}", port.old, port.new)]);
            }
            if !gpus.is_empty() {
                command.args(["--gpus", &gpus.join(",")]);
            }
            self.log.iter().for_each(|log| _ = command.arg("--log").arg(log));
            self.timeout.iter().for_each(|timeout| _ = command.args(["--timeout", &timeout.as_secs_f64().to_string()]));
            let flags = [(self.detach, "--detach"), (self.quiet, "--quiet"), (self.any_driver, "--any-driver")];
            command.args(flags.into_iter().filter(|(is_given, _)| *is_given).map(|(_, flag)| flag));
            // Whoever is killed takes them along.
            let end_with_parent = || {
                // SAFETY: touches no memory.
                if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
            };
            if !self.detach {
                // SAFETY: makes one system call.
                unsafe { command.pre_exec(end_with_parent) };
            }
            command.stdin(Stdio::null());
            all.add(Copy::start(name, command).map_err(failed)?);
        }
        match all.let_go() {
            Ok(running) => process::exit(running.wait(|text| output::complain("warning", text))),
            Err(NoCopies { why, code }) => {
                output::complain("error", &why);
                process::exit(code)
            }
        }
    }
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        if self.dry_run {
            return self.look();
        }
        init::hold_signals();
        if let Some(copies) = self.copies {
            return self.start_copies(copies);
        }
        // The command's output is the program's.
        let ui = Ui::new(false, true);
        let load = Load::plan(&self.image, &self.options(), &ui)?;
        let load = load.with_agreement(self.is_copy);
        let load = if self.port.is_empty() && self.is_copy.is_none() { load } else { load.with_own_network(self.port.clone(), &ui) };
        let loaded = load.run(&ui)?;
        if loaded.lost_network && self.quiet {
            output::complain("warning", &format!("{} has no network, as another copy of the program runs here", loaded.name));
        }
        if !self.quiet {
            let stages: Vec<_> = loaded.stages.iter().map(|(stage, took)| format!("{stage} {}", took.as_millis())).collect();
            let place = if loaded.placement.is_empty() { String::new() } else { format!(" on {}", loaded.placement) };
            let pid = loaded.pid.map_or_else(|| "has ended".to_owned(), |pid| format!("pid {pid}"));
            let alone = if loaded.lost_network { " without a network, as another copy of the program runs here" } else { "" };
            let line = format!("loaded {} ({pid}){place}{alone}: {} ms\n", loaded.name, stages.join(", "));
            // In one piece: other copies may write at the same time. It runs, whether that can be told or not.
            let _ = io::stderr().write_all(line.as_bytes());
        }
        if self.detach && loaded.pid.is_some() {
            return Ok(Exit::Done);
        }
        process::exit(loaded.wait())
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
