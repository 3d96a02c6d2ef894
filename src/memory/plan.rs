//! What a pause would do, without doing it.

use super::{Allocation, Backup, Memory, Request};
use crate::backup;
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a pause would do now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What would be paused, by tag, in alphabetical order; not what is paused already.
    pub tags: Vec<TagPlan>,
    /// The host memory that it would take.
    pub host: HostRoom,
    /// The inference engine whose prefix cache describes contents that would be dropped: without `force` the pause is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_cache: Option<String>,
}

/// What would be paused of one tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagPlan {
    /// Its name.
    pub tag: String,
    /// How many allocations.
    pub allocations: u64,
    /// Their bytes of device memory.
    pub bytes: u64,
    /// Of those, bytes by what would become of their contents.
    pub backup: BTreeMap<Backup, u64>,
}

/// Host memory for contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoom {
    /// Bytes that the contents need, besides what is retained of them already.
    pub needed_bytes: u64,
    /// Bytes that there are for them.
    pub available_bytes: u64,
}

impl Memory {
    /// What a pause would do now. Changes nothing and waits for nobody.
    pub fn plan(&self, request: &Request) -> Result<Plan, Error> {
        let (all, chosen) = self.choose(request)?;
        let prefix_cache = match request.spare_prefix_cache(&all, &chosen) {
            Err(Error::PrefixCache(engine)) => Some(engine),
            _ => None,
        };
        let (mut tags, mut needed_bytes) = (BTreeMap::<_, TagPlan>::new(), 0);
        for allocation in chosen.into_iter().filter(|allocation| !allocation.is_paused()) {
            let (tag, bytes) = (Arc::clone(&allocation.tag), allocation.bytes() as u64);
            let wanted = request.wanted_of(allocation);
            needed_bytes += backup::fresh_host_bytes(&wanted);
            let plan = tags.entry(tag).or_default();
            plan.allocations += 1;
            plan.bytes += bytes;
            *plan.backup.entry(wanted.policy).or_default() += bytes;
        }
        Ok(Plan {
            tags: tags.into_iter().map(|(tag, plan)| TagPlan { tag: tag.to_string(), ..plan }).collect(),
            host: HostRoom { needed_bytes, available_bytes: backup::available_host_bytes() },
            prefix_cache,
        })
    }
}

impl Request {
    /// Refuses to drop contents that the engine's prefix cache describes: it would answer from zeros, and nobody would know.
    pub(super) fn spare_prefix_cache(&self, all: &[Arc<Allocation>], chosen: &[Arc<Allocation>]) -> Result<(), Error> {
        const KV_CACHE: &str = "kv_cache";
        let Some(engine) = &self.engine else { return Ok(()) };
        // Where nothing has the tag (a version of the engine that is not known), the cache is in what is left.
        let tagged = all.iter().any(|allocation| &*allocation.tag == KV_CACHE);
        let holds_cache = |tag: &str| if tagged { tag == KV_CACHE } else { !["weights", "cuda_graph"].contains(&tag) };
        let drops = |allocation: &&Arc<Allocation>| self.wanted_of(Arc::clone(allocation)).policy == Backup::Discard;
        let lost = chosen.iter().filter(|allocation| !allocation.is_paused() && holds_cache(&allocation.tag)).any(|one| drops(&one));
        if lost { Err(Error::PrefixCache(engine.clone())) } else { Ok(()) }
    }
}
