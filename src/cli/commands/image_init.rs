//! `vramctl image-init`: the first process of a loaded program's PID namespace.

use crate::execute::Execute;
use std::ffi::OsString;
use std::process;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_images::init::{self, Task};

#[derive(clap::Args)]
pub struct Args {
    /// What to do, as JSON
    task: OsString,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        process::exit(init::run(&Task::parse(&self.task)?))
    }
}
