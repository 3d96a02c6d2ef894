//! Every environment variable, read once. The table for users is in this crate's README.

use std::path::PathBuf;
use std::sync::OnceLock;

/// What the environment says about the simulated machine and this process on it.
#[derive(Debug)]
pub struct Settings {
    /// `SIMGPU_DIR`: where the machine's shared state lies; none: a machine of this process alone.
    pub directory: Option<PathBuf>,
    /// `SIMGPU_DEVICES`.
    pub devices: usize,
    /// `SIMGPU_MEMORY`: bytes of each device.
    pub memory: u64,
    /// `SIMGPU_OP_DELAY_MS`: how long each stream operation takes at least.
    pub delay_ms: u64,
    /// `SIMGPU_FAIL`: the faults to inject, not yet taken apart.
    pub faults: String,
    /// `SIMGPU_NO_VMM`: the devices know no virtual memory management.
    pub no_vmm: bool,
    /// `SIMGPU_CONTEXT_BYTES`: device memory that a primary context takes.
    pub context_bytes: u64,
    /// `SIMGPU_END_MS`: how long the driver takes to end with the process, and abort it if it is called meanwhile or later.
    pub end_ms: Option<u64>,
}

/// The settings, read from the environment at the first use.
pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let text = |name: &str| std::env::var(name).unwrap_or_default();
        let number = |name: &str, default: u64| {
            let value = text(name);
            if value.is_empty() {
                return default;
            }
            bytes(&value).unwrap_or_else(|| {
                eprintln!("simgpu: {name}={value} is not a number; using {default}");
                default
            })
        };
        Settings {
            directory: std::env::var_os("SIMGPU_DIR").filter(|directory| !directory.is_empty()).map(PathBuf::from),
            devices: (number("SIMGPU_DEVICES", 1) as usize).min(crate::machine::MAX_DEVICES),
            memory: number("SIMGPU_MEMORY", 16 << 30),
            delay_ms: number("SIMGPU_OP_DELAY_MS", 0),
            faults: text("SIMGPU_FAIL"),
            no_vmm: !matches!(text("SIMGPU_NO_VMM").as_str(), "" | "0"),
            context_bytes: number("SIMGPU_CONTEXT_BYTES", 0),
            end_ms: Some(number("SIMGPU_END_MS", 0)).filter(|milliseconds| *milliseconds > 0),
        }
    })
}

/// A number of bytes with an optional K, M, G or T (powers of 1024).
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_with_and_without_suffix() {
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("16G"), Some(16 << 30));
        assert_eq!(bytes("3MiB"), Some(3 << 20));
        assert_eq!(bytes("much"), None);
        assert_eq!(bytes("1X"), None);
    }
}
