//! `vramctl pause` and `vramctl resume`.

use crate::engine;
use crate::failure::{Exit, Failure};
use crate::output;
use crate::progress::Bars;
use crate::target::{Found, Process, Target, TargetArgs, checked_tag};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::thread;
use std::time::Duration;
use vramctl_control::protocol;
use vramctl_model::Bytes;
use vramctl_model::Error;
use vramctl_model::{Backup, Report, TagState};

#[derive(clap::Args)]
#[command(after_help = "\
Without tags: all. The process lives on and keeps its addresses, but GPU work that it starts before the resume fails \
if it touches paused memory: have it stop first. A pause waits for the GPU work under way, with --timeout no longer \
than that. Contents are kept in host memory, unless the tag's policy, --backup or --discard says otherwise. All or nothing: \
after an error everything is as it was. Interrupting this command ends its wait for GPU work, but not a pause under way.

An inference engine must have no requests. With --engine it is asked: the pause is refused while it has some (with \
--timeout: if they do not end by then), and where its KV cache is discarded it is told to forget its prefix cache. VRAMCTL_ENGINE_KEY is \
its API key, where it asks for one.

Examples:
  vramctl pause                              all of the only managed process
  vramctl pause kv_cache --discard --all     this tag in every process; its contents are not needed
  vramctl pause weights --backup disk        kept in a file in $VRAMCTL_DISK_DIR
  vramctl pause --name engine --timeout 2.5
  vramctl pause kv_cache --discard --engine http://127.0.0.1:8000")]
pub struct PauseArgs {
    #[command(flatten)]
    pub transition: Args,
    /// Do not keep the contents: the memory reads as zero after the resume. The same as --backup discard
    #[arg(long, conflicts_with = "backup")]
    discard: bool,
    /// Where to keep the contents, whatever the tags' policies say: host, disk or discard
    #[arg(long, value_name = "POLICY")]
    backup: Option<Backup>,
    #[command(flatten)]
    engine: engine::EngineArgs,
}

#[derive(clap::Args)]
#[command(after_help = "\
Without tags: all. All or nothing: where memory is short everything stays paused, and the message says how much is \
missing and who holds it. With --timeout a resume waits so long for others to give memory back.

Examples:
  vramctl resume                             all of the only managed process
  vramctl resume weights --name engine
  vramctl resume --name engine --timeout 30")]
pub struct ResumeArgs {
    #[command(flatten)]
    pub transition: Args,
}

#[derive(clap::Args)]
pub struct Args {
    /// Tags (all if none is given)
    #[arg(value_name = "TAG", value_parser = checked_tag)]
    tags: Vec<String>,
    #[command(flatten)]
    target: TargetArgs,
    /// Wait at most so many seconds; fractions are fine
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Print JSON: {"processes": [{"pid", "name", "tags", "report" or "error"}]}
    #[arg(long)]
    pub json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

/// The two directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Pause,
    Resume,
}

impl Direction {
    /// The state that it leads to.
    fn end(self) -> TagState {
        match self {
            Self::Pause => TagState::Paused,
            Self::Resume => TagState::Active,
        }
    }
}

