//! Takes processes off their GPUs and brings them back: keeps their libraries out of the driver, and has the driver lock and checkpoint them.
//!
//! Each step leaves a state that the next operation can continue from. The state is always read from the driver, so an operation may die at
//! any point, and what undoes a step follows from the state alone:
//!
//! | step | state after it | undone by |
//! | --- | --- | --- |
//! | quiesce the library ([`Client::suspend`](vramctl_control::client::Client::suspend)) | running | [`Client::awake`](vramctl_control::client::Client::awake) |
//! | lock | locked | unlock, then as above |
//! | checkpoint | checkpointed | restore, then as above |
//!
//! While an operation is between two steps, no other may take one: a lock per process (`lock.rs`) keeps others out.

mod member;
mod restore;

pub use member::Member;
pub use restore::{onto, room_for, short};

use crate::Reporter;
use crate::communicators::Elsewhere;
use crate::deadline::Deadline;
use crate::failure::{CommandError, Exit};
use crate::forecast::Forecast;
use crate::job::{Job, JobRequest, Rank, Role};
use crate::lock::FileLock;
use crate::outcome;
use crate::parallel;
use crate::proc;
use crate::processes::{Found, Process, Target, check_whole};
use crate::shared::Borrower;
use member::{mig, unless_in_the_way};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use vramctl_control::protocol;
use vramctl_driver::checkpoint::{GpuMap, ProcessState};
use vramctl_driver::{self as driver, Card};
use vramctl_model::support::Requirement;
use vramctl_model::{Failure, GpuUse, Obstacle, ObstacleKind, PauseRequest, Plan, Report, ResumeRequest, Selection, Verb, code, support};

/// Processes that leave their GPUs and come back together.
pub struct Checkpoint {
    /// Among these.
    pub found: Found,
    /// The processes.
    pub members: Vec<Member>,
    /// Whether they are whole jobs, not only one process.
    is_whole: bool,
    /// NCCL's communicators whose ranks on other nodes take part.
    everywhere: BTreeSet<String>,
}

/// The result of a pause or resume of all members.
pub struct Transitioned {
    /// The borrowers that are held.
    pub borrowers: Vec<(Process, Report)>,
    /// How long it took until all work had ended.
    pub waited: Duration,
}

/// Loads the driver, to checkpoint or restore.
pub fn load() -> Result<(), CommandError> {
    driver::checkpoint::prepare().map_err(|failure| {
        let is_old = failure.code == code::NOT_FOUND && failure.call.starts_with("cuCheckpoint");
        if is_old { CommandError::new(Exit::Unsuspendable, support::SUSPEND.text()) } else { unusable(failure) }
    })
}

fn unusable(failure: Failure) -> CommandError {
    CommandError::new(Exit::Unsuspendable, format!("the driver cannot be used from here: {failure}"))
}

/// The GPUs, for checks. None without NVML; the checks are then skipped, with a warning.
fn cards_to_check(reporter: &dyn Reporter) -> Vec<Card> {
    driver::cards().unwrap_or_else(|none| {
        let unchecked = "cannot check for room on the GPUs, nor for MIG mode, in which nothing can be restored";
        reporter.warn(&format!("{unchecked}: {none}"));
        Vec::new()
    })
}

/// What would prevent a suspend of the processes' jobs, as far as NVML can be asked. A process reports only what prevents one of itself alone.
pub fn look_for_obstacles(found: &Found, processes: &mut [Process]) {
    let cards = driver::cards().unwrap_or_default();
    let mut jobs = BTreeMap::<String, Vec<Process>>::new();
    for process in processes {
        let mut more = mig(process, process.pid, &cards);
        if process.suspended().is_none() && depends_on_others(process) {
            let whole = || std::iter::once(process.clone()).chain(found.others_of_job(process)).collect();
            let job = jobs.entry(process.job_or_itself()).or_insert_with(whole);
            more.extend(Elsewhere::of(&*job, &BTreeSet::new()).obstacle(process));
            let pids: Vec<_> = job.iter().map(|one| one.pid).collect();
            let together = Member::new(found, process.clone()).and_then(|mut member| member.plan(&PauseRequest::default(), &pids));
            if let (Ok(status), Ok(answer)) = (&mut process.status, together) {
                status.memory.obstacles = answer.plan.obstacles;
            }
        }
        if let Ok(status) = &mut process.status {
            status.memory.obstacles.extend(more);
        }
    }
}

