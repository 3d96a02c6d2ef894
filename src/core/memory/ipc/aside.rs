//! Memory of other processes across a pause: it is set aside with its owner's pause, and brought back once the owner has resumed it.
//!
//! One worker per owner asks for it, without the transition lock, since the owner may be asking this process at the same time.

use super::borrow::{BORROWED, Behind, BorrowedMemory, Lease, LeaseState, Meant, Opened, Received, Rounds, Site, borrowed, listed};
use super::imports;
use super::lender::{Refused, patiently};
use crate::memory::registry::lending::Token;
use crate::memory::{Allocation, Memory, sightings};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, Access, Physical, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::{self as model, ObstacleKind, Selection, code};

/// The first and the longest delay before an owner whose memory is still paused is asked again.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a resume waits for all owners' answers. Memory that is not back by then comes later.
const RETURNS_WITHIN: Duration = Duration::from_secs(5);
/// How often that wait checks whether anybody still waits for the resume.
const NOTICES_WITHIN: Duration = Duration::from_millis(50);

/// [`BorrowedMemory::asked`] has changed.
static ASKED: PerProcess<Condvar> = PerProcess::new(Condvar::new);

/// Gives up the memory that these partners pause, and keeps the addresses. The work that uses it must have finished. `is_due`: whether it is asked
/// for again at once.
pub(crate) fn set_aside(selection: &Selection, partners: &[u32], is_due: bool) {
    let meant = Meant::by(selection);
    let memories: Vec<_> = {
        let mut borrowed = borrowed();
        borrowed.pauses += 1;
        let there = borrowed.open.values_mut().filter(|opened| !opened.is_gone() && opened.is_paused_by(&meant, partners));
        there.filter_map(|opened| opened.give_up(Behind::Paused { is_due })).collect()
    };
    // Unmaps and releases them.
    drop(memories);
}

/// Whether anything is set aside.
pub(crate) fn any() -> bool {
    BORROWED.existing().is_some_and(|existing| existing.lock().unpoisoned().open.values().any(Opened::is_paused))
}

/// Selected memory that is set aside.
pub(crate) fn missing(selection: &Selection) -> Vec<model::Borrowed> {
    let meant = Meant::by(selection);
    listed(|opened| opened.is_paused() && opened.is_meant(&meant))
}

/// What is gone and was not reported before. From now on it counts as reported.
pub(crate) fn take_lost() -> Vec<model::Borrowed> {
    let Some(existing) = BORROWED.existing() else { return Vec::new() };
    let mut borrowed = existing.lock().unpoisoned();
    let lost = borrowed.listed(|opened| opened.behind == Behind::Gone { is_reported: false });
    borrowed.open.values_mut().filter(|opened| opened.is_gone()).for_each(|opened| opened.behind = Behind::Gone { is_reported: true });
    lost
}

/// Opens memory again that was set aside, if its owners have resumed it. Waits a limited time for their answers, and only while `wanted`
/// says so.
pub(crate) fn reopen(wanted: &mut dyn FnMut() -> bool) {
    let Some(existing) = BORROWED.existing() else { return };
    let deadline = Instant::now() + RETURNS_WITHIN;
    let mut borrowed = existing.lock().unpoisoned();
    borrowed.open.values_mut().filter(|opened| opened.is_paused()).for_each(|opened| opened.behind = Behind::Paused { is_due: true });
    let rounds = borrowed.ask(|rounds| rounds.wanted += 1);
    ASKED.get().notify_all();
    // Without a worker, this thread asks, once.
    let alone: Vec<_> = borrowed.aside().filter(|(_, owner)| !rounds.contains_key(owner)).collect();
    if !alone.is_empty() {
        drop(borrowed);
        reopen_all(&alone, &mut || Instant::now() < deadline && wanted());
        borrowed = existing.lock().unpoisoned();
    }
    while rounds.iter().any(|(owner, round)| borrowed.asked.get(owner).is_some_and(|now| now.done < round.wanted)) {
        if Instant::now() >= deadline || !wanted() {
            break;
        }
        borrowed = ASKED.get().wait_timeout(borrowed, NOTICES_WITHIN).unpoisoned().0;
    }
}

/// Starts asking for memory that is set aside, so that it comes back once its owners have resumed it, unless the program stays held anyway.
pub(crate) fn keep_asking() {
    if let Some(existing) = BORROWED.existing() {
        let mut borrowed = existing.lock().unpoisoned();
        if is_worth_asking() {
            borrowed.ask(|_| ());
        }
    }
}

/// Whether the program can continue once nothing is set aside any more.
fn is_worth_asking() -> bool {
    !exit::is_ending() && !Memory::get().is_paused_by_others()
}

impl BorrowedMemory {
    /// Memory that is set aside, with its owner.
    fn aside(&self) -> impl Iterator<Item = (Token, u32)> {
        self.open.iter().filter(|(_, opened)| opened.is_paused()).map(|(token, opened)| (*token, opened.lease.lender.pid))
    }

    /// Has a worker ask each owner of memory that is set aside. Returns the owners and their rounds.
    fn ask(&mut self, more: impl Fn(&mut Rounds)) -> BTreeMap<u32, Rounds> {
        let owners: BTreeSet<_> = self.aside().map(|(_, owner)| owner).collect();
        let mut asked = BTreeMap::new();
        for owner in owners {
            let known = self.asked.get(&owner).copied();
            let mut rounds = known.unwrap_or_default();
            more(&mut rounds);
            if known.is_none()
                && let Err(error) = worker::spawn("vramctl-borrow", move || ask_owner(owner))
            {
                log::warn!("could not start a thread to ask process {owner} for its memory: {error}");
                continue;
            }
            self.asked.insert(owner, rounds);
            asked.insert(owner, rounds);
        }
        asked
    }
}

