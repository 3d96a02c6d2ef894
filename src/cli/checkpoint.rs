//! Suspends jobs and brings them back: pauses their processes, keeps their libraries out of the driver, and has the driver lock and
//! checkpoint them.
//!
//! Each step leaves a state that the next caller can continue from. The state is always read from the driver, so a caller may die at any
//! point. While a caller is between two steps, no other may take one: a lock per process ([`crate::lock`]) keeps others out.

use crate::dry_run::Foretold;
use crate::failure::{CommandError, Exit};
use crate::lock::{FileLock, Others};
use crate::nccl;
use crate::output;
use crate::proc;
use crate::processes::{self, Found, Process, Target};
use crate::shared::{self, Along};
use crate::target::milliseconds;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::{Client, ClientError};
use vramctl_control::discovery::Directory;
use vramctl_control::job::{Follower, Job, Rank};
use vramctl_control::protocol::{self, Refusal, Transition};
use vramctl_control::queue::InQueue;
use vramctl_driver::checkpoint::{self, GpuMap, ProcessState};
use vramctl_driver::{Card, cards, holders_of};
use vramctl_model::{
    Borrowed, Bytes, Communicator, CommunicatorState, Error, Failure, GpuUse, Kind, Obstacle, ObstacleKind, Plan, Report, Shortage,
    TagState, Verb, code,
};

/// A process of the job.
pub struct Member {
    pub process: Process,
    /// Where its socket is. Each request has its own connection: the process closes one that is not used for a while.
    directory: Directory,
    /// The process id for the driver; 0 if the process is not visible from here.
    pub pid: i32,
    /// Once it is suspended: the GPUs that it sees, and the memory that a restore needs there.
    pub gpus: Vec<GpuUse>,
    /// The tags that were active and are to be resumed. `None`: all, also those that it has got since.
    active: Option<Vec<String>>,
    pub done: Done,
    /// The driver will never restore it.
    pub is_lost: bool,
    /// Its memory has been restored on other GPUs.
    pub has_moved: bool,
    /// This command has set its library aside, and the driver has not locked it: it is woken even if the driver does not tell its state.
    is_only_aside: bool,
    /// Keeps other commands from suspending and restoring it.
    alone: Option<FileLock>,
}

/// For messages.
const FAILED: &str = "the driver reports the process as FAILED. It is lost: end it and start it again";

/// The result for one process.
#[derive(Debug, Default)]
pub struct Done {
    /// Bytes of its tags that were paused or resumed.
    pub tag_bytes: u64,
    /// Bytes of the rest that were checkpointed or restored.
    rest_bytes: u64,
    /// After a resume: memory of other processes that is not back yet, so the program stays held.
    missing: Vec<Borrowed>,
    /// The communicators that NCCL was asked to suspend or resume.
    communicators: Vec<Communicator>,
    /// Milliseconds in each step, in order.
    stages: Vec<(&'static str, f64)>,
}

impl Serialize for Done {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stages: BTreeMap<_, _> = self.stages.iter().copied().collect();
        let mut report =
            json!({ "bytes": self.bytes(), "tag_bytes": self.tag_bytes, "rest_bytes": self.rest_bytes, "stages": stages, "ms": self.ms() });
        if !self.missing.is_empty() {
            report["missing"] = json!(self.missing);
        }
        report.serialize(serializer)
    }
}

impl Done {
    /// A borrower's: `missing` is what it has set aside.
    fn of_borrower(Report { bytes, missing, ms, .. }: Report) -> Self {
        Self { tag_bytes: bytes, missing, stages: vec![(Verb::Pause.name(), ms)], ..Self::default() }
    }

    pub fn bytes(&self) -> u64 {
        self.tag_bytes + self.rest_bytes
    }

    fn add(&mut self, stage: &'static str, took: Duration) {
        self.stages.push((stage, took.as_secs_f64() * 1e3));
    }

    /// The total; the steps run one after another.
    fn ms(&self) -> f64 {
        self.stages.iter().map(|(_, ms)| ms).sum()
    }

    /// The times as text.
    pub fn took(&self) -> String {
        let stages: Vec<_> = self.stages.iter().map(|(stage, ms)| format!("{stage} {ms:.0}")).collect();
        format!("in {:.0} ms ({})", self.ms(), stages.join(", "))
    }
}

/// Makes all GPUs visible: a job may be on a GPU that `CUDA_VISIBLE_DEVICES` hides from this command. Call it before there are threads.
pub fn see_all_gpus() {
    // SAFETY: no other thread reads the environment yet.
    unsafe { std::env::remove_var("CUDA_VISIBLE_DEVICES") };
}

