//! `vramctl ray`: jobs over the nodes of a Ray cluster. The Python package does it, in the Python that has Ray.

use crate::execute::Execute;
use crate::installation;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;
use vramctl_coordinator::failure::{CommandError, Exit};

#[derive(clap::Args)]
#[command(after_long_help = "\
Hands over to the python3 on PATH, which must have Ray: docs/many-nodes.md. `vramctl ray pause --help` lists the options of a verb.

Examples:
  vramctl ray pause engine
  vramctl ray status engine
  vramctl ray resume engine")]
pub struct Args {
    /// A verb (pause, resume, suspend, move or status), the job's name, and options
    #[arg(value_name = "WORDS", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// The package that this binary came with is for a Python that has none.
const HAND_OVER: &str = "\
import sys
sys.path.append(sys.argv.pop(1))
try:
    from vramctl.ray import _main
except ModuleNotFoundError as error:
    if error.name not in ('ray', 'vramctl'):
        raise
    sys.exit(f'vramctl ray: {sys.executable} has no module {error.name}; put the python3 that Ray runs with first on PATH')
sys.exit(_main())
";

impl Execute for Args {
    /// Does not return unless it fails.
    fn execute(&self) -> Result<Exit, CommandError> {
        let package = installation::package()?.ok_or_else(installation::no_package)?;
        let folder = package.parent().unwrap_or(&package);
        let error = Command::new("python3").args(["-c", HAND_OVER]).arg(folder).args(&self.words).exec();
        Err(CommandError::new(
            Exit::Failed,
            format!("cannot start python3: {error}; `vramctl ray` needs the one that Ray runs with on PATH"),
        ))
    }
}
