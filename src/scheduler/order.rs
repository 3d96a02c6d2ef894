//! Who is served first.
//!
//! Gangs with a blocked rank come first: what they have is of no use until they go on, and they cannot give way. Then the priority decides,
//! then whether a gang is in its turn, then the time that it has been waiting. A gang that asks for more in its turn goes before older
//! waiters because its turn would be of no use otherwise: of two engines that start together, each would lose its place to the other at
//! each allocation.
//!
//! A waiter of a lower priority rises to the highest once it has waited for so long that a slice is `low_percent` of the time; on each GPU
//! one at a time (of those that somebody can serve), and the next after the turn of the last has become `low_percent` of the time, too.
//! Else a hundred trainers of a low priority would get a hundred turns for one of an engine.

use crate::ids::{GangId, GpuId, Priority};
use crate::memory::PerGpu;
use crate::state::{Gang, State};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

/// A gang that waits for room, or to come in.
#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    pub gang: GangId,
    pub since: Duration,
    /// Its own priority.
    pub own: Priority,
    /// The same, raised if it has aged or a rank is blocked.
    pub class: Priority,
    /// When it rises, if it has not.
    pub rises: Option<Duration>,
    pub blocked: bool,
    /// When it was last looked at, nobody could serve it.
    pub in_vain: bool,
    in_turn: bool,
    pub lack: PerGpu,
}

impl State {
    /// All that wait, in the order in which they are served.
    pub(crate) fn waiters(&self) -> Vec<Waiter> {
        let mut waiters: Vec<Waiter> = self.gangs.iter().filter_map(|(&id, gang)| self.waiter(id, gang)).collect();
        waiters.sort_by_key(|waiter| (waiter.since, waiter.gang));
        let mut risen: BTreeSet<GpuId> = BTreeSet::new();
        for waiter in waiters.iter_mut().filter(|waiter| waiter.rises.is_some_and(|rises| rises <= self.now)) {
            if waiter.lack.keys().all(|gpu| !risen.contains(gpu)) {
                if !waiter.in_vain {
                    risen.extend(waiter.lack.keys());
                }
                (waiter.class, waiter.rises) = (Priority::High, None);
            }
        }
        waiters.sort_by_key(|waiter| (!waiter.blocked, Reverse(waiter.class), !waiter.in_turn, waiter.since, waiter.gang));
        waiters
    }

    fn waiter(&self, id: GangId, gang: &Gang) -> Option<Waiter> {
        if gang.moving.is_some() || gang.served_by.is_some() {
            return None;
        }
        let (since, lack) = (gang.waits_since()?, gang.lack());
        let in_turn = !gang.is_away() && !gang.is_paused() && self.now < gang.turn.until;
        let blocked = gang.is_blocked();
        let class = match (blocked, in_turn) {
            (true, _) => Priority::High,
            (false, true) => gang.class(self.now),
            (false, false) => gang.priority(),
        };
        let again = lack.keys().filter_map(|gpu| self.gpus.get(gpu)).map(|gpu| gpu.rises_again).max().unwrap_or_default();
        let rises = (class < Priority::High).then(|| again.max(since + self.policy.aged_after(self.policy.slice)));
        Some(Waiter { gang: id, since, own: gang.priority(), class, rises, blocked, in_vain: gang.is_in_vain(), in_turn, lack })
    }
}
