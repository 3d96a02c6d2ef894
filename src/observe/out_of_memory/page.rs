//! The page: what is known about an episode, for people and as JSON. `docs/out-of-memory.md` describes both.

use super::others::{self, Neighbour};
use super::same;
use super::scene::{self, DeviceRoom, Placed, Scene};
use crate::trace;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, UNIX_EPOCH};
use vramctl_backup as backup;
use vramctl_config::Config;
use vramctl_core::events::Cause;
use vramctl_core::{cache, engine, gate};
use vramctl_model::{Bytes, Events, Happening, HostStatus, OverLimit, OwnersBytes, is_zero, unmanaged_of};

/// Changes if readers would misunderstand a new page.
const VERSION: u32 = 1;

/// How many groups of the largest blocks the file lists, and how many lines of the page have one of their own.
const LARGEST: usize = 30;
const LINES: usize = 10;

/// How far back the events go, and the most of them.
const LAST: Duration = Duration::from_secs(60);
const MOST_EVENTS: usize = 4096;

/// A report.
#[derive(Debug, Serialize)]
pub struct ReportPage {
    version: u32,
    /// Seconds since 1970.
    pub time: f64,
    /// The failure in one sentence.
    headline: String,
    process: Own,
    request: Failed,
    thread: ThreadName,
    /// The last call first.
    python_stack: Vec<String>,
    native_stack: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<RoomOn>,
    /// What is in use on the device, the largest first. The last row is the rest.
    in_use: Vec<Row>,
    /// This process's largest blocks, by where they were asked for.
    largest: Vec<Group>,
    /// All its blocks, by line of the program.
    #[serde(skip)]
    lines: Vec<ProgramLine>,
    /// This process's paused memory, which uses no device memory now.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    paused: BTreeMap<String, u64>,
    host: HostStatus,
    could_be_freed: Vec<Way>,
    /// The events of the last minute, if the process records them (`VRAMCTL_TRACE`); their number is limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<Events>,
    /// The time that they cover.
    #[serde(skip_serializing_if = "Option::is_none")]
    events_seconds: Option<f64>,
    /// Failures since the previous page that got no page.
    #[serde(skip_serializing_if = "is_zero")]
    unreported: u64,
}

/// This process.
#[derive(Debug, Serialize)]
struct Own {
    pid: u32,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    program: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<String>,
}

#[derive(Debug, Serialize)]
struct Failed {
    bytes: u64,
    /// Absent if the memory was left to CUDA.
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    library: &'static str,
    /// `driver`, `margin`, `limit` or `resume`.
    refused_by: &'static str,
    /// The driver's function, if the library has called it.
    #[serde(skip_serializing_if = "Option::is_none")]
    call: Option<&'static str>,
    #[serde(skip_serializing_if = "is_zero")]
    margin_bytes: u64,
    /// If the limit has refused it: the limit, and what is taken of it, by the context among others.
    #[serde(skip_serializing_if = "is_zero")]
    limit_bytes: u64,
    #[serde(skip_serializing_if = "is_zero")]
    counted_bytes: u64,
    #[serde(skip_serializing_if = "is_zero")]
    context_bytes: u64,
    attempts: u32,
    /// Bytes that the program has freed since the first attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    freed_since_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct ThreadName {
    id: u32,
    name: String,
}

#[derive(Debug, Serialize)]
struct RoomOn {
    /// The ordinal in the process.
    device: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// In `nvidia-smi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    free_bytes: u64,
    total_bytes: u64,
}

/// Memory in use.
#[derive(Debug, Serialize)]
struct Row {
    /// `tag`, `unmanaged`, `process` or `rest`.
    what: &'static str,
    /// The tag, the library, or the process's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    of: String,
    /// For a process: its bytes by tag.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tags: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    bytes: u64,
}

/// Blocks from one place.
#[derive(Debug, Serialize)]
struct Group {
    bytes: u64,
    blocks: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<&'static str>,
    /// Where in the program, in a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    python_stack: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    native_stack: Vec<String>,
}

/// The blocks of one line of the program, whichever way torch took from there.
#[derive(Debug)]
struct ProgramLine {
    bytes: u64,
    blocks: u64,
    tag: Option<String>,
    library: Option<&'static str>,
    at: Option<String>,
}

