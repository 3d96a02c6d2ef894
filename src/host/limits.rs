//! How much host memory there is to be had.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Host memory of the system, or under a limit of a control group, in bytes.
struct Room {
    /// What can still be taken.
    free: u64,
    /// What there is, taken or not.
    all: u64,
}

/// Bytes that the host can still give this process: what the kernel calls available, and what is left of the memory
/// limits of its control groups. Taking more would have the kernel kill somebody, perhaps the program itself.
pub fn available_bytes() -> u64 {
    rooms().map(|room| room.free).min().unwrap_or(u64::MAX)
}

/// Whether so little is left that memory must not be kept for later. Always, where the program's data is limited (`ulimit -d`):
/// what it may have is its own.
pub fn is_short() -> bool {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: writable. Without an answer there is no limit.
    unsafe { libc::getrlimit(libc::RLIMIT_DATA, &raw mut limit) };
    limit.rlim_cur != libc::RLIM_INFINITY || rooms().any(|room| room.is_short())
}

impl Room {
    fn is_short(&self) -> bool {
        /// Enough for others whatever the host has, in bytes.
        const MOST: u64 = 8 << 30;
        self.free < (self.all / 16).min(MOST)
    }
}

const NOT_TOLD: u64 = u64::MAX;
static TOLD: AtomicU64 = AtomicU64::new(NOT_TOLD);

/// Has the host give so many bytes from now on; `None`: what it really can. For tests.
pub fn set_available(bytes: Option<u64>) {
    TOLD.store(bytes.unwrap_or(NOT_TOLD), Ordering::Relaxed);
}

/// The system, and every limit that this process is under.
fn rooms() -> impl Iterator<Item = Room> {
    let told = Some(TOLD.load(Ordering::Relaxed)).filter(|free| *free != NOT_TOLD).map(|free| Room { free, all: u64::MAX });
    let found = told.is_none().then(|| of_system().into_iter().chain(of_groups()));
    told.into_iter().chain(found.into_iter().flatten())
}

fn of_system() -> Option<Room> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    };
    Some(Room { free: bytes("MemAvailable:")?, all: bytes("MemTotal:")? })
}

/// The limits on the way up, of either version of control groups. File pages that a group could drop count as available.
fn of_groups() -> Vec<Room> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = text.lines().filter_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let (root, limits, usage, droppable) = match controllers {
            // Beyond the second the kernel kills nobody, but makes everybody wait.
            "" => ("/sys/fs/cgroup", &["memory.max", "memory.high"][..], "memory.current", "inactive_file "),
            "memory" => ("/sys/fs/cgroup/memory", &["memory.limit_in_bytes"][..], "memory.usage_in_bytes", "total_inactive_file "),
            _ => return None,
        };
        let left = |directory: &Path| {
            let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
            // The statistics are the dear part, so they come last.
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

    /// What the kernel says here, whatever it is.
    #[test]
    fn the_system_has_room() {
        let system = of_system().unwrap();
        assert!(0 < system.free && system.free <= system.all && available_bytes() <= system.free + (1 << 30));
    }
}
