//! The state of `vramctl top`, and the rows to show. Does no drawing and no I/O; the time is passed in.

use crate::ledger::{self, What};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use vramctl_coordinator::gpus::begins_as;
use vramctl_coordinator::processes::Process;
use vramctl_driver::{Card, Climate, NoCards};
use vramctl_host::limits::Room;
use vramctl_model::{Holder, Policy, Progress, Stage, TagState, TagStatus, Verb};

/// The minimum time after which a process counts as silent.
const PATIENCE: Duration = Duration::from_secs(3);
/// Transitions of a job's processes that end within this time count as one.
const TOGETHER: Duration = Duration::from_secs(2);
/// How far back curves go.
pub const REMEMBERED: Duration = Duration::from_secs(300);
/// How long a message is shown.
const MESSAGE: Duration = Duration::from_secs(20);

/// All that is known.
pub struct Model {
    seen: BTreeMap<u32, Seen>,
    gpus: Option<(Instant, Gpus)>,
    letters: BTreeMap<(String, String), char>,
    /// How many processes there are to ask, once that is known.
    pub found: Option<usize>,
    /// Why no processes can be found.
    pub trouble: Option<String>,
    /// What the scheduler of the programs that share GPUs says; `None`: there is none.
    pub sharing: Option<Vec<String>>,
    /// What has been, and in which characters that is drawn; `None`: not at all.
    pub curves: Option<Curves>,
    past: Past,
    pub interval: Duration,
    pub order: Order,
    pub view: View,
    pub overlay: Overlay,
    /// The GPUs that are shown, by index or UUID, with the programs that have memory there; all if there are none.
    pub only: Vec<String>,
    /// Only rows with this in their names are shown.
    pub filter: String,
    /// The command that runs, and since when.
    pub command: Option<(Vec<String>, Instant)>,
    message: Option<(Instant, String)>,
    /// The selected row: by its key, so that it stays selected when rows come and go, and by its position, in case its row disappears. The
    /// first row until another is chosen.
    selected: Option<(Subject, usize)>,
}

/// This machine, as NVML and the kernel report it.
#[derive(Debug, Clone)]
pub struct Gpus {
    pub cards: Result<Vec<(Card, Vec<Holder>)>, NoCards>,
    /// By UUID.
    pub climates: BTreeMap<String, Climate>,
    /// Host memory available.
    pub available: u64,
}

/// The characters of a curve, from nothing to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Curves {
    /// For every terminal.
    Ascii,
    /// Where the terminal shows Unicode.
    Blocks,
}

impl Curves {
    /// What a terminal shows, by these variables of the environment.
    pub fn of_terminal(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name| variable(name).filter(|value: &String| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default().to_lowercase();
        // The kernel's own terminal has few of them in its fonts.
        let is_plain = set("TERM").is_none_or(|terminal| ["linux", "dumb"].contains(&&*terminal));
        if !is_plain && (locale.contains("utf-8") || locale.contains("utf8")) { Self::Blocks } else { Self::Ascii }
    }

    /// A share of the height; `None`: nothing is known.
    pub fn character(self, share: Option<f64>) -> char {
        let levels: &[char] = match self {
            Self::Ascii => &['_', '.', ':', '-', '=', '+', '*', '#'],
            Self::Blocks => &['\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}', '\u{2588}'],
        };
        share.map_or(' ', |share| levels[(share.clamp(0.0, 1.0) * (levels.len() - 1) as f64).round() as usize])
    }
}

/// Values over the last minutes.
#[derive(Debug, Default)]
struct Past {
    /// The share of each GPU's memory that was in use, by index.
    gpus: BTreeMap<u32, VecDeque<(Instant, f64)>>,
    /// Bytes per second over the link.
    link: BTreeMap<Verb, VecDeque<(Instant, f64)>>,
}

/// Adds a value, and forgets what is too old.
fn remember(values: &mut VecDeque<(Instant, f64)>, value: f64, now: Instant) {
    values.push_back((now, value));
    while values.front().is_some_and(|(when, _)| now.saturating_duration_since(*when) > REMEMBERED) {
        values.pop_front();
    }
}

/// The largest value in each of so many equal parts of the last minutes; a part without a value has that of the part before.
fn parts_of(values: Option<&VecDeque<(Instant, f64)>>, count: usize, now: Instant) -> Vec<Option<f64>> {
    let mut parts = vec![None; count];
    for (when, value) in values.into_iter().flatten() {
        let age = now.saturating_duration_since(*when).as_secs_f64() / REMEMBERED.as_secs_f64();
        let place = ((1.0 - age).max(0.0) * count as f64) as usize;
        if let Some(part) = parts.get_mut(place.min(count.saturating_sub(1))) {
            *part = Some(part.map_or(*value, |most: f64| most.max(*value)));
        }
    }
    let mut before = None;
    for part in &mut parts {
        *part = part.or(before);
        before = *part;
    }
    parts
}

/// The known state of a process.
#[derive(Debug, Clone)]
pub struct Sample {
    pub process: Process,
    /// Bytes of private host memory.
    pub resident: u64,
    /// The limit on its host memory.
    pub room: Option<Room>,
}

struct Seen {
    sample: Sample,
    answered: Instant,
    flow: Flow,
}

/// The rate of copies over the link.
#[derive(Default)]
struct Flow {
    before: Option<(Instant, Progress)>,
    now: Option<(Verb, f64)>,
    last: BTreeMap<Verb, (Instant, f64)>,
}

/// What is shown on top of the display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Overlay {
    Nothing,
    Help,
    /// The filter is being typed.
    Filter,
    /// What a command still needs is being typed.
    Asking {
        needs: Needs,
        of: Subject,
        typed: String,
    },
    /// A question whether to run this command, with its effect.
    Question {
        words: Vec<String>,
        what: String,
        /// The contents that will be lost, in words.
        lost: String,
    },
}

