//! What the simulated GPU computes for the kernel of `src/backup/copier/kernel.cu` that hashes memory. In a crate of its own because nothing else
//! of the simulated GPU takes so much processor time: this is optimised, and the rest is built in a quarter of the time without.

/// Threads of a block.
pub const THREADS: usize = 256;
const VECTORS: usize = 16;
const GROUPS: usize = 32;
const SUMS: usize = 2;
/// Bytes of a piece.
pub const PIECE: usize = 16 * VECTORS * GROUPS * THREADS;
const PRIME: u64 = (1 << 61) - 1;

/// The kernel's parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Each gives one half of the result.
    pub halves: [Half; 2],
}

/// What one half is made with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Half {
    sums: [[u32; 4 * VECTORS]; SUMS],
    point: u64,
}

/// The kernel's arithmetic, without the final reduction: results are up to 2^61 + 2.
fn step(value: u64, point: u64, next: u64) -> u64 {
    let product = u128::from(value) * u128::from(point);
    let sum = (product as u64 & PRIME) + (product >> 61) as u64 + (next & PRIME) + (next >> 61);
    (sum & PRIME) + (sum >> 61)
}

impl Half {
    /// The digest of a piece. Each thread has a word of four in each row. The threads' sums are side by side, so that the compiler vectorises.
    #[must_use]
    pub fn digest(&self, piece: &[u8]) -> u64 {
        let mut values = vec![0; THREADS];
        for group in piece.chunks_exact(16 * THREADS * VECTORS) {
            let mut sums = [[0u64; THREADS]; SUMS];
            for (vector, row) in group.chunks_exact(16 * THREADS).enumerate() {
                for (sums, keys) in sums.iter_mut().zip(&self.sums) {
                    let keys: [u32; 4] = std::array::from_fn(|word| keys[4 * vector + word]);
                    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<16>().0) {
                        let keyed = |word: usize| {
                            let bytes = [bytes[4 * word], bytes[4 * word + 1], bytes[4 * word + 2], bytes[4 * word + 3]];
                            u64::from(u32::from_le_bytes(bytes).wrapping_add(keys[word]))
                        };
                        *sum = sum.wrapping_add(keyed(0) * keyed(1)).wrapping_add(keyed(2) * keyed(3));
                    }
                }
            }
            for sums in sums {
                values.iter_mut().zip(sums).for_each(|(value, sum)| *value = step(*value, self.point, sum));
            }
        }
        let mut power = self.point;
        for _ in 0..(GROUPS * SUMS).ilog2() {
            power = step(power, power, 0);
        }
        while values.len() > 1 {
            values = values.chunks_exact(2).map(|pair| step(pair[0], power, pair[1])).collect();
            power = step(power, power, 0);
        }
        if values[0] >= PRIME { values[0] - PRIME } else { values[0] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds that the kernel relies on, at its extreme inputs.
    #[test]
    fn steps_are_right_and_stay_small() {
        let small = [0, 1, 2, PRIME - 1, PRIME, PRIME + 1, PRIME + 3];
        for value in small {
            for point in small {
                for next in [0, 1, PRIME - 1, PRIME, PRIME + 1, 8 * PRIME, u64::MAX - 1, u64::MAX] {
                    let right = (u128::from(value) * u128::from(point) + u128::from(next)) % u128::from(PRIME);
                    let stepped = step(value, point, next);
                    assert!(stepped <= PRIME + 3, "{value} {point} {next}: {stepped}");
                    assert_eq!(u128::from(stepped % PRIME), right, "{value} {point} {next}");
                }
            }
        }
    }
}