/// What is to be asked of one process; nothing where it has none of the tags.
#[derive(Debug)]
struct Task {
    process: Process,
    /// The tags to send.
    tags: Vec<String>,
    /// Those of its tags that are meant.
    meant: Vec<String>,
    /// Those of them that are not so yet.
    due: Vec<String>,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Outcome {
    pid: u32,
    name: Option<String>,
    tags: Vec<String>,
    #[serde(flatten)]
    result: Answer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Report(Report),
    Error(Failure),
}

pub fn pause(args: PauseArgs) -> Result<Exit, Failure> {
    let backup = args.discard.then_some(Backup::Discard).or(args.backup);
    let patience = args.transition.timeout.unwrap_or_default();
    transition(Direction::Pause, args.transition, backup, |tasks| {
        let due: Vec<_> = tasks.iter().filter(|task| !task.due.is_empty()).collect();
        if due.is_empty() {
            // Paused already: what an engine has now waits for the resume.
            return Ok(());
        }
        let losing = due.iter().filter(|task| engine::loses_cache(&task.process, &task.due, backup));
        args.engine.agree(&losing.map(|task| &task.process).collect::<Vec<_>>(), patience)
    })
}

pub fn resume(args: ResumeArgs) -> Result<Exit, Failure> {
    transition(Direction::Resume, args.transition, None, |_| Ok(()))
}

fn transition(
    direction: Direction,
    args: Args,
    backup: Option<Backup>,
    agree: impl FnOnce(&[Task]) -> Result<(), Failure>,
) -> Result<Exit, Failure> {
    let target = Target::from(args.target);
    let found = Found::look(&target)?;
    let tasks = plan(direction, found.choose(&target)?, &args.tags)?;
    agree(&tasks)?;
    let bars = Bars::on_terminal(!args.quiet && !args.json);
    let request = protocol::Transition {
        backup,
        timeout_ms: args.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
        progress: bars.shown(),
        ..protocol::Transition::default()
    };
    let outcomes = carry_out(direction, &found, &tasks, &request, &bars);

    if args.json {
        output::json(&outcomes)?;
    } else {
        for (task, outcome) in tasks.iter().zip(&outcomes) {
            tell(direction, &found, task, &outcome.result, args.quiet)?;
        }
    }
    Ok(outcomes.iter().find_map(|outcome| outcome.result.failure()).map_or(Exit::Done, Failure::exit))
}

/// What to ask of each process. A tag that one process lacks is nothing to do there; one that all lack is a mistake.
fn plan(direction: Direction, processes: Vec<Process>, tags: &[String]) -> Result<Vec<Task>, Failure> {
    let known: BTreeSet<_> = processes
        .iter()
        .filter_map(|process| process.status.as_ref().ok())
        .flat_map(|status| status.memory.tags.iter().map(|tag| tag.tag.clone()))
        .collect();
    let silent = processes.iter().any(|process| process.status.is_err());
    let unknown: BTreeSet<_> = tags.iter().filter(|tag| !known.contains(*tag)).cloned().collect();
    // A process that does not answer might know it; that it does not answer is then the error.
    if !unknown.is_empty() && !silent {
        return Err(Failure::from(&Error::UnknownTag { unknown: unknown.into_iter().collect(), known: known.into_iter().collect() }));
    }
    let task = |process: Process| {
        let there = process.status.as_ref().map_or(&[][..], |status| &status.memory.tags);
        let meant: Vec<_> = there.iter().filter(|tag| tags.is_empty() || tags.contains(&tag.tag)).collect();
        let names = |tags: &[&vramctl_model::TagStatus]| tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        let due: Vec<_> = meant.iter().copied().filter(|tag| tag.state != direction.end()).collect();
        let (meant, due) = (names(&meant), names(&due));
        // None given means all, and what is allocated in this moment too.
        let tags = if tags.is_empty() { Vec::new() } else { meant.clone() };
        Task { process, tags, meant, due }
    };
    Ok(processes.into_iter().map(task).collect())
}

/// All processes at once: each is busy with its own memory.
fn carry_out(direction: Direction, found: &Found, tasks: &[Task], request: &protocol::Transition, bars: &Bars) -> Vec<Outcome> {
    let ask = |task: &Task| -> Result<Report, Failure> {
        if let Err(failure) = &task.process.status {
            return Err(failure.clone());
        }
        if task.meant.is_empty() {
            return Ok(Report::default());
        }
        let mut bar = bars.bar(&task.process.to_string());
        let mut client = found.connect(task.process.pid)?;
        let request = protocol::Transition { tags: task.tags.clone(), ..request.clone() };
        Ok(match direction {
            Direction::Pause => client.pause(request, &mut |now| bar.show(now)),
            Direction::Resume => client.resume(request, &mut |now| bar.show(now)),
        }?)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = tasks.iter().map(|task| (task, scope.spawn(|| ask(task)))).collect();
        let outcome = |(task, thread): (&Task, thread::ScopedJoinHandle<'_, _>)| Outcome {
            pid: task.process.pid,
            name: task.process.name().map(str::to_owned),
            tags: task.meant.clone(),
            result: match thread.join() {
                Ok(Ok(report)) => Answer::Report(report),
                Ok(Err(failure)) => Answer::Error(failure),
                Err(_) => Answer::Error(Failure::new(Exit::Failed, "vramctl itself failed here; please report it")),
            },
        };
        threads.into_iter().map(outcome).collect()
    })
}

