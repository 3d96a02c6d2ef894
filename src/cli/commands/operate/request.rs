//! The request of a program, and the operation that it asks for.

use crate::arguments::engine_key;
use crate::ui::lines::Lines;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::env;
use std::sync::Arc;
use std::time::Duration;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::engine::{Addresses, checked_address};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::nodes::{Participant, Terms};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Scope};
use vramctl_model::{NoOther, PauseOptions, Policy, Registered, Verb};

/// Changes only if one side would misunderstand the other.
const VERSION: u32 = 1;

/// What a program asks for. A field that is not known is refused: it would have asked for something.
#[derive(Deserialize)]
#[serde(tag = "operation", rename_all = "snake_case")]
pub enum Request {
    Pause(Pause),
    Resume(Resume),
    Swap(SwapRequest),
    Suspend(SuspendRequest),
    Move(MoveRequest),
    Status(Which),
    Gpus(Nothing),
}

#[derive(Deserialize)]
#[serde(default)]
#[allow(clippy::struct_excessive_bools)] // independent
pub struct Pause {
    target: Who,
    ranks: Option<usize>,
    tags: Vec<String>,
    gpus: Vec<String>,
    #[serde(flatten)]
    options: PauseOptions,
    engines: Option<Vec<String>>,
    hold: bool,
    hold_ms: Option<u64>,
    shared: bool,
    nccl: bool,
    everywhere: BTreeSet<String>,
    timeout_ms: Option<u64>,
    waiting: Option<u32>,
    progress: bool,
    node: Option<Node>,
    #[serde(flatten)]
    _other: NoOther,
}

