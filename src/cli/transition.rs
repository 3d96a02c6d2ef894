//! `vramctl pause` and `vramctl resume`.

use crate::checkpoint::Done;
use crate::completions;
use crate::dry_run::{self, Foretold};
use crate::engine;
use crate::failure::{CommandError, Exit};
use crate::interrupt;
use crate::nccl;
use crate::output;
use crate::processes::{Found, Process, Target, check_whole};
use crate::progress::{Bar, Bars};
use crate::shared::{self, Along, AsOne, OpenBy};
use crate::status::come_so_far;
use crate::suspend;
use crate::target::{GpuArgs, TargetArgs, checked_tag, milliseconds, seconds};
use crate::trim;
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::io::ErrorKind;
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::ClientError;
use vramctl_control::job::{Follower, Job, JobReport, Rank};
use vramctl_control::protocol::{self, Refusal};
use vramctl_control::queue::Claim;
use vramctl_driver as driver;
use vramctl_model::{Backup, Bytes, Communicator, Plan, Progress, Report, TagState, Trimmed, Verb};
use vramctl_model::{Error, Kind, Registered};

#[derive(clap::Args)]
#[command(after_help = "\
Without tags, pauses all of them, at any moment. The program stands still until everything is resumed: its calls that start GPU \
work wait, the rest of it runs on. A pause first waits for the GPU work in flight, at most --hold-timeout seconds. It keeps \
contents in host memory, unless the tag's policy, --backup or --discard says otherwise. All or nothing: a pause that fails \
changes nothing, in any process of the job, and the program runs on. ^C takes back what is not complete.

Memory that another process has open (CUDA IPC) is not paused, and the message names the process. With --timeout, the pause waits \
that long until it is closed, and the program runs on meanwhile. With --shared, the processes that have it open are held as well and \
give up what they have open of it, at the same moment or not at all. Their own memory stays. When the memory is resumed, they have it \
back at the same addresses and go on by themselves.

With --no-hold, the program runs on while it is paused. Then it must be idle: GPU work that touches paused memory fails, and its \
CUDA context with it. With --guard as well, such work finds a small block of memory instead, and the resume says if it wrote there.

An inference engine must have no requests if its KV cache is discarded, or with --no-hold. With --engine, the command asks it first and \
refuses to pause while it has any (with --timeout, if they have not finished by then), and has it reset its prefix cache before \
the KV cache is discarded. If it requires an API key, set VRAMCTL_ENGINE_KEY.

Examples:
  vramctl pause                              all tags of the only managed process
  vramctl pause kv_cache --discard --all     this tag in every process; drop the contents
  vramctl pause weights --backup disk        keep the contents in a file in $VRAMCTL_DISK_DIR
  vramctl pause --name engine --timeout 2.5
  vramctl pause cache --no-hold              the program goes on with its other memory
  vramctl pause --gpu 0 --all                all memory on this GPU, and on no other
  vramctl pause --trim                       first return what torch has cached
  vramctl pause --name trainer --shared      with memory that an engine has open; it goes on after `vramctl resume --name trainer`
  vramctl pause --dry-run                    show what would be paused, and change nothing
  vramctl pause kv_cache --discard --engine http://127.0.0.1:8000")]
#[allow(clippy::struct_excessive_bools)] // options
pub struct PauseArgs {
    #[command(flatten)]
    pub transition: Args,
    /// Only show what would be paused, where the contents would go, and how much host memory they need; with --json each
    /// process has a "plan" (docs/protocol.md) in place of its "report"
    #[arg(long, conflicts_with = "quiet")]
    dry_run: bool,
    /// Drop the contents: the memory reads as zero after the resume. Same as --backup discard
    #[arg(long, conflicts_with = "backup")]
    discard: bool,
    /// Where to keep the contents, overriding the tags' policies: host, disk or discard
    #[arg(long, value_name = "POLICY")]
    backup: Option<Backup>,
    /// What to do with memory that another process, a network card or NCCL has registered: refuse (pause nothing), keep (pause
    /// the rest, also without what another process has open) or take (pause it too: nobody may use the registration any more)
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true)]
    registered: Registered,
    /// Take along other processes that have the memory open (CUDA IPC): they are held, too, and go on by themselves when it is resumed
    #[arg(long, conflicts_with = "no_hold")]
    shared: bool,
    /// Keep a small block of GPU memory mapped under the paused addresses (62 MiB per GPU), so that GPU work that should have kept
    /// away reads and writes garbage there, instead of destroying the program's context
    #[arg(long)]
    guard: bool,
    /// First have torch return what it has cached, as `vramctl trim` does, for at most 10 seconds
    #[arg(long, conflicts_with = "dry_run")]
    trim: bool,
    /// Once all else is paused, have NCCL (2.29.7 or later) give back the memory of its communicators, too. All ranks of a
    /// communicator must be in the job. Off by default, because a failure inside NCCL cannot be undone
    #[arg(long, conflicts_with = "no_hold")]
    nccl: bool,
    #[command(flatten)]
    hold: HoldArgs,
    #[command(flatten)]
    engine: engine::EngineArgs,
}

#[derive(clap::Args)]
struct HoldArgs {
    /// Do not hold the program while it is paused. It must be idle, or keep away from the paused memory
    #[arg(long)]
    no_hold: bool,
    /// The default, after a --no-hold before it
    #[arg(long, hide = true, overrides_with = "no_hold")]
    hold: bool,
    /// How many seconds to wait for GPU work in flight, before the program runs on and nothing is paused [default: --timeout, or 10]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_hold")]
    hold_timeout: Option<Duration>,
}

impl HoldArgs {
    /// How long to wait for work in flight, in milliseconds; `None` if the program is not to be held.
    fn ms(&self, timeout: Option<Duration>) -> Option<u64> {
        let limit = self.hold_timeout.or(timeout).unwrap_or(HOLD_TIMEOUT);
        (!self.no_hold).then(|| milliseconds(limit))
    }
}