/// What a command needs besides the selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// To move: where to.
    Gpu,
    /// To swap: with whom.
    Partner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Name,
    Size,
    State,
}

impl Order {
    pub fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Size => "size",
            Self::State => "state",
        }
    }

    pub fn next(self) -> Self {
        match self {
            Self::Name => Self::Size,
            Self::Size => Self::State,
            Self::State => Self::Name,
        }
    }
}

/// What is shown below a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    Tags,
    Processes,
}

/// The subject of a row: a name, a tag of it, or a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// Absent if the process does not report it; then `pid` is set.
    pub name: Option<String>,
    pub pid: Option<u32>,
    pub tag: Option<String>,
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    pub key: Subject,
    /// Its letter in the bars.
    pub letter: Option<char>,
    pub title: String,
    pub state: String,
    /// The stage that copies contents, over all processes.
    pub progress: Option<Progress>,
    /// Bytes whose contents a pause discards, by tag.
    pub discarded: BTreeMap<String, u64>,
    /// On GPUs.
    pub active: u64,
    /// Taken from GPUs.
    pub paused: u64,
    /// Of that, what a resume brings back.
    pub coming: u64,
    /// Contents in host memory.
    pub host: u64,
    /// Contents in files.
    pub disk: u64,
}

impl TableRow {
    /// Below another one.
    pub fn is_child(&self) -> bool {
        self.key.tag.is_some() || (self.key.name.is_some() && self.key.pid.is_some())
    }
}

/// A part of a GPU's bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slice {
    /// A tag.
    Letter(char),
    Unmanaged,
    Driver,
    Others,
    Unexplained,
    Free,
}

/// The bar of a GPU.
pub struct GpuBar {
    pub index: u32,
    pub model: String,
    /// Percent.
    pub utilization: Option<u32>,
    pub used: u64,
    pub total: u64,
    pub parts: Vec<(Slice, u64)>,
    pub climate: Climate,
}

/// Host memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    pub backups: u64,
    /// For the next backups.
    pub ready: u64,
    /// The rest of the processes' private host memory.
    pub other: u64,
    pub free: u64,
    pub limit: Option<u64>,
}

/// Bytes per second, and whether that is the current rate.
pub type Rate = Option<(f64, bool)>;

impl Model {
    pub fn new(interval: Duration) -> Self {
        Self {
            seen: BTreeMap::new(),
            gpus: None,
            letters: BTreeMap::new(),
            found: None,
            trouble: None,
            sharing: Some(Vec::new()),
            curves: None,
            past: Past::default(),
            interval,
            order: Order::Name,
            view: View::Tags,
            overlay: Overlay::Nothing,
            only: Vec::new(),
            filter: String::new(),
            command: None,
            message: None,
            selected: None,
        }
    }

