//! A pause: wait, save, unmap, release.

use super::choose::{Chosen, refuse_if_still_lent};
use super::contents::{is_forgotten, policy_for, wanted_of};
use super::hand_over::{HandOver, release};
use super::prepared::{Failed, Preparation, Prepared, complete};
use super::{Clock, Pause, TAKEN_BACK_WITHIN, WAIT_LOCKED, busy_since, flow_of, hold, milliseconds, tags_text, unfinished, unless_ending};
use crate::memory::share::refuse_if_lent;
use crate::memory::under_way::Shown;
use crate::memory::{Allocation, Memory, PausedBy, aside, check_not_quiesced, guard, unmap};
use crate::{drain, events, gate, quiet};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::{Arc, RwLockWriteGuard};
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Kept, PoolingStopped};
use vramctl_config::Config;
use vramctl_driver::{self as driver, Activity, Manner, RelaxedCapture};
use vramctl_host::exit;
use vramctl_model::{Error, Failure, Observer, Participants, PauseRequest, Policy, Report, Stage, TagState, Verb};

impl Memory {
    /// Pauses active allocations: saves their contents by policy and returns their memory to the driver. Everything is
    /// undone on error.
    pub fn pause(&self, pause: &Pause, observer: &mut dyn Observer) -> Result<Report, Error> {
        events::transition(Verb::Pause, || unless_ending(|| complete(self.prepare_pause(pause, observer), observer)))
    }

