//! `vramctl trace`: a timeline of memory use.

mod changes;
mod chrome;
mod follow;
mod page;
mod timeline;

use crate::arguments::{ProcessesOrAll, seconds};
use crate::execute::Execute;
use crate::ui::output;
use changes::ChangeOfPlaces;
use follow::{Followed, Until};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use timeline::Timeline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::gpus;
use vramctl_coordinator::processes::{Found, Process};
use vramctl_coordinator::text;
use vramctl_driver::cards;
use vramctl_model::{Bytes, MemoryOwner, short_uuid, unmanaged_of};

#[derive(clap::Args)]
#[command(after_long_help = "\
A process keeps its last 419 000 events (allocations, frees, pauses, resumes, failures) if it was started with `vramctl run --trace`, \
with VRAMCTL_TRACE=1 in its environment, or from the first `vramctl trace --start` on. Without --seconds and --follow, the trace has the \
events recorded so far.

Open a .json in https://ui.perfetto.dev or chrome://tracing; an .html page needs only a browser. Without a target, the \
trace is of all managed processes, on one axis of time.

Examples:
  vramctl run --trace --name engine -- python serve.py
  vramctl trace engine -o trace.json
  vramctl trace engine --start                   # begin in a running program
  vramctl trace engine -o page.html --seconds 60 # and the next minute
  vramctl trace -o page.html --follow            # until ^C")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    /// The file to write: `….json` for Perfetto, `….html` for a page for a browser
    #[arg(short, long, value_name = "FILE", value_parser = output_file, required_unless_present = "start")]
    output: Option<PathBuf>,
    /// Have programs that record nothing begin to, with the memory that they have; they go on until they end
    #[arg(long)]
    start: bool,
    /// Keep recording for this many seconds, or until ^C
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "output")]
    seconds: Option<Duration>,
    /// Keep recording until ^C
    #[arg(long, conflicts_with = "seconds", requires = "output")]
    follow: bool,
}

fn output_file(text: &str) -> Result<PathBuf, String> {
    match Path::new(text).extension().and_then(|extension| extension.to_str()) {
        Some("json" | "html") => Ok(text.into()),
        _ => Err("must end in .json (for Perfetto) or .html (a page)".into()),
    }
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        // Looking is harmless, so there is no need to choose.
        let target = self.processes.target();
        let found = Found::look(&target)?;
        let chosen = found.choose(&target)?;
        // Check this before the recording, which may take long.
        let mut file = self.output.as_deref().map(open).transpose()?;
        if self.start {
            start(&found, &chosen)?;
        }
        match (&self.output, &mut file) {
            (Some(output), Some(file)) => self.record(&found, &chosen, output, file),
            _ => Ok(Exit::Done),
        }
    }
}

fn open(output: &Path) -> Result<File, CommandError> {
    OpenOptions::new().append(true).create(true).open(output).map_err(|error| unwritten(output, &error))
}

fn unwritten(output: &Path, error: &io::Error) -> CommandError {
    CommandError::new(Exit::Failed, format!("cannot write {}: {error}", output.display()))
}

/// Has processes record from now on, and says for each whether it does.
fn start(found: &Found, chosen: &[Process]) -> Result<(), CommandError> {
    let mut refused = None;
    for process in chosen {
        let who = format!("{} (pid {})", process.name().unwrap_or("?"), process.pid);
        let begun = process.status.clone().and_then(|_| Ok(found.connect(process.pid)?.record()?));
        match begun {
            Ok(true) => output::say(&format!("{who}: the trace begins; `vramctl trace {} -o page.html` writes it", process.pid))?,
            Ok(false) => output::say(&format!("{who} has a trace already"))?,
            Err(error) => {
                let error = CommandError::new(error.exit(), format!("{who} has no trace: {error}"));
                if let Some(before) = refused.replace(error) {
                    output::complain("error", &before.to_string());
                }
            }
        }
    }
    refused.map_or(Ok(()), Err)
}

impl Args {
    fn record(&self, found: &Found, chosen: &[Process], output: &Path, file: &mut File) -> Result<Exit, CommandError> {
        let failed = |error: io::Error| unwritten(output, &error);
        let until = match self.seconds {
            Some(time) => Until::After(time),
            None if self.follow => Until::Interrupted,
            None => Until::Now,
        };
        if until == Until::Interrupted {
            output::complain("note", "recording; ^C writes the trace");
        }
        let followed = follow::follow(found, chosen, until);
        let changes = if chosen.iter().any(Process::shares) { changes::last() } else { Vec::new() };
        let recording = Recording { changes, ..Recording::of(&followed) };
        if recording.processes.is_empty() {
            // Only what this command has made: neither a link nor a device.
            if fs::symlink_metadata(output).is_ok_and(|it| it.is_file() && it.len() == 0) {
                let _ = fs::remove_file(output);
            }
            return Err(recording.nothing());
        }
        file.set_len(0).map_err(failed)?;
        let mut out = BufWriter::new(file);
        let is_page = output.extension().is_some_and(|extension| extension == "html");
        let written = if is_page { page::write(&recording, &mut out) } else { chrome::write(&recording, &mut out) };
        written.and_then(|()| out.flush()).map_err(failed)?;
        recording.ended().iter().for_each(|text| output::complain("note", text));
        output::say(&recording.summary(output))?;
        Ok(Exit::Done)
    }
}

