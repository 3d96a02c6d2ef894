//! `vramctl image-guard`: lets a program go on whose save was killed.

use crate::execute::Execute;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_images::guard;

#[derive(clap::Args)]
pub struct Args {}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        guard::run();
        Ok(Exit::Done)
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
