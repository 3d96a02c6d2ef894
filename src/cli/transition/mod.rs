//! `vramctl pause` and `vramctl resume`.
//!
//! [`Asking`] finds the processes and sends the requests, job by job. [`task`] plans the request for each process, [`follow`] follows the
//! progress, and [`answers`] prints the results. [`options`] has the options.

mod answers;
mod follow;
mod options;
mod task;

use crate::checkpoint::{self, Done};
use crate::dry_run::{self, Foretold};
use crate::engine;
use crate::failure::{CommandError, Exit};
use crate::interrupt;
use crate::nccl;
use crate::output;
use crate::processes::{Found, Process, Target, check_whole};
use crate::progress::Bars;
use crate::shared::{self, Along, AsOne};
use crate::suspend;
use crate::target::milliseconds;
use crate::trim;
use answers::{Answer, JobOutcome, Outcome, Telling};
use follow::{Connections, Following};
use options::Args;
pub use options::{PauseArgs, ResumeArgs};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use task::{Left, Task, plan};
use vramctl_control::job::{Job, JobReport, Rank};
use vramctl_control::protocol::{self, Refusal};
use vramctl_control::queue::{Claim, InQueue};
use vramctl_driver as driver;
use vramctl_model::{Communicator, Error, Kind, Report, Trimmed, Verb};

/// How long a program's allocator may take to return its cache before a pause.
const TRIM_TIMEOUT: Duration = Duration::from_secs(10);

pub fn pause(args: &PauseArgs) -> Result<Exit, CommandError> {
    // One deadline for all that the command waits for.
    let until = args.transition.timeout.map(|timeout| Instant::now() + timeout);
    let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
    let hold_ms = args.hold.ms(left());
    let Args { target, words, json, quiet, .. } = &args.transition;
    let trimmed = if args.trim {
        trim::before_a_pause(
            Target::from(target.clone()),
            words.clone(),
            left().unwrap_or(TRIM_TIMEOUT).min(TRIM_TIMEOUT),
            *json || *quiet,
        )?
    } else {
        BTreeMap::new()
    };
    let found = Found::look(&Target::from(target.clone()))?;
    let mut asking = Asking::prepare(Verb::Pause, found, &args.transition)?;
    asking.trimmed = trimmed;
    asking.request.backup = args.backup.policy();
    asking.request.registered = args.registered;
    asking.request.guard = args.guard;
    asking.request.hold_ms = hold_ms;
    asking.request.force = args.engine.force();
    asking.groups = asking.jobs();
    if args.shared {
        asking.take_along()?;
    }
    if hold_ms.is_some() {
        args.waiting.check_not_held(asking.held())?;
    }
    if args.nccl {
        asking.choose_communicators()?;
    }
    if args.dry_run {
        return asking.foretell(args.engine.asks());
    }
    asking.wait_for_borrowers(until);
    if !args.engine.force() {
        asking.request.force = asking.may_discard(&args.engine, until)?;
    }
    asking.request.hold_ms = args.hold.ms(left());
    asking.until = until;
    asking.run()
}

pub fn resume(args: &ResumeArgs) -> Result<Exit, CommandError> {
    checkpoint::see_all_gpus();
    let Args { target, words, timeout, json, quiet, .. } = &args.transition;
    let begun = Instant::now();
    let until = timeout.map(|timeout| begun + timeout);
    let look = || Found::look(&Target::from(target.clone()));
    let prepare = |found| Asking::prepare(Verb::Resume, found, &args.transition);
    let found = look()?;
    // Before anything is brought back, so that a wrong argument changes nothing.
    let mut asking = prepare(found.clone()).or_else(|failure| {
        if failure.exit() != Exit::Busy {
            return Err(failure);
        }
        // One that does not answer may be locked.
        let (target, _) = found.tell_apart(Target::from(target.clone()), words.clone());
        if suspend::free_stuck(&found, &target, until)? { prepare(look()?) } else { Err(failure) }
    })?;
    let Asking { found, target, request, .. } = &asking;
    // Kept until their memory is resumed, too.
    let mut place = asking.queue(begun, *timeout)?;
    let restored = suspend::bring_back(found, target, request, until, place.as_mut(), *json || *quiet)?;
    if !restored.is_empty() {
        let has_turn = place.is_some().then_some(asking.in_queue);
        asking = Asking { restored, has_turn, ..prepare(look()?)? };
    }
    asking.request.timeout_ms = until.map(|until| milliseconds(until.saturating_duration_since(Instant::now())));
    asking.groups = asking.jobs();
    asking.join_those_that_wait();
    asking.run()
}

