//! Who closes the door, and whether it stays closed behind them. `model` explores this, too.
//!
//! 1. One closes it at a time, and nobody opens it meanwhile.
//! 2. The program is held for as long as there is a reason, which [`Closer::let_go`] is told: if everybody who takes a reason away
//!    calls it afterwards, and so does every closer, the door is open when there is none.

use super::door::Door;
use super::sync::{self, Condvar, Mutex, MutexGuard, Ordering};
use std::sync::PoisonError;
use std::time::Instant;

/// Whose turn it is.
#[derive(Debug)]
pub struct Closer {
    turn: Mutex<Turn>,
    changed: Condvar,
}

#[derive(Debug)]
struct Turn {
    /// Somebody has the door closed.
    taken: bool,
    /// It stays closed when nobody has.
    held: bool,
}

/// A closed door. Opens when dropped, unless the program is held.
#[derive(Debug)]
pub struct Closed<'a> {
    closer: &'a Closer,
    door: &'a Door,
}

impl Closer {
    /// Nobody's turn.
    pub fn new() -> Self {
        Self { turn: Mutex::new(Turn { taken: false, held: false }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the door. `None` if somebody else has it closed until the deadline.
    pub fn close<'a>(&'a self, door: &'a Door, deadline: Instant) -> Option<Closed<'a>> {
        let mut turn = self.lock();
        while turn.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            turn = self.changed.wait_timeout(turn, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        turn.taken = true;
        drop(turn);
        door.close();
        Some(Closed { closer: self, door })
    }

    /// Opens the door for a held program, unless there is still a reason to hold it. Does nothing while somebody has it closed, who
    /// calls this afterwards.
    pub fn let_go(&self, door: &Door, is_reason: impl FnOnce() -> bool) {
        // Either this sees that the door is being closed, or who closes it sees what has been taken away.
        sync::fence(Ordering::SeqCst);
        if !door.is_closed() {
            return;
        }
        // Whoever takes another reason away waits for the answer, and then asks again.
        let mut turn = self.lock();
        if turn.held && !turn.taken && !is_reason() {
            turn.held = false;
            door.open();
        }
    }
}

impl Closed<'_> {
    /// The program is held, whoever has closed the door, until it is let go.
    pub fn keep(self) {
        self.closer.lock().held = true;
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut turn = self.closer.lock();
        turn.taken = false;
        if !turn.held {
            self.door.open();
        }
        drop(turn);
        self.closer.changed.notify_one();
    }
}
