//! Brings suspended processes back to their GPUs, once there is room for them.
//!
//! A resume that waits for memory:
//!
//! ```text
//!                        some are suspended
//! plan ────────────────────────────────────▶ queue ─▶ room? ─ yes ─▶ restore ─▶ unlock ─▶ plan again
//!   │ none is                         stage: "waits…" ▲   │ no, and there is time left         │
//!   │                                                └───┘                                    │
//!   └──────────────────────────────┬───────────────────────────────────────────────◀──────────┘
//!                                  ▼ each job
//!   queue (within the operation's own place) ─▶ attempt ─▶ committed
//!                                     stage: "waits…" ▲   │ short of memory, and there is time left: those that were short
//!                                                    └───┘ wait for it in their processes first, and the others only then take part
//! ```
//!
//! Without a timeout, nothing of this waits for memory: the place in the queue is waited for only while nobody ahead waits for memory either, and a
//! shortage is the answer.
//!
//! Whatever fails leaves the processes suspended, or restored and paused: the next resume goes on from there.

use super::{Checkpoint, Member, at_once, cards_to_check, first};
use crate::Reporter;
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::lock::FileLock;
use crate::patience::{LOOK_FOR_ROOM_EVERY, OTHERS_FINISH_WITHIN, RESTORE_WITHIN};
use crate::queue::Entry;
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_driver::checkpoint::{GpuMap, ProcessState};
use vramctl_driver::{self as driver, Card};
use vramctl_model::{Error, Shortage};

impl Checkpoint {
    /// Brings processes back to running, from whatever state each is in. `deadline`: of the waits for room, and for other operations.
    pub fn restore(&mut self, map: &GpuMap, deadline: &Deadline, reporter: &dyn Reporter) -> Result<(), CommandError> {
        self.restore_with_room(map, None, deadline, None, reporter)
    }

    /// `tags_on`: starts only if there is room for the paused memory on these GPUs, too, so that the job either comes back completely or stays
    /// as it is; empty means on all. `place`: the operation's, in the queue for memory.
    pub fn restore_with_room(
        &mut self,
        map: &GpuMap,
        tags_on: Option<&[String]>,
        deadline: &Deadline,
        mut place: Option<&mut Entry>,
        reporter: &dyn Reporter,
    ) -> Result<(), CommandError> {
        // Others that wait for room look for it in turns.
        let left = |otherwise| deadline.left().map_or(otherwise, |left| left.max(Deadline::A_MOMENT));
        let begun = Instant::now();
        let (loosened, _room) = loop {
            let is_alone = self.members.iter().all(|member| member.alone.is_some());
            self.keep_others_out(left(OTHERS_FINISH_WITHIN))?;
            if !is_alone {
                at_once(&mut self.members, Member::look_again);
            }
            // Before any wait: what still is on its GPU needs no room, and what is lost never comes back.
            let loosened = first(at_once(&mut self.members, Member::loosen));
            self.known()?;
            match room(&self.needs(map, tags_on), left(RESTORE_WITHIN), reporter) {
                Ok(room) => break (loosened, room),
                Err(short) if loosened.is_ok() && !deadline.is_over() && short.exit() == Exit::NoMemory => (),
                Err(short) => return Err(loosened.err().map_or(short.clone(), |lost| lost.adding(&format!("; {short}")))),
            }
            if let Some(place) = &mut place {
                place.waits_for_memory();
            }
            if !is_alone {
                for member in &mut self.members {
                    member.alone = None;
                }
            }
            thread::sleep(LOOK_FOR_ROOM_EVERY);
        };
        for member in &mut self.members {
            member.done.add("room", begun.elapsed());
        }
        let restored = first(self.all("restore", |member| member.restore(map)));
        let unlocked = first(self.all("unlock", Member::loosen));
        loosened.and(restored).and(unlocked)
    }

    /// Fails if nothing is known of what a member's restore needs: the driver had only locked it when it was found ([`Self::stuck`]), and has
    /// checkpointed it since, for another tool.
    fn known(&self) -> Result<(), CommandError> {
        let is_unknown = |member: &&Member| member.process.status.is_err() && member.gpus.is_empty();
        let is_gone = |member: &&Member| matches!(driver::checkpoint::state(member.pid), Ok(ProcessState::Checkpointed));
        let Some(member) = self.members.iter().filter(is_unknown).find(is_gone) else { return Ok(()) };
        Err(CommandError::new(Exit::Busy, format!("{} has just been checkpointed by somebody else; try again", member.process)))
    }

    /// Bytes that a restore needs, by GPU. `tags_on`: including paused memory on these GPUs, or on all if there are none.
    fn needs(&self, map: &GpuMap, tags_on: Option<&[String]>) -> BTreeMap<String, u64> {
        let mut needs = BTreeMap::<_, u64>::new();
        // If the driver does not report the state now, it may still restore the process.
        let comes_back = |member: &&Member| matches!(driver::checkpoint::state(member.pid), Ok(ProcessState::Checkpointed) | Err(_));
        for member in self.members.iter().filter(comes_back) {
            for gpu in member.gpus.iter().filter(|gpu| gpu.bytes > 0) {
                *needs.entry(onto(map, &gpu.uuid).to_owned()).or_default() += room_for(gpu.bytes);
            }
            let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
            for device in devices {
                if let Some(uuid) = &device.uuid
                    && tags_on.is_some_and(|gpus| gpus.is_empty() || gpus.contains(uuid))
                {
                    *needs.entry(onto(map, uuid).to_owned()).or_default() += device.coming_bytes();
                }
            }
        }
        needs
    }
}

/// Fails if there is not enough room. Holds a lock among this user's restores, so that no other takes the room meanwhile.
fn room(needs: &BTreeMap<String, u64>, within: Duration, reporter: &dyn Reporter) -> Result<Option<FileLock>, CommandError> {
    let lock = FileLock::take("restore.lock", within).map_err(|others| {
        let text = format!(
            "{} has been restoring a job for {} s; see who has {} open, and try again when it is done",
            others.who(),
            within.as_secs(),
            others.place.display()
        );
        CommandError::new(Exit::Busy, text)
    })?;
    let cards = if needs.is_empty() { Vec::new() } else { cards_to_check(reporter) };
    let is_short = |card: &&Card| needs.get(&card.uuid).is_some_and(|needed| *needed > card.free);
    cards.iter().find(is_short).map_or(Ok(lock), |card| Err(short(card, needs[&card.uuid])))
}

/// The GPU that a map has for another one.
pub fn onto<'a>(map: &'a GpuMap, uuid: &'a str) -> &'a str {
    map.iter().find(|(old, _)| old == uuid).map_or(uuid, |(_, new)| new)
}

/// Bytes that must be free to restore this much. A restore that runs out of memory cannot be retried, so this is more.
pub fn room_for(bytes: u64) -> u64 {
    bytes + bytes / 4
}

/// Too little memory on a GPU.
pub fn short(card: &Card, needed: u64) -> CommandError {
    let (uuid, holders) = (Some(card.uuid.clone()), driver::holders_of(&card.uuid));
    CommandError::from(&Error::DeviceMemory(Shortage {
        device: card.index as i32,
        uuid,
        index: Some(card.index),
        needed,
        free: card.free,
        holders,
    }))
}
