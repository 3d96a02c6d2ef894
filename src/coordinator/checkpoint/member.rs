//! One process, and the steps that take it off its GPUs and back: each follows from the state that the driver reports.

use crate::failure::{CommandError, Exit};
use crate::lock::{FileLock, Others};
use crate::outcome::Done;
use crate::proc;
use crate::processes::{self, Found, Process};
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, Refusal};
use vramctl_driver::checkpoint::{GpuMap, ProcessState};
use vramctl_driver::{self as driver, Card};
use vramctl_host::system;
use vramctl_model::{
    Error, Failure, GpuUse, Kind, Obstacle, ObstacleKind, Participants, PauseRequest, Selection, TagState, TagStatus, Transition, Verb,
    code, support,
};

/// A process that leaves its GPUs and comes back.
pub struct Member {
    /// The process, as it was found.
    pub process: Process,
    /// Where its socket is. Each request has its own connection: the process closes one that is not used for a while.
    pub(super) directory: Directory,
    /// The process id for the driver; 0 if the process is not visible from here.
    pub pid: i32,
    /// Once it is suspended: the GPUs that it sees, and the memory that a restore needs there.
    pub gpus: Vec<GpuUse>,
    /// The tags that were active and are to be resumed. `None`: all, also those that it has got since.
    active: Option<Vec<String>>,
    /// What has been done so far.
    pub done: Done,
    /// The driver will never restore it.
    pub is_lost: bool,
    /// Its memory has been restored on other GPUs.
    pub has_moved: bool,
    /// This operation has quiesced its library, and the driver has not locked it: it is woken even if the driver does not report its state.
    is_only_quiesced: bool,
    /// Keeps other operations from suspending and restoring it.
    pub(super) alone: Option<FileLock>,
}

/// For messages.
const FAILED: &str = "the driver reports the process as FAILED. It is lost: end it and start it again";

/// The GPUs in MIG mode that a process uses. `pid`: as it is seen from here.
pub(super) fn mig(process: &Process, pid: u32, cards: &[Card]) -> Vec<Obstacle> {
    // Without memory of its own, it may still have a context there.
    let has_context = |card: &Card| driver::holders_of(&card.uuid).iter().any(|holder| holder.pid == pid);
    let is_there = |card: &&Card| process.gpus().any(|gpu| gpu == card.uuid) || has_context(card);
    let obstacle = |card: &Card| Obstacle { kind: ObstacleKind::Mig, what: support::in_mig_mode(card.index), bytes: 0 };
    cards.iter().filter(|card| card.mig).filter(is_there).map(obstacle).collect()
}

pub(super) fn unless_in_the_way(obstacles: Vec<Obstacle>) -> Result<(), CommandError> {
    if obstacles.is_empty() { Ok(()) } else { Err(CommandError::from(&Error::NotRestorable(obstacles))) }
}

/// Somebody else pauses, resumes or suspends the process, or has just done so.
fn leased(message: String) -> CommandError {
    CommandError::Refused(Box::new(Refusal { message, ..Refusal::from(&Error::Leased) }))
}

impl Member {
    pub(super) fn new(found: &Found, process: Process) -> Result<Self, CommandError> {
        let directory = found.directory(process.pid)?;
        let pid = Client::connect(&directory, process.pid)?.seen_as();
        let gpus = process.suspended().unwrap_or_default().to_vec();
        // What only the program has paused, the resume leaves.
        let is_active = |tag: &&TagStatus| tag.state != TagState::Paused || !gpus.is_empty() || tag.is_only_self_paused();
        let active: Vec<_> = process.tags().iter().filter(is_active).map(|tag| tag.tag.clone()).collect();
        let active = Some(active).filter(|active| active.len() < process.tags().len());
        Ok(Self {
            directory,
            pid,
            gpus,
            active,
            process,
            done: Done::default(),
            is_lost: false,
            has_moved: false,
            is_only_quiesced: false,
            alone: None,
        })
    }

    fn ask<R>(&self, request: impl FnOnce(&mut Client) -> Result<R, ClientError>) -> Result<R, ClientError> {
        request(&mut Client::connect(&self.directory, self.process.pid)?)
    }

    /// Others may have moved it before they were kept out.
    pub(super) fn look_again(&mut self) {
        // One that did not answer is locked, and does not answer now.
        if self.process.status.is_ok()
            && let Some(now) = processes::ask(&self.directory, &[self.process.pid]).pop()
            && let Some(gpus) = now.suspended()
        {
            self.gpus = gpus.to_vec();
            self.process = now;
        }
    }

