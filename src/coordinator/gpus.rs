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

/// A message of a process, which knows GPUs by their UUIDs, with their indices: `GPU 0 (GPU-0f5c2b8e)`.
pub fn with_indices(text: &str) -> String {
    // Asking NVML takes a while.
    if text.contains("GPU-") { named(text, &indices()) } else { text.to_owned() }
}

fn named(text: &str, indices: &BTreeMap<String, u32>) -> String {
    let is_alone = |uuid: &str| indices.keys().filter(|other| short_uuid(other) == short_uuid(uuid)).count() == 1;
    indices.iter().filter(|(uuid, _)| is_alone(uuid)).fold(text.to_owned(), |text, (uuid, index)| {
        let short = short_uuid(uuid);
        let (mut parts, name) = (text.split(short), format!("GPU {index} ({short})"));
        let mut named = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            // A whole UUID stays one, to be copied, and what has its index keeps that.
            let is_named = named.ends_with(&format!("GPU {index} (")) || part.starts_with('-');
            named = named + if is_named { short } else { &name } + part;
        }
        named
    })
}

/// Whether the UUID begins as the user has written, perhaps without `GPU-`.
pub fn begins_as(uuid: &str, written: &str) -> bool {
    let short = |text: &str| text.to_ascii_lowercase().trim_start_matches("gpu-").to_owned();
    short(uuid).starts_with(&short(written))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_gpus_by_their_indices() {
        let indices = [("GPU-0f5c2b8e-1111-2222-3333-444444444444".to_owned(), 3)].into();
        for (told, shown) in [
            ("too little memory on GPU-0f5c2b8e: 1 MiB", "too little memory on GPU 3 (GPU-0f5c2b8e): 1 MiB"),
            ("GPU 3 (GPU-0f5c2b8e) and GPU-0f5c2b8e", "GPU 3 (GPU-0f5c2b8e) and GPU 3 (GPU-0f5c2b8e)"),
            ("GPU-0f5c2b8e-1111-2222-3333-444444444444", "GPU-0f5c2b8e-1111-2222-3333-444444444444"),
            ("GPU-aaaaaaaa", "GPU-aaaaaaaa"),
        ] {
            assert_eq!(named(told, &indices), shown);
        }
    }
}
