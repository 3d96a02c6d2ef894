//! Memory that the program has imported by descriptor (`cuMemImportFromShareableHandle`), as NCCL and torch's symmetric memory do.
//!
//! The driver tells nobody whose memory a descriptor stands for. So each process keeps the descriptors that it exports, and is asked about those
//! that others import: both are the same open file then (`KCMP_FILE`). From then on, imported memory is like memory that was opened by CUDA
//! IPC ([`super::borrow`]): it is set aside when its owner pauses it, and imported again at the program's addresses afterwards. The program
//! gets a handle of the library's for that, as for its own memory ([`super::handles`]).

use super::borrow::{Behind, LeaseState, Opened, Passed, Site, borrowed};
use super::handles::next_handle;
use super::lending::Token;
use super::{Allocation, Memory, Placement, region};
use crate::contexts;
use std::os::fd::BorrowedFd;
use std::process;
use std::sync::Arc;
use vramctl_control::discovery::Directory;
use vramctl_driver::{Current, Physical, RelaxedCapture};
use vramctl_host::Unpoison;

/// The handle that the program gets for memory that it has imported: in place of the driver's, which the library takes over. `None` if no
/// process under the library has exported the descriptor, or if it does not say; then the program keeps the driver's.
pub fn adopt(file: BorrowedFd<'_>, handle: u64, current: &Current) -> Option<u64> {
    let memory = Memory::get();
    let _relaxed = RelaxedCapture::enter();
    if let Some(own) = memory.own_export(file) {
        // The driver gives another handle for memory that is there already; the program gets its own again.
        drop(Physical::of_import(handle, 0));
        return Some(own);
    }
    contexts::note(current);
    let directory = Directory::open().ok()??;
    let others = directory.processes().ok()?.into_iter().filter(|pid| *pid != process::id());
    others.into_iter().find_map(|owner| adopt_from(owner, file, handle, current))
}

fn adopt_from(owner: u32, file: BorrowedFd<'_>, handle: u64, current: &Current) -> Option<u64> {
    let lease = borrowed().lease(owner).ok()?;
    let mut state = lease.state.lock().unpoisoned();
    if *state == LeaseState::Retired {
        return None;
    }
    let pauses = borrowed().pauses;
    let (token, passed) = lease.claim(&mut state, file)?;
    let mut borrowed = borrowed();
    if let Some(Opened { site: Site::Imported(known), behind: Behind::Memory, .. }) = borrowed.open.get(&token) {
        known.contents().references += 1;
        let key = known.key();
        drop(borrowed);
        drop(Physical::of_import(handle, 0));
        return Some(key);
    }
    let made = if borrowed.pauses == pauses { imported(&token, &passed, handle, current) } else { None };
    let Some(made) = made else {
        drop(borrowed);
        lease.give_back(&mut state, &token);
        return None;
    };
    let (key, device) = (made.key(), Some(made.device));
    Memory::get().imports.insert(key, Arc::clone(&made));
    let (lease, site, tag) = (Arc::clone(&lease), Site::Imported(made), passed.tag);
    borrowed.open.insert(token, Opened { lease, site, tag, device, pauses: passed.pauses, behind: Behind::Memory });
    Some(key)
}

/// Takes the driver's handle over. `None` if the memory is in several pieces, or the driver does not describe it.
fn imported(token: &Token, passed: &Passed, handle: u64, current: &Current) -> Option<Arc<Allocation>> {
    let [(_, bytes)] = passed.pieces[..] else { return None };
    let memory = Physical::of_import(handle, bytes);
    let Ok(Some(wanted)) = memory.properties() else {
        // The program keeps it.
        std::mem::forget(memory);
        return None;
    };
    let policy = Placement { tag: passed.tag.as_deref().unwrap_or("imported").into(), ..region::prospective() };
    let device = wanted.device().unwrap_or(current.device());
    Some(Arc::new(Allocation::imported(policy, device, current.owner(), memory, next_handle(), wanted, *token)))
}

/// The import that a token stands for, if it is set aside.
pub(super) fn paused(token: &Token) -> Option<Arc<Allocation>> {
    let borrowed = borrowed();
    let opened = borrowed.open.get(token).filter(|opened| opened.is_paused())?;
    if let Site::Imported(allocation) = &opened.site { Some(Arc::clone(allocation)) } else { None }
}
