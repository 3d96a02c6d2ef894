//! Registered memory: another process that has imported it, a network card or NCCL refers to its physical pages.

use crate::{Bytes, Error};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

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

/// The registered memory of one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The tag.
    pub tag: String,
    /// Who registered it: the call by which it was seen, or another process.
    pub registrant: String,
    /// Bytes of device memory.
    pub bytes: u64,
}

impl fmt::Display for Registration {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} of {} ({})", Bytes(self.bytes), self.tag, self.registrant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
