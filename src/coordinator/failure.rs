//! Why a command failed, and the exit code for scripts.

use serde::{Serialize, Serializer};
use serde_json::json;
use std::borrow::Borrow;
use std::fmt;
use std::io::ErrorKind;
use std::process::ExitCode;
use vramctl_control::client::ClientError;
use vramctl_control::protocol::Refusal;
use vramctl_model::{Error, Kind};

/// The exit codes. Their meaning never changes.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done, or nothing to do.
    Done = 0,
    /// Refused or failed.
    Failed = 1,
    /// Wrong arguments.
    Usage = 2,
    /// No such process.
    NoProcess = 3,
    /// Too little GPU or host memory.
    NoMemory = 4,
    /// Timed out.
    Busy = 5,
    /// No allocation has this tag.
    UnknownTag = 6,
    /// The driver could not restore the program.
    Unsuspendable = 7,
    /// `run`: the command cannot be executed.
    NotExecutable = 126,
    /// `run`: the command was not found.
    NotFound = 127,
}

impl Exit {
    /// All of them, in order.
    pub const ALL: [Self; 10] = [
        Self::Done,
        Self::Failed,
        Self::Usage,
        Self::NoProcess,
        Self::NoMemory,
        Self::Busy,
        Self::UnknownTag,
        Self::Unsuspendable,
        Self::NotExecutable,
        Self::NotFound,
    ];

    /// The text in the help, in lines.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Done => "done, or nothing to do",
            Self::Failed => "refused or failed",
            Self::Usage => "wrong arguments, or several processes are managed and none was chosen",
            Self::NoProcess => "no such process, or no process is managed",
            Self::NoMemory => "not enough GPU or host memory",
            Self::Busy => {
                "timed out: GPU work, a graph capture or requests still running, memory\n\
                 of another process still paused, or no answer"
            }
            Self::UnknownTag => "no allocation has this tag",
            Self::Unsuspendable => {
                "the driver could not restore the program; nothing has changed, unless\n\
             the message says that tags are paused"
            }
            Self::NotExecutable => "run: the command cannot be executed",
            Self::NotFound => "run: the command was not found; else `run` returns the command's code",
        }
    }

    /// The code of a failure in the command itself. A lack of memory is always a [`Refusal`], with figures.
    fn code(self) -> &'static str {
        match self {
            Self::Usage => "invalid",
            Self::NoProcess => "no_process",
            Self::Busy => "busy",
            Self::UnknownTag => "unknown_tag",
            Self::Unsuspendable => "not_restorable",
            Self::Done | Self::Failed | Self::NoMemory | Self::NotExecutable | Self::NotFound => "failed",
        }
    }

    /// The first failure of several.
    #[must_use]
    pub fn or(self, next: Self) -> Self {
        if self == Self::Done { next } else { self }
    }
}

impl From<Kind> for Exit {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::DeviceMemory | Kind::HostMemory => Self::NoMemory,
            Kind::Busy | Kind::Capturing | Kind::Shared | Kind::Leased | Kind::Suspended => Self::Busy,
            Kind::NotRestorable => Self::Unsuspendable,
            Kind::UnknownTag => Self::UnknownTag,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A process to choose, as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Its id.
    pub pid: u32,
    /// Its name, or `?`.
    pub name: String,
    /// The state of its memory.
    pub state: String,
    /// Its managed memory.
    pub bytes: String,
    /// Its command line.
    pub command: String,
}

/// Why a command failed. As JSON, an object with `code` and `message`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    /// A process refused, with the protocol's code.
    Refused(Box<Refusal>),
    /// Failed in the command itself.
    Here {
        /// The exit code.
        exit: Exit,
        /// Why, in words.
        message: String,
        /// What to choose from.
        choices: Vec<Choice>,
    },
}

/// A code of the protocol, or one of the command's own: the same for all who ask (`docs/protocol.md`).
impl Serialize for CommandError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (exit, message, choices) = match self {
            Self::Refused(refusal) => return refusal.serialize(serializer),
            Self::Here { exit, message, choices } => (exit, message, choices),
        };
        if *exit == Exit::Usage && !choices.is_empty() {
            let pids: Vec<_> = choices.iter().map(|choice| choice.pid).collect();
            return json!({ "code": "several_processes", "message": message, "pids": pids }).serialize(serializer);
        }
        json!({ "code": exit.code(), "message": message }).serialize(serializer)
    }
}

