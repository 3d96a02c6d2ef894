//! Plans a pause or resume of tags. A dry run shows the plan; [`Plan::run`] executes it (`job/mod.rs`), once all agree (`consent.rs`).

mod aftermath;
mod consent;
mod restore;

pub use aftermath::Left;
pub use consent::Consent;
pub use restore::STAY_SUSPENDED;

use crate::Reporter;
use crate::checkpoint::{self, Whereabouts};
use crate::communicators::Elsewhere;
use crate::failure::{CommandError, Exit};
use crate::figures::Figures;
use crate::forecast::Forecast;
use crate::job::{Job, JobReport, Rank, Role};
use crate::operation::{Operation, Scope};
use crate::outcome::{Done, Outcome, ProcessOutcome};
use crate::parallel;
use crate::patience::RESTORE_WITHIN;
use crate::processes::{Found, Process, Target, check_whole};
use crate::queue::{Entry, Stage, Ticket};
use crate::shared::{self, Borrower, Group};
use crate::{stuck, text};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process;
use std::time::Duration;
use vramctl_control::protocol;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_model::{
    Error, NCCL, Participants, PauseRequest, Policy, Report, ResumeRequest, Selection, SwapIn, SwapOut, TagStatus, Transition, Verb,
};

/// What a pause or resume of tags will do.
pub struct Plan {
    operation: Operation,
    found: Found,
    target: Target,
    members: Vec<ProcessPlan>,
    /// Who is asked as one.
    groups: Vec<Group<Borrower>>,
    /// The same for each process: it applies to their own memory and to open memory of each other.
    request: Transition,
    /// Whether whole jobs are selected, not only some of their processes or memory.
    is_whole: bool,
    /// This operation's number in the queue for memory: a random one.
    command: u64,
    /// The place there that it has for all of its jobs, kept until their memory is resumed, too.
    pub(crate) queue_place: Option<Entry>,
    /// How suspended processes were restored to the GPU.
    pub(crate) restored: BTreeMap<u32, Done>,
}

/// A process, and what the operation does to it.
#[derive(Debug, Clone)]
pub struct ProcessPlan {
    /// The process.
    pub process: Process,
    /// Its tags that match. Empty if it has none of them.
    pub meant: Vec<String>,
    /// Of these, the tags not yet in the wanted state.
    pub due: Vec<String>,
}

impl Plan {
    /// Finds the processes and plans. A resume first frees processes that do not answer because the driver has locked them; else nothing
    /// changes.
    pub fn make(operation: Operation, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        loop {
            let found = Found::look(&operation.target)?;
            let planned = Self::among(operation.clone(), found.clone(), reporter);
            let Some(exit) = planned.as_ref().err().map(CommandError::exit) else { return planned };
            if !matches!(exit, Exit::Busy | Exit::NoProcess) {
                return planned;
            }
            let (target, _) = operation.target_and_tags(&found)?;
            if exit == Exit::NoProcess {
                if found.waits_for_start(&target, &operation.deadline) {
                    continue;
                }
                return planned;
            }
            if operation.verb == Verb::Resume && stuck::free(&found, &target, &operation.deadline, reporter)? {
                return Self::again(operation, reporter);
            }
            if !found.waits_for_turn(&target, &operation.deadline) {
                return planned;
            }
        }
    }

    /// Plans the same anew, after the processes have changed.
    pub(crate) fn again(operation: Operation, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let found = Found::look_in_turn(&operation.target, &operation.deadline)?;
        Self::among(operation, found, reporter)
    }

