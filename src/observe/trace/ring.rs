//! A wait-free ring of records: many threads write, any thread copies out.
//!
//! Records are numbered as they are written. Each slot has a state word with the number of its record and whether that is complete. A
//! reader checks it before and after it copies, so it never returns half of one record and half of the next. If a writer finds its slot
//! still in use by a writer a whole lap behind, it takes the next number instead. So records are lost only by being overwritten, the oldest
//! first.

use super::record::WORDS;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// If a number has no record when a later record is already this old (ns), it never gets one: its writer has taken another number.
const NEVER_COMES: u64 = 1_000_000_000;

#[derive(Debug, Default)]
struct RingSlot {
    /// 0: never used. 2n + 1: record n is being written. 2n + 2: it is complete.
    state: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// A ring of records.
#[derive(Debug)]
pub struct Ring {
    slots: Vec<RingSlot>,
    /// The number of the next record.
    next: AtomicU64,
}

/// Records, and where the next page begins. Missing numbers belong to overwritten records.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// With their numbers, which increase.
    pub records: Vec<(u64, [u64; WORDS])>,
    /// The number to continue from.
    pub next: u64,
}

enum Copied {
    Record([u64; WORDS]),
    Overwritten,
    NotYet,
}

impl Ring {
    /// Allocates at most this much memory, touched in advance so that no record takes a page fault; `None` if that is too little or memory
    /// is short.
    pub fn of_bytes(bytes: usize) -> Option<Self> {
        let (mut slots, count) = (Vec::new(), bytes / size_of::<RingSlot>());
        slots.try_reserve_exact(count).ok().filter(|()| count > 0)?;
        slots.resize_with(count, RingSlot::default);
        Some(Self { slots, next: AtomicU64::new(0) })
    }

    fn slot(&self, number: u64) -> &RingSlot {
        &self.slots[(number % self.slots.len() as u64) as usize]
    }

