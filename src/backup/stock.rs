//! The arena's bookkeeping: free addresses, the users of each piece, and how long unused pieces stay ready.

use super::ranges::FreeRanges;
use std::ops;
use std::time::Instant;
use vramctl_driver::Pinned;

/// The unit in which host memory is populated, registered and released, in bytes. On an H200 with 16 cores, populating,
/// registering and copying together are fastest with 64 MiB and 12 to 32 threads (34 to 36 GB/s). Memory registered in larger pieces, or
/// all at once, is copied no faster. Smaller in debug builds, because the tests populate thousands of them.
pub const HOST_PIECE: usize = if cfg!(debug_assertions) { 32 << 20 } else { 64 << 20 };

/// The pieces that `bytes` at `offset` touch.
pub fn pieces_of(offset: usize, bytes: usize) -> ops::Range<usize> {
    offset / HOST_PIECE..(offset + bytes).div_ceil(HOST_PIECE)
}

/// All pieces with their users and memory, and the free addresses.
#[derive(Default)]
pub struct Stock {
    /// Free addresses.
    pub free: FreeRanges,
    /// All pieces up to the last one ever used.
    pub pieces: Vec<Piece>,
    /// Number of leading pieces with accessible addresses.
    pub open: usize,
    /// Number of leading pieces that stay when unused: the pre-warmed ones.
    pub kept: usize,
    /// Whether a thread is releasing unused pieces.
    pub releasing: bool,
    /// Whether that thread waits for a pause, because the driver does not say whether the program is at work.
    pub waits_for_pause: bool,
}

/// A part of the arena, [`HOST_PIECE`] bytes long.
#[derive(Default)]
pub struct Piece {
    /// What is behind it.
    pub readiness: Readiness,
    /// Number of ranges that touch it.
    pub users: usize,
    /// While unused: until when it stays ready. `None` to release it now.
    pub until: Option<Instant>,
}

/// What is behind a piece's addresses.
#[derive(Default)]
pub enum Readiness {
    /// No memory.
    #[default]
    Absent,
    /// A thread is preparing or releasing it.
    Changing,
    /// Memory, registered with the driver if that was possible.
    Ready(Option<Pinned>),
}

impl Readiness {
    /// Whether it has memory and no thread is changing that.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }
}

impl Stock {
    /// A piece, created if necessary.
    pub fn piece(&mut self, piece: usize) -> &mut Piece {
        if piece >= self.pieces.len() {
            self.pieces.resize_with(piece + 1, Piece::default);
        }
        &mut self.pieces[piece]
    }