    fn among(operation: Operation, mut found: Found, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let Operation { verb, ranks, .. } = operation;
        let (target, tags) = operation.target_and_tags(&found)?;
        if operation.may_name() && target == Target::Only {
            found.check_words(&tags)?;
        }
        let gpus = found.keep_on(operation.gpus())?;
        // GPUs choose processes, too.
        let target = if gpus.is_empty() { target } else { target.or_all() };
        // Whether each tag is known to one of them is checked below.
        let selection = Selection { lenient: !tags.is_empty(), tags: tags.clone(), gpus: gpus.clone(), nccl: false };
        let progress = reporter.follows_progress();
        let request = match verb {
            Verb::Pause => {
                let pause = operation.pause.request(&operation.deadline);
                let selection = Selection { nccl: pause.selection.nccl, ..selection };
                Transition::Pause(PauseRequest { selection, scheduler: operation.scheduler, progress, ..pause })
            }
            Verb::Resume => {
                // Whoever names a tag means all of it.
                let self_paused = operation.self_paused.unwrap_or(!tags.is_empty());
                let scheduler = operation.scheduler;
                Transition::Resume(ResumeRequest { selection, self_paused, scheduler, progress, ..ResumeRequest::default() })
            }
        };
        // The ranks of other nodes may have tags that the ranks here do not have.
        let known = |chosen| if operation.nodes.is_none() { members(chosen, &request) } else { Ok(any_members(chosen, &request)) };
        let members = found.choose_answering(&target).and_then(known).map_err(|failure| {
            let meant = found.taken_for_tag(verb.name(), &tags);
            if matches!(failure.exit(), Exit::UnknownTag | Exit::Usage) { failure.adding(&meant.unwrap_or_default()) } else { failure }
        })?;
        let is_whole = gpus.is_empty() && !target.is_by_id();
        if is_whole || ranks.is_some() {
            // Without `ranks`, a resume continues without processes that have ended.
            check_whole(members.iter().map(|member| &member.process), verb == Verb::Pause, ranks, reporter)?;
        }
        if verb == Verb::Pause && (target.is_by_id() || !gpus.is_empty()) {
            warn_of_the_rest(&found, &members, reporter);
        }
        let mut plan = Self {
            operation,
            found,
            target,
            members,
            groups: Vec::new(),
            request,
            is_whole,
            command: RandomState::new().build_hasher().finish(),
            queue_place: None,
            restored: BTreeMap::new(),
        };
        plan.groups = match verb {
            Verb::Pause if plan.operation.pause.shared => plan.with_borrowers(plan.jobs())?,
            Verb::Pause => without_borrowers(plan.jobs()),
            Verb::Resume => plan.joining_those_that_wait(plan.jobs()),
        };
        if plan.operation.nodes.is_some() && plan.groups.len() != 1 {
            return Err(CommandError::new(Exit::Usage, "only one job can be asked together with its ranks on other nodes: name it"));
        }
        if plan.request.holds() {
            plan.operation.pause.check_not_held(plan.held())?;
        }
        if verb == Verb::Pause && plan.members.iter().any(|member| member.meant.iter().any(|tag| tag == NCCL)) {
            Elsewhere::check(plan.members.iter().map(|member| &member.process), &plan.operation.pause.everywhere)?;
        }
        Ok(plan)
    }

    /// The members that take part, by job.
    fn jobs(&self) -> Vec<Vec<usize>> {
        let mut jobs: BTreeMap<Result<&str, u32>, Vec<usize>> = BTreeMap::new();
        for (place, member) in self.members.iter().enumerate() {
            jobs.entry(member.process.job().ok_or(member.process.pid)).or_default().push(place);
        }
        let is_asked = |place: &usize| {
            let member = &self.members[*place];
            !member.meant.is_empty() || (self.operation.verb == Verb::Resume && member.process.is_held())
        };
        // A process with none of the tags may have memory of the others open: it is held and resumed with them.
        let all_take_part = self.request.selection().tags.is_empty() || self.operation.verb == Verb::Resume || self.request.holds();
        let part = |mut places: Vec<usize>| {
            let any = self.operation.nodes.is_some() || places.iter().any(is_asked);
            places.retain(|place| any && (all_take_part || is_asked(place)));
            places
        };
        jobs.into_values().map(part).filter(|places| !places.is_empty()).collect()
    }

    /// Finds the processes that have the memory to pause open.
    fn with_borrowers(&self, jobs: Vec<Vec<usize>>) -> Result<Vec<Group<Borrower>>, CommandError> {
        let lent = |places: &[usize]| match &self.request {
            Transition::Pause(pause) => shared::lent_by(&self.found, &self.pids(places), pause),
            Transition::Resume(_) => BTreeMap::new(),
        };
        let found = |Group { members, borrowers }: Group<_>| Ok(Group { members, borrowers: shared::find(&self.found, borrowers)? });
        shared::groups(jobs, |place| self.members[place].process.pid, lent).into_iter().map(found).collect()
    }

