//! Digests of device memory, to find out which pieces the host already has.
//!
//! The device computes them (`kernel.cu`) in one pass at the speed of its memory; [`Key::digest`] computes the same on the CPU. For any
//! change of a piece, its digest stays the same with a probability below 2⁻⁹¹, because each process draws a secret key.
//!
//! # What is computed
//!
//! A digest has two halves, computed in the same way with independent parts of the key. For each half, the key has 2 × 64 numbers *k* of 32
//! bits and one number *r* of 60 bits. The key comes from the kernel's random numbers, once per process, and once more
//! when the process goes on from an image. Neither the key nor a digest ever leaves the process, but in such an image.
//!
//! 1. A piece is split into 8192 *groups* of 64 words of 32 bits. A group is what one thread loads in 16 steps: 16 vectors of 4 words, 4
//!    KiB apart. Each group yields two sums, with different *k*, of 32 products each: h = Σ (w₂ᵢ + k₂ᵢ) · (w₂ᵢ₊₁ + k₂ᵢ₊₁). The additions in
//!    brackets are modulo 2³², the sum is modulo 2⁶⁴. This is the function NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, *UMAC:
//!    fast and secure message authentication*, 1999).
//! 2. The 16 384 sums, in a fixed order, are the coefficients of a polynomial. The half is its value at *r*, modulo the prime p = 2⁶¹ − 1.
//!
//! # Why a change is almost never missed
//!
//! Take two different contents of a piece. They are independent of the key, because nothing that a program can observe depends on it.
//!
//! **A sum changes.** Take a group in which the contents differ, in word w₂ᵢ say. (For the other word of a product, swap the roles.) Claim:
//! for any number δ, the difference of the group's two sums h − h′ is δ modulo 2⁶⁴ with probability at most 2⁻³².
//!
//! Proof: fix all of the key but k₂ᵢ₊₁. Let a = w₂ᵢ + k₂ᵢ and a′ = w′₂ᵢ + k₂ᵢ modulo 2³²; they differ. Let u = w₂ᵢ₊₁ + k₂ᵢ₊₁ and u′ =
//! w′₂ᵢ₊₁ + k₂ᵢ₊₁ modulo 2³². For how many k₂ᵢ₊₁ does a·u − a′·u′ have one given value modulo 2⁶⁴? Suppose there are two such k₂ᵢ₊₁, and
//! let x and x′ be the differences of u and of u′ between them. Neither is 0, both are below 2³² in absolute value, they are equal modulo
//! 2³², and a·x ≡ a′·x′ modulo 2⁶⁴.
//!
//! - If x = x′, then (a − a′)·x ≡ 0. Both factors are nonzero and below 2³² in absolute value, so the product is nonzero and below 2⁶⁴ in
//!   absolute value: a contradiction.
//! - Otherwise one is positive and the other is that minus 2³²; say x > 0 and x′ = x − 2³². Then a·x + a′·(2³² − x) ≡ 0. Both weights are
//!   positive and add up to 2³², so the left side is 2³² times a weighted mean of a and a′. It is below 2⁶⁴, and above 0 because a and a′
//!   are not both 0: a contradiction.
//!
//! So at most one of the 2³² values of k₂ᵢ₊₁ gives that value.
//!
//! **It still differs modulo p.** h ≡ h′ modulo p only if h − h′ is one of the 17 multiples of p between −2⁶⁴ and 2⁶⁴. So one sum stays
//! equal modulo p with probability at most 17 · 2⁻³², and both sums of a group, whose keys are independent, with probability at most (17 ·
//! 2⁻³²)² < 2⁻⁵⁵.
//!
//! **The polynomial distinguishes them.** If a coefficient differs modulo p, the difference of the two polynomials is nonzero and of degree
//! at most 16 383, so it has at most that many roots. *r* is one of 2⁶⁰ equally likely numbers below p, so it is a root with probability at
//! most 16 383 / 2⁶⁰ < 2⁻⁴⁶.
//!
//! A half stays the same with probability below 2⁻⁵⁵ + 2⁻⁴⁶ < 2⁻⁴⁵·⁹. The halves' keys are independent, so the digest stays the same with
//! probability below **2⁻⁹¹**.
//!
//! The kernel reduces lazily: after each step it folds a number to at most 2⁶¹ + 2 (2⁶¹ is 1 modulo p), and it reduces fully at the end.
//! Each thread evaluates its own coefficients by Horner's rule. The threads' values are then combined in pairs with growing powers of *r*,
//! which gives the same polynomial.

