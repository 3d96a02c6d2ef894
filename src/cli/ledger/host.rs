//! Who uses host memory.

use super::share::{Share, What, row, signed};
use crate::ui::output;
use serde::Serialize;
use std::collections::BTreeSet;
use vramctl_control::protocol::ProcessStatus;
use vramctl_coordinator::proc;
use vramctl_coordinator::processes::Process;
use vramctl_host::limits;
use vramctl_model::{Bytes, checked_name};

/// The host memory of processes.
#[derive(Debug, Serialize)]
pub struct Host {
    /// The tightest limit on any of them, such as their container's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// What is free within it, or without one, on the machine.
    pub free_bytes: u64,
    pub shares: Vec<Share>,
}

/// The host memory of these processes, and of those of their jobs that are not `managed`.
pub fn host(processes: &[Process], managed: &[Process]) -> Host {
    let answering: Vec<_> = processes.iter().filter_map(|process| process.status.as_ref().ok()).collect();
    let limit = answering.iter().filter_map(|status| limits::limit_of(status.process.pid)).min_by_key(|room| room.free);
    let mut shares = Vec::new();
    let mut jobs = BTreeSet::new();
    for status in answering {
        shares.extend(host_of(status, resident(status.process.pid)));
        jobs.extend(status.process.job.as_deref());
    }
    for job in jobs {
        let rest = of_job(job).into_iter().filter(|pid| managed.iter().all(|process| process.pid != *pid));
        let bytes: u64 = rest.map(|pid| resident(pid).0).sum();
        shares.push(Share { name: Some(job.into()), ..Share::new(What::RestOfJob, signed(bytes)) });
    }
    shares.retain(|share| share.bytes > 0);
    let free = limit.map_or_else(limits::available_bytes, |room| room.free);
    Host { limit_bytes: limit.map(|room| room.all), free_bytes: free, shares }
}

/// The second argument: resident memory of its own, and memory that may be shared.
fn host_of(status: &ProcessStatus, (own, common): (u64, u64)) -> Vec<Share> {
    let (process, memory) = (&status.process, &status.memory);
    let part = |what, of: Option<&String>, bytes| {
        let (pid, name) = (Some(process.pid), Some(process.name.clone()));
        Share { pid, name, of: of.cloned(), ..Share::new(what, signed(bytes)) }
    };
    let backups = memory.tags.iter().map(|tag| {
        let what = if tag.paused_bytes == 0 { What::Retained } else { What::Backup };
        part(what, Some(&tag.tag), tag.host_bytes)
    });
    let mut shares: Vec<_> = backups.collect();
    let ready = memory.host.ready_bytes;
    shares.extend([
        part(What::Ready, None, ready.saturating_sub(memory.tags.iter().map(|tag| tag.host_bytes).sum())),
        part(What::Own, None, own.saturating_sub(ready)),
        part(What::Shared, None, common),
    ]);
    shares
}

/// A process's private host memory, and memory that may be shared, without files. Zero if `/proc` does not have the process.
pub fn resident(pid: u32) -> (u64, u64) {
    let [own, common] = proc::bytes(pid, ["RssAnon", "RssShmem"]);
    (own.unwrap_or(0), common.unwrap_or(0))
}

/// The processes of a job, by their environment.
fn of_job(job: &str) -> Vec<u32> {
    proc::pids()
        .into_iter()
        .filter(|pid: &u32| {
            let [name, id] = proc::variables(*pid, ["VRAMCTL_NAME", "VRAMCTL_JOB"]);
            name.filter(|name| checked_name(name).is_ok()).or(id).is_some_and(|its| its == job)
        })
        .collect()
}

/// For people.
pub fn describe_host(host: &Host) -> String {
    let text = match host.limit_bytes {
        Some(limit) => format!(
            "Host memory: {} free within the limit of {} (the container's, or another cgroup's)\n",
            Bytes(host.free_bytes),
            Bytes(limit)
        ),
        None => format!("Host memory: {} free, and no limit\n", Bytes(host.free_bytes)),
    };
    if host.shares.is_empty() {
        return text.trim_end().to_owned();
    }
    text + &output::table(&["PID", "PROCESS", "MEMORY", "BYTES"], host.shares.iter().map(row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::share::shown::{MIB, line, rows};
    use vramctl_coordinator::process::made_up::process;
    use vramctl_model::TagState;

    /// The library's arena contains the backups, and is part of the resident memory.
    #[test]
    fn host_memory_is_split_by_the_librarys_figures() {
        let mut engine = process(1, "engine", &[("kv", TagState::Active), ("weights", TagState::Paused)]);
        let status = engine.status.as_mut().unwrap();
        status.memory.tags[0].host_bytes = 100 * MIB;
        status.memory.tags[1].host_bytes = 1000 * MIB;
        status.memory.host.ready_bytes = 1280 * MIB;
        let wanted = [
            line("engine backup of kv, which is active (retained)", 100),
            line("engine backup of weights", 1000),
            line("engine ready for backups", 180),
            line("engine all else of its own", 220),
            line("engine shared memory", 7),
        ];
        assert_eq!(rows(&host_of(status, (1500 * MIB, 7 * MIB))), wanted);
    }
}