    /// Records that a process has answered, or does not.
    pub fn put(&mut self, sample: Sample, now: Instant) {
        let pid = sample.process.pid;
        if sample.process.status.is_err()
            && let Some(seen) = self.seen.get_mut(&pid)
        {
            // Its last values stay on display, with their age.
            seen.flow.now = None;
            seen.sample.process.name = seen.sample.process.name.take().or(sample.process.name);
            return;
        }
        let mut flow = self.seen.remove(&pid).map(|before| before.flow.after(&before.sample, &sample, now)).unwrap_or_default();
        flow.follow(&sample, now);
        for (verb, (_, rate)) in flow.last.iter().filter(|(_, (when, _))| *when == now) {
            // Too short for a look in between.
            remember(self.past.link.entry(*verb).or_default(), *rate, now);
        }
        for tag in sample.process.tags() {
            self.letter(sample.process.name().unwrap_or_default(), &tag.tag);
        }
        self.seen.insert(pid, Seen { sample, answered: now, flow });
    }

    /// A process has ended.
    pub fn remove(&mut self, pid: u32) {
        self.seen.remove(&pid);
        self.found = self.found.map(|count| count.saturating_sub(1));
    }

    pub fn put_gpus(&mut self, gpus: Gpus, now: Instant) {
        for (card, _) in gpus.cards.iter().flatten() {
            remember(self.past.gpus.entry(card.index).or_default(), card.used as f64 / card.total.max(1) as f64, now);
        }
        for verb in [Verb::Pause, Verb::Resume] {
            let rate = self.rate(verb).filter(|(_, is_now)| *is_now).map_or(0.0, |(rate, _)| rate);
            remember(self.past.link.entry(verb).or_default(), rate, now);
        }
        self.gpus = Some((now, gpus));
    }

    /// Letters are assigned in the order in which tags appear, and stay.
    fn letter(&mut self, name: &str, tag: &str) {
        let next = ('a'..='z').chain('A'..='Z').nth(self.letters.len()).unwrap_or('*');
        self.letters.entry((name.to_owned(), tag.to_owned())).or_insert(next);
    }

    pub fn say(&mut self, text: String, now: Instant) {
        self.message = Some((now, text));
    }

    pub fn message(&self, now: Instant) -> Option<&str> {
        self.message.as_ref().filter(|(said, _)| now < *said + MESSAGE).map(|(_, text)| text.as_str())
    }

    /// How many processes there are.
    pub fn processes(&self) -> usize {
        self.seen.len()
    }

    /// Whether a pause or resume is in progress somewhere.
    pub fn is_under_way(&self) -> bool {
        self.seen.values().any(|seen| is_under_way(&seen.sample.process))
    }

    /// How long ago NVML last answered, if that is too long.
    pub fn gpus_silent(&self, now: Instant) -> Option<Duration> {
        self.gpus.as_ref().map(|(answered, _)| now - *answered).filter(|age| *age > PATIENCE.max(3 * self.interval))
    }

    /// Who of the programs that share GPUs waits and why, who is away, and the last change of places.
    pub fn sharing(&self) -> Vec<String> {
        self.sharing.clone().unwrap_or_else(|| vramctl_keeper::stranded(&self.seen_processes()).into_iter().collect())
    }

    fn seen_processes(&self) -> Vec<Process> {
        self.seen.values().map(|seen| seen.sample.process.clone()).collect()
    }

    /// The bars of the GPUs.
    pub fn bars(&self) -> Vec<GpuBar> {
        let processes = self.seen_processes();
        let Some((_, gpus)) = &self.gpus else { return Vec::new() };
        let bar = |(card, holders): &(Card, Vec<Holder>)| {
            let mut parts = BTreeMap::<Slice, i64>::new();
            for share in ledger::account(card, holders, &processes) {
                let name = share.name.clone().unwrap_or_default();
                let part = match share.what {
                    What::Tag => Slice::Letter(self.letters.get(&(name, share.of.unwrap_or_default())).copied().unwrap_or('*')),
                    What::Unmanaged => Slice::Unmanaged,
                    What::Driver | What::Guard | What::PageTables => Slice::Driver,
                    What::Process | What::OutOfSight => Slice::Others,
                    _ => Slice::Unexplained,
                };
                *parts.entry(part).or_default() += share.bytes;
            }
            let mut parts: Vec<_> = parts.into_iter().map(|(part, bytes)| (part, bytes.max(0) as u64)).collect();
            let shown: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
            parts.push((Slice::Free, card.total.saturating_sub(shown)));
            GpuBar {
                index: card.index,
                model: card.name.clone(),
                utilization: card.utilization,
                used: card.used,
                total: card.total,
                parts,
                climate: gpus.climates.get(&card.uuid).copied().unwrap_or_default(),
            }
        };
        gpus.cards.iter().flatten().filter(|(card, _)| self.shows(card)).map(bar).collect()
    }