    /// Merges jobs whose processes wait for memory of each other into one group; otherwise one job would wait for the other to be finished.
    fn joining_those_that_wait(&self, jobs: Vec<Vec<usize>>) -> Vec<Group<Borrower>> {
        let waiting = |places: &[usize]| {
            let owners = self.pids(places);
            let waits =
                |process: &Process| !owners.contains(&process.pid) && process.waits_for().iter().any(|owner| owners.contains(owner));
            self.members.iter().filter(|member| waits(&member.process)).map(|member| (member.process.pid, 0)).collect()
        };
        let groups = shared::groups(jobs, |place| self.members[place].process.pid, waiting);
        without_borrowers(groups.into_iter().map(|group| group.members).collect())
    }

    /// A dry run: what the pause would do, as far as it can be predicted. Asks no engine.
    pub fn forecast(&self) -> Vec<Forecast> {
        let may_lose = self.operation.pause.options.force || self.operation.pause.engines.any();
        let meant = self.members.iter().filter(|member| !member.meant.is_empty()).map(|member| match self.ask_plan(member) {
            Ok(answer) => Forecast::new(&member.process, answer, may_lose),
            Err(failure) => Forecast::refused(&member.process, failure),
        });
        let borrowers = self.groups.iter().flat_map(|group| &group.borrowers);
        meant.chain(borrowers.map(|borrower| Forecast::borrower(&borrower.process, borrower.bytes))).collect()
    }

    /// What the transition would do to the process.
    fn ask_plan(&self, member: &ProcessPlan) -> Result<protocol::DryRun, CommandError> {
        self.ask_plan_of(member, self.request.clone())
    }

    fn ask_plan_of(&self, member: &ProcessPlan, mut request: Transition) -> Result<protocol::DryRun, CommandError> {
        let has_it = |group: &&Group<_>| group.members.iter().any(|place| self.members[*place].process.pid == member.process.pid);
        // Processes that are not held keep their open memory.
        if let Transition::Pause(pause) = &mut request
            && let Some(group) = self.groups.iter().find(has_it).filter(|_| pause.hold.is_some())
        {
            let borrowers = group.borrowers.iter().map(|borrower| borrower.process.pid).collect();
            pause.participants = Participants { partners: self.pids(&group.members), borrowers };
        }
        if let Transition::Pause(pause) = &mut request {
            pause.amounts = self.operation.amounts_of(member.process.pid);
        }
        Ok(self.found.connect(member.process.pid)?.plan(request)?)
    }

    /// What its processes in which something is to be done say to a swap in which host memory changes hands.
    pub(crate) fn hand_overs(&self) -> Result<Vec<(&Process, protocol::DryRun)>, CommandError> {
        let mut request = self.request.clone();
        match &mut request {
            Transition::Pause(pause) => pause.swap = Some(SwapOut { host: Some(Duration::ZERO), ..SwapOut::default() }),
            Transition::Resume(resume) => (resume.swap, resume.selection.lenient) = (Some(SwapIn { host: true }), true),
        }
        self.due().map(|member| Ok((&member.process, self.ask_plan_of(member, request.clone())?))).collect()
    }

    /// Pauses or resumes all groups at once, each as a whole or not at all.
    pub fn run(&self, consent: &Consent, reporter: &dyn Reporter) -> Outcome {
        if self.is_done_by_a_suspend() {
            let unchanged = |member: &ProcessPlan| ProcessOutcome {
                process: member.process.clone(),
                tags: member.meant.clone(),
                due: Vec::new(),
                device: None,
                result: Ok(Report::default()),
            };
            return Outcome { processes: self.members.iter().map(unchanged).collect(), ..Outcome::default() };
        }
        let figures = (self.operation.verb == Verb::Pause).then(|| self.figures());
        let reports = parallel::each(&self.groups, |group| self.run_group(group, consent, reporter));
        let outcome = self.outcome(reports);
        if let Some(figures) = figures {
            figures.send(outcome.paused(), reporter);
        }
        outcome
    }

    /// Whether it is a pause of processes that a suspend has taken off their GPUs: more than a pause does.
    fn is_done_by_a_suspend(&self) -> bool {
        let all: Vec<_> = self.processes().cloned().collect();
        let is_candidate = self.operation.verb == Verb::Pause && self.operation.nodes.is_none() && self.due().next().is_none();
        is_candidate && all.iter().all(|process| process.suspended().is_some()) && {
            let seen = checkpoint::seen_by_nvml(&self.found, &all);
            all.iter().all(|process| seen.get(&process.pid) == Some(&Whereabouts::Away))
        }
    }

