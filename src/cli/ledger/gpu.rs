//! Who uses the memory of each GPU. The rows add up to NVML's total.
//!
//! A process with the library reports its memory by tag and what its libraries got from CUDA. NVML reports each process's total. The
//! difference is the driver's: the context, loaded code, small allocations.

use super::share::{Cache, Share, What, rows, signed};
use crate::ui::output;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;
use vramctl_control::protocol::ProcessStatus;
use vramctl_coordinator::processes::Process;
use vramctl_driver::{Card, NoCards, cards, holders_of};
use vramctl_model::{Bytes, Holder};

/// Pinned host memory per byte of its page tables: eight bytes for each page of 4 KiB.
const PAGE_TABLES: u64 = 512;

/// The memory of one GPU.
#[derive(Debug, Serialize)]
pub struct Ledger {
    /// Its index in `nvidia-smi`.
    pub index: u32,
    pub uuid: String,
    pub name: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// The sum of the shares.
    pub used_bytes: u64,
    /// Memory that the driver reserves in addition. `None` if it counts as used.
    pub reserved_bytes: Option<u64>,
    /// Percent of time.
    #[serde(skip)]
    pub utilization: Option<u32>,
    pub shares: Vec<Share>,
}

/// The ledgers of these GPUs, by UUID, or of all. `processes`: all processes with the library, not only the selected ones.
pub fn take(processes: &[Process], gpus: &[String]) -> Result<Vec<Ledger>, NoCards> {
    Ok(cards()?
        .into_iter()
        .filter(|card: &Card| gpus.is_empty() || gpus.contains(&card.uuid))
        .map(|card: Card| {
            let shares = account(&card, &holders_of(&card.uuid), processes);
            let Card { index, uuid, name, free, used, reserved, total, utilization, .. } = card;
            Ledger {
                index,
                uuid,
                name,
                total_bytes: total,
                free_bytes: free,
                used_bytes: used,
                reserved_bytes: reserved,
                utilization,
                shares,
            }
        })
        .collect())
}

/// Splits the memory in use on a GPU.
pub fn account(card: &Card, holders: &[Holder], processes: &[Process]) -> Vec<Share> {
    let bytes_of = |pid| holders.iter().find(|holder: &&Holder| holder.pid == pid).map(|holder| holder.bytes);
    let managed: BTreeSet<_> = processes.iter().filter(|process| process.status.is_ok()).map(|process| process.pid).collect();
    let (mut shares, mut tables, mut known_of_unlisted) = (Vec::new(), Vec::new(), 0);
    for process in processes {
        let Ok(status) = &process.status else { continue };
        let mut known = known_by_library(status, &card.uuid);
        let sum: i64 = known.iter().map(|share| share.bytes).sum();
        match bytes_of(process.pid) {
            Some(Some(bytes)) => {
                let rest = signed(bytes) - sum;
                let least_bytes = status.memory.cycles.iter().filter_map(|cycle| cycle.driver.get(&card.uuid)).min().copied();
                let share = |what, bytes| Share { pid: Some(process.pid), name: process.name.clone(), ..Share::new(what, bytes) };
                known.push(Share { least_bytes, ..share(What::Driver, rest) });
                tables.push(share(What::PageTables, signed(status.memory.host.pinned_bytes / PAGE_TABLES)));
            }
            Some(None) => (),
            None => known_of_unlisted += sum,
        }
        shares.extend(known.into_iter().filter(|share| share.bytes != 0));
    }
    let (in_sight, out_of_sight): (Vec<_>, Vec<_>) =
        holders.iter().filter(|holder| !managed.contains(&holder.pid)).partition(|holder| holder.program.is_some());
    shares.extend(in_sight.iter().filter_map(|holder: &&Holder| {
        let silent = processes.iter().find(|process| process.pid == holder.pid).and_then(|process| process.name.clone());
        let (name, bytes) = (silent.or_else(|| holder.program.clone()), signed(holder.bytes?));
        Some(Share { pid: Some(holder.pid), name, ..Share::new(What::Process, bytes) })
    }));
    if !out_of_sight.is_empty() {
        let bytes: i64 = out_of_sight.iter().map(|holder| signed(holder.bytes.unwrap_or(0))).sum();
        shares.push(Share::new(What::OutOfSight, bytes - known_of_unlisted));
    }
    let explained: i64 = shares.iter().map(|share| share.bytes).sum();
    let mut rest = signed(card.used) - explained;
    // NVML attributes these to no process: with 40 GiB pinned, the total grew by 80 MiB, but no process did (H200, driver 580).
    for mut share in tables {
        share.bytes = share.bytes.clamp(0, rest.max(0));
        rest -= share.bytes;
        shares.extend((share.bytes > 0).then_some(share));
    }
    shares.push(Share::new(What::Unexplained, rest));
    shares
}

