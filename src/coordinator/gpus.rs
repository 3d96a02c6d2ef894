//! GPUs as users name them.

use std::collections::BTreeMap;
use vramctl_driver::uuid_of_index;
use vramctl_model::short_uuid;

/// The GPUs' indices in `nvidia-smi`, by UUID. None without NVML.
pub fn indices() -> BTreeMap<String, u32> {
    (0..).map_while(|index| Some((uuid_of_index(index).ok()??, index))).collect()
}

/// A GPU as people read it: its index in `nvidia-smi`; without NVML, the beginning of its UUID.
pub fn short_name(uuid: &str, indices: &BTreeMap<String, u32>) -> String {
    indices.get(uuid).map_or_else(|| short_uuid(uuid).to_owned(), ToString::to_string)
}

/// Whether the UUID begins as the user has written, perhaps without `GPU-`.
pub fn begins_as(uuid: &str, written: &str) -> bool {
    let short = |text: &str| text.to_ascii_lowercase().trim_start_matches("gpu-").to_owned();
    short(uuid).starts_with(&short(written))
}
