//! Memory of this process that other processes have open (CUDA IPC).
//!
//! The driver makes IPC handles only for its own plain memory. So for managed memory the library makes the handle: the owner's pid and a
//! token that nobody can guess. The library of the process that opens it ([`super::borrow`]) sends the token to the owner's control socket
//! and gets descriptors of the physical memory. The connection is the lease: until it ends, or the memory is closed over it, the memory is
//! not paused.

pub use crate::memory::registry::lending::{Borrower, Token};

use crate::door;
use crate::memory::registry::lending::TOKEN_BYTES;
use crate::memory::registry::state::{Present, State};
use crate::memory::{Allocation, Memory, check_not_quiesced};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use vramctl_control::descriptors;
use vramctl_control::door::Door;
use vramctl_driver::{self as driver, CUdeviceptr, RelaxedCapture};
use vramctl_host::Held;
use vramctl_host::program_of;
use vramctl_model::{Error, Failure, Holder, Lent, Participants, StatusCode, code};

/// The size of `CUipcMemHandle` and `cudaIpcMemHandle_t`.
pub const HANDLE_BYTES: usize = 64;
/// The first bytes of the library's handles. The driver's begin with its own number for the process.
const MAGIC: &[u8; 8] = b"vramctl\x01";

/// An IPC handle of the library's. Layout: magic, owner, zeros, token, door, zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedHandle {
    /// The owner, by the name of its socket.
    pub owner: u32,
    /// The allocation.
    pub token: Token,
    /// The second socket of the owner.
    pub door: Option<Door>,
}

impl SharedHandle {
    /// The handle in these bytes; `None` if it is not one of the library's.
    pub fn parse(bytes: &[u8; HANDLE_BYTES]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (owner, rest) = rest.split_first_chunk()?;
        let (token, rest) = rest.get(4..)?.split_first_chunk()?;
        let door = Door::of_number(u64::from_le_bytes(*rest.first_chunk()?));
        Some(Self { owner: u32::from_le_bytes(*owner), token: Token(*token), door })
    }

    /// The handle as the program gets it.
    pub fn bytes(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.owner.to_le_bytes());
        bytes[16..16 + TOKEN_BYTES].copy_from_slice(&self.token.0);
        let door = self.door.map_or(0, Door::number);
        bytes[16 + TOKEN_BYTES..24 + TOKEN_BYTES].copy_from_slice(&door.to_le_bytes());
        bytes
    }
}

/// What another process needs to open an allocation.
pub struct Loan {
    /// The descriptors of its memory, each with its length.
    pub pieces: Vec<(Held, usize)>,
    /// Its tag: a common pause of both processes selects it by that.
    pub tag: Arc<str>,
    /// How often it has been paused.
    pub pauses: u64,
}

impl Memory {
    /// `cuIpcGetMemHandle`: every address of an allocation gives the same handle. `None` if the real function is to answer: the
    /// memory is not managed, or comes from `cuMemCreate`, or the device cannot share it.
    pub fn ipc_handle(&self, address: CUdeviceptr) -> Option<Result<SharedHandle, StatusCode>> {
        let allocation =
            self.registry.find(address).filter(|allocation| allocation.origin().is_malloc() && allocation.place_of(address).is_some())?;
        if !driver::is_shareable(allocation.device) {
            return None;
        }
        let token = allocation.contents().lending.token(allocation.key());
        Some(token.map(|token| SharedHandle { owner: std::process::id(), token, door: door::number() }).map_err(|error| {
            log::debug!("getrandom: {error}");
            code::OPERATING_SYSTEM
        }))
    }

    /// Passes memory to another process, which has it open from now on. The errors have the codes for `cuIpcOpenMemHandle`.
    pub fn lend(&self, token: &str, borrower: &Borrower) -> Result<Loan, Error> {
        // Not during a pause or resume.
        let _shared = self.share();
        check_not_quiesced()?;
        let allocation = Token::parse(token).and_then(|token| self.registry.with_token(&token)).ok_or(refusal(code::INVALID_HANDLE))?;
        lend_to(&allocation, borrower)
    }

