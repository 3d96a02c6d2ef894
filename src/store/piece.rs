//! Pieces: what contents are cut into.

use crate::hash::Hash;
use serde::{Deserialize, Serialize};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::{fmt, io, slice};

/// Most bytes of a piece.
pub const PIECE_BYTES: usize = 2 << 20;

/// Pieces begin at multiples of this in a pack, and buffers for direct I/O in memory.
pub const ALIGNMENT: usize = 4096;

/// What a piece is: its contents' hash and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PieceId {
    /// The BLAKE3 hash. All zeros for a piece of zeros, which is not stored.
    pub hash: Hash,
    /// Bytes.
    pub bytes: u32,
}

impl PieceId {
    /// The name of these contents.
    pub fn of(piece: &[u8]) -> Self {
        let hash = if is_zero(piece) { Hash([0; 32]) } else { Hash::of(piece) };
        Self { hash, bytes: piece.len() as u32 }
    }

    /// Whether all its bytes are zero.
    pub fn is_zeros(&self) -> bool {
        self.hash == Hash([0; 32])
    }

    /// Bytes that it takes in a pack.
    pub(crate) fn stored_bytes(&self) -> u64 {
        u64::from(self.bytes).next_multiple_of(ALIGNMENT as u64)
    }
}

/// The file of pieces that has a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PackId(pub u64);

impl fmt::Display for PackId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

/// Where a piece is. Stays so as long as the save that has put it there keeps its root: see [`crate::Saving::keep_for`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The pack.
    pub pack: PackId,
    /// The first byte in the pack.
    pub offset: u64,
}

/// A stored piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// What it is.
    pub id: PieceId,
    /// Where it is. `None` for zeros.
    pub place: Option<Place>,
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|first| *first == 0 && bytes[1..] == bytes[..bytes.len() - 1])
}

/// Cuts a range of an allocation into pieces, at multiples of [`PIECE_BYTES`] in the allocation: so equal tensors at equal offsets have equal
/// pieces, whatever lies before. Returns offset and length of each.
pub fn cut(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let (mut at, end) = (offset, offset + bytes);
    std::iter::from_fn(move || {
        let next = end.min((at / PIECE_BYTES as u64 + 1) * PIECE_BYTES as u64);
        let piece = (at < end).then_some((at, (next - at) as usize));
        at = next.max(at);
        piece
    })
}

/// Memory that is aligned for direct I/O: whole pages of its own, which the system gives once they are touched.
pub struct Buffer {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared, it is only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory of so many bytes, all zero. Panics without it, as a vector does.
    pub fn new(bytes: usize) -> Self {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which touches no other memory.
        let address = unsafe { libc::mmap(ptr::null_mut(), bytes.max(1), access, kind, -1, 0) };
        assert!(address != libc::MAP_FAILED, "{bytes} bytes of memory: {}", io::Error::last_os_error());
        Self { address: NonNull::new(address.cast()).expect("a mapping is not at zero"), bytes }
    }

    /// Room for a piece.
    pub fn for_piece() -> Self {
        Self::new(PIECE_BYTES)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped with this size, and initialised.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of this size, to which nothing refers any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes.max(1)) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Buffer of {} bytes", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_at_multiples() {
        let piece = PIECE_BYTES as u64;
        assert_eq!(cut(0, 0).count(), 0);
        assert_eq!(cut(4096, 8192).collect::<Vec<_>>(), [(4096, 8192)]);
        let wanted = [(piece - 10, 10), (piece, PIECE_BYTES), (2 * piece, 5)];
        assert_eq!(cut(piece - 10, piece + 15).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn zeros_have_no_hash() {
        assert!(PieceId::of(&[0; 5000]).is_zeros() && PieceId::of(&[]).is_zeros());
        let mut last = vec![0; 5000];
        last[4999] = 1;
        assert!(!PieceId::of(&last).is_zeros());
        last.rotate_left(4999);
        assert!(!PieceId::of(&last).is_zeros());
    }
}