    /// NVML's, for a pause that begins.
    pub(crate) fn figures(&self) -> Figures {
        Figures::prepare(&self.found, self.processes())
    }

    fn run_group(&self, group: &Group<Borrower>, consent: &Consent, reporter: &dyn Reporter) -> JobReport {
        self.job(&group.members, group.borrowers.clone(), consent).run(reporter)
    }

    /// The members at these places, to be asked as one.
    fn job<'a>(&'a self, places: &[usize], borrowers: Vec<Borrower>, consent: &'a Consent) -> Job<'a> {
        let Operation { deadline, pause, .. } = &self.operation;
        let members = || places.iter().map(|place| &self.members[*place]);
        // Jobs that share memory do not remember each other's processes.
        let jobs: BTreeSet<_> = members().map(|member| member.process.job()).collect();
        let mut request = self.request.clone();
        let role = match &mut request {
            Transition::Pause(request) => {
                (request.hold, request.timeout) = (pause.hold.limit(deadline), deadline.left());
                request.options.force |= consent.may_lose;
                Role::Leaves
            }
            Transition::Resume(request) => {
                request.timeout = deadline.left();
                Role::Comes
            }
        };
        let Selection { tags, lenient, .. } = request.selection();
        let rank = |member: &ProcessPlan| {
            let (pid, amounts) = (member.process.pid, self.operation.amounts_of(member.process.pid));
            Rank { pid, role, tags: tags.clone(), lenient: *lenient, amounts }
        };
        let who = members().next().map(|member| member.process.job_or_itself()).unwrap_or_default();
        Job {
            found: &self.found,
            ranks: members().map(rank).collect(),
            request: request.into(),
            borrowers: pause.shared.then_some(borrowers),
            is_whole: self.is_whole && jobs.len() == 1,
            ticket: Some(self.ticket(who, members(), &GpuMap::new())),
            engines: consent.engines.as_ref().map(|engines| (engines, deadline.at())),
            nodes: self.operation.nodes.clone(),
        }
    }

    /// All of them, whatever their jobs, to be asked as one.
    pub(crate) fn as_one_job<'a>(&'a self, consent: &'a Consent) -> Job<'a> {
        let (places, borrowers) = self.groups.iter().fold((Vec::new(), Vec::new()), |(mut places, mut borrowers), group| {
            places.extend_from_slice(&group.members);
            borrowers.extend_from_slice(&group.borrowers);
            (places, borrowers)
        });
        self.job(&places, borrowers, consent)
    }

