//! What is known of a process, as text.

use crate::ui::output;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use vramctl_control::protocol::{Hello, ProcessStatus};
use vramctl_coordinator::checkpoint::{self, Whereabouts};
use vramctl_coordinator::gpus;
use vramctl_coordinator::proc;
use vramctl_coordinator::processes::{Found, Process};
use vramctl_coordinator::target;
use vramctl_coordinator::text::{self, plain};
use vramctl_model::Bytes;
use vramctl_model::{
    Borrowed, Cycle, DeviceStatus, Policy, Progress, Standing, Status, TagState, TagStatus, gpu_in_words, short_uuid, unmanaged_of,
};

/// Those of the processes that answer. `history`: with their last cycles, even if nothing grows.
pub fn described(found: &Found, processes: &[Process], history: bool) -> Vec<String> {
    let (states, refusal) = (checkpoint::seen_by_nvml(found, processes), checkpoint::refusal_by_age());
    let refusal = refusal.map_or_else(String::new, |(need, why)| format!("\nNo {}: {why}.", need.operation));
    let answering = processes.iter().filter_map(|process| Some((process.pid, process.status.as_ref().ok()?)));
    let below =
        |pid, status: &ProcessStatus| [plain(&unused_policies(pid, status)), refusal.clone(), history_of(&status.memory, history)].concat();
    answering.map(|(pid, status)| describe(status, states.get(&pid).copied()) + &below(pid, status)).collect()
}

/// `whereabouts`: of a suspended process, if that can be seen.
fn describe(status: &ProcessStatus, whereabouts: Option<Whereabouts>) -> String {
    let ProcessStatus { process, memory } = status;
    [plain(&head(process)), plain(&standing(memory, whereabouts)), tables(memory), plain(&notes(memory))].concat()
}

fn head(process: &Hello) -> String {
    let [name, program] = [&process.name, &process.program].map(|text| text::one_line(text));
    let mut text = format!("{name} (pid {}): {program}\n", process.pid);
    if let (Some(run), Some(age)) = (&process.run, process.age_s) {
        let _ = writeln!(text, "Started by {run}, running for {}.", text::age(age));
    }
    if let Some(engine) = &process.engine {
        let _ = writeln!(text, "Inference engine: {engine}.");
    }
    text
}

/// Whether it is suspended or held, and where new allocations go.
fn standing(memory: &Status, whereabouts: Option<Whereabouts>) -> String {
    let mut text = String::new();
    if let Some(gpus) = &memory.suspended {
        let bytes = Bytes(gpus.iter().map(|gpu| gpu.bytes).sum());
        let needs = format!("A resume needs {bytes} besides what is paused.");
        let _ = match whereabouts {
            Some(Whereabouts::Away) => writeln!(text, "Suspended: it has nothing on any GPU. {needs}"),
            Some(Whereabouts::OnGpu) => {
                writeln!(
                    text,
                    "In the middle of a suspend or resume: its CUDA context is on the GPU. If the command was interrupted, run `vramctl resume`."
                )
            }
            Some(Whereabouts::Lost) => {
                writeln!(text, "The driver reports the process as FAILED. It is lost: end it and start it again.")
            }
            None => writeln!(text, "Suspended, or being suspended or restored. {needs}"),
        };
    } else if memory.held {
        let waiting = match memory.waiting_threads {
            0 => "no thread waits".to_owned(),
            several => text::count(several, "thread waits", "threads wait"),
        };
        let sum = |bytes: fn(&TagStatus) -> u64| memory.tags.iter().map(bytes).sum::<u64>();
        let away = sum(|tag| tag.away_bytes);
        let _ = if away > 0 && away == sum(TagStatus::coming_bytes) {
            writeln!(text, "It has given {} to others that share its GPUs: {waiting} for it. A call brings it back.", Bytes(away))
        } else {
            writeln!(text, "Held until it is resumed: {waiting} to start GPU work.")
        };
        for Borrowed { owner, .. } in memory.borrowed.iter().filter(|its| its.paused_bytes > 0) {
            let _ = writeln!(text, "It waits for memory of process {owner}: `vramctl resume --pid {owner}`, and it continues by itself.");
        }
    }
    match &memory.standing {
        Some(Standing { seconds, by: Some(by) }) => _ = writeln!(text, "Asked for {} ago by {by}.", text::age(*seconds)),
        Some(Standing { seconds, by: None }) => _ = writeln!(text, "It gave way {} ago.", text::age(*seconds)),
        None => (),
    }
    let _ = match &memory.process_tag {
        Some(tag) => writeln!(text, "New allocations outside regions get the tag {tag}."),
        None => writeln!(text, "New allocations outside regions are left to CUDA."),
    };
    text
}

