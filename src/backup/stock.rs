//! The arena's books: which addresses are free, who uses which piece, and how long one that nobody uses stays ready.

use super::ranges::FreeRanges;
use std::ops;
use std::time::Instant;
use vramctl_driver::Pinned;

/// The unit in which host memory is populated, registered and given back, in bytes. Measured on an H200 with 16 cores:
/// 64 MiB in 16 threads is where populating, registering and copying together are fastest (`docs/performance.md`). The tests'
/// own build fills thousands of them, and has smaller ones.
pub const HOST_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 64 << 20 };

/// The pieces that so many bytes from an offset on touch.
pub fn pieces_of(offset: usize, bytes: usize) -> ops::Range<usize> {
    offset / HOST_PIECE..(offset + bytes).div_ceil(HOST_PIECE)
}

/// Every piece, who uses it and what is behind it, and the addresses that are free.
#[derive(Default)]
pub struct Stock {
    /// Free addresses.
    pub free: FreeRanges,
    /// From the beginning, as far as any was ever used.
    pub pieces: Vec<Piece>,
    /// Pieces at the beginning whose addresses may be read and written.
    pub open: usize,
    /// Pieces at the beginning that stay when nobody uses them: the pre-warmed ones.
    pub kept: usize,
    /// Whether there is a thread that gives back what nobody uses.
    pub releasing: bool,
}

/// A part of the arena, [`HOST_PIECE`] bytes long.
#[derive(Default)]
pub struct Piece {
    /// What is behind it.
    pub readiness: Readiness,
    /// How many ranges touch it.
    pub users: usize,
    /// While none does: until when it stays ready. `None`: it is to be given back now.
    pub until: Option<Instant>,
}

/// What is behind its addresses.
#[derive(Default)]
pub enum Readiness {
    /// Only addresses.
    #[default]
    Absent,
    /// A thread is making it ready or giving it back.
    Changing,
    /// There, and registered with the driver if that was possible.
    Ready(Option<Pinned>),
}

impl Readiness {
    /// Whether there is memory, and nobody is changing that.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }
}

impl Stock {
    /// One of them, which may be new.
    pub fn piece(&mut self, piece: usize) -> &mut Piece {
        if piece >= self.pieces.len() {
            self.pieces.resize_with(piece + 1, Piece::default);
        }
        &mut self.pieces[piece]
    }

    /// How many pieces have memory, or will have it as soon as a range that touches them is filled.
    pub fn populated(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent)).count()
    }

    /// How many pieces would have memory without some ranges, each an offset and a length, and with others of these sizes;
    /// `None`: there is no place for those.
    pub fn pieces_with(&self, gone: impl Iterator<Item = (usize, usize)>, sizes: &[usize]) -> Option<usize> {
        let mut free = self.free.clone();
        let mut users: Vec<_> = self.pieces.iter().map(|piece| piece.users).collect();
        for (offset, bytes) in gone {
            pieces_of(offset, bytes).for_each(|piece| users[piece] -= 1);
            free.give_back(offset, bytes);
        }
        for &bytes in sizes {
            let pieces = pieces_of(free.take(bytes)?, bytes);
            users.resize(users.len().max(pieces.end), 0);
            pieces.for_each(|piece| users[piece] += 1);
        }
        let stays = |piece: usize| piece < self.kept && self.pieces.get(piece).is_some_and(|piece| piece.readiness.is_ready());
        Some((0..users.len()).filter(|piece| users[*piece] > 0 || stays(*piece)).count())
    }

    /// Pieces that nobody uses, besides the pre-warmed ones.
    fn unused(&self) -> impl Iterator<Item = (usize, &Piece)> {
        self.pieces.iter().enumerate().skip(self.kept).filter(|(_, piece)| piece.users == 0)
    }

    /// Whether any of them has memory, or is about to lose it.
    pub fn has_spare(&self) -> bool {
        self.unused().any(|(_, piece)| !matches!(piece.readiness, Readiness::Absent))
    }

    /// A piece to be given back by now.
    pub fn due_piece(&self, now: Instant) -> Option<usize> {
        let due = |(_, piece): &(usize, &Piece)| piece.readiness.is_ready() && piece.until.is_none_or(|until| until <= now);
        self.unused().find(due).map(|(piece, _)| piece)
    }

    /// When the next piece is to be given back. `None`: there is none with memory.
    pub fn next_due(&self) -> Option<Instant> {
        let ready = self.unused().filter(|(_, piece)| piece.readiness.is_ready());
        ready.map(|(_, piece)| piece.until.unwrap_or_else(Instant::now)).min()
    }

    /// Whether any piece is being given back, or to be by now.
    pub fn is_releasing(&self, now: Instant) -> bool {
        self.due_piece(now).is_some() || self.unused().any(|(_, piece)| matches!(piece.readiness, Readiness::Changing))
    }

    /// None of them stays ready any longer.
    pub fn expire(&mut self) {
        self.pieces.iter_mut().for_each(|piece| piece.until = None);
    }

    /// The pieces at the beginning that somebody uses or that have memory.
    pub fn in_use(&self) -> usize {
        let used = |piece: &Piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent);
        self.pieces.iter().rposition(used).map_or(0, |last| last + 1).max(self.kept)
    }

    /// The first free place. Low addresses first, so that ranges share pieces and use those that are ready.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let offset = self.free.take(bytes)?;
        for piece in pieces_of(offset, bytes) {
            self.piece(piece).users += 1;
        }
        Some(offset)
    }

    /// Takes back what was taken. `until`: how long what nobody uses any more stays ready.
    pub fn give_back(&mut self, offset: usize, bytes: usize, until: Option<Instant>) {
        for number in pieces_of(offset, bytes) {
            let piece = self.piece(number);
            piece.users -= 1;
            piece.until = until;
        }
        self.free.give_back(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> Stock {
        Stock { free: FreeRanges::new(100 * HOST_PIECE), ..Stock::default() }
    }

    proptest! {
        /// Two allocations whose contents overlap in the backup would both be lost.
        #[test]
        fn ranges_never_overlap_and_all_comes_back(steps in prop::collection::vec((1usize..90, any::<bool>(), any::<usize>()), 1..200)) {
            const UNIT: usize = 2 << 20;
            let mut state = state();
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (units, give, which) in steps {
                if give && !taken.is_empty() {
                    let (offset, bytes) = taken.swap_remove(which % taken.len());
                    state.give_back(offset, bytes, None);
                } else if let Some(offset) = state.take(units * UNIT) {
                    prop_assert!(taken.iter().all(|(other, bytes)| offset + units * UNIT <= *other || other + bytes <= offset));
                    taken.push((offset, units * UNIT));
                }
                for piece in 0..state.pieces.len() {
                    let users = taken.iter().filter(|(offset, bytes)| pieces_of(*offset, *bytes).contains(&piece)).count();
                    prop_assert_eq!(state.pieces[piece].users, users);
                }
            }
            for (offset, bytes) in taken {
                state.give_back(offset, bytes, None);
            }
            prop_assert_eq!(state.free, FreeRanges::new(100 * HOST_PIECE));
        }
    }
}
