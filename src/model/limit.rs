//! How much of each GPU a process may take, and what it is shown of a GPU.

use crate::{Bytes, gpu_in_words, parse_bytes};
use std::fmt;
use std::str::FromStr;

/// The most memory that a process may take of each GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// So many bytes.
    Bytes(u64),
    /// So many percent of the GPU's memory: more than 0, at most 100.
    Percent(f64),
}

impl Limit {
    /// In bytes, of a GPU with so many: not more than it has.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.min(total),
            Self::Percent(percent) => (total as f64 * (percent / 100.0)) as u64,
        }
    }
}

/// Parses `20G` or `25%`.
impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let percent =
            |number: &str| number.trim_end().parse().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0).map(Self::Percent);
        let bytes = || parse_bytes(text).filter(|bytes| *bytes > 0).map(|bytes| Self::Bytes(bytes as u64));
        let limit = text.trim().strip_suffix('%').map_or_else(bytes, percent);
        limit.ok_or_else(|| format!("{text} is neither a size such as 20G nor a share such as 25%"))
    }
}

/// As it is parsed.
impl fmt::Display for Limit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Percent(percent) => write!(out, "{percent}%"),
            Self::Bytes(bytes) => {
                let units = [(30, "G"), (20, "M"), (10, "K")];
                let whole = units.into_iter().find(|(shift, _)| bytes.trailing_zeros() >= *shift);
                let (shift, unit) = whole.unwrap_or((0, ""));
                write!(out, "{}{unit}", bytes >> shift)
            }
        }
    }
}

/// What decides how much of a GPU a process is shown, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// The GPU's memory.
    pub total: u64,
    /// The most that the process may take, if it has a limit.
    pub limit: Option<u64>,
    /// What others have that will not make way for this process, and what is kept free.
    pub others: u64,
    /// What the process itself has, also while that is away.
    pub own: u64,
}

/// What `cuMemGetInfo` answers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// Free memory.
    pub free: u64,
    /// All memory.
    pub total: u64,
}

impl Share {
    /// What the process is shown.
    pub fn shown(&self) -> Shown {
        let total = self.limit.map_or(self.total, |limit| limit.min(self.total));
        let left = self.total.saturating_sub(self.others);
        Shown { free: total.min(left).saturating_sub(self.own), total }
    }
}

/// A request that the limit refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverLimit {
    /// The device's ordinal in the process.
    pub device: i32,
    /// Its UUID, if the driver reports it.
    pub uuid: Option<String>,
    /// Bytes that the request would take.
    pub needed: u64,
    /// The limit in bytes.
    pub limit: u64,
    /// Bytes that the process has already.
    pub counted: u64,
    /// Of those, bytes of its context.
    pub context: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpu = gpu_in_words(self.device, self.uuid.as_deref(), None);
        let [needed, limit, counted, context] = [self.needed, self.limit, self.counted, self.context].map(Bytes);
        write!(out, "the limit of {limit} on {gpu} refuses {needed}, whatever the GPU has free: {counted} of it are taken")?;
        if self.context >= self.limit {
            return write!(out, ", {context} by the context alone. Start the program with a higher --limit");
        }
        write!(out, ". Free memory in the program, or start it with a higher --limit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_limit_is_a_size_or_a_share() {
        for (text, limit, of_80) in [
            ("20G", Limit::Bytes(20 * GIB), 20 * GIB),
            ("1024", Limit::Bytes(1024), 1024),
            ("100G", Limit::Bytes(100 * GIB), 80 * GIB),
            ("25%", Limit::Percent(25.0), 20 * GIB),
            ("100%", Limit::Percent(100.0), 80 * GIB),
            ("12.5 %", Limit::Percent(12.5), 10 * GIB),
        ] {
            assert_eq!(text.parse(), Ok(limit), "{text}");
            assert_eq!(limit.of(80 * GIB), of_80, "{text}");
        }
        for wrong in ["", "0", "0%", "-5%", "101%", "%", "nan%", "inf%", "20X", "half"] {
            assert!(wrong.parse::<Limit>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_process_is_shown_what_it_can_get() {
        let share = |limit: Option<u64>, others, own| Share { total: 80, limit, others, own }.shown();
        for (name, shown, free, total) in [
            ("without a limit, what the GPU has", share(None, 30, 20), 30, 80),
            ("nothing is taken yet", share(Some(50), 0, 0), 50, 50),
            ("its own counts", share(Some(50), 0, 20), 30, 50),
            ("others have so much that the limit cannot be had", share(Some(50), 40, 20), 20, 50),
            ("the limit is taken", share(Some(50), 0, 50), 0, 50),
            ("its context is larger than the limit", share(Some(5), 0, 7), 0, 5),
            ("others have all", share(Some(50), 90, 0), 0, 50),
            ("others have more than the GPU has", share(None, 90, 0), 0, 80),
            ("a limit larger than the GPU", share(Some(90), 0, 10), 70, 80),
        ] {
            assert_eq!(shown, Shown { free, total }, "{name}");
        }
    }

    #[test]
    fn a_refusal_names_the_limit_and_a_way_out() {
        let refused = OverLimit { device: 1, uuid: None, needed: GIB, limit: 4 * GIB, counted: 7 * GIB / 2, context: GIB / 2 };
        let text = refused.to_string();
        assert!(text.starts_with("the limit of 4.00 GiB on device 1 refuses 1.00 GiB, whatever the GPU has free: 3.50 GiB"), "{text}");
        assert!(text.ends_with("or start it with a higher --limit"), "{text}");
        let of_context = OverLimit { limit: GIB / 4, ..refused }.to_string();
        assert!(of_context.contains("512.00 MiB by the context alone"), "{of_context}");
    }
}