fn tables(memory: &Status) -> String {
    if memory.tags.is_empty() {
        return "No managed memory.".into();
    }
    let tags = ["TAG", "STATE", "BYTES", "COUNT", "BACKUP", "IN HOST", "ON DISK"];
    let devices = ["GPU", "ACTIVE", "PAUSED", "FREE", "TOTAL", "UUID"];
    let indices = gpus::indices();
    let (tags, devices) = (
        output::table(&tags, memory.tags.iter().map(tag_row)),
        output::table(&devices, memory.devices.iter().map(|device| device_row(device, &indices))),
    );
    format!("{tags}\n\n{devices}")
}

/// What else there is to say, each on a line below the tables.
fn notes(memory: &Status) -> String {
    let (mut text, indices) = (String::new(), gpus::indices());
    if memory.host.ready_bytes > 0 {
        // What copies to files go through holds no contents once they are there.
        let used: u64 = memory.tags.iter().map(|tag| tag.host_bytes).sum();
        let _ = write!(text, "\nHost memory for backups: {} used of {}.", Bytes(used), Bytes(memory.host.ready_bytes));
        if used < memory.host.ready_bytes {
            let _ = write!(text, " The rest is ready for the next pause.");
        }
        // A suspend ends all registrations, and the resume makes them again.
        if memory.suspended.is_none() && memory.host.pinned_bytes < memory.host.ready_bytes {
            let _ = write!(text, " {} could not be pinned and is slower.", Bytes(memory.host.ready_bytes - memory.host.pinned_bytes));
        }
    }
    for device in &memory.devices {
        let index = device.uuid.as_ref().and_then(|uuid| indices.get(uuid)).copied();
        let gpu = gpu_in_words(device.device, device.uuid.as_deref(), index);
        if let Some(limit) = device.limit_bytes {
            let _ = write!(text, "\nThe limit on {gpu} is {}: {} is taken.", Bytes(limit), Bytes(device.counted_bytes));
        }
        if device.guard_bytes > 0 {
            let _ = write!(text, "\nThe guard of paused memory takes {} of {gpu}.", Bytes(device.guard_bytes));
        }
    }
    if memory.late_bytes > 0 {
        let _ = write!(text, "\nThe driver has not taken {} back yet; every pause and resume retries.", Bytes(memory.late_bytes));
    }
    for Borrowed { owner, bytes, paused_bytes, .. } in &memory.borrowed {
        let paused = if *paused_bytes > 0 { format!(", {} of it paused", Bytes(*paused_bytes)) } else { String::new() };
        let _ = write!(text, "\nOpened from process {owner}: {}{paused}.", Bytes(*bytes));
    }
    for obstacle in &memory.obstacles {
        let _ = write!(text, "\nCannot be suspended: {obstacle}.");
    }
    for why in &memory.passing_by {
        let _ = write!(text, "\nCannot be held: {why}.");
    }
    for refusal in &memory.refusals {
        let _ = write!(text, "\n{}", gpus::with_indices(&refusal.to_string()));
    }
    for left in &memory.unmanaged {
        let _ = write!(text, "\n{}: {}.", unmanaged_of(&left.owner), Bytes(left.bytes));
    }
    for growth in &memory.growing {
        let _ = write!(text, "\nA leak? {growth}.");
    }
    text
}

/// The policies that the process was started with, for tags that it has not.
fn unused_policies(pid: u32, status: &ProcessStatus) -> String {
    let [given] = proc::variables(pid, ["VRAMCTL_BACKUP"]);
    policies_without_tag(&given.unwrap_or_default(), &status.memory.tags)
}

fn policies_without_tag(given: &str, tags: &[TagStatus]) -> String {
    let known = || tags.iter().map(|tag| tag.tag.clone());
    let unused =
        given.split(',').filter_map(|policy| policy.split_once('=')).filter(|(tag, _)| !tags.is_empty() && known().all(|its| its != *tag));
    unused.fold(String::new(), |mut text, (tag, policy)| {
        let hint = target::nearest(tag, known()).map_or_else(String::new, |meant| target::did_you_mean(&meant));
        let _ = write!(text, "\nNo allocation has the tag {tag}, for which it was started with --backup {tag}={policy}{hint}");
        text
    })
}

/// The last cycles, if something grows in them or if they are wanted.
fn history_of(memory: &Status, wanted: bool) -> String {
    match memory.cycles.len() {
        0 | 1 if wanted => "\nNo history: it begins with the second pause.".into(),
        2.. if wanted || !memory.growing.is_empty() => format!("\n\n{}", cycles(&memory.cycles)),
        _ => String::new(),
    }
}

