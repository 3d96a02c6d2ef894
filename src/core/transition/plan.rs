//! Dry runs.

use super::choose::refuse_if_still_lent;
use super::contents::wanted_of;
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_model::{Error, Plan, TagPlan, TransitionRequest};

impl Memory {
    /// What a pause would do now, and why it would then be refused for lack of room for the contents. Changes nothing, and does not wait for
    /// the device.
    pub fn plan(&self, request: &TransitionRequest) -> Result<(Plan, Result<(), Error>), Error> {
        let mut chosen = self.choose(request)?;
        chosen.spare_registered(request)?;
        let prefix_cache = match chosen.spare_prefix_cache(request) {
            Err(Error::PrefixCache(engine)) => Some(engine),
            _ => None,
        };
        refuse_if_still_lent(&chosen.active, request)?;
        let (mut tags, mut all_wanted) = (BTreeMap::<_, TagPlan>::new(), Vec::new());
        for allocation in &chosen.active {
            let wanted = wanted_of(request, allocation);
            let plan = tags.entry(Arc::clone(&allocation.tag)).or_default();
            plan.allocations += 1;
            plan.bytes += allocation.bytes() as u64;
            *plan.backup.entry(wanted.policy).or_default() += allocation.bytes() as u64;
            all_wanted.push(wanted);
        }
        all_wanted.retain(|wanted| !wanted.live.is_empty());
        let (host, admitted) = backup::admit(&all_wanted);
        let admitted = match admitted {
            // As the pause itself does.
            Err(Error::HostMemory { .. }) if self.retained_in_the_way(request).is_some_and(|given_up| !given_up.is_empty()) => Ok(()),
            admitted => admitted,
        };
        let plan = Plan {
            tags: tags.into_iter().map(|(tag, plan)| TagPlan { tag: tag.to_string(), ..plan }).collect(),
            host,
            prefix_cache,
            obstacles: self.obstacles_after(&chosen.active, request),
        };
        Ok((plan, admitted))
    }
}