    /// The tags to pause or resume; empty means all, `None` leaves the process out. One without memory of its own may have the others' memory
    /// open.
    pub(super) fn due(&self, verb: Verb) -> Option<Vec<String>> {
        match (verb, &self.active) {
            (Verb::Pause, _) => self.gpus.is_empty().then(Vec::new),
            (Verb::Resume, None) => Some(Vec::new()),
            (Verb::Resume, Some(active)) => (!active.is_empty()).then(|| active.clone()),
        }
    }

    pub(super) fn time<R>(&mut self, stage: &'static str, step: impl FnOnce(&mut Self) -> R) -> R {
        let started = Instant::now();
        let result = step(self);
        self.done.add(stage, started.elapsed());
        result
    }

    pub(super) fn failed(&self, error: ClientError) -> CommandError {
        match self.refusal(error) {
            failure if failure.is(Kind::Shared) => failure.adding(". Nothing has changed"),
            failure => self.named(failure),
        }
    }

    /// Why it refuses, in words of a suspend.
    fn refusal(&self, error: ClientError) -> CommandError {
        if let ClientError::Refused(refusal) = &error
            && let Some(lent) = refusal.lent.as_ref().filter(|_| refusal.code == Kind::Shared)
        {
            // The refusal's own advice is about the options of a pause.
            let lent: Vec<_> = lent.iter().map(ToString::to_string).collect();
            let message = format!(
                "other processes have memory of {} open (CUDA IPC): {}. Have them close it, or end them; or name all of these \
                 processes in one command (--all, or a name that they have in common), which then includes this memory",
                self.process,
                lent.join(", ")
            );
            return CommandError::Refused(Box::new(Refusal { message, ..(**refusal).clone() }));
        }
        CommandError::from(error)
    }

    pub(super) fn quiesce(&mut self) -> Result<(), CommandError> {
        // The answer may be lost although the library is quiesced.
        self.is_only_quiesced = self.gpus.is_empty();
        self.gpus = self.ask(Client::suspend).map_err(|error| self.not_quiesced(error))?;
        Ok(())
    }

    fn not_quiesced(&self, error: ClientError) -> CommandError {
        match self.failed(error) {
            // There is no other reason to refuse this.
            failure if failure.is(Kind::Leased) => leased(format!("{} has been resumed meanwhile, and runs; try again", self.process)),
            failure => failure,
        }
    }

    /// Adds the process to the message.
    pub(super) fn named(&self, failure: CommandError) -> CommandError {
        failure.adding(&format!(" ({})", self.process))
    }

    pub(super) fn can_be_seen(&self) -> Result<(), CommandError> {
        let away = || CommandError::new(Exit::Unsuspendable, "it is in another container: run vramctl there");
        if self.pid == 0 {
            return Err(away());
        }
        if system::has_main_thread(self.pid.cast_unsigned()) {
            return Ok(());
        }
        // It answers 304 to each request.
        Err(CommandError::new(Exit::Unsuspendable, "its main thread has ended, through which the driver reaches a process"))
    }

    /// Dry run of its pause, together with these processes.
    pub(super) fn plan(&mut self, wanted: &PauseRequest, pids: &[u32]) -> Result<protocol::DryRun, CommandError> {
        let partners = pids.iter().copied().filter(|pid| *pid != self.process.pid).collect();
        let selection = Selection { nccl: true, ..wanted.selection.clone() };
        let participants = Participants { partners, ..wanted.participants.clone() };
        let wanted = Transition::Pause(PauseRequest { selection, participants, ..wanted.clone() });
        self.ask(|client| client.plan(wanted)).map_err(|error| self.refusal(error))
    }

    /// Its GPUs in MIG mode.
    pub(super) fn mig(&self, cards: &[Card]) -> Vec<Obstacle> {
        mig(&self.process, self.pid as u32, cards)
    }

    pub(super) fn state(&mut self) -> Result<ProcessState, CommandError> {
        driver::checkpoint::state(self.pid).map_err(|failure| self.refused("report the state of", failure))
    }

    pub(super) fn in_use(&self, others: &Others, within: Duration) -> CommandError {
        let stopped = others.pid.map_or_else(String::new, |pid| format!(" (if that is stopped: kill -CONT {pid})"));
        let message = format!(
            "{} has been suspending or restoring {} for {} s; try again when it is done{stopped}",
            others.who(),
            self.process,
            within.as_secs()
        );
        leased(message)
    }