/// Whether a process can be suspended alone may differ from whether its job can.
fn depends_on_others(process: &Process) -> bool {
    let is_shared = |obstacle: &Obstacle| obstacle.kind == ObstacleKind::Shared;
    let memory = process.status.as_ref().map(|status| &status.memory);
    memory.is_ok_and(|memory| !memory.communicators.is_empty() || memory.obstacles.iter().any(is_shared))
}

/// Fails if the driver cannot be used from here, as in a shell that does not find it, or is too old.
pub fn check_driver(need: &Requirement) -> Result<(), CommandError> {
    let cuda = driver::cuda_version().map_err(unusable)?;
    need.refusal(cuda).map_or(Ok(()), |why| Err(CommandError::new(Exit::Unsuspendable, why)))
}

/// Why the driver can do no suspend or no move, if it can be asked.
pub fn refusal_by_age() -> Option<(&'static Requirement, String)> {
    let cuda = driver::cuda_version().ok()?;
    [&support::SUSPEND, &support::MOVE].into_iter().find_map(|need| Some((need, need.refusal(cuda)?)))
}

/// The obstacles that a process itself does not know.
struct InTheWay {
    elsewhere: Elsewhere,
    cards: Vec<Card>,
}

impl InTheWay {
    fn of(&self, member: &Member) -> Vec<Obstacle> {
        self.elsewhere.obstacle(&member.process).into_iter().chain(member.mig(&self.cards)).collect()
    }
}

/// Where a process is that its library has left to a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whereabouts {
    /// It has nothing on any GPU.
    Away,
    /// Its context is on a GPU: a suspend or resume is under way, or was interrupted.
    OnGpu,
    /// The driver has lost it.
    Lost,
}

impl From<ProcessState> for Whereabouts {
    fn from(state: ProcessState) -> Self {
        match state {
            ProcessState::Running | ProcessState::Locked => Self::OnGpu,
            ProcessState::Checkpointed => Self::Away,
            ProcessState::Failed => Self::Lost,
        }
    }
}

/// Where the processes are that are suspended, or are being suspended or restored, as NVML shows it, which unlike the driver answers at once. It
/// does not know which of them are lost. Nothing without NVML, or where it shows processes that cannot be seen from here.
pub fn seen_by_nvml(found: &Found, processes: &[Process]) -> BTreeMap<u32, Whereabouts> {
    let mut holders = BTreeMap::<String, Vec<i32>>::new();
    let mut of_gpu = |uuid: &str| -> Option<Vec<i32>> {
        let pids = holders.entry(uuid.to_owned()).or_insert_with(|| {
            let pids = driver::holders_of(uuid).into_iter().map(|holder| holder.pid.cast_signed()).collect::<Vec<_>>();
            if pids.iter().all(proc::exists) { pids } else { vec![0] }
        });
        (!pids.contains(&0)).then(|| pids.clone())
    };
    let suspended: Vec<_> = processes.iter().filter_map(|process| Some((process.pid, process.suspended()?))).collect();
    if suspended.is_empty() || driver::cards().is_err() {
        return BTreeMap::new();
    }
    let mut seen = BTreeMap::new();
    for (pid, gpus) in suspended {
        let Some(own) = found.connect(pid).ok().map(|client| client.seen_as()).filter(|own| *own != 0) else { continue };
        let Some(all) = gpus.iter().map(|gpu| of_gpu(&gpu.uuid)).collect::<Option<Vec<_>>>() else { continue };
        seen.insert(pid, if all.iter().any(|pids| pids.contains(&own)) { Whereabouts::OnGpu } else { Whereabouts::Away });
    }
    seen
}