/// Connects to the processes that match.
pub fn join(found: &Found, target: &Target) -> Result<Vec<Member>, CommandError> {
    found.choose_answering(target)?.into_iter().map(|process| Member::new(found, process)).collect()
}

/// Loads the driver, to checkpoint or restore.
pub fn load() -> Result<(), CommandError> {
    checkpoint::prepare().map_err(|failure| {
        let is_old = failure.code == code::NOT_FOUND && failure.call.starts_with("cuCheckpoint");
        let why = format!("the driver cannot be used from here: {failure}");
        CommandError::new(Exit::Unsuspendable, if is_old { "the driver is older than 570 and cannot checkpoint".into() } else { why })
    })
}

/// Fails if the driver cannot reach the processes from here, or if they use a GPU whose checkpoints cannot be restored.
pub fn can_be_taken(members: &[Member]) -> Result<(), CommandError> {
    can_be_seen(members)?;
    let cards = cards_to_check();
    members.iter().try_for_each(|member| unless_in_the_way(member.mig(&cards)).map_err(|failure| member.named(failure)))
}

/// Fails if a process's id here is not the one that the driver uses.
pub fn can_be_seen(members: &[Member]) -> Result<(), CommandError> {
    members.iter().try_for_each(|member| member.can_be_seen().map_err(|failure| member.named(failure)))
}

/// The GPUs, for checks. None without NVML; the checks are then skipped, with a warning.
fn cards_to_check() -> Vec<Card> {
    static TOLD: Once = Once::new();
    cards().unwrap_or_else(|none| {
        let unchecked = "cannot check for room on the GPUs, nor for MIG mode, in which nothing can be restored";
        TOLD.call_once(|| output::complain("warning", &format!("{unchecked}: {none}")));
        Vec::new()
    })
}

fn unless_in_the_way(obstacles: Vec<Obstacle>) -> Result<(), CommandError> {
    if obstacles.is_empty() { Ok(()) } else { Err(CommandError::from(&Error::NotRestorable(obstacles))) }
}

/// Dry run: what a suspend would do to each process, and why it would fail.
pub fn foretell<'a>(members: &'a mut [Member], wanted: &Transition) -> Result<Vec<Foretold<'a>>, CommandError> {
    let (loaded, cards, pids) = (load(), cards_to_check(), members.iter().map(|member| member.process.pid).collect::<Vec<_>>());
    let foretell = |member: &'a mut Member| {
        let state = || checkpoint::state(member.pid).map(drop);
        let untold = |failure| CommandError::new(Exit::Failed, format!("the driver does not tell its state: {failure}"));
        let asked = member.can_be_seen().and(loaded.clone()).and_then(|()| state().map_err(untold));
        // A suspended process has nothing to pause, and no obstacles.
        if !member.gpus.is_empty() {
            let nothing = protocol::DryRun { plan: Plan::default(), refused: None };
            return Ok(Foretold { failure: asked.err(), ..Foretold::new(&member.process, nothing, true) });
        }
        let partners = pids.iter().copied().filter(|pid| *pid != member.process.pid).collect();
        let mut foretold =
            member.ask(|client| client.plan(Transition { partners, ..wanted.clone() })).map_err(|error| member.failed(error))?;
        foretold.plan.obstacles.extend(member.mig(&cards));
        let able = asked.and_then(|()| unless_in_the_way(foretold.plan.obstacles.clone()));
        let paused = Foretold::new(&member.process, foretold, wanted.force);
        Ok(Foretold { failure: able.err().or(paused.failure), ..paused })
    };
    members.iter_mut().map(foretell).collect()
}

/// How long a command waits for work and calls in flight and for other commands, all in all. What else it does in between, such as saving
/// contents, does not count.
pub struct Patience {
    limit: Duration,
    begun: Instant,
    used_ms: AtomicU64,
}

impl Patience {
    pub fn new(limit: Duration) -> Self {
        Self { limit, begun: Instant::now(), used_ms: AtomicU64::new(0) }
    }

    /// What is left of it. Calls that are about to end are always waited for.
    fn left(&self) -> Duration {
        const A_MOMENT: Duration = Duration::from_secs(1);
        let used = Duration::from_millis(self.used_ms.load(Ordering::Relaxed));
        self.limit.saturating_sub(used).max(A_MOMENT.min(self.limit))
    }

