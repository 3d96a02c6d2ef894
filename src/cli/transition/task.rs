//! Plans a pause or resume for each process, and describes the state after an interrupt.

use crate::failure::CommandError;
use crate::processes::Process;
use crate::status::come_so_far;
use std::collections::BTreeSet;
use std::fmt;
use vramctl_model::{Error, TagState, Verb};

/// The request for one process. Empty if the process has none of the tags.
#[derive(Debug)]
pub struct Task {
    pub process: Process,
    /// The process's tags that match.
    pub meant: Vec<String>,
    /// Of these, the tags not yet in the wanted state.
    pub due: Vec<String>,
}

impl Task {
    /// The state in which an interrupted command leaves the process.
    pub fn left(&self, direction: Verb, now: Option<&Process>) -> Left {
        let status = match now.map(|process| &process.status) {
            Some(Ok(status)) => status,
            Some(Err(failure)) => return Left::Unknown(failure.to_string()),
            None => return Left::Unknown("the process has ended".into()),
        };
        let meant: Vec<_> = status.memory.tags.iter().filter(|tag| self.meant.contains(&tag.tag)).collect();
        match meant.iter().find(|tag| matches!(tag.state, TagState::Pausing | TagState::Resuming)) {
            Some(tag) => Left::GoingOn(come_so_far(tag)),
            None if meant.iter().all(|tag| tag.state == direction.end()) => Left::Done,
            None => Left::AsItWas,
        }
    }
}

/// Plans the request for each process. A tag missing from one process is a no-op there; a tag missing from all is an error.
pub fn plan(direction: Verb, processes: Vec<Process>, tags: &[String]) -> Result<Vec<Task>, CommandError> {
    let known: BTreeSet<_> = processes
        .iter()
        .filter_map(|process| process.status.as_ref().ok())
        .flat_map(|status| status.memory.tags.iter().map(|tag| tag.tag.clone()))
        .collect();
    let unknown: BTreeSet<_> = tags.iter().filter(|tag| !known.contains(*tag)).cloned().collect();
    if !unknown.is_empty() {
        return Err(CommandError::from(&Error::UnknownTag { unknown: unknown.into_iter().collect(), known: known.into_iter().collect() }));
    }
    let task = |process: Process| {
        let there = process.status.as_ref().map_or(&[][..], |status| &status.memory.tags);
        let meant: Vec<_> = there.iter().filter(|tag| tags.is_empty() || tags.contains(&tag.tag)).collect();
        let names = |tags: &[&vramctl_model::TagStatus]| tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        let due: Vec<_> = meant.iter().copied().filter(|tag| tag.state != direction.end()).collect();
        let (meant, due) = (names(&meant), names(&due));
        Task { process, meant, due }
    };
    Ok(processes.into_iter().map(task).collect())
}

/// How an interrupted command leaves a process.
#[derive(Debug, PartialEq, Eq)]
pub enum Left {
    /// With its progress.
    GoingOn(String),
    Done,
    AsItWas,
    Unknown(String),
}

impl fmt::Display for Left {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GoingOn(so_far) => write!(out, "is being undone{so_far}; `vramctl status` shows when that is done"),
            Self::Done => write!(out, "is complete"),
            Self::AsItWas => write!(out, "was cancelled; nothing has changed"),
            Self::Unknown(why) => write!(out, "has an unknown outcome: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;
    use crate::processes::tests::process;

    fn names(tags: &[&str]) -> Vec<String> {
        tags.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tag_must_be_known_somewhere() {
        let two = || vec![process(1, "a", &[("x", TagState::Active)]), process(2, "b", &[("y", TagState::Active)])];
        let tasks = plan(Verb::Pause, two(), &names(&["y"])).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[1].meant), (&names(&[]), &names(&["y"])));
        let failure = plan(Verb::Pause, two(), &names(&["y", "z"])).unwrap_err();
        assert_eq!(failure.exit(), Exit::UnknownTag);
        assert_eq!(failure.to_string(), "no allocation has the tag z; the tags are x, y");
    }

    #[test]
    fn only_tags_that_need_a_change_are_named() {
        let half = process(1, "a", &[("x", TagState::Paused), ("y", TagState::Mixed)]);
        let tasks = plan(Verb::Pause, vec![half], &[]).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[0].due), (&names(&["x", "y"]), &names(&["y"])));
    }
}