use std::ffi::{CStr, c_void};
use std::mem;
use std::sync::{Arc, Mutex};
use vramctl_driver::{CUdeviceptr, Current, Image, Manner, Parts, Resident, wait_for_work};
use vramctl_host::system::fill_with_random;
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Failure, code};

/// Bytes covered by one digest: the granularity of device memory.
pub const DIGEST_PIECE: usize = 2 << 20;

/// Threads per piece. This and the next three constants match the kernel's.
const THREADS: usize = 256;
/// Vectors of 16 bytes that a thread sums per group.
const VECTORS: usize = 16;
/// Groups per thread.
const GROUPS: usize = 32;
/// Sums per group, in each half of a digest.
const SUMS: usize = 2;
const _: () = assert!(THREADS * VECTORS * GROUPS * 16 == DIGEST_PIECE);

/// 2^61 - 1, a prime.
const PRIME: u64 = (1 << 61) - 1;

/// One piece's digest: two numbers below 2^61 - 1. Comparable only within one process.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u64; 2]);

#[cfg(test)]
impl Digest {
    pub(super) fn of(number: u64) -> Self {
        Self([number, number])
    }
}

/// A process's secret key, in the kernel's layout.
#[repr(C)]
#[derive(Clone)]
pub struct Key {
    halves: [Half; 2],
}

#[repr(C)]
#[derive(Clone)]
struct Half {
    sums: [[u32; 4 * VECTORS]; SUMS],
    /// Below 2^60.
    point: u64,
}

static OWN: PerProcess<Mutex<Option<Arc<Key>>>> = PerProcess::new(Mutex::default);

/// Has the next digest draw another key, for a process that goes on from an image beside others. No digest of before is equal to one of after.
pub fn forget_key() {
    OWN.existing().into_iter().for_each(|key| *key.lock().unpoisoned() = None);
}

impl Key {
    /// This process's key, drawn from the operating system's random numbers on first use.
    pub fn of_process() -> Result<Arc<Self>, Failure> {
        let mut key = OWN.get().lock().unpoisoned();
        if let Some(key) = &*key {
            return Ok(Arc::clone(key));
        }
        let mut bytes = [0; mem::size_of::<Self>()];
        fill_with_random(&mut bytes).map_err(|_| Failure { call: "getrandom", code: code::OPERATING_SYSTEM })?;
        Ok(Arc::clone(key.insert(Arc::new(Self::from_bytes(&bytes)))))
    }

    /// A key from random bytes.
    pub fn from_bytes(bytes: &[u8; mem::size_of::<Self>()]) -> Self {
        let half = |bytes: &[u8]| {
            let (words, point) = bytes.split_at(4 * SUMS * 4 * VECTORS);
            let mut words = words.chunks_exact(4).map(word);
            let sums = [(); SUMS].map(|()| [(); 4 * VECTORS].map(|()| words.next().unwrap_or_default()));
            Half { sums, point: (u64::from(word(&point[..4])) | u64::from(word(&point[4..])) << 32) >> 4 }
        };
        let (first, second) = bytes.split_at(mem::size_of::<Half>());
        Self { halves: [half(first), half(second)] }
    }