impl Answer {
    fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Report(_) => None,
            Self::Error(failure) => Some(failure),
        }
    }
}

fn tell(direction: Direction, found: &Found, task: &Task, answer: &Answer, quiet: bool) -> Result<(), Failure> {
    match answer {
        Answer::Report(report) => {
            if !quiet {
                output::say(&success(direction, task, report))?;
            }
            if report.late_bytes > 0 {
                let late = Bytes(report.late_bytes);
                let text =
                    format!("{}: the driver has not taken {late} back yet; it is tried again at every pause and resume", task.process);
                output::complain("warning", &text);
            }
        }
        Answer::Error(failure) => {
            output::complain("error", &format!("{}: {failure}", task.process));
            for hint in hints(&found.look_again(&holders(failure))) {
                output::complain("hint", &hint);
            }
        }
    }
    Ok(())
}

fn success(direction: Direction, task: &Task, report: &Report) -> String {
    let process = &task.process;
    if report.allocations == 0 {
        let state = direction.end().name();
        return match &task.meant[..] {
            [] if task.tags.is_empty() && process.state().is_some() => format!("nothing to do: {process} has none of these tags"),
            [] => format!("nothing to do: {process} has no memory under management"),
            [tag] => format!("nothing to do: {tag} of {process} is {state} already"),
            tags => format!("nothing to do: {} of {process} are {state} already", tags.join(", ")),
        };
    }
    // What has changed since it was looked at belongs to one of the tags that were meant.
    let tags = if task.due.is_empty() { &task.meant } else { &task.due }.join(", ");
    let (did, moved, kept, discarded) = match direction {
        Direction::Pause => ("paused", "given back", "kept", "discarded"),
        Direction::Resume => ("resumed", "taken again", "restored", "now zero"),
    };
    let mut text = format!("{did} {tags} of {process}: {} {moved} in {} ms", Bytes(report.bytes), whole(report.ms));
    let stages: Vec<_> = report.stages.iter().map(|(stage, ms)| format!("{} {}", stage.name(), whole(*ms))).collect();
    if !stages.is_empty() {
        let _ = write!(text, " ({})", stages.join(", "));
    }
    let unchanged = "of that not copied, because the backup had it already";
    let contents = [(report.kept_bytes, kept), (report.unchanged_bytes, unchanged), (report.discarded_bytes, discarded)];
    let contents: Vec<_> =
        contents.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, fate)| format!("{} {fate}", Bytes(*bytes))).collect();
    if !contents.is_empty() {
        let _ = write!(text, "; {}", contents.join(", "));
    }
    text
}

/// Milliseconds for a reader.
fn whole(ms: f64) -> String {
    format!("{ms:.0}")
}

/// Who holds the memory that is missing.
fn holders(failure: &Failure) -> Vec<u32> {
    let Failure::Refused(refusal) = failure else { return Vec::new() };
    refusal.shortage.iter().flat_map(|shortage| &shortage.holders).map(|holder| holder.pid).collect()
}

