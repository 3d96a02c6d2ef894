//! The accounts of users, as the system knows them.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::{mem, ptr};

/// A user's account.
#[derive(Debug)]
pub struct Account {
    /// The number.
    pub user: u32,
    /// The number of the user's own group.
    pub group: u32,
    /// The home directory.
    pub home: OsString,
    /// The name.
    pub name: OsString,
}

impl Account {
    /// `None` if there is none of this number.
    pub fn of(user: u32) -> Option<Self> {
        /// Longer than any entry.
        const ROOM: usize = 16 << 10;
        // SAFETY: plain data, for which all zeroes is a value.
        let mut entry: libc::passwd = unsafe { mem::zeroed() };
        let (mut text, mut found) = (vec![0; ROOM], ptr::null_mut());
        // SAFETY: all are writable, `text` for as long as it says.
        let failed = unsafe { libc::getpwuid_r(user, &raw mut entry, text.as_mut_ptr(), text.len(), &raw mut found) };
        if failed != 0 || found.is_null() {
            return None;
        }
        // SAFETY: the entry was found, so these are strings in `text`, which lives.
        let word = |word: *const libc::c_char| OsStr::from_bytes(unsafe { CStr::from_ptr(word) }.to_bytes()).to_owned();
        Some(Self { user, group: entry.pw_gid, home: word(entry.pw_dir), name: word(entry.pw_name) })
    }
}

/// A user's name.
pub fn name_of(user: u32) -> Option<String> {
    Account::of(user)?.name.into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_an_account_and_a_number_that_nobody_has_has_none() {
        let root = Account::of(0).unwrap();
        assert_eq!((root.user, root.group, root.name.to_str()), (0, 0, Some("root")));
        assert!(Account::of(u32::MAX - 7).is_none());
    }
}
