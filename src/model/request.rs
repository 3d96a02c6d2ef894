//! Requests for a pause or resume, as they go over the socket, split by who asks for what. What the process itself adds is in core
//! (`transition/request.rs`).
//!
//! A process refuses a field that it does not know: the caller would rely on it.

use crate::{Amounts, Policy, Registered, Verb, milliseconds};
use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Not;
use std::time::Duration;

/// The tag of NCCL's own memory. All ranks give it up together, so a pause of all tags includes it only if the request says so.
pub const NCCL: &str = "nccl";

/// Which memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// The tags; none means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Ignore tags that no allocation has, instead of failing: another process of the job has them.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub lenient: bool,
    /// The GPUs, by their UUIDs; none means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Pause only: without tags, also the memory of NCCL itself (tag `nccl`). All ranks of its communicators must be paused together.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub nccl: bool,
}

impl Selection {
    /// Whether a pause selects a tag. NCCL's own memory must be named, or wanted.
    pub fn selects(&self, tag: &str) -> bool {
        if self.tags.is_empty() { self.nccl || tag != NCCL } else { self.tags.iter().any(|wanted| wanted == tag) }
    }

    /// Whether a pause takes everything that the driver could not restore. Then it also takes the host memory that processes share.
    pub fn is_everything(&self) -> bool {
        self.nccl && self.tags.is_empty()
    }
}

/// How to pause: what whoever asks can choose, for one process or for a job. All clients pass these on as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseOptions {
    /// The backup policy, overriding the allocations' own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<Policy>,
    /// The policy for single tags, overriding `backup`. `None` means the allocations' own policies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub backups: BTreeMap<String, Option<Policy>>,
    /// Discard a KV cache even if an engine's prefix cache still describes it. The client takes care of that.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub force: bool,
    /// Keep no KV cache whose engine has reset its prefix cache, if no call has passed since.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub forgets_cache: bool,
    /// What to do with memory that another process, a network card or NCCL has registered.
    #[serde(default, skip_serializing_if = "Registered::is_default")]
    pub registered: Registered,
    /// Map a small block of memory under the paused addresses, so that a stray access does not destroy the context. Best effort.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub guard: bool,
}

/// The other processes that take part in a pause of this one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Participants {
    /// The processes that are paused together with this one, with the same selection. Memory that they have open of each other does not block
    /// the pause: each sets aside what the request selects until it is resumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partners: Vec<u32>,
    /// The processes that set aside their open memory of this process ([`SetAside`]), and pause none of their own. They do not block the pause
    /// either.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowers: Vec<u32>,
}

impl Participants {
    /// Whether a process sets aside its open memory of this one.
    pub fn has(&self, pid: u32) -> bool {
        self.partners.contains(&pid) || self.borrowers.contains(&pid)
    }
}

/// Takes memory away.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseRequest {
    /// Which memory.
    #[serde(flatten)]
    pub selection: Selection,
    /// How.
    #[serde(flatten)]
    pub options: PauseOptions,
    /// How long to wait for the device's work; `None`: without limit.
    #[serde(default, rename = "timeout_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// Whether to send progress lines before the answer.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub progress: bool,
    /// Hold the program, so that it need not be idle: its calls that start device work wait until everything is resumed. How long to wait for
    /// calls and work in flight.
    #[serde(default, rename = "hold_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub hold: Option<Duration>,
    /// With `hold`: the process is about to leave its GPUs as a whole. Until it is back or resumed, it stays held even if nothing of it is paused:
    /// it would take new memory there.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub leaves: bool,
    /// The epoch of the scheduler that asks (`vramctl run --share`): the program's calls bring the memory back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<u64>,
    /// With `scheduler`: takes only so many allocations of these classes and sizes of the selected memory. If there are fewer by now, as many bytes,
    /// the cheapest first, with no more contents. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amounts: Option<Amounts>,
    /// The other processes that take part.
    #[serde(flatten)]
    pub participants: Participants,
    /// In a swap, this job leaves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<SwapOut>,
    /// Refuses any other field.
    #[serde(flatten)]
    pub other: NoOther,
}

/// Gives memory back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeRequest {
    /// Which memory.
    #[serde(flatten)]
    pub selection: Selection,
    /// How long to wait for memory that others hold; `None`: not at all. In a swap, for each piece of it.
    #[serde(default, rename = "timeout_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// Whether to send progress lines before the answer.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub progress: bool,
    /// Whoever asks tries again if memory is short. Then the process does not report it as out of memory yet.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub tries_again: bool,
    /// From another process: also what the program has paused itself. Otherwise that stays paused, so that a program that is paused and resumed
    /// from outside is as it was.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub self_paused: bool,
    /// The epoch of the scheduler that asks: brings back only what nobody but a scheduler has paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<u64>,
    /// In a swap, this job comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<SwapIn>,
    /// Refuses any other field.
    #[serde(flatten)]
    pub other: NoOther,
}

