//! GPUs as users name them.

use crate::failure::{CommandError, Exit};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use vramctl_driver::{Card, uuid_of_index};
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
    if text.contains("GPU-") { with_these(text, &indices()) } else { text.to_owned() }
}

/// Adds the index in `nvidia-smi` to each object of an answer that has the UUID of a GPU: `index` beside `uuid`, `gpu_index` beside `gpu`,
/// and `gpu_indices` beside fields that are maps by UUID.
pub fn add_indices(answer: &mut Value) {
    if mentions_a_gpu(answer) {
        add(answer, &indices());
    }
}

/// Asking NVML takes a while.
fn mentions_a_gpu(answer: &Value) -> bool {
    match answer {
        Value::String(text) => text.starts_with("GPU-"),
        Value::Array(all) => all.iter().any(mentions_a_gpu),
        Value::Object(fields) => fields.iter().any(|(name, value)| name.starts_with("GPU-") || mentions_a_gpu(value)),
        _ => false,
    }
}

fn add(answer: &mut Value, indices: &BTreeMap<String, u32>) {
    match answer {
        Value::Array(all) => all.iter_mut().for_each(|one| add(one, indices)),
        Value::Object(fields) => {
            fields.values_mut().for_each(|value| add(value, indices));
            for (uuid, index) in [("uuid", "index"), ("gpu", "gpu_index")] {
                let found = fields.get(uuid).and_then(Value::as_str).and_then(|uuid| indices.get(uuid)).copied();
                if let Some(found) = found {
                    fields.entry(index).or_insert_with(|| found.into());
                }
            }
            let by_uuid = fields.values().filter_map(Value::as_object).flat_map(|map| map.keys());
            let found: Map<_, _> = by_uuid.filter_map(|uuid| Some((uuid.clone(), (*indices.get(uuid)?).into()))).collect();
            if !found.is_empty() {
                fields.entry("gpu_indices").or_insert(Value::Object(found));
            }
        }
        _ => (),
    }
}

fn with_these(text: &str, indices: &BTreeMap<String, u32>) -> String {
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

/// The GPU that the user has named: by its index in `nvidia-smi`, its UUID or the beginning of that, or its address on the bus.
pub fn named<'a>(gpu: &str, cards: &'a [Card]) -> Result<&'a Card, CommandError> {
    let bus = |text: &str| text.to_ascii_lowercase().trim_start_matches(['0', ':']).to_owned();
    let mut meant = cards.iter().filter(|card| match gpu.parse::<u32>() {
        Ok(index) => card.index == index,
        Err(_) if gpu.contains(':') => bus(&card.bus) == bus(gpu),
        Err(_) => begins_as(&card.uuid, gpu),
    });
    let no_one = |why: &str| CommandError::new(Exit::Usage, format!("{why}; `nvidia-smi -L` lists them"));
    match (meant.next(), meant.next()) {
        (Some(card), None) => Ok(card),
        (None, _) => Err(no_one(&format!("NVML reports no GPU {gpu}"))),
        _ => Err(no_one(&format!("{gpu} matches several GPUs"))),
    }
}

/// Whether the UUID begins as the user has written, perhaps without `GPU-`.
pub fn begins_as(uuid: &str, written: &str) -> bool {
    let short = |text: &str| text.to_ascii_lowercase().trim_start_matches("gpu-").to_owned();
    short(uuid).starts_with(&short(written))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_uuid_of_an_answer_has_its_index_beside_it() {
        let mut answer =
            json!({ "devices": [{ "uuid": "GPU-a", "device": 0 }, { "uuid": null }, { "uuid": "GPU-b", "index": 7 }], "gpu": "GPU-b" });
        assert!(mentions_a_gpu(&answer) && !mentions_a_gpu(&json!([{ "pid": 1, "name": "x" }])));
        add(&mut answer, &[("GPU-a".to_owned(), 1), ("GPU-b".to_owned(), 2)].into());
        let devices = json!([{ "uuid": "GPU-a", "device": 0, "index": 1 }, { "uuid": null }, { "uuid": "GPU-b", "index": 7 }]);
        assert_eq!(answer, json!({ "devices": devices, "gpu": "GPU-b", "gpu_index": 2 }));
        let mut by_uuid = json!({ "unmanaged": [{ "owner": "x", "gpus": { "GPU-a": 5, "GPU-z": 6 } }] });
        assert!(mentions_a_gpu(&by_uuid));
        add(&mut by_uuid, &[("GPU-a".to_owned(), 1)].into());
        let left = json!({ "owner": "x", "gpus": { "GPU-a": 5, "GPU-z": 6 }, "gpu_indices": { "GPU-a": 1 } });
        assert_eq!(by_uuid, json!({ "unmanaged": [left] }));
    }

    #[test]
    fn a_gpu_is_named_by_index_uuid_or_bus() {
        let card = |index: u32| Card {
            index,
            uuid: format!("GPU-{index}{index}{index}{index}"),
            bus: format!("00000000:{index}8:00.0"),
            ..Card::default()
        };
        let cards: Vec<_> = (0..3).map(card).collect();
        let found = |gpu| named(gpu, &cards).map(|card| card.index).map_err(|failure| failure.to_string());
        for gpu in ["1", "GPU-1111", "GPU-11", "gpu-1111", "00000000:18:00.0", "0000:18:00.0", "18:00.0"] {
            assert_eq!(found(gpu), Ok(1), "{gpu}");
        }
        assert!(found("7").unwrap_err().contains("no GPU 7"));
        assert!(found("GPU-").unwrap_err().contains("several"));
    }

    #[test]
    fn a_message_names_gpus_by_their_indices() {
        let indices = [("GPU-0f5c2b8e-1111-2222-3333-444444444444".to_owned(), 3)].into();
        for (message, shown) in [
            ("too little memory on GPU-0f5c2b8e: 1 MiB", "too little memory on GPU 3 (GPU-0f5c2b8e): 1 MiB"),
            ("GPU 3 (GPU-0f5c2b8e) and GPU-0f5c2b8e", "GPU 3 (GPU-0f5c2b8e) and GPU 3 (GPU-0f5c2b8e)"),
            ("GPU-0f5c2b8e-1111-2222-3333-444444444444", "GPU-0f5c2b8e-1111-2222-3333-444444444444"),
            ("GPU-aaaaaaaa", "GPU-aaaaaaaa"),
        ] {
            assert_eq!(with_these(message, &indices), shown);
        }
    }
}
