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

/// What a pause does with registered memory. A registration refers to the old physical pages: after a pause, a network card would write
/// into somebody else's memory, and a captured collective would hang.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Registered {
    /// Fails, and pauses nothing.
    #[default]
    Refuse,
    /// Pauses the rest, without what other processes have open (CUDA IPC).
    Keep,
    /// Pauses it too: the caller guarantees that nobody uses the registration any more. Memory that other processes have open is still
    /// refused.
    Take,
}

impl Registered {
    /// The name used on the command line and in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Keep => "keep",
            Self::Take => "take",
        }
    }

    /// Whether this is what a pause does unless the request says otherwise.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl FromStr for Registered {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        [Self::Refuse, Self::Keep, Self::Take]
            .into_iter()
            .find(|choice| choice.name() == text)
            .ok_or_else(|| Error::Invalid(format!("'{text}' is not one of refuse, keep and take")))
    }
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

    #[test]
    fn choices_round_trip() {
        for choice in [Registered::Refuse, Registered::Keep, Registered::Take] {
            assert_eq!(choice.name().parse::<Registered>().unwrap(), choice);
            assert_eq!(serde_json::to_string(&choice).unwrap(), format!("\"{}\"", choice.name()));
        }
        assert!("all".parse::<Registered>().is_err());
        assert!(Registered::Refuse.is_default() && !Registered::Keep.is_default());
    }
}