    fn wait<R>(&self, wait: impl FnOnce(Duration) -> R) -> R {
        let begun = Instant::now();
        let result = wait(self.left());
        self.used_ms.fetch_add(milliseconds(begun.elapsed()), Ordering::Relaxed);
        result
    }
}

impl Follower for Patience {
    fn drained(&self) -> Result<(), Box<Refusal>> {
        self.used_ms.store(milliseconds(self.begun.elapsed()), Ordering::Relaxed);
        Ok(())
    }
}

/// What the driver says of the processes that are suspended, or are being suspended or restored; as far as it can be asked from here.
pub fn states(found: &Found, processes: &[Process]) -> BTreeMap<u32, ProcessState> {
    let suspended: Vec<_> = processes.iter().filter(|process| process.suspended().is_some()).map(|process| process.pid).collect();
    if suspended.is_empty() || load().is_err() {
        return BTreeMap::new();
    }
    let state = |pid| Some((pid, checkpoint::state(found.connect(pid).ok()?.seen_as()).ok()?));
    suspended.into_iter().filter_map(state).collect()
}

/// Those of the processes that do not answer because the driver has locked or checkpointed them and their library does not know it: its own
/// calls wait.
pub fn stuck(found: &Found, processes: &[Process]) -> Vec<Member> {
    let silent: Vec<_> = processes.iter().filter(|process| process.status.is_err()).collect();
    if silent.is_empty() || load().is_err() {
        return Vec::new();
    }
    let cards = cards();
    let find = |process: &Process| {
        // A stopped one does not even greet. It is left alone: only its library knows what a restore needs.
        let mut member = Member::new(found, process.clone()).ok().filter(|member| member.pid != 0)?;
        match member.state().ok()? {
            ProcessState::Locked => (),
            // Its library cannot tell what it needs, or where. It is at most what the process has in host memory, on any of the GPUs: the
            // driver tells nobody what it has saved, and a program may choose its GPUs after its start, so its environment does not tell
            // them either. Too little room would lose the process, so this asks for too much. Without NVML, the room cannot be checked,
            // so it is left alone.
            ProcessState::Checkpointed => {
                let [resident, swapped] = proc::bytes(member.pid, ["VmRSS", "VmSwap"]);
                let bytes = resident? + swapped.unwrap_or(0);
                member.gpus = cards.as_ref().ok()?.iter().map(|card| GpuUse { uuid: card.uuid.clone(), bytes }).collect();
            }
            ProcessState::Running | ProcessState::Failed => return None,
        }
        Some(member)
    };
    thread::scope(|scope| {
        let find = &find;
        let threads: Vec<_> = silent.into_iter().map(|process| scope.spawn(move || find(process))).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs a step for all members at once. `stage`: the name for its time.
fn all<R: Send>(members: &mut [Member], stage: &'static str, step: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    at_once(members, |member| member.time(stage, &step))
}

fn at_once<R: Send>(members: &mut [Member], step: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    let step = &step;
    thread::scope(|scope| {
        let threads: Vec<_> = members.iter_mut().map(|member| scope.spawn(move || step(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The first failure of a step.
fn first(answers: Vec<Result<(), CommandError>>) -> Result<(), CommandError> {
    answers.into_iter().collect()
}

/// Holds and pauses all tags of all members, or of none. Then NCCL suspends the chosen communicators. `along`: the borrowers to take along,
/// if any are; returns what has come of them.
pub fn pause(
    found: &Found,
    members: &mut [Member],
    wanted: &Transition,
    chosen: &nccl::ChosenCommunicators,
    along: Option<Vec<Along>>,
    patience: &Patience,
) -> Result<Vec<(Process, Report)>, CommandError> {
    transition(found, members, Verb::Pause, wanted, chosen, along, patience)
}

/// The communicators that NCCL can suspend.
pub fn choose_communicators(found: &Found, members: &[Member]) -> Result<nccl::ChosenCommunicators, CommandError> {
    let mut chosen = nccl::ChosenCommunicators::default();
    let jobs: BTreeSet<_> = members.iter().map(|member| member.process.job().ok_or(member.process.pid)).collect();
    for job in jobs {
        let of_job = |member: &&Member| member.gpus.is_empty() && member.process.job().ok_or(member.process.pid) == job;
        chosen
            .add(nccl::ChosenCommunicators::ask(found, &members.iter().filter(of_job).map(|member| &member.process).collect::<Vec<_>>())?);
    }
    Ok(chosen)
}

/// Resumes the tags that were active, and the open memory of members without tags.
pub fn resume(found: &Found, members: &mut [Member]) -> Result<(), CommandError> {
    transition(found, members, Verb::Resume, &Transition::default(), &nccl::ChosenCommunicators::default(), None, &()).map(drop)
}

/// Pauses or resumes as one job.
fn transition(
    found: &Found,
    members: &mut [Member],
    verb: Verb,
    wanted: &Transition,
    chosen: &nccl::ChosenCommunicators,
    along: Option<Vec<Along>>,
    follower: &dyn Follower,
) -> Result<Vec<(Process, Report)>, CommandError> {
    // The members may be several jobs, as in a swap.
    let jobs: BTreeSet<_> = members.iter().map(|member| member.process.job().map(str::to_owned)).collect();
    let is_whole = jobs.len() == 1 && !jobs.contains(&None);
    let mut due: Vec<_> = members.iter_mut().filter_map(|member| Some((member.due(verb)?, member))).collect();
    let rank = |(tags, member): &(Vec<String>, &mut Member)| {
        let pid = member.process.pid;
        Rank { pid, tags: tags.clone(), lenient: false, is_borrower: false, communicators: chosen.ids(pid) }
    };
    let borrower = |Along { process, .. }: &Along| Rank {
        pid: process.pid,
        tags: Vec::new(),
        lenient: false,
        is_borrower: true,
        communicators: Vec::new(),
    };
    let job = |along: &[Along], hold_ms| {
        let ranks = due.iter().map(rank).chain(along.iter().map(borrower)).collect();
        let wanted = Transition { hold_ms, ..wanted.clone() };
        found.carry_out(&Job { verb, wanted, ranks, is_whole, ticket: None }, follower)
    };
    let pids: Vec<_> = due.iter().map(|(_, member)| member.process.pid).collect();
    let (done, along) = match along {
        Some(along) => shared::carry_out(found, &pids, wanted, along, job),
        None => (job(&[], wanted.hold_ms), Vec::new()),
    };
    let (mut results, mut failures) = (done.results.into_iter(), Vec::new());
    for ((_, member), result) in due.iter_mut().zip(results.by_ref()) {
        member.done.stages.push((verb.name(), done.ms));
        match result {
            Ok(report) => {
                (member.done.tag_bytes, member.done.missing, member.done.communicators) =
                    (report.bytes, report.missing, report.communicators);
            }
            Err(error) => failures.push(member.failed(error)),
        }
    }
    let mut held = Vec::new();
    for (Along { process, .. }, result) in along.into_iter().zip(results) {
        match result {
            Ok(report) => held.push((process, report)),
            Err(error) => failures.push(CommandError::from(error).adding(&format!(" ({process})"))),
        }
    }
    CommandError::original(failures).map_or(Ok(held), Err)
}

/// Fails if the driver does not tell the state of one of them: then it would not checkpoint it either, nor restore it.
pub fn can_be_asked(members: &mut [Member]) -> Result<(), CommandError> {
    first(at_once(members, |member| member.state().map(drop)))
}

/// Has the driver checkpoint the paused processes. After a failure they run again, unless the message says otherwise. No other command
/// suspends or restores them until the members are dropped.
pub fn take(members: &mut [Member], patience: &Patience) -> Result<(), CommandError> {
    patience.wait(|left| keep_others_out(members, left))?;
    can_be_asked(members)?;
    let limit = patience.left();
    let taken = stand_aside(members)
        .and_then(|()| first(all(members, "lock", |member| member.lock(limit))))
        .and_then(|()| first(all(members, "checkpoint", Member::checkpoint)));
    taken.map_err(|failure| match restore(members, &GpuMap::new(), None) {
        Ok(()) => failure,
        Err(second) => failure.adding(&format!("; {second}. `vramctl resume` tries again")),
    })
}

fn stand_aside(members: &mut [Member]) -> Result<(), CommandError> {
    first(all(members, "aside", |member| {
        // The answer may be lost although the library is aside.
        member.is_only_aside = member.gpus.is_empty();
        member.gpus = member.ask(Client::suspend).map_err(|error| member.not_aside(error))?;
        Ok(())
    }))
}

/// Waits until no other command is suspending or restoring the processes, and keeps others out from then on.
fn keep_others_out(members: &mut [Member], within: Duration) -> Result<(), CommandError> {
    let deadline = Instant::now() + within;
    let mut lacking: Vec<_> = members.iter_mut().filter(|member| member.alone.is_none()).collect();
    // All commands in the same order, so that none waits for another that waits for it.
    lacking.sort_by_key(|member| member.process.pid);
    let taken = lacking.iter_mut().try_for_each(|member| {
        let left = deadline.saturating_duration_since(Instant::now());
        member.alone =
            FileLock::take(&member.directory.beside(member.process.pid, "lock"), left).map_err(|others| member.in_use(&others, within))?;
        Ok(())
    });
    if taken.is_err() {
        for member in lacking {
            member.alone = None;
        }
    }
    taken
}

/// How long to wait, without a limit, for another command's restore. Restores come one after the other, and the driver takes its time.
pub const RESTORE_WITHIN: Duration = Duration::from_secs(60);

/// Brings processes back to running, from whatever state each is in.
pub fn restore(members: &mut [Member], map: &GpuMap, until: Option<Instant>) -> Result<(), CommandError> {
    restore_with_room(members, map, None, until, None)
}

/// `tags_on`: starts only if there is room for the paused memory on these GPUs, too, so that the job either comes back completely or stays
/// as it is; empty means on all. `until`: how long to wait for room, and for other commands. `place`: the command's, in the queue for memory.
pub fn restore_with_room(
    members: &mut [Member],
    map: &GpuMap,
    tags_on: Option<&[String]>,
    until: Option<Instant>,
    mut place: Option<&mut InQueue>,
) -> Result<(), CommandError> {
    const LOOK_AGAIN: Duration = Duration::from_millis(50);
    /// How long to wait, without a limit, for a command that is about to finish.
    const OTHERS_WITHIN: Duration = Duration::from_secs(10);
    /// Others that wait for room look for it in turns.
    const A_MOMENT: Duration = Duration::from_secs(1);
    let left = |otherwise| until.map_or(otherwise, |until| until.saturating_duration_since(Instant::now()).max(A_MOMENT));
    let begun = Instant::now();
    let (loosened, _room) = loop {
        let is_alone = members.iter().all(|member| member.alone.is_some());
        keep_others_out(members, left(OTHERS_WITHIN))?;
        if !is_alone {
            at_once(members, Member::look_again);
        }
        // Before any wait: what still is on its GPU needs no room, and what is lost never comes back.
        let loosened = first(at_once(members, Member::loosen));
        known(members)?;
        match room(&needs(members, map, tags_on), left(RESTORE_WITHIN)) {
            Ok(room) => break (loosened, room),
            Err(short) if loosened.is_ok() && until.is_some_and(|until| Instant::now() < until) && short.exit() == Exit::NoMemory => (),
            Err(short) => return Err(loosened.err().map_or(short.clone(), |lost| lost.adding(&format!("; {short}")))),
        }
        if let Some(place) = &mut place {
            place.waits_for_memory();
        }
        if !is_alone {
            for member in members.iter_mut() {
                member.alone = None;
            }
        }
        thread::sleep(LOOK_AGAIN);
    };
    for member in members.iter_mut() {
        member.done.add("room", begun.elapsed());
    }
    let restored = first(all(members, "restore", |member| member.restore(map)));
    let unlocked = first(all(members, "unlock", Member::loosen));
    loosened.and(restored).and(unlocked)
}

/// Fails if nothing is known of what a member's restore needs: the driver had only locked it when it was found ([`stuck`]), and has
/// checkpointed it since, for another tool.
fn known(members: &[Member]) -> Result<(), CommandError> {
    let is_unknown = |member: &&Member| member.process.status.is_err() && member.gpus.is_empty();
    let is_gone = |member: &&Member| matches!(checkpoint::state(member.pid), Ok(ProcessState::Checkpointed));
    let Some(member) = members.iter().filter(is_unknown).find(is_gone) else { return Ok(()) };
    Err(CommandError::new(Exit::Busy, format!("{} has just been checkpointed by somebody else; try again", member.process)))
}

/// Bytes that must be free to restore this much. A restore that runs out of memory cannot be retried, so this is more.
pub fn room_for(bytes: u64) -> u64 {
    bytes + bytes / 4
}

/// Bytes that a restore needs, by GPU. `tags_on`: including paused memory on these GPUs, or on all if there are none.
fn needs(members: &[Member], map: &GpuMap, tags_on: Option<&[String]>) -> BTreeMap<String, u64> {
    let onto = |uuid: &String| map.iter().find(|(old, _)| old == uuid).map_or(uuid, |(_, new)| new).clone();
    let mut needs = BTreeMap::<_, u64>::new();
    // If the driver does not report the state now, it may still restore the process.
    let comes_back = |member: &&Member| matches!(checkpoint::state(member.pid), Ok(ProcessState::Checkpointed) | Err(_));
    for member in members.iter().filter(comes_back) {
        for gpu in member.gpus.iter().filter(|gpu| gpu.bytes > 0) {
            *needs.entry(onto(&gpu.uuid)).or_default() += room_for(gpu.bytes);
        }
        let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
        for device in devices {
            if let Some(uuid) = &device.uuid
                && tags_on.is_some_and(|gpus| gpus.is_empty() || gpus.contains(uuid))
            {
                *needs.entry(onto(uuid)).or_default() += device.paused_bytes;
            }
        }
    }
    needs
}

/// Fails if there is not enough room. Holds a lock among this user's restores, so that no other takes the room meanwhile.
fn room(needs: &BTreeMap<String, u64>, within: Duration) -> Result<Option<FileLock>, CommandError> {
    let turn = FileLock::take("restore.lock", within).map_err(|others| {
        let text =
            format!("{} has been restoring a job for {} s; see who has {} open", others.who(), within.as_secs(), others.place.display());
        CommandError::new(Exit::Failed, text)
    })?;
    let cards = if needs.is_empty() { Vec::new() } else { cards_to_check() };
    let is_short = |card: &&Card| needs.get(&card.uuid).is_some_and(|needed| *needed > card.free);
    cards.iter().find(is_short).map_or(Ok(turn), |card| Err(short(card, needs[&card.uuid])))
}

/// Somebody else pauses, resumes or suspends the process, or has just done so.
fn leased(message: String) -> CommandError {
    CommandError::Refused(Box::new(Refusal { message, ..Refusal::from(&Error::Leased) }))
}

/// Too little memory on a GPU.
pub fn short(card: &Card, needed: u64) -> CommandError {
    let (uuid, holders) = (Some(card.uuid.clone()), holders_of(&card.uuid));
    CommandError::from(&Error::DeviceMemory(Shortage { device: card.index as i32, uuid, needed, free: card.free, holders }))
}

/// Prints the results, as JSON or one line per process from `line`. Returns the exit code. `along`: the borrowers, which only JSON includes.
pub fn tell(
    members: &[Member],
    along: Vec<(Process, Report)>,
    as_json: bool,
    quiet: bool,
    line: impl Fn(&Member) -> String,
) -> Result<Exit, CommandError> {
    let held = stay_held(members);
    if as_json {
        let answer = |process: &Process, done: &Done| json!({ "pid": process.pid, "name": process.name(), "report": done });
        let own = members.iter().map(|member| answer(&member.process, &member.done));
        let along = along.into_iter().map(|(process, report)| answer(&process, &Done::of_borrower(report)));
        output::json(&own.chain(along).collect::<Vec<_>>())?;
    } else {
        members.iter().filter(|_| !quiet).try_for_each(|member| output::say(&line(member)))?;
        for why in &held {
            output::complain("error", why);
        }
    }
    Ok(if held.is_empty() { Exit::Done } else { Exit::Busy })
}

/// Why programs stay held after a resume.
pub fn stay_held(members: &[Member]) -> Vec<String> {
    let missing = |member: &Member| member.done.missing.iter().map(|missing| member.process.stays_held(missing)).collect::<Vec<_>>();
    members.iter().flat_map(|member| [missing(member), member.failures_of_nccl()].concat()).collect()
}

impl Member {
    fn new(found: &Found, process: Process) -> Result<Self, CommandError> {
        let directory = found.directory(process.pid)?;
        let pid = Client::connect(&directory, process.pid)?.seen_as();
        let gpus = process.suspended().unwrap_or_default().to_vec();
        let is_active = |state| state != TagState::Paused || !gpus.is_empty();
        let active: Vec<_> = process.tags().iter().filter(|tag| is_active(tag.state)).map(|tag| tag.tag.clone()).collect();
        let active = Some(active).filter(|active| active.len() < process.tags().len());
        Ok(Self {
            directory,
            pid,
            gpus,
            active,
            process,
            done: Done::default(),
            is_lost: false,
            has_moved: false,
            is_only_aside: false,
            alone: None,
        })
    }

    fn ask<R>(&self, request: impl FnOnce(&mut Client) -> Result<R, ClientError>) -> Result<R, ClientError> {
        request(&mut Client::connect(&self.directory, self.process.pid)?)
    }

    /// Others may have moved it before they were kept out.
    fn look_again(&mut self) {
        // One that did not answer is locked, and does not answer now.
        if self.process.status.is_ok()
            && let Some(now) = processes::ask(&self.directory, &[self.process.pid]).pop()
            && let Some(gpus) = now.suspended()
        {
            self.gpus = gpus.to_vec();
            self.process = now;
        }
    }

    /// The tags to pause or resume; empty means all, `None` leaves the process out. One without memory of its own may have the others' memory
    /// open.
    fn due(&self, verb: Verb) -> Option<Vec<String>> {
        match (verb, &self.active) {
            (Verb::Pause, _) => self.gpus.is_empty().then(Vec::new),
            (Verb::Resume, None) => Some(Vec::new()),
            (Verb::Resume, Some(active)) => (!active.is_empty()).then(|| active.clone()),
        }
    }

    fn time<R>(&mut self, stage: &'static str, step: impl FnOnce(&mut Self) -> R) -> R {
        let started = Instant::now();
        let result = step(self);
        self.done.add(stage, started.elapsed());
        result
    }

    fn failed(&self, error: ClientError) -> CommandError {
        if let ClientError::Refused(refusal) = &error
            && let Some(lent) = refusal.lent.as_ref().filter(|_| refusal.code == Kind::Shared)
        {
            // The refusal's own advice is about the options of a pause.
            let lent: Vec<_> = lent.iter().map(ToString::to_string).collect();
            let message = format!(
                "other processes have memory of {} open (CUDA IPC): {}. Have them close it, or end them; or name all of these \
                 processes in one command (--all, or a name that they have in common), which then includes this memory. Nothing has changed",
                self.process,
                lent.join(", ")
            );
            return CommandError::Refused(Box::new(Refusal { message, ..(**refusal).clone() }));
        }
        self.named(CommandError::from(error))
    }

    fn not_aside(&self, error: ClientError) -> CommandError {
        match self.failed(error) {
            // There is no other reason to refuse this.
            failure if failure.is(Kind::Leased) => leased(format!("{} has been resumed meanwhile, and runs; try again", self.process)),
            failure => failure,
        }
    }

    /// Adds the process to the message.
    fn named(&self, failure: CommandError) -> CommandError {
        failure.adding(&format!(" ({})", self.process))
    }

    fn can_be_seen(&self) -> Result<(), CommandError> {
        let away = || CommandError::new(Exit::Unsuspendable, "it is in another container: run vramctl there");
        if self.pid == 0 { Err(away()) } else { Ok(()) }
    }

    /// The obstacles that the process itself does not know: GPUs in MIG mode.
    fn mig(&self, cards: &[Card]) -> Vec<Obstacle> {
        // Without memory of its own, it may still have a context there.
        let has_context = |card: &Card| holders_of(&card.uuid).iter().any(|holder| holder.pid == self.pid as u32);
        let is_there = |card: &&Card| self.process.gpus().any(|gpu| gpu == card.uuid) || has_context(card);
        let obstacle = |card: &Card| Obstacle {
            kind: ObstacleKind::Mig,
            what: format!("GPU {0} is in MIG mode (`nvidia-smi -i {0} -mig 0` ends that, once no program uses it)", card.index),
            bytes: 0,
        };
        cards.iter().filter(|card| card.mig).filter(is_there).map(obstacle).collect()
    }

    fn state(&mut self) -> Result<ProcessState, CommandError> {
        checkpoint::state(self.pid).map_err(|failure| self.refused("tell the state of", failure))
    }

    fn in_use(&self, others: &Others, within: Duration) -> CommandError {
        let stopped = others.pid.map_or_else(String::new, |pid| format!(" (if that is stopped: kill -CONT {pid})"));
        let message = format!(
            "{} has been suspending or restoring {} for {} s; try again when it is done{stopped}",
            others.who(),
            self.process,
            within.as_secs()
        );
        leased(message)
    }

    /// The driver's refusal, with the state that it has left the process in.
    fn refused(&mut self, step: &str, failure: Failure) -> CommandError {
        if !proc::exists(self.pid) {
            return CommandError::new(Exit::NoProcess, format!("{} has ended", self.process));
        }
        let lost = match checkpoint::state(self.pid) {
            Ok(ProcessState::Failed) => format!("; {FAILED}"),
            // Driver 580 answers this from then on.
            Ok(ProcessState::Checkpointed) if step == "restore" && failure.code == code::OPERATING_SYSTEM => {
                "; an earlier restore has failed for lack of memory. It is lost: end it and start it again".into()
            }
            _ => String::new(),
        };
        self.is_lost = !lost.is_empty();
        CommandError::new(Exit::Failed, format!("the driver did not {step} {}: {failure}{lost}", self.process))
    }

    fn lock(&mut self, limit: Duration) -> Result<(), CommandError> {
        match self.state()? {
            ProcessState::Running => checkpoint::lock(self.pid, limit).map_err(|failure| match failure.code {
                code::NOT_READY => {
                    CommandError::new(Exit::Busy, format!("{}: a CUDA call has not ended in {} ms", self.process, limit.as_millis()))
                }
                _ => self.refused("lock", failure),
            })?,
            ProcessState::Locked => (),
            ProcessState::Checkpointed | ProcessState::Failed => return Ok(()),
        }
        self.is_only_aside = false;
        // The program kept running until now, and may have created new obstacles.
        let obstacles = self.ask(Client::status).map_err(|error| self.failed(error))?.memory.obstacles;
        unless_in_the_way(obstacles).map_err(|failure| self.named(failure))
    }

    fn checkpoint(&mut self) -> Result<(), CommandError> {
        if self.state()? == ProcessState::Checkpointed {
            return Ok(());
        }
        checkpoint::checkpoint(self.pid).map_err(|failure| self.refused("checkpoint", failure))?;
        self.done.rest_bytes = self.gpus.iter().map(|gpu| gpu.bytes).sum();
        Ok(())
    }

    /// Lets the process continue if it is on its GPUs: before a restore, one that has not left them, and after it, all of them. Also tells its
    /// library that it may use the driver again.
    fn loosen(&mut self) -> Result<(), CommandError> {
        match self.state() {
            Ok(ProcessState::Running) => (),
            Ok(ProcessState::Locked) => checkpoint::unlock(self.pid).map_err(|failure| self.refused("unlock", failure))?,
            Ok(ProcessState::Checkpointed) => return Ok(()),
            Ok(ProcessState::Failed) => {
                self.is_lost = true;
                return Err(CommandError::new(Exit::Failed, format!("{}: {FAILED}", self.process)));
            }
            // Only a locked process can be unlocked, so this changes no other.
            Err(unknown) => {
                let is_unlocked = checkpoint::unlock(self.pid).is_ok();
                if !is_unlocked && !self.is_only_aside {
                    return Err(unknown);
                }
            }
        }
        self.ask(Client::awake).map_err(|error| self.failed(error))?;
        self.is_only_aside = false;
        Ok(())
    }

    fn restore(&mut self, map: &GpuMap) -> Result<(), CommandError> {
        match self.state()? {
            ProcessState::Checkpointed => (),
            // Nothing to restore. `Failed` has been reported.
            ProcessState::Running | ProcessState::Locked | ProcessState::Failed => return Ok(()),
        }
        let own: GpuMap = map.iter().filter(|(old, _)| self.gpus.iter().any(|gpu| gpu.uuid == *old)).cloned().collect();
        let restored = match checkpoint::restore(self.pid, map) {
            // The driver requires every GPU that is visible to the process, but does not report which those are.
            Err(failure) if failure.code == code::INVALID_VALUE && own != *map => checkpoint::restore(self.pid, &own),
            answer => answer,
        };
        restored.map_err(|failure| self.refused("restore", failure))?;
        self.has_moved = map.iter().any(|(old, new)| old != new && self.process.gpus().any(|gpu| gpu == old));
        self.done.rest_bytes = self.gpus.iter().map(|gpu| gpu.bytes).sum();
        Ok(())
    }

    /// Device memory that is left to CUDA, which a pause by tag does not release.
    pub fn left_alone(&self) -> u64 {
        self.process.status.iter().flat_map(|status| &status.memory.left_alone).map(|left| left.bytes).sum()
    }

    /// Bytes that NCCL has given back.
    pub fn given_back(&self) -> u64 {
        nccl::bytes(&self.done.communicators, CommunicatorState::Suspended)
    }

    /// NCCL's failures.
    pub fn failures_of_nccl(&self) -> Vec<String> {
        nccl::failures(&self.process, &self.done.communicators)
    }

    /// For messages.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.done.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_has_waited_for_one_thing_is_gone_for_the_next() {
        let patience = Patience::new(Duration::from_secs(10));
        patience.wait(|left| {
            assert_eq!(left, Duration::from_secs(10));
            thread::sleep(Duration::from_millis(20));
        });
        assert!(patience.left() <= Duration::from_millis(9980));
        patience.used_ms.store(60_000, Ordering::Relaxed);
        assert_eq!(patience.left(), Duration::from_secs(1), "calls that are about to end");
        assert_eq!(Patience::new(Duration::from_millis(200)).left(), Duration::from_millis(200));
    }
}
