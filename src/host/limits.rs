//! How much host memory is available.

use crate::system::{folder_of, own_folder, resource_limit};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Host memory of the system, or within a cgroup's limit, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Available.
    pub free: u64,
    /// Total.
    pub all: u64,
}

/// The tightest limit of a process's cgroups, such as that of its container. `None` if nothing limits it.
pub fn limit_of(pid: u32) -> Option<Room> {
    // In version 1 every cgroup has a limit; the highest value means none.
    of_groups(&folder_of(pid))
        .into_iter()
        .filter(|room| of_system().is_none_or(|system| room.all < system.all))
        .min_by_key(|room| room.free)
}

/// Bytes of host memory available to this process: what the kernel calls available, within the limits of its cgroups. Taking
/// more would invoke the OOM killer, perhaps on the program itself.
pub fn available_bytes() -> u64 {
    rooms().map(|room| room.free).min().unwrap_or(u64::MAX)
}

/// Bytes of host memory that may be taken without making it short for others.
pub fn spare_bytes() -> u64 {
    rooms().map(Room::spare).min().unwrap_or(u64::MAX)
}

/// Whether memory is too short to be kept for later. Always true under `ulimit -d`: the program may need all it is allowed.
pub fn is_short() -> bool {
    resource_limit(libc::RLIMIT_DATA).is_some() || rooms().any(Room::is_short)
}

impl Room {
    /// Bytes that the rest of the system should have left.
    fn reserve(self) -> u64 {
        /// Bytes that suffice on any host.
        const MOST: u64 = 8 << 30;
        (self.all / 16).min(MOST)
    }

    fn is_short(self) -> bool {
        self.free < self.reserve()
    }

    fn spare(self) -> u64 {
        self.free.saturating_sub(self.reserve())
    }
}

const UNSET: u64 = u64::MAX;
static PRESET: AtomicU64 = AtomicU64::new(UNSET);

/// Overrides the available bytes, for tests. `None` restores the real value.
pub fn set_available(bytes: Option<u64>) {
    PRESET.store(bytes.unwrap_or(UNSET), Ordering::Relaxed);
}

/// The system, and every cgroup limit on this process.
fn rooms() -> impl Iterator<Item = Room> {
    let preset = Some(PRESET.load(Ordering::Relaxed)).filter(|free| *free != UNSET).map(|free| Room { free, all: u64::MAX });
    let found = preset.is_none().then(|| of_system().into_iter().chain(of_groups(own_folder())));
    preset.into_iter().chain(found.into_iter().flatten())
}

fn of_system() -> Option<Room> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    };
    Some(Room { free: bytes("MemAvailable:")?, all: bytes("MemTotal:")? })
}

/// The limits of a process's cgroups and their parents, v1 or v2, from its folder in `/proc`. Reclaimable file pages count as available.
fn of_groups(process: &Path) -> Vec<Room> {
    let text = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let groups = text.lines().filter_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let (root, limits, usage, droppable) = match controllers {
            // Above `memory.high` the kernel does not kill, but throttles all processes of the group.
            "" => ("/sys/fs/cgroup", &["memory.max", "memory.high"][..], "memory.current", "inactive_file "),
            "memory" => ("/sys/fs/cgroup/memory", &["memory.limit_in_bytes"][..], "memory.usage_in_bytes", "total_inactive_file "),
            _ => return None,
        };
        let left = |directory: &Path| {
            let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
            // The statistics are expensive, so they come last.
            let all = limits.iter().filter_map(|limit| number(limit)).min()?;
            let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
            let droppable = statistics.lines().find_map(|line| line.strip_prefix(droppable)?.parse().ok()).unwrap_or(0);
            Some(Room { free: all.saturating_sub(number(usage)?.saturating_sub(droppable)), all })
        };
        let own = Path::new(root).join(group.trim_start_matches('/'));
        Some(own.ancestors().take_while(|directory| directory.starts_with(root)).filter_map(left).collect::<Vec<_>>())
    });
    groups.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_container_is_short_later_than_a_large_host() {
        const GIB: u64 = 1 << 30;
        let is_short = |free, all| Room { free, all }.is_short();
        assert!(is_short(GIB / 2 - 1, 8 * GIB) && !is_short(GIB / 2, 8 * GIB));
        assert!(is_short(8 * GIB - 1, 2048 * GIB) && !is_short(8 * GIB, 2048 * GIB));
    }

    /// Works on whatever this machine's kernel reports.
    #[test]
    fn the_system_has_room() {
        let system = of_system().unwrap();
        assert!(0 < system.free && system.free <= system.all && available_bytes() <= system.free + (1 << 30));
    }
}