/// The same as the driver knows it, as far as it can be asked from here. To start it takes a while.
pub fn seen_by_driver(found: &Found, processes: &[Process]) -> BTreeMap<u32, Whereabouts> {
    let suspended: Vec<_> = processes.iter().filter(|process| process.suspended().is_some()).map(|process| process.pid).collect();
    if suspended.is_empty() || load().is_err() {
        return BTreeMap::new();
    }
    let state = |pid| Some((pid, driver::checkpoint::state(found.connect(pid).ok()?.seen_as()).ok()?.into()));
    suspended.into_iter().filter_map(state).collect()
}

fn at_once<R: Send>(members: &mut [Member], step: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
    parallel::each_well(members, step)
}

/// The first failure of a step.
fn first(answers: Vec<Result<(), CommandError>>) -> Result<(), CommandError> {
    answers.into_iter().collect()
}

impl Checkpoint {
    /// Connects to the processes that match.
    pub fn of(found: &Found, target: &Target) -> Result<Self, CommandError> {
        let members = found.choose_answering(target)?.into_iter().map(|process| Member::new(found, process)).collect::<Result<_, _>>()?;
        Ok(Self { found: found.clone(), members, is_whole: !target.is_by_id(), everywhere: BTreeSet::new() })
    }

    /// Those of the processes that do not answer because the driver has locked or checkpointed them and their library does not know it: its
    /// own calls wait.
    pub fn stuck(found: &Found, processes: &[Process]) -> Self {
        let silent: Vec<_> = processes.iter().filter(|process| process.status.is_err()).collect();
        if silent.is_empty() || load().is_err() {
            return Self { found: found.clone(), members: Vec::new(), is_whole: false, everywhere: BTreeSet::new() };
        }
        let cards = driver::cards().ok();
        let find = |process: &Process| {
            // A stopped one does not even greet. It is left alone: only its library knows what a restore needs.
            let mut member = Member::new(found, process.clone()).ok().filter(|member| member.pid != 0)?;
            match member.state().ok()? {
                ProcessState::Locked => (),
                // Its library cannot say what it needs, or where. It is at most what the process has in host memory, on any of the GPUs: the
                // driver does not say what it has saved, and a program may choose its GPUs after its start, so its environment does not say
                // them either. Too little room would lose the process, so this asks for too much. Without NVML, the room cannot be checked,
                // so it is left alone.
                ProcessState::Checkpointed => {
                    let [resident, swapped] = proc::bytes(member.pid.cast_unsigned(), ["VmRSS", "VmSwap"]);
                    let bytes = resident? + swapped.unwrap_or(0);
                    member.gpus = cards.as_ref()?.iter().map(|card| GpuUse { uuid: card.uuid.clone(), bytes }).collect();
                }
                ProcessState::Running | ProcessState::Failed => return None,
            }
            Some(member)
        };
        let members = parallel::each_well(silent, find).into_iter().flatten().collect();
        Self { found: found.clone(), members, is_whole: false, everywhere: BTreeSet::new() }
    }

    /// NCCL's communicators whose ranks on other nodes take part.
    #[must_use]
    pub fn with_ranks_elsewhere(self, everywhere: &BTreeSet<String>) -> Self {
        Self { everywhere: everywhere.clone(), ..self }
    }

    /// Fails if some processes of whole jobs are missing.
    pub fn check_whole(&self, ranks: Option<usize>, reporter: &dyn Reporter) -> Result<(), CommandError> {
        if self.is_whole || ranks.is_some() {
            check_whole(self.members.iter().map(|member| &member.process), true, ranks, reporter)
        } else {
            Ok(())
        }
    }

    /// Adds other processes, which leave and come back with these.
    pub fn join(&mut self, other: Self) {
        self.members.extend(other.members);
    }

    /// The processes' ids.
    pub fn pids(&self) -> Vec<u32> {
        self.members.iter().map(|member| member.process.pid).collect()
    }

    /// Fails if a process's id here is not the one that the driver uses.
    pub fn can_be_seen(&self) -> Result<(), CommandError> {
        self.members.iter().try_for_each(|member| member.can_be_seen().map_err(|failure| member.named(failure)))
    }

