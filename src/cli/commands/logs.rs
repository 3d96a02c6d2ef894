//! `vramctl logs`.

use crate::candidates;
use crate::execute::Execute;
use crate::logs;
use clap_complete::ArgValueCandidates;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::Duration;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};
use vramctl_coordinator::{target, text};

#[derive(clap::Args)]
#[command(after_long_help = "\
Of programs that `vramctl run --detach` has started: to stdout and stderr, of the last one of this name. The log of the one before is beside it, \
with `.1`. --follow ends with the program. The files are in $VRAMCTL_DIR/logs if that is set, else in ~/.local/state/vramctl/logs \
($XDG_STATE_HOME); nothing limits their size.

Examples:
  vramctl logs engine
  vramctl logs -f -n 20 engine
  less $(vramctl logs --path engine)")]
pub struct Args {
    /// The program's name [default: the only one that has a log]
    #[arg(value_name = "NAME", add = ArgValueCandidates::new(candidates::logs))]
    name: Option<String>,
    /// Go on with what it prints
    #[arg(long, short)]
    follow: bool,
    /// Only the last so many lines
    #[arg(long, short = 'n', value_name = "N")]
    lines: Option<usize>,
    /// Print where the file is
    #[arg(long, conflicts_with_all = ["follow", "lines"])]
    path: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let name = self.name()?;
        let file = logs::open(&name).map_err(|error| none(&name, &error))?;
        let mut out = Output::default();
        if self.path {
            out.write(format!("{}\n", logs::path_of(&name).display()).as_bytes())?;
        } else {
            self.show(&name, file, &mut out)?;
        }
        Ok(Exit::Done)
    }
}

impl Args {
    fn name(&self) -> Result<String, CommandError> {
        let names = logs::names();
        match (&self.name, names.as_slice()) {
            (Some(name), _) => Ok(name.clone()),
            (None, [only]) => Ok(only.clone()),
            (None, []) => Err(CommandError::new(Exit::NoProcess, "there is no log: `vramctl run --detach` starts a program that has one")),
            (None, several) => {
                let names: Vec<_> = several.iter().map(|name| text::one_line(name)).collect();
                Err(CommandError::new(Exit::Usage, format!("several programs have a log; name one of {}", names.join(", "))))
            }
        }
    }

    fn show(&self, name: &str, mut file: File, out: &mut Output) -> Result<(), CommandError> {
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        let failed = |error: io::Error| CommandError::new(Exit::Failed, format!("{}: {error}", logs::path_of(name).display()));
        match self.lines {
            None => out.copy(&mut file).map_err(failed)?,
            Some(count) => out.write(&last_lines(BufReader::new(&mut file), count).map_err(failed)?)?,
        }
        while self.follow && !out.is_closed {
            // In this order: what it has printed before it ended is shown.
            let is_written = logs::is_written(&file);
            out.copy(&mut file).map_err(failed)?;
            if !is_written {
                let is_same = |new: &File| Ok::<_, io::Error>(new.metadata()?.ino() == file.metadata()?.ino());
                match logs::open(name).ok().filter(|new| !is_same(new).unwrap_or(true)) {
                    // It was started again.
                    Some(new) => file = new,
                    None => break,
                }
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

/// Why there is no log of this name, and where what it prints goes.
fn none(name: &str, error: &io::Error) -> CommandError {
    if error.kind() != ErrorKind::NotFound {
        return CommandError::new(Exit::Failed, format!("{}: {error}", logs::path_of(name).display()));
    }
    let shown = text::one_line(name);
    let found = Found::look(&Target::All).map(|found| found.processes).unwrap_or_default();
    if let Some(process) = found.iter().find(|process| process.name() == Some(name) || process.pid.to_string() == name) {
        let place =
            fs::read_link(format!("/proc/{}/fd/1", process.pid)).map_or_else(|_| String::new(), |file| format!(" ({})", file.display()));
        let text =
            format!("{process} was not started with `vramctl run --detach`: it prints where it was started{}", text::one_line(&place));
        return CommandError::new(Exit::NoProcess, text);
    }
    let hint = target::nearest(name, logs::names()).map_or_else(String::new, |meant| target::did_you_mean(&meant));
    CommandError::new(Exit::NoProcess, format!("there is no log of {shown}{hint}"))
}

/// The last lines of a text, as they are.
fn last_lines(mut from: impl BufRead, count: usize) -> io::Result<Vec<u8>> {
    let mut lines = VecDeque::new();
    loop {
        let mut line = Vec::new();
        if from.read_until(b'\n', &mut line)? == 0 {
            return Ok(lines.into_iter().flatten().collect());
        }
        lines.push_back(line);
        if lines.len() > count {
            lines.pop_front();
        }
    }
}

/// What is printed is the program's, unchanged.
#[derive(Default)]
struct Output {
    /// Nobody reads any more.
    is_closed: bool,
}

impl Output {
    fn write(&mut self, text: &[u8]) -> Result<(), CommandError> {
        let mut out = io::stdout().lock();
        match out.write_all(text).and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => self.is_closed = true,
            Err(error) => return Err(CommandError::new(Exit::Failed, format!("stdout: {error}"))),
            Ok(()) => (),
        }
        Ok(())
    }

    /// All that is left of a file.
    fn copy(&mut self, from: &mut File) -> io::Result<()> {
        let mut part = vec![0; 64 << 10];
        while !self.is_closed {
            let count = from.read(&mut part)?;
            if count == 0 {
                break;
            }
            self.write(&part[..count]).map_err(|failure| io::Error::other(failure.to_string()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_those_of_the_end() {
        let last = |count| String::from_utf8(last_lines("a\nb\nc".as_bytes(), count).unwrap()).unwrap();
        assert_eq!([last(0), last(1), last(2), last(9)], ["", "c", "b\nc", "a\nb\nc"]);
    }
}
