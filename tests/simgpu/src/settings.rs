//! The environment variables, read once. This crate's README documents them.

use crate::device::uuid_text;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The process ids that NVML tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pids {
    /// As this process knows them.
    Ours,
    /// As the host outside of a container knows them: other numbers.
    OfTheHost,
    /// None at all.
    None,
}

/// The settings of the simulated machine and of this process.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // switches
pub struct Settings {
    /// `SIMGPU_DIR`: the directory of the machine's shared state; if unset, the machine is private to this process.
    pub directory: Option<PathBuf>,
    /// `SIMGPU_DEVICES`.
    pub devices: usize,
    /// `CUDA_VISIBLE_DEVICES`: the devices that the driver shows this process, and in which order. NVML shows all.
    pub visible: Option<String>,
    /// `SIMGPU_MEMORY`: bytes of each device.
    pub memory: u64,
    /// `SIMGPU_SERIAL`: which machine it is. The UUIDs of its devices are its own.
    pub serial: u64,
    /// `SIMGPU_MODEL`: which model its devices are.
    pub model: u64,
    /// `SIMGPU_OP_DELAY_MS`: the minimum duration of every stream operation.
    pub delay_ms: u64,
    /// `SIMGPU_LINK`: bytes per second between host and device; as fast as it goes without.
    pub link: Option<u64>,
    /// `SIMGPU_FAIL`: the faults to inject, unparsed.
    pub faults: String,
    /// `SIMGPU_CUDA`: the newest CUDA version that the driver supports, as `cuDriverGetVersion` returns it.
    pub cuda: i32,
    /// `SIMGPU_NO_VMM`: the devices lack virtual memory management.
    pub no_vmm: bool,
    /// `SIMGPU_NO_P2P`: no device reaches another's memory.
    pub no_p2p: bool,
    /// `SIMGPU_NO_SHARING`: the devices' virtual memory cannot be exported.
    pub no_sharing: bool,
    /// `SIMGPU_NO_RDMA`: the driver refuses access to memory for `GPUDirect` RDMA, although it reports support for it.
    pub no_rdma: bool,
    /// `SIMGPU_DIRTY`: new memory of the devices is not zero.
    pub dirty: bool,
    /// `SIMGPU_DECOMPRESSION`: the devices have a decompression engine, as Blackwell's.
    pub decompression: bool,
    /// `SIMGPU_UNRESTORABLE`: a restore of this process from a checkpoint fails, as with NCCL.
    pub unrestorable: bool,
    /// `SIMGPU_RESTORE_THREAD`: a checkpointed process leaves the machine, and a thread of it brings it back.
    pub restore_thread: bool,
    /// `SIMGPU_MIG`: the devices are in MIG mode.
    pub mig: bool,
    /// `SIMGPU_MPS`: the devices' contexts are behind MPS.
    pub mps: bool,
    /// `SIMGPU_NVML_PIDS`: which processes NVML lists in this one.
    pub pids: Pids,
    /// `SIMGPU_CONTEXT_BYTES`: device memory taken by a context, except a green one.
    pub context_bytes: u64,
    /// `SIMGPU_CODE_BYTES`: device memory taken by each module, by each function once it is launched, and by each executable graph.
    pub code_bytes: u64,
    /// `SIMGPU_END_MS`: how long the driver's shutdown takes at exit. If set, calls during or after it abort the process.
    pub end_ms: Option<u64>,
}