/// Says so if a process is only a part of its job.
fn tell_of_the_rest(found: &Found, process: &Process) {
    let others = found.others_of_job(process);
    let Some(job) = process.job().filter(|_| !others.is_empty()) else { return };
    let pids: Vec<_> = others.iter().map(|other| other.pid.to_string()).collect();
    let whole = Target::Name(job.to_owned()).command("pause");
    let text = format!(
        "{process} is one of {} processes of the job {}; the others are not paused (pid {}), and may soon wait for it. {}",
        1 + others.len(),
        output::one_line(job),
        pids.join(", "),
        if process.name() == Some(job) {
            format!("`{whole}` pauses all of them")
        } else {
            "`vramctl pause` with no --pid pauses all of them".into()
        }
    );
    output::complain("warning", &text);
}

/// A pause or resume of several processes.
#[allow(clippy::struct_excessive_bools)] // options
struct Asking {
    direction: Verb,
    target: Target,
    found: Found,
    tasks: Vec<Task>,
    /// The same for each process: it applies to their own memory and to open memory of each other.
    request: protocol::Transition,
    /// The communicators that NCCL is to suspend.
    communicators: nccl::ChosenCommunicators,
    /// The inference engines that have agreed to a pause.
    engines: Option<engine::Engines>,
    /// For how long a pause is tried again if an engine has got a request meanwhile.
    until: Option<Instant>,
    /// Who is asked as one.
    groups: Vec<AsOne<Along>>,
    /// Whether borrowers are held as well (`--shared`).
    takes_along: bool,
    /// Whether whole jobs are selected, not only some of their processes or memory.
    is_whole: bool,
    /// How suspended processes were restored to the GPU.
    restored: BTreeMap<u32, Done>,
    /// What the programs' own allocators returned before.
    trimmed: BTreeMap<u32, Trimmed>,
    /// This command in the queue for memory: a random number.
    in_queue: u64,
    /// Its number there, if it has a place for all of its jobs.
    has_turn: Option<u64>,
    json: bool,
    quiet: bool,
    bars: Bars,
    connections: Connections,
}

impl Asking {
    /// Chooses among the processes and plans their requests. Changes nothing.
    fn prepare(direction: Verb, mut found: Found, args: &Args) -> Result<Self, CommandError> {
        let (target, tags) = found.tell_apart(Target::from(args.target.clone()), args.words.clone());
        let gpus = found.keep_on(&args.gpu.gpu)?;
        let tasks = found.choose_answering(&target).and_then(|chosen| plan(direction, chosen, &tags)).map_err(|failure| {
            let meant = found.taken_for_tag(direction.name(), &tags);
            match failure.exit() {
                Exit::UnknownTag => failure.adding(&meant.unwrap_or_else(|| format!("; processes: {}", found.names()))),
                Exit::Usage => failure.adding(&meant.unwrap_or_default()),
                _ => failure,
            }
        })?;
        let is_whole = gpus.is_empty() && !matches!(target, Target::Pid(_));
        if is_whole || args.ranks.is_some() {
            // Without `--ranks`, a resume continues without processes that have ended.
            check_whole(tasks.iter().map(|task| &task.process), direction == Verb::Pause, args.ranks)?;
        }
        if direction == Verb::Pause && matches!(target, Target::Pid(_)) {
            for task in &tasks {
                tell_of_the_rest(&found, &task.process);
            }
        }
        let bars = Bars::on_terminal(!args.quiet && !args.json);
        let timeout_ms = args.timeout.map(milliseconds);
        // It has been checked that each tag is known to one of them.
        let lenient = !tags.is_empty();
        let request = protocol::Transition { tags, lenient, gpus, timeout_ms, progress: bars.shown(), ..protocol::Transition::default() };
        let restored = BTreeMap::new();
        Ok(Self {
            direction,
            target,
            found,
            tasks,
            request,
            communicators: nccl::ChosenCommunicators::default(),
            engines: None,
            until: None,
            groups: Vec::new(),
            takes_along: false,
            is_whole,
            restored,
            trimmed: BTreeMap::new(),
            in_queue: RandomState::new().build_hasher().finish(),
            has_turn: None,
            json: args.json,
            quiet: args.quiet,
            bars,
            connections: Connections::default(),
        })
    }