/// The memory on a GPU that a process's library knows of, largest first.
fn known_by_library(status: &ProcessStatus, uuid: &str) -> Vec<Share> {
    // A suspended process has nothing there; its status is from before the suspend.
    if status.memory.suspended.is_some() {
        return Vec::new();
    }
    let share = |what, of: Option<&str>, bytes| {
        let process = &status.process;
        let (pid, name, of) = (Some(process.pid), Some(process.name.clone()), of.map(str::to_owned));
        Share { pid, name, of, ..Share::new(what, signed(bytes)) }
    };
    let cache_of = |tag: &str| {
        let parts = status.memory.cache.iter().filter(|part| part.gpu.as_deref() == Some(uuid) && part.tag.as_deref() == Some(tag));
        parts
            .map(|part| Cache { live_bytes: part.live_bytes, cached_bytes: part.cached_bytes, fragmented_bytes: part.fragmented_bytes })
            .next()
    };
    let devices = || status.memory.devices.iter().filter(|device| device.uuid.as_deref() == Some(uuid));
    let state_of = |tag: &str| status.memory.tags.iter().find(|its| its.tag == tag).map(|its| its.state);
    let tags = devices().flat_map(|device| &device.tags).map(|(tag, bytes): (&String, &u64)| Share {
        state: state_of(tag),
        cache: cache_of(tag),
        ..share(What::Tag, Some(tag), *bytes)
    });
    let left = status.memory.unmanaged.iter().filter_map(|left| Some(share(What::Unmanaged, Some(&left.owner), *left.gpus.get(uuid)?)));
    let guards = devices().map(|device| share(What::Guard, None, device.guard_bytes));
    let mut shares: Vec<_> = tags.chain(left).chain(guards).collect();
    shares.sort_by_key(|share| -share.bytes);
    shares
}