#[derive(clap::Args)]
#[command(after_help = "\
Without tags, resumes all of them. All or nothing: if GPU memory is short, everything stays paused, and the message says how \
much is missing and who holds it. With --timeout, the resume waits that long for others to free memory. \
Memory goes to the job that asked first; the others are told their place in the queue.

Examples:
  vramctl resume                             all tags of the only managed process
  vramctl resume weights --name engine
  vramctl resume --gpu 0 --all               all memory on this GPU, and on no other
  vramctl resume --name engine --timeout 30")]
pub struct ResumeArgs {
    #[command(flatten)]
    pub transition: Args,
}

#[derive(clap::Args)]
pub struct Args {
    /// Tags [default: all]
    #[arg(value_name = "TAG", value_parser = checked_tag, add = ArgValueCandidates::new(completions::tags))]
    pub tags: Vec<String>,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    gpu: GpuArgs,
    /// How many processes there must be. Without it, as many as the job had when it was last paused or resumed
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Wait at most this many seconds; fractions are allowed
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// Print JSON: {"processes": [{"pid", "name", "tags", "report" or "error"}]}; a resume of a suspended process also has "restored",
    /// with the times of the driver's part, and a pause with --trim "trimmed"
    #[arg(long)]
    pub json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

/// The request for one process. Empty if the process has none of the tags.
#[derive(Debug)]
struct Task {
    process: Process,
    /// The process's tags that match.
    meant: Vec<String>,
    /// Of these, the tags not yet in the wanted state.
    due: Vec<String>,
}

/// The result for one process.
#[derive(Debug, Serialize)]
struct Outcome {
    pid: u32,
    name: Option<String>,
    tags: Vec<String>,
    /// For one that was suspended: what brought it back to the GPU, before its tags were resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    restored: Option<Value>,
    /// With `--trim`: what its own allocator has returned before.
    #[serde(skip_serializing_if = "Option::is_none")]
    trimmed: Option<Trimmed>,
    #[serde(flatten)]
    result: Answer,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Report(Report),
    Error(CommandError),
}

/// The result for a job.
#[derive(Debug, Serialize)]
struct JobOutcome {
    job: Option<String>,
    pids: Vec<u32>,
    committed: bool,
    /// How often it was tried.
    attempts: u32,
    /// From the request until the last process was done.
    ms: f64,
}

impl JobOutcome {
    fn tell(&self, direction: Verb, outcomes: &[Outcome], quiet: bool) -> Result<(), CommandError> {
        if self.committed {
            return if quiet { Ok(()) } else { output::say(&self.text(direction, outcomes)) };
        }
        let job = self.job.as_deref().unwrap_or_default();
        let left = match direction {
            Verb::Pause => "nothing was paused; its processes go on as before",
            Verb::Resume => "nothing was resumed; its processes stay as they were, and can be resumed again",
        };
        output::complain("note", &format!("job {job}: {left}"));
        Ok(())
    }