    /// Dry run: what a suspend would do to each process, and why it would fail.
    pub fn forecast(&mut self, wanted: &PauseRequest, reporter: &dyn Reporter) -> Vec<Forecast> {
        let pids = self.pids();
        let (loaded, in_the_way) = (load(), self.in_the_way(reporter));
        let forecast = |member: &mut Member| {
            let unknown = |failure| CommandError::new(Exit::Failed, format!("the driver does not report its state: {failure}"));
            let state = || driver::checkpoint::state(member.pid).map(drop).map_err(unknown);
            let asked = member.can_be_seen().and(loaded.clone()).and_then(|()| state());
            // A suspended process has nothing to pause, and no obstacles.
            if !member.gpus.is_empty() {
                let nothing = protocol::DryRun { plan: Plan::default(), refused: None };
                return Forecast { failure: asked.err(), ..Forecast::new(&member.process, nothing, true) };
            }
            let in_the_way = in_the_way.of(member);
            let mut answer = match (member.plan(wanted, &pids), unless_in_the_way(in_the_way.clone())) {
                (Ok(answer), _) => answer,
                (Err(_), Err(failure)) | (Err(failure), Ok(())) => return Forecast::refused(&member.process, failure),
            };
            answer.plan.obstacles.extend(in_the_way);
            let able = asked.and_then(|()| unless_in_the_way(answer.plan.obstacles.clone()));
            let paused = Forecast::new(&member.process, answer, wanted.options.force);
            Forecast { failure: able.err().or(paused.failure.clone()), ..paused }
        };
        self.members.iter_mut().map(forecast).collect()
    }

    /// Fails if something prevents a checkpoint of the members once they are paused. Nothing has changed then.
    pub fn check_restorable(&mut self, wanted: &PauseRequest, reporter: &dyn Reporter) -> Result<(), CommandError> {
        check_driver(&support::SUSPEND)?;
        let (in_the_way, pids) = (self.in_the_way(reporter), self.pids());
        let check = |member: &mut Member| {
            // A suspended one has been checked.
            if !member.gpus.is_empty() {
                return Ok(());
            }
            member.can_be_seen()?;
            unless_in_the_way(in_the_way.of(member))?;
            // Whatever else it refuses, its pause refuses, too.
            unless_in_the_way(member.plan(wanted, &pids).map_or_else(|_| Vec::new(), |answer| answer.plan.obstacles))
        };
        first(at_once(&mut self.members, |member| check(member).map_err(|failure| member.named(failure))))
    }

    /// What the members themselves do not know.
    fn in_the_way(&self, reporter: &dyn Reporter) -> InTheWay {
        let elsewhere = Elsewhere::of(self.members.iter().map(|member| &member.process), &self.everywhere);
        InTheWay { elsewhere, cards: cards_to_check(reporter) }
    }

    /// Resumes the tags that were active, and the open memory of members without tags.
    pub fn resume(&mut self, reporter: &dyn Reporter) -> Result<(), CommandError> {
        self.transition(JobRequest::Resume(ResumeRequest::default()), None, reporter).map(drop)
    }

    /// Holds and pauses all tags of all members, or of none. `borrowers`: those to hold as well, if that is wanted.
    pub fn pause(
        &mut self,
        wanted: &PauseRequest,
        borrowers: Option<Vec<Borrower>>,
        reporter: &dyn Reporter,
    ) -> Result<Transitioned, CommandError> {
        let selection = Selection { nccl: true, ..wanted.selection.clone() };
        self.transition(JobRequest::Pause(PauseRequest { selection, leaves: true, ..wanted.clone() }), borrowers, reporter)
    }