    /// The share of a GPU's memory that was in use, in so many parts of the last minutes.
    pub fn past_of_gpu(&self, index: u32, count: usize, now: Instant) -> Vec<Option<f64>> {
        parts_of(self.past.gpus.get(&index), count, now)
    }

    /// The rate over the link, likewise, as shares of the highest.
    pub fn past_of_link(&self, verb: Verb, count: usize, now: Instant) -> Vec<Option<f64>> {
        let parts = parts_of(self.past.link.get(&verb), count, now);
        let most = parts.iter().flatten().copied().fold(0.0, f64::max);
        parts.into_iter().map(|part| part.map(|rate| if most > 0.0 { rate / most } else { 0.0 })).collect()
    }

    fn shows(&self, card: &Card) -> bool {
        let is_meant = |gpu: &String| *gpu == card.index.to_string() || begins_as(&card.uuid, gpu);
        self.only.is_empty() || self.only.iter().any(is_meant)
    }

    /// Whether a process has memory on a GPU that is shown. In doubt it has.
    fn is_shown(&self, process: &Process) -> bool {
        let cards = || self.gpus.iter().flat_map(|(_, gpus)| gpus.cards.iter().flatten());
        let is_there = |uuid| cards().any(|(card, _)| card.uuid == uuid && self.shows(card));
        self.only.is_empty() || process.status.is_err() || process.gpus().any(is_there)
    }

    /// Why there are no bars.
    pub fn no_bars(&self) -> String {
        let failure = self.gpus.as_ref().and_then(|(_, gpus)| gpus.cards.as_ref().err());
        failure.map_or_else(|| "NVML has not answered yet: there are no bars".into(), ToString::to_string)
    }

    pub fn host(&self) -> HostMemory {
        let mut host = HostMemory { free: self.gpus.as_ref().map_or(0, |(_, gpus)| gpus.available), ..HostMemory::default() };
        for Seen { sample: Sample { process, resident, room }, .. } in self.seen.values() {
            let Ok(status) = &process.status else { continue };
            let kept: u64 = process.tags().iter().map(|tag| tag.host_bytes).sum();
            host.backups += kept;
            host.ready += status.memory.host.ready_bytes.saturating_sub(kept);
            host.other += resident.saturating_sub(status.memory.host.ready_bytes);
            if let Some(room) = room.filter(|room| host.limit.is_none() || room.free < host.free) {
                (host.free, host.limit) = (room.free, Some(room.all));
            }
        }
        host
    }

    /// The rate over the links to or from the host, of all processes together: now, or in the last pause or resume.
    pub fn rate(&self, verb: Verb) -> Rate {
        let now: f64 = self.seen.values().filter_map(|seen| seen.flow.now).filter(|(of, _)| *of == verb).map(|(_, rate)| rate).sum();
        if now > 0.0 {
            return Some((now, true));
        }
        let last: Vec<_> = self.seen.values().filter_map(|seen| seen.flow.last.get(&verb)).collect();
        let latest = last.iter().map(|(when, _)| *when).max()?;
        Some((last.iter().filter(|(when, _)| *when + TOGETHER >= latest).map(|(_, rate)| rate).sum(), false))
    }

    /// Whether nothing of these processes is on a GPU.
    pub fn is_away(&self, of: &Subject) -> bool {
        let is_meant = |process: &Process| process.name == of.name && of.pid.is_none_or(|pid| pid == process.pid);
        let active = |process: &Process| if process.suspended().is_none() { process.active_bytes() } else { 0 };
        self.seen.values().map(|seen| &seen.sample.process).filter(|process| is_meant(process)).all(|process| active(process) == 0)
    }

    /// Whether the filter lets this name through.
    fn passes(&self, name: &str) -> bool {
        name.to_lowercase().contains(&self.filter.to_lowercase())
    }

