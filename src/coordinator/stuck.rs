//! Frees processes that the driver has locked or checkpointed without their libraries' knowledge, for another tool that has died.

use crate::Reporter;
use crate::checkpoint::Checkpoint;
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::processes::{Found, Target};
use vramctl_driver::checkpoint::GpuMap;

/// Restores those of the matching processes that do not answer for this reason. Returns whether there were any.
pub fn free(found: &Found, target: &Target, deadline: &Deadline, reporter: &dyn Reporter) -> Result<bool, CommandError> {
    let Ok(chosen) = found.choose(target) else { return Ok(false) };
    let mut stuck = Checkpoint::stuck(found, &chosen);
    if stuck.members.is_empty() {
        return Ok(false);
    }
    stuck.restore(&GpuMap::new(), deadline, reporter).map_err(|failure| {
        let is_short = failure.exit() == Exit::NoMemory;
        let why = if is_short { ". A process that does not answer may need as much as it has in host memory, on any GPU" } else { "" };
        failure.adding(&format!("{why}. Processes that are not back stay suspended; `vramctl resume` tries again"))
    })?;
    for member in &stuck.members {
        let why = "did not answer because the driver had locked or checkpointed it; it is restored";
        reporter.note(&format!("{} {why}", member.process));
    }
    Ok(true)
}
