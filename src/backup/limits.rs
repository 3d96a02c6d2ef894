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

/// The tightest of the limits on the way up (control groups, version 2). File pages that the group could drop count as
/// available.
fn cgroup_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/');
    let mut directory = Path::new("/sys/fs/cgroup").join(group);
    let mut tightest = None;
    while directory.starts_with("/sys/fs/cgroup") {
        let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        if let (Some(limit), Some(current)) = (number("memory.max"), number("memory.current")) {
            let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
            let droppable = statistics.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok()).unwrap_or(0);
            let left = limit.saturating_sub(current.saturating_sub(droppable));
            tightest = Some(tightest.map_or(left, |known: u64| known.min(left)));
        }
        directory.pop();
    }
    tightest
}
