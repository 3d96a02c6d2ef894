//! Memory of this process that other processes have open (CUDA IPC).
//!
//! The driver makes IPC handles only for its own plain memory. So for managed memory the library makes the handle: the owner's pid and a
//! token that nobody can guess. The library of the process that opens it ([`super::borrow`]) sends the token to the owner's control socket
//! and gets descriptors of the physical memory. The connection is the lease: until it ends, or the memory is closed over it, the memory is
//! not paused.

use super::allocation::Contents;
use super::{Allocation, Memory, check_awake};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::{fs, io};
use vramctl_control::descriptors;
use vramctl_driver::{self as driver, CUdeviceptr, RelaxedCapture};
use vramctl_model::{Error, Failure, Holder, Lent, StatusCode, TransitionRequest, code};

/// The size of `CUipcMemHandle` and `cudaIpcMemHandle_t`.
pub const HANDLE_BYTES: usize = 64;
/// The first bytes of the library's handles. The driver's begin with its own number for the process.
const MAGIC: &[u8; 8] = b"vramctl\x01";
const TOKEN_BYTES: usize = 24;

/// An IPC handle of the library's. Layout: magic, owner, zeros, token, zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// The owner, by the name of its socket.
    pub owner: u32,
    /// The allocation.
    pub token: Token,
}

impl Ticket {
    /// The handle in these bytes; `None` if it is not one of the library's.
    pub fn parse(bytes: &[u8; HANDLE_BYTES]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (owner, rest) = rest.split_first_chunk()?;
        let token = rest.get(4..)?.first_chunk()?;
        Some(Self { owner: u32::from_le_bytes(*owner), token: Token(*token) })
    }

    /// The handle as the program gets it.
    pub fn bytes(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.owner.to_le_bytes());
        bytes[16..16 + TOKEN_BYTES].copy_from_slice(&self.token.0);
        bytes
    }
}

/// Identifies an allocation to whoever has the handle. Random, so that it cannot be guessed, and a later process with the same pid does not
/// accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    fn random() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        // SAFETY: writable for the length. Requests this small are not interrupted.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), TOKEN_BYTES, 0) };
        if got == TOKEN_BYTES as isize { Ok(Self(bytes)) } else { Err(io::Error::last_os_error()) }
    }

    /// As [`text`](Self::text) has it.
    fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        (text.len() == 2 * TOKEN_BYTES).then_some(Self(bytes))
    }

    /// As in requests.
    pub fn text(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// A connection from another process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Borrower {
    /// Identifies the connection.
    pub connection: u64,
    /// The process id in this namespace; 0 if it is not visible here.
    pub pid: u32,
}

/// The loans of an allocation to other processes.
#[derive(Debug, Default)]
pub struct Lending {
    /// Set once a handle was requested.
    token: Option<Token>,
    /// Who has it open, by connection, with the number of its pauses when they got it. Those that got it before the last pause have set it
    /// aside.
    open: BTreeMap<u64, (Borrower, u64)>,
}

impl Contents {
    /// Who has the memory open, except processes that give it up for the request.
    pub fn lent_to_others(&self, request: &TransitionRequest) -> BTreeSet<u32> {
        let now = self.lending.open.values().filter(|(_, pauses)| *pauses == self.pauses);
        // A process with several connections counts once.
        now.map(|(borrower, _)| borrower.pid).filter(|pid| !request.has_along(*pid)).collect()
    }
}

/// What another process needs to open an allocation.
pub struct Loan {
    /// The descriptors of its memory, each with its length.
    pub pieces: Vec<(OwnedFd, usize)>,
    /// Its tag: a common pause of both processes selects it by that.
    pub tag: Arc<str>,
    /// How often it has been paused.
    pub pauses: u64,
}

impl Memory {
    /// `cuIpcGetMemHandle`: every address of an allocation gives the same handle. `None` if the real function is to answer: the
    /// memory is not managed, or comes from `cuMemCreate`, or the device cannot share it.
    pub fn ipc_handle(&self, address: CUdeviceptr) -> Option<Result<Ticket, StatusCode>> {
        let allocation = self.find(address).filter(|allocation| allocation.wanted().is_none())?;
        if !driver::is_shareable(allocation.device) {
            return None;
        }
        let mut contents = allocation.contents();
        let token = match contents.lending.token {
            Some(token) => token,
            None => match Token::random() {
                Ok(token) => *contents.lending.token.insert(token),
                Err(error) => {
                    log::debug!("getrandom: {error}");
                    return Some(Err(code::OPERATING_SYSTEM));
                }
            },
        };
        Some(Ok(Ticket { owner: std::process::id(), token }))
    }

