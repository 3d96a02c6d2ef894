//! What a [`Coordinator`](super::coordinator::Coordinator) hears and wants, as JSON. `docs/protocol.md` describes it.

#![allow(missing_docs)] // of fields, whose names say it

use crate::barrier::Step;
use crate::nodes::Word;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// A process of a job over several nodes: the node, and its process id there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeRank(pub String, pub u32);

/// What is asked of a coordinator.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// As for `vramctl operate`.
    pub request: Map<String, Value>,
    /// Where ranks may be.
    pub nodes: BTreeSet<String>,
    /// The ranks that the job had when it was last paused or resumed, and how many there must be, if somebody said so.
    #[serde(default)]
    pub members: BTreeSet<NodeRank>,
    /// How many ranks there must be, if somebody said so.
    #[serde(default)]
    pub ranks: Option<usize>,
    /// The participant's command that reads the record of an attempt, without its number.
    #[serde(default)]
    pub record: Vec<String>,
}

/// What happens.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A participant has answered.
    Heard { node: String, attempt: u32, reply: Reply },
    /// A participant cannot be reached any more.
    Lost { node: String, why: String },
    /// A node does not belong to the cluster any more. Further attempts are without it, and its ranks are missing.
    Gone { node: String },
    /// What the record says. `None`: its store did not answer.
    Recorded { attempt: u32, committed: Option<bool> },
    /// How the ranks of a node are.
    Looked { node: String, state: Looked },
    /// Nobody wants the operation any more. What is decided is completed.
    Cancel,
}

/// What a participant answers.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Nothing so far.
    None { told: Option<u32> },
    /// It has reached a step: the answer to the word of this `number`. `told`: the number of the last word that has come.
    Reached { told: Option<u32>, number: u32, step: Step, processes: Option<Vec<Value>> },
    /// It has ended.
    Outcome(Outcome),
}

/// How a participant has ended.
#[derive(Debug, Clone, Deserialize)]
pub struct Outcome {
    /// Whether what was asked for is done. `None` if nobody knows.
    pub committed: Option<bool>,
    /// Its ranks.
    #[serde(default)]
    pub processes: Vec<Value>,
    /// Why it failed.
    pub error: Option<Value>,
    /// They are gone with the node.
    #[serde(skip)]
    pub(super) is_gone: bool,
}

/// How the ranks of a node are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Looked {
    /// They have done what was asked for.
    Done,
    /// They have not.
    AsItWas,
    /// They are gone with the node.
    Gone,
    /// Nobody knows.
    Unknown,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Tell the participant of a node; the answer is [`Event::Heard`].
    Say(Say),
    /// Set the attempt's record to committed, unless it is set; what it says is [`Event::Recorded`].
    Record { attempt: u32 },
    /// Find out how the ranks of a node are: [`Event::Looked`].
    Look { node: String },
}

/// Something for a participant. [`Word::Renew`] is answered at once, with the last answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Say {
    pub node: String,
    pub attempt: u32,
    /// `None` begins the attempt, with a `request`.
    pub word: Option<Word>,
    /// Which of the words in this attempt this is. One that has come is not told again, and answered again.
    pub number: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<Value>,
    /// Not before so much time from now, so that all nodes hold their ranks at once: the less they are apart, the more often do the ranks stand at
    /// the same collective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<f64>,
}