    /// Passes memory to a process that has imported a descriptor of it. `admit`: whether there is room for one more borrower. The export counts as
    /// claimed only if all of this succeeds: otherwise nobody knows who has the memory.
    pub fn lend_claimed(
        &self,
        file: BorrowedFd<'_>,
        borrower: &Borrower,
        admit: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(Token, Loan), Error> {
        // The importer is a thread of the program's: it does not wait for a pause.
        let _shared = self.transition.try_read().map_err(|_| Error::Busy(Duration::ZERO))?;
        check_not_quiesced()?;
        let invalid = Failure { call: "cuMemImportFromShareableHandle", code: code::INVALID_HANDLE };
        let allocation = self.registry.with_export(file).ok_or(invalid)?;
        admit()?;
        let token =
            allocation.contents().lending.token(allocation.key()).map_err(|_| Failure { code: code::OPERATING_SYSTEM, ..invalid })?;
        let loan = lend_to(&allocation, borrower)?;
        allocation.contents().lending.claimed(file);
        Ok((token, loan))
    }

    /// The handle of memory that this process has exported itself, once more.
    pub fn own_export(&self, file: BorrowedFd<'_>) -> Option<u64> {
        let _shared = self.share();
        let allocation = self.registry.with_export(file)?;
        let mut contents = allocation.contents();
        contents.lending.claimed(file);
        contents.references += 1;
        Some(allocation.key())
    }

    /// Records that another process has closed memory.
    pub fn take_back(&self, token: &str, connection: u64) {
        if let Some(allocation) = Token::parse(token).and_then(|token| self.registry.with_token(&token)) {
            self.close_loan(&allocation, connection);
        }
    }

    /// Ends a loan. The program may have given the memory up before: then that ends too, unless a pause or resume is in progress or the process is
    /// suspended; then the next transition ends it.
    fn close_loan(&self, allocation: &Arc<Allocation>, connection: u64) {
        allocation.contents().lending.close(connection);
        let Ok(_shared) = self.transition.try_read() else { return };
        if check_not_quiesced().is_ok() {
            self.end_if_unused(allocation);
        }
    }

    /// Records that another process has closed everything, or has ended.
    pub fn take_all_back(&self, connection: u64) {
        for allocation in self.registry.snapshot() {
            self.close_loan(&allocation, connection);
        }
    }
}

/// What `cuIpcOpenMemHandle` answers in the other process.
fn refusal(code: StatusCode) -> Failure {
    Failure { call: "cuIpcOpenMemHandle", code }
}

/// Passes memory to another process. Under the transition lock.
fn lend_to(allocation: &Allocation, borrower: &Borrower) -> Result<Loan, Error> {
    let _relaxed = RelaxedCapture::enter();
    let mut contents = allocation.contents();
    let State::Active(Present { memory, .. }) = &contents.state else { return Err(refusal(code::ILLEGAL_STATE).into()) };
    // What a driver refuses once, it may grant a moment later.
    let pieces = memory.export().or_else(|failure| if failure.is_refusal() { memory.export() } else { Err(failure) })?;
    if pieces.len() > descriptors::MOST {
        return Err(refusal(code::NOT_SUPPORTED).into());
    }
    let pauses = contents.pauses;
    contents.lending.open(borrower.clone(), pauses);
    Ok(Loan { pieces, tag: Arc::clone(&allocation.tag), pauses })
}

/// Refuses to pause memory that other processes have open: they would keep using physical memory that no longer belongs to the allocation.
/// Partners and borrowers set it aside ([`aside::set_aside`](super::aside::set_aside)).
pub(crate) fn refuse_if_lent(victims: &[Arc<Allocation>], participants: &Participants) -> Result<(), Error> {
    let mut bytes = BTreeMap::<(Arc<str>, u32), u64>::new();
    for allocation in victims {
        for pid in allocation.contents().lent_to_others(participants) {
            *bytes.entry((Arc::clone(&allocation.tag), pid)).or_default() += allocation.bytes() as u64;
        }
    }
    if bytes.is_empty() {
        return Ok(());
    }
    let lent = bytes
        .into_iter()
        .map(|((tag, pid), bytes)| Lent { tag: tag.to_string(), by: Holder { pid, bytes: Some(bytes), program: program_of(pid) } });
    Err(Error::Shared(lent.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_handles_are_distinguished_from_the_drivers() {
        let handle = SharedHandle { owner: 4711, token: Token::random().unwrap(), door: Door::of_number(1 << 63) };
        let mut bytes = handle.bytes();
        assert_eq!(SharedHandle::parse(&bytes), Some(handle));
        assert_ne!(Token::random().unwrap(), handle.token);
        bytes[20] ^= 1;
        assert_ne!(SharedHandle::parse(&bytes), Some(handle));
        for at in 0..8 {
            let mut bytes = handle.bytes();
            bytes[at] ^= 1;
            assert_eq!(SharedHandle::parse(&bytes), None);
        }
        assert_eq!(SharedHandle::parse(&[0; HANDLE_BYTES]), None);
    }
}
