//! Kernels that end when somebody else does something. Programs launch them by name, from any PTX that has the entry point.
//!
//! - `simgpu_collective(u64 communicator, u32 rank, u32 ranks, u64 address)`: adds up the 64-bit numbers that all ranks have at their
//!   address, and puts the sum there. It ends when every rank runs its own, and never if one has died, as with NCCL. The ranks meet in
//!   a file of the machine's directory, so a machine of one process has none.
//! - `simgpu_persistent(u64 word, u64 address, u64 bytes)`: keeps memory in use until a 32-bit word of pinned host memory is set.
//!
//! Both fault if their memory goes away meanwhile.

use crate::abi::Address;
use crate::codes::{ILLEGAL_ADDRESS, INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, Outcome};
use crate::context::Context;
use crate::driver::{self, state};
use crate::host;
use crate::vmm::{self, Piece, READ_WRITE};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How often a kernel looks.
const LOOK_EVERY: Duration = Duration::from_micros(100);
/// The most ranks of a communicator.
const MOST_RANKS: usize = 16;

/// Runs on `bytes` of memory until `is_over`, or until the context is lost.
fn wait(context: &Context, address: Address, bytes: usize, mut is_over: impl FnMut() -> Outcome<bool>) -> Outcome<Vec<Piece>> {
    let find = || state().space.touch(address, bytes, context.device, READ_WRITE);
    let mappings = |pieces: &[Piece]| pieces.iter().map(|piece| piece.mapping).collect::<Vec<_>>();
    let at_first = mappings(&find()?);
    loop {
        let is_over = is_over()?;
        let pieces = find()?;
        if mappings(&pieces) != at_first {
            return Err(ILLEGAL_ADDRESS);
        }
        if is_over {
            return Ok(pieces);
        }
        context.check()?;
        thread::sleep(LOOK_EVERY);
    }
}

/// A launch of the persistent kernel.
#[derive(Clone, Debug)]
pub struct Persistent {
    /// The word that ends it.
    pub word: Address,
    /// The memory that it uses.
    pub address: Address,
    /// How much of it.
    pub bytes: usize,
}

impl Persistent {
    /// Runs until it is told to end.
    pub fn run(&self, context: &Context) -> Outcome {
        let is_over = || {
            state().host.find(self.word).ok_or(ILLEGAL_ADDRESS)?;
            let mut word = [0; 4];
            host::transfer(host::Direction::FromHost, word.as_mut_ptr(), self.word, word.len())?;
            Ok(word != [0; 4])
        };
        wait(context, self.address, self.bytes, is_over).map(drop)
    }
}

/// A launch of the collective.
#[derive(Clone, Debug)]
pub struct Collective {
    /// Which one: the ranks agree on a number.
    pub communicator: u64,
    /// Who this is.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// The number.
    pub address: Address,
}

/// What the ranks of a communicator share.
#[repr(C)]
struct Shared([Rank; MOST_RANKS]);

#[repr(C)]
struct Rank {
    /// How many collectives it has begun.
    begun: AtomicU64,
    /// What it has brought to the last two: nobody is further ahead of the others.
    brought: [AtomicU64; 2],
}

impl Collective {
    /// Whether it can be launched.
    pub fn check(&self) -> Outcome {
        if self.ranks > MOST_RANKS || self.rank >= self.ranks {
            return Err(INVALID_VALUE);
        }
        self.shared().map(drop)
    }

    /// Runs until all ranks run theirs.
    pub fn run(&self, context: &Context) -> Outcome {
        let ranks = &self.shared()?.0[..self.ranks];
        let own = &ranks[self.rank];
        let turn = own.begun.load(Ordering::Relaxed) + 1;
        let brought = |rank: &Rank| rank.brought[turn as usize % 2].load(Ordering::Relaxed);
        let number = gather(&state().space.touch(self.address, 8, context.device, READ_WRITE)?);
        own.brought[turn as usize % 2].store(u64::from_le_bytes(number), Ordering::Relaxed);
        own.begun.store(turn, Ordering::Release);
        let pieces = wait(context, self.address, 8, || Ok(ranks.iter().all(|rank| rank.begun.load(Ordering::Acquire) >= turn)))?;
        let sum = ranks.iter().map(brought).fold(0, u64::wrapping_add);
        scatter(sum.to_le_bytes(), &pieces);
        Ok(())
    }

    /// The communicator's part of the machine's directory.
    fn shared(&self) -> Outcome<&'static Shared> {
        static KNOWN: Mutex<Option<HashMap<u64, &'static Shared>>> = Mutex::new(None);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.get_or_insert_default();
        if let Some(shared) = known.get(&self.communicator) {
            return Ok(shared);
        }
        let path = driver::settings().directory.as_ref().ok_or(NOT_SUPPORTED)?.join(format!("communicator-{}", self.communicator));
        let shared = map(&path).map_err(|_| OPERATING_SYSTEM)?;
        known.insert(self.communicator, shared);
        Ok(shared)
    }
}

fn map(path: &std::path::Path) -> std::io::Result<&'static Shared> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    // All ranks set the same size.
    file.set_len(size_of::<Shared>() as u64)?;
    // SAFETY: a new shared mapping of a file that is this long. It is never unmapped, and everything in it is atomic.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let address = libc::mmap(ptr::null_mut(), size_of::<Shared>(), access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if address == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(&*address.cast::<Shared>()) }
    }
}

fn gather(pieces: &[Piece]) -> [u8; 8] {
    let _touching = vmm::touching();
    let (mut bytes, mut done) = ([0; 8], 0);
    for piece in pieces {
        let part = &mut bytes[done..done + piece.bytes];
        // SAFETY: part of a backing that the piece keeps alive.
        unsafe { ptr::copy_nonoverlapping(piece.physical.backing.at(piece.offset), part.as_mut_ptr(), part.len()) };
        done += piece.bytes;
    }
    bytes
}

fn scatter(bytes: [u8; 8], pieces: &[Piece]) {
    let _touching = vmm::touching();
    let mut done = 0;
    for piece in pieces {
        let part = &bytes[done..done + piece.bytes];
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), piece.physical.backing.at(piece.offset), part.len()) };
        done += piece.bytes;
    }
}
