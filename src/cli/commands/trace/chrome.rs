//! A recording in Chrome's trace format, which Perfetto opens: a counter for each owner, pauses and resumes as slices, failures as
//! instants.

use super::changes::Part;
use super::timeline::{Ending, Stretch};
use super::{Recorded, Recording};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Writes the trace. Times are microseconds since the recording's first moment.
pub fn write(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    let begun = recording.from();
    writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", about(recording))?;
    let mut is_first = true;
    let mut put = |event: Value| {
        let separator = if std::mem::take(&mut is_first) { "" } else { ",\n" };
        write!(out, "{separator}{event}")
    };
    for process in &recording.processes {
        let pid = process.pid;
        let named =
            |name: &str, tid: u32, value: &str| json!({"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": name, "args": {"name": value}});
        put(named("process_name", 0, &format!("{} ({pid})", process.name)))?;
        let mut threads: Vec<_> = process.timeline.slices.iter().map(|slice| slice.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        for thread in threads {
            put(named("thread_name", thread, "pauses and resumes"))?;
        }
        let changes = changes(recording, process, begun);
        if !changes.is_empty() {
            put(named("thread_name", OF_CHANGES, "changes of places"))?;
        }
        for event in events(process, begun).into_iter().chain(changes) {
            put(event)?;
        }
    }
    writeln!(out, "\n]}}")
}

fn about(recording: &Recording) -> Value {
    let missed: u64 = recording.processes.iter().map(|process| process.timeline.missed).sum();
    json!({"made by": concat!("vramctl ", env!("CARGO_PKG_VERSION")), "began at, nanoseconds since 1970": recording.unix_from(), "missed events": missed})
}

/// All events of a process, by time.
fn events(process: &Recorded, begun: u64) -> Vec<Value> {
    let microseconds = |at: u64| at.saturating_sub(begun) as f64 / 1e3;
    let (pid, timeline) = (process.pid, &process.timeline);
    let mut all = Vec::new();
    for (id, history) in &timeline.owners {
        let name = process.name_of(*id);
        let last = history.steps.last().map(|(_, bytes)| (timeline.to, *bytes));
        for (at, bytes) in history.steps.iter().copied().chain(last) {
            all.push((at, json!({"ph": "C", "ts": microseconds(at), "pid": pid, "name": name, "args": {"bytes": bytes}})));
        }
    }
    for slice in &timeline.slices {
        let duration = (slice.to - slice.from) as f64 / 1e3;
        let category = if slice.is_stage { "stage" } else { "transition" };
        let event = json!({
            "ph": "X", "ts": microseconds(slice.from), "dur": duration, "pid": pid, "tid": slice.thread, "name": slice.name,
            "cat": category, "args": arguments_of(process, slice),
        });
        all.push((slice.from, event));
    }
    for failed in &timeline.failures {
        let arguments = json!({"owner": process.name_of(failed.owner), "bytes": failed.bytes, "code": failed.code});
        let event = json!({
            "ph": "i", "s": "p", "ts": microseconds(failed.at), "pid": pid, "tid": 0, "name": "failed allocation", "args": arguments,
        });
        all.push((failed.at, event));
    }
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, event)| event).collect()
}

/// No thread of a process has this number.
const OF_CHANGES: u32 = 0;

/// The changes of places in which a process gave way, or came, since the recording's first moment.
fn changes(recording: &Recording, process: &Recorded, begun: u64) -> Vec<Value> {
    let parts = recording.changes.iter().filter_map(|change| change.part(&process.name));
    let event = |part: Part| {
        let [from, to] = [part.from, part.to.unwrap_or(u64::MAX)].map(|at| at.saturating_sub(process.epoch).min(process.timeline.to));
        let outcome = if part.outcome.is_empty() { "under way" } else { part.outcome };
        let mut arguments = json!({"bytes": part.bytes, "outcome": outcome});
        let whom = if part.why.is_some() { "to" } else { "in place of" };
        let others = (!part.others.is_empty()).then(|| part.others.join(", "));
        for (key, value) in [(whom, others.as_deref()), ("why", part.why), ("failure", part.failure)] {
            if let Some(value) = value {
                arguments[key] = json!(value);
            }
        }
        let (ts, dur) = (from.saturating_sub(begun) as f64 / 1e3, to.saturating_sub(from) as f64 / 1e3);
        let name = part.what;
        (from >= begun).then(|| {
            json!({"ph": "X", "ts": ts, "dur": dur, "pid": process.pid, "tid": OF_CHANGES, "name": name, "cat": "change", "args": arguments})
        })
    };
    parts.filter_map(event).collect()
}

fn arguments_of(process: &Recorded, slice: &Stretch) -> Value {
    match slice.outcome {
        Ending::Done if slice.is_stage => json!({}),
        Ending::Done if slice.owners.is_empty() => json!({"bytes": slice.bytes}),
        Ending::Done => {
            let tags: BTreeMap<_, _> = slice.owners.iter().map(|(owner, bytes)| (process.name_of(*owner), *bytes)).collect();
            json!({"bytes": slice.bytes, "tags": tags})
        }
        Ending::Failed(error) => json!({"error": error}),
        Ending::UnderWay => json!({"under way": true}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::trace::follow::Followed;
    use vramctl_model::{Happening, MemoryOwner, OwnersBytes, TraceEvent, Verb};

    #[test]
    fn failures_are_instants_and_unfinished_transitions_slices_to_the_end() {
        let (owner, bytes, thread) = (7, 64, 5);
        let all = [
            Happening::Allocated(OwnersBytes { owner, bytes, in_use: 64 }),
            Happening::Failed { owner, bytes: 99, code: 2 },
            Happening::Began { verb: Verb::Resume, thread },
        ];
        let events = (0..).zip(all).map(|(number, what)| TraceEvent { number, at_ns: 1_000 * (number + 1), what });
        let kv = MemoryOwner { owner, tag: Some("kv".into()), library: None, device: Some(0), gpu: None, in_use: 64 };
        let followed = Followed {
            pid: 4,
            name: "engine".into(),
            events: events.collect(),
            owners: [(owner, kv)].into(),
            now_ns: 10_000,
            is_on: true,
            ..Followed::default()
        };
        let mut out = Vec::new();
        write(&Recording::of(&[followed]), &mut out).unwrap();
        let trace: Value = serde_json::from_slice(&out).unwrap();
        let find = |phase: &str| trace["traceEvents"].as_array().unwrap().iter().find(|event| event["ph"] == phase).unwrap().clone();
        let failed = find("i");
        assert_eq!((&failed["ts"], &failed["args"]), (&json!(1.0), &json!({"owner": "kv", "bytes": 99, "code": 2})));
        let resume = find("X");
        assert_eq!((&resume["ts"], &resume["dur"], &resume["args"]), (&json!(2.0), &json!(7.0), &json!({"under way": true})));
        let last = trace["traceEvents"].as_array().unwrap().iter().rfind(|event| event["ph"] == "C").unwrap();
        assert_eq!((&last["ts"], &last["args"]), (&json!(9.0), &json!({"bytes": 64})));
    }
}