    /// Does all of a pause that can be undone.
    pub fn prepare_pause(&self, pause: &Pause, observer: &mut dyn Observer) -> Preparation<'_> {
        if let Some(limit) = pause.request.hold {
            return self.hold_and_prepare(pause, limit, observer);
        }
        // Without hold, this process may still use its open memory of partners, and they theirs of this process.
        let request = PauseRequest { participants: Participants::default(), ..pause.request.clone() };
        self.prepare_when_idle(&Pause { request, ..pause.clone() }, observer)
    }

    pub(super) fn prepare_when_idle(&self, pause: &Pause, observer: &mut dyn Observer) -> Preparation<'_> {
        let started = Instant::now();
        let mut clock = Clock::default();
        let left = || pause.request.timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        loop {
            self.wait_unlocked(pause, left(), &mut clock, observer).map_err(busy_since(started))?;
            let failed = match self.try_prepare(pause, started, &mut clock, observer) {
                Ok(prepared) => return Ok(Box::new(prepared)),
                Err(failed) => failed.map(busy_since(started)),
            };
            // Nobody is asked under the lock.
            let has_time = !failed.has_begun() && left().is_none_or(|left| !left.is_zero()) && observer.is_wanted();
            let why = failed.undo_to_retry(|why| match why {
                Error::Busy(_) => has_time,
                Error::HostMemory { .. } => !exchanges(&pause.request),
                _ => false,
            })?;
            if matches!(why, Error::HostMemory { .. }) && !self.make_room(pause) {
                return Err(why.into());
            }
        }
    }

    /// Waits for most of the device's work before taking the lock, so that the program can allocate and free meanwhile.
    /// Under the lock, only work started since then remains.
    fn wait_unlocked(&self, pause: &Pause, left: Option<Duration>, clock: &mut Clock, observer: &mut dyn Observer) -> Result<(), Error> {
        check_not_quiesced()?;
        let mut chosen = self.choose_for(pause)?;
        chosen.spare_prefix_cache(pause)?;
        chosen.spare_registered(&pause.request)?;
        refuse_if_still_lent(&chosen.active, &pause.request.participants)?;
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

    fn try_prepare(
        &self,
        pause: &Pause,
        started: Instant,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<PreparedPause<'_>, Failed<'_>> {
        let exclusive = self.exclude_unless_quiesced()?;
        let relaxed = RelaxedCapture::enter();
        let request = &pause.request;
        let mut chosen = self.choose_settled(&request.selection)?;
        chosen.take_amounts(pause)?;
        chosen.spare_prefix_cache(pause)?;
        // Only then is it sure that no call has put anything there since.
        if !gate::is_held() && chosen.active.iter().any(|allocation| is_forgotten(pause, allocation)) {
            return Err(Error::PrefixCache(pause.engine.clone().unwrap_or_default()).into());
        }
        chosen.spare_registered(request)?;
        refuse_if_lent(&chosen.active, &request.participants)?;
        let Chosen { all, active: victims, paused: already } = chosen;
        let mut idle = BTreeSet::new();
        // This process's work may use its open memory of partners.
        if !victims.is_empty() || !request.participants.partners.is_empty() {
            idle = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
            clock.time(Stage::Wait, || drain::wait_at_most(idle.clone(), WAIT_LOCKED, &mut || true))?;
        }
        // The client may have gone while this waited for the lock, or for the driver.
        if !observer.is_wanted() {
            return Err(Error::Busy(started.elapsed()).into());
        }
        self.registry.release_freed();
        // In a held program, nothing begins before this pause has ended, and most contexts have been waited for.
        let quiet = (gate::is_held() && quiet::activity_outside(&idle) == Activity::Idle).then(backup::quiet::grant);
        let pooling_stopped = if exchanges(request) { Some(backup::stop_pooling()?) } else { None };
        if exchanges(request) {
            drop_retained(pause, &all, &victims);
        }
        let shown = self.show(TagState::Pausing, &victims);
        let (pause, kept, clock) = (pause.clone(), Kept::default(), mem::take(clock));
        let guards = Guards { shown, pooling_stopped, _quiet: quiet, _relaxed: relaxed, _exclusive: exclusive };
        let mut prepared = PreparedPause { memory: self, pause, started, clock, all, victims, already, kept, guards };
        match prepared.save_and_unmap(observer) {
            Ok(()) => Ok(prepared),
            Err(why) => Err(Failed::after(why, prepared)),
        }
    }

    /// Undoes what a pause has done so far: maps the memory again, which still holds its contents, and takes back what was handed over.
    /// `exchanges`: host memory has changed hands, too.
    fn map_back(&self, victims: &[Arc<Allocation>], exchanges: bool, error: Error) -> Error {
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
        let undone = self.undo_hand_over(&gone, TAKEN_BACK_WITHIN, exchanges);
        let left = gone.iter().filter(|allocation| allocation.is_unmapped()).count();
        match undone {
            Ok(()) if gone.is_empty() => (),
            Ok(()) => log::info!("took back {} allocations that were handed over", gone.len()),
            // By pieces, the other job waits for the host memory, so this one tries again whatever the failure.
            Err(second) if (exchanges || matches!(second, Error::DeviceMemory(_))) && unfinished::resume_later(&gone, exchanges) => {
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
    fn make_room(&self, pause: &Pause) -> bool {
        let given_up: Vec<_> = {
            let _exclusive = self.exclude();
            let Some(allocations) = self.retained_in_the_way(pause) else { return false };
            allocations.into_iter().filter_map(|allocation| allocation.contents().state.take_retained()).collect()
        };
        if !given_up.is_empty() {
            log::info!("host memory is short: dropped the retained backups of {} allocations", given_up.len());
        }
        !given_up.is_empty()
    }

    /// The active allocations whose retained backups a pause would drop to make room. `None` if that would not be enough.
    pub(super) fn retained_in_the_way(&self, pause: &Pause) -> Option<Vec<Arc<Allocation>>> {
        let (mut wanted, mut retained) = (Vec::new(), Vec::new());
        let Chosen { all, active, .. } = self.choose_for(pause).ok()?;
        let goes: BTreeSet<_> = active.iter().map(Arc::as_ptr).collect();
        for allocation in all.into_iter().filter(|allocation| !allocation.is_unmapped()) {
            let new = goes.contains(&Arc::as_ptr(&allocation)).then(|| wanted_of(pause, &allocation)).filter(|new| !new.live.is_empty());
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

/// What lasts until a prepared pause is committed or undone. Dropped in this order.
struct Guards<'a> {
    shown: Shown<'a>,
    pooling_stopped: Option<PoolingStopped>,
    _quiet: Option<backup::quiet::Granted>,
    _relaxed: RelaxedCapture,
    _exclusive: RwLockWriteGuard<'a, ()>,
}

/// A pause that is prepared, or in which something has failed.
struct PreparedPause<'a> {
    memory: &'a Memory,
    pause: Pause,
    started: Instant,
    clock: Clock,
    /// All allocations of the process.
    all: Vec<Arc<Allocation>>,
    victims: Vec<Arc<Allocation>>,
    /// Those that were paused before.
    already: Vec<Arc<Allocation>>,
    /// Where the contents of the victims are.
    kept: Kept,
    guards: Guards<'a>,
}

impl PreparedPause<'_> {
    /// Saves contents and unmaps. In a swap, memory goes to the other job meanwhile.
    fn save_and_unmap(&mut self, observer: &mut dyn Observer) -> Result<(), Error> {
        let mut hand_over = self.pause.request.swap.as_ref().map(HandOver::new);
        self.kept = self.save(hand_over.as_mut(), observer)?;
        let victims = &self.victims;
        self.clock.time(Stage::Unmap, || unmap(victims, wanted_by(&self.pause)))?;
        if let Some(hand_over) = hand_over.as_mut().filter(|_| observer.is_wanted()) {
            hand_over.release_rest_of_needed(&self.victims, &self.kept);
        }
        Ok(())
    }

    /// Unmaps what is saved while the rest is still being copied: with many allocations unmapping takes long, and it can be undone. What is to
    /// `hand_over` is released as well, as long as the caller is there.
    fn save(&mut self, hand_over: Option<&mut HandOver>, observer: &mut dyn Observer) -> Result<Kept, Error> {
        let Self { memory, pause, clock, victims, guards, .. } = self;
        let kept: Vec<_> = victims.iter().filter(|allocation| policy_for(pause, allocation) != Policy::Discard).map(Arc::clone).collect();
        memory.make_reachable(&kept)?;
        let of_address: BTreeMap<_, _> = victims.iter().map(|allocation| (allocation.address(), allocation)).collect();
        let mut wanted: Vec<_> = kept.iter().map(|allocation| wanted_of(pause, allocation)).collect();
        wanted.retain(|wanted| !wanted.live.is_empty());
        let handing = RefCell::new((hand_over, observer));
        let mut saved_already = |items: &[&backup::Item]| {
            let saved: Vec<_> =
                items.iter().filter_map(|(extent, _)| of_address.get(&Some(extent.address)).map(|one| Arc::clone(one))).collect();
            // If this fails, the final unmap retries it.
            let unmapped = unmap(&saved, wanted_by(pause));
            let (hand_over, observer) = &mut *handing.borrow_mut();
            if let Some(hand_over) = hand_over.as_mut().filter(|_| unmapped.is_ok() && observer.is_wanted()) {
                hand_over.release_saved(&saved, items);
            }
        };
        let mut progress = |now| {
            let (hand_over, observer) = &mut *handing.borrow_mut();
            if let Some(hand_over) = hand_over {
                // The other job waits for what the driver has refused to take back.
                driver::sweep();
                if hand_over.is_slow() && observer.is_wanted() {
                    hand_over.release_withheld();
                }
            }
            guards.shown.progress(now, *observer)
        };
        clock.time(Stage::Save, || backup::save(wanted, flow_of(pause.request.swap.as_ref()), &mut progress, &mut saved_already))
    }

    /// What was paused before stays paused, and is now paused by whoever asks for this pause, too.
    fn keep_paused(&self) {
        let Self { memory, pause, already, .. } = self;
        unfinished::keep_paused(already);
        // What the program has paused itself, others need not pause as well, unless they name it, or nothing else would keep the program held.
        let leaves_own = pause.is_from_outside && pause.request.selection.tags.is_empty() && memory.is_paused_by_others();
        for allocation in already {
            let mut contents = allocation.contents();
            let is_left = leaves_own && contents.state.paused_by() == Some(PausedBy::PROGRAM);
            // What others may have open comes back with them: the program alone could not have paused it.
            if !is_left && (pause.is_from_outside || !contents.lending.has_begun()) {
                contents.state.set_paused_by(|by| by.and(wanted_by(pause)));
            }
        }
    }
}

impl Prepared for PreparedPause<'_> {
    fn wait(&self, waited: Duration) {
        if self.pause.request.swap.is_some() {
            HandOver::release_if_late(waited, &self.victims, &self.kept);
        }
    }

    fn commit(self: Box<Self>, _: &mut dyn Observer) -> Report {
        self.keep_paused();
        let Self { memory, pause, started, mut clock, all, victims, already, kept, guards } = *self;
        let request = &pause.request;
        // What is asked for by amounts is nothing that others have open.
        if request.amounts.is_none() {
            aside::set_aside(&request.selection, &request.participants.partners, false);
        }
        if request.leaves && gate::is_held() {
            hold::leave(PausedBy::OTHERS);
        }
        // Others of its job have left: it would soon wait for them, with work in flight.
        if request.scheduler.is_some() && gate::is_held() && hold::leaves().is_none() && !memory.is_paused_by_others() {
            hold::leave(PausedBy::SCHEDULER);
        }
        let bytes: u64 = victims.iter().map(|allocation| allocation.bytes() as u64).sum();
        let kept_bytes = kept.items.iter().map(|(_, saved)| saved.kept_bytes()).sum();
        let disk_bytes = kept.items.iter().map(|(_, saved)| saved.disk_bytes()).sum();
        clock.time(Stage::Release, || release(&victims, &kept.items, |_| true));
        let wants_guard = request.options.guard || Config::get().guard;
        let guarded_bytes = if wants_guard { clock.time(Stage::Guard, || memory.guard(&victims)) } else { 0 };
        let report = Report {
            allocations: victims.len() as u64,
            bytes,
            kept_bytes,
            disk_bytes,
            unchanged_bytes: kept.unchanged_bytes,
            discarded_bytes: bytes - kept_bytes,
            unchanged: already.len() as u64,
            late_bytes: driver::leftover_bytes(),
            guarded_bytes,
            unguarded_bytes: if wants_guard { bytes - guarded_bytes } else { 0 },
            guard_bytes: guard::all_bytes(&all),
            host_taken_bytes: guards.pooling_stopped.as_ref().map_or(0, PoolingStopped::taken_bytes),
            stages: clock.0,
            ms: milliseconds(started.elapsed()),
            ..Report::default()
        };
        log::info!("paused {}: {report}", tags_text(&request.selection));
        report
    }

    fn undo(self: Box<Self>, why: Error) -> Error {
        self.memory.map_back(&self.victims, exchanges(&self.pause.request), why)
    }
}

/// Whether host memory changes hands in a swap.
fn exchanges(request: &PauseRequest) -> bool {
    request.swap.as_ref().is_some_and(|swap| swap.host.is_some())
}

/// Who wants the memory of a request to be paused.
fn wanted_by(pause: &Pause) -> PausedBy {
    match (pause.request.scheduler, pause.is_from_outside) {
        (Some(_), _) => PausedBy::SCHEDULER,
        (None, true) => PausedBy::OTHERS,
        (None, false) => PausedBy::PROGRAM,
    }
}

/// Drops the retained backups of active memory, which only save time, except those that the pause writes to.
fn drop_retained(pause: &Pause, all: &[Arc<Allocation>], victims: &[Arc<Allocation>]) {
    let goes: BTreeSet<_> = victims.iter().map(Arc::as_ptr).collect();
    for allocation in all.iter().filter(|allocation| !allocation.is_unmapped()) {
        let is_written = goes.contains(&Arc::as_ptr(allocation)) && wanted_of(pause, allocation).saved_over().is_some();
        let dropped = if is_written { None } else { allocation.contents().state.take_retained() };
        drop(dropped);
    }
}
