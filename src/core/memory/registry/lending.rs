//! The loans of an allocation to other processes: what identifies it to them, and who has it open.

use super::registrant::{Registrant, RegistrantMark};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use vramctl_host::{Held, PerProcess, Unpoison, is_held, is_one_file, system};
use vramctl_model::Participants;

/// The size of a [`Token`].
pub const TOKEN_BYTES: usize = 24;

/// Identifies an allocation to whoever has the handle. Random, so that it cannot be guessed, and a later process with the same pid does not
/// accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; TOKEN_BYTES]);

impl Token {
    /// A new one.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        system::fill_with_random(&mut bytes).map(|()| Self(bytes))
    }

    /// As [`text`](Self::text) has it.
    pub fn parse(text: &str) -> Option<Self> {
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

/// The keys of the allocations that have tokens. A process may open thousands.
static KEYS: PerProcess<Mutex<HashMap<Token, u64>>> = PerProcess::new(Mutex::default);

/// The key of the allocation that has, or had, this token.
pub fn key_of(token: &Token) -> Option<u64> {
    KEYS.existing()?.lock().unpoisoned().get(token).copied()
}

/// A token whose allocation can be found, until this is dropped.
#[derive(Debug)]
struct KnownToken(Token);

impl KnownToken {
    fn of(token: Token, key: u64) -> Self {
        KEYS.get().lock().unpoisoned().insert(token, key);
        Self(token)
    }
}

impl Drop for KnownToken {
    fn drop(&mut self) {
        if let Some(keys) = KEYS.existing() {
            keys.lock().unpoisoned().remove(&self.0);
        }
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

/// A descriptor that the program has got from `cuMemExportToShareableHandle`, for whoever imports it.
#[derive(Debug)]
pub struct Export {
    /// The same open file, and with it a reference to the physical memory.
    file: Held,
    /// The program's number for it.
    number: RawFd,
    /// Until it is claimed: nobody knows who has it, so the memory counts as registered.
    mark: Option<RegistrantMark>,
}

impl Export {
    fn is(&self, file: BorrowedFd<'_>) -> bool {
        self.file.get().is_ok_and(|own| is_one_file(own, file).unwrap_or(false))
    }

    /// Whether the program has it open. The physical memory exists as long, and whoever gets the descriptor from now on gets that.
    fn is_open(&self) -> bool {
        // The library passes the same file to an importer, for a moment under a number that the program has closed.
        // SAFETY: the kernel checks the number.
        !is_held(self.number) && self.is(unsafe { BorrowedFd::borrow_raw(self.number) })
    }
}

/// The call that makes descriptors.
const EXPORT: &str = "cuMemExportToShareableHandle";

/// The most exports that are remembered of one allocation after the program has closed them: each takes a descriptor of the program's.
const MOST_EXPORTS: usize = 16;

/// The loans of an allocation to other processes.
#[derive(Debug, Default)]
pub struct Lending {
    /// Of the physical memory that there is now.
    exports: Vec<Export>,
    /// Set once a handle was requested.
    token: Option<KnownToken>,
    /// The borrowers that have the memory open, by connection, each with the number of pauses that the memory had had when the borrower got
    /// it. A borrower that got the memory before the last pause has set it aside.
    open: BTreeMap<u64, (Borrower, u64)>,
}

impl Lending {
    /// The token of the allocation with this key, made on first use.
    pub fn token(&mut self, key: u64) -> io::Result<Token> {
        match &self.token {
            Some(token) => Ok(token.0),
            None => Ok(self.token.insert(KnownToken::of(Token::random()?, key)).0),
        }
    }

    /// Whether this is the allocation's token.
    pub fn is(&self, token: &Token) -> bool {
        self.token.as_ref().is_some_and(|own| own.0 == *token)
    }

    /// Whether another process may know it.
    pub fn has_begun(&self) -> bool {
        self.token.is_some()
    }

    /// Remembers a descriptor that the program has exported, under this number. Returns a mark: until it is claimed, the memory is registered.
    pub fn exported(&mut self, file: Held, number: RawFd) -> RegistrantMark {
        let mark = Arc::new(Registrant { call: EXPORT, knows_addresses: false });
        if self.exports.len() >= MOST_EXPORTS
            && let Some(place) = self.exports.iter().position(|export| export.mark.is_none() && !export.is_open())
        {
            self.exports.remove(place);
        }
        self.exports.push(Export { file, number, mark: Some(Arc::clone(&mark)) });
        mark
    }

    /// The call that has made a descriptor, if the program still has it open, whoever has claimed it: another process may import it at any time.
    pub fn kept_open(&self) -> Option<&'static str> {
        self.exports.iter().any(Export::is_open).then_some(EXPORT)
    }

    /// Whether the program has exported this descriptor.
    pub fn has_exported(&self, file: BorrowedFd<'_>) -> bool {
        self.exports.iter().any(|export| export.is(file))
    }

    /// Somebody known has imported this descriptor. Several exports may be of one open file, and one may be imported by several processes: this
    /// claims one that nobody has claimed before, if there is one.
    pub fn claimed(&mut self, file: BorrowedFd<'_>) {
        if let Some(unclaimed) = self.exports.iter_mut().find(|export| export.mark.is_some() && export.is(file)) {
            unclaimed.mark = None;
        }
    }

    /// Forgets all descriptors, which would keep the physical memory. Dropping them closes files.
    #[must_use]
    pub fn forget_exports(&mut self) -> Vec<Export> {
        std::mem::take(&mut self.exports)
    }

    /// Records who has it open from now on, and how often it has been paused by then.
    pub fn open(&mut self, borrower: Borrower, pauses: u64) {
        self.open.insert(borrower.connection, (borrower, pauses));
    }

    /// Whether any process has it open, or has set it aside.
    pub fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Records that the process behind a connection has closed it.
    pub fn close(&mut self, connection: u64) {
        self.open.remove(&connection);
    }

    /// Who has the memory open since its last pause, except processes that take part in the next one.
    pub fn to_others(&self, participants: &Participants, pauses: u64) -> BTreeSet<u32> {
        let now = self.open.values().filter(|(_, since)| *since == pauses);
        // A process with several connections counts once.
        now.map(|(borrower, _)| borrower.pid).filter(|pid| !participants.has(*pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn tokens_round_trip() {
        let token = Token::random().unwrap();
        let text = token.text();
        assert_eq!(Token::parse(&text), Some(token));
        for wrong in [&text[1..], &text[2..], &format!("{text}00"), "", "zz", "ääää"] {
            assert_eq!(Token::parse(wrong), None, "{wrong}");
        }
    }

    /// A descriptor that one process has imported can be imported by others.
    #[test]
    #[cfg_attr(miri, ignore = "compares open files")]
    fn a_claim_takes_one_mark_and_no_export() {
        let [file, other] = [(); 2].map(|()| Held::new(UnixDatagram::unbound().unwrap()).unwrap());
        let mut lending = Lending::default();
        let marks = [0, 1].map(|number| Arc::downgrade(&lending.exported(file.copy().unwrap(), number)));
        for (claimed, remaining) in [(&other, 2), (&file, 1), (&file, 0), (&file, 0)] {
            lending.claimed(claimed.get().unwrap());
            assert_eq!(marks.iter().filter(|mark| mark.strong_count() > 0).count(), remaining);
            assert!(lending.has_exported(file.get().unwrap()) && !lending.has_exported(other.get().unwrap()));
        }
        assert_eq!(lending.forget_exports().len(), 2);
    }
}
