//! A request for a pause or resume, as core carries it out and as it goes over the socket.

use crate::{Policy, Registered, Span, milliseconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The tag of NCCL's own memory. All ranks give it up together, so a pause of all tags includes it only if the request says so.
pub const NCCL: &str = "nccl";

/// What a job lacks on a GPU in order to come, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lacking {
    /// For what has contents, which are copied while the other job still leaves.
    pub for_contents: u64,
    /// For all of it.
    pub for_all: u64,
}

/// What to pause or resume, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // independent fields of a request
pub struct TransitionRequest {
    /// The tags; none means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Pause only: without tags, also the memory of NCCL itself (tag `nccl`). All ranks of its communicators must be paused together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub nccl: bool,
    /// Ignore tags that no allocation has, instead of failing: another process of the job has them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lenient: bool,
    /// The GPUs, by their UUIDs; none means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Pause only: the backup policy, overriding the allocations' own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<Policy>,
    /// Pause only: the policy for single tags, overriding `backup`. `None` means the allocations' own policies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub backups: BTreeMap<String, Option<Policy>>,
    /// How long to wait: a pause for the device's work (`None`: without limit), a resume for memory that others hold (`None`: not at all).
    #[serde(default, rename = "timeout_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// Whether to send progress lines before the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub progress: bool,
    /// Pause only: discard a KV cache even if an engine's prefix cache still describes it. The client takes care of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Pause only: what to do with memory that another process, a network card or NCCL has registered.
    #[serde(default, skip_serializing_if = "Registered::is_default")]
    pub registered: Registered,
    /// Pause only: hold the program, so that it need not be idle: its calls that start device work wait until everything is resumed. How
    /// long to wait for calls and work in flight.
    #[serde(default, rename = "hold_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub hold: Option<Duration>,
    /// Pause only, with `hold`: the process is about to leave its GPUs as a whole. Until it is back or resumed, it stays held even if nothing of it
    /// is paused: it would take new memory there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves: bool,
    /// Pause only: map a small block of memory under the paused addresses, so that a stray access does not destroy the context. Best effort.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guard: bool,
    /// Pause only: the processes that are paused together with this one, with the same `tags` and `gpus`. Memory that they have open of
    /// each other does not block the pause: each sets aside what the request selects until it is resumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partners: Vec<u32>,
    /// Pause only: the processes that set aside their open memory of this process (`set-aside`), and pause none of their own. They do not
    /// block the pause either.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowers: Vec<u32>,
    /// Resume only: whoever asks tries again if memory is short. Then the process does not report it as out of memory yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tries_again: bool,
    /// Resume only, from another process: also what the program has paused itself. Otherwise that stays paused, so that a program that is paused and
    /// resumed from outside is as it was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub self_paused: bool,
    /// As part of a swap. A pause gives memory back as soon as its contents are saved, and if it is not committed, takes new memory and copies
    /// the contents back. A resume takes memory piece by piece as the other job gives it back; `timeout` limits the wait for each piece.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hand_over: bool,
    /// Pause only, with `hand_over`: what the other job lacks on each GPU, by UUID. The rest of the memory there goes at the commit, because the
    /// driver zeroes what it gets with the engines that copy (`backup/copier`). Without an entry, all of it is lacking.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lacking: BTreeMap<String, Lacking>,
    /// With `hand_over`, on a host without room for the contents of both: host memory goes over, too, through the system. A resume gives each
    /// piece back once its contents are on the device, and if it is not committed, saves these again. A pause takes each piece as it comes, and
    /// waits for the next one at most this long.
    #[serde(default, rename = "hand_over_host_ms", with = "in_milliseconds", skip_serializing_if = "Option::is_none")]
    pub hand_over_host: Option<Duration>,
    /// Pause only, from inside the process: device memory whose contents need not be kept, whatever the policy.
    #[serde(skip)]
    pub unused: Vec<Span>,
    /// Set by the process, pause only: the inference engine whose KV cache must not be discarded because its prefix cache describes it.
    #[serde(skip)]
    pub engine: Option<String>,
    /// Set by the process: another process asks.
    #[serde(skip)]
    pub is_from_outside: bool,
    /// Set by the process: it is a borrower, which sets aside memory that its partners pause, and pauses nothing of its own.
    #[serde(skip)]
    pub is_borrower: bool,
}

impl TransitionRequest {
    /// Whether a pause selects a tag. NCCL's own memory must be named, or wanted.
    pub fn selects(&self, tag: &str) -> bool {
        if self.tags.is_empty() { self.nccl || tag != NCCL } else { self.tags.iter().any(|wanted| wanted == tag) }
    }

    /// Whether nothing may stay that the driver could not restore: also the host's memory that processes pass each other.
    pub fn leaves_nothing(&self) -> bool {
        self.nccl && self.tags.is_empty()
    }

    /// Whether another process takes part in the pause and sets aside its open memory of this process.
    pub fn has_along(&self, pid: u32) -> bool {
        self.partners.contains(&pid) || self.borrowers.contains(&pid)
    }
}

/// Durations go over the socket as whole milliseconds.
mod in_milliseconds {
    use super::{Deserialize, Duration, Serialize, milliseconds};
    use serde::{Deserializer, Serializer};

    #[allow(clippy::ref_option)] // serde calls it so
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        duration.map(milliseconds).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(Duration::from_millis))
    }
}
