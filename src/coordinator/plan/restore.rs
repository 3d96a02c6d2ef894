//! Before a resume: brings suspended processes back to their GPUs. `checkpoint/restore.rs` has the diagram of the whole wait.

use crate::Reporter;
use crate::checkpoint::{self, Checkpoint, Member};
use crate::failure::CommandError;
use crate::outcome::Done;
use crate::plan::Plan;
use crate::processes::Process;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_model::Selection;

/// What is added to the failure of a restore by which nobody is lost.
pub const STAY_SUSPENDED: &str = ". Processes that are not back stay suspended, and nothing is lost; `vramctl resume` tries again";

impl Plan {
    /// Before a resume: waits for a place in the queue and restores the suspended processes to their GPUs. Returns the plan for what is left
    /// to resume.
    pub fn restore_suspended(self, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        self.restore_suspended_on(&GpuMap::new(), reporter)
    }

    /// The same, to the GPUs that `map` has for theirs.
    pub fn restore_suspended_on(self, map: &GpuMap, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let is_suspended = |process: &Process| process.suspended().is_some();
        if !self.processes().any(is_suspended) {
            return Ok(self);
        }
        let mut place = self.queue(map, reporter)?;
        // Others may have restored them meanwhile.
        let (found, target) = (self.found(), self.target());
        let mut checkpoint = Checkpoint::of(found, target)?;
        checkpoint.members.retain(|member| is_suspended(&member.process));
        checkpoint.can_be_seen()?;
        checkpoint::load()?;
        // The memory on other GPUs stays paused, so it needs no room.
        let Selection { tags, gpus, .. } = self.request().selection();
        let tags_on = tags.is_empty().then_some(&**gpus);
        // Those that share their GPUs wait for it among these, once they are restored.
        let tags_on = tags_on.filter(|_| !checkpoint.members.iter().any(|member| member.process.shares()));
        let deadline = &self.operation().deadline;
        let restored = checkpoint.restore_with_room(map, tags_on, deadline, place.as_mut(), reporter);
        restored.map_err(|failure| {
            let lost = checkpoint.members.iter().filter(|member| member.is_lost).count();
            failure.adding(match checkpoint.members.len() - lost {
                0 => "",
                _ if lost > 0 => ". Any others that are not back stay suspended; `vramctl resume` tries again",
                _ => STAY_SUSPENDED,
            })
        })?;
        for Member { process, done, .. } in &checkpoint.members {
            reporter.done(&format!("restored {process} {}", done.took()));
        }
        let restored: Vec<(u32, Done)> = checkpoint.members.into_iter().map(|member| (member.process.pid, member.done)).collect();
        let mut rest = Self::again(self.into_operation(), reporter)?;
        rest.restored = restored.into_iter().collect();
        rest.queue_place = place;
        Ok(rest)
    }
}
