//! Host memory that changes hands in a swap, on a host without room for the contents of both jobs: a resume gives the host memory of what it has
//! restored to the other job before the commit. To undo that, the contents are saved again, as host memory comes back.

use super::hand_over::release;
use super::restored::Restored;
use super::{TAKEN_BACK_WITHIN, WAIT_LOCKED, unfinished};
use crate::memory::{Allocation, Memory, PausedBy, State, unmap};
use crate::{drain, gate, quiet};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use vramctl_backup::{self as backup, Flow, PoolingStopped};
use vramctl_driver::{self as driver, Activity};
use vramctl_host::exit;
use vramctl_model::Error;

/// While it lives, host memory goes back to the system at once, and the program stays held although what is restored is active: it may have to be
/// paused again.
pub(super) struct Exchange {
    _pooling_stopped: PoolingStopped,
    _quiet: backup::quiet::Granted,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        unfinished::list().exchanges -= 1;
    }
}

impl Memory {
    /// Has host memory go back to the system at once. Under the exclusive transition lock. `all`: all allocations.
    pub(super) fn begin_exchange(&self, all: &[Arc<Allocation>]) -> Result<Exchange, Error> {
        let not_quiet = |why: &str| Error::NotHeld(format!("its host memory cannot go over: {why}"));
        if !gate::is_held() {
            return Err(not_quiet("the program runs, because it was paused with --no-hold"));
        }
        let idle = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
        drain::wait_at_most(idle.clone(), WAIT_LOCKED, &mut || true)?;
        if quiet::activity_outside(&idle) != Activity::Idle {
            return Err(not_quiet("work in flight may be in the way"));
        }
        let (pooling_stopped, quiet) = (backup::stop_pooling()?, backup::quiet::grant());
        unfinished::list().exchanges += 1;
        Ok(Exchange { _pooling_stopped: pooling_stopped, _quiet: quiet })
    }

    /// Undoes what a resume has done so far: saves what it has restored, and releases that memory. What cannot be saved now is saved as soon as
    /// there is room, and the program stays held until then.
    pub(super) fn undo_exchange(&self, restored: Vec<Restored>, error: Error) -> Error {
        if restored.is_empty() {
            return error;
        }
        self.show_undoing();
        let Err(second) = self.save_again(&restored, TAKEN_BACK_WITHIN) else {
            log::info!("saved {} allocations again, because the swap was undone", restored.len());
            return error;
        };
        let left: Vec<_> = restored.into_iter().filter(Restored::is_due).collect();
        let what = format!(
            "{error}; what had come ({} allocations) is still on the GPU ({second}). It is paused by itself as soon as the host has room for \
             its contents, and the program stays held until then; or resume it",
            left.len()
        );
        if !exit::is_ending() {
            log::warn!("{what}");
        }
        unfinished::pause_later(left);
        Error::NotUndone(Box::new(second), what)
    }

    /// Saves these again and releases their memory, each once it is saved. `within`: how long to wait for the next piece of host memory. After
    /// an error, the rest is active.
    pub(super) fn save_again(&self, restored: &[Restored], within: Duration) -> Result<(), Error> {
        let due: Vec<_> = restored.iter().filter(|one| one.is_due()).collect();
        let allocations: Vec<_> = due.iter().map(|one| Arc::clone(&one.allocation)).collect();
        self.make_reachable(&allocations)?;
        let of_address: BTreeMap<_, _> = allocations.iter().map(|allocation| (allocation.address(), allocation)).collect();
        let mut progress = |_| {
            // The other job waits for what the driver has refused to take back.
            driver::sweep();
            if exit::is_ending() { Err(Error::Ending) } else { Ok(()) }
        };
        let mut saved_already = |items: &[&backup::Item]| {
            let saved: Vec<_> =
                items.iter().filter_map(|(extent, _)| of_address.get(&Some(extent.address)).map(|one| Arc::clone(one))).collect();
            // If this fails, the final unmap retries it.
            if unmap(&saved, PausedBy::OTHERS).is_ok() {
                release(&saved, items.iter().copied(), |_| true);
                due.iter().copied().for_each(Restored::set_paused_by);
            }
        };
        let wanted = due.iter().map(|one| one.wanted()).collect();
        let saved = backup::save(wanted, Flow::Pieces { within }, &mut progress, &mut saved_already);
        let saved = saved.and_then(|kept| unmap(&allocations, PausedBy::OTHERS).map(|()| kept).map_err(Error::from));
        match saved {
            Ok(kept) => {
                release(&allocations, &kept.items, |_| true);
                due.iter().copied().for_each(Restored::set_paused_by);
            }
            Err(error) => {
                for allocation in allocations.iter().filter(|one: &&Arc<Allocation>| matches!(one.contents().state, State::Unmapped(..))) {
                    let _ = self.map_at_last(allocation);
                }
                return Err(error);
            }
        }
        Ok(())
    }
}
