//! Dry runs.

use super::choose::{Chosen, comes_back, refuse_if_still_lent};
use super::contents::wanted_of;
use super::hand_over::is_free_to_go;
use super::restored::can_change_hands;
use super::{Pause, Resume, flow_of};
use crate::memory::{Allocation, Memory};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramctl_backup as backup;
use vramctl_driver as driver;
use vramctl_model::{Error, GpuPlan, HandOver, Moving, Plan, Policy, TagPlan};

impl Memory {
    /// What a pause would do now, and the error if there is no room for the contents. Changes nothing, and does not wait for
    /// the device.
    pub fn plan_pause(&self, pause: &Pause) -> Result<(Plan, Result<(), Error>), Error> {
        let request = &pause.request;
        let mut chosen = self.choose_for(pause)?;
        chosen.spare_registered(request)?;
        let prefix_cache = match chosen.spare_prefix_cache(pause) {
            Err(Error::PrefixCache(engine)) => Some(engine),
            _ => None,
        };
        refuse_if_still_lent(&chosen.active, &request.participants)?;
        let (mut tags, mut all_wanted) = (BTreeMap::<_, TagPlan>::new(), Vec::new());
        for allocation in &chosen.active {
            let wanted = wanted_of(pause, allocation);
            let plan = tags.entry(Arc::clone(&allocation.tag)).or_default();
            plan.allocations += 1;
            plan.bytes += allocation.bytes() as u64;
            *plan.backup.entry(wanted.policy).or_default() += allocation.bytes() as u64;
            all_wanted.push(wanted);
        }
        all_wanted.retain(|wanted| !wanted.live.is_empty());
        let (host, admitted) = backup::admit(&all_wanted, flow_of(request.swap.as_ref()));
        let admitted = match admitted {
            // As the pause itself does.
            Err(Error::HostMemory { .. }) if self.retained_in_the_way(pause).is_some_and(|given_up| !given_up.is_empty()) => Ok(()),
            admitted => admitted,
        };
        let plan = Plan {
            tags: tags.into_iter().map(|(tag, plan)| TagPlan { tag: tag.to_string(), ..plan }).collect(),
            gpus: by_gpu(&chosen.active),
            host,
            prefix_cache,
            obstacles: self.obstacles_after(&chosen.active, request),
            hand_over: request.swap.as_ref().and_then(|swap| swap.host).map(|_| leaving(&chosen, pause, host.needed_bytes)),
        };
        Ok((plan, admitted))
    }

    /// What a resume would give back in a swap in which host memory changes hands.
    pub fn plan_resume(&self, resume: &Resume) -> Result<Plan, Error> {
        let chosen = self.choose(&resume.request.selection)?;
        let coming: Vec<_> = chosen.paused.iter().filter(|one| can_change_hands(one) && comes_back(resume, one)).collect();
        let backups: Vec<_> = coming.iter().filter_map(|allocation| allocation.contents().state.saved().cloned()).collect();
        let coming = moving(&coming, backup::given_back(&backups));
        let hand_over = HandOver { coming, piece_bytes: backup::HOST_PIECE as u64, ..HandOver::default() };
        Ok(Plan { hand_over: resume.request.swap.as_ref().filter(|swap| swap.host).map(|_| hand_over), ..Plan::default() })
    }
}

/// Device memory by the UUID of the GPU.
fn by_gpu(allocations: &[Arc<Allocation>]) -> BTreeMap<String, GpuPlan> {
    let mut devices = BTreeMap::<_, GpuPlan>::new();
    for allocation in allocations {
        let Some(device) = allocation.on_device() else { continue };
        let (plan, bytes) = (devices.entry(device).or_default(), allocation.bytes() as u64);
        plan.bytes += bytes;
        plan.late_bytes += if is_free_to_go(allocation) { 0 } else { bytes };
    }
    devices.into_iter().filter_map(|(device, plan)| Some((driver::uuid(device)?, plan))).collect()
}

/// What a pause takes in a swap in which host memory changes hands. `needed`: host memory that it needs.
fn leaving(chosen: &Chosen, pause: &Pause, needed: u64) -> HandOver {
    let is_saved = |allocation: &&Arc<Allocation>| {
        let wanted = wanted_of(pause, allocation);
        wanted.policy == Policy::Host && !wanted.live.is_empty()
    };
    let leaving: Vec<_> = chosen.active.iter().filter(is_saved).collect();
    HandOver {
        late_bytes: leaving.iter().filter(|allocation| !is_free_to_go(allocation)).map(|allocation| allocation.bytes() as u64).sum(),
        leaving: moving(&leaving, needed),
        piece_bytes: backup::HOST_PIECE as u64,
        ..HandOver::default()
    }
}

fn moving(allocations: &[&Arc<Allocation>], host_bytes: u64) -> Moving {
    let mut moving = Moving { host_bytes, ..Moving::default() };
    for allocation in allocations {
        let largest = moving.largest.entry(driver::uuid(allocation.device).unwrap_or_default()).or_default();
        *largest = (*largest).max(allocation.bytes() as u64);
        moving.device_bytes += allocation.bytes() as u64;
    }
    moving
}
