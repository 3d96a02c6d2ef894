//! Sizes and names for people, and numbers as they go over the socket.

use std::fmt;
use std::time::Duration;

/// Whole milliseconds.
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Parses `4096`, `64K`, `5GB`, `5GiB` or `1.5 G` into bytes, and what [`Bytes`] displays, such as `5.00 GiB`. Units mean what they are
/// defined as: `GB` is 1000³ bytes and `GiB` 1024³. A letter alone is a power of 1024, as in `dd`, `ulimit` and Docker.
pub fn parse_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit: u32 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return None,
    };
    let (whole, fraction) = digits.trim_end().split_once('.').unwrap_or((digits.trim_end(), "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || (unit == 1 && digits.contains('.')) {
        return None;
    }
    let part = format!("0.{fraction}").parse::<f64>().ok()? * f64::from(unit);
    whole.parse::<usize>().ok()?.checked_mul(unit as usize)?.checked_add(part.round() as usize)
}

/// Displays bytes: exact below 1 KiB, else with two decimals and a binary unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, shift) = match self.0 {
            0..1024 => return write!(out, "{} B", self.0),
            1024..0x10_0000 => ("KiB", 10),
            0x10_0000..0x4000_0000 => ("MiB", 20),
            _ => ("GiB", 30),
        };
        write!(out, "{:.2} {unit}", self.0 as f64 / f64::from(1u32 << shift))
    }
}

/// Memory left to CUDA as people read it everywhere, by who asked for it.
pub fn unmanaged_of(owner: &str) -> String {
    format!("{owner} (left to CUDA)")
}

/// Enough of a GPU's UUID to tell GPUs apart, and to name one in a command.
pub fn short_uuid(uuid: &str) -> &str {
    uuid.get(.."GPU-01234567".len()).unwrap_or(uuid)
}

/// A GPU in a message: by its index in `nvidia-smi` and its UUID, else by its ordinal in the process, as far as they are known.
pub fn gpu_in_words(device: i32, uuid: Option<&str>, index: Option<u32>) -> String {
    match (uuid.map(short_uuid), index) {
        (Some(uuid), Some(index)) => format!("GPU {index} ({uuid})"),
        (Some(uuid), None) => uuid.to_owned(),
        (None, _) => format!("device {device}"),
    }
}

/// For numbers that are left out if they are 0.
#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
pub fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 19, "1.50 MiB"), (5 << 30, "5.00 GiB")] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        assert_eq!(parse_bytes("64K"), Some(64 << 10));
        assert_eq!(parse_bytes("5M"), Some(5 << 20));
        assert_eq!(parse_bytes(" 3g "), Some(3 << 30));
        assert_eq!(parse_bytes("17"), Some(17));
        for same in ["1M", "1MiB", "1 MiB", "1mib", "1024K", "1048576B"] {
            assert_eq!(parse_bytes(same), Some(1 << 20), "{same}");
        }
        for (text, bytes) in [("5GB", 5_000_000_000), ("1.5 MB", 1_500_000), ("64kb", 64_000), ("0.0005KB", 1)] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
        for (text, bytes) in [("5GiB", 5 << 30), ("5.00 GiB", 5 << 30), ("1.5G", 3 << 29), ("0.5 KiB", 512)] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
            let shown = Bytes(bytes as u64).to_string();
            assert_eq!(parse_bytes(&shown), Some(bytes), "as it is displayed: {shown}");
        }
        for wrong in ["", "M", "-1", "1T", "1iB", "1.5", "1.G", ".5G", "1.2.3G", "1e3K", "1 M B", "B", "99999999999G", "nan", "+1"] {
            assert_eq!(parse_bytes(wrong), None, "{wrong}");
        }
    }
}