    fn text(&self, direction: Verb, outcomes: &[Outcome]) -> String {
        let reports = outcomes.iter().filter(|outcome| self.pids.contains(&outcome.pid)).filter_map(|outcome| outcome.result.report());
        let (done, bytes) = reports.fold((0, 0), |(done, bytes), report| (done + 1, bytes + report.bytes));
        let (did, moved) = match direction {
            Verb::Pause => ("paused", "freed"),
            Verb::Resume => ("resumed", "allocated"),
        };
        let job = self.job.as_deref().unwrap_or_default();
        let all = self.pids.len();
        let processes = if done == all { format!("{all} processes") } else { format!("{done} of {all} processes") };
        let mut text = format!("{did} job {job}: {processes}, {} {moved}, {} ms", Bytes(bytes), whole(self.ms));
        if self.attempts > 1 {
            let _ = write!(text, ", {} attempts", self.attempts);
        }
        text
    }
}

/// Longer than anyone waits, yet small enough to add to an `Instant`.
const LONGEST_WAIT: Duration = Duration::from_secs(1 << 32);
/// How long a program's allocator may take to return its cache before a pause.
const TRIM_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the program's GPU work in flight may take once it is held.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);

pub fn pause(args: PauseArgs) -> Result<Exit, CommandError> {
    let backup = args.discard.then_some(Backup::Discard).or(args.backup);
    let patience = args.transition.timeout.unwrap_or_default();
    let hold_ms = args.hold.ms(args.transition.timeout);
    let Args { target, json, quiet, .. } = &args.transition;
    let trimmed =
        if args.trim { trim::before_a_pause(&Target::from(target.clone()), TRIM_TIMEOUT, *json || *quiet)? } else { BTreeMap::new() };
    let mut asking = Asking::prepare(Verb::Pause, args.transition)?;
    asking.trimmed = trimmed;
    asking.request.backup = backup;
    asking.request.registered = args.registered;
    asking.request.guard = args.guard;
    asking.request.hold_ms = hold_ms;
    asking.request.force = args.engine.force();
    asking.groups = asking.jobs();
    if args.shared {
        asking.take_along()?;
    }
    if args.nccl {
        asking.choose_communicators()?;
    }
    if args.dry_run {
        return asking.foretell(args.engine.asks());
    }
    asking.wait_for_borrowers(patience);
    if !args.engine.force() {
        asking.request.force = asking.may_discard(&args.engine, patience)?;
    }
    asking.run()
}

pub fn resume(args: ResumeArgs) -> Result<Exit, CommandError> {
    let Args { target, tags, timeout, json, quiet, .. } = &args.transition;
    let restored = suspend::bring_back(&Target::from(target.clone()), tags.is_empty(), timeout.unwrap_or_default(), *json || *quiet)?;
    let mut asking = Asking::prepare(Verb::Resume, args.transition)?;
    asking.restored = restored;
    asking.groups = asking.jobs();
    asking.join_those_that_wait();
    asking.run()
}

impl Task {
    /// The state in which an interrupted command leaves the process.
    fn left(&self, direction: Verb, now: Option<&Process>) -> Left {
        let status = match now.map(|process| &process.status) {
            Some(Ok(status)) => status,
            Some(Err(failure)) => return Left::Unknown(failure.to_string()),
            None => return Left::Unknown("the process has ended".into()),
        };
        let meant: Vec<_> = status.memory.tags.iter().filter(|tag| self.meant.contains(&tag.tag)).collect();
        match meant.iter().find(|tag| matches!(tag.state, TagState::Pausing | TagState::Resuming)) {
            Some(tag) => Left::GoingOn(come_so_far(tag)),
            None if meant.iter().all(|tag| tag.state == direction.end()) => Left::Done,
            None => Left::AsItWas,
        }
    }
}

/// Plans the request for each process. A tag missing from one process is a no-op there; a tag missing from all is an error.
fn plan(direction: Verb, processes: Vec<Process>, tags: &[String]) -> Result<Vec<Task>, CommandError> {
    let known: BTreeSet<_> = processes
        .iter()
        .filter_map(|process| process.status.as_ref().ok())
        .flat_map(|status| status.memory.tags.iter().map(|tag| tag.tag.clone()))
        .collect();
    let unknown: BTreeSet<_> = tags.iter().filter(|tag| !known.contains(*tag)).cloned().collect();
    if !unknown.is_empty() {
        return Err(CommandError::from(&Error::UnknownTag { unknown: unknown.into_iter().collect(), known: known.into_iter().collect() }));
    }
    let task = |process: Process| {
        let there = process.status.as_ref().map_or(&[][..], |status| &status.memory.tags);
        let meant: Vec<_> = there.iter().filter(|tag| tags.is_empty() || tags.contains(&tag.tag)).collect();
        let names = |tags: &[&vramctl_model::TagStatus]| tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        let due: Vec<_> = meant.iter().copied().filter(|tag| tag.state != direction.end()).collect();
        let (meant, due) = (names(&meant), names(&due));
        Task { process, meant, due }
    };
    Ok(processes.into_iter().map(task).collect())
}

/// A pause or resume of several processes.
#[allow(clippy::struct_excessive_bools)] // options
struct Asking {
    direction: Verb,
    found: Found,
    tasks: Vec<Task>,
    /// The same for each process: what they pause of their own, they pause of what they have open of each other.
    request: protocol::Transition,
    /// What NCCL is to suspend.
    communicators: nccl::ChosenCommunicators,
    /// Who is asked as one.
    groups: Vec<AsOne<Along>>,
    /// Whether processes that have memory open are taken along.
    takes_along: bool,
    /// Whether jobs are meant as a whole, not some of their processes or memory.
    is_whole: bool,
    /// What brought those that were suspended back to the GPU.
    restored: BTreeMap<u32, Done>,
    /// What their own allocators have returned before.
    trimmed: BTreeMap<u32, Trimmed>,
    json: bool,
    quiet: bool,
    bars: Bars,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    /// By process.
    open: BTreeMap<u32, UnixStream>,
    /// ^C was pressed: all connections are being closed.
    interrupted: bool,
}

impl Asking {
    /// Finds the processes and plans their requests. Changes nothing.
    fn prepare(direction: Verb, args: Args) -> Result<Self, CommandError> {
        let target = Target::from(args.target);
        let mut found = Found::look(&target)?;
        let gpus = found.keep_on(&args.gpu.gpu)?;
        let tasks = found.choose_answering(&target).and_then(|chosen| plan(direction, chosen, &args.tags)).map_err(|failure| {
            let is_choice = matches!(failure.exit(), Exit::Usage | Exit::UnknownTag);
            let meant = found.taken_for_tag(direction.name(), &args.tags).filter(|_| is_choice);
            failure.adding(&meant.unwrap_or_default())
        })?;
        if let Some(task) = tasks.iter().find(|task| !task.meant.is_empty() && !task.process.prepares()) {
            let text =
                "nothing was done: its library is too old for this command; restart the program, or use the vramctl it was started with";
            return Err(CommandError::new(Exit::Failed, format!("{}: {text}", task.process)));
        }
        let is_whole = gpus.is_empty() && !matches!(target, Target::Pid(_));
        if is_whole || args.ranks.is_some() {
            // A resume that the user has not given a number goes on without those that have ended.
            check_whole(tasks.iter().map(|task| &task.process), direction == Verb::Pause, args.ranks)?;
        }
        let bars = Bars::on_terminal(!args.quiet && !args.json);
        let timeout_ms = args.timeout.map(milliseconds);
        // That each tag is known to one of them has been seen.
        let lenient = !args.tags.is_empty();
        let request =
            protocol::Transition { tags: args.tags, lenient, gpus, timeout_ms, progress: bars.shown(), ..protocol::Transition::default() };
        let restored = BTreeMap::new();
        Ok(Self {
            direction,
            found,
            tasks,
            request,
            communicators: nccl::ChosenCommunicators::default(),
            groups: Vec::new(),
            takes_along: false,
            is_whole,
            restored,
            trimmed: BTreeMap::new(),
            json: args.json,
            quiet: args.quiet,
            bars,
            connections: Mutex::default(),
        })
    }

    /// The tasks with something to do.
    fn due(&self) -> impl Iterator<Item = &Task> {
        self.tasks.iter().filter(|task| !task.due.is_empty())
    }

    /// Which communicators NCCL can suspend.
    fn choose_communicators(&mut self) -> Result<(), CommandError> {
        for group in &self.groups {
            let processes: Vec<_> = group.places.iter().map(|place| &self.tasks[*place].process).collect();
            let chosen = nccl::ChosenCommunicators::ask(&self.found, &processes)?;
            self.communicators.add(chosen);
        }
        self.communicators.tell_what_is_left();
        Ok(())
    }