/// For people.
pub fn describe(ledger: &Ledger) -> String {
    let Ledger { index, uuid, name, total_bytes, free_bytes, used_bytes, reserved_bytes, shares, .. } = ledger;
    let mut text = format!("GPU {index}, {name}, {uuid}: {} in use", Bytes(*used_bytes));
    if let Some(reserved) = reserved_bytes.filter(|bytes| *bytes > 0) {
        let _ = write!(text, ", {} reserved by the driver", Bytes(reserved));
    }
    let _ = write!(text, ", {} free, of {}", Bytes(*free_bytes), Bytes(*total_bytes));
    output::hanging("", &text, output::width())
        + "\n"
        + &output::table(&["PID", "PROCESS", "MEMORY", "BYTES"], shares.iter().flat_map(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::share::shown::{MIB, line, rows};
    use vramctl_coordinator::failure::{CommandError, Exit};
    use vramctl_coordinator::process::made_up::process;
    use vramctl_model::{Cycle, DeviceStatus, GpuUse, TagState, TagStatus, Unmanaged};

    const UUID: &str = "GPU-0";
    fn card(used: u64) -> Card {
        Card { uuid: UUID.into(), used, ..Card::default() }
    }

    fn holder(pid: u32, bytes: u64, program: Option<&str>) -> Holder {
        Holder { pid, bytes: Some(bytes), program: program.map(str::to_owned) }
    }

    /// An engine with 1000 MiB of weights, 64 MiB of NCCL's and 512 MiB of pinned host memory, which need 1 MiB of page tables.
    fn engine(pid: u32) -> Process {
        let mut engine = process(pid, "engine", &[("weights", TagState::Active)]);
        let memory = &mut engine.status.as_mut().unwrap().memory;
        memory.devices = vec![DeviceStatus {
            uuid: Some(UUID.into()),
            active_bytes: 1000 * MIB,
            tags: [("weights".into(), 1000 * MIB)].into(),
            ..DeviceStatus::default()
        }];
        let gpus = [(UUID.to_owned(), 64 * MIB), ("GPU-1".to_owned(), 7 * MIB)].into();
        memory.unmanaged = vec![Unmanaged { owner: "libnccl.so.2".into(), bytes: 71 * MIB, gpus }];
        memory.host.pinned_bytes = 512 * MIB;
        engine
    }

    #[test]
    fn nvmls_figure_is_split_by_the_librarys() {
        let mut engine = engine(1);
        let cycle = |mib| Cycle { driver: [(UUID.into(), mib * MIB)].into(), ..Cycle::default() };
        engine.status.as_mut().unwrap().memory.cycles = vec![cycle(430), cycle(420), Cycle::default()];
        let holders = [holder(1, 1500 * MIB, Some("python")), holder(2, 300 * MIB, Some("trainer"))];
        let wanted = [
            line("engine weights", 1000),
            line("engine libnccl.so.2 (left to CUDA)", 64),
            line("engine context, loaded code, small allocations (lowest at a pause: 420.00 MiB)", 436),
            line("trainer all of it", 300),
            line("engine page tables of pinned host memory (estimate)", 1),
            line(" unexplained", 3),
        ];
        assert_eq!(rows(&account(&card(1804 * MIB), &holders, &[engine])), wanted);
    }

    #[test]
    fn a_guard_is_distinguished_from_the_drivers_memory() {
        let mut engine = engine(1);
        engine.status.as_mut().unwrap().memory.devices[0].guard_bytes = 62 * MIB;
        let shares = rows(&account(&card(1500 * MIB), &[holder(1, 1500 * MIB, Some("python"))], &[engine]));
        assert_eq!(
            shares[2..4],
            [line("engine guard under paused memory", 62), line("engine context, loaded code, small allocations", 374)]
        );
    }

    #[test]
    fn memory_on_its_way_is_shown_with_its_state() {
        let shown = |state: Option<TagState>| {
            let mut engine = engine(1);
            engine.status.as_mut().unwrap().memory.tags =
                state.map(|state| TagStatus { tag: "weights".into(), state, ..TagStatus::default() }).into_iter().collect();
            rows(&account(&card(1100 * MIB), &[holder(1, 1100 * MIB, Some("python"))], &[engine]))[0].clone()
        };
        for (state, text) in [
            (Some(TagState::Active), "engine weights"),
            (Some(TagState::Pausing), "engine weights (pausing)"),
            (Some(TagState::Resuming), "engine weights (resuming)"),
            (Some(TagState::Undoing), "engine weights (undoing)"),
            (Some(TagState::Paused), "engine weights (paused, but not given back yet)"),
            (None, "engine weights (freed, but not given back yet)"),
        ] {
            assert_eq!(shown(state), line(text, 1000));
        }
    }

    /// NVML may lag behind, or count memory that two processes share for one of them.
    #[test]
    fn memory_unknown_to_nvml_is_shown_as_such() {
        let shares = rows(&account(&card(1000 * MIB), &[holder(1, 1000 * MIB, Some("python"))], &[engine(1)]));
        assert_eq!(shares[2..], [line("engine counted above, and not by NVML", -64), line(" unexplained", 0)]);
    }

    /// As in some containers: the process ids are the host's.
    #[test]
    fn a_process_under_an_unknown_pid_is_not_counted_twice() {
        let holders = [holder(70001, 1500 * MIB, None), holder(70002, 300 * MIB, None)];
        let shares = rows(&account(&card(1804 * MIB), &holders, &[engine(1)]));
        assert_eq!(shares[2..], [line(" processes out of sight", 736), line(" unexplained", 4)]);
    }

    #[test]
    fn without_processes_from_nvml_all_but_what_the_library_knows_is_unexplained() {
        assert_eq!(rows(&account(&card(1804 * MIB), &[], &[engine(1)]))[2..], [line(" unexplained", 740)]);
        let silent = Holder { bytes: None, ..holder(1, 0, Some("python")) };
        assert_eq!(rows(&account(&card(1804 * MIB), &[silent], &[engine(1)]))[2..], [line(" unexplained", 740)]);
    }

    #[test]
    fn a_suspended_process_has_nothing_and_a_silent_one_is_named() {
        let (mut suspended, mut silent) = (engine(1), engine(2));
        suspended.status.as_mut().unwrap().memory.suspended = Some(vec![GpuUse { uuid: UUID.into(), bytes: MIB }]);
        silent.status = Err(CommandError::new(Exit::Busy, "no answer"));
        let shares = account(&card(304 * MIB), &[holder(2, 300 * MIB, Some("python"))], &[suspended, silent]);
        assert_eq!(rows(&shares), [line("engine all of it", 300), line(" unexplained", 4)]);
    }
}