    /// The indices of the tasks that send requests, by job.
    fn jobs(&self) -> Vec<AsOne<Along>> {
        let mut jobs: BTreeMap<Result<&str, u32>, Vec<usize>> = BTreeMap::new();
        for (place, task) in self.tasks.iter().enumerate() {
            jobs.entry(task.process.job().ok_or(task.process.pid)).or_default().push(place);
        }
        let is_asked = |place: &usize| {
            let task = &self.tasks[*place];
            !task.meant.is_empty() || (self.direction == Verb::Resume && task.process.is_held())
        };
        // A process with none of the tags may have memory of the others open: it is held and resumed with them.
        let all_take_part = self.request.tags.is_empty() || self.direction == Verb::Resume || self.request.hold_ms.is_some();
        let part = |mut places: Vec<usize>| {
            let any = places.iter().any(is_asked);
            places.retain(|place| any && (all_take_part || is_asked(place)));
            places
        };
        jobs.into_values().map(part).filter(|places| !places.is_empty()).map(|places| AsOne { places, along: Vec::new() }).collect()
    }

    /// Finds the processes that have the memory to pause open.
    fn take_along(&mut self) -> Result<(), CommandError> {
        let jobs = std::mem::take(&mut self.groups).into_iter().map(|job| job.places).collect();
        let lent = |places: &[usize]| shared::lent_by(&self.found, &self.pids(places), &self.request);
        let groups = shared::groups(jobs, |place| self.tasks[place].process.pid, lent);
        let found = |AsOne { places, along }: AsOne<_>| Ok(AsOne { places, along: shared::find(&self.found, along)? });
        self.groups = groups.into_iter().map(found).collect::<Result<_, CommandError>>()?;
        self.takes_along = true;
        Ok(())
    }

    /// Merges jobs whose processes wait for memory of each other into one group; otherwise one job would wait for the other to be finished.
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

    /// Dry run: prints what a pause would do, and returns its exit code as far as it can be predicted. Asks no engine.
    fn foretell(&self, asks_engine: bool) -> Result<Exit, CommandError> {
        let foretell = |task| {
            let Task { process, .. }: &Task = task;
            match self.ask_plan(task) {
                Ok(foretold) => Foretold::new(process, foretold, self.request.force || asks_engine).with_communicators(&self.communicators),
                Err(failure) => Foretold::refused(process, failure),
            }
        };
        let meant = self.tasks.iter().filter(|task| !task.meant.is_empty());
        let along = self.groups.iter().flat_map(|group| &group.along).map(|along| Foretold::along(&along.process, along.bytes));
        dry_run::tell(&meant.map(foretell).chain(along).collect::<Vec<_>>(), self.json)
    }

