//! `vramctl completions`.

use crate::failure::{Exit, Failure};
use crate::output;
use clap::CommandFactory;
use clap_complete::Shell;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  vramctl completions bash > ~/.local/share/bash-completion/completions/vramctl
  vramctl completions zsh > \"${fpath[1]}/_vramctl\"
  vramctl completions fish > ~/.config/fish/completions/vramctl.fish")]
pub struct Args {
    /// The shell
    shell: Shell,
}

pub fn completions(args: &Args) -> Result<Exit, Failure> {
    // Not straight to stdout: the generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "vramctl", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}
