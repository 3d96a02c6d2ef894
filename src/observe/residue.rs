//! Records what this process still holds after each pause, over the last cycles. An owner that grows in each cycle is named once in the
//! log, and in the status as long as it grows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};
use vramctl_core::memory::{Memory, unmanaged};
use vramctl_driver::{self as driver, Account};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Cycle, Error, Growth, Report, Verb};

/// How many cycles are kept.
const KEPT: usize = 8;

static RESIDUE: PerProcess<Mutex<Residue>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct Residue {
    cycles: VecDeque<Cycle>,
    /// Something has been resumed since the last cycle.
    is_over: bool,
    /// Who has been named.
    named: BTreeSet<String>,
}

fn residue() -> MutexGuard<'static, Residue> {
    RESIDUE.get().lock().unpoisoned()
}

/// The last cycles, the oldest first.
pub(crate) fn cycles() -> Vec<Cycle> {
    residue().cycles.iter().cloned().collect()
}

/// Records the process's memory after a pause that has paused something. After such a resume, the next pause begins another cycle.
pub(crate) fn ended(verb: Verb, outcome: &Result<Report, Error>) {
    if !outcome.as_ref().is_ok_and(|report| report.allocations > 0) {
        return;
    }
    match verb {
        Verb::Pause => {
            let (cycle, _) = exit::as_worker(known);
            let grown = residue().put(cycle);
            warn(&grown);
        }
        Verb::Resume => residue().is_over = true,
    }
}

fn warn(grown: &[Growth]) {
    for growth in grown {
        log::warn!("{growth}. A leak? `vramctl status` shows the last cycles, `vramctl gpus` who uses the memory now");
    }
}

impl Residue {
    fn put(&mut self, cycle: Cycle) -> Vec<Growth> {
        if !std::mem::take(&mut self.is_over) {
            self.cycles.pop_back();
        }
        self.cycles.push_back(cycle);
        if self.cycles.len() > KEPT {
            self.cycles.pop_front();
        }
        self.not_named_yet()
    }

    fn not_named_yet(&mut self) -> Vec<Growth> {
        Cycle::growing(&self.cycles).into_iter().filter(|growth| self.named.insert(growth.owner.clone())).collect()
    }
}

/// The process's memory, and the part of it on each GPU.
fn known() -> (Cycle, BTreeMap<String, u64>) {
    let mut tags = BTreeMap::<_, u64>::new();
    for allocation in Memory::get().registry.snapshot() {
        *tags.entry(allocation.tag.to_string()).or_default() += allocation.bytes() as u64;
    }
    let mut gpus = BTreeMap::<_, u64>::new();
    for (Account { device, .. }, bytes) in driver::device_memory() {
        if let Some(uuid) = driver::uuid(device) {
            *gpus.entry(uuid).or_default() += bytes;
        }
    }
    let mut owners = BTreeMap::new();
    for unmanaged in unmanaged::status() {
        owners.insert(unmanaged.owner, unmanaged.bytes);
        for (uuid, bytes) in unmanaged.gpus {
            *gpus.entry(uuid).or_default() += bytes;
        }
    }
    (Cycle { tags, unmanaged: owners, driver: BTreeMap::new() }, gpus)
}

/// Adds the driver's share of the process's memory to the last cycle. `gpus`: NVML's figure for the whole process, by UUID, sent by the
/// client that paused it. NVML is not called here because it has locks that a fork by another thread would leave locked in the child.
pub(crate) fn counted(gpus: BTreeMap<String, u64>) {
    let (now, known) = known();
    let mut residue = residue();
    let Residue { cycles, is_over: false, .. } = &mut *residue else { return };
    let Some(last) = cycles.back_mut() else { return };
    last.driver.clear();
    // If memory was allocated or freed since, the two figures are of different moments.
    if *last != now {
        return;
    }
    let rest = |(uuid, bytes): (String, u64)| {
        let rest = bytes.saturating_sub(known.get(&uuid).copied().unwrap_or(0));
        (uuid, rest)
    };
    last.driver = gpus.into_iter().map(rest).collect();
    let grown = residue.not_named_yet();
    drop(residue);
    warn(&grown);
}
