//! Dry runs, and the check that protects prefix caches.

use super::Chosen;
use super::pause::{policy_for, refuse_if_still_lent, wanted_of};
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_model::{Backup, Error, HostRoom, Plan, TagPlan, TransitionRequest};

impl Memory {
    /// What a pause would do now. Changes nothing, and does not wait for the device.
    pub fn plan(&self, request: &TransitionRequest) -> Result<Plan, Error> {
        let mut chosen = self.choose(request)?;
        chosen.spare_registered(request)?;
        let prefix_cache = match spare_prefix_cache(request, &chosen) {
            Err(Error::PrefixCache(engine)) => Some(engine),
            _ => None,
        };
        refuse_if_still_lent(&chosen.active, request)?;
        let (mut tags, mut needed_bytes) = (BTreeMap::<_, TagPlan>::new(), 0);
        for allocation in &chosen.active {
            let wanted = wanted_of(request, allocation);
            needed_bytes += backup::fresh_host_bytes(&wanted);
            let plan = tags.entry(Arc::clone(&allocation.tag)).or_default();
            plan.allocations += 1;
            plan.bytes += allocation.bytes() as u64;
            *plan.backup.entry(wanted.policy).or_default() += allocation.bytes() as u64;
        }
        Ok(Plan {
            tags: tags.into_iter().map(|(tag, plan)| TagPlan { tag: tag.to_string(), ..plan }).collect(),
            host: HostRoom { needed_bytes, available_bytes: backup::available_host_bytes() },
            prefix_cache,
            obstacles: self.obstacles_after(&chosen.active, request),
            communicators: Vec::new(),
        })
    }
}

/// Refuses to drop contents that the engine's prefix cache describes: the engine would silently answer from zeros.
pub(super) fn spare_prefix_cache(request: &TransitionRequest, chosen: &Chosen) -> Result<(), Error> {
    const KV_CACHE: &str = "kv_cache";
    let Some(engine) = &request.engine else { return Ok(()) };
    // If nothing has the tag (an unknown engine version), assume the cache is in everything else.
    let tagged = chosen.all.iter().any(|allocation| &*allocation.tag == KV_CACHE);
    let holds_cache = |tag: &str| if tagged { tag == KV_CACHE } else { !["weights", "cuda_graph"].contains(&tag) };
    let lost = chosen.active.iter().any(|one| holds_cache(&one.tag) && policy_for(request, one) == Backup::Discard);
    if lost { Err(Error::PrefixCache(engine.clone())) } else { Ok(()) }
}
