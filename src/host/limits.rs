//! How much host memory there is to be had.

use std::fs;
use std::path::Path;

/// Bytes that the host can still give this process: what the kernel calls available, and what is left of the memory
/// limits of its control groups. Taking more would have the kernel kill somebody, perhaps the program itself.
pub fn available_bytes() -> u64 {
    system_available().unwrap_or(u64::MAX).min(cgroup_available().unwrap_or(u64::MAX))
}

fn system_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The tightest of the limits on the way up, of either version of control groups. File pages that a group could drop count
/// as available.
fn cgroup_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
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
            let limit = limits.iter().filter_map(|limit| number(limit)).min()?;
            let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
            let droppable = statistics.lines().find_map(|line| line.strip_prefix(droppable)?.parse().ok()).unwrap_or(0);
            Some(limit.saturating_sub(number(usage)?.saturating_sub(droppable)))
        };
        let own = Path::new(root).join(group.trim_start_matches('/'));
        own.ancestors().take_while(|directory| directory.starts_with(root)).filter_map(left).min()
    });
    groups.min()
}
