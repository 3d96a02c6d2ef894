//! Memory that the program has imported by descriptor (`cuMemImportFromShareableHandle`), as NCCL and torch's symmetric memory do.
//!
//! The driver does not say whose memory a descriptor stands for. So each process keeps the descriptors that it exports, and is asked about those
//! that others import: both are the same open file then (`KCMP_FILE`). From then on, imported memory is like memory that was opened by CUDA
//! IPC ([`super::borrow`]): it is set aside when its owner pauses it, and imported again at the program's addresses afterwards. The program
//! gets a handle of the library's for that, as for its own memory (`handles`).

use super::borrow::{Behind, Claimed, LeaseState, Opened, Received, Site, borrowed};
use super::lender::Refused;
use crate::contexts;
use crate::memory::registry::lending::Token;
use crate::memory::registry::next_handle;
use crate::memory::{Allocation, Memory, Origin, Placement, region};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{process, thread};
use vramctl_control::discovery::Directory;
use vramctl_driver::{Current, Physical, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, system};

/// The handle that the program gets for memory that it has imported: in place of the driver's, which the library takes over. `None` if no
/// process under the library has exported the descriptor, or if it does not say; then the program keeps the driver's.
///
/// After a pause, a descriptor from before it is nobody's either, and what it stands for is no longer its owner's memory. The driver does not tell
/// one from the other, so the log does.
pub fn adopt(file: BorrowedFd<'_>, handle: u64, current: &Current) -> Option<u64> {
    let adopted = try_adopt(file, handle, current);
    if adopted.is_none() && borrowed().pauses > 0 {
        log::warn!(
            "no process says that it has exported the memory that this one has just imported (cuMemImportFromShareableHandle). If it was exported \
             before the last pause, it is not what its owner has now: export it again"
        );
    }
    adopted
}

fn try_adopt(file: BorrowedFd<'_>, handle: u64, current: &Current) -> Option<u64> {
    let memory = Memory::get();
    let _relaxed = RelaxedCapture::enter();
    if let Some(own) = memory.own_export(file) {
        // The driver gives another handle for memory that is there already; the program gets its own again.
        drop(Physical::of_import(handle, 0));
        return Some(own);
    }
    contexts::note(current);
    let directory = Directory::open().ok()??;
    let mut others = ASKED.get().lock().unpoisoned().in_order(directory.processes().ok()?);
    let deadline = Instant::now() + FOUND_WITHIN;
    while !others.is_empty() {
        let mut busy = Vec::new();
        for owner in others {
            match adopt_from(owner, file, handle, current) {
                Answer::Adopted(handle) => return Some(handle),
                Answer::Busy if Instant::now() < deadline => busy.push(owner),
                Answer::Busy | Answer::No => (),
            }
        }
        if !busy.is_empty() {
            thread::sleep(ASK_AGAIN);
        }
        others = busy;
    }
    None
}

/// How long to look for an owner that is being paused or resumed: the importer is a thread of the program's.
const FOUND_WITHIN: Duration = Duration::from_secs(2);
/// The delay before it is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// How long a process that has not answered is not asked again.
const LEFT_OUT_FOR: Duration = Duration::from_secs(60);

/// What is remembered of earlier questions: a communicator imports much from each of few owners.
#[derive(Default)]
struct Asked {
    /// The owners found, the last one first.
    owners: Vec<u32>,
    /// When those without an answer were asked.
    silent: BTreeMap<u32, Instant>,
}

static ASKED: PerProcess<Mutex<Asked>> = PerProcess::new(Mutex::default);

impl Asked {
    /// Those to ask, the likeliest first.
    fn in_order(&mut self, mut others: Vec<u32>) -> Vec<u32> {
        self.silent.retain(|_, asked| asked.elapsed() < LEFT_OUT_FOR);
        others.retain(|pid| *pid != process::id() && !self.silent.contains_key(pid));
        others.sort_by_key(|pid| self.owners.iter().position(|owner| owner == pid).unwrap_or(usize::MAX));
        others
    }

    fn found(&mut self, owner: u32) {
        self.owners.retain(|known| *known != owner);
        self.owners.insert(0, owner);
    }
}

/// The answer of one process.
enum Answer {
    Adopted(u64),
    No,
    Busy,
}

fn adopt_from(owner: u32, file: BorrowedFd<'_>, handle: u64, current: &Current) -> Answer {
    if system::is_stopped(owner) {
        return Answer::No;
    }
    let lease = match borrowed().lease(owner) {
        Ok(lease) => lease,
        Err(error) => {
            return match Refused::because(owner, &error) {
                Refused::ForNow => Answer::Busy,
                Refused::Finally(_) => Answer::No,
            };
        }
    };
    // Whoever has it may be waiting for an owner that is paused.
    let mut state = match lease.state.try_lock() {
        Ok(state) if *state == LeaseState::Open => state,
        _ => return Answer::Busy,
    };
    let pauses = borrowed().pauses;
    let (token, passed) = match lease.claim(&mut state, file) {
        Claimed::Yes(token, passed) => (token, passed),
        Claimed::No => return Answer::No,
        Claimed::Busy => return Answer::Busy,
        Claimed::Silent => {
            ASKED.get().lock().unpoisoned().silent.insert(owner, Instant::now());
            return Answer::No;
        }
    };
    ASKED.get().lock().unpoisoned().found(owner);
    let mut borrowed = borrowed();
    if let Some(Opened { site: Site::Imported(known), behind: Behind::Memory, .. }) = borrowed.open.get(&token) {
        known.contents().references += 1;
        let key = known.key();
        drop(borrowed);
        drop(Physical::of_import(handle, 0));
        return Answer::Adopted(key);
    }
    let made = if borrowed.pauses == pauses { imported(&token, &passed, handle, current) } else { None };
    let Some(made) = made else {
        drop(borrowed);
        lease.give_back(&mut state, &token);
        return Answer::No;
    };
    let (key, device) = (made.key(), Some(made.device));
    Memory::get().registry.insert_import(Arc::clone(&made));
    let (lease, site, tag) = (Arc::clone(&lease), Site::Imported(made), passed.tag);
    borrowed.open.insert(token, Opened { lease, site, tag, device, pauses: passed.pauses, behind: Behind::Memory });
    Answer::Adopted(key)
}

/// Takes the driver's handle over. `None` if the memory is in several pieces, or the driver does not describe it.
fn imported(token: &Token, passed: &Received, handle: u64, current: &Current) -> Option<Arc<Allocation>> {
    let [(_, bytes)] = passed.pieces[..] else { return None };
    let memory = Physical::of_import(handle, bytes);
    let Ok(Some(wanted)) = memory.properties() else {
        // The program keeps it.
        std::mem::forget(memory);
        return None;
    };
    let policy = Placement { tag: passed.tag.as_deref().unwrap_or("imported").into(), ..region::prospective() };
    let device = wanted.device().unwrap_or(current.device());
    let origin = Origin::Imported { handle: next_handle(), properties: wanted, token: *token };
    Some(Arc::new(Allocation::new(policy, device, current.owner(), memory, BTreeMap::new(), origin)))
}

/// The import that a token stands for, if it is set aside.
pub(super) fn paused(token: &Token) -> Option<Arc<Allocation>> {
    let borrowed = borrowed();
    let opened = borrowed.open.get(token).filter(|opened| opened.is_paused())?;
    if let Site::Imported(allocation) = &opened.site { Some(Arc::clone(allocation)) } else { None }
}
