//! `vramctl demo`: shows what the command does, with programs of its own on a simulated GPU. It needs neither a GPU nor a checkout.

mod machine;
pub mod program;

use crate::execute::Execute;
use crate::ui::{interrupt, output};
use machine::Machine;
use std::env;
use std::process::Command;
use vramctl_coordinator::failure::{CommandError, Exit};

#[derive(clap::Args)]
#[command(after_long_help = "\
Starts a small program on a simulated GPU of 256 MiB, takes its memory away while it runs, has another program use that memory, gives it back, \
and checks that contents and addresses are the same. The commands are those for a real GPU; only the times mean nothing. --shell leaves the \
first program running and starts a shell, to try commands in. Nothing touches a real GPU or other programs.

Examples:
  vramctl demo
  vramctl demo --shell")]
pub struct Args {
    /// Start a shell in which a program runs on the simulated GPU
    #[arg(long)]
    shell: bool,
}

/// MiB of the program that is paused, and of the one that needs its memory.
const ENGINE: u32 = 128;
const OTHER: u32 = 192;

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        interrupt::hold();
        let machine = Machine::create()?;
        let folder = machine.folder().to_owned();
        interrupt::watch(move || _ = std::fs::remove_dir_all(folder));
        output::say("A simulated GPU of 256 MiB. Nothing here touches a real one, or other programs.")?;
        if self.shell { shell(&machine) } else { walk(&machine) }
    }
}

fn walk(machine: &Machine) -> Result<Exit, CommandError> {
    title("A program runs, and knows nothing of vramctl")?;
    typed(&format!("vramctl run --name engine -- program --mib {ENGINE}"))?;
    let mut engine = machine.start(Some("engine"), ENGINE)?;
    let before = engine.ask("verify")?;
    said(&before)?;
    machine.show("ps")?;
    machine.show("gpus")?;

    title(&format!("Another one needs {OTHER} MiB"))?;
    typed(&format!("program --mib {OTHER}"))?;
    match machine.try_start(None, OTHER)? {
        Ok(_) => return Err(failed("it has got memory that is in use")),
        Err(why) => said(&why)?,
    }

    title("The first gives its memory back, with its contents kept, and stands still at its next use of the GPU")?;
    machine.show("pause engine")?;
    machine.show("ps")?;

    title("The other has room now")?;
    typed(&format!("program --mib {OTHER}"))?;
    let mut other = machine.start(None, OTHER)?;
    said(&other.ask("verify")?)?;
    machine.show("gpus")?;
    other.end()?;

    title("And back: same addresses, same contents")?;
    machine.show("resume engine")?;
    let after = engine.ask("verify")?;
    said(&after)?;
    if after != before {
        return Err(failed("what the program has is not what it had"));
    }
    engine.end()?;
    output::say(&format!(
        "\nDemo OK: {ENGINE} MiB were taken from a running program, used by another, and given back.\n\
         Try it by hand: vramctl demo --shell. On a real GPU: vramctl doctor, then vramctl run -- COMMAND"
    ))?;
    Ok(Exit::Done)
}

fn shell(machine: &Machine) -> Result<Exit, CommandError> {
    let engine = machine.start(Some("engine"), ENGINE)?;
    output::say(&format!(
        "The program `engine` has {ENGINE} MiB there. Try: vramctl ps, vramctl gpus, vramctl pause, vramctl resume, vramctl top.\n\
         Another one: vramctl run -d --name other -- vramctl demo-program --mib 64. The end: exit\n\
         Two that share what is left, and use it every {} s: vramctl pause engine, then\n    \
         for name in a b; do vramctl run -d --share --name $name -- vramctl demo-program --mib {OTHER}; done; vramctl top",
        program::CHECK_EVERY.as_secs()
    ))?;
    let shell = env::var_os("SHELL").filter(|shell| !shell.is_empty()).unwrap_or_else(|| "/bin/sh".into());
    let status = machine.command(Command::new(&shell)).status();
    status.map_err(|error| failed(&format!("{}: {error}", shell.display())))?;
    machine.end_all();
    engine.end()?;
    Ok(Exit::Done)
}

fn failed(why: &str) -> CommandError {
    CommandError::new(Exit::Failed, format!("the demo has failed: {why}"))
}

fn title(text: &str) -> Result<(), CommandError> {
    output::say(&format!("\n== {text}"))
}

fn typed(line: &str) -> Result<(), CommandError> {
    output::say(&format!("$ {line}"))
}

/// What a program has said.
fn said(text: &str) -> Result<(), CommandError> {
    let lines: Vec<_> = text.lines().map(|line| format!("    {line}")).collect();
    output::say(&lines.join("\n"))
}
