//! `vramctl python-path`.

use crate::execute::Execute;
use crate::installation;
use crate::ui::output;
use std::env;
use vramctl_coordinator::failure::{CommandError, Exit};

#[derive(clap::Args)]
#[command(after_long_help = "\
`vramctl run` puts these directories first on PYTHONPATH. Use this command to set up a Python program's environment without \
it, together with LD_PRELOAD. They contain the `vramctl` package, the engine integration and a drop-in for torch_memory_saver. \
Installed packages are not changed.

Examples:
  export PYTHONPATH=\"$(vramctl python-path):$PYTHONPATH\"
  LD_PRELOAD=/path/to/libvramctl.so python serve.py
  vramctl python-path | xargs -d : -n 1   # one per line")]
pub struct Args {}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let folders = installation::python_path()?;
        if folders.is_empty() {
            return Err(installation::no_package());
        }
        let joined = env::join_paths(&folders).map_err(|error| CommandError::new(Exit::Failed, error.to_string()))?;
        output::say(&joined.to_string_lossy())?;
        Ok(Exit::Done)
    }
}
