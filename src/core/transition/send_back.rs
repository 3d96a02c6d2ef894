//! A swap's resume whose host memory has gone over to the other job, undone: its contents are saved again, as host memory comes back.

use super::came::Came;
use super::hand_over::release;
use super::pause::TAKEN_BACK_WITHIN;
use super::{WAIT_LOCKED, owed};
use crate::memory::{Allocation, Memory, PausedBy, State, unmap};
use crate::{drain, gate, quiet};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use vramctl_backup::{self as backup, Flow, Sparing};
use vramctl_driver::{self as driver, Activity};
use vramctl_host::exit;
use vramctl_model::Error;

/// While it lives, host memory goes back to the system at once: none is kept for later, and the program stays held, so it is not in the way.
pub(super) struct Spared {
    _held: owed::Uncommitted,
    _sparing: Sparing,
    _quiet: backup::quiet::Granted,
}

impl Memory {
    /// Has host memory go back to the system at once. Under the exclusive transition lock. `all`: all allocations.
    pub(super) fn spare_host(&self, all: &[Arc<Allocation>]) -> Result<Spared, Error> {
        let not_quiet = |why: &str| Error::NotHeld(format!("its host memory cannot go over: {why}"));
        if !gate::is_held() {
            return Err(not_quiet("the program runs, because it was paused with --no-hold"));
        }
        let idle = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
        drain::wait_at_most(idle.clone(), WAIT_LOCKED, &mut || true)?;
        if quiet::activity_outside(&idle) != Activity::Idle {
            return Err(not_quiet("work in flight may be in the way"));
        }
        let quiet = backup::quiet::grant();
        Ok(Spared { _held: owed::Uncommitted::begin(), _sparing: backup::spare()?, _quiet: quiet })
    }

    /// Undoes what a resume has done so far: saves the contents of what came, and releases that memory. What cannot be saved now is saved as
    /// soon as there is room, and the program stays held until then.
    pub(super) fn send_back(&self, came: Vec<Came>, error: Error) -> Error {
        if came.is_empty() {
            return error;
        }
        self.show_undoing();
        let Err(second) = self.save_again(&came, TAKEN_BACK_WITHIN) else {
            log::info!("saved {} allocations again, because the swap was undone", came.len());
            return error;
        };
        let left: Vec<_> = came.into_iter().filter(Came::is_due).collect();
        let what = format!(
            "{error}; what had come ({} allocations) is still on the GPU ({second}). It is paused by itself as soon as the host has room for \
             its contents, and the program stays held until then; or resume it",
            left.len()
        );
        if !exit::is_ending() {
            log::warn!("{what}");
        }
        owed::send_back_later(left);
        Error::NotUndone(Box::new(second), what)
    }

    /// Saves these again and releases their memory, each once it is saved. `within`: how long to wait for the next piece of host memory. After
    /// an error, the rest is active.
    pub(super) fn save_again(&self, came: &[Came], within: Duration) -> Result<(), Error> {
        let due: Vec<_> = came.iter().filter(|one| one.is_due()).collect();
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
            if unmap(&saved, PausedBy::Others).is_ok() {
                release(&saved, items.iter().copied(), |_| true);
            }
        };
        let wanted = due.iter().map(|one| one.wanted()).collect();
        let saved = backup::save(wanted, Flow::Pieces { within }, &mut progress, &mut saved_already);
        let saved = saved.and_then(|kept| unmap(&allocations, PausedBy::Others).map(|()| kept).map_err(Error::from));
        match saved {
            Ok(kept) => release(&allocations, &kept.items, |_| true),
            Err(error) => {
                let is_unmapped = |one: &&Arc<Allocation>| matches!(one.contents().state, State::Unmapped(..));
                for allocation in allocations.iter().filter(is_unmapped) {
                    let _ = self.map_at_last(allocation);
                }
                return Err(error);
            }
        }
        Ok(())
    }
}