/// Something that would free memory on the device.
#[derive(Debug, Serialize)]
struct Way {
    bytes: u64,
    command: String,
    /// Whether that would have been enough.
    is_enough: bool,
    note: &'static str,
}

impl ReportPage {
    /// Asks the others on the GPU, and looks names up.
    pub fn of(mut scene: Scene, attempts: u32, unreported: u64) -> Self {
        let note_index = scene.ask_for_index();
        let gpu = scene.room.as_ref().and_then(|room| room.uuid.as_deref());
        let own_cached = gpu.map_or(0, |gpu| cached_on(gpu, attempts > 1 && scene::is_tried_again(&scene.asked)));
        let neighbours = gpu.map(others::on_gpu).unwrap_or_default();
        // A tenth of a second: the failed call waits for the page.
        note_index(&mut scene, same() / 10);
        let own = Own::now();
        let request = Failed::of(&scene, attempts);
        let (events, covered) = trace::last(LAST, MOST_EVENTS).unzip();
        let mut largest = groups(&scene.blocks);
        let lines = by_line(&largest);
        largest.truncate(LARGEST);
        Self {
            version: VERSION,
            time: scene.when.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            headline: scene.headline(),
            request,
            thread: ThreadName { id: scene.thread, name: scene.thread_name.clone() },
            python_stack: scene.stack.python().to_vec(),
            native_stack: scene.stack.native().into_iter().skip_while(|frame| frame.starts_with("libvramctl")).collect(),
            in_use: rows(&scene, &neighbours),
            largest,
            lines,
            paused: scene.tags.iter().filter(|(_, share)| share.paused > 0).map(|(tag, share)| (tag.to_string(), share.paused)).collect(),
            host: backup::status(),
            events,
            events_seconds: covered.map(|covered: Duration| covered.as_secs_f64()),
            could_be_freed: ways(&scene, &neighbours, &own, own_cached),
            device: scene.room.map(|DeviceRoom { device, uuid, index, free, total }| RoomOn {
                device,
                uuid,
                index,
                free_bytes: free,
                total_bytes: total,
            }),
            process: own,
            unreported,
        }
    }
}

impl Own {
    fn now() -> Self {
        Self {
            pid: std::process::id(),
            name: engine::process_name(),
            job: Config::get().job.clone(),
            program: engine::program(),
            engine: engine::name(),
        }
    }
}

impl Failed {
    fn of(scene: &Scene, attempts: u32) -> Self {
        let (refused_by, call) = match scene.asked.cause {
            Cause::Refused(call) => ("driver", call),
            Cause::Margin => ("margin", None),
            Cause::Limit(_) => ("limit", None),
            Cause::Resume(_) => ("resume", None),
        };
        let (limit_bytes, counted_bytes, context_bytes) = match &scene.asked.cause {
            Cause::Limit(over) => (over.limit, over.counted, over.context),
            _ => (0, 0, 0),
        };
        Self {
            bytes: scene.asked.bytes,
            tag: scene.asked.tag.as_deref().map(str::to_owned),
            library: scene.asked.library,
            refused_by,
            call,
            margin_bytes: scene.margin,
            limit_bytes,
            counted_bytes,
            context_bytes,
            attempts,
            freed_since_bytes: scene.freed_since,
        }
    }
}