    /// The digest of a piece's contents, as the kernel computes it.
    pub fn digest(&self, piece: &[u8]) -> Digest {
        assert_eq!(piece.len(), DIGEST_PIECE, "a piece has a fixed size");
        Digest(self.halves.each_ref().map(|half| half.digest(piece)))
    }
}

impl Half {
    /// The polynomial of all sums, ordered by thread and group, at the key's point.
    fn digest(&self, piece: &[u8]) -> u64 {
        let sums = (0..THREADS).flat_map(|thread| {
            (0..GROUPS).flat_map(move |group| {
                let vectors = (0..VECTORS).map(move |vector| 16 * ((group * VECTORS + vector) * THREADS + thread));
                self.sums.each_ref().map(|key| sum(key, vectors.clone().map(|offset| &piece[offset..offset + 16])))
            })
        });
        sums.fold(0, |value, sum| {
            let next = u128::from(value) * u128::from(self.point) + u128::from(sum);
            (next % u128::from(PRIME)) as u64
        })
    }
}

/// The sum of products of adjacent pairs of a group's words, with the key added to each word.
fn sum<'a>(key: &[u32; 4 * VECTORS], vectors: impl Iterator<Item = &'a [u8]>) -> u64 {
    key.chunks_exact(4).zip(vectors).fold(0, |sum: u64, (key, vector)| {
        let keyed = |at: usize| u64::from(word(&vector[4 * at..4 * at + 4]).wrapping_add(key[at]));
        sum.wrapping_add(keyed(0) * keyed(1)).wrapping_add(keyed(2) * keyed(3))
    })
}

/// Four bytes as the device reads them.
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The kernel, to be compiled.
pub const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("a NUL in the kernel"),
};

/// A hasher's device memory in bytes, allocated in advance, because the device may be full at the next pause.
const BUFFER: usize = 2 << 20;
/// Pieces per launch, each with an address and a digest in the buffer. They cover 170 GiB, so one launch is nearly always
/// enough.
const BATCH: usize = BUFFER / (mem::size_of::<CUdeviceptr>() + mem::size_of::<Digest>());
/// Offset of the digests in the buffer; the addresses come first.
const DIGESTS: usize = (BATCH * mem::size_of::<CUdeviceptr>()).next_multiple_of(mem::size_of::<Digest>());
const _: () = assert!(BATCH * mem::size_of::<CUdeviceptr>() <= DIGESTS && DIGESTS + BATCH * mem::size_of::<Digest>() <= BUFFER);

/// Computes digests in one context.
///
/// Allocates all it needs on the device in advance. Callers must enter the relaxed capture mode, as for any memory
/// management.
pub struct Hasher(Resident);

impl Hasher {
    /// Compiles the kernel and [loads](Self::load) it.
    pub fn new(current: &Current) -> Result<Self, Failure> {
        Self::load(current, &Image::compile(current, PTX)?)
    }

    /// Loads the compiled kernel into the current context and allocates 2 MiB on its device. No work may be in flight.
    pub fn load(current: &Current, image: &Image) -> Result<Self, Failure> {
        Resident::new(current, image, c"vramctl_digest", BUFFER, |parts| launch(parts, 0)).map(Self)
    }

