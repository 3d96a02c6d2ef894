//! `vramctl wait`.

use crate::arguments::{ProcessesOrOnly, seconds};
use crate::execute::Execute;
use crate::ui::output;
use clap::ValueEnum;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process};
use vramctl_coordinator::text::age;

#[derive(clap::Args)]
#[command(after_long_help = "\
Waits until the processes are as --for says, and looks a few times a second. Changes nothing. Exits with 5 if --timeout is over first.

Examples:
  vramctl wait engine                            # it has GPU memory
  vramctl wait engine --for idle && vramctl pause engine
  vramctl wait engine --for paused --timeout 60
  vramctl wait 'eng*' --for gone")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// ready (it has allocated GPU memory), active (nothing of it is paused), idle (active, and no call has started device work for 2 s),
    /// paused (all of it is, or it is suspended) or gone
    #[arg(long = "for", value_name = "STATE", default_value = "ready", hide_possible_values = true)]
    wanted: Wanted,
    /// Wait at most this many seconds [default: without end]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Print errors only
    #[arg(long, short)]
    quiet: bool,
}

/// For how long an idle process has started no device work.
const IDLE_MS: u64 = 2000;

/// What to wait for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    Ready,
    Active,
    Idle,
    Paused,
    Gone,
}

impl Wanted {
    /// Whether the process is so.
    fn is(self, process: &Process) -> bool {
        let (bytes, active) = (process.has_memory(), process.active_bytes());
        match self {
            Self::Ready => process.status.is_ok(),
            Self::Active => process.status.is_ok() && process.suspended().is_none() && process.state().starts_with("active"),
            Self::Idle => process.status.as_ref().is_ok_and(|status| status.memory.idle_ms.is_some_and(|idle| idle >= IDLE_MS)),
            Self::Paused => process.suspended().is_some() || (bytes && active == 0),
            Self::Gone => false,
        }
    }
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        const LOOK_EVERY: Duration = Duration::from_millis(200);
        let (target, begun) = (self.processes.target(), Instant::now());
        loop {
            let chosen = Found::look(&target)?.choose(&target);
            let so_far = match chosen {
                Ok(chosen) if chosen.iter().all(|process| self.wanted.is(process)) => {
                    let lines: Vec<_> = chosen.iter().map(|process| format!("{process}: {}", process.standing())).collect();
                    return if self.quiet { Ok(Exit::Done) } else { output::say(&lines.join("\n")).map(|()| Exit::Done) };
                }
                Ok(chosen) => chosen.iter().map(|process| format!("{process} is {}", process.standing())).collect::<Vec<_>>().join(", "),
                Err(none) if none.exit() == Exit::NoProcess && self.wanted == Wanted::Gone => return Ok(Exit::Done),
                Err(none) if none.exit() == Exit::NoProcess => none.to_string(),
                Err(failure) => return Err(failure),
            };
            if self.timeout.is_some_and(|timeout| begun.elapsed() >= timeout) {
                return Err(CommandError::new(Exit::Busy, format!("after {}: {so_far}", age(begun.elapsed().as_secs()))));
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}