/// Asks an owner repeatedly for its memory that is set aside, until none is.
fn ask_owner(owner: u32) {
    let mut pause = LOOK_AGAIN.0;
    let mut borrowed = borrowed();
    while let Some(&Rounds { wanted, .. }) = borrowed.asked.get(&owner) {
        let aside: Vec<_> = borrowed.aside().filter(|(_, its)| *its == owner).collect();
        if aside.is_empty() || !is_worth_asking() {
            break;
        }
        drop(borrowed);
        reopen_all(&aside, &mut || true);
        borrowed = self::borrowed();
        let Some(rounds) = borrowed.asked.get_mut(&owner) else { break };
        rounds.done = wanted;
        ASKED.get().notify_all();
        let is_rest = |borrowed: &mut BorrowedMemory| borrowed.asked.get(&owner).is_some_and(|rounds| rounds.wanted == wanted);
        borrowed = ASKED.get().wait_timeout_while(borrowed, pause, is_rest).unpoisoned().0;
        pause = (2 * pause).min(LOOK_AGAIN.1);
    }
    borrowed.asked.remove(&owner);
    ASKED.get().notify_all();
}

/// Opens memory of these owners, while `wanted` says so.
fn reopen_all(aside: &[(Token, u32)], wanted: &mut dyn FnMut() -> bool) {
    // While the process is suspended, it cannot open anything.
    if !exit::is_quiesced() {
        // What was not unmapped is in the way.
        driver::sweep();
        for (token, owner) in aside {
            if wanted() {
                reopen_one(token, *owner, wanted);
            }
        }
        Memory::get().let_go();
    }
}

fn reopen_one(token: &Token, owner: u32, wanted: &mut dyn FnMut() -> bool) {
    let _relaxed = RelaxedCapture::enter();
    match patiently(wanted, || try_reopen(token, owner)) {
        Ok(()) => (),
        Err(code::INVALID_HANDLE) => {
            log::error!("process {owner} has ended or freed memory, while it was paused, that this process has open; it is lost");
            if let Some(opened) = borrowed().open.get_mut(token) {
                opened.behind = Behind::Gone { is_reported: false };
            }
        }
        Err(code) => log::debug!("memory of process {owner} that this process has open is not back (code {code})"),
    }
}

fn try_reopen(token: &Token, owner: u32) -> Result<(), Refused> {
    let lease = borrowed().lease(owner).map_err(|error| Refused::because(owner, &error))?;
    let mut state = lease.state.lock().unpoisoned();
    if *state == LeaseState::Retired {
        return Err(Refused::ForNow);
    }
    let pauses = borrowed().pauses;
    let Received { pieces, pauses: of_piece, .. } = lease.ask(&mut state, token)?;
    // Noted as an obstacle until it is recorded as open: a suspend sees one or the other.
    sightings::making(ObstacleKind::Shared, || {
        let mut memory = Physical::import(&pieces)?;
        if let Some(allocation) = imports::paused(token) {
            return import_again(token, &allocation, memory, (pauses, of_piece), &lease);
        }
        // Without the lock, which the program's calls need: during a suspend, this thread may block for long. The addresses stay reserved
        // even if the program closes the memory meanwhile.
        let found = borrowed().open.get(token).filter(|opened| opened.is_paused()).and_then(|opened| {
            let Site::Opened(site) = &opened.site else { return None };
            Some((site.place.clone(), site.devices.clone(), opened.is_newer(of_piece)))
        });
        if let Some((place, devices, true)) = &found {
            memory.map(place)?;
            driver::open([(place.span(), devices.iter().map(|device| Access::of_device(*device)).collect())])?;
        }
        let mut borrowed = borrowed();
        if borrowed.pauses != pauses {
            return Err(Refused::ForNow);
        }
        let now = borrowed.open.get_mut(token).filter(|opened| opened.is_paused());
        let both = now.zip(found.as_ref()).filter(|(opened, (place, ..))| opened.is_at(place.span()));
        let Some((opened, (_, devices, is_new))) = both else {
            // Closed meanwhile.
            drop(borrowed);
            drop(memory);
            lease.inform_owner(&mut state, token);
            return Ok(());
        };
        let Site::Opened(site) = &mut opened.site else { return Ok(()) };
        if site.devices != *devices {
            // Opened for another device meanwhile.
            return Err(Refused::ForNow);
        }
        if *is_new {
            site.memory = Some(memory);
            (opened.behind, opened.pauses) = (Behind::Memory, of_piece);
        }
        let before = std::mem::replace(&mut opened.lease, Arc::clone(&lease));
        drop(borrowed);
        // Another connection, which may have nothing left.
        drop(before);
        Ok(())
    })
}

/// Puts memory that its owner has resumed behind the program's import of it. `pauses`: how often this process, and the owner, had paused it.
fn import_again(
    token: &Token,
    allocation: &Allocation,
    memory: Physical,
    (pauses, of_piece): (u64, u64),
    lease: &Arc<Lease>,
) -> Result<(), Refused> {
    let mut borrowed = borrowed();
    if borrowed.pauses != pauses {
        return Err(Refused::ForNow);
    }
    let Some(opened) = borrowed.open.get_mut(token).filter(|opened| opened.is_paused()) else { return Ok(()) };
    if opened.is_newer(of_piece) {
        allocation.take_up(memory)?;
        (opened.behind, opened.pauses) = (Behind::Memory, of_piece);
    }
    let before = std::mem::replace(&mut opened.lease, Arc::clone(lease));
    drop(borrowed);
    drop(before);
    Ok(())
}