    /// Number of pieces that have memory, or will once their ranges are filled.
    pub fn populated(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent)).count()
    }

    /// Number of pieces with memory if the `gone` ranges (offset, length) were dropped and ranges of these sizes taken;
    /// `None` if those do not fit.
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

    /// Unused pieces, except the pre-warmed ones.
    fn unused(&self) -> impl Iterator<Item = (usize, &Piece)> {
        self.pieces.iter().enumerate().skip(self.kept).filter(|(_, piece)| piece.users == 0)
    }

    /// Whether an unused piece has memory or is just being released.
    pub fn has_spare(&self) -> bool {
        self.unused().any(|(_, piece)| !matches!(piece.readiness, Readiness::Absent))
    }

    /// An expired piece with memory.
    pub fn due_piece(&self, now: Instant) -> Option<usize> {
        self.unused()
            .find(|(_, piece): &(usize, &Piece)| piece.readiness.is_ready() && piece.until.is_none_or(|until| until <= now))
            .map(|(piece, _)| piece)
    }

    /// When the next piece expires; `None` if no unused piece has memory.
    pub fn next_due(&self) -> Option<Instant> {
        let ready = self.unused().filter(|(_, piece)| piece.readiness.is_ready());
        ready.map(|(_, piece)| piece.until.unwrap_or_else(Instant::now)).min()
    }

    /// Whether a piece is being released or has expired.
    pub fn is_releasing(&self, now: Instant) -> bool {
        self.due_piece(now).is_some() || self.unused().any(|(_, piece)| matches!(piece.readiness, Readiness::Changing))
    }

    /// Expires all pieces.
    pub fn expire(&mut self) {
        self.pieces.iter_mut().for_each(|piece| piece.until = None);
    }

    /// Number of leading pieces up to the last one in use or with memory.
    pub fn in_use(&self) -> usize {
        self.pieces
            .iter()
            .rposition(|piece: &Piece| piece.users > 0 || !matches!(piece.readiness, Readiness::Absent))
            .map_or(0, |last| last + 1)
            .max(self.kept)
    }

    /// Takes the first free place: low addresses first, so that ranges share pieces and reuse ready ones.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let offset = self.free.take(bytes)?;
        for piece in pieces_of(offset, bytes) {
            self.piece(piece).users += 1;
        }
        Some(offset)
    }

    /// Returns a range. Pieces it leaves unused stay ready until `until`.
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
    use std::time::Duration;

    fn state() -> Stock {
        Stock { free: FreeRanges::new(100 * HOST_PIECE), ..Stock::default() }
    }

    fn ready(users: usize, until: Option<Instant>) -> Piece {
        Piece { readiness: Readiness::Ready(None), users, until }
    }

    #[test]
    fn ready_unused_pieces_are_spare_until_they_expire() {
        let earlier = Instant::now();
        let [now, later] = [1, 2].map(|seconds| earlier + Duration::from_secs(seconds));
        let mut state = Stock { kept: 1, pieces: vec![ready(0, None), ready(1, None), Piece::default()], ..state() };
        // Pre-warmed, in use, and without memory.
        assert_eq!((state.has_spare(), state.due_piece(now), state.next_due(), state.in_use()), (false, None, None, 2));
        state.pieces.push(ready(0, Some(later)));
        assert_eq!((state.has_spare(), state.due_piece(now), state.next_due(), state.in_use()), (true, None, Some(later), 4));
        assert!(!state.is_releasing(now));
        state.pieces.push(ready(0, Some(now)));
        assert_eq!((state.due_piece(now), state.next_due()), (Some(4), Some(now)));
        assert_eq!((state.due_piece(earlier), state.is_releasing(now)), (None, true));
        state.expire();
        assert_eq!(state.due_piece(earlier), Some(3));
        assert!(state.next_due().is_some_and(|at| at < later));
        // A piece that is just being released is spare, not due, and in use.
        state.pieces = vec![Piece { readiness: Readiness::Changing, ..Piece::default() }, Piece::default()];
        state.kept = 0;
        assert_eq!((state.has_spare(), state.due_piece(now), state.next_due(), state.in_use()), (true, None, None, 1));
        assert_eq!((state.is_releasing(now), state.populated()), (true, 1));
        state.pieces = vec![Piece::default()];
        assert_eq!((state.has_spare(), state.is_releasing(now), state.in_use(), state.populated()), (false, false, 0, 0));
        state.pieces.push(Piece { users: 1, ..Piece::default() });
        assert_eq!((state.in_use(), state.populated()), (2, 1), "what a range is about to fill");
        state.kept = 3;
        assert_eq!(state.in_use(), 3, "what will be pre-warmed");
    }

    #[test]
    fn the_populated_size_counts_pieces_in_use_and_kept() {
        // Pre-warmed with memory, pre-warmed without, and one that is only ready for now.
        let state = Stock { kept: 2, pieces: vec![ready(0, None), Piece::default(), ready(0, None)], ..state() };
        assert_eq!(state.pieces_with(std::iter::empty(), &[]), Some(1));
        assert_eq!(state.pieces_with(std::iter::empty(), &[2 * HOST_PIECE]), Some(2));
        assert_eq!(state.pieces_with(std::iter::empty(), &[101 * HOST_PIECE]), None, "more than there are addresses");
    }

    proptest! {
        /// This number decides whether a pause is refused, and which retained copies are dropped so that it fits.
        #[test]
        fn the_predicted_number_of_pieces_is_right(
            taken in prop::collection::vec((1usize..60, any::<bool>()), 1..20), sizes in prop::collection::vec(1usize..60, 0..6)
        ) {
            const UNIT: usize = 2 << 20;
            let mut state = state();
            let taken: Vec<_> = taken.into_iter().map(|(units, goes)| (state.take(units * UNIT).unwrap(), units * UNIT, goes)).collect();
            let gone = || taken.iter().filter(|(.., goes)| *goes).map(|(offset, bytes, _)| (*offset, *bytes));
            let sizes: Vec<_> = sizes.into_iter().map(|units| units * UNIT).collect();
            let said = state.pieces_with(gone(), &sizes);
            gone().for_each(|(offset, bytes)| state.give_back(offset, bytes, None));
            let fit = sizes.iter().all(|bytes| state.take(*bytes).is_some());
            prop_assert_eq!(said, fit.then(|| state.populated()));
        }

        /// Overlapping backups would lose both allocations' contents.
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
