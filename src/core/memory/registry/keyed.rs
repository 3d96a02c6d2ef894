//! Maps by address or by handle. Every free looks into them, even of memory that is not managed, so a lookup must cost almost nothing.

use dashmap::DashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by address or by handle.
pub(in crate::memory) type Keyed<T> = DashMap<u64, T, BuildHasherDefault<Spread>>;

/// Hashes addresses and handles, whose low bits are all the same, to all bits. The driver and the library choose the keys, so deliberate
/// collisions are not a concern.
#[derive(Debug, Clone, Default)]
pub(in crate::memory) struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, key: u64) {
        // The usual mixer of 64 bits (splitmix64, murmur): each multiplication carries upwards, each shift brings that down.
        let key = self.0 ^ key;
        let key = (key ^ (key >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let key = (key ^ (key >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.0 = key ^ (key >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::hash::{BuildHasher, Hash};

    /// The map takes the shard from the hash's upper bits and the slot from the lower ones.
    #[test]
    fn adjacent_keys_are_spread_over_all_bits() {
        let hash = |key: u64| BuildHasherDefault::<Spread>::default().hash_one(key);
        for step in [1_u64, 512, 2 << 20, 1 << 30] {
            let hashes: Vec<_> = (0..256).map(|at| hash(0x7f00_0000_0000 + at * step)).collect();
            for shift in [0, 48, 57 - 8] {
                let places: BTreeSet<_> = hashes.iter().map(|hash| (hash >> shift) & 0xff).collect();
                assert!(places.len() > 128, "{} places of 256 from bit {shift}, step {step:#x}", places.len());
            }
        }
        let mut whole = Spread::default();
        [1_u8, 2].hash(&mut whole);
        assert_ne!(whole.finish(), 0);
    }
}