    /// The driver's refusal, with the state that it has left the process in.
    fn refused(&mut self, step: &str, failure: Failure) -> CommandError {
        if !proc::exists(self.pid) {
            return CommandError::new(Exit::NoProcess, format!("{} has ended", self.process));
        }
        let lost = match driver::checkpoint::state(self.pid) {
            Ok(ProcessState::Failed) => format!("; {FAILED}"),
            // Driver 580 answers this from then on.
            Ok(ProcessState::Checkpointed) if step == "restore" && failure.code == code::OPERATING_SYSTEM => {
                "; an earlier restore has failed for lack of memory. It is lost: end it and start it again".into()
            }
            _ => String::new(),
        };
        self.is_lost = !lost.is_empty();
        CommandError::new(Exit::Failed, format!("the driver did not {step} {}: {failure}{lost}", self.process))
    }

    pub(super) fn lock(&mut self, limit: Duration) -> Result<(), CommandError> {
        match self.state()? {
            ProcessState::Running => driver::checkpoint::lock(self.pid, limit).map_err(|failure| match failure.code {
                code::NOT_READY => {
                    CommandError::new(Exit::Busy, format!("{}: a CUDA call has not ended in {} ms", self.process, limit.as_millis()))
                }
                _ => self.refused("lock", failure),
            })?,
            ProcessState::Locked => (),
            ProcessState::Checkpointed | ProcessState::Failed => return Ok(()),
        }
        self.is_only_quiesced = false;
        // The program kept running until now, and may have created new obstacles.
        let obstacles = self.ask(Client::status).map_err(|error| self.failed(error))?.memory.obstacles;
        unless_in_the_way(obstacles).map_err(|failure| self.named(failure))
    }

    pub(super) fn checkpoint(&mut self) -> Result<(), CommandError> {
        if self.state()? == ProcessState::Checkpointed {
            return Ok(());
        }
        driver::checkpoint::checkpoint(self.pid).map_err(|failure| self.refused("checkpoint", failure))?;
        self.done.rest_bytes = self.gpus.iter().map(|gpu| gpu.bytes).sum();
        Ok(())
    }

    /// Lets the process continue if it is on its GPUs: before a restore, one that has not left them, and after it, all of them. Also lets its
    /// library use the driver again.
    pub(super) fn loosen(&mut self) -> Result<(), CommandError> {
        match self.state() {
            Ok(ProcessState::Running) => (),
            Ok(ProcessState::Locked) => driver::checkpoint::unlock(self.pid).map_err(|failure| self.refused("unlock", failure))?,
            Ok(ProcessState::Checkpointed) => return Ok(()),
            Ok(ProcessState::Failed) => {
                self.is_lost = true;
                return Err(CommandError::new(Exit::Failed, format!("{}: {FAILED}", self.process)));
            }
            // Only a locked process can be unlocked, so this changes no other.
            Err(unknown) => {
                let is_unlocked = driver::checkpoint::unlock(self.pid).is_ok();
                if !is_unlocked && !self.is_only_quiesced {
                    return Err(unknown);
                }
            }
        }
        self.ask(Client::awake).map_err(|error| self.failed(error))?;
        self.is_only_quiesced = false;
        Ok(())
    }

    pub(super) fn restore(&mut self, map: &GpuMap) -> Result<(), CommandError> {
        match self.state()? {
            ProcessState::Checkpointed => (),
            // Nothing to restore. `Failed` has been reported.
            ProcessState::Running | ProcessState::Locked | ProcessState::Failed => return Ok(()),
        }
        let own: GpuMap = map.iter().filter(|(old, _)| self.gpus.iter().any(|gpu| gpu.uuid == *old)).cloned().collect();
        let restored = match driver::checkpoint::restore(self.pid, map) {
            // The driver requires every GPU that is visible to the process, but does not report which those are.
            Err(failure) if failure.code == code::INVALID_VALUE && own != *map => driver::checkpoint::restore(self.pid, &own),
            answer => answer,
        };
        restored.map_err(|failure| self.refused("restore", failure))?;
        self.has_moved = map.iter().any(|(old, new)| old != new && self.process.gpus().any(|gpu| gpu == old));
        self.done.rest_bytes = self.gpus.iter().map(|gpu| gpu.bytes).sum();
        Ok(())
    }

    /// Device memory that is left to CUDA, which a pause by tag does not release.
    pub fn unmanaged(&self) -> u64 {
        self.process.status.iter().flat_map(|status| &status.memory.unmanaged).map(|left| left.bytes).sum()
    }
}
