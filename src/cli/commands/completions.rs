//! `vramctl completions`.

use crate::candidates::VARIABLE;
use crate::execute::Execute;
use crate::ui::output;
use clap_complete::Shell;
use clap_complete::env::Shells;
use vramctl_coordinator::failure::{CommandError, Exit};

/// zsh runs the script at the first Tab, as the function `_vramctl`, and expects it to complete. clap's only prepares that.
const ZSH_AT_ONCE: &str = "
if [ \"$funcstack[1]\" = \"_vramctl\" ]; then
    _clap_dynamic_completer_vramctl \"$@\"
fi
";

#[derive(clap::Args)]
#[command(after_long_help = "\
The shell then also completes tags, names, process ids and GPUs. It asks `vramctl`, which must be on PATH.

Examples:
  mkdir -p ~/.local/share/bash-completion/completions
  vramctl completions bash > ~/.local/share/bash-completion/completions/vramctl
  vramctl completions zsh > \"${fpath[1]}/_vramctl\"
  mkdir -p ~/.config/fish/completions
  vramctl completions fish > ~/.config/fish/completions/vramctl.fish")]
pub struct Args {
    /// The shell
    shell: Shell,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let failed = |why: String| CommandError::new(Exit::Failed, format!("no completions for {}: {why}", self.shell));
        let shells = Shells::builtins();
        let shell = shells.completer(&self.shell.to_string()).ok_or_else(|| failed("unknown shell".into()))?;
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "vramctl", "vramctl", "vramctl", &mut script).map_err(|error| failed(error.to_string()))?;
        if self.shell == Shell::Zsh {
            script.extend_from_slice(ZSH_AT_ONCE.as_bytes());
        }
        output::print(&String::from_utf8_lossy(&script))?;
        Ok(Exit::Done)
    }
}