/// Each owner's memory in the last cycles.
fn cycles(cycles: &[Cycle]) -> String {
    let cycles: Vec<_> = cycles.iter().map(Cycle::owners).collect();
    let owners: BTreeSet<_> = cycles.iter().flat_map(BTreeMap::keys).collect();
    let bytes = |cycle: &BTreeMap<String, u64>, owner| cycle.get(owner).map_or_else(|| "?".to_owned(), |bytes| Bytes(*bytes).to_string());
    let rows = owners.into_iter().map(|owner| [owner.clone()].into_iter().chain(cycles.iter().map(|cycle| bytes(cycle, owner))).collect());
    let header: Vec<_> = ["OWNER".to_owned()]
        .into_iter()
        .chain((0..cycles.len()).rev().map(|back: usize| if back == 0 { "LAST PAUSE".to_owned() } else { format!("-{back}") }))
        .collect();
    output::table(&header.iter().map(String::as_str).collect::<Vec<_>>(), rows)
}

/// Progress of a pause or resume, in brackets.
pub fn come_so_far(tag: &TagStatus) -> String {
    tag.progress.map_or_else(String::new, |now: Progress| format!(" ({} {} of {})", now.stage.name(), Bytes(now.done), Bytes(now.total)))
}

fn tag_row(tag: &TagStatus) -> Vec<String> {
    let state = match tag.state {
        TagState::Mixed if tag.away_bytes == tag.paused_bytes => format!("partly away ({})", Bytes(tag.paused_bytes)),
        TagState::Mixed => format!("mixed ({} paused)", Bytes(tag.paused_bytes)),
        state if state.is_under_way() => state.name().to_owned() + &come_so_far(tag),
        _ => tag.state_in_words().to_owned(),
    };
    let backup = match tag.backup.iter().collect::<Vec<_>>()[..] {
        [(policy, _)] => policy.to_string(),
        ref several => several.iter().map(|(policy, bytes)| format!("{policy} {}", Bytes(**bytes))).collect::<Vec<_>>().join(", "),
    };
    // Discarded contents are not retained.
    let retained = if tag.retained && tag.backup.contains_key(&Policy::Host) { ", retained" } else { "" };
    let [bytes, host, disk] = [tag.bytes, tag.host_bytes, tag.disk_bytes].map(|bytes| Bytes(bytes).to_string());
    vec![tag.tag.clone(), state, bytes, tag.allocations.to_string(), backup + retained, host, disk]
}

/// A GPU has the index that `nvidia-smi` and the other commands give it: after a move, the program's own number means another. Without
/// NVML, only that is known.
fn device_row(device: &DeviceStatus, indices: &BTreeMap<String, u32>) -> Vec<String> {
    let index = device.uuid.as_ref().and_then(|uuid| indices.get(uuid));
    let or_unknown = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| Bytes(bytes).to_string());
    vec![
        index.map_or_else(|| format!("device {}", device.device), ToString::to_string),
        Bytes(device.active_bytes).to_string(),
        Bytes(device.paused_bytes).to_string(),
        or_unknown(device.free_bytes),
        or_unknown(device.total_bytes),
        device.uuid.as_deref().map_or_else(String::new, |uuid| short_uuid(uuid).to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixed_tag_shows_how_much_is_in_each_state() {
        let tag = TagStatus {
            tag: "kv".into(),
            state: TagState::Mixed,
            allocations: 2,
            bytes: 3 << 30,
            paused_bytes: 1 << 30,
            self_paused_bytes: 0,
            both_paused_bytes: 0,
            away_bytes: 0,
            host_bytes: 0,
            disk_bytes: 0,
            backup: [(Policy::Discard, 1 << 30), (Policy::Host, 2 << 30)].into(),
            retained: false,
            progress: None,
        };
        let wanted = ["kv", "mixed (1.00 GiB paused)", "3.00 GiB", "2", "discard 1.00 GiB, host 2.00 GiB", "0 B", "0 B"];
        assert_eq!(tag_row(&tag), wanted);
        assert_eq!(tag_row(&TagStatus { retained: true, ..tag })[4], "discard 1.00 GiB, host 2.00 GiB, retained");
    }

    #[test]
    fn a_policy_without_a_tag_is_shown() {
        let tags = [TagStatus { tag: "weights".into(), ..TagStatus::default() }];
        let text = policies_without_tag("weigths=disk,weights=host", &tags);
        assert_eq!(text, "\nNo allocation has the tag weigths, for which it was started with --backup weigths=disk; did you mean weights?");
        assert_eq!(
            policies_without_tag("weights=disk", &tags) + &policies_without_tag("a=host", &[]) + &policies_without_tag("disk", &tags),
            ""
        );
    }

    #[test]
    fn a_silent_driver_is_shown_as_such() {
        let device = DeviceStatus { device: 1, active_bytes: 5, total_bytes: Some(1 << 20), ..DeviceStatus::default() };
        assert_eq!(device_row(&device, &BTreeMap::new()), ["device 1", "5 B", "0 B", "?", "1.00 MiB", ""]);
        let moved = DeviceStatus { uuid: Some("GPU-x".into()), ..device };
        assert_eq!(device_row(&moved, &[("GPU-x".to_owned(), 0)].into())[0], "0");
    }
}
