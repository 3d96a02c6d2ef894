//! NCCL's communicators that the program has created and not destroyed. Their ranks share memory, so whoever takes a process off its GPU has to
//! know where the other ranks are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use vramctl_host::symbols::Loaded;
use vramctl_host::{PerProcess, Unpoison, fnv1a};
use vramctl_model::Communicator;

/// By NCCL's handle.
static TABLE: PerProcess<Mutex<BTreeMap<usize, Known>>> = PerProcess::new(Mutex::default);

struct Known {
    /// Its NCCL: a process may contain several.
    nccl: Loaded,
    ranks: Vec<Communicator>,
}

/// How a communicator was created.
#[derive(Debug, Clone, Copy)]
pub enum Origin<'a> {
    /// From these unique ids, which all of its ranks have been given.
    Unique {
        /// The ids.
        ids: &'a [u8],
        /// Which rank this is.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// From another communicator, by some of its ranks.
    Child(usize),
    /// From another communicator, by all of its ranks, and by ranks that join them.
    Grown {
        /// The other communicator.
        from: usize,
        /// Its number of ranks; 0 if that is not known.
        members: u32,
        /// The unique id that those who join have been given. Only one rank of the other communicator has it.
        id: Option<&'a [u8]>,
        /// How many ranks there are together.
        ranks: u32,
    },
}

/// Records a communicator that this NCCL has created.
pub fn created(nccl: Loaded, handle: usize, origin: Origin<'_>) {
    let mut all = TABLE.get().lock().unpoisoned();
    // Of one that is not known, nothing is known either.
    let of_parent = |parent| all.get(&parent).map_or_else(|| vec![Communicator::default()], |parent| parent.ranks.clone());
    let ranks = match origin {
        Origin::Unique { ids, rank, ranks } => vec![with_unique_id(ids, rank, ranks)],
        Origin::Child(parent) => of_parent(parent),
        Origin::Grown { members: 0, .. } => vec![Communicator::default()],
        Origin::Grown { from, id: None, .. } => of_parent(from),
        // The ranks of the other communicator keep their numbers. Those that have joined know only the id, so this process answers to them for
        // all ranks of the other communicator. That one says whether these are there.
        Origin::Grown { from, members, id: Some(id), ranks } => {
            of_parent(from).into_iter().chain((0..members).map(|rank| with_unique_id(id, rank, ranks))).collect()
        }
    };
    all.insert(handle, Known { nccl, ranks });
}

/// A communicator with these unique ids. It has the same name in every process.
fn with_unique_id(ids: &[u8], rank: u32, ranks: u32) -> Communicator {
    Communicator { id: format!("{:016x}", fnv1a(ids)), rank, ranks }
}

/// Records the communicators that one call has created for all of their ranks, in this process.
pub fn created_here(nccl: Loaded, handles: &[Option<usize>]) {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let ids = [&std::process::id().to_le_bytes()[..], &call.to_le_bytes()].concat();
    for (rank, handle) in handles.iter().enumerate() {
        if let Some(handle) = handle {
            created(nccl, *handle, Origin::Unique { ids: &ids, rank: rank as u32, ranks: handles.len() as u32 });
        }
    }
}

/// The NCCL that has created a communicator, if it is known.
pub fn nccl_of(handle: usize) -> Option<Loaded> {
    TABLE.existing().and_then(|table| Some(table.lock().unpoisoned().get(&handle)?.nccl))
}

/// Runs `real`, which destroys a communicator and returns whether it did.
pub fn ending(handle: usize, real: impl FnOnce() -> bool) {
    // Removed before the call: a new communicator may get its address.
    let taken = TABLE.existing().and_then(|table| table.lock().unpoisoned().remove(&handle));
    if !real()
        && let Some(one) = taken
    {
        TABLE.get().lock().unpoisoned().insert(handle, one);
    }
}

/// The ranks that this process has, or answers for.
pub fn list() -> BTreeSet<Communicator> {
    TABLE.existing().map_or_else(BTreeSet::new, |table| table.lock().unpoisoned().values().flat_map(|one| one.ranks.clone()).collect())
}
