//! A generator whose seed repeats a run (splitmix64).

use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `from` to `to`, both possible.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    pub fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.between(from * 1000, to * 1000))
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.next() as usize % of.len()]
    }
}