    /// The processes that were found to be meant.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &Process> {
        self.members.iter().map(|member| &member.process)
    }

    /// What a pause drops of tags that the operation does not name: bytes by tag.
    pub fn drops_unnamed(&self) -> BTreeMap<&str, u64> {
        let mut dropped = BTreeMap::new();
        if self.request.pause().is_some_and(|pause| pause.options.backup == Some(Policy::Discard) && pause.selection.tags.is_empty()) {
            for member in self.due() {
                for tag in member.process.tags().iter().filter(|tag| member.due.contains(&tag.tag)) {
                    *dropped.entry(tag.tag.as_str()).or_default() += tag.bytes - tag.paused_bytes;
                }
            }
        }
        dropped
    }

    /// The tags in which something is to be done.
    pub(crate) fn due_tags(&self) -> BTreeSet<&str> {
        self.due().flat_map(|member| &member.due).map(String::as_str).collect()
    }

    /// A ticket for the memory that these processes need, on the GPUs that `map` has for theirs.
    fn ticket<'a>(&self, who: String, members: impl Iterator<Item = &'a ProcessPlan>, map: &GpuMap) -> Ticket {
        // A process that has all of its memory need not queue.
        let lacking = members.filter(|member| !member.due.is_empty() || member.process.is_held()).map(|member| &member.process);
        let gpus_of = |process: &'a Process| {
            let contexts = process.suspended().unwrap_or_default().iter().filter(|gpu| gpu.bytes > 0).map(|gpu| &*gpu.uuid);
            process
                .gpus()
                .filter(|gpu| self.wants(gpu))
                .chain(contexts)
                .map(|gpu| checkpoint::onto(map, gpu).to_owned())
                .collect::<Vec<_>>()
        };
        let gpus: BTreeSet<_> = lacking.flat_map(gpus_of).collect();
        let within = self.queue_place.as_ref().map(Entry::command);
        Ticket {
            who,
            gpus: gpus.into_iter().collect(),
            command: within.unwrap_or(self.command),
            stage: Stage::Queued,
            within,
            pid: process::id(),
        }
    }

    /// Waits for a place in the queue, for the contexts and the memory of all suspended jobs of this operation.
    pub(crate) fn queue(&self, map: &GpuMap, reporter: &dyn Reporter) -> Result<Option<Entry>, CommandError> {
        let suspended = self.members.iter().filter(|member| member.process.suspended().is_some());
        let jobs: BTreeSet<_> = suspended.map(|member| member.process.job_or_itself()).collect();
        let ticket = self.ticket(jobs.into_iter().collect::<Vec<_>>().join(", "), self.members.iter(), map);
        self.found.queue(ticket, self.operation.deadline, RESTORE_WITHIN, reporter).map_err(CommandError::Refused)
    }

    /// Whether memory on this GPU is selected.
    pub(crate) fn wants(&self, gpu: &str) -> bool {
        let gpus = &self.request.selection().gpus;
        gpus.is_empty() || gpus.iter().any(|wanted| wanted == gpu)
    }

    /// The members with something to do.
    fn due(&self) -> impl Iterator<Item = &ProcessPlan> {
        self.members.iter().filter(|member| !member.due.is_empty())
    }

    /// The processes that a pause with hold holds.
    fn held(&self) -> impl Iterator<Item = u32> {
        self.groups.iter().flat_map(|Group { members, borrowers }| {
            self.pids(members).into_iter().chain(borrowers.iter().map(|borrower| borrower.process.pid)).collect::<Vec<_>>()
        })
    }

    fn pids(&self, places: &[usize]) -> Vec<u32> {
        places.iter().map(|place| self.members[*place].process.pid).collect()
    }

    pub(crate) fn into_operation(self) -> Operation {
        self.operation
    }

    /// The operation.
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The processes that were found.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Which of them are meant.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The processes that take part, except borrowers.
    pub fn taking_part(&self) -> Vec<u32> {
        self.groups.iter().flat_map(|group| self.pids(&group.members)).collect()
    }

    /// One of the processes.
    pub fn process(&self, pid: u32) -> Option<&Process> {
        self.members.iter().map(|member| &member.process).find(|process| process.pid == pid)
    }

    pub(crate) fn request(&self) -> &Transition {
        &self.request
    }
}

fn without_borrowers(jobs: Vec<Vec<usize>>) -> Vec<Group<Borrower>> {
    jobs.into_iter().map(|members| Group { members, borrowers: Vec::new() }).collect()
}

/// Warns if these are only a part of their job.
fn warn_of_the_rest(found: &Found, members: &[ProcessPlan], reporter: &dyn Reporter) {
    let is_meant = |pid: u32| members.iter().any(|member| member.process.pid == pid);
    for ProcessPlan { process, .. } in members {
        let others = found.others_of_job(process);
        let rest: Vec<_> = others.iter().filter(|other| !is_meant(other.pid)).map(|other| other.pid.to_string()).collect();
        let Some(job) = process.job().filter(|_| !rest.is_empty()) else { continue };
        let whole = Target::Name(job.to_owned()).command("pause");
        reporter.warn(&format!(
            "{process} is one of {} processes of the job {}; the others are not paused (pid {}), and may soon wait for it. {}",
            1 + others.len(),
            text::one_line(job),
            rest.join(", "),
            if process.name() == Some(job) {
                format!("`{whole}` pauses all of them")
            } else {
                "`vramctl pause` with neither --pid nor --gpu pauses all of them".into()
            }
        ));
    }
}

/// What the operation does to each process. A tag missing from one process is a no-op there; a tag missing from all is an error.
fn members(processes: Vec<Process>, request: &Transition) -> Result<Vec<ProcessPlan>, CommandError> {
    let known: BTreeSet<_> = processes
        .iter()
        .filter_map(|process| process.status.as_ref().ok())
        .flat_map(|status| status.memory.tags.iter().map(|tag| tag.tag.clone()))
        .collect();
    let unknown: BTreeSet<_> = request.selection().tags.iter().filter(|tag| !known.contains(*tag)).cloned().collect();
    if !unknown.is_empty() {
        return Err(CommandError::from(&Error::UnknownTag { unknown: unknown.into_iter().collect(), known: known.into_iter().collect() }));
    }
    Ok(any_members(processes, request))
}