    /// Asks the inference engines for permission before anything changes. Returns whether a KV cache that a prefix cache
    /// describes may be discarded.
    fn may_discard(&self, engine: &engine::EngineArgs, patience: Duration) -> Result<bool, CommandError> {
        // Everything is paused already, so there is nothing to ask.
        if self.due().next().is_none() {
            return Ok(false);
        }
        let mut losing = Vec::new();
        for task in self.due() {
            if let Some(name) = self.ask_plan(task)?.and_then(|plan| plan.prefix_cache) {
                if !engine.asks() {
                    let refusal = Refusal::from(&Error::PrefixCache(name));
                    let message = format!("{}: {}", task.process, refusal.message);
                    return Err(CommandError::Refused(Box::new(Refusal { message, ..refusal })));
                }
                losing.push(&task.process);
            }
        }
        // The requests of a held engine lose nothing if all contents are kept.
        if engine.asks() && !(losing.is_empty() && self.request.hold_ms.is_some()) {
            engine.agree(&losing, patience)?;
        }
        Ok(!losing.is_empty())
    }

    /// Waits until no other process has open what is to be paused; the program runs on meanwhile. If that takes too long, the pause is
    /// refused.
    fn wait_for_borrowers(&self, patience: Duration) {
        const LOOK_AGAIN: Duration = Duration::from_millis(100);
        let deadline = Instant::now() + patience.min(LONGEST_WAIT);
        for task in self.due() {
            let mut is_told = self.json || self.quiet;
            while let Err(CommandError::Refused(refusal)) = self.ask_plan(task) {
                if refusal.code != Kind::Shared || Instant::now() >= deadline {
                    break;
                }
                if !std::mem::replace(&mut is_told, true) {
                    let lent: Vec<_> = refusal.lent.iter().flatten().map(ToString::to_string).collect();
                    output::complain("note", &format!("{}: waiting until this is closed: {}", task.process, lent.join(", ")));
                }
                thread::sleep(LOOK_AGAIN);
            }
        }
    }

    /// What a pause of the process would do. `None` if its library is too old to say.
    fn ask_plan(&self, task: &Task) -> Result<Option<Plan>, CommandError> {
        let of_task = |group: &&AsOne<_>| group.places.iter().any(|place| self.tasks[*place].process.pid == task.process.pid);
        // Those that are not held keep what they have open.
        let group = self.groups.iter().find(of_task).filter(|_| self.request.hold_ms.is_some());
        let partners = group.map_or_else(Vec::new, |group| self.pids(&group.places));
        let borrowers = group.map_or_else(Vec::new, |group| group.along.iter().map(|along| along.process.pid).collect());
        let request = protocol::Transition { partners, borrowers, ..self.request.clone() };
        match self.found.connect(task.process.pid)?.plan(request) {
            Err(ClientError::Refused(refusal)) if refusal.code == Kind::Invalid => Ok(None),
            answer => Ok(Some(answer?)),
        }
    }

    fn pids(&self, places: &[usize]) -> Vec<u32> {
        places.iter().map(|place| self.tasks[*place].process.pid).collect()
    }

    /// Finds those that have open what is to be paused.
    fn take_along(&mut self) -> Result<(), CommandError> {
        let jobs = std::mem::take(&mut self.groups).into_iter().map(|job| job.places).collect();
        let groups = shared::groups(jobs, |place| self.tasks[place].process.pid, |places| self.lent_by(places));
        let found = |AsOne { places, along }: AsOne<_>| Ok(AsOne { places, along: shared::find(&self.found, along)? });
        self.groups = groups.into_iter().map(found).collect::<Result<_, CommandError>>()?;
        self.takes_along = true;
        Ok(())
    }

    /// Makes one group of jobs whose processes wait for memory of each other: else one would wait for the other's turn.
    fn join_those_that_wait(&mut self) {
        let jobs = std::mem::take(&mut self.groups).into_iter().map(|job| job.places).collect();
        let waiting = |places: &[usize]| {
            let owners = self.pids(places);
            let waits =
                |process: &Process| !owners.contains(&process.pid) && process.waits_for().iter().any(|owner| owners.contains(owner));
            self.tasks.iter().filter(|task| waits(&task.process)).map(|task| (task.process.pid, 0)).collect()
        };
        let groups = shared::groups(jobs, |place| self.tasks[place].process.pid, waiting);
        self.groups = groups.into_iter().map(|AsOne { places, .. }| AsOne { places, along: Vec::new() }).collect();
    }

    /// What others have open of what is to be paused. Nothing, if a process does not say: then the pause itself says why.
    fn lent_by(&self, places: &[usize]) -> OpenBy {
        let mut lent = OpenBy::new();
        for pid in self.pids(places) {
            // What is registered does not matter here.
            let request = protocol::Transition { partners: self.pids(places), registered: Registered::Take, ..self.request.clone() };
            let asked = self.found.connect(pid).and_then(|mut client| client.plan(request));
            if let Err(ClientError::Refused(refusal)) = asked {
                for open in refusal.lent.iter().flatten() {
                    *lent.entry(open.by.pid).or_default() += open.by.bytes.unwrap_or_default();
                }
            }
        }
        lent
    }

    /// Dry run: prints what a pause would do, and returns its exit code as far as it can be predicted. Asks no engine.
    fn foretell(&self, asks_engine: bool) -> Result<Exit, CommandError> {
        let foretell = |task| {
            let Task { process, .. }: &Task = task;
            let old = || CommandError::new(Exit::Failed, format!("{process}: its library is too old for --dry-run; restart the program"));
            let plan = self.ask_plan(task)?.ok_or_else(old)?;
            Ok(Foretold::new(process, plan, self.request.force || asks_engine).with_communicators(&self.communicators))
        };
        let meant = self.tasks.iter().filter(|task| !task.meant.is_empty());
        let along = self.groups.iter().flat_map(|group| &group.along).map(|along| Ok(Foretold::along(&along.process, along.bytes)));
        dry_run::tell(&meant.map(foretell).chain(along).collect::<Result<Vec<_>, CommandError>>()?, self.json)
    }

