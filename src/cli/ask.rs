//! One question to each of several processes, and their answers.

use crate::ui::output;
use serde::Serialize;
use serde_json::json;
use vramctl_control::client::{Client, ClientError};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process};

/// Asks one after the other, as the answers are taken.
pub fn each<T>(
    found: &Found,
    processes: Vec<Process>,
    question: impl Fn(&mut Client) -> Result<T, ClientError>,
) -> impl Iterator<Item = (Process, Result<T, CommandError>)> {
    processes.into_iter().map(move |process| {
        let answer = found.connect(process.pid).and_then(|mut client| question(&mut client));
        (process, answer.map_err(CommandError::from))
    })
}

/// Prints the answers: as JSON under `key`, or as `text`. The exit code is that of the first failure.
pub fn print<T: Serialize>(
    answers: impl IntoIterator<Item = (Process, Result<T, CommandError>)>,
    json: bool,
    key: &str,
    text: impl Fn(&Process, &T) -> String,
) -> Result<Exit, CommandError> {
    let (mut exit, mut objects) = (Exit::Done, Vec::new());
    for (process, answer) in answers {
        if let Err(failure) = &answer {
            exit = exit.or(failure.exit());
        }
        match answer {
            _ if json => {
                let (key, value) = answer.map_or_else(|failure| ("error", json!(failure)), |answer| (key, json!(answer)));
                objects.push(json!({ "pid": process.pid, "name": process.name(), key: value }));
            }
            Ok(answer) => output::say(&text(&process, &answer))?,
            Err(failure) => output::complain("error", &format!("{process}: {failure}")),
        }
    }
    if json {
        output::json(&objects)?;
    }
    Ok(exit)
}
