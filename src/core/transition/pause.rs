//! A pause: wait, save, unmap, release.

use super::choose::{Chosen, is_meant, refuse_if_still_lent};
use super::contents::{policy_for, wanted_of};
use super::hand_over::{HandOver, release};
use super::{Clock, WAIT_LOCKED, busy_since, flow_of, hold, milliseconds, owed, tags_text, unless_ending};
use crate::memory::share::refuse_if_lent;
use crate::memory::{Allocation, Memory, PausedBy, aside, check_not_quiesced, guard, unmap};
use crate::{drain, events, gate, quiet};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Kept};
use vramctl_config::Config;
use vramctl_driver::{self as driver, Activity, Manner, RelaxedCapture};
use vramctl_host::exit;
use vramctl_model::{Bytes, Error, Failure, Observer, Policy, Report, Stage, TagState, TransitionRequest, Verb};

/// How long the undoing of a swap waits under the lock for the memory that the other job gives back. After that, `owed` waits without it.
pub(super) const TAKEN_BACK_WITHIN: Duration = Duration::from_secs(10);

impl Memory {
    /// Pauses active allocations: saves their contents by policy and returns their memory to the driver. Everything is
    /// undone on error.
    pub fn pause(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        events::transition(Verb::Pause, || {
            unless_ending(|| match request.hold {
                Some(limit) => self.hold_and_pause(request, limit, observer),
                // Without hold, this process may still use its open memory of partners, and they theirs of this process.
                None => {
                    self.pause_when_idle(&TransitionRequest { partners: Vec::new(), borrowers: Vec::new(), ..request.clone() }, observer)
                }
            })
        })
    }

    pub(super) fn pause_when_idle(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        let mut clock = Clock::default();
        let left = || request.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        loop {
            self.wait_unlocked(request, left(), &mut clock, observer).map_err(busy_since(started))?;
            match self.try_pause(request, started, &mut clock, observer) {
                Err(Error::Busy(_)) if left().is_none_or(|left| !left.is_zero()) && observer.is_wanted() => (),
                Err(Error::Busy(_)) => return Err(Error::Busy(started.elapsed())),
                Err(Error::HostMemory { .. }) if request.hand_over_host.is_none() && self.make_room(request) => (),
                answer => {
                    return answer.inspect(|report| {
                        if request.is_borrower {
                            let bytes = Bytes(report.missing.iter().map(|aside| aside.paused_bytes).sum());
                            log::info!("set aside {bytes} of paused memory of processes {:?}", request.partners);
                        } else {
                            log::info!("paused {}: {report}", tags_text(request));
                        }
                    });
                }
            }
        }
    }

    /// Waits for most of the device's work before taking the lock, so that the program can allocate and free meanwhile.
    /// Under the lock, only work started since then remains.
    fn wait_unlocked(
        &self,
        request: &TransitionRequest,
        left: Option<Duration>,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        check_not_quiesced()?;
        let mut chosen = self.choose(request)?;
        chosen.spare_prefix_cache(request)?;
        chosen.spare_registered(request)?;
        refuse_if_still_lent(&chosen.active, request)?;
        let Chosen { all, active, .. } = chosen;
        // With nothing to pause, there is nothing to wait for.
        if active.is_empty() {
            return Ok(());
        }
        let contexts = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
        clock.time(Stage::Wait, || match (left, observer.is_gone()) {
            // On the calling thread: only the work itself can end this wait.
            (None, None) => Ok(drain::wait(contexts, Manner::Unnoticed)?),
            (left, _) => drain::wait_at_most(contexts, left.unwrap_or(Duration::MAX), &mut || observer.is_wanted()),
        })
    }