    /// Sends the requests and prints the results.
    fn run(self) -> Result<Exit, CommandError> {
        let asking = Arc::new(self);
        interrupt::hold();
        let interrupted = Arc::clone(&asking);
        interrupt::watch(move || interrupted.give_up());
        // Loading NVML takes a while, which the pause takes anyway.
        let nvml = (asking.direction == Verb::Pause).then(|| thread::spawn(driver::keep_nvml));
        let (mut outcomes, along, jobs) = asking.carry_out();
        if !asking.json {
            for (task, outcome) in asking.tasks.iter().zip(&outcomes) {
                asking.tell(task, &outcome.result)?;
            }
            for (process, answer) in &along {
                asking.tell_along(process, answer)?;
            }
        }
        let outcome = |(process, result): (Process, Answer)| Outcome {
            pid: process.pid,
            name: process.name().map(str::to_owned),
            tags: Vec::new(),
            restored: None,
            trimmed: None,
            result,
        };
        outcomes.extend(along.into_iter().map(outcome));
        if asking.json {
            output::print(&format!("{}\n", json!({ "processes": outcomes, "jobs": jobs })))?;
        } else {
            for job in jobs.iter().filter(|job| job.pids.len() > 1) {
                job.tell(asking.direction, &outcomes, asking.quiet)?;
            }
        }
        if let Some(nvml) = nvml {
            let _ = nvml.join();
            asking.tell_what_nvml_counts(&outcomes);
        }
        // What was taken back because of another process says less than that one.
        let failures: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.result.failure()).collect();
        let cause = failures.iter().find(|failure| !failure.is(Kind::Aborted)).or(failures.first());
        let is_amiss = |one: &Communicator| one.error.is_some() || one.state.is_in_progress();
        let stays_held = |outcome: &Outcome| {
            outcome.result.report().is_some_and(|report| {
                asking.direction == Verb::Resume && !report.missing.is_empty() || report.communicators.iter().any(is_amiss)
            })
        };
        let otherwise = if outcomes.iter().any(stays_held) { Exit::Busy } else { Exit::Done };
        Ok(cause.map_or(otherwise, |failure| failure.exit()))
    }

    /// Tells the paused processes what NVML counts for them: it is not for them to ask.
    fn tell_what_nvml_counts(&self, outcomes: &[Outcome]) {
        let is_paused = |outcome: &Outcome| outcome.result.report().is_some_and(|report| report.allocations > 0);
        let paused = self.tasks.iter().zip(outcomes).filter(|(_, outcome)| is_paused(outcome)).map(|(task, _)| &task.process);
        let mut holders = BTreeMap::new();
        for process in paused {
            let own = |uuid: &str| {
                let holders = holders.entry(uuid.to_owned()).or_insert_with(|| driver::holders_of(uuid));
                let bytes = holders.iter().find(|holder| holder.pid == process.pid)?.bytes?;
                Some((uuid.to_owned(), bytes))
            };
            let gpus: BTreeMap<_, _> = process.gpus().filter_map(own).collect();
            if gpus.is_empty() {
                continue;
            }
            // One that has ended, or whose library is too old, has no use for it.
            let _ = self.found.connect(process.pid).and_then(|mut client| client.counted(gpus));
        }
    }

    /// Runs all groups in parallel. Returns the results for the tasks, and for those that were taken along.
    fn carry_out(&self) -> (Vec<Outcome>, Vec<(Process, Answer)>, Vec<JobOutcome>) {
        let done: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = self.groups.iter().map(|group| scope.spawn(|| self.carry_out_group(group))).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        let mut results: BTreeMap<usize, Answer> = BTreeMap::new();
        let (mut along, mut told) = (Vec::new(), Vec::new());
        for (AsOne { places, .. }, done) in self.groups.iter().zip(done) {
            // A thread that panicked has no results.
            let Ok((done, taken_along)) = done else { continue };
            told.push(self.job_outcome(places, &done));
            let mut answers = done.results.into_iter();
            results.extend(places.iter().copied().zip(answers.by_ref().map(|result| self.answer(result, done.committed))));
            let of_those = taken_along.into_iter().zip(answers).map(|(Along { process, .. }, result)| match result {
                // One that has ended has nothing open any more.
                Err(ClientError::Io { error, .. }) if done.committed && error.kind() != ErrorKind::TimedOut => {
                    (process, Answer::Report(Report::default()))
                }
                result => (process, self.answer(result, done.committed)),
            });
            along.extend(of_those);
        }
        let unasked = |task: &Task| {
            let broken = || Answer::Error(CommandError::new(Exit::Failed, "vramctl itself failed here; please report it"));
            if task.meant.is_empty() { Answer::Report(Report::default()) } else { broken() }
        };
        let outcome = |(place, task): (usize, &Task)| Outcome {
            pid: task.process.pid,
            name: task.process.name().map(str::to_owned),
            tags: task.meant.clone(),
            restored: self.restored.get(&task.process.pid).map(|done| json!(done)),
            trimmed: self.trimmed.get(&task.process.pid).cloned(),
            result: results.remove(&place).unwrap_or_else(|| unasked(task)),
        };
        (self.tasks.iter().enumerate().map(outcome).collect(), along, told)
    }

    /// The places of the tasks that have something to say to their processes, by job.
    fn jobs(&self) -> Vec<AsOne<Along>> {
        let mut jobs: BTreeMap<Result<&str, u32>, Vec<usize>> = BTreeMap::new();
        for (place, task) in self.tasks.iter().enumerate().filter(|(_, task)| task.process.prepares()) {
            jobs.entry(task.process.job().ok_or(task.process.pid)).or_default().push(place);
        }
        let is_asked = |place: &usize| {
            let task = &self.tasks[*place];
            !task.meant.is_empty() || (self.direction == Verb::Resume && task.process.is_held())
        };
        // One with none of the tags may have memory of the others open: it is held with them, and goes on with them.
        let all_take_part = self.request.tags.is_empty() || self.direction == Verb::Resume || self.request.hold_ms.is_some();
        let part = |mut places: Vec<usize>| {
            let any = places.iter().any(is_asked);
            places.retain(|place| any && (all_take_part || is_asked(place)));
            places
        };
        jobs.into_values().map(part).filter(|places| !places.is_empty()).map(|places| AsOne { places, along: Vec::new() }).collect()
    }