/// The settings, read from the environment at first use.
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
            visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            memory: number("SIMGPU_MEMORY", 16 << 30),
            serial: number("SIMGPU_SERIAL", 0),
            model: number("SIMGPU_MODEL", 0),
            delay_ms: number("SIMGPU_OP_DELAY_MS", 0),
            link: Some(number("SIMGPU_LINK", 0)).filter(|rate| *rate > 0),
            faults: text("SIMGPU_FAIL"),
            cuda: version(&text("SIMGPU_CUDA")).unwrap_or(13000),
            no_vmm: !matches!(text("SIMGPU_NO_VMM").as_str(), "" | "0"),
            no_p2p: !matches!(text("SIMGPU_NO_P2P").as_str(), "" | "0"),
            no_sharing: !matches!(text("SIMGPU_NO_SHARING").as_str(), "" | "0"),
            no_rdma: !matches!(text("SIMGPU_NO_RDMA").as_str(), "" | "0"),
            dirty: !matches!(text("SIMGPU_DIRTY").as_str(), "" | "0"),
            decompression: !matches!(text("SIMGPU_DECOMPRESSION").as_str(), "" | "0"),
            unrestorable: !matches!(text("SIMGPU_UNRESTORABLE").as_str(), "" | "0"),
            restore_thread: !matches!(text("SIMGPU_RESTORE_THREAD").as_str(), "" | "0"),
            mig: !matches!(text("SIMGPU_MIG").as_str(), "" | "0"),
            mps: !matches!(text("SIMGPU_MPS").as_str(), "" | "0"),
            pids: match text("SIMGPU_NVML_PIDS").as_str() {
                "host" => Pids::OfTheHost,
                "none" => Pids::None,
                _ => Pids::Ours,
            },
            context_bytes: number("SIMGPU_CONTEXT_BYTES", 0),
            code_bytes: number("SIMGPU_CODE_BYTES", 0),
            end_ms: Some(number("SIMGPU_END_MS", 0)).filter(|milliseconds| *milliseconds > 0),
        }
    })
}

/// The devices that `CUDA_VISIBLE_DEVICES` lists, by index or by the beginning of their UUID: "only the devices whose index comes before the
/// invalid index are visible".
pub fn visible(text: Option<&str>, serial: u64, devices: usize) -> Vec<usize> {
    let Some(text) = text else { return (0..devices).collect() };
    let find = |word: &str| (0..devices).find(|&device| word.starts_with("GPU-") && uuid_text(serial, device).starts_with(word));
    text.split(',').map_while(|word| word.trim().parse().ok().filter(|&index| index < devices).or_else(|| find(word.trim()))).collect()
}

/// Parses a version of CUDA, such as 12.4.
fn version(text: &str) -> Option<i32> {
    let (major, minor) = text.split_once('.')?;
    Some(major.parse::<i32>().ok()? * 1000 + minor.parse::<i32>().ok()? * 10)
}

/// Parses bytes with an optional unit, as vramctl does: `GB` is 1000³ bytes, `G` and `GiB` are 1024³.
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KIB" => 1 << 10,
        "M" | "MIB" => 1 << 20,
        "G" | "GIB" => 1 << 30,
        "T" | "TIB" => 1 << 40,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::{bytes, version, visible};

    #[test]
    fn sizes_with_and_without_suffix() {
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("16G"), Some(16 << 30));
        assert_eq!(bytes("3MiB"), Some(3 << 20));
        assert_eq!(bytes("3MB"), Some(3_000_000));
        assert_eq!(bytes("much"), None);
        assert_eq!(bytes("1X"), None);
    }

    #[test]
    fn visible_devices_end_at_the_first_that_does_not_exist() {
        let of = |text: Option<&str>| visible(text, 5, 3);
        assert_eq!(of(None), [0, 1, 2]);
        assert_eq!(of(Some("2, 0")), [2, 0]);
        assert_eq!(of(Some("1,7,0")), [1]);
        assert_eq!(of(Some(&super::uuid_text(5, 2)[..12])), [2]);
        assert_eq!((of(Some("")), of(Some("-1")), of(Some(&super::uuid_text(0, 2)))), (vec![], vec![], vec![]));
    }

    #[test]
    fn versions_as_the_driver_tells_them() {
        assert_eq!(version("12.4"), Some(12040));
        assert_eq!(version(""), None);
        assert_eq!(version("12"), None);
    }
}