fn any_members(processes: Vec<Process>, request: &Transition) -> Vec<ProcessPlan> {
    processes.into_iter().map(|process| ProcessPlan::new(process, request)).collect()
}

impl ProcessPlan {
    pub(crate) fn new(process: Process, request: &Transition) -> Self {
        let selection = request.selection();
        // A resume without tags means all tags.
        let is_all = selection.tags.is_empty() && request.verb() == Verb::Resume;
        let meant: Vec<_> = process.tags().iter().filter(|tag| is_all || selection.selects(&tag.tag)).collect();
        let names = |tags: &[&TagStatus]| tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        let due: Vec<_> = meant.iter().copied().filter(|tag| is_due(tag, request)).collect();
        let (meant, due) = (names(&meant), names(&due));
        Self { process, meant, due }
    }

    /// The tags whose memory leaves or comes.
    fn changing(&self, request: &Transition) -> Vec<String> {
        let changes = |tag: &&TagStatus| self.due.contains(&tag.tag) && (request.verb() == Verb::Pause || comes_back(tag, request));
        self.process.tags().iter().filter(changes).map(|tag| tag.tag.clone()).collect()
    }
}

/// Whether there is something to do for a tag: also if a resume only ends the others' pause of what the program has paused itself.
fn is_due(tag: &TagStatus, request: &Transition) -> bool {
    let verb = request.verb();
    tag.state != verb.end() && (verb == Verb::Pause || tag.both_paused_bytes > 0 || comes_back(tag, request))
}

/// Whether a resume brings memory of a tag back.
fn comes_back(tag: &TagStatus, request: &Transition) -> bool {
    match request.scheduler() {
        Some(_) => tag.state.is_under_way() || tag.away_bytes > 0,
        None => tag.state.is_under_way() || request.self_paused() || tag.paused_bytes > tag.self_paused_bytes,
    }
}

impl Operation {
    /// Whether its words may be processes.
    fn may_name(&self) -> bool {
        matches!(self.scope, Scope::Tags { may_name: true, .. })
    }

    fn gpus(&self) -> &[String] {
        match &self.scope {
            Scope::Tags { gpus, .. } => gpus,
            Scope::Amounts(_) | Scope::Device | Scope::Elsewhere { .. } => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::made_up::process;
    use vramctl_model::TagState;

    fn names(tags: &[&str]) -> Vec<String> {
        tags.iter().map(ToString::to_string).collect()
    }

    fn pause(tags: &[&str]) -> Transition {
        pause_of(Selection { tags: names(tags), ..Selection::default() })
    }

    fn pause_of(selection: Selection) -> Transition {
        Transition::Pause(PauseRequest { selection, ..PauseRequest::default() })
    }

    /// NCCL's memory stays where it is unless it is named, and comes back with the rest.
    #[test]
    fn a_pause_of_everything_leaves_nccls_memory() {
        let process = || process(1, "a", &[("x", TagState::Active), (NCCL, TagState::Active)]);
        let meant = |request| ProcessPlan::new(process(), &request).meant;
        assert_eq!(meant(pause(&[])), names(&["x"]));
        assert_eq!(meant(pause_of(Selection { nccl: true, ..Selection::default() })), names(&["x", NCCL]));
        assert_eq!(meant(pause(&[NCCL])), names(&[NCCL]));
        assert_eq!(meant(Transition::Resume(ResumeRequest::default())), names(&["x", NCCL]));
    }

    #[test]
    fn a_tag_must_be_known_somewhere() {
        let two = || vec![process(1, "a", &[("x", TagState::Active)]), process(2, "b", &[("y", TagState::Active)])];
        let both = members(two(), &pause(&["y"])).unwrap();
        assert_eq!((&both[0].meant, &both[1].meant), (&names(&[]), &names(&["y"])));
        let failure = members(two(), &pause(&["y", "z"])).unwrap_err();
        assert_eq!(failure.exit(), Exit::UnknownTag);
        assert_eq!(failure.to_string(), "no allocation has the tag z; the tags are x, y");
    }

    #[test]
    fn only_tags_that_need_a_change_are_named() {
        let half = ProcessPlan::new(process(1, "a", &[("x", TagState::Paused), ("y", TagState::Mixed)]), &pause(&[]));
        assert_eq!((&half.meant, &half.due), (&names(&["x", "y"]), &names(&["y"])));
    }
}
