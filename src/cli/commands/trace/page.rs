//! Writes a recording as a self-contained HTML page: for each GPU, a chart of each owner's memory.

use super::changes::Part;
use super::{Recorded, Recording};
use crate::commands::trace::timeline::{Ending, Stretch};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Write};
use vramctl_model::Bytes;

/// About the width of a chart in pixels.
const MOMENTS: usize = 2000;

const PAGE: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");
const CHARTS: &str = include_str!("uplot/uPlot.iife.min.js");
const CHARTS_STYLE: &str = include_str!("uplot/uPlot.min.css");
const CHARTS_LICENCE: &str = include_str!("uplot/LICENSE");

/// What the page shows.
#[derive(Debug, Serialize)]
struct PageData {
    /// Nanoseconds since 1970 would not fit into the page's numbers.
    began_at_ms: u64,
    missed: u64,
    ended: Vec<String>,
    gpus: Vec<Chart>,
    /// Pauses and resumes.
    slices: Vec<Shade>,
    failures: Vec<Cross>,
}

#[derive(Debug, Default, Serialize, PartialEq)]
struct Chart {
    name: String,
    /// The largest first.
    owners: Vec<String>,
    /// Milliseconds since the beginning.
    times: Vec<f64>,
    /// Bytes of each owner at each of them.
    bytes: Vec<Vec<u64>>,
    peaks: Vec<u64>,
}

#[derive(Debug, Serialize)]
struct Shade {
    what: String,
    verb: &'static str,
    from: f64,
    to: f64,
}

#[derive(Debug, Serialize)]
struct Cross {
    what: String,
    at: f64,
}

/// Writes the page.
pub fn write(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    // A tag may have any name, and `</script>` would end the data.
    let data = json!(shown(recording)).to_string().replace('<', "\\u003c");
    let parts = [
        ("{{style}}", CHARTS_STYLE.to_owned()),
        ("{{data}}", data),
        ("{{licence}}", CHARTS_LICENCE.to_owned()),
        ("{{charts}}", CHARTS.to_owned()),
        ("{{script}}", SCRIPT.to_owned()),
    ];
    let mut rest = PAGE;
    for (place, text) in parts {
        let (before, after) = rest.split_once(place).unwrap_or((rest, ""));
        out.write_all(before.as_bytes())?;
        out.write_all(text.as_bytes())?;
        rest = after;
    }
    out.write_all(rest.as_bytes())
}

fn shown(recording: &Recording) -> PageData {
    let begun = recording.from();
    let milliseconds = |at: u64| at.saturating_sub(begun) as f64 / 1e6;
    let mut gpus = BTreeMap::<&str, Vec<Curve>>::new();
    let (mut slices, mut failures) = (Vec::new(), Vec::new());
    for process in &recording.processes {
        for (id, history) in &process.timeline.owners {
            let name = recording.owner_on_gpu(process, *id);
            gpus.entry(process.gpu_of(*id)).or_default().push(Curve { name, steps: &history.steps });
        }
        for slice in process.timeline.slices.iter().filter(|slice| !slice.is_stage) {
            slices.push(Shade { what: text(process, slice), verb: slice.name, from: milliseconds(slice.from), to: milliseconds(slice.to) });
        }
        slices.extend(changes(recording, process, milliseconds));
        for failed in &process.timeline.failures {
            let (who, bytes) = (process.name_of(failed.owner), Bytes(failed.bytes));
            let what = format!("{process}: {bytes} for {who} failed, error {}", failed.code);
            failures.push(Cross { what, at: milliseconds(failed.at) });
        }
    }
    let to = recording.to();
    let gpus = gpus
        .into_iter()
        .map(|(name, lines)| Chart {
            name: recording.cards.get(name).map_or(name, String::as_str).to_owned(),
            ..chart(lines, begun, to, MOMENTS)
        })
        .collect();
    let missed = recording.processes.iter().map(|process| process.timeline.missed).sum();
    PageData { began_at_ms: recording.unix_from() / 1_000_000, missed, ended: recording.ended(), gpus, slices, failures }
}

/// The changes of places in which a process gave way.
fn changes(recording: &Recording, process: &Recorded, milliseconds: impl Fn(u64) -> f64) -> Vec<Shade> {
    let parts = recording.changes.iter().filter_map(|change| change.part(&process.name));
    let shade = |part: Part| {
        let why = part.why?;
        let [from, to] = [part.from, part.to.unwrap_or(u64::MAX)].map(|at| at.saturating_sub(process.epoch).min(process.timeline.to));
        let to_whom = if part.others.is_empty() { String::new() } else { format!(" to {}", part.others.join(", ")) };
        let outcome = match part.outcome {
            "" => ", under way".to_owned(),
            "changed" => String::new(),
            other => format!(", {other}{}", part.failure.map_or_else(String::new, |why| format!(": {why}"))),
        };
        let what = format!("{process} gives way{to_whom} ({why}): {} in {:.0} ms{outcome}", Bytes(part.bytes), (to - from) as f64 / 1e6);
        (from >= recording.from()).then(|| Shade { what, verb: "change", from: milliseconds(from), to: milliseconds(to) })
    };
    parts.filter_map(shade).collect()
}

