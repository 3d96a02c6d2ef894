//! Dry runs.

use super::choose::refuse_if_still_lent;
use super::contents::wanted_of;
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_model::{Error, HostRoom, Plan, TagPlan, TransitionRequest};

impl Memory {
    /// What a pause would do now. Changes nothing, and does not wait for the device.
    pub fn plan(&self, request: &TransitionRequest) -> Result<Plan, Error> {
        let mut chosen = self.choose(request)?;
        chosen.spare_registered(request)?;
        let prefix_cache = match chosen.spare_prefix_cache(request) {
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