/// The way out of a shortage: holders that can be paused.
fn hints(holders: &[Process]) -> Vec<String> {
    let hint = |process: &Process| {
        let bytes = Bytes(process.active_bytes());
        format!("{process} is managed too; `vramctl pause --pid {}` gives {bytes} back", process.pid)
    };
    holders.iter().filter(|process| process.active_bytes() > 0).map(hint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::tests::process;
    use vramctl_control::protocol::Refusal;
    use vramctl_model::Holder;
    use vramctl_model::Shortage;
    use vramctl_model::Stage;

    fn names(tags: &[&str]) -> Vec<String> {
        tags.iter().map(ToString::to_string).collect()
    }

    fn engine(state: TagState) -> Process {
        process(4711, "engine", &[("kv_cache", state), ("weights", state)])
    }

    #[test]
    fn a_success_tells_bytes_and_milliseconds() {
        let tasks = plan(Direction::Pause, vec![engine(TagState::Active)], &[]).unwrap();
        let report = Report {
            allocations: 3,
            bytes: 40 << 30,
            kept_bytes: 38 << 30,
            discarded_bytes: 2 << 30,
            unchanged_bytes: 0,
            unchanged: 0,
            late_bytes: 0,
            stages: [(Stage::Wait, 3.2), (Stage::Save, 850.4), (Stage::Unmap, 19.8), (Stage::Release, 38.9)].into(),
            ms: 912.3,
        };
        assert_eq!(
            success(Direction::Pause, &tasks[0], &report),
            "paused kv_cache, weights of engine (pid 4711): 40.00 GiB given back in 912 ms (wait 3, save 850, unmap 20, release 39); \
             38.00 GiB kept, 2.00 GiB discarded"
        );
        let tasks = plan(Direction::Resume, vec![engine(TagState::Paused)], &names(&["weights"])).unwrap();
        let report = Report { stages: [(Stage::Map, 1.0)].into(), discarded_bytes: 0, ..report };
        assert_eq!(
            success(Direction::Resume, &tasks[0], &report),
            "resumed weights of engine (pid 4711): 40.00 GiB taken again in 912 ms (map 1); 38.00 GiB restored"
        );
    }

    #[test]
    fn nothing_to_do_is_said() {
        let text = |process: Process, tags: &[&str]| {
            let other = self::process(1, "other", &[("x", TagState::Active)]);
            let tasks = plan(Direction::Pause, vec![process, other], &names(tags)).unwrap();
            success(Direction::Pause, &tasks[0], &Report::default())
        };
        assert_eq!(text(engine(TagState::Paused), &[]), "nothing to do: kv_cache, weights of engine (pid 4711) are paused already");
        assert_eq!(text(engine(TagState::Paused), &["weights"]), "nothing to do: weights of engine (pid 4711) is paused already");
        assert_eq!(text(engine(TagState::Active), &["x"]), "nothing to do: engine (pid 4711) has none of these tags");
        assert_eq!(text(process(2, "idle", &[]), &[]), "nothing to do: idle (pid 2) has no memory under management");
    }

    #[test]
    fn a_tag_must_be_known_somewhere() {
        let two = || vec![process(1, "a", &[("x", TagState::Active)]), process(2, "b", &[("y", TagState::Active)])];
        let tasks = plan(Direction::Pause, two(), &names(&["y"])).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[1].tags), (&names(&[]), &names(&["y"])));
        let failure = plan(Direction::Pause, two(), &names(&["y", "z"])).unwrap_err();
        assert_eq!(failure.exit(), Exit::UnknownTag);
        assert_eq!(failure.to_string(), "no allocation has the tag z; the tags are x, y");
    }

    #[test]
    fn only_what_is_not_so_yet_is_named() {
        let half = process(1, "a", &[("x", TagState::Paused), ("y", TagState::Mixed)]);
        let tasks = plan(Direction::Pause, vec![half], &[]).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[0].due), (&names(&["x", "y"]), &names(&["y"])));
        assert!(tasks[0].tags.is_empty(), "all is asked for as all");
    }

    #[test]
    fn a_holder_under_vramctl_can_be_paused() {
        let holder = |pid| Holder { pid, bytes: None, program: None };
        let shortage = Shortage { device: 0, needed: 2, free: 1, holders: vec![holder(7), holder(8)] };
        let failure = Failure::Refused(Box::new(Refusal::from(&Error::DeviceMemory(shortage))));
        assert_eq!(failure.exit(), Exit::NoMemory);
        assert_eq!(holders(&failure), [7, 8]);
        let paused = process(7, "paused", &[("x", TagState::Paused)]);
        let active = process(8, "trainer", &[("x", TagState::Paused), ("y", TagState::Active)]);
        assert_eq!(hints(&[paused, active]), ["trainer (pid 8) is managed too; `vramctl pause --pid 8` gives 1.00 GiB back"]);
    }

    #[test]
    fn seconds_may_have_fractions() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for wrong in ["", "x", "-1", "nan", "inf", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