    /// Whether memory on this GPU is meant.
    fn wants(&self, gpu: &str) -> bool {
        self.request.gpus.is_empty() || self.request.gpus.iter().any(|wanted| wanted == gpu)
    }

    /// Tries again with others if those that have the memory open are others by then. Returns those that were taken along.
    fn carry_out_group(&self, group: &AsOne<Along>) -> (JobReport, Vec<Along>) {
        let (begun, mut along) = (Instant::now(), group.along.clone());
        let patience = Duration::from_millis(self.request.hold_ms.unwrap_or_default());
        loop {
            let done = self.carry_out_job(&group.places, &along);
            if done.committed || !self.takes_along || begun.elapsed() >= patience {
                return (done, along);
            }
            let pids = |along: &[Along]| along.iter().map(|along| along.process.pid).collect::<BTreeSet<_>>();
            match shared::find(&self.found, self.lent_by(&group.places)) {
                Ok(now) if pids(&now) != pids(&along) => along = now,
                _ => return (done, along),
            }
        }
    }

    fn carry_out_job(&self, places: &[usize], along: &[Along]) -> JobReport {
        let protocol::Transition { tags, lenient, .. } = &self.request;
        let rank = |pid, is_borrower| {
            let communicators = if is_borrower { Vec::new() } else { self.communicators.ids(pid) };
            Rank { pid, tags: tags.clone(), lenient: *lenient, is_borrower, communicators }
        };
        let own = self.pids(places).into_iter().map(|pid| rank(pid, false));
        let ranks = own.chain(along.iter().map(|along| rank(along.process.pid, true))).collect();
        let processes = || places.iter().map(|place| &self.tasks[*place].process);
        let gpus: BTreeSet<_> = processes().flat_map(Process::gpus).filter(|gpu| self.wants(gpu)).map(str::to_owned).collect();
        let who =
            processes().next().map_or_else(String::new, |first| first.job().map_or_else(|| first.to_string(), |job| format!("job {job}")));
        let ticket = Some(Claim { who, gpus: gpus.into_iter().collect(), waits: false });
        // Several jobs that share memory do not remember each other's processes.
        let jobs: BTreeSet<_> = processes().map(Process::job).collect();
        let job = Job { verb: self.direction, wanted: self.request.clone(), ranks, is_whole: self.is_whole && jobs.len() == 1, ticket };
        let bars = places.iter().map(|place| Mutex::new(self.bars.bar(&self.tasks[*place].process.to_string()))).collect();
        let done = self.found.carry_out(&job, &Following { asking: self, bars });
        self.stay_if_interrupted();
        done
    }

    fn job_outcome(&self, places: &[usize], done: &JobReport) -> JobOutcome {
        let processes: Vec<_> = places.iter().map(|place| &self.tasks[*place].process).collect();
        JobOutcome {
            job: processes[0].job().map(str::to_owned),
            pids: processes.iter().map(|process| process.pid).collect(),
            committed: done.committed,
            attempts: done.attempts,
            ms: done.ms,
        }
    }

    fn answer(&self, result: Result<Report, ClientError>, committed: bool) -> Answer {
        match result {
            Ok(report) => Answer::Report(report),
            Err(error) => {
                let is_stopped = matches!(&error, ClientError::Io { error, .. } if error.kind() == ErrorKind::TimedOut);
                let later =
                    format!("; the {} of its job is complete, and this process completes it when it goes on", self.direction.name());
                Answer::Error(CommandError::from(error).adding(if committed && is_stopped { &later } else { "" }))
            }
        }
    }

    fn tell(&self, task: &Task, answer: &Answer) -> Result<(), CommandError> {
        match answer {
            Answer::Report(report) => {
                if !self.quiet {
                    output::say(&success(self.direction, task, report, !self.request.gpus.is_empty()))?;
                }
                if let Some(text) = nccl::success(self.direction, &task.process, &report.communicators).filter(|_| !self.quiet) {
                    output::say(&text)?;
                }
                for why in nccl::failures(&task.process, &report.communicators) {
                    output::complain("error", &why);
                }
                if report.late_bytes > 0 {
                    let late = Bytes(report.late_bytes);
                    let text = format!("{}: the driver has not taken {late} back yet; every pause and resume retries", task.process);
                    output::complain("warning", &text);
                }
                for text in guard_warnings(report) {
                    output::complain("warning", &format!("{}: {text}", task.process));
                }
                for missing in &report.missing {
                    output::complain("error", &task.process.stays_held(missing));
                }
            }
            Answer::Error(failure) => {
                output::complain("error", &format!("{}: {failure}", task.process));
                for hint in hints(&self.found.look_again(&holders(failure))) {
                    output::complain("hint", &hint);
                }
            }
        }
        Ok(())
    }