fn text(process: &Recorded, slice: &Stretch) -> String {
    let verb = slice.name;
    match slice.outcome {
        Ending::Done => {
            let took = slice.to.saturating_sub(slice.from) as f64 / 1e6;
            format!("{process}: {verb} of {}{} in {took:.0} ms", Bytes(slice.bytes), of_each(process, slice))
        }
        Ending::Failed(error) => format!("{process}: {verb} failed: {}", json!(error).as_str().unwrap_or_default()),
        Ending::UnderWay => format!("{process}: {verb}, under way"),
    }
}

/// Of which tags the memory was, the largest first.
fn of_each(process: &Recorded, slice: &Stretch) -> String {
    let mut owners: Vec<_> = slice.owners.iter().collect();
    owners.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
    let names: Vec<_> = match owners[..] {
        [(owner, _)] => vec![process.name_of(*owner)],
        _ => owners.iter().map(|(owner, bytes)| format!("{} {}", process.name_of(**owner), Bytes(**bytes))).collect(),
    };
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

/// One owner's memory over time.
#[derive(Debug)]
struct Curve<'a> {
    name: String,
    steps: &'a [(u64, u64)],
}

/// All owners' bytes at the moments of a chart. If there are more changes than moments, time is divided into intervals; each shows the
/// moment with the largest total and the last one. So every shown value is real, and no peak is lost.
fn chart(mut lines: Vec<Curve>, from: u64, to: u64, moments: usize) -> Chart {
    lines.retain(|line| line.steps.iter().any(|(_, bytes)| *bytes > 0));
    let peak = |line: &Curve| line.steps.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default();
    lines.sort_by_key(|line| std::cmp::Reverse(peak(line)));
    let mut changes: Vec<(u64, usize, u64)> =
        lines.iter().enumerate().flat_map(|(line, of)| of.steps.iter().map(move |(at, bytes)| (*at, line, *bytes))).collect();
    changes.sort_by_key(|(at, ..)| *at);
    let piece = |at: u64| (u128::from(at - from) * moments as u128 / u128::from((to - from).max(1))) as u64;
    let keeps_all = changes.len() <= 2 * moments;

    let mut gpu = Chart { owners: lines.iter().map(|line| line.name.clone()).collect(), ..Chart::default() };
    gpu.peaks = lines.iter().map(peak).collect();
    gpu.bytes = vec![Vec::new(); lines.len()];
    let mut put = |at: u64, state: &[u64]| {
        gpu.times.push((at - from) as f64 / 1e6);
        gpu.bytes.iter_mut().zip(state).for_each(|(all, bytes)| all.push(*bytes));
    };
    let mut state = vec![0; lines.len()];
    let mut most: Option<(u64, u64, Vec<u64>)> = None;
    put(from, &state);
    for (place, (at, line, bytes)) in changes.iter().copied().enumerate() {
        state[line] = bytes;
        let next = changes.get(place + 1).map(|(at, ..)| *at);
        if next == Some(at) {
            // Of several changes at one moment, only the final state counts.
            continue;
        }
        let total = state.iter().sum();
        if most.as_ref().is_none_or(|(before, ..)| total > *before) {
            most = Some((total, at, state.clone()));
        }
        if keeps_all || next.is_none_or(|next| piece(next) != piece(at)) {
            if let Some((_, then, highest)) = most.take().filter(|(_, then, _)| *then != at) {
                put(then, &highest);
            }
            put(at, &state);
        }
    }
    put(to, &state);
    gpu
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line<'a>(name: &str, steps: &'a [(u64, u64)]) -> Curve<'a> {
        Curve { name: name.into(), steps }
    }

    #[test]
    fn owners_are_stacked_at_real_moments() {
        let (a, b) = ([(1_000_000, 5), (3_000_000, 0)], [(1_000_000, 2), (2_000_000, 9)]);
        let gpu = chart(vec![line("a", &a), line("b", &b), line("nothing", &[(0, 0)])], 0, 4_000_000, 100);
        assert_eq!(gpu.owners, ["b", "a"]);
        assert_eq!(gpu.peaks, [9, 5]);
        assert_eq!(gpu.times, [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(gpu.bytes, [[0, 2, 9, 9, 9], [0, 5, 5, 0, 0]]);
    }

    #[test]
    fn a_long_recording_keeps_its_peaks() {
        let steps: Vec<_> = (0..100_000_u64).map(|at| (at, if at == 77_777 { 1_000 } else { at % 7 })).collect();
        let gpu = chart(vec![line("a", &steps)], 0, 100_000, 50);
        assert!(gpu.times.len() <= 2 * 50 + 3, "{}", gpu.times.len());
        assert!(gpu.times.is_sorted());
        assert_eq!(gpu.bytes[0].iter().max(), Some(&1_000));
        assert_eq!(gpu.bytes[0].last(), Some(&(99_999 % 7)));
        let at = gpu.bytes[0].iter().position(|bytes| *bytes == 1_000).unwrap();
        assert!((gpu.times[at] - 0.077_777).abs() < 1e-9);
    }

    #[test]
    fn an_empty_recording_is_a_chart_without_owners() {
        assert_eq!(chart(Vec::new(), 5, 5, 10), Chart { times: vec![0.0, 0.0], ..Chart::default() });
    }
}