    /// The rows of the table.
    pub fn rows(&self, now: Instant) -> Vec<TableRow> {
        let mut groups = BTreeMap::<Subject, Vec<&Seen>>::new();
        for (pid, seen) in self.seen.iter().filter(|(_, seen)| self.is_shown(&seen.sample.process)) {
            let name = seen.sample.process.name.clone();
            let pid = name.is_none().then_some(*pid);
            groups.entry(Subject { name, pid, tag: None }).or_default().push(seen);
        }
        let mut groups: Vec<_> = groups.into_iter().map(|(key, members)| (self.row(key, &members, now), members)).collect();
        match self.order {
            Order::Name => (),
            Order::Size => groups.sort_by_key(|(row, _)| std::cmp::Reverse(row.active + row.paused)),
            Order::State => groups.sort_by_cached_key(|(row, _)| rank(&row.state)),
        }
        groups
            .into_iter()
            .filter_map(|(row, members)| {
                let mut children = self.children(&row.key, &members, now);
                if !self.passes(&row.title) {
                    children.retain(|child| self.passes(&child.title));
                    if children.is_empty() {
                        return None;
                    }
                }
                Some(std::iter::once(row).chain(children))
            })
            .flatten()
            .collect()
    }

    /// What is below a name.
    fn children(&self, key: &Subject, members: &[&Seen], now: Instant) -> Vec<TableRow> {
        let mut rows: Vec<_> = match self.view {
            View::Tags => {
                let tags: BTreeSet<_> = members.iter().flat_map(|seen| seen.sample.process.tags()).map(|tag| tag.tag.clone()).collect();
                tags.into_iter().map(|tag| self.tag_row(key, tag, members)).collect()
            }
            // A single process is shown in the row above.
            View::Processes if members.len() < 2 => Vec::new(),
            View::Processes => members
                .iter()
                .map(|seen: &&Seen| {
                    let pid = seen.sample.process.pid;
                    TableRow { title: format!("pid {pid}"), ..self.row(Subject { pid: Some(pid), ..key.clone() }, &[seen], now) }
                })
                .collect(),
        };
        match self.order {
            Order::Name => (),
            Order::Size => rows.sort_by_key(|row| std::cmp::Reverse(row.active + row.paused)),
            Order::State => rows.sort_by_cached_key(|row| rank(&row.state)),
        }
        rows
    }

    /// Processes as one row.
    fn row(&self, key: Subject, members: &[&Seen], now: Instant) -> TableRow {
        let title = match (&key.name, members) {
            (Some(name), [one]) => format!("{name} (pid {})", one.sample.process.pid),
            (Some(name), several) => format!("{name} x{}", several.len()),
            (None, _) => format!("pid {}", key.pid.unwrap_or_default()),
        };
        let states: BTreeSet<_> = members.iter().map(|seen| self.state(seen, now)).collect();
        let tags = || members.iter().flat_map(|seen| seen.sample.process.tags());
        TableRow {
            key,
            letter: None,
            title,
            state: states.into_iter().collect::<Vec<_>>().join("; "),
            progress: joined(members.iter().filter_map(|seen| copying(&seen.sample.process).map(|(_, now)| now))),
            discarded: discarded(tags()),
            active: members
                .iter()
                .filter(|seen: &&&Seen| seen.sample.process.suspended().is_none())
                .map(|seen| seen.sample.process.active_bytes())
                .sum(),
            paused: tags().map(|tag| tag.paused_bytes).sum(),
            coming: tags().map(TagStatus::coming_bytes).sum(),
            host: tags().map(|tag| tag.host_bytes).sum(),
            disk: tags().map(|tag| tag.disk_bytes).sum(),
        }
    }

    fn tag_row(&self, of: &Subject, name: String, members: &[&Seen]) -> TableRow {
        let letter = self.letters.get(&(of.name.clone().unwrap_or_default(), name.clone())).copied();
        let tags: Vec<_> = members.iter().flat_map(|seen| seen.sample.process.tags()).filter(|tag| tag.tag == name).collect();
        let states: BTreeSet<_> = tags.iter().map(|tag| tag.state.name()).collect();
        let sum = |of: fn(&TagStatus) -> u64| tags.iter().map(|tag| of(tag)).sum();
        TableRow {
            key: Subject { tag: Some(name.clone()), ..of.clone() },
            letter,
            title: name,
            state: states.into_iter().collect::<Vec<_>>().join(", "),
            progress: None,
            discarded: discarded(tags.iter().copied()),
            active: sum(|tag| tag.bytes.saturating_sub(tag.paused_bytes)),
            paused: sum(|tag| tag.paused_bytes),
            // Whoever names a tag means all of it.
            coming: sum(|tag| tag.paused_bytes),
            host: sum(|tag| tag.host_bytes),
            disk: sum(|tag| tag.disk_bytes),
        }
    }

