//! `vramctl keeper`: the process that `vramctl run --share` leaves behind.

use crate::execute::Execute;
use vramctl_coordinator::failure::{CommandError, Exit};

/// The options of `vramctl keeper`.
#[derive(clap::Args)]
pub struct Args {
    /// The run
    #[arg(long)]
    run: String,
    /// The process that began it
    #[arg(long)]
    pid: u32,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let failed = |error| CommandError::new(Exit::Failed, format!("cannot keep the run: {error}"));
        vramctl_keeper::keep(&self.run, self.pid).map_err(failed).map(|()| Exit::Done)
    }

    /// Swaps and resumes reach all GPUs.
    fn drives_checkpoints(&self) -> bool {
        true
    }
}
