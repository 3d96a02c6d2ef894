//! What a request selects, and what protects memory from being taken.

use super::contents::{is_forgotten, may_hold_cache, policy_for};
use super::{Pause, Resume};
use crate::memory::share::refuse_if_lent;
use crate::memory::{Allocation, Memory, PausedBy};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_driver as driver;
use vramctl_model::{Error, Participants, PauseRequest, Policy, Registered, Registration, Selection};

/// How long to wait for the disconnect of an ended process that had memory open.
const NOTICED: Duration = Duration::from_millis(200);

/// The allocations a request selects.
pub(super) struct Chosen {
    /// All allocations of the process, by address.
    pub all: Vec<Arc<Allocation>>,
    /// Selected and active.
    pub active: Vec<Arc<Allocation>>,
    /// Selected and paused.
    pub paused: Vec<Arc<Allocation>>,
}

impl Memory {
    /// Selects allocations. A tag that no allocation has is an error.
    pub(super) fn choose(&self, selection: &Selection) -> Result<Chosen, Error> {
        let all = self.registry.snapshot();
        let known: BTreeSet<&str> = all.iter().map(|allocation| &*allocation.tag).collect();
        let unknown: BTreeSet<_> = selection.tags.iter().filter(|tag| !known.contains(tag.as_str())).cloned().collect();
        if !unknown.is_empty() && !selection.lenient {
            return Err(Error::UnknownTag {
                unknown: unknown.into_iter().collect(),
                known: known.into_iter().map(str::to_owned).collect(),
            });
        }
        let meant = all.iter().filter(|allocation| is_meant(selection, allocation)).cloned();
        let (paused, mut active): (Vec<_>, Vec<_>) = meant.partition(|allocation| allocation.is_unmapped());
        active.retain(|allocation| selection.selects(&allocation.tag) && (!allocation.is_on_host() || selection.is_everything()));
        Ok(Chosen { all, active, paused })
    }

    /// Selects what a pause takes.
    pub(super) fn choose_for(&self, pause: &Pause) -> Result<Chosen, Error> {
        let mut chosen = self.choose(&pause.request.selection)?;
        chosen.take_amounts(pause).map(|()| chosen)
    }

    /// Like [`choose`](Self::choose), after finishing what earlier failures and destroyed contexts left behind. Under the
    /// exclusive transition lock.
    pub(super) fn choose_settled(&self, selection: &Selection) -> Result<Chosen, Error> {
        self.settle();
        let chosen = self.choose(selection)?;
        if self.map_stranded(&chosen.paused)? { self.choose(selection) } else { Ok(chosen) }
    }

    /// Finishes what earlier failures and destroyed contexts left behind. Under the exclusive transition lock.
    pub(super) fn settle(&self) {
        driver::sweep();
        self.drop_gone();
        self.end_unused();
    }

    /// Maps memory that a failed pause left unmapped: it still holds its contents, and it would count as paused while it stays
    /// on the device. Returns whether there was any.
    fn map_stranded(&self, paused: &[Arc<Allocation>]) -> Result<bool, Error> {
        let mut any = false;
        for allocation in paused {
            if allocation.contents().state.memory().is_some() {
                self.map_again(allocation)?;
                any = true;
            }
        }
        Ok(any)
    }
}

impl Chosen {
    /// For a resume: leaves out what stays paused. Returns it.
    pub(super) fn leave_paused(&mut self, resume: &Resume) -> Vec<Arc<Allocation>> {
        let (paused, left) = std::mem::take(&mut self.paused).into_iter().partition(|allocation| comes_back(resume, allocation));
        self.paused = paused;
        left
    }

    /// Refuses to drop contents that the engine's prefix cache describes: the engine would silently answer from zeros.
    pub(super) fn spare_prefix_cache(&self, pause: &Pause) -> Result<(), Error> {
        let Some(engine) = &pause.engine else { return Ok(()) };
        let is_lost =
            |one: &Arc<Allocation>| may_hold_cache(&one.tag) && policy_for(pause, one) == Policy::Discard && !is_forgotten(pause, one);
        let lost = self.active.iter().any(is_lost);
        if lost { Err(Error::PrefixCache(engine.clone())) } else { Ok(()) }
    }

    /// Leaves out registered memory or fails because of it, as the request says. Memory that other processes have open is left out as well;
    /// it can never be taken, see [`refuse_if_lent`](crate::memory::share::refuse_if_lent).
    pub(super) fn spare_registered(&mut self, request: &PauseRequest) -> Result<(), Error> {
        match request.options.registered {
            Registered::Take => Ok(()),
            Registered::Keep => {
                self.active.retain(|allocation| {
                    let contents = allocation.contents();
                    contents.registrant().is_none() && contents.lent_to_others(&request.participants).is_empty()
                });
                Ok(())
            }
            Registered::Refuse => {
                let mut bytes = BTreeMap::<(String, String), u64>::new();
                for allocation in &self.active {
                    if let Some(registrant) = allocation.contents().registrant() {
                        *bytes.entry((allocation.tag.to_string(), registrant.to_owned())).or_default() += allocation.bytes() as u64;
                    }
                }
                let list: Vec<_> = bytes.into_iter().map(|((tag, registrant), bytes)| Registration { tag, registrant, bytes }).collect();
                if list.is_empty() { Ok(()) } else { Err(Error::Registered(list)) }
            }
        }
    }
}

/// Whether a resume brings back this paused allocation that it selects: what the program has paused itself, the program resumes.
/// A scheduler brings back what only it has paused.
pub(super) fn comes_back(resume: &Resume, allocation: &Allocation) -> bool {
    let by = allocation.contents().state.paused_by();
    match resume.request.scheduler {
        Some(_) => by.is_none_or(|by| by == PausedBy::SCHEDULER),
        None => !resume.is_from_outside || resume.request.self_paused || !by.is_some_and(PausedBy::is_self_paused),
    }
}

/// Whether this allocation is selected.
pub(super) fn is_meant(selection: &Selection, allocation: &Allocation) -> bool {
    let on_gpu = || driver::uuid(allocation.device).is_some_and(|uuid| selection.gpus.contains(&uuid));
    (selection.tags.is_empty() || selection.tags.iter().any(|tag| **tag == *allocation.tag)) && (selection.gpus.is_empty() || on_gpu())
}

/// Like [`refuse_if_lent`], but first waits briefly, so that the disconnect of an ended process is noticed.
pub(super) fn refuse_if_still_lent(victims: &[Arc<Allocation>], participants: &Participants) -> Result<(), Error> {
    let started = Instant::now();
    while let Err(error) = refuse_if_lent(victims, participants) {
        if started.elapsed() > NOTICED {
            return Err(error);
        }
        thread::sleep(NOTICED / 20);
    }
    Ok(())
}