    /// Writes a record and returns its number.
    pub fn push(&self, record: [u64; WORDS]) -> u64 {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let slot = self.slot(number);
            let before = slot.state.load(Ordering::Relaxed);
            let is_free = before.is_multiple_of(2) && before <= 2 * number;
            // Acquire: orders this writer's stores after those of the slot's last writer.
            if is_free && slot.state.compare_exchange(before, 2 * number + 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                // Release: a reader that sees any of the new words also sees that the previous record is gone.
                fence(Ordering::Release);
                for (word, value) in slot.words.iter().zip(record) {
                    word.store(value, Ordering::Relaxed);
                }
                slot.state.store(2 * number + 2, Ordering::Release);
                return number;
            }
        }
    }

    fn find(&self, number: u64) -> Copied {
        let slot = self.slot(number);
        let state = slot.state.load(Ordering::Acquire);
        if state != 2 * number + 2 {
            return if state > 2 * number + 2 { Copied::Overwritten } else { Copied::NotYet };
        }
        let record = [0, 1, 2, 3].map(|word: usize| slot.words[word].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if slot.state.load(Ordering::Relaxed) == state { Copied::Record(record) } else { Copied::Overwritten }
    }

    /// Whether any record from this number on is older than this time.
    fn has_older(&self, from: u64, end: u64, than: u64) -> bool {
        let first = (from..end).find_map(|number| if let Copied::Record([at, ..]) = self.find(number) { Some(at) } else { None });
        first.is_some_and(|at| at < than)
    }

    /// Copies out at most `most` records from a number on, or from the oldest that is left if that one is gone. `now` is the current time.
    pub fn read(&self, from: u64, most: usize, now: u64) -> Records {
        let end = self.next.load(Ordering::Acquire);
        let oldest = end.saturating_sub(self.slots.len() as u64);
        let mut page = Records { records: Vec::new(), next: from.clamp(oldest, end) };
        while page.next < end && page.records.len() < most {
            match self.find(page.next) {
                Copied::Record(record) => page.records.push((page.next, record)),
                Copied::NotYet if !self.has_older(page.next + 1, end, now.saturating_sub(NEVER_COMES)) => break,
                Copied::NotYet | Copied::Overwritten => (),
            }
            page.next += 1;
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};
    use std::sync::atomic::AtomicBool;
    use std::thread;

    const SLOT: usize = size_of::<RingSlot>();

    /// Each word is derived from the first and the writer, so that a mix of two records would be detected.
    fn record(at: u64, writer: u64) -> [u64; WORDS] {
        [at, writer, at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ writer, !at]
    }

    fn is_whole(found: [u64; WORDS]) -> bool {
        found == record(found[0], found[1])
    }

    #[test]
    fn the_ring_stays_within_its_memory_limit() {
        assert_eq!(SLOT, 40);
        assert_eq!(Ring::of_bytes(16 << 20).unwrap().slots.len(), (16 << 20) / SLOT);
        assert!(Ring::of_bytes(SLOT - 1).is_none() && Ring::of_bytes(usize::MAX).is_none());
    }

    proptest! {
        /// One thread, against a queue. Cursors may be garbage.
        #[test]
        fn the_ring_is_a_queue_that_drops_the_oldest(
            slots in 1usize..20,
            steps in prop::collection::vec((0usize..30, prop_oneof![0u64..200, any::<u64>()], 0usize..50), 1..40),
        ) {
            let ring = Ring::of_bytes(slots * SLOT + SLOT / 2).unwrap();
            let (mut model, mut written) = (VecDeque::new(), 0);
            for (pushes, from, most) in steps {
                for _ in 0..pushes {
                    prop_assert_eq!(ring.push(record(written, 7)), written);
                    model.push_back((written, record(written, 7)));
                    written += 1;
                    if model.len() > slots {
                        model.pop_front();
                    }
                }
                let page = ring.read(from, most, 0);
                let wanted: Vec<_> = model.iter().filter(|(number, _)| *number >= from).take(most).copied().collect();
                let next = wanted.last().map_or(from.clamp(written.saturating_sub(slots as u64), written), |(number, _)| number + 1);
                prop_assert_eq!(page, Records { records: wanted, next });
            }
        }

        /// Several threads write while one reads: it sees only whole records, each once, in each writer's order; and in the end only the
        /// oldest are gone.
        #[test]
        fn concurrent_writers_lose_only_the_oldest_records(slots in 1usize..200, writers in 1u64..5, each in 1u64..3000, most in 1usize..100) {
            let ring = Ring::of_bytes(slots * SLOT).unwrap();
            let is_over = AtomicBool::new(false);
            let (followed, numbers) = thread::scope(|scope| {
                let write = |writer| {
                    let ring = &ring;
                    move || (0..each).map(|at| (ring.push(record(at, writer)), (at, writer))).collect::<Vec<_>>()
                };
                let writing: Vec<_> = (0..writers).map(|writer| scope.spawn(write(writer))).collect();
                let following = scope.spawn(|| {
                    let (mut from, mut seen) = (0, Vec::new());
                    loop {
                        let last = is_over.load(Ordering::Acquire);
                        let page = ring.read(from, most, if last { u64::MAX } else { 0 });
                        from = page.next;
                        seen.extend(page.records);
                        if last && from == ring.next.load(Ordering::Acquire) {
                            return seen;
                        }
                    }
                });
                let numbers: BTreeMap<_, _> = writing.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
                is_over.store(true, Ordering::Release);
                (following.join().unwrap(), numbers)
            });
            prop_assert_eq!(numbers.len() as u64, writers * each, "two records with one number");
            prop_assert!(followed.windows(2).all(|two| two[0].0 < two[1].0));
            let mut last = BTreeMap::new();
            for (number, found) in followed {
                prop_assert!(is_whole(found), "{:?}", found);
                let [at, writer, ..] = found;
                prop_assert_eq!(numbers[&number], (at, writer));
                prop_assert!(last.insert(writer, at).is_none_or(|before| before < at));
            }
            let end = ring.next.load(Ordering::Acquire);
            let there: Vec<_> = ring.read(0, usize::MAX, u64::MAX).records.into_iter().map(|(number, _)| number).collect();
            let wanted: Vec<_> = numbers.range(end.saturating_sub(slots as u64)..).map(|(number, _)| *number).collect();
            prop_assert_eq!(there, wanted);
        }
    }

    /// The state left by a writer that is stopped in the middle of its record.
    #[test]
    fn a_sleeping_writer_blocks_nobody() {
        let ring = Ring::of_bytes(4 * SLOT).unwrap();
        (0..2).for_each(|at| _ = ring.push(record(at, 0)));
        let asleep = ring.next.fetch_add(1, Ordering::Relaxed);
        ring.slot(asleep).state.store(2 * asleep + 1, Ordering::Relaxed);
        assert_eq!(ring.push(record(3, 0)), 3);
        // A reader does not pass it for a while: the next page contains it.
        assert_eq!(ring.read(0, 9, 3 + NEVER_COMES).next, asleep);
        let page = ring.read(0, 9, 4 + NEVER_COMES);
        assert_eq!((page.records.iter().map(|(number, _)| *number).collect::<Vec<_>>(), page.next), (vec![0, 1, 3], 4));
        // A lap later, its slot is skipped, and number 6 has no record.
        let numbers: Vec<_> = (4..8).map(|at| ring.push(record(at, 0))).collect();
        assert_eq!(numbers, [4, 5, 7, 8]);
        ring.slot(asleep).state.store(2 * asleep + 2, Ordering::Release);
        let page = ring.read(0, 9, u64::MAX);
        assert_eq!((page.records.iter().map(|(number, _)| *number).collect::<Vec<_>>(), page.next), (vec![5, 7, 8], 9));
    }
}
