//! Descriptors in reserve, for a program that has used up its own: whoever is to bring it back needs some.
//!
//! The limit stays as it is. A program that gets higher numbers than it expects may not be prepared for them (`select`), and its children
//! would inherit the limit.

use crate::{Held, PerProcess, Unpoison};
use std::os::unix::net::UnixDatagram;
use std::sync::Mutex;

/// Enough for the connections of a command, and for the descriptors that it sends.
const KEPT: usize = 8;

/// The first one is never lent: the others are copies of it.
static RESERVE: PerProcess<Mutex<Vec<Held>>> = PerProcess::new(Mutex::default);

/// Fills the reserve up, as far as the process has descriptors.
pub fn fill() {
    fill_up(&mut RESERVE.get().lock().unpoisoned());
}

/// Closes all of it, until it is filled again.
pub fn empty() {
    if let Some(reserve) = RESERVE.existing() {
        reserve.lock().unpoisoned().clear();
    }
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

/// Takes the number of a descriptor that is about to be closed, if the reserve is not full: no other thread can take it in between.
pub fn take_over(held: &Held) {
    let Some(existing) = RESERVE.existing() else { return };
    let mut reserve = existing.lock().unpoisoned();
    if reserve.len() < KEPT
        && let Some(kept) = reserve.first().and_then(|first| first.copy_to(held).ok())
    {
        reserve.push(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, RawFd};

    fn numbers() -> Vec<RawFd> {
        RESERVE.get().lock().unpoisoned().iter().filter_map(|held| Some(held.get().ok()?.as_raw_fd())).collect()
    }

    fn are_open(numbers: &[RawFd]) -> usize {
        // SAFETY: the kernel checks the number.
        numbers.iter().filter(|number| unsafe { libc::fcntl(**number, libc::F_GETFD) } >= 0).count()
    }

    /// In one test: a process has one reserve.
    #[test]
    #[cfg_attr(miri, ignore = "closes descriptors by number")]
    fn it_is_there_again_after_each_loan_and_after_the_program_has_closed_it() {
        fill();
        assert_eq!(numbers().len(), KEPT);
        for many in [1, 3, KEPT - 1, KEPT, KEPT + 1] {
            let before = numbers();
            let open_meanwhile = lend(many, || are_open(&before));
            assert_eq!(open_meanwhile, KEPT.saturating_sub(many).max(1), "lent {many}");
            assert_eq!(numbers().len(), KEPT, "lent {many}");
        }

        // A daemon closes what it does not know: some, among them the first, of which the others are copies; or all.
        for gone in [&numbers()[..KEPT / 2], &numbers()] {
            for number in gone {
                // SAFETY: the reserve's, which notices.
                unsafe { libc::close(*number) };
            }
            fill();
            assert_eq!(numbers().len(), KEPT, "as many that are open");
            assert_eq!(RESERVE.get().lock().unpoisoned().len(), KEPT);
        }

        // A descriptor that is about to be closed fills the place of one that is gone.
        let own = Held::new(UnixDatagram::unbound().unwrap()).unwrap();
        let number = own.get().unwrap().as_raw_fd();
        take_over(&own);
        assert!(own.is_ours(), "the reserve is full");
        RESERVE.get().lock().unpoisoned().truncate(KEPT - 1);
        take_over(&own);
        assert!(!own.is_ours() && numbers().len() == KEPT && numbers().contains(&number));
        drop(own);
        assert_eq!(are_open(&[number]), 1, "it is the reserve's now");
    }
}