    /// Digests of device memory, one per piece of each span (address, bytes), in order. A span must start at a multiple of
    /// 16 bytes and be a multiple of [`DIGEST_PIECE`] long; otherwise [`code::INVALID_VALUE`].
    ///
    /// Waits for the result; nothing is in flight afterwards, even on error. If the hasher's context has been reset, returns
    /// [`code::CONTEXT_IS_DESTROYED`]; make a new one.
    pub fn digests(&mut self, current: &Current, spans: &[(CUdeviceptr, usize)]) -> Result<Vec<Digest>, Failure> {
        let refuse = |code| Err(Failure { call: "vramctl_digest", code });
        if spans.iter().any(|(address, bytes)| !address.is_multiple_of(16) || !bytes.is_multiple_of(DIGEST_PIECE)) {
            return refuse(code::INVALID_VALUE);
        }
        let Some(parts) = self.0.parts(current) else { return refuse(code::CONTEXT_IS_DESTROYED) };
        let addresses: Vec<_> = spans
            .iter()
            .flat_map(|&(address, bytes)| (0..bytes).step_by(DIGEST_PIECE).map(move |offset| address + offset as u64))
            .collect();
        let mut digests = vec![Digest([0; 2]); addresses.len()];
        for (addresses, digests) in addresses.chunks(BATCH).zip(digests.chunks_mut(BATCH)) {
            digest(parts, addresses, digests).inspect_err(|_| {
                // The vectors are about to be freed, and the pieces perhaps unmapped. Wait again in a different way, because
                // the first wait may be what failed; if this one fails too, the context is lost and nothing runs in it.
                let _ = wait_for_work(current.context(), Manner::Unnoticed, || true);
            })?;
        }
        Ok(digests)
    }
}

fn digest(parts: &Parts, addresses: &[CUdeviceptr], digests: &mut [Digest]) -> Result<(), Failure> {
    // SAFETY: the caller keeps the addresses until the stream has finished, here or in `wait_for_work`.
    unsafe { parts.buffer.write(&parts.stream, 0, addresses)? };
    launch(parts, addresses.len())?;
    // SAFETY: as above; any bits are a valid digest.
    unsafe { parts.buffer.read(&parts.stream, DIGESTS, digests)? };
    parts.stream.synchronize()
}