/// Pauses nothing of this process, and sets aside its open memory of the partners that the request selects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// Which memory.
    #[serde(flatten)]
    pub selection: Selection,
    /// How long to wait for the device's work; `None`: without limit.
    #[serde(default, rename = "timeout_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// The processes that pause this memory of theirs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partners: Vec<u32>,
    /// Refuses any other field.
    #[serde(flatten)]
    pub other: NoOther,
}

/// The part of the job that leaves in a swap: the pause gives memory back as soon as its contents are saved. If the pause is not committed, it
/// takes new memory and copies the contents back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapOut {
    /// How much the other job needs on each GPU, by UUID, beyond what is free. The rest of the memory there goes at the commit, because the driver
    /// zeroes what it gets with the engines that copy (`backup/copier`). Without an entry, the other job needs all of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub needed: BTreeMap<String, Needed>,
    /// On a host without room for the contents of both, host memory changes hands, too: the pause takes each piece that the other job gives
    /// back, and waits for the next one at most this long.
    #[serde(default, rename = "host_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub host: Option<Duration>,
}

/// The part of the job that comes in a swap: the resume takes memory piece by piece as the other job gives it back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapIn {
    /// Host memory changes hands, too: the resume gives each piece back once its contents are on the device. If the resume is not committed, it
    /// saves these again.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub host: bool,
}

/// How much memory a job that comes needs on a GPU beyond what is free, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Needed {
    /// For the memory with contents, which are copied while the other job still leaves.
    pub for_contents: u64,
    /// For all memory.
    pub for_all: u64,
}

/// A pause or a resume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "of", rename_all = "lowercase")]
pub enum Transition {
    /// Take memory away.
    Pause(PauseRequest),
    /// Give it back.
    Resume(ResumeRequest),
}

impl Transition {
    /// Which of the two.
    pub fn verb(&self) -> Verb {
        match self {
            Self::Pause(_) => Verb::Pause,
            Self::Resume(_) => Verb::Resume,
        }
    }

    /// If it is a pause.
    pub fn pause(&self) -> Option<&PauseRequest> {
        if let Self::Pause(pause) = self { Some(pause) } else { None }
    }

    /// If it is a resume.
    pub fn resume(&self) -> Option<&ResumeRequest> {
        if let Self::Resume(resume) = self { Some(resume) } else { None }
    }

    /// Whether it is a resume that also brings back what the program has paused itself.
    pub fn self_paused(&self) -> bool {
        self.resume().is_some_and(|resume| resume.self_paused)
    }

    /// Whether to send progress lines before the answer.
    pub fn progress(&self) -> bool {
        match self {
            Self::Pause(pause) => pause.progress,
            Self::Resume(resume) => resume.progress,
        }
    }

    /// The epoch of the scheduler that asks, if one does.
    pub fn scheduler(&self) -> Option<u64> {
        match self {
            Self::Pause(pause) => pause.scheduler,
            Self::Resume(resume) => resume.scheduler,
        }
    }

    /// Whether it is a pause that holds the program.
    pub fn holds(&self) -> bool {
        self.pause().is_some_and(|pause| pause.hold.is_some())
    }

    /// Which memory.
    pub fn selection(&self) -> &Selection {
        match self {
            Self::Pause(pause) => &pause.selection,
            Self::Resume(resume) => &resume.selection,
        }
    }
}

/// The last field of a request with `serde(flatten)`: refuses what no other field has taken. serde's `deny_unknown_fields` does not go with
/// `flatten`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoOther;

impl Serialize for NoOther {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_map(Some(0))?.end()
    }
}

impl<'de> Deserialize<'de> for NoOther {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Nothing;

        impl<'de> Visitor<'de> for Nothing {
            type Value = NoOther;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "no other field")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<NoOther, A::Error> {
                match fields.next_key::<String>()? {
                    Some(name) => Err(de::Error::custom(format_args!("unknown field `{name}`"))),
                    None => Ok(NoOther),
                }
            }
        }

        from.deserialize_map(Nothing)
    }
}

/// Durations go over the socket as whole milliseconds.
mod in_milliseconds {
    use super::{Deserialize, Deserializer, Duration, Serialize, Serializer, milliseconds};

    #[allow(clippy::ref_option)] // serde calls it so
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        duration.map(milliseconds).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(Duration::from_millis))
    }
}
