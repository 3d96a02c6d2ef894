//! Where the contents of those that leave go.
//!
//! Retained copies of memory that is on a GPU are no part of the count: they are cache, and go first.

use crate::action::Leave;
use crate::state::State;

/// Bytes of contents that may leave, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Budget(pub u64);

impl State {
    /// Bytes of contents that host memory may have in all.
    pub fn host_room(&self) -> u64 {
        self.host.room
    }

    /// Bytes of contents that are away, or about to leave.
    pub fn contents(&self) -> u64 {
        let away: u64 = self.gangs.values().map(super::state::Gang::contents_away).sum();
        away + self.changes.values().map(|underway| underway.contents.0).sum::<u64>()
    }

    /// What may leave beside `contents` that are away and contents of `coming` bytes that come in: if the host holds both, if they pass
    /// each other, and with files. The first that suffices is the best, and each is larger than those before.
    pub(crate) fn budgets(&self, contents: u64, coming: u64) -> Vec<Budget> {
        let room = self.host.room;
        let both = room + self.host.files;
        let mut budgets: Vec<Budget> = Vec::new();
        for most in [room, room + coming, both, both + coming] {
            let budget = Budget(most.saturating_sub(contents));
            if budgets.last().is_none_or(|last| *last < budget) {
                budgets.push(budget);
            }
        }
        budgets
    }

    /// Whether contents have to pass each other, and how many bytes go to files.
    pub(crate) fn passing(&self, leaving: &[Leave], coming: u64) -> (bool, u64) {
        let (contents, room) = (self.contents(), self.host.room);
        let leaving: u64 = leaving.iter().map(Leave::contents).sum();
        let passing = coming > 0 && contents + leaving > room + self.host.files;
        let after = contents + leaving - if passing { coming } else { 0 };
        (passing, after.saturating_sub(room).saturating_sub(contents.saturating_sub(room)))
    }
}