/// Launches the kernel on the first `pieces` addresses in the buffer.
fn launch(parts: &Parts, pieces: usize) -> Result<(), Failure> {
    let key = Key::of_process()?;
    let (addresses, digests, count) = (parts.buffer.address(), parts.buffer.address() + DIGESTS as u64, pieces as u32);
    let arguments: [*const c_void; 4] =
        [Arc::as_ptr(&key).cast(), (&raw const addresses).cast(), (&raw const digests).cast(), (&raw const count).cast()];
    // SAFETY: the kernel in kernel.cu takes a key, two addresses and a 32-bit count. The buffer outlives the launch.
    unsafe { parts.kernel.launch(&parts.stream, count.max(1), THREADS as u32, arguments.map(<*const c_void>::cast_mut)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom bytes, reproducible by seed.
    fn noise(seed: u64, bytes: usize) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let words = (0..bytes.div_ceil(8)).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes()
        });
        words.take(bytes).collect()
    }

    fn key(seed: u64) -> Key {
        Key::from_bytes(&noise(seed, mem::size_of::<Key>()).try_into().unwrap())
    }

    #[test]
    #[cfg_attr(miri, ignore = "hashes megabytes")]
    fn any_flipped_bit_changes_both_halves() {
        let key = key(1);
        for contents in [vec![0; DIGEST_PIECE], noise(2, DIGEST_PIECE)] {
            let before = key.digest(&contents);
            let (mut changed, last) = (contents, 8 * DIGEST_PIECE - 1);
            // A stride that is no power of two reaches every bit position in words, threads, vectors and groups.
            for bit in (0..last).step_by(8 * DIGEST_PIECE / 60 + 12_345).chain([last]) {
                changed[bit / 8] ^= 1 << (bit % 8);
                let after = key.digest(&changed);
                assert!(after.0[0] != before.0[0] && after.0[1] != before.0[1], "bit {bit}");
                changed[bit / 8] ^= 1 << (bit % 8);
            }
            assert_eq!(key.digest(&changed), before);
        }
    }

    /// Contents that weak sums confuse: shifted, swapped, repeated, and with changes that cancel out.
    #[test]
    #[cfg_attr(miri, ignore = "hashes megabytes")]
    fn similar_contents_have_different_digests() {
        let key = key(3);
        let original = noise(4, DIGEST_PIECE);
        let swapped = |one: usize, other: usize, bytes: usize| {
            let mut piece = original.clone();
            for at in 0..bytes {
                piece.swap(one + at, other + at);
            }
            piece
        };
        let mut cancelling = original.clone();
        cancelling[0] = cancelling[0].wrapping_add(1);
        cancelling[8] = cancelling[8].wrapping_sub(1);
        let mut pieces = vec![
            vec![0; DIGEST_PIECE],
            vec![0xFF; DIGEST_PIECE],
            [vec![1], vec![0; DIGEST_PIECE - 1]].concat(),
            [vec![0; DIGEST_PIECE - 1], vec![1]].concat(),
            [&original[1..], &[0]].concat(),
            [&[0], &original[..DIGEST_PIECE - 1]].concat(),
            cancelling,
            swapped(0, 4, 4),                                         // words of one product
            swapped(0, 8, 8),                                         // products of one vector
            swapped(0, 16 * THREADS, 16),                             // vectors of one group
            swapped(0, 16, 16),                                       // threads
            swapped(0, DIGEST_PIECE / GROUPS, DIGEST_PIECE / GROUPS), // groups
            swapped(0, DIGEST_PIECE / 2, DIGEST_PIECE / 2),
        ];
        pieces.push(original);
        let mut digests: Vec<_> = pieces.iter().map(|piece| key.digest(piece).0).collect();
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), pieces.len());
    }

    #[test]
    #[cfg_attr(miri, ignore = "hashes megabytes")]
    fn a_digest_depends_on_all_of_the_key() {
        let (piece, bytes) = (noise(5, DIGEST_PIECE), noise(6, mem::size_of::<Key>()));
        let with = |bytes: &[u8]| Key::from_bytes(bytes.try_into().unwrap()).digest(&piece).0;
        let before = with(&bytes);
        for at in (0..bytes.len()).step_by(37) {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            let (half, after) = (at / mem::size_of::<Half>(), with(&other));
            assert_ne!(after[half], before[half], "byte {at}");
            assert_eq!(after[1 - half], before[1 - half], "byte {at}: the halves are independent");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "hashes megabytes")]
    fn values_are_below_the_prime_and_points_below_their_bound() {
        let all_ones = Key::from_bytes(&[0xFF; mem::size_of::<Key>()]);
        for half in &all_ones.halves {
            assert_eq!((half.sums, half.point), ([[u32::MAX; 4 * VECTORS]; SUMS], (1 << 60) - 1));
        }
        for fill in [0, 1, 0xFF] {
            assert!(all_ones.digest(&vec![fill; DIGEST_PIECE]).0.iter().all(|value| *value < PRIME));
        }
    }

    /// With a zero key, a sum is a single product of two words, which is easy to check by hand.
    #[test]
    #[cfg_attr(miri, ignore = "hashes megabytes")]
    fn one_product_by_hand() {
        let mut bytes = [0; mem::size_of::<Key>()];
        bytes[mem::size_of::<Half>() - 8] = 3 << 4; // the first half's point is 3
        let key = Key::from_bytes(&bytes);
        let mut piece = vec![0; DIGEST_PIECE];
        let last_vector = DIGEST_PIECE - 16;
        piece[last_vector] = 5;
        piece[last_vector + 4] = 7;
        // The last two sums are both 5 * 7: 35 * 3 + 35.
        assert_eq!(key.digest(&piece), Digest([140, 35]));
    }

    #[test]
    fn keys_are_drawn_once_a_process_until_they_are_forgotten_and_not_zero() {
        let (one, two) = (Key::of_process().unwrap(), Key::of_process().unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        forget_key();
        let other = Key::of_process().unwrap();
        assert!((0..2).all(|half| one.halves[half].point != other.halves[half].point && one.halves[half].sums != other.halves[half].sums));
        assert!(one.halves.iter().all(|half| half.point != 0 && half.sums.iter().flatten().any(|word| *word != 0)));
    }
}
