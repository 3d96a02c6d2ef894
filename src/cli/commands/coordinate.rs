//! `vramctl coordinate`: the coordinator of one pause or resume over several nodes, for a program that transports its messages, such as
//! `vramctl.ray`. It reads a task and then events from stdin, a line of JSON each, and writes what is to be done. `docs/protocol.md` describes both.

use crate::execute::Execute;
use crate::ui::output;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::nodes::coordinator::Coordinator;
use vramctl_coordinator::nodes::messages::{Action, Event, Task};
use vramctl_host::system::poll_each;

#[derive(clap::Args)]
#[command(after_help = "Coordinates the nodes of a job for a program: docs/protocol.md, \"The coordinator of the nodes\".")]
pub struct Args {}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let mut input = Input::default();
        let task = loop {
            if let Some(line) = input.lines(Duration::from_secs(1))?.next() {
                break parse::<Task>(&line)?;
            }
        };
        let (mut coordinator, begun) = (Coordinator::new(task, RandomState::new().build_hasher().finish()), Instant::now());
        loop {
            let now = begun.elapsed();
            let actions = coordinator.tick(now);
            print(&actions)?;
            if let Some(outcome) = coordinator.outcome() {
                let end = json!({
                    "action": "end",
                    "outcome": outcome,
                    "attempts": coordinator.attempt(),
                    "there": coordinator.there(),
                    "away": coordinator.away(),
                });
                return output::print(&format!("{end}\n")).map(|()| Exit::Done);
            }
            let events: Vec<_> =
                input.lines(coordinator.next_tick(now).saturating_sub(now))?.map(|line| parse::<Event>(&line)).collect::<Result<_, _>>()?;
            for event in events {
                let actions = coordinator.handle(begun.elapsed(), event);
                print(&actions)?;
            }
        }
    }

    fn wants_json(&self) -> bool {
        true
    }
}

fn print(actions: &[Action]) -> Result<(), CommandError> {
    actions.iter().try_for_each(|action| output::print(&format!("{}\n", json!(action))))
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T, CommandError> {
    serde_json::from_slice(line).map_err(|error| CommandError::new(Exit::Usage, format!("{error}: {}", String::from_utf8_lossy(line))))
}

/// What has been read of stdin and has no end of line yet.
#[derive(Default)]
struct Input(Vec<u8>);

impl Input {
    /// The lines that come within this time. Fails at the end: whoever transports the messages has died.
    fn lines(&mut self, within: Duration) -> Result<impl Iterator<Item = Vec<u8>> + use<>, CommandError> {
        let failed = |why: String| CommandError::new(Exit::Failed, format!("stdin: {why}"));
        if poll_each(&[io::stdin().as_fd()], libc::POLLIN, within).is_ok_and(|ready| ready == [true]) {
            let mut part = vec![0; 1 << 16];
            match io::stdin().lock().read(&mut part) {
                Ok(0) => return Err(failed("it has ended".into())),
                Ok(count) => self.0.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        let end = self.0.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let lines: Vec<_> = self.0.drain(..end).collect();
        Ok(lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect::<Vec<_>>().into_iter())
    }
}