impl CommandError {
    /// A failure in the command itself.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self::Here { exit, message: message.into(), choices: Vec::new() }
    }

    /// The first of several failures that is not only an undoing because of another one.
    pub fn original<E: Borrow<Self>>(failures: impl IntoIterator<Item = E>) -> Option<E> {
        failures.into_iter().min_by_key(|failure| failure.borrow().is(Kind::Aborted))
    }

    /// Adds what to choose from. The message must make sense without it.
    #[must_use]
    pub fn with_choices(self, choices: Vec<Choice>) -> Self {
        match self {
            Self::Here { exit, message, .. } => Self::Here { exit, message, choices },
            refused @ Self::Refused(_) => refused,
        }
    }

    /// What to choose from, if the command did not say which.
    pub fn choices(&self) -> &[Choice] {
        match self {
            Self::Here { choices, .. } => choices,
            Self::Refused(_) => &[],
        }
    }

    /// Appends to the message.
    #[must_use]
    pub fn adding(mut self, more: &str) -> Self {
        match &mut self {
            Self::Refused(refusal) => refusal.message += more,
            Self::Here { message, .. } => *message += more,
        }
        self
    }

    /// The same with another message.
    #[must_use]
    pub fn saying(mut self, text: impl Into<String>) -> Self {
        match &mut self {
            Self::Refused(refusal) => refusal.message = text.into(),
            Self::Here { message, .. } => *message = text.into(),
        }
        self
    }

    /// As a process would have said it.
    pub fn into_refusal(self) -> Box<Refusal> {
        match self {
            Self::Refused(refusal) => refusal,
            Self::Here { exit, message, .. } => {
                let error = if exit == Exit::Busy { Error::Late(message) } else { Error::Invalid(message) };
                Box::new(Refusal::from(&error))
            }
        }
    }

    /// Whether a process refused for this reason.
    pub fn is(&self, kind: Kind) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == kind)
    }

    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Refused(refusal) => Exit::from(refusal.code),
            Self::Here { exit, .. } => *exit,
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => out.write_str(&refusal.message),
            Self::Here { message, .. } => out.write_str(message),
        }
    }
}

impl From<ClientError> for CommandError {
    fn from(error: ClientError) -> Self {
        let gone = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused);
        match error {
            ClientError::Refused(refusal) => Self::Refused(refusal),
            // Only connecting can fail this way; for answers the client waits.
            ClientError::Io { error, .. } if error.kind() == ErrorKind::WouldBlock => {
                Self::new(Exit::Busy, "no answer: it takes no connections; is it stopped?")
            }
            ClientError::Io { error, .. } if error.kind() == ErrorKind::TimedOut => Self::new(Exit::Busy, error.to_string()),
            ClientError::Io { pid, error } if gone(error.kind()) => Self::new(Exit::NoProcess, format!("process {pid} has ended")),
            error @ ClientError::Io { .. } => Self::new(Exit::Failed, error.to_string()),
        }
    }
}

impl From<&Error> for CommandError {
    fn from(error: &Error) -> Self {
        Self::Refused(Box::new(Refusal::from(error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts compare these; a changed one breaks them silently.
    #[test]
    fn the_exit_codes_never_change() {
        assert_eq!(Exit::ALL.map(|exit| exit as u8), [0, 1, 2, 3, 4, 5, 6, 7, 126, 127]);
        assert_eq!(CommandError::from(&Error::Capturing).exit(), Exit::Busy);
        assert_eq!(CommandError::from(&Error::HostMemory { needed: 2, available: 1, capped: false }).exit(), Exit::NoMemory);
        assert_eq!(CommandError::from(&Error::Unsupported).exit(), Exit::Failed);
    }

    #[test]
    fn the_scripts_have_the_same_exit_codes() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/control.sh");
        let program = format!(
            "set -e; . {script}; for code in \"$@\"; do judge \"{{\\\"reply\\\":\\\"error\\\",\\\"code\\\":\\\"$code\\\"}}\"; done"
        );
        let kinds = Kind::ALL;
        assert!(kinds.len() >= 21);
        let names = kinds.iter().map(|kind| serde_json::to_value(kind).unwrap().as_str().unwrap().to_owned());
        let said = std::process::Command::new("sh").args(["-c", &program, "sh"]).args(names).output().unwrap();
        let wanted: Vec<_> = kinds.iter().map(|kind| (Exit::from(*kind) as u8).to_string()).collect();
        assert_eq!(String::from_utf8(said.stdout).unwrap().lines().collect::<Vec<_>>(), wanted, "of {kinds:?}");
    }

    #[test]
    fn as_json_every_failure_has_a_code_and_a_message() {
        let here = serde_json::to_value(CommandError::new(Exit::NoProcess, "gone")).unwrap();
        assert_eq!(here, serde_json::json!({"code": "no_process", "message": "gone"}));
        let refused = serde_json::to_value(CommandError::from(&Error::Capturing)).unwrap();
        assert_eq!(refused["code"], "capturing");
    }
}
