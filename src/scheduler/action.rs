//! What the scheduler wants done, and why.

use crate::ids::{AskId, ChangeId, GangId, GpuId, Priority, ProgramId};
use crate::memory::Holdings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Some leave while one comes: one operation, with one decision. [`crate::Event::Done`] tells how it ended.
    Change(Change),
    /// The program may take the room now. It answers with [`crate::Event::Settled`].
    Grant(ProgramId, AskId),
    /// The request fails: out of memory.
    Refuse(ProgramId, AskId, Refusal),
    /// Whether to tell when the program is idle.
    Watch(ProgramId, bool),
}

/// A change of places.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Its number.
    pub id: ChangeId,
    /// For whom.
    pub cause: Cause,
    /// Who leaves. A busy one gets the policy's `drain` to finish its work in flight.
    pub leaving: Vec<Leave>,
    /// Who comes: all programs of the gang, with everything that is away. Nobody, if the waiter is in place and asks for more.
    pub coming: Vec<ProgramId>,
    /// The host has no room for the contents of both: they pass each other piece by piece.
    pub passing: bool,
    /// Bytes of contents that go to files, since the host has no room for them.
    pub to_files: u64,
}

/// A gang that leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Which.
    pub gang: GangId,
    /// Its programs: all are held, also those of which nothing is taken.
    pub programs: Vec<ProgramId>,
    /// The allocations to take: any of this class and size. If a class has changed, as many bytes, the cheapest first, with no more
    /// contents; if there are not as many, the change fails.
    pub taken: BTreeMap<(ProgramId, GpuId), Holdings>,
    /// Why this one.
    pub why: Why,
}

impl Leave {
    /// Bytes taken on a GPU.
    pub fn on(&self, gpu: GpuId) -> u64 {
        self.taken.iter().filter(|((_, on), _)| *on == gpu).map(|(_, holdings)| holdings.bytes()).sum()
    }

    /// Bytes of contents that need a place.
    pub fn contents(&self) -> u64 {
        self.taken.values().map(Holdings::contents).sum()
    }
}

/// Why there is a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A call of this gang waits for memory that is away.
    Called(GangId),
    /// This gang asks for more.
    Asks(GangId),
    /// This gang has been idle for longer than its `--idle`.
    IdleFor(GangId, Duration),
}

/// Why a gang gives way. In this order they are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Why {
    /// Some of its memory is away already, and nobody has called it.
    Away,
    /// It waits itself, and its turn comes later.
    WaitsBehind,
    /// It has nothing to do.
    Idle,
    /// It is busy, and of a lower priority.
    Lower(Priority),
    /// It is busy, and its turn is over.
    TurnOver,
}

/// Why a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The GPU is too small.
    NeverFits,
    /// Nobody could give way for so long.
    Unserved(Duration),
}

/// Why a gang still waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Because {
    /// The room is being made for it.
    Served,
    /// Others change places on its GPUs.
    Moving,
    /// This one comes first.
    Behind(GangId),
    /// Those in place have their turn, or have not been idle for long, until then, since the scheduler's epoch.
    Until(Duration),
    /// Those in place are of a higher priority, or about to change.
    Busy,
    /// Nobody can give way: all are capturing, held by others, or did not drain.
    NobodyCan,
    /// The host has no place for the contents of those who could give way.
    HostFull,
    /// A change failed. The next attempt is then.
    Retries(Duration),
}
