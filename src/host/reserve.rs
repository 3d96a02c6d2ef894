//! Descriptors in reserve, for a program that has used up its own: whoever is to bring it back needs some.
//!
//! The limit stays as it is. A program that gets higher numbers than it expects may not be prepared for them (`select`), and its children
//! would inherit the limit.

use crate::{Held, PerProcess, Unpoison};
use std::os::unix::net::UnixDatagram;
use std::sync::Mutex;

/// Enough for the connections of a command, and for what goes over them.
const KEPT: usize = 8;

/// The first one is never lent: the others are copies of it.
static RESERVE: PerProcess<Mutex<Vec<Held>>> = PerProcess::new(Mutex::default);

/// Takes the descriptors that the reserve lacks, as far as the process has any.
pub fn fill() {
    fill_up(&mut RESERVE.get().lock().unpoisoned());
}

fn fill_up(reserve: &mut Vec<Held>) {
    // The program may have closed some.
    reserve.retain(Held::is_ours);
    while reserve.len() < KEPT {
        // A socket, which has an identity of its own.
        let new = reserve.first().map_or_else(|| UnixDatagram::unbound().and_then(Held::new), Held::copy);
        let Ok(new) = new else { return };
        reserve.push(new);
    }
}

/// Runs `open`, which must not wait. This many of the reserve are free meanwhile, for a process that has too few left. Another thread may take
/// one of them, so lend one more than `open` needs.
pub fn lend<R>(many: usize, open: impl FnOnce() -> R) -> R {
    let Some(existing) = RESERVE.existing() else { return open() };
    let mut reserve = existing.lock().unpoisoned();
    let left = reserve.len().saturating_sub(many).max(1);
    reserve.truncate(left);
    let opened = open();
    fill_up(&mut reserve);
    opened
}

/// Takes the number of a descriptor that is about to be closed, if the reserve lacks some: no other thread can take it in between.
pub fn take_over(held: &Held) {
    let Some(existing) = RESERVE.existing() else { return };
    let mut reserve = existing.lock().unpoisoned();
    if reserve.len() < KEPT
        && let Some(kept) = reserve.first().and_then(|first| first.copy_to(held).ok())
    {
        reserve.push(kept);
    }
}