/// The events of all processes, on one time axis.
#[derive(Debug)]
struct Recording {
    processes: Vec<Recorded>,
    /// The model and size of each GPU, by its name here.
    cards: BTreeMap<String, String>,
    /// Among programs that share their GPUs.
    changes: Vec<ChangeOfPlaces>,
    /// Why processes are missing.
    silent: Vec<CommandError>,
}

/// The events of one process.
#[derive(Debug)]
struct Recorded {
    pid: u32,
    name: String,
    /// Whether it is the only process with its name.
    is_unique: bool,
    timeline: Timeline,
    /// By owner.
    gpus: BTreeMap<u16, String>,
    /// Nanoseconds since 1970 when the host's clock began.
    epoch: u64,
    ended: Option<CommandError>,
}

/// For messages.
impl fmt::Display for Recorded {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unique { out.write_str(&self.name) } else { write!(out, "{} {}", self.name, self.pid) }
    }
}

impl Recorded {
    /// The owner's tag, or library; with its GPU, if the process has memory on several.
    fn name_of(&self, owner: u16) -> String {
        let Some(history) = self.timeline.owners.get(&owner) else { return "others".into() };
        let name = owner_name(&history.owner);
        let gpu = self.gpu_of(owner);
        if self.gpus.values().all(|other| other == gpu) { name } else { format!("{name}, {gpu}") }
    }

    fn gpu_of(&self, owner: u16) -> &str {
        self.gpus.get(&owner).map_or("GPU not known", String::as_str)
    }
}

fn owner_name(owner: &MemoryOwner) -> String {
    match (&owner.tag, &owner.library) {
        (Some(tag), _) => tag.clone(),
        (None, Some(library)) => unmanaged_of(library),
        (None, None) => "others".into(),
    }
}

impl Recording {
    fn of(followed: &[Followed]) -> Self {
        let indices = gpus::indices();
        let gpu = |owner: &MemoryOwner| match (&owner.gpu, owner.device) {
            (Some(uuid), _) => {
                let short = short_uuid(uuid);
                indices.get(uuid).map_or_else(|| format!("GPU {short}"), |index| format!("GPU {index} ({short})"))
            }
            (None, Some(device)) => format!("device {device}"),
            (None, None) => "GPU not known".into(),
        };
        let recorded = |one: &Followed| Recorded {
            pid: one.pid,
            name: one.name.clone(),
            is_unique: followed.iter().filter(|other| other.name == one.name).count() == 1,
            timeline: Timeline::of(one),
            gpus: one.owners.iter().map(|(id, owner)| (*id, gpu(owner))).collect(),
            epoch: one.unix_ns.saturating_sub(one.now_ns),
            ended: one.ended.clone(),
        };
        let cards = cards().unwrap_or_default().into_iter().map(|card| {
            let name = format!("GPU {} ({})", card.index, short_uuid(&card.uuid));
            let title = format!("{name}, {}, {}", card.name, Bytes(card.total));
            (name, title)
        });
        let (on, off): (Vec<_>, Vec<_>) = followed.iter().partition(|one| one.is_on);
        Self {
            cards: cards.collect(),
            changes: Vec::new(),
            processes: on.into_iter().map(recorded).collect(),
            silent: off
                .iter()
                .map(|one: &&Followed| {
                    let text = "it records nothing: `vramctl trace --start` begins, and `vramctl run --trace` from the start on";
                    let reason = one.ended.clone().unwrap_or_else(|| CommandError::new(Exit::Failed, text));
                    CommandError::new(reason.exit(), format!("{} (pid {}) is not in the trace: {reason}", one.name, one.pid))
                })
                .collect(),
        }
    }

    fn nothing(&self) -> CommandError {
        let texts: Vec<_> = self.silent.iter().map(ToString::to_string).collect();
        CommandError::new(self.silent.first().map_or(Exit::Failed, CommandError::exit), texts.join("; "))
    }

    fn from(&self) -> u64 {
        self.processes.iter().map(|process| process.timeline.from).min().unwrap_or_default()
    }

    fn to(&self) -> u64 {
        self.processes.iter().map(|process| process.timeline.to).max().unwrap_or_default()
    }

    /// The beginning in nanoseconds since 1970.
    fn unix_from(&self) -> u64 {
        self.processes.first().map_or(0, |process| process.epoch) + self.from()
    }

    /// The owner's name for charts that show all processes on its GPU.
    fn owner_on_gpu(&self, process: &Recorded, owner: u16) -> String {
        let name = process.timeline.owners.get(&owner).map_or_else(|| "others".into(), |history| owner_name(&history.owner));
        if self.processes.len() == 1 { name } else { format!("{process}: {name}") }
    }

    /// The processes that are missing from the trace, or end early.
    fn ended(&self) -> Vec<String> {
        self.silent
            .iter()
            .map(ToString::to_string)
            .chain(self.processes.iter().filter_map(|process: &Recorded| {
                let why = process.ended.as_ref()?;
                Some(format!("{} (pid {}) is in the trace up to its last answer: {why}", process.name, process.pid))
            }))
            .collect()
    }

    fn summary(&self, file: &Path) -> String {
        let time = Duration::from_nanos(self.to() - self.from()).as_secs_f64();
        let processes = text::count(self.processes.len(), "process", "processes");
        let missed: u64 = self.processes.iter().map(|process| process.timeline.missed).sum();
        let older = if missed == 0 { String::new() } else { format!("; {missed} older events were overwritten") };
        format!("{}: {time:.1} s of {processes}{older}", file.display())
    }
}