    /// What has come of one that was taken along.
    fn tell_along(&self, process: &Process, answer: &Answer) -> Result<(), CommandError> {
        match answer {
            Answer::Report(report) if !self.quiet => {
                let mut text = String::new();
                for missing in &report.missing {
                    let bytes = Bytes(missing.paused_bytes);
                    let _ =
                        write!(text, "{}{bytes} that it has open of process {}", if text.is_empty() { "" } else { ", " }, missing.owner);
                }
                output::say(&match &text[..] {
                    "" => format!("nothing to do: {process} has none of it open any more"),
                    aside => format!("held {process}: {aside} are paused; it goes on by itself when they are resumed"),
                })
            }
            Answer::Report(_) => Ok(()),
            Answer::Error(failure) => {
                output::complain("error", &format!("{process}: {failure}"));
                Ok(())
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Parks the thread for good after ^C: `give_up` prints the result and ends the process.
    fn stay_if_interrupted(&self) {
        while self.connections().interrupted {
            thread::park();
        }
    }

    /// Closes the connections, which cancels what is only waiting, and prints the outcome.
    fn give_up(&self) {
        /// Processes check for a vanished client twice as often.
        const NOTICED_WITHIN: Duration = Duration::from_secs(1);
        let mut connections = self.connections();
        connections.interrupted = true;
        for connection in mem::take(&mut connections.open).values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        drop(connections);
        self.bars.wipe();
        let asked: Vec<_> = self.tasks.iter().filter(|task| !task.meant.is_empty()).collect();
        let pids: Vec<_> = asked.iter().map(|task| task.process.pid).collect();
        let deadline = Instant::now() + NOTICED_WITHIN;
        loop {
            let now = self.found.look_again(&pids);
            let found = |task: &Task| now.iter().find(|process| process.pid == task.process.pid);
            let left: Vec<_> = asked.iter().map(|task| task.left(self.direction, found(task))).collect();
            // It may be about to start.
            if !left.contains(&Left::AsItWas) || Instant::now() >= deadline {
                for (task, left) in asked.iter().zip(left) {
                    output::complain("interrupted", &format!("{}: the {} {left}", task.process, self.direction.name()));
                }
                return;
            }
            thread::sleep(NOTICED_WITHIN / 10);
        }
    }
}

/// Shows how far a job has come, and lets go of it when interrupted.
struct Following<'a> {
    asking: &'a Asking,
    bars: Vec<Mutex<Bar>>,
}

impl Follower for Following<'_> {
    fn connected(&self, pid: u32, stream: UnixStream) {
        self.asking.connections().open.insert(pid, stream);
        self.asking.stay_if_interrupted();
    }

    fn disconnected(&self, pid: u32) {
        self.asking.connections().open.remove(&pid);
    }

    fn queued(&self, before: &[Claim]) {
        if !self.asking.json && !self.asking.quiet {
            let first: Vec<_> = before.iter().map(|ticket| ticket.who.as_str()).collect();
            output::complain("note", &format!("number {} in the queue for GPU memory, behind {}", before.len() + 1, first.join(", ")));
        }
    }

    fn progress(&self, member: usize, now: Progress) {
        // Those that are taken along copy nothing.
        if let Some(bar) = self.bars.get(member) {
            bar.lock().unwrap_or_else(PoisonError::into_inner).show(now);
        }
    }
}

/// How an interrupted command leaves a process.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    /// With its progress.
    GoingOn(String),
    Done,
    AsItWas,
    Unknown(String),
}

impl fmt::Display for Left {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GoingOn(so_far) => write!(out, "is being taken back{so_far}; `vramctl status` shows when that is done"),
            Self::Done => write!(out, "is complete"),
            Self::AsItWas => write!(out, "was cancelled; nothing has changed"),
            Self::Unknown(why) => write!(out, "has an unknown outcome: {why}"),
        }
    }
}

impl Answer {
    fn report(&self) -> Option<&Report> {
        match self {
            Self::Report(report) => Some(report),
            Self::Error(_) => None,
        }
    }

    fn failure(&self) -> Option<&CommandError> {
        match self {
            Self::Report(_) => None,
            Self::Error(failure) => Some(failure),
        }
    }
}

fn success(direction: Verb, task: &Task, report: &Report, on_some_gpus: bool) -> String {
    let process = &task.process;
    if report.allocations == 0 {
        let state = direction.end().name();
        return match &task.meant[..] {
            // A tag's state covers all GPUs.
            [_, ..] if on_some_gpus => format!("nothing to do: {process} has nothing there to {}", direction.name()),
            [] if process.has_memory() => format!("nothing to do: {process} has none of these tags"),
            [] => format!("nothing to do: {process} has no managed memory"),
            [tag] => format!("nothing to do: {tag} of {process} is already {state}"),
            tags => format!("nothing to do: {} of {process} are already {state}", tags.join(", ")),
        };
    }
    // If nothing was due, the state has changed since, in one of the matching tags.
    let tags = if task.due.is_empty() { &task.meant } else { &task.due }.join(", ");
    let (did, moved, kept, discarded) = match direction {
        Verb::Pause => ("paused", "freed", "kept", "discarded"),
        Verb::Resume => ("resumed", "allocated", "restored", "zeroed"),
    };
    let mut text = format!("{did} {tags} of {process}: {} {moved} in {} ms", Bytes(report.bytes), whole(report.ms));
    let stages: Vec<_> = report.stages.iter().map(|(stage, ms)| format!("{} {}", stage.name(), whole(*ms))).collect();
    if !stages.is_empty() {
        let _ = write!(text, " ({})", stages.join(", "));
    }
    let unchanged = "of that unchanged and not copied again";
    let contents = [(report.kept_bytes, kept), (report.unchanged_bytes, unchanged), (report.discarded_bytes, discarded)];
    let contents: Vec<_> =
        contents.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, fate)| format!("{} {fate}", Bytes(*bytes))).collect();
    if !contents.is_empty() {
        let _ = write!(text, "; {}", contents.join(", "));
    }
    if report.guarded_bytes > 0 {
        let _ = write!(text, "; {} guarded by {} on the GPU", Bytes(report.guarded_bytes), Bytes(report.guard_bytes));
    }
    text
}

/// What a user of guards must know.
fn guard_warnings(report: &Report) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.unguarded_bytes > 0 {
        warnings.push(format!(
            "{} are paused without a guard, for which there was no memory: GPU work that touches them destroys the CUDA context",
            Bytes(report.unguarded_bytes)
        ));
    }
    if report.guard_written_bytes > 0 {
        warnings.push(format!(
            "something wrote to paused memory: {} of its guard have changed. What is resumed is as it was; what was written is lost, \
             and what was read there was garbage. Pause without --no-hold, or when the program is idle",
            Bytes(report.guard_written_bytes)
        ));
    }
    warnings
}

