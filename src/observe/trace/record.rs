//! An event as a record of the ring.

use vramctl_model::{Happening, Kind, OwnersBytes, Stage, TraceEvent, Verb};

/// Words per record. The first is its time in nanoseconds, by a clock that all writers share.
pub const WORDS: usize = 4;

/// Encodes a record: its time; its kind with a small number, an owner and a thread; and two large numbers.
pub fn written(at: u64, what: &Happening) -> [u64; WORDS] {
    let head = |kind: u64, small: u64, owner: u16, thread: u32| kind | small << 8 | u64::from(owner) << 16 | u64::from(thread) << 32;
    match *what {
        Happening::Allocated(OwnersBytes { owner, bytes, in_use }) => [at, head(1, 0, owner, 0), bytes, in_use],
        Happening::Freed(OwnersBytes { owner, bytes, in_use }) => [at, head(2, 0, owner, 0), bytes, in_use],
        Happening::FreedPaused(OwnersBytes { owner, bytes, in_use }) => [at, head(3, 0, owner, 0), bytes, in_use],
        Happening::Paused(OwnersBytes { owner, bytes, in_use }) => [at, head(4, 0, owner, 0), bytes, in_use],
        Happening::Resumed(OwnersBytes { owner, bytes, in_use }) => [at, head(5, 0, owner, 0), bytes, in_use],
        Happening::Failed { owner, bytes, code } => [at, head(6, 0, owner, 0), bytes, u64::from(code)],
        Happening::Began { verb, thread } => [at, head(7, verb as u64, 0, thread), 0, 0],
        Happening::Stage { stage, thread, ns } => [at, head(8, stage as u64, 0, thread), 0, ns],
        Happening::Ended { verb, thread, ns, bytes, error } => {
            [at, head(9, verb as u64, error.map_or(0, |kind| kind as u16), thread), bytes, ns]
        }
        Happening::Trimmed { thread, ns, bytes } => [at, head(10, 0, 0, thread), bytes, ns],
    }
}

/// The event of a record with this number; `None` if it is none.
pub fn read(number: u64, [at_ns, head, bytes, rest]: [u64; WORDS]) -> Option<TraceEvent> {
    let (kind, small, owner, thread) = (head & 0xff, (head >> 8 & 0xff) as usize, (head >> 16) as u16, (head >> 32) as u32);
    let changed = OwnersBytes { owner, bytes, in_use: rest };
    let verb = || [Verb::Pause, Verb::Resume].get(small).copied();
    let what = match kind {
        1 => Happening::Allocated(changed),
        2 => Happening::Freed(changed),
        3 => Happening::FreedPaused(changed),
        4 => Happening::Paused(changed),
        5 => Happening::Resumed(changed),
        6 => Happening::Failed { owner, bytes, code: rest as u32 },
        7 => Happening::Began { verb: verb()?, thread },
        8 => Happening::Stage { stage: *Stage::ALL.get(small)?, thread, ns: rest },
        9 => Happening::Ended { verb: verb()?, thread, ns: rest, bytes, error: Kind::of_number(i32::from(owner)) },
        10 => Happening::Trimmed { thread, ns: rest, bytes },
        _ => return None,
    };
    Some(TraceEvent { number, at_ns, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let of = OwnersBytes { owner: u16::MAX, bytes: 1 << 47, in_use: u64::MAX };
        let thread = u32::MAX;
        let mut all = vec![
            Happening::Allocated(of),
            Happening::Freed(of),
            Happening::FreedPaused(of),
            Happening::Paused(of),
            Happening::Resumed(of),
            Happening::Failed { owner: 3, bytes: 5, code: u32::MAX },
            Happening::Trimmed { thread, ns: 5, bytes: 6 },
        ];
        all.extend(Stage::ALL.map(|stage| Happening::Stage { stage, thread, ns: 7 }));
        for verb in [Verb::Pause, Verb::Resume] {
            all.push(Happening::Began { verb, thread });
            all.extend((0..=21).map(|number| Happening::Ended { verb, thread: 1, ns: 2, bytes: 3, error: Kind::of_number(number) }));
        }
        for what in all {
            assert_eq!(read(9, written(8, &what)), Some(TraceEvent { number: 9, at_ns: 8, what }));
        }
        assert_eq!(read(0, [1, 2 | 9 << 8 | 7, 3, 4]), None);
        assert_eq!(read(0, [u64::MAX; WORDS]), None);
    }
}
