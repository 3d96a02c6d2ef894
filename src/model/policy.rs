//! Tags and backup policies.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// What happens to an allocation's contents while it is paused. The policy of a request beats that of the region, which beats
/// `VRAMCTL_BACKUP`, which beats `host`: contents are kept unless somebody said discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Discarded; after the resume the memory reads as zero.
    Discard,
    /// Kept in host memory.
    Host,
    /// Kept in a file.
    Disk,
}

impl Policy {
    /// The name used in `VRAMCTL_BACKUP`, on the command line and in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Discard => "discard",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        [Self::Discard, Self::Host, Self::Disk]
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| Error::Invalid(format!("'{text}' is not a backup policy; use host, disk or discard")))
    }
}

/// The tag if none is given.
pub const DEFAULT_TAG: &str = "default";

/// The longest tag, in bytes.
pub const LONGEST_TAG: usize = 128;

/// Checks that a tag can be written on a command line and in `VRAMCTL_BACKUP`.
pub fn checked_tag(tag: &str) -> Result<Arc<str>, Error> {
    let wrong = if tag.is_empty() {
        "is empty"
    } else if tag.len() > LONGEST_TAG {
        "is longer than 128 bytes"
    } else if tag.contains(|c: char| c.is_control() || c == ',' || c == '=') {
        "contains a comma, an equals sign or a control character"
    } else {
        return Ok(tag.into());
    };
    Err(Error::Invalid(format!("the tag '{}' {wrong}", tag.escape_debug().take(LONGEST_TAG).collect::<String>())))
}

/// Checks that commands can find a process by this name.
pub fn checked_name(name: &str) -> Result<&str, Error> {
    if name.is_empty() || name.contains(char::is_control) {
        return Err(Error::Invalid("a name must not be empty or contain control characters".into()));
    }
    if name.parse::<u32>().is_ok() {
        return Err(Error::Invalid("commands would take a number for a process id; add a letter".into()));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_must_be_writable_on_a_command_line() {
        for wrong in ["", "a,b", "a=b", "a\nb", &"x".repeat(129)] {
            assert!(checked_tag(wrong).is_err(), "{wrong:?}");
        }
        for right in ["kv_cache/0 ü", &"x".repeat(LONGEST_TAG)] {
            assert!(checked_tag(right).is_ok(), "{right:?}");
        }
    }

    #[test]
    fn policies_are_read_by_name() {
        for policy in [Policy::Discard, Policy::Host, Policy::Disk] {
            assert_eq!(policy.to_string().parse::<Policy>().ok(), Some(policy));
        }
        assert_eq!("disk".parse::<Policy>().ok(), Some(Policy::Disk));
        assert!("tape".parse::<Policy>().is_err());
    }
}