/// Milliseconds, rounded.
fn whole(ms: f64) -> String {
    format!("{ms:.0}")
}

/// The processes that hold the missing memory.
fn holders(failure: &CommandError) -> Vec<u32> {
    let CommandError::Refused(refusal) = failure else { return Vec::new() };
    refusal.shortage.iter().flat_map(|shortage| &shortage.holders).map(|holder| holder.pid).collect()
}

/// For a shortage: the holders that can be paused.
fn hints(holders: &[Process]) -> Vec<String> {
    let hint = |process: &Process| {
        let bytes = Bytes(process.active_bytes());
        format!("{process} is managed too; `vramctl pause --pid {}` frees {bytes}", process.pid)
    };
    holders.iter().filter(|process| process.active_bytes() > 0).map(hint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::tests::process;
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
        let tasks = plan(Verb::Pause, vec![engine(TagState::Active)], &[]).unwrap();
        let report = Report {
            allocations: 3,
            bytes: 40 << 30,
            kept_bytes: 38 << 30,
            discarded_bytes: 2 << 30,
            unchanged_bytes: 0,
            unchanged: 0,
            late_bytes: 0,
            missing: Vec::new(),
            guarded_bytes: 0,
            unguarded_bytes: 0,
            guard_bytes: 0,
            guard_written_bytes: 0,
            communicators: Vec::new(),
            stages: [(Stage::Wait, 3.2), (Stage::Save, 850.4), (Stage::Unmap, 19.8), (Stage::Release, 38.9)].into(),
            ms: 912.3,
        };
        assert_eq!(
            success(Verb::Pause, &tasks[0], &report, false),
            "paused kv_cache, weights of engine (pid 4711): 40.00 GiB freed in 912 ms (wait 3, save 850, unmap 20, release 39); \
             38.00 GiB kept, 2.00 GiB discarded"
        );
        let tasks = plan(Verb::Resume, vec![engine(TagState::Paused)], &names(&["weights"])).unwrap();
        let report = Report { stages: [(Stage::Map, 1.0)].into(), discarded_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Resume, &tasks[0], &report, false),
            "resumed weights of engine (pid 4711): 40.00 GiB allocated in 912 ms (map 1); 38.00 GiB restored"
        );
        assert!(guard_warnings(&report).is_empty());
        let guarded = Report { guarded_bytes: 40 << 30, guard_bytes: 62 << 20, kept_bytes: 0, ..report };
        assert_eq!(
            success(Verb::Pause, &tasks[0], &guarded, false),
            "paused weights of engine (pid 4711): 40.00 GiB freed in 912 ms (map 1); 40.00 GiB guarded by 62.00 MiB on the GPU"
        );
        let stray = guard_warnings(&Report { unguarded_bytes: 1 << 30, guard_written_bytes: 4096, ..Report::default() });
        assert!(stray[0].starts_with("1.00 GiB are paused without a guard"), "{stray:?}");
        assert!(stray[1].starts_with("something wrote to paused memory: 4.00 KiB of its guard"), "{stray:?}");
    }

    #[test]
    fn nothing_to_do_is_said() {
        let text = |process: Process, tags: &[&str]| {
            let other = self::process(1, "other", &[("x", TagState::Active)]);
            let tasks = plan(Verb::Pause, vec![process, other], &names(tags)).unwrap();
            success(Verb::Pause, &tasks[0], &Report::default(), false)
        };
        assert_eq!(text(engine(TagState::Paused), &[]), "nothing to do: kv_cache, weights of engine (pid 4711) are already paused");
        assert_eq!(text(engine(TagState::Paused), &["weights"]), "nothing to do: weights of engine (pid 4711) is already paused");
        assert_eq!(text(engine(TagState::Active), &["x"]), "nothing to do: engine (pid 4711) has none of these tags");
        assert_eq!(text(process(2, "idle", &[]), &[]), "nothing to do: idle (pid 2) has no managed memory");
    }

    #[test]
    fn a_tag_must_be_known_somewhere() {
        let two = || vec![process(1, "a", &[("x", TagState::Active)]), process(2, "b", &[("y", TagState::Active)])];
        let tasks = plan(Verb::Pause, two(), &names(&["y"])).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[1].meant), (&names(&[]), &names(&["y"])));
        let failure = plan(Verb::Pause, two(), &names(&["y", "z"])).unwrap_err();
        assert_eq!(failure.exit(), Exit::UnknownTag);
        assert_eq!(failure.to_string(), "no allocation has the tag z; the tags are x, y");
    }

    #[test]
    fn only_what_is_not_so_yet_is_named() {
        let half = process(1, "a", &[("x", TagState::Paused), ("y", TagState::Mixed)]);
        let tasks = plan(Verb::Pause, vec![half], &[]).unwrap();
        assert_eq!((&tasks[0].meant, &tasks[0].due), (&names(&["x", "y"]), &names(&["y"])));
    }

    #[test]
    fn a_holder_under_vramctl_can_be_paused() {
        let holder = |pid| Holder { pid, bytes: None, program: None };
        let shortage = Shortage { device: 0, uuid: None, needed: 2, free: 1, holders: vec![holder(7), holder(8)] };
        let failure = CommandError::Refused(Box::new(Refusal::from(&Error::DeviceMemory(shortage))));
        assert_eq!(failure.exit(), Exit::NoMemory);
        assert_eq!(holders(&failure), [7, 8]);
        let paused = process(7, "paused", &[("x", TagState::Paused)]);
        let active = process(8, "trainer", &[("x", TagState::Paused), ("y", TagState::Active)]);
        assert_eq!(hints(&[paused, active]), ["trainer (pid 8) is managed too; `vramctl pause --pid 8` frees 1.00 GiB"]);
    }

    #[test]
    fn seconds_may_have_fractions() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for wrong in ["", "x", "-1", "nan", "inf", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