    /// Waits until no other process has the memory to pause open; the program keeps running meanwhile. If that takes too long, the pause is
    /// refused.
    fn wait_for_borrowers(&self, until: Option<Instant>) {
        const LOOK_AGAIN: Duration = Duration::from_millis(100);
        for task in self.due() {
            let mut is_told = self.json || self.quiet;
            while let Err(CommandError::Refused(refusal)) = self.ask_plan(task) {
                if refusal.code != Kind::Shared || until.is_none_or(|until| Instant::now() >= until) {
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

    /// Asks the inference engines for permission before anything changes. Returns whether a KV cache that a prefix cache
    /// describes may be discarded.
    fn may_discard(&mut self, engine: &engine::EngineArgs, until: Option<Instant>) -> Result<bool, CommandError> {
        // Everything is paused already, so there is nothing to ask.
        if self.due().next().is_none() {
            return Ok(false);
        }
        let mut losing = Vec::new();
        for task in self.due() {
            if let Some(name) = self.ask_plan(task)?.plan.prefix_cache {
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
            let engines = engine.find(&losing)?;
            engines.prepare(until)?;
            let loses = !losing.is_empty();
            self.engines = Some(engines);
            return Ok(loses);
        }
        Ok(!losing.is_empty())
    }

    /// What a pause of the process would do.
    fn ask_plan(&self, task: &Task) -> Result<protocol::DryRun, CommandError> {
        let of_task = |group: &&AsOne<_>| group.places.iter().any(|place| self.tasks[*place].process.pid == task.process.pid);
        // Processes that are not held keep their open memory.
        let group = self.groups.iter().find(of_task).filter(|_| self.request.hold_ms.is_some());
        let partners = group.map_or_else(Vec::new, |group| self.pids(&group.places));
        let borrowers = group.map_or_else(Vec::new, |group| group.along.iter().map(|along| along.process.pid).collect());
        let request = protocol::Transition { partners, borrowers, ..self.request.clone() };
        Ok(self.found.connect(task.process.pid)?.plan(request)?)
    }

    /// Sends the requests and prints the results.
    fn run(self) -> Result<Exit, CommandError> {
        let asking = Arc::new(self);
        interrupt::hold();
        let interrupted = Arc::clone(&asking);
        interrupt::watch(move || interrupted.give_up());
        // Loading NVML takes a while, so do it during the pause.
        let nvml = (asking.direction == Verb::Pause).then(|| thread::spawn(driver::keep_nvml));
        let (mut outcomes, along, jobs) = asking.carry_out();
        let telling = Telling { direction: asking.direction, quiet: asking.quiet, on_some_gpus: !asking.request.gpus.is_empty() };
        if !asking.json {
            for (task, outcome) in asking.tasks.iter().zip(&outcomes) {
                telling.tell(task, &outcome.result, &asking.found)?;
            }
            for (process, answer) in &along {
                telling.tell_along(process, answer)?;
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
                telling.tell_job(job, &outcomes)?;
            }
        }
        if let Some(nvml) = nvml {
            let _ = nvml.join();
            let is_paused = |outcome: &Outcome| outcome.result.report().is_some_and(|report| report.allocations > 0);
            let paused = asking.tasks.iter().zip(&outcomes).filter(|(_, outcome)| is_paused(outcome));
            asking.found.tell_what_nvml_counts(paused.map(|(task, _)| &task.process));
        }
        let cause = CommandError::original(outcomes.iter().filter_map(|outcome| outcome.result.failure()));
        let is_amiss = |one: &Communicator| one.error.is_some() || one.state.is_in_progress();
        let stays_held = |outcome: &Outcome| {
            outcome.result.report().is_some_and(|report| {
                asking.direction == Verb::Resume && !report.missing.is_empty() || report.communicators.iter().any(is_amiss)
            })
        };
        let otherwise = if outcomes.iter().any(stays_held) { Exit::Busy } else { Exit::Done };
        Ok(cause.map_or(otherwise, CommandError::exit))
    }

    /// Runs all groups in parallel. Returns the results for the tasks, and for the borrowers.
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
            let processes: Vec<_> = places.iter().map(|place| &self.tasks[*place].process).collect();
            told.push(JobOutcome::of(&processes, &done));
            let mut answers = done.results.into_iter();
            results.extend(places.iter().copied().zip(answers.by_ref().map(|result| Answer::of(result, self.direction, done.committed))));
            let of_those = taken_along.into_iter().zip(answers);
            along.extend(of_those.map(|(Along { process, .. }, result)| (process, Answer::of(result, self.direction, done.committed))));
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

    /// Returns the borrowers, too.
    fn carry_out_group(&self, AsOne { places, along }: &AsOne<Along>) -> (JobReport, Vec<Along>) {
        let job = |along: &[Along], hold_ms| self.carry_out_job(places, along, hold_ms);
        if !self.takes_along {
            return (job(&[], self.request.hold_ms), Vec::new());
        }
        shared::carry_out(&self.found, &self.pids(places), &self.request, along.clone(), job)
    }

    /// `hold_ms`: how much is left to wait for work.
    fn carry_out_job(&self, places: &[usize], along: &[Along], hold_ms: Option<u64>) -> JobReport {
        let protocol::Transition { tags, lenient, .. } = &self.request;
        let rank = |pid, is_borrower| {
            let communicators = if is_borrower { Vec::new() } else { self.communicators.ids(pid) };
            Rank { pid, tags: tags.clone(), lenient: *lenient, is_borrower, communicators }
        };
        let own = self.pids(places).into_iter().map(|pid| rank(pid, false));
        let ranks = own.chain(along.iter().map(|along| rank(along.process.pid, true))).collect();
        let processes = || places.iter().map(|place| &self.tasks[*place].process);
        let who = processes().next().map(Process::job_or_itself).unwrap_or_default();
        let ticket = Some(self.ticket(who, places.iter().map(|place| &self.tasks[*place])));
        // Jobs that share memory do not remember each other's processes.
        let jobs: BTreeSet<_> = processes().map(Process::job).collect();
        let wanted = protocol::Transition { hold_ms, ..self.request.clone() };
        let mut job = Job { verb: self.direction, wanted, ranks, is_whole: self.is_whole && jobs.len() == 1, ticket };
        let bars = places.iter().map(|place| Mutex::new(self.bars.bar(&self.tasks[*place].process.to_string()))).collect();
        let engines = self.engines.as_ref();
        let following = Following { connections: &self.connections, bars, engines, tells_queue: !self.json && !self.quiet };
        loop {
            let done = self.found.carry_out(&job, &following);
            self.connections.stay_if_interrupted();
            let Some(left) = self.until.and_then(|until| until.checked_duration_since(Instant::now())).filter(|_| done.objected) else {
                return done;
            };
            // Until the request is done.
            if engines.is_none_or(|engines| engines.prepare(self.until).is_err()) {
                return done;
            }
            job.wanted.hold_ms = job.wanted.hold_ms.map(|hold| hold.min(milliseconds(left)));
        }
    }

    /// A ticket for the memory that these processes lack.
    fn ticket<'a>(&self, who: String, tasks: impl Iterator<Item = &'a Task>) -> Claim {
        // A process that has all of its memory need not queue.
        let lacking = tasks.filter(|task| !task.due.is_empty() || task.process.is_held()).map(|task| &task.process);
        let gpus_of = |process: &'a Process| {
            let contexts = process.suspended().unwrap_or_default().iter().filter(|gpu| gpu.bytes > 0).map(|gpu| &*gpu.uuid);
            process.gpus().filter(|gpu| self.wants(gpu)).chain(contexts).map(str::to_owned).collect::<Vec<_>>()
        };
        let gpus: BTreeSet<_> = lacking.flat_map(gpus_of).collect();
        Claim { who, gpus: gpus.into_iter().collect(), command: self.in_queue, waits: false, within: self.has_turn }
    }

    /// If some are suspended: waits for a turn in the queue, for all jobs of this command.
    fn queue(&self, begun: Instant, timeout: Option<Duration>) -> Result<Option<InQueue>, CommandError> {
        let jobs: BTreeSet<_> =
            self.tasks.iter().filter(|task| task.process.suspended().is_some()).map(|task| task.process.job_or_itself()).collect();
        if jobs.is_empty() {
            return Ok(None);
        }
        let ticket = self.ticket(jobs.into_iter().collect::<Vec<_>>().join(", "), self.tasks.iter());
        self.found.queue(ticket, begun, timeout, checkpoint::RESTORE_WITHIN, &mut |before| {
            if !self.json && !self.quiet {
                follow::tell_queue(before);
            }
        })
    }

    /// Whether memory on this GPU is selected.
    fn wants(&self, gpu: &str) -> bool {
        self.request.gpus.is_empty() || self.request.gpus.iter().any(|wanted| wanted == gpu)
    }

    /// Closes the connections, which cancels requests that are only waiting, and prints the outcome.
    fn give_up(&self) {
        /// Processes check for a vanished client twice as often.
        const NOTICED_WITHIN: Duration = Duration::from_secs(1);
        self.connections.interrupt();
        self.bars.wipe();
        let asked: Vec<_> = self.tasks.iter().filter(|task| !task.meant.is_empty()).collect();
        let pids: Vec<_> = asked.iter().map(|task| task.process.pid).collect();
        let deadline = Instant::now() + NOTICED_WITHIN;
        loop {
            let now = self.found.look_again(&pids);
            let found = |task: &Task| now.iter().find(|process| process.pid == task.process.pid);
            let left: Vec<_> = asked.iter().map(|task| task.left(self.direction, found(task))).collect();
            // It may be just about to start.
            if !left.contains(&Left::AsItWas) || Instant::now() >= deadline {
                for (task, left) in asked.iter().zip(left) {
                    output::complain("interrupted", &format!("{}: the {} {left}", task.process, self.direction.name()));
                }
                return;
            }
            thread::sleep(NOTICED_WITHIN / 10);
        }
    }

    /// The tasks with something to do.
    fn due(&self) -> impl Iterator<Item = &Task> {
        self.tasks.iter().filter(|task| !task.due.is_empty())
    }

    /// The processes that a pause with hold holds.
    fn held(&self) -> impl Iterator<Item = u32> {
        let all_of = |AsOne { places, along }: &AsOne<Along>| {
            let borrowers = along.iter().map(|along| along.process.pid);
            self.pids(places).into_iter().chain(borrowers).collect::<Vec<_>>()
        };
        self.groups.iter().flat_map(all_of)
    }

    fn pids(&self, places: &[usize]) -> Vec<u32> {
        places.iter().map(|place| self.tasks[*place].process.pid).collect()
    }
}
