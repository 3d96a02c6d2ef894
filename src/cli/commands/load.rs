//! `vramctl load`.

use crate::arguments::seconds;
use crate::execute::Execute;
use crate::ui::Ui;
use std::path::PathBuf;
use std::process;
use std::time::Duration;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_images::{Load, Streams, init};

#[derive(clap::Args)]
#[command(after_long_help = "\
The program goes on where it was saved, with its GPU memory at the same addresses and a new control socket. The command stays as its \
parent: it passes signals on, and ends with the program's exit code. Its standard streams become the program's where those led to a \
terminal, a file or another process. One image can be loaded several times at once.

The image is read before anything is started: one that is incomplete, damaged, or could have been changed by another user is refused.

Examples:
  vramctl load /images/llama --name e1
  vramctl load /images/llama --name e2 --detach --log /var/log/e2.log")]
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
    /// Wait at most this many seconds for room on the GPUs
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Print errors and warnings only
    #[arg(long, short)]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        init::hold_signals();
        // The command's output is the program's.
        let ui = Ui::new(false, true);
        let streams = Streams { log: self.log.clone(), detached: self.detach };
        let loaded = Load::plan(&self.image, self.name.as_deref(), streams, self.timeout, &ui)?.run(&ui)?;
        if !self.quiet {
            let stages: Vec<_> = loaded.stages.iter().map(|(stage, took)| format!("{stage} {}", took.as_millis())).collect();
            eprintln!("loaded {} (pid {}): {} ms", loaded.name, loaded.pid, stages.join(", "));
        }
        if self.detach {
            return Ok(Exit::Done);
        }
        process::exit(loaded.wait())
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