    fn state(&self, seen: &Seen, now: Instant) -> String {
        let process = &seen.sample.process;
        let age = now.saturating_duration_since(seen.answered);
        if age > PATIENCE.max(3 * self.interval) || process.status.is_err() {
            return format!("no answer for {} s", age.as_secs());
        }
        let held = if process.is_held() && process.suspended().is_none() { "held, " } else { "" };
        held.to_owned() + &process.state()
    }

    /// The selected row's index.
    pub fn selection(&self, rows: &[TableRow]) -> Option<usize> {
        let last = rows.len().checked_sub(1)?;
        let Some((key, place)) = &self.selected else { return Some(0) };
        Some(rows.iter().position(|row| row.key == *key).unwrap_or((*place).min(last)))
    }

    /// Moves the selection down by this many rows.
    pub fn select(&mut self, by: isize, now: Instant) {
        let rows = self.rows(now);
        let at = self.selection(&rows).map_or(0, |at| at.saturating_add_signed(by)).min(rows.len().saturating_sub(1));
        self.selected = rows.get(at).map(|row| (row.key.clone(), at));
    }
}

impl Flow {
    /// The bytes copied over the link between two samples, if pauses or resumes have ended.
    fn after(mut self, before: &Sample, after: &Sample, now: Instant) -> Self {
        let (Ok(before), Ok(after)) = (&before.process.status, &after.process.status) else { return self };
        for (verb, stage) in [(Verb::Pause, Stage::Save), (Verb::Resume, Stage::Restore)] {
            let totals = |memory: &vramctl_model::Status| memory.totals.get(&verb).cloned().unwrap_or_default();
            let (before, after) = (totals(&before.memory), totals(&after.memory));
            let ms = |totals: &vramctl_model::Totals| totals.stages.get(&stage).copied().unwrap_or_default();
            let (bytes, ms) = (after.copied_bytes().saturating_sub(before.copied_bytes()), ms(&after) - ms(&before));
            if bytes > 0 && ms > 0.0 {
                self.last.insert(verb, (now, bytes as f64 * 1e3 / ms));
            }
        }
        self
    }

    /// What is going over it.
    fn follow(&mut self, sample: &Sample, now: Instant) {
        let copying = copying(&sample.process);
        self.now = match (copying, self.before) {
            (Some((verb, at)), Some((then, before))) if before.stage == at.stage && before.total == at.total && at.done >= before.done => {
                let seconds = now.saturating_duration_since(then).as_secs_f64();
                (seconds > 0.0).then(|| (verb, (at.done - before.done) as f64 / seconds))
            }
            _ => None,
        };
        self.before = copying.map(|(_, at)| (now, at));
    }
}

/// The progress of a process's copies. All tags of a pause or resume report the same.
fn copying(process: &Process) -> Option<(Verb, Progress)> {
    process.tags().iter().find_map(|tag| match (tag.state, tag.progress?) {
        (TagState::Pausing, at @ Progress { stage: Stage::Save, .. }) => Some((Verb::Pause, at)),
        (TagState::Resuming, at @ Progress { stage: Stage::Restore, .. }) => Some((Verb::Resume, at)),
        _ => None,
    })
}

/// Combines the progress in the stage with the most bytes.
fn joined(all: impl Iterator<Item = Progress>) -> Option<Progress> {
    let mut stages = BTreeMap::<Stage, Progress>::new();
    for one in all {
        let sum = stages.entry(one.stage).or_insert(Progress { done: 0, total: 0, ..one });
        sum.done += one.done;
        sum.total += one.total;
    }
    stages.into_values().max_by_key(|progress| progress.total)
}

/// Whether a pause or resume of it is in progress.
pub fn is_under_way(process: &Process) -> bool {
    process.tags().iter().any(|tag| tag.state.is_under_way())
}

/// Transitions in progress sort first.
fn rank(state: &str) -> (usize, String) {
    const ORDER: [&str; 7] = ["pausing", "resuming", "undoing", "no answer", "active", "paused", "suspended"];
    (ORDER.iter().position(|word| state.contains(word)).unwrap_or(ORDER.len()), state.to_owned())
}

/// Bytes whose contents the next pause discards by the policies of these tags.
fn discarded<'a>(tags: impl Iterator<Item = &'a TagStatus>) -> BTreeMap<String, u64> {
    let mut lost = BTreeMap::<String, u64>::new();
    for tag in tags {
        let bytes = tag.backup.get(&Policy::Discard).map_or(0, |bytes| (*bytes).min(tag.bytes.saturating_sub(tag.paused_bytes)));
        if bytes > 0 {
            *lost.entry(tag.tag.clone()).or_default() += bytes;
        }
    }
    lost
}