    fn try_pause(
        &self,
        request: &TransitionRequest,
        started: Instant,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<Report, Error> {
        let _exclusive = self.exclude_unless_quiesced()?;
        let _relaxed = RelaxedCapture::enter();
        let mut chosen = self.choose_settled(request)?;
        chosen.spare_prefix_cache(request)?;
        chosen.spare_registered(request)?;
        refuse_if_lent(&chosen.active, request)?;
        let Chosen { all, active: victims, paused: already } = chosen;
        let mut idle = BTreeSet::new();
        // This process's work may use its open memory of partners.
        if !victims.is_empty() || !request.partners.is_empty() {
            idle = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
            clock.time(Stage::Wait, || drain::wait_at_most(idle.clone(), WAIT_LOCKED, &mut || true))?;
        }
        // The client may have gone while this waited for the lock, or for the driver.
        if !observer.is_wanted() {
            return Err(Error::Busy(started.elapsed()));
        }
        self.registry.release_freed();
        // In a held program, nothing begins before this pause has ended, and most contexts have been waited for.
        let _quiet = (gate::is_held() && quiet::activity_outside(&idle) == Activity::Idle).then(backup::quiet::grant);
        let by_piece = request.hand_over_host.is_some();
        let sparing = if by_piece { Some(backup::spare()?) } else { None };
        if by_piece {
            drop_retained(request, &all);
        }
        let shown = self.show(TagState::Pausing, &victims);
        let mut hand_over = HandOver::of(request);
        let follower = RefCell::new(&mut *observer);
        let saved = self.save(
            request,
            &victims,
            hand_over.as_mut(),
            &mut |now| shown.progress(now, *follower.borrow_mut()),
            &mut || follower.borrow_mut().is_wanted(),
            clock,
        );
        let unmapped =
            saved.and_then(|kept| clock.time(Stage::Unmap, || unmap(&victims, wanted_by(request))).map(|()| kept).map_err(Error::from));
        let kept = unmapped.map_err(|error| {
            // What was handed over comes back only when the other job does not take it any more.
            observer.give_up();
            self.map_back(&victims, by_piece, error)
        })?;
        if let Some(hand_over) = hand_over.as_mut().filter(|_| observer.is_wanted()) {
            hand_over.release_rest_of_lacking(&victims, &kept);
        }
        let mut waiting = |waited| {
            if request.hand_over {
                HandOver::release_if_late(waited, &victims, &kept);
            }
        };
        observer.vote(&mut waiting).map_err(|refused| self.map_back(&victims, by_piece, refused))?;
        aside::set_aside(request);
        if request.leaves && !request.is_borrower && gate::is_held() {
            hold::leave();
        }
        owed::keep_paused(&already);
        // What the program has paused itself, others need not pause as well, unless they name it, or nothing else would keep the program held.
        if !request.is_from_outside || !request.tags.is_empty() || !self.is_paused_by_others() {
            for allocation in &already {
                let mut contents = allocation.contents();
                // What others may have open comes back with them: the program alone could not have paused it.
                if request.is_from_outside || !contents.lending.has_begun() {
                    contents.state.set_paused_by(|by| by.and(wanted_by(request)));
                }
            }
        }

        let bytes: u64 = victims.iter().map(|allocation| allocation.bytes() as u64).sum();
        let kept_bytes = kept.items.iter().map(|(_, saved)| saved.kept_bytes()).sum();
        let disk_bytes = kept.items.iter().map(|(_, saved)| saved.disk_bytes()).sum();
        clock.time(Stage::Release, || release(&victims, &kept.items, |_| true));
        let wants_guard = request.guard || Config::get().guard;
        let guarded_bytes = if wants_guard { clock.time(Stage::Guard, || self.guard(&victims)) } else { 0 };
        Ok(Report {
            allocations: victims.len() as u64,
            bytes,
            kept_bytes,
            disk_bytes,
            unchanged_bytes: kept.unchanged_bytes,
            discarded_bytes: bytes - kept_bytes,
            unchanged: already.len() as u64,
            self_paused_bytes: 0,
            late_bytes: driver::leftover_bytes(),
            missing: if request.is_borrower { aside::missing(request) } else { Vec::new() },
            lost: Vec::new(),
            refused: Vec::new(),
            guarded_bytes,
            unguarded_bytes: if wants_guard { bytes - guarded_bytes } else { 0 },
            guard_bytes: guard::all_bytes(&all),
            guard_written_bytes: 0,
            host_taken_bytes: sparing.map_or(0, |sparing| sparing.taken_bytes()),
            stages: std::mem::take(&mut clock.0),
            ms: milliseconds(started.elapsed()),
        })
    }

    /// Saves contents. Unmaps what is saved while the rest is still being copied: with many allocations unmapping takes
    /// long, and it can be undone. What is to `hand_over` is released as well, while that `is_wanted`.
    fn save(
        &self,
        request: &TransitionRequest,
        victims: &[Arc<Allocation>],
        hand_over: Option<&mut HandOver<'_>>,
        progress: &mut backup::OnProgress<'_>,
        is_wanted: &mut dyn FnMut() -> bool,
        clock: &mut Clock,
    ) -> Result<Kept, Error> {
        let kept: Vec<_> = victims.iter().filter(|allocation| policy_for(request, allocation) != Policy::Discard).map(Arc::clone).collect();
        self.make_reachable(&kept)?;
        let of_address: BTreeMap<_, _> = victims.iter().map(|allocation| (allocation.address(), allocation)).collect();
        let mut wanted: Vec<_> = kept.iter().map(|allocation| wanted_of(request, allocation)).collect();
        wanted.retain(|wanted| !wanted.live.is_empty());
        let handing = RefCell::new((hand_over, is_wanted));
        let mut saved_already = |items: &[&backup::Item]| {
            let saved: Vec<_> =
                items.iter().filter_map(|(extent, _)| of_address.get(&Some(extent.address)).map(|one| Arc::clone(one))).collect();
            // If this fails, the final unmap retries it.
            let unmapped = unmap(&saved, wanted_by(request));
            let (hand_over, is_wanted) = &mut *handing.borrow_mut();
            if let Some(hand_over) = hand_over.as_mut().filter(|_| unmapped.is_ok() && is_wanted()) {
                hand_over.release_saved(&saved, items);
            }
        };
        let mut goes_on = |now| {
            if let (Some(hand_over), is_wanted) = &mut *handing.borrow_mut() {
                // The other job waits for what the driver has refused to take back.
                driver::sweep();
                if hand_over.is_slow() && is_wanted() {
                    hand_over.release_withheld();
                }
            }
            progress(now)
        };
        clock.time(Stage::Save, || backup::save(wanted, flow_of(request), &mut goes_on, &mut saved_already))
    }

    /// Undoes what a pause has done so far: maps the memory again, which still holds its contents. What was handed over is taken back.
    /// `by_piece`: host memory was handed over, too.
    fn map_back(&self, victims: &[Arc<Allocation>], by_piece: bool, error: Error) -> Error {
        self.show_undoing();
        let (gone, unmapped): (Vec<_>, Vec<_>) = victims
            .iter()
            .filter(|allocation| allocation.is_unmapped())
            .cloned()
            .partition(|allocation| allocation.contents().state.memory().is_none());
        let mut stranded = 0;
        let mut why = None;
        for allocation in &unmapped {
            if let Err(second) = self.map_at_last(allocation) {
                stranded += 1;
                why = Some(Error::from(second));
            }
        }
        let undone = self.undo_hand_over(&gone, TAKEN_BACK_WITHIN, by_piece);
        let left = gone.iter().filter(|allocation| allocation.is_unmapped()).count();
        match undone {
            Ok(()) if gone.is_empty() => (),
            Ok(()) => log::info!("took back {} allocations that were handed over", gone.len()),
            // By pieces, the other job waits for the host memory, so this one tries again whatever the failure.
            Err(second) if (by_piece || matches!(second, Error::DeviceMemory(_))) && owed::bring_back_later(&gone, by_piece) => {
                log::warn!("{} allocations that were handed over come back as soon as there is room: {second}", gone.len());
                if stranded == 0 {
                    let what = format!(
                        "{error}; what was handed over to the other job ({left} allocations) is not back yet ({second}). Its contents are \
                         kept, and it comes back by itself as soon as there is room"
                    );
                    return Error::NotUndone(Box::new(second), what);
                }
            }
            Err(second) => {
                if !exit::is_ending() {
                    log::error!("{left} allocations that were handed over stay paused, with their contents: {second}");
                }
                stranded += left;
                why = Some(second);
            }
        }
        match why {
            Some(second) => {
                let what = format!(
                    "{error}, and allocations could not be mapped again and stay paused ({stranded}), with their contents ({second}); resume them"
                );
                Error::NotUndone(Box::new(second), what)
            }
            None => error,
        }
    }

    /// Maps memory again that was unmapped. At the second failure it is stranded: it stays paused, alone of its job, with its contents.
    pub(super) fn map_at_last(&self, allocation: &Allocation) -> Result<(), Failure> {
        let mapped = self.map_again(allocation).or_else(|_| self.map_again(allocation));
        if let Err(second) = &mapped {
            allocation.contents().state.strand();
            if !exit::is_ending() {
                log::error!("{:#x} ({}) stays paused: {second}", allocation.key(), allocation.tag);
            }
        }
        mapped
    }

    /// Drops enough retained backups of active memory, which only save time, to make room for a pause. Keeps those the pause
    /// will reuse. `false` if there is nothing to drop, or dropping everything would not be enough.
    fn make_room(&self, request: &TransitionRequest) -> bool {
        let given_up: Vec<_> = {
            let _exclusive = self.exclude();
            let Some(allocations) = self.retained_in_the_way(request) else { return false };
            allocations.into_iter().filter_map(|allocation| allocation.contents().state.take_retained()).collect()
        };
        if !given_up.is_empty() {
            log::info!("host memory is short: dropped the retained backups of {} allocations", given_up.len());
        }
        !given_up.is_empty()
    }

    /// The active allocations whose retained backups a pause would drop to make room. `None` if that would not be enough.
    pub(super) fn retained_in_the_way(&self, request: &TransitionRequest) -> Option<Vec<Arc<Allocation>>> {
        let (mut wanted, mut retained) = (Vec::new(), Vec::new());
        for allocation in self.registry.snapshot().into_iter().filter(|allocation| !allocation.is_unmapped()) {
            let new = Some(wanted_of(request, &allocation)).filter(|new| is_meant(request, &allocation) && !new.live.is_empty());
            let saved = allocation.contents().state.backup().cloned();
            if let Some(saved) = saved.filter(|_| new.as_ref().is_none_or(|new| new.saved_over().is_none())) {
                retained.push((allocation, saved));
            }
            wanted.extend(new);
        }
        let (of, retained): (Vec<_>, Vec<_>) = retained.into_iter().unzip();
        let given_up = backup::in_the_way(&retained, &wanted)?;
        Some(given_up.into_iter().map(|place| Arc::clone(&of[place])).collect())
    }
}

/// Who wants the memory of a request to be paused.
fn wanted_by(request: &TransitionRequest) -> PausedBy {
    if request.is_from_outside { PausedBy::Others } else { PausedBy::Program }
}

/// Drops the retained backups of active memory, which only save time, but for those that the pause writes to.
fn drop_retained(request: &TransitionRequest, all: &[Arc<Allocation>]) {
    for allocation in all.iter().filter(|allocation| !allocation.is_unmapped()) {
        let is_written = is_meant(request, allocation) && wanted_of(request, allocation).saved_over().is_some();
        let dropped = if is_written { None } else { allocation.contents().state.take_retained() };
        drop(dropped);
    }
}