fn rows(scene: &Scene, neighbours: &[Neighbour]) -> Vec<Row> {
    let row = |what, of: &str, bytes| Row { what, of: of.to_owned(), tags: BTreeMap::new(), pid: None, bytes };
    let tags = scene.tags.iter().filter(|(_, share)| share.active > 0).map(|(tag, share)| row("tag", tag, share.active));
    let unmanaged = scene.unmanaged.iter().map(|(owner, bytes)| row("unmanaged", owner, *bytes));
    let of_neighbour =
        |one: &Neighbour| Row { tags: one.tags.clone(), pid: Some(one.pid), ..row("process", &one.name, one.active() + one.unmanaged) };
    let mut rows: Vec<_> = tags.chain(unmanaged).chain(neighbours.iter().map(of_neighbour)).collect();
    if let Cause::Resume(holders) = &scene.asked.cause {
        let unknown = holders.iter().filter(|holder| neighbours.iter().all(|one| one.pid != holder.pid));
        rows.extend(unknown.filter_map(|holder| {
            let name = holder.program.as_deref().unwrap_or_default();
            Some(Row { pid: Some(holder.pid), ..row("process", name, holder.bytes?) })
        }));
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    if let Some(room) = &scene.room {
        let known: u64 = rows.iter().map(|row| row.bytes).sum();
        let rest = room.total.saturating_sub(room.free).saturating_sub(known);
        rows.push(row("rest", "", rest));
    }
    rows
}

/// All blocks, the largest groups first. Only the first have native calls, whose names take long to find.
fn groups(blocks: &[Placed]) -> Vec<Group> {
    let mut groups: BTreeMap<_, (u64, u64)> = BTreeMap::new();
    for Placed { bytes, tag, requester } in blocks {
        let library = requester.as_ref().map(|requester| requester.library);
        let stack = requester.as_ref().and_then(|requester| requester.stack.as_ref());
        // Without a stack, only blocks of one size are assumed to come from one place.
        let size = if stack.is_none() { *bytes } else { 0 };
        let (all_bytes, number) = groups.entry((tag, library, stack, size)).or_default();
        *all_bytes += bytes;
        *number += 1;
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    let groups = groups.into_iter().enumerate().map(|(place_in_list, ((tag, library, stack, _), (bytes, blocks)))| {
        let python = stack.map_or_else(Vec::new, |stack| stack.python().to_vec());
        let native = stack.filter(|_| place_in_list < LARGEST).map_or_else(Vec::new, |stack| stack.native());
        Group {
            bytes,
            blocks,
            tag: tag.as_ref().map(ToString::to_string),
            library,
            at: place(&python, &native).map(str::to_owned),
            python_stack: python,
            native_stack: native,
        }
    });
    groups.collect()
}

fn by_line(groups: &[Group]) -> Vec<ProgramLine> {
    let mut lines: Vec<ProgramLine> = Vec::new();
    for Group { bytes, blocks, tag, library, at, .. } in groups {
        match at
            .as_ref()
            .and_then(|_| lines.iter_mut().find(|line: &&mut ProgramLine| (&line.tag, line.library, &line.at) == (tag, *library, at)))
        {
            Some(line) => (line.bytes, line.blocks) = (line.bytes + bytes, line.blocks + blocks),
            None => lines.push(ProgramLine { bytes: *bytes, blocks: *blocks, tag: tag.clone(), library: *library, at: at.clone() }),
        }
    }
    lines.sort_by_key(|line| std::cmp::Reverse(line.bytes));
    lines
}

/// The most informative call: the innermost Python call that is neither torch's nor ours, else the innermost native one outside CUDA and
/// torch's allocator.
fn place<'a>(python: &'a [String], native: &'a [String]) -> Option<&'a str> {
    let is_own = |frame: &&String| {
        let (file, _) = frame.rsplit_once(':').unwrap_or((frame, ""));
        !["/torch/", "/vramctl/", "/contextlib.py"].iter().any(|part| file.contains(part))
    };
    let is_informative =
        |frame: &&String| !["libc10", "libcuda", "libvramctl", "libtorch_memory_saver"].iter().any(|part| frame.starts_with(part));
    let (python, native) = (python.iter().find(is_own).or(python.first()), native.iter().find(is_informative).or(native.first()));
    python.or(native).map(String::as_str)
}

/// What this program's own allocator, such as torch's, could return. 0 if it does not answer soon. `has_emptied`: it has just returned all.
fn cached_on(gpu: &str, has_emptied: bool) -> u64 {
    /// Short: together with the other processes' answers, it must end before the failed call stops waiting. That call may hold a lock that
    /// the allocator needs in order to answer.
    const WITHIN: Duration = Duration::from_millis(75);
    // A held program refuses to trim.
    if has_emptied || gate::is_held() {
        return 0;
    }
    let parts = cache::ask(WITHIN).unwrap_or_default();
    parts.iter().filter(|part| part.gpu.as_deref() == Some(gpu)).map(|part| part.cached_bytes).sum()
}

fn ways(scene: &Scene, neighbours: &[Neighbour], own: &Own, own_cached: u64) -> Vec<Way> {
    const CACHED: &str = "it keeps running; its allocator has this much cached";
    let short = match &scene.asked.cause {
        Cause::Limit(OverLimit { needed, limit, counted, .. }) => (needed + counted).saturating_sub(*limit),
        cause => {
            let margin = if matches!(cause, Cause::Margin) { scene.margin } else { 0 };
            (scene.asked.bytes + margin).saturating_sub(scene.room.as_ref().map_or(0, |room| room.free))
        }
    };
    let way = |bytes, command, note| Way { bytes, command, is_enough: bytes >= short, note };
    let trims = (own_cached > 0).then(|| way(own_cached, format!("vramctl trim --pid {}", own.pid), CACHED));
    // What is paused or others' makes no room within the limit.
    if matches!(scene.asked.cause, Cause::Limit(_)) {
        return trims.into_iter().collect();
    }
    // Skip the requested tag: the program is using it.
    let asked_for = scene.asked.tag.as_deref().unwrap_or_default();
    let idle = scene.tags.iter().filter(|(tag, share)| share.active > 0 && (scene.asked.cause.is_resume() || ***tag != *asked_for));
    let mut ways: Vec<_> = idle
        .map(|(tag, share)| {
            let command = format!("vramctl pause --no-hold --pid {} {}", own.pid, quoted(tag));
            way(share.active, command, "the program must not use it meanwhile")
        })
        .collect();
    ways.extend(trims);
    // `--name` pauses all processes with that name, so a process with this one's name is selected by its pid.
    let mut others = BTreeMap::<String, (u64, u64)>::new();
    for one in neighbours {
        let who = if one.name == own.name { format!("--pid {}", one.pid) } else { format!("--name {}", quoted(&one.name)) };
        let (active, cached) = others.entry(who).or_default();
        *active += one.active();
        *cached += one.cached;
    }
    for (who, (active, cached)) in others {
        if active > 0 {
            ways.push(way(active, format!("vramctl pause {who}"), "it is held until it is resumed"));
        }
        if cached > 0 {
            ways.push(way(cached, format!("vramctl trim {who}"), CACHED));
        }
    }
    ways.sort_by_key(|way| std::cmp::Reverse(way.bytes));
    ways
}

/// The owners whose memory has changed over these events, the largest change first.
fn changes(events: &Events) -> Vec<String> {
    let mut owners = BTreeMap::<u16, i64>::new();
    for event in &events.events {
        let (owner, bytes) = match event.what {
            Happening::Allocated(OwnersBytes { owner, bytes, .. }) | Happening::Resumed(OwnersBytes { owner, bytes, .. }) => {
                (owner, bytes as i64)
            }
            Happening::Freed(OwnersBytes { owner, bytes, .. }) | Happening::Paused(OwnersBytes { owner, bytes, .. }) => {
                (owner, -(bytes as i64))
            }
            _ => continue,
        };
        *owners.entry(owner).or_default() += bytes;
    }
    let mut changes: Vec<_> = owners.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    changes.sort_by_key(|(_, bytes)| std::cmp::Reverse(bytes.unsigned_abs()));
    changes
        .into_iter()
        .map(|(owner, bytes): (u16, i64)| {
            let owner = events.owners.iter().find(|known| known.owner == owner);
            let tag = owner.and_then(|owner| owner.tag.as_ref()).map(|tag| format!("tag {tag}"));
            let name = tag.or_else(|| owner?.library.clone()).unwrap_or_else(|| "others".to_owned());
            format!("{name} {}{}", if bytes > 0 { '+' } else { '−' }, Bytes(bytes.unsigned_abs()))
        })
        .collect()
}

/// For a shell.
fn quoted(word: &str) -> String {
    if !word.is_empty() && !word.starts_with('-') && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:@%+".contains(c)) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

impl ReportPage {
    fn write_request(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The file has all of them.
        const FRAMES: usize = 12;
        let Failed { refused_by, call, attempts, freed_since_bytes, margin_bytes, limit_bytes, counted_bytes, context_bytes, .. } =
            &self.request;
        writeln!(out, "{}", self.headline)?;
        let ThreadName { id, name } = &self.thread;
        write!(out, "  In thread {id} ({name}); refused by ")?;
        match (*refused_by, call) {
            ("margin", _) => write!(out, "the memory margin of {}", Bytes(*margin_bytes))?,
            ("limit", _) => write!(
                out,
                "the limit of {}, not by the GPU; {} of it is taken, {} by the context",
                Bytes(*limit_bytes),
                Bytes(*counted_bytes),
                Bytes(*context_bytes)
            )?,
            ("resume", _) => write!(out, "the check before the resume, or the driver during it")?,
            (_, Some(call)) => write!(out, "the driver's {call}")?,
            _ => write!(out, "the driver")?,
        }
        match (attempts, freed_since_bytes) {
            (1, _) => writeln!(out)?,
            (_, Some(freed)) => writeln!(out, ", in {attempts} attempts; {} was freed in between", Bytes(*freed))?,
            (_, None) => writeln!(out, ", in {attempts} attempts")?,
        }
        if self.unreported > 0 {
            writeln!(out, "  Other requests that have failed since the last report: {}", self.unreported)?;
        }
        for (what, stack) in [("Python", &self.python_stack), ("Native", &self.native_stack)] {
            if !stack.is_empty() {
                writeln!(out, "  {what} calls, most recent first:")?;
                stack.iter().take(FRAMES).try_for_each(|frame| writeln!(out, "    {frame}"))?;
            }
            if stack.len() > FRAMES {
                writeln!(out, "    … and {} more", stack.len() - FRAMES)?;
            }
        }
        Ok(())
    }

    fn write_in_use(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An empty rest only makes the rows add up in the file.
        let mut rows = self.in_use.iter().filter(|row| row.what != "rest" || row.bytes > 0).peekable();
        match (rows.peek(), &self.device) {
            (Some(_), _) => writeln!(out, "  In use on the device:")?,
            (None, Some(_)) => writeln!(out, "  Nothing is in use on the device")?,
            (None, None) => writeln!(out, "  What is in use on the device is unknown: this thread cannot ask the driver")?,
        }
        for Row { what, of, tags, pid, bytes } in rows {
            let bytes = Bytes(*bytes).to_string();
            match *what {
                "tag" => writeln!(out, "    {bytes:>11}  tag {of}")?,
                "unmanaged" => writeln!(out, "    {bytes:>11}  {}", unmanaged_of(of))?,
                "process" => {
                    let tags: Vec<_> = tags.iter().map(|(tag, bytes)| format!("{tag} {}", Bytes(*bytes))).collect();
                    let tags = if tags.is_empty() { String::new() } else { format!(": {}", tags.join(", ")) };
                    writeln!(out, "    {bytes:>11}  process {} ({of}){tags}", pid.unwrap_or_default())?;
                }
                // Asking NVML who they are is not for a program's own process.
                _ => writeln!(
                    out,
                    "    {bytes:>11}  everything else: contexts, loaded code, small allocations, processes without the library \
                     (`vramctl gpus`)"
                )?,
            }
        }
        Ok(())
    }

    fn write_largest(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, rest) = self.lines.split_at(self.lines.len().min(LINES));
        let count = |blocks| if blocks == 1 { String::new() } else { format!(" in {blocks} blocks") };
        if !first.is_empty() {
            writeln!(out, "  This process's largest blocks:")?;
        }
        for ProgramLine { bytes, blocks, tag, library, at } in first {
            let whose = match (tag, library) {
                (Some(tag), Some(library)) => format!("tag {tag}, {library}"),
                (Some(tag), None) => format!("tag {tag}"),
                (None, library) => unmanaged_of(library.unwrap_or("unknown")),
            };
            let at = at.as_ref().map_or_else(String::new, |at| format!(", {at}"));
            writeln!(out, "    {:>11}{}  {whose}{at}", Bytes(*bytes).to_string(), count(*blocks))?;
        }
        if !rest.is_empty() {
            let (bytes, blocks) = rest.iter().fold((0, 0), |(bytes, blocks), line| (bytes + line.bytes, blocks + line.blocks));
            writeln!(out, "    {:>11}{}  all others", Bytes(bytes).to_string(), count(blocks))?;
        }
        Ok(())
    }

    fn write_ways(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_limit = self.request.refused_by == "limit";
        if is_limit {
            writeln!(
                out,
                "  Paused memory counts, too. Have the program use less, or start it with a higher limit (--limit, VRAMCTL_LIMIT)"
            )?;
        }
        if self.could_be_freed.is_empty() {
            // The other programs were asked only if the device is known.
            let is_known = self.device.as_ref().is_some_and(|device| device.uuid.is_some());
            let nothing = "Nothing can be paused to make room: no other program with the library has memory here. \
                           `vramctl gpus` shows who uses the rest";
            return if is_known && !is_limit { writeln!(out, "  {nothing}") } else { Ok(()) };
        }
        writeln!(out, "  Could be freed:")?;
        for Way { bytes, command, is_enough, note } in &self.could_be_freed {
            let enough = if *is_enough { "enough; " } else { "" };
            writeln!(out, "    {:>11}  {command}  ({enough}{note})", Bytes(*bytes).to_string())?;
        }
        Ok(())
    }
}

impl fmt::Display for ReportPage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_request(out)?;
        self.write_in_use(out)?;
        if !self.paused.is_empty() {
            let paused: Vec<_> = self.paused.iter().map(|(tag, bytes)| format!("{tag} {}", Bytes(*bytes))).collect();
            writeln!(out, "  Paused, so not in use: {}", paused.join(", "))?;
        }
        self.write_largest(out)?;
        let changes = self.events.as_ref().map(changes).unwrap_or_default();
        if !changes.is_empty() {
            let within = match self.events_seconds {
                Some(seconds) if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
                Some(seconds) if seconds < LAST.as_secs_f64() => format!("{seconds:.1} s"),
                _ => "minute".to_owned(),
            };
            writeln!(out, "  Changes in the last {within}: {}", changes.join(", "))?;
        }
        if self.host.used_bytes > 0 {
            writeln!(out, "  Backups take {} of host memory", Bytes(self.host.used_bytes))?;
        }
        self.write_ways(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vramctl_core::events::FailedRequest;
    use vramctl_core::memory::Requester;
    use vramctl_host::stack::Stack;

    fn frames(list: &[&str]) -> Vec<String> {
        list.iter().map(|frame| (*frame).to_owned()).collect()
    }

    #[test]
    fn the_place_of_a_block_is_the_programs_own_line() {
        let python =
            frames(&["/lib/site-packages/torch/nn/functional.py:12 in linear", "/app/train.py:7 in logits", "/app/train.py:90 in main"]);
        let native = frames(&["libc10_cuda.so+0x12 alloc", "libtorch_cpu.so+0x34 at::empty", "python3+0x1"]);
        assert_eq!(place(&python, &native), Some("/app/train.py:7 in logits"));
        assert_eq!(
            place(&python[..1], &native),
            Some("/lib/site-packages/torch/nn/functional.py:12 in linear"),
            "torch's, if there is no other"
        );
        assert_eq!(place(&[], &native), Some("libtorch_cpu.so+0x34 at::empty"));
        assert_eq!(place(&[], &native[..1]), Some("libc10_cuda.so+0x12 alloc"));
        assert_eq!(place(&[], &[]), None);
    }

    #[test]
    fn blocks_from_one_place_are_grouped_with_the_largest_first() {
        const MIB: u64 = 1 << 20;
        let here = Arc::new(Stack::here(8, 0));
        let there = Arc::new(Stack::here(4, 0));
        let at = |stack: &Arc<Stack>| Some(Requester { library: "libc10_cuda.so", stack: Some(Arc::clone(stack)) });
        let block = |mib: u64, tag: Option<&str>, requester| Placed { bytes: mib * MIB, tag: tag.map(Into::into), requester };
        let mut blocks = vec![
            block(100, Some("default"), at(&here)),
            block(150, Some("default"), at(&there)),
            block(90, Some("default"), at(&here)),
            block(70, None, Some(Requester::of("libnccl.so.2"))),
        ];
        blocks.extend((0..40).map(|_| block(20, Some("default"), Some(Requester::of("libc10_cuda.so")))));
        let found: Vec<_> = groups(&blocks).into_iter().map(|group| (group.bytes / MIB, group.blocks, group.tag)).collect();
        let tag = Some("default".to_owned());
        assert_eq!(found, [(800, 40, tag.clone()), (190, 2, tag.clone()), (150, 1, tag), (70, 1, None)]);
    }

    #[test]
    fn the_page_has_one_line_for_each_line_of_the_program() {
        let group = |bytes, blocks, tag: &str, at: Option<&str>| Group {
            bytes,
            blocks,
            tag: Some(tag.into()),
            library: Some("libc10_cuda.so"),
            at: at.map(Into::into),
            python_stack: Vec::new(),
            native_stack: Vec::new(),
        };
        let (here, there) = (Some("train.py:88 in train"), Some("train.py:61 in __init__"));
        let groups = [
            group(5, 1, "trainer", there),
            group(4, 2, "trainer", here),
            group(3, 3, "trainer", here),
            group(2, 1, "default", here),
            group(2, 4, "default", None),
            group(1, 1, "default", None),
        ];
        let lines = by_line(&groups);
        let found: Vec<_> = lines.iter().map(|line| (line.at.as_deref(), line.bytes, line.blocks)).collect();
        assert_eq!(found, [(here, 7, 5), (there, 5, 1), (here, 2, 1), (None, 2, 4), (None, 1, 1)]);
    }

    /// The page of a request on a device of which so much is known, where this process has these blocks.
    fn page_on(room: Option<DeviceRoom>, blocks: Vec<Placed>) -> ReportPage {
        let cause = Cause::Refused(Some("cuMemCreate"));
        let scene = Scene {
            asked: FailedRequest { bytes: 1 << 30, device: None, tag: None, library: "libffi.so.8", caller: 0, cause },
            when: UNIX_EPOCH,
            thread: 1,
            thread_name: "main".into(),
            stack: Stack::here(1, 0),
            room,
            margin: 0,
            tags: BTreeMap::new(),
            unmanaged: BTreeMap::new(),
            blocks,
            freed_since: None,
        };
        ReportPage::of(scene, 1, 0)
    }

    #[test]
    fn what_is_not_listed_by_line_is_added_up() {
        const MIB: u64 = 1 << 20;
        let block = |mib| Placed { bytes: mib * MIB, tag: Some("default".into()), requester: None };
        let page = page_on(None, (1..=100).map(block).collect());
        let sizes: Vec<_> = page.largest.iter().map(|group| group.bytes / MIB).collect();
        assert_eq!(sizes, (71..=100).rev().collect::<Vec<_>>(), "in the file");
        let page = page.to_string();
        assert!(page.contains("      91.00 MiB  tag default\n       4.00 GiB in 90 blocks  all others\n"), "{page}");
        let few = page_on(None, (1..=10).map(block).collect()).to_string();
        assert!(few.contains("1.00 MiB  tag default\n") && !few.contains("all others"), "{few}");
    }

    /// A heading alone would look as if the list had been lost.
    #[test]
    fn no_heading_stands_alone() {
        let room = |free| Some(DeviceRoom { device: 0, uuid: None, index: None, free, total: 100 << 20 });
        for (room, shown) in [
            (None, "What is in use on the device is unknown"),
            (room(100 << 20), "Nothing is in use on the device"),
            (room(60 << 20), "In use on the device:\n      40.00 MiB  everything else"),
        ] {
            let page = page_on(room, Vec::new()).to_string();
            assert!(page.contains(shown), "{page}");
            let headings = page.lines().zip(page.lines().skip(1).chain([""])).filter(|(line, _)| line.ends_with(':'));
            headings.for_each(|(heading, below)| assert!(below.starts_with("    "), "{heading}\n{page}"));
        }
    }

    #[test]
    fn names_are_safe_in_a_shell() {
        assert_eq!(quoted("engine-1"), "engine-1");
        assert_eq!(quoted("my job"), "'my job'");
        assert_eq!(quoted("a'; rm -rf /"), r"'a'\''; rm -rf /'");
        assert_eq!((quoted(""), quoted("-x")), ("''".into(), "'-x'".into()));
    }
}