    fn transition(
        &mut self,
        request: JobRequest,
        borrowers: Option<Vec<Borrower>>,
        reporter: &dyn Reporter,
    ) -> Result<Transitioned, CommandError> {
        let (verb, role) = if request.pause().is_some() { (Verb::Pause, Role::Leaves) } else { (Verb::Resume, Role::Comes) };
        // The members may be several jobs, as in a swap.
        let jobs: BTreeSet<_> = self.members.iter().map(|member| member.process.job().map(str::to_owned)).collect();
        let mut due: Vec<_> = self.members.iter_mut().filter_map(|member| Some((member.due(verb)?, member))).collect();
        let rank = |(tags, member): &(Vec<String>, &mut Member)| Rank {
            pid: member.process.pid,
            role,
            tags: tags.clone(),
            lenient: false,
            amounts: None,
        };
        let report = Job {
            found: &self.found,
            request,
            ranks: due.iter().map(rank).collect(),
            borrowers,
            is_whole: self.is_whole && jobs.len() == 1 && !jobs.contains(&None),
            ticket: None,
            engines: None,
            nodes: None,
        }
        .run(reporter);
        let mut failures = Vec::new();
        for ((_, member), result) in due.iter_mut().zip(report.results) {
            member.done.stages.push((verb.name(), report.ms));
            match result {
                Ok(report) => {
                    (member.done.tag_bytes, member.done.missing) = (report.bytes, report.missing);
                    member.done.lost.extend(report.lost);
                }
                Err(error) => failures.push(member.failed(error)),
            }
        }
        let mut done = Transitioned { borrowers: Vec::new(), waited: report.waited };
        for (Borrower { process, .. }, result) in report.borrowers {
            match outcome::result(result, verb, false) {
                Ok(report) => done.borrowers.push((process, report)),
                Err(failure) => failures.push(failure.adding(&format!(" ({process})"))),
            }
        }
        CommandError::original(failures).map_or(Ok(done), Err)
    }

    /// Has the driver checkpoint the paused processes. After a failure they run again, unless the message says otherwise. No other operation
    /// suspends or restores them until the members are dropped. `deadline`: of the waits for other operations, and for calls in flight.
    pub fn leave_gpus(&mut self, deadline: Deadline, reporter: &dyn Reporter) -> Result<(), CommandError> {
        self.keep_others_out(deadline.left_or_a_moment())?;
        // If the driver does not report the state of one of them, it would not checkpoint it either, nor restore it.
        first(at_once(&mut self.members, |member| member.state().map(drop)))?;
        let limit = deadline.left_or_a_moment();
        let taken = first(self.all("quiesce", Member::quiesce))
            .and_then(|()| first(self.all("lock", |member| member.lock(limit))))
            .and_then(|()| first(self.all("checkpoint", Member::checkpoint)));
        taken.map_err(|failure| match self.restore(&GpuMap::new(), &Deadline::new(None), reporter) {
            Ok(()) => failure,
            Err(second) => failure.adding(&format!("; {second}. `vramctl resume` tries again")),
        })
    }

    /// Runs a step for all members at once. `stage`: the name for its time.
    fn all<R: Send>(&mut self, stage: &'static str, step: impl Fn(&mut Member) -> R + Sync) -> Vec<R> {
        at_once(&mut self.members, |member| member.time(stage, &step))
    }

    /// Waits until no other operation is suspending or restoring the processes, and keeps others out from then on.
    fn keep_others_out(&mut self, within: Duration) -> Result<(), CommandError> {
        let deadline = Instant::now() + within;
        let mut lacking: Vec<_> = self.members.iter_mut().filter(|member| member.alone.is_none()).collect();
        // All operations in the same order, so that none waits for another that waits for it.
        lacking.sort_by_key(|member| member.process.pid);
        let taken = lacking.iter_mut().try_for_each(|member| {
            let left = deadline.saturating_duration_since(Instant::now());
            let name = member.directory.beside(member.process.pid, "lock");
            member.alone = FileLock::take(&name, left).map_err(|others| member.in_use(&others, within))?;
            Ok(())
        });
        if taken.is_err() {
            for member in lacking {
                member.alone = None;
            }
        }
        taken
    }

    /// Why programs stay held after a resume.
    pub fn stay_held(&self) -> Vec<String> {
        self.members.iter().flat_map(|member| outcome::stays_held(&member.process, &member.done.missing)).collect()
    }
}