    fn with_token(&self, token: &Token) -> Option<Arc<Allocation>> {
        self.snapshot().into_iter().find(|allocation| allocation.contents().lending.token.as_ref() == Some(token))
    }

    /// Whether this process has given out the token.
    pub fn has_given(&self, token: &Token) -> bool {
        self.with_token(token).is_some()
    }

    /// Passes memory to another process, which has it open from now on. The errors have the codes for `cuIpcOpenMemHandle`.
    pub fn lend(&self, token: &str, borrower: &Borrower) -> Result<Loan, Error> {
        let refuse = |code| Err(Error::Driver(Failure { call: "cuIpcOpenMemHandle", code }));
        // Not during a pause or resume.
        let _shared = self.share();
        check_awake()?;
        let _relaxed = RelaxedCapture::enter();
        let Some(allocation) = Token::parse(token).and_then(|token| self.with_token(&token)) else { return refuse(code::INVALID_HANDLE) };
        let mut contents = allocation.contents();
        let Some(memory) = contents.memory.as_ref().filter(|memory| memory.is_mapped()) else { return refuse(code::ILLEGAL_STATE) };
        let pieces = memory.export()?;
        if pieces.len() > descriptors::MOST {
            return refuse(code::NOT_SUPPORTED);
        }
        let pauses = contents.pauses;
        contents.lending.open.insert(borrower.connection, (borrower.clone(), pauses));
        Ok(Loan { pieces, tag: Arc::clone(&allocation.tag), pauses })
    }

    /// Records that another process has closed memory.
    pub fn take_back(&self, token: &str, connection: u64) {
        if let Some(allocation) = Token::parse(token).and_then(|token| self.with_token(&token)) {
            allocation.contents().lending.open.remove(&connection);
        }
    }

    /// Records that another process has closed everything, or has ended.
    pub fn take_all_back(&self, connection: u64) {
        for allocation in self.snapshot() {
            allocation.contents().lending.open.remove(&connection);
        }
    }
}

/// Refuses to pause memory that other processes have open: they would keep using physical memory that no longer belongs to the allocation.
/// Partners and borrowers set it aside ([`borrow::set_aside`](super::borrow::set_aside)).
pub(crate) fn refuse_if_lent(victims: &[Arc<Allocation>], request: &TransitionRequest) -> Result<(), Error> {
    let mut bytes = BTreeMap::<(Arc<str>, u32), u64>::new();
    for allocation in victims {
        for pid in allocation.contents().lent_to_others(request) {
            *bytes.entry((Arc::clone(&allocation.tag), pid)).or_default() += allocation.bytes() as u64;
        }
    }
    if bytes.is_empty() {
        return Ok(());
    }
    let lent = bytes.into_iter().map(|((tag, pid), bytes)| {
        let program = fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim().to_owned());
        Lent { tag: tag.to_string(), by: Holder { pid, bytes: Some(bytes), program } }
    });
    Err(Error::Shared(lent.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_handles_are_distinguished_from_the_drivers() {
        let handle = Ticket { owner: 4711, token: Token::random().unwrap() };
        let mut bytes = handle.bytes();
        assert_eq!(Ticket::parse(&bytes), Some(handle));
        assert_ne!(Token::random().unwrap(), handle.token);
        bytes[20] ^= 1;
        assert_ne!(Ticket::parse(&bytes), Some(handle));
        for at in 0..8 {
            let mut bytes = handle.bytes();
            bytes[at] ^= 1;
            assert_eq!(Ticket::parse(&bytes), None);
        }
        assert_eq!(Ticket::parse(&[0; HANDLE_BYTES]), None);
    }

    #[test]
    fn tokens_round_trip() {
        let token = Token::random().unwrap();
        let text = token.text();
        assert_eq!(Token::parse(&text), Some(token));
        for wrong in [&text[1..], &text[2..], &format!("{text}00"), "", "zz", "ääää"] {
            assert_eq!(Token::parse(wrong), None, "{wrong}");
        }
    }
}