impl Default for Pause {
    fn default() -> Self {
        Self {
            target: Who::default(),
            ranks: None,
            tags: Vec::new(),
            gpus: Vec::new(),
            options: PauseOptions::default(),
            engines: None,
            hold: true,
            hold_ms: None,
            shared: false,
            nccl: false,
            everywhere: BTreeSet::new(),
            timeout_ms: None,
            waiting: None,
            progress: false,
            node: None,
            _other: NoOther,
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Resume {
    target: Who,
    ranks: Option<usize>,
    tags: Vec<String>,
    self_paused: Option<bool>,
    gpus: Vec<String>,
    timeout_ms: Option<u64>,
    detached: bool,
    progress: bool,
    node: Option<Node>,
}

/// The job has ranks on other nodes: how those of this one take part in one attempt.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    #[serde(default)]
    drain_ms: u64,
    #[serde(default)]
    early: bool,
    lease_ms: u64,
    record: Vec<String>,
}

/// `target` leaves, and `coming` comes.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct SwapRequest {
    target: Who,
    ranks: Option<usize>,
    tags: Vec<String>,
    coming: Who,
    coming_ranks: Option<usize>,
    coming_tags: Vec<String>,
    backup: Option<Policy>,
    registered: Registered,
    force: bool,
    engines: Option<Vec<String>>,
    hold_ms: Option<u64>,
    timeout_ms: Option<u64>,
    waiting: Option<u32>,
    progress: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct SuspendRequest {
    target: Who,
    ranks: Option<usize>,
    backup: Option<Policy>,
    registered: Registered,
    force: bool,
    hold_ms: Option<u64>,
    shared: bool,
    everywhere: BTreeSet<String>,
    dry_run: bool,
    waiting: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct MoveRequest {
    target: Who,
    ranks: Option<usize>,
    to: Vec<String>,
    swap: Option<Who>,
    hold_ms: Option<u64>,
    everywhere: BTreeSet<String>,
    waiting: Option<u32>,
    dry_run: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Which {
    pub target: Who,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// Which processes: `"only"`, `"all"`, `{"pid": …}` or `{"name": …}`.
#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    #[default]
    Only,
    All,
    Pid(u32),
    Name(String),
}

impl From<Who> for Target {
    fn from(who: Who) -> Self {
        match who {
            Who::Only => Self::Only,
            Who::All => Self::All,
            Who::Pid(pid) => Self::Pid(pid),
            Who::Name(name) => Self::Name(name),
        }
    }
}

impl Request {
    /// From a line.
    pub fn parse(line: &str) -> Result<Self, CommandError> {
        let wrong = |error: serde_json::Error| invalid(format!("not a request: {error}"));
        let mut fields: Map<String, Value> = serde_json::from_str(line).map_err(wrong)?;
        // The version first: the rest of a newer one may not parse.
        match fields.remove("version") {
            Some(version) if version == VERSION => serde_json::from_value(Value::Object(fields)).map_err(wrong),
            version => {
                let version = version.map_or_else(|| "none".into(), |version| version.to_string());
                Err(invalid(format!("version {version} of a request is not supported; this command takes version {VERSION}")))
            }
        }
    }

    /// Whether it goes on if the program ends.
    pub fn is_detached(&self) -> bool {
        matches!(self, Self::Resume(Resume { detached: true, .. }))
    }

    /// The participant in an attempt over several nodes, if it is one.
    pub fn participant(&self) -> Result<Option<Arc<Participant>>, CommandError> {
        let (Self::Pause(Pause { node, .. }) | Self::Resume(Resume { node, .. })) = self else { return Ok(None) };
        let Some(Node { drain_ms, early, lease_ms, record }) = node else { return Ok(None) };
        let terms = Terms { drain: time(*drain_ms), early: *early, lease: time(*lease_ms), record: record.clone() };
        let participant = Participant::new(terms, Lines::reached).map_err(|error| CommandError::new(Exit::Failed, error.to_string()))?;
        Ok(Some(Arc::new(participant)))
    }

    /// Whether to report progress.
    pub fn wants_progress(&self) -> bool {
        matches!(
            self,
            Self::Pause(Pause { progress: true, .. })
                | Self::Resume(Resume { progress: true, .. })
                | Self::Swap(SwapRequest { progress: true, .. })
        )
    }
}

impl Pause {
    /// What it asks for.
    pub fn operation(self) -> Result<Operation, CommandError> {
        if !self.hold && (self.shared || self.nccl || self.hold_ms.is_some()) {
            return Err(invalid("`shared`, `nccl` and `hold_ms` need `hold`"));
        }
        let engines = self.engines.unwrap_or_else(engines_of_environment);
        let engines: Vec<_> = engines.iter().map(|address| checked_address(address)).collect::<Result<_, _>>().map_err(invalid)?;
        let pause = HowToPause {
            options: self.options,
            engines: Addresses {
                addresses: engines.into_iter().filter(|address| !address.is_empty()).collect(),
                key: engine_key(),
                always: false,
            },
            hold: if self.hold { hold(self.hold_ms) } else { Hold::No },
            shared: self.shared,
            nccl: self.nccl,
            everywhere: self.everywhere,
            waiting: self.waiting,
        };
        let scope = Scope::Tags { words: self.tags, may_name: false, gpus: self.gpus };
        Ok(operation(Verb::Pause, self.target, scope, self.ranks, self.timeout_ms, pause))
    }
}

impl Resume {
    /// What it asks for.
    pub fn operation(self) -> Operation {
        let scope = Scope::Tags { words: self.tags, may_name: false, gpus: self.gpus };
        let resume = operation(Verb::Resume, self.target, scope, self.ranks, self.timeout_ms, HowToPause::default());
        Operation { self_paused: self.self_paused, ..resume }
    }
}

impl SwapRequest {
    /// The pause and the resume that it asks for.
    pub fn operations(self) -> Result<[Operation; 2], CommandError> {
        let pause = Pause {
            target: self.target,
            ranks: self.ranks,
            tags: self.tags,
            options: PauseOptions { backup: self.backup, registered: self.registered, force: self.force, ..PauseOptions::default() },
            engines: self.engines,
            hold_ms: self.hold_ms,
            timeout_ms: self.timeout_ms,
            waiting: self.waiting,
            ..Pause::default()
        };
        let resume = Resume {
            target: self.coming,
            ranks: self.coming_ranks,
            tags: self.coming_tags,
            timeout_ms: self.timeout_ms,
            ..Resume::default()
        };
        Ok([pause.operation()?, resume.operation()])
    }
}

impl SuspendRequest {
    /// Whether only to say whether it would be refused.
    pub fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    /// What it asks for.
    pub fn operation(self) -> Result<Operation, CommandError> {
        if self.registered == Registered::Keep {
            return Err(invalid("a suspend leaves nothing behind: `registered` is \"refuse\" or \"take\""));
        }
        let pause = HowToPause {
            options: PauseOptions { backup: self.backup, registered: self.registered, force: self.force, ..PauseOptions::default() },
            hold: hold(self.hold_ms),
            shared: self.shared,
            everywhere: self.everywhere,
            waiting: self.waiting,
            ..HowToPause::default()
        };
        Ok(operation(Verb::Pause, self.target, Scope::Device, self.ranks, None, pause))
    }
}

impl MoveRequest {
    /// Whether only to say whether it would be refused.
    pub fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    /// What it asks for.
    pub fn operation(self) -> Operation {
        let scope = Scope::Elsewhere { to: self.to, swap: self.swap.map(Target::from) };
        let pause = HowToPause { hold: hold(self.hold_ms), everywhere: self.everywhere, waiting: self.waiting, ..HowToPause::default() };
        operation(Verb::Pause, self.target, scope, self.ranks, None, pause)
    }
}

fn engines_of_environment() -> Vec<String> {
    env::var("VRAMCTL_ENGINE").unwrap_or_default().split(',').map(str::to_owned).collect()
}

fn operation(verb: Verb, target: Who, scope: Scope, ranks: Option<usize>, timeout_ms: Option<u64>, pause: HowToPause) -> Operation {
    Operation { ranks, ..Operation::new(verb, target.into(), scope, Deadline::new(timeout_ms.map(time)), pause) }
}

fn hold(ms: Option<u64>) -> Hold {
    ms.map_or(Hold::Yes, |ms| Hold::Within(time(ms)))
}

/// Longer than anyone waits is still small enough to add to an `Instant`.
fn time(ms: u64) -> Duration {
    Duration::from_millis(ms.min(1 << 42))
}

fn invalid(why: impl Into<String>) -> CommandError {
    CommandError::new(Exit::Usage, why)
}
