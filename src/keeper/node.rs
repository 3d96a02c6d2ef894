//! The scheduler's loop: news in, the policy's step, its actions out.

use crate::books::Gpus;
use crate::change::{Ended, Task};
use crate::growth::Growth;
use crate::member::{Line, Member};
use crate::memo::Memo;
use crate::news::News;
use crate::office::Office;
use crate::totals::{Totals, Waiting};
use crate::view::{self, ChangeView, MemberView, Place, PolicyView, View};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::ProcessStatus;
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Found, Target};
use vramctl_host::limits;
use vramctl_model::{Bytes, Holdings, Kind, MemberState, Order, SharePriority, milliseconds};
use vramctl_scheduler::{
    Action, Activity, AskId, Asked, Because, Cause, Change, ChangeId, Event, Holdings as Taken, JobId, Memory, Outcome, PerGpu, Policy,
    Priority, ProgramId, Refusal, Report, Settings, State, Why,
};

/// How often members hear that the scheduler lives.
const BEAT: Duration = Duration::from_secs(2);
/// How often to look at the GPUs and members while somebody waits.
const LOOK: Duration = Duration::from_millis(250);
/// How often to look at the GPUs while nobody waits: programs that do not share come and go, and members size themselves by what these
/// leave.
const LOOK_AT_REST: Duration = Duration::from_secs(6);
/// How long the members that are there at the beginning may take to say how they are.
const FIRST_WORDS_WITHIN: Duration = Duration::from_secs(2);
/// How many of the last changes whoever asks is told.
const TOLD: usize = 200;

/// The scheduler.
pub struct Node {
    directory: Directory,
    office: Office,
    _listening: Listening,
    begun: Instant,
    state: State,
    is_ready: bool,
    gpus: Gpus,
    /// Connections whose processes have not said yet how they are.
    greeted: BTreeMap<u32, Line>,
    members: BTreeMap<u32, Member>,
    /// Some process did not answer when it was to join: it is asked again.
    has_missed: bool,
    /// Processes that are no members.
    strangers: BTreeSet<u32>,
    programs: BTreeMap<ProgramId, u32>,
    next_program: u64,
    jobs: BTreeMap<String, JobId>,
    peaks: BTreeMap<u32, PerGpu>,
    growth: Growth,
    totals: Totals,
    waiting: Waiting,
    statuses: BTreeMap<u32, ProcessStatus>,
    holdings: BTreeMap<u32, Holdings>,
    /// The programs of changes under way.
    moving: BTreeMap<ChangeId, BTreeSet<ProgramId>>,
    asks_first: BTreeSet<String>,
    /// Bytes of each GPU that programs have that do not share, as members know them.
    unavailable: PerGpu,
    /// With who has given way for which reason.
    changes: Vec<(ChangeId, Instant, Vec<Why>, ChangeView)>,
    wake: Option<Duration>,
    sender: Sender<News>,
    news: Receiver<News>,
}

impl Node {
    /// Takes over.
    pub fn new(directory: Directory, office: Office) -> io::Result<Self> {
        let (sender, news) = mpsc::channel();
        let mut gpus = Gpus::default();
        gpus.look();
        let smallest = gpus.unmanaged(&[]).iter().map(|(_, total, _)| *total).min().unwrap_or(0);
        // On a small GPU, the usual reserve would be most of it.
        let policy = Policy { reserve: Policy::default().reserve.min(smallest / 50), ..Policy::default() };
        watch_directory(&directory, sender.clone())?;
        let for_office = sender.clone();
        office.show(move || _ = for_office.send(News::Deposed))?;
        Ok(Self {
            _listening: listen(&directory, sender.clone())?,
            directory,
            office,
            begun: Instant::now(),
            state: State::new(policy),
            is_ready: false,
            gpus,
            greeted: BTreeMap::new(),
            members: BTreeMap::new(),
            has_missed: false,
            strangers: BTreeSet::new(),
            programs: BTreeMap::new(),
            next_program: 0,
            jobs: BTreeMap::new(),
            peaks: BTreeMap::new(),
            growth: Growth::default(),
            totals: Totals::default(),
            waiting: Waiting::default(),
            statuses: BTreeMap::new(),
            holdings: BTreeMap::new(),
            moving: BTreeMap::new(),
            asks_first: BTreeSet::new(),
            unavailable: PerGpu::new(),
            changes: Vec::new(),
            wake: None,
            sender,
            news,
        })
    }

    /// Schedules, until the process ends or another keeper is the scheduler.
    pub fn serve(mut self) -> io::Result<()> {
        let (mut beat, mut look) = (Instant::now(), Instant::now());
        self.learn_of_gpus();
        self.look_for_members();
        loop {
            if beat.elapsed() >= BEAT {
                beat = Instant::now();
                self.members.values_mut().for_each(|member| member.line.order(Order::Beat));
                self.say_why();
                self.leave_memos(true);
                if look.elapsed() >= LOOK_AT_REST {
                    look = Instant::now();
                    self.gpus.look();
                    self.learn_of_gpus();
                }
                if limits::spare_bytes() == 0 {
                    self.drop_copies(&BTreeSet::new());
                }
                if std::mem::take(&mut self.has_missed) {
                    self.look_for_members();
                }
            }
            if !self.is_ready && (self.greeted.is_empty() || self.begun.elapsed() > FIRST_WORDS_WITHIN) {
                self.is_ready = true;
                self.step(Event::Ready);
            }
            match self.news.recv_timeout(self.patience(beat)) {
                Err(RecvTimeoutError::Timeout) => {
                    if self.somebody_waits() {
                        self.look_again(None);
                        self.ask_for_less();
                    }
                    if self.wake.is_some_and(|wake| self.now() >= wake) {
                        self.step(Event::Timer);
                    }
                }
                Ok(News::Deposed) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(news) => self.hear(news),
            }
        }
    }

    fn patience(&self, beat: Instant) -> Duration {
        let of_beat = BEAT.saturating_sub(beat.elapsed());
        let of_policy = self.wake.map_or(BEAT, |wake| wake.saturating_sub(self.now()));
        let of_look = if self.somebody_waits() || !self.is_ready { LOOK } else { BEAT };
        of_beat.min(of_policy).min(of_look).max(Duration::from_millis(1))
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn somebody_waits(&self) -> bool {
        self.members.values().any(|member| waits_since(&member.state).is_some())
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Directory => self.look_for_members(),
            News::State(pid, state) if self.members.contains_key(&pid) => self.changed(pid, &state),
            News::State(pid, state) => self.join(pid, state),
            News::Refused(pid, refusal) => {
                eprintln!("scheduler: process {pid}: {}", refusal.message);
                self.greeted.remove(&pid);
                // Another refusal is about the moment: too many clients, no thread. It is asked again with the next beat.
                if matches!(refusal.code, Kind::Invalid | Kind::Stale) {
                    self.strangers.insert(pid);
                }
            }
            News::Gone(pid) => self.left(pid),
            News::Done(change, ended) => self.done(change, ended),
            News::Asked(stream) => view::answer(&stream, &self.view()),
            News::Deposed => (),
        }
    }

    // Members come and go.

    fn look_for_members(&mut self) {
        let there: BTreeSet<_> = self.directory.processes().unwrap_or_default().into_iter().collect();
        self.strangers.retain(|pid| there.contains(pid));
        for pid in there {
            if self.members.contains_key(&pid) || self.greeted.contains_key(&pid) || self.strangers.contains(&pid) {
                continue;
            }
            match Line::open(&self.directory, pid, self.office.epoch, self.sender.clone()) {
                Ok(line) => _ = self.greeted.insert(pid, line),
                Err(_) => self.has_missed = true,
            }
        }
    }

    fn join(&mut self, pid: u32, state: MemberState) {
        let Some(line) = self.greeted.remove(&pid) else { return };
        self.gpus.look();
        self.ask_all();
        let asks = state.wants.iter().filter_map(|want| self.asked(pid, want)).collect();
        let Some(status) = self.statuses.get(&pid) else {
            // It has ended, or was too busy to answer.
            self.has_missed = true;
            return;
        };
        let program = ProgramId(self.next_program);
        self.next_program += 1;
        let next_job = JobId(self.jobs.len() as u64);
        let job = status.process.job.clone().map(|job| *self.jobs.entry(job).or_insert(next_job));
        let paused = is_paused_by_others(&state, status);
        let memo = Memo::read(state.remembered.as_ref());
        let peaks = memo.peaks.iter().filter_map(|(uuid, bytes)| Some((self.gpus.number(uuid)?, *bytes))).collect();
        let memory = self.gpus.memory(pid, self.holdings.entry(pid).or_default(), self.peaks.entry(pid).or_insert(peaks));
        let settings = settings(&state, status);
        let report = Report {
            program,
            job,
            partners: BTreeSet::new(),
            several_nodes: false,
            settings: settings.clone(),
            memory,
            held: state.away,
            paused,
            capturing: state.captures,
            activity: state.idle_ms.map_or(Activity::Busy, |idle| Activity::Idle(Duration::from_millis(idle))),
            called: state.calls_wait_ms.map(Duration::from_millis),
            asks,
            remembered: memo.remembered,
        };
        let name = status.process.name.clone();
        self.programs.insert(program, pid);
        let mut line = line;
        line.order(Order::Beat);
        line.order(Order::AskFirst { gpus: self.asks_first.iter().cloned().collect() });
        line.order(self.unavailable());
        self.members.insert(
            pid,
            Member { program, name, state, heard: Instant::now(), paused, settings, partners: BTreeSet::new(), memo: None, line },
        );
        self.learn_of_gpus();
        self.step(Event::Joined(Box::new(report)));
        self.learn_of_members();
    }

    fn asked(&mut self, pid: u32, want: &vramctl_model::Want) -> Option<Asked> {
        let gpu = self.gpus.number(want.gpu.as_deref()?)?;
        let [free, all] = self.gpus.free_and_all(gpu);
        let free = free.saturating_sub(self.state.policy().reserve);
        let bytes = self.growth.ask((pid, want.ticket), gpu, want.bytes, [free, all], Instant::now());
        Some(Asked {
            ask: AskId(want.ticket),
            room: [(gpu, bytes)].into(),
            waited: Duration::from_millis(want.waits_ms),
            granted: want.tries,
        })
    }

    fn left(&mut self, pid: u32) {
        self.greeted.remove(&pid);
        self.statuses.remove(&pid);
        self.peaks.remove(&pid);
        self.growth.forget(pid);
        self.waiting.forget(pid);
        if let Some(member) = self.members.remove(&pid) {
            self.programs.remove(&member.program);
            self.look_again(None);
            self.step(Event::Left(member.program));
        }
        // It may only have closed the connection, and close the next one, too.
        self.has_missed = true;
    }

    // A member says something new.

    fn changed(&mut self, pid: u32, new: &MemberState) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let (program, old) = (member.program, std::mem::replace(&mut member.state, new.clone()));
        member.heard = Instant::now();
        self.waiting.note(pid, waits_since(new).map(Duration::from_millis), Instant::now(), &mut self.totals.waits);
        let waits_for =
            |state: &MemberState| state.wants.iter().filter(|want| !want.tries).map(|want| want.ticket).collect::<BTreeSet<_>>();
        let all_of = |state: &MemberState| state.wants.iter().map(|want| want.ticket).collect::<BTreeSet<_>>();
        let (waited, waits) = (waits_for(&old), waits_for(new));
        let begins_to_wait = waits.difference(&waited).next().is_some() || old.calls_wait_ms.is_none() && new.calls_wait_ms.is_some();
        let settled: BTreeSet<_> = all_of(&old).difference(&all_of(new)).copied().collect();
        // Nobody has looked at the memory of a program for which nobody waits.
        let gives_back = new.gives_back_after_ms.is_some_and(|after| old.idle_ms < Some(after) && new.idle_ms >= Some(after));
        // An idle engine's KV cache costs less.
        let is_engine = || self.statuses.get(&pid).is_some_and(|status| status.process.engine.is_some());
        let rests = old.idle_ms == Some(0) && new.idle_ms > Some(0) && is_engine();
        if begins_to_wait || !settled.is_empty() || old.away != new.away || gives_back || rests {
            // What has become of a request goes with its end: before that, its memory would count twice.
            self.look_again(Some(pid).filter(|_| !settled.is_empty()));
        }
        for ticket in settled {
            let memory = self.memory_of(pid);
            self.growth.settle(pid, ticket);
            self.step(Event::Settled { program, ask: AskId(ticket), memory });
        }
        for want in new.wants.iter().filter(|want| !want.tries && !waited.contains(&want.ticket)) {
            if all_of(&old).contains(&want.ticket) {
                // It has tried, and somebody else had the room.
                let memory = self.memory_of(pid);
                self.step(Event::Settled { program, ask: AskId(want.ticket), memory });
            }
            if let Some(asked) = self.asked(pid, want) {
                self.step(Event::Asks { program, ask: asked.ask, room: asked.room });
            }
        }
        let ends_late = old.away != new.away && !self.moves(program);
        if ends_late {
            self.step(Event::Held(program, new.away));
        }
        if old.away != new.away {
            self.learn_of_pauses(&[pid]);
        }
        if old.captures != new.captures {
            self.step(Event::Capturing(program, new.captures));
        }
        self.learn_of_members();
        if old.idle_ms != new.idle_ms
            && let Some(idle) = new.idle_ms
        {
            let activity = if idle == 0 { Activity::Busy } else { Activity::Idle(Duration::from_millis(idle)) };
            self.step(Event::Activity(program, activity));
        }
        if (old.calls_wait_ms.is_none() || ends_late) && new.calls_wait_ms.is_some() {
            self.step(Event::Called(program));
        }
        if begins_to_wait {
            self.say_why();
        }
    }

    /// Whether a change is under way in which the program takes part.
    fn moves(&self, program: ProgramId) -> bool {
        self.moving.values().any(|programs| programs.contains(&program))
    }

    /// Looks at the GPUs and at all members, but not at the memory of those that move, of those that a person resumes into the room that
    /// they were granted, nor of the one `without` which this is.
    fn look_again(&mut self, without: Option<u32>) {
        self.gpus.look();
        self.ask_all();
        self.learn_of_gpus();
        self.learn_of_members();
        let moving: BTreeSet<_> = self.moving.values().flatten().copied().collect();
        let at_rest: Vec<_> = self
            .members
            .iter()
            .filter(|(_, member)| !moving.contains(&member.program))
            .map(|(pid, member)| (*pid, member.program))
            .collect();
        let is_resumed = |member: &Member| member.paused && member.state.wants.iter().any(|want| want.tries);
        let resumed: BTreeSet<_> = self.members.iter().filter(|(_, member)| is_resumed(member)).map(|(pid, _)| *pid).collect();
        self.learn_of_pauses(&at_rest.iter().map(|(pid, _)| *pid).collect::<Vec<_>>());
        for (pid, program) in at_rest.into_iter().filter(|(pid, _)| without != Some(*pid) && !resumed.contains(pid)) {
            for (gpu, memory) in self.memory_of(pid) {
                self.step(Event::Memory { program, gpu, memory });
            }
        }
    }

    /// Who holds a member is no news of its own. A client may have gone since the last look: the scheduler before this one, for example.
    fn learn_of_pauses(&mut self, pids: &[u32]) {
        let mut news = Vec::new();
        for pid in pids {
            let (Some(member), Some(status)) = (self.members.get_mut(pid), self.statuses.get(pid)) else { continue };
            let paused = is_paused_by_others(&member.state, status);
            if std::mem::replace(&mut member.paused, paused) != paused {
                news.push(Event::Paused(member.program, paused));
            }
        }
        for event in news {
            self.step(event);
        }
    }

    fn ask_all(&mut self) {
        let Ok(found) = Found::look(&Target::All) else { return };
        let answers = found.processes.iter().filter_map(|process| Some((process.pid, process.status.as_ref().ok()?.clone())));
        self.statuses = answers.collect();
        let asked = self.statuses.keys().copied().filter(|pid| !self.strangers.contains(pid)).collect::<Vec<_>>();
        let answers = parallel::each_well(asked, |pid| Some((pid, found.connect(pid).ok()?.holdings().ok()?)));
        self.holdings.retain(|pid, _| self.statuses.contains_key(pid));
        self.holdings.extend(answers.into_iter().flatten());
    }

    fn memory_of(&mut self, pid: u32) -> PerGpu<Memory> {
        let Some(holdings) = self.holdings.get(&pid) else { return PerGpu::new() };
        self.gpus.memory(pid, holdings, self.peaks.entry(pid).or_default())
    }

    fn learn_of_gpus(&mut self) {
        let members: Vec<_> = self.members.keys().copied().collect();
        let mut unavailable = PerGpu::new();
        for (gpu, total, unmanaged) in self.gpus.unmanaged(&members) {
            unavailable.insert(gpu, unmanaged);
            self.step(Event::Gpu { gpu, total, unmanaged });
        }
        self.tell_what_is_unavailable(&unavailable);
        // What members have and do not use is released when it is needed.
        let statuses = self.members.keys().filter_map(|pid| self.statuses.get(pid));
        let taken: u64 = statuses.map(|status| status.memory.host.used_bytes.max(status.memory.host.ready_bytes)).sum();
        self.step(Event::Host { room: taken.saturating_add(limits::spare_bytes()), files: 0 });
    }

    /// Programs size themselves by the free memory that they are shown: what is not available to any of them is not free.
    fn tell_what_is_unavailable(&mut self, bytes: &PerGpu) {
        /// Less is not worth a word.
        const MUCH: u64 = 32 << 20;
        let differs = |told: Option<&u64>, bytes: &u64| told.is_none_or(|told| told.abs_diff(*bytes) >= MUCH);
        if !bytes.iter().any(|(gpu, bytes)| differs(self.unavailable.get(gpu), bytes)) {
            return;
        }
        self.unavailable.clone_from(bytes);
        let order = self.unavailable();
        for member in self.members.values_mut() {
            member.line.order(order.clone());
        }
    }

    fn unavailable(&self) -> Order {
        Order::Unavailable { reserve_bytes: self.state.policy().reserve, gpus: self.gpus.named(&self.unavailable) }
    }

    /// Limits, which members have once they use a GPU, and who has whose memory open.
    fn learn_of_members(&mut self) {
        let mut partners = BTreeMap::<u32, BTreeSet<u32>>::new();
        for pid in self.members.keys() {
            let borrowed = self.statuses.get(pid).map_or(&[][..], |status| &status.memory.borrowed);
            for owner in borrowed.iter().map(|open| open.owner).filter(|owner| owner != pid && self.members.contains_key(owner)) {
                partners.entry(*pid).or_default().insert(owner);
                partners.entry(owner).or_default().insert(*pid);
            }
        }
        let programs: BTreeMap<_, _> = self.members.iter().map(|(pid, member)| (*pid, member.program)).collect();
        let mut events = Vec::new();
        for (pid, member) in &mut self.members {
            let Some(status) = self.statuses.get(pid) else { continue };
            let settings = settings(&member.state, status);
            if member.settings != settings {
                member.settings.clone_from(&settings);
                events.push(Event::Settings(member.program, settings));
            }
            let partners: BTreeSet<_> = partners.remove(pid).unwrap_or_default().iter().map(|other| programs[other]).collect();
            if member.partners != partners {
                member.partners.clone_from(&partners);
                events.push(Event::Tied(member.program, partners));
            }
        }
        for event in events {
            self.step(event);
        }
    }

    // What the policy says.

    fn step(&mut self, event: Event) {
        let step = self.state.step(self.now(), event);
        self.wake = step.wake;
        // Before anybody gives way for them.
        self.keep_promises();
        for action in step.actions {
            self.act(action);
        }
        self.leave_memos(false);
    }

    /// Leaves with each member what the next scheduler is to know of it. `in_full`: also for how long its requests have not been served.
    fn leave_memos(&mut self, in_full: bool) {
        let now = self.now();
        for (pid, member) in &mut self.members {
            let Some(remembered) = self.state.remembered(now, member.program) else { continue };
            let memo = Memo { remembered, peaks: self.peaks.get(pid).map(|peaks| self.gpus.named(peaks)).unwrap_or_default() };
            let left = member.memo.as_ref().map(|(left, at)| left.clone().after(now.saturating_sub(*at)));
            let is_news = left.is_none_or(|left| if in_full { left != memo } else { left.differs(&memo) });
            if is_news {
                member.line.order(Order::Remember { what: memo.written() });
                member.memo = Some((memo, now));
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Change(change) => self.begin(&change),
            Action::Grant(program, ask) => {
                if let Some(pid) = self.programs.get(&program) {
                    self.growth.grant(*pid, ask.0, Instant::now());
                }
                self.order(program, &Order::Granted { ticket: ask.0 });
            }
            Action::Refuse(program, ask, why) => match self.needs_less(program, ask) {
                Some(room) => self.step(Event::Asks { program, ask, room }),
                None => self.order(program, &Order::Denied { ticket: ask.0, why: refused(why) }),
            },
            Action::Watch(program, on) => self.order(program, &Order::Watch { on }),
        }
    }

    fn needs_less(&mut self, program: ProgramId, ask: AskId) -> Option<PerGpu> {
        self.growth.less(*self.programs.get(&program)?, ask.0)
    }

    /// Those for whom nobody can make as much room as was asked for ask for what they need.
    fn ask_for_less(&mut self) {
        let stuck = |why| matches!(why, Some(Because::NobodyCan | Because::HostFull | Because::Retries(_)));
        let programs: Vec<_> = self.state.gangs().filter(|(.., why)| stuck(*why)).flat_map(|(_, programs, _)| programs).collect();
        for program in programs {
            let Some(member) = self.programs.get(&program).and_then(|pid| self.members.get(pid)) else { continue };
            let waiting: Vec<_> = member.state.wants.iter().filter(|want| !want.tries).map(|want| AskId(want.ticket)).collect();
            for ask in waiting {
                if let Some(room) = self.needs_less(program, ask) {
                    self.step(Event::Settled { program, ask, memory: PerGpu::new() });
                    self.step(Event::Asks { program, ask, room });
                }
            }
        }
    }

    fn order(&mut self, program: ProgramId, order: &Order) {
        if let Some(member) = self.programs.get(&program).and_then(|pid| self.members.get_mut(pid)) {
            member.line.order(order.clone());
        }
    }

    /// While somebody waits for room on a GPU, others' allocations there ask first.
    fn keep_promises(&mut self) {
        let wanted = |member: &Member| member.state.wants.iter().filter_map(|want| want.gpu.clone()).collect::<Vec<_>>();
        let gpus: BTreeSet<_> = self.members.values().flat_map(wanted).collect();
        if gpus != self.asks_first {
            self.asks_first = gpus;
            for member in self.members.values_mut() {
                member.line.order(Order::AskFirst { gpus: self.asks_first.iter().cloned().collect() });
            }
        }
    }

    /// Copies of what is on a GPU are cache: they go where the host has no room for contents that leave. Not those of the programs that
    /// leave, whose contents need no copy, as long as these are right.
    fn drop_copies(&mut self, leaving: &BTreeSet<ProgramId>) {
        for member in self.members.values_mut().filter(|member| !leaving.contains(&member.program)) {
            member.line.order(Order::DropCopies);
        }
    }

    /// Bytes of host memory that contents could take without copies being dropped for it: what members have and do not use is released.
    fn host_without_copies(&self) -> u64 {
        let statuses = self.members.keys().filter_map(|pid| self.statuses.get(pid)).map(|status| &status.memory.host);
        let unused: u64 = statuses.map(|host| host.ready_bytes.saturating_sub(host.used_bytes)).sum();
        unused.saturating_add(limits::spare_bytes())
    }

    fn begin(&mut self, change: &Change) {
        let leaving: BTreeSet<_> = change.leaving.iter().flat_map(|leave| leave.programs.iter().copied()).collect();
        let copied: u64 = change.leaving.iter().flat_map(|leave| leave.taken.values()).map(Taken::copied_out).sum();
        if copied > self.host_without_copies() {
            self.drop_copies(&leaving);
        }
        let programs: BTreeSet<_> = leaving.iter().chain(&change.coming).copied().collect();
        let task = Task::of(change, self.directory.clone(), &self.programs, &self.gpus, self.office.epoch, self.state.policy().drain);
        self.moving.insert(change.id, programs);
        let left = change.leaving.iter().flat_map(|leave| leave.programs.iter().map(|program| (self.name(*program), words(leave.why))));
        let view = ChangeView {
            left: left.collect(),
            came: change.coming.iter().map(|program| self.name(*program)).collect(),
            asked: self.asked_for(change.cause),
            bytes: change.leaving.iter().flat_map(|leave| leave.taken.values()).map(Taken::bytes).sum(),
            ..ChangeView::default()
        };
        let reasons = change.leaving.iter().flat_map(|leave| leave.programs.iter().map(|_| leave.why)).collect();
        self.changes.push((change.id, Instant::now(), reasons, view));
        let excess = self.changes.len().saturating_sub(TOLD);
        self.changes.drain(..excess);
        let (sender, id) = (self.sender.clone(), change.id);
        let work = move || {
            let ended = task.map_or_else(|| Ended::failed_for("one of them has ended"), |task| task.run());
            let _ = sender.send(News::Done(id, ended));
        };
        if let Err(error) = thread::Builder::new().name("change".into()).spawn(work) {
            let _ = self.sender.send(News::Done(change.id, Ended::failed_for(&format!("no thread could be started: {error}"))));
        }
    }

    fn done(&mut self, change: ChangeId, Ended { outcome, why }: Ended) {
        let Some(programs) = self.moving.remove(&change) else { return };
        if let Some((_, begun, left, view)) = self.changes.iter_mut().find(|(id, ..)| *id == change) {
            view.took_ms = Some(begun.elapsed().as_millis() as u64);
            view.outcome = match outcome {
                Outcome::Changed => "changed",
                Outcome::Refused(_) => "refused",
                Outcome::Failed => "failed",
            }
            .into();
            view.why = why;
            *self.totals.changes.entry(view.outcome.clone()).or_default() += 1;
            if outcome == Outcome::Changed {
                self.totals.bytes += view.bytes;
                self.totals.turns += u64::from(!view.came.is_empty());
                for why in left {
                    *self.totals.gave_way.entry(key(*why).to_owned()).or_default() += 1;
                }
            }
        }
        self.gpus.look();
        self.ask_all();
        let took_part: Vec<_> = programs.into_iter().filter_map(|program| Some((program, *self.programs.get(&program)?))).collect();
        // The members' own word may still be on its way.
        let is_held = |status: Option<&ProcessStatus>| status.is_some_and(|status| status.memory.held);
        let mut now = Vec::new();
        for (program, pid) in took_part {
            let held = is_held(self.statuses.get(&pid));
            if let Some(member) = self.members.get_mut(&pid) {
                member.state.away = held;
                if !held {
                    member.state.calls_wait_ms = None;
                    let waits = waits_since(&member.state).map(Duration::from_millis);
                    self.waiting.note(pid, waits, Instant::now(), &mut self.totals.waits);
                }
            }
            now.push((program, self.memory_of(pid), held));
        }
        self.learn_of_gpus();
        self.learn_of_members();
        self.step(Event::Done { change, outcome, programs: now });
    }

    // What people see.

    /// The names of those for whom a change is. One that is idle for long goes for nobody.
    fn asked_for(&self, cause: Cause) -> Vec<String> {
        let (Cause::Called(gang) | Cause::Asks(gang)) = cause else { return Vec::new() };
        let programs = self.state.gangs().find(|(id, ..)| *id == gang).map_or_else(Vec::new, |(_, programs, _)| programs);
        programs.into_iter().map(|program| self.name(program)).collect()
    }

    fn name(&self, program: ProgramId) -> String {
        let member = self.programs.get(&program).and_then(|pid| self.members.get(pid));
        member.map_or_else(|| "one that has ended".to_owned(), |member| member.name.clone())
    }

    fn view(&mut self) -> View {
        self.ask_all();
        let pids: Vec<_> = self.members.keys().copied().collect();
        let mut reasons = BTreeMap::new();
        for (programs, why) in self.reasons() {
            reasons.extend(programs.into_iter().map(|program| (program, why.clone())));
        }
        let members = pids.into_iter().filter_map(|pid| {
            let member = self.members.get(&pid)?;
            let status = self.statuses.get(&pid);
            let devices = status.map_or(&[][..], |status| &status.memory.devices);
            let (resident, away) = devices.iter().fold((0, 0), |(here, away), one| (here + one.active_bytes, away + one.away_bytes));
            Some(MemberView {
                pid,
                name: member.name.clone(),
                priority: member.state.priority.to_string(),
                place: match (status, away, resident) {
                    (None, ..) => Place::Unknown,
                    // While it moves, the scheduler holds it.
                    (Some(status), ..) if is_paused_by_others(&member.state, status) && !self.moves(member.program) => Place::Held,
                    (_, 0, _) => Place::InPlace,
                    (_, _, 0) => Place::Away,
                    _ => Place::PartlyAway,
                },
                resident_bytes: resident,
                away_bytes: away,
                waits_ms: waits_since(&member.state).map(|waited| waited + milliseconds(member.heard.elapsed())),
                because: reasons.get(&member.program).cloned(),
                idle_ms: member.state.idle_ms,
            })
        });
        let members = members.collect();
        let changes =
            self.changes.iter().map(|(_, begun, _, view)| ChangeView { ago_ms: begun.elapsed().as_millis() as u64, ..view.clone() });
        View {
            scheduler: std::process::id(),
            epoch: self.office.epoch,
            policy: self.policy(),
            members,
            host: (self.state.host_room(), self.state.contents()),
            changes: changes.collect(),
            totals: self.totals.clone(),
        }
    }

    fn policy(&self) -> PolicyView {
        let policy = self.state.policy();
        let [turn_ms, wait_ms] = [policy.slice, policy.wait].map(milliseconds);
        PolicyView { reserve_bytes: policy.reserve, turn_ms, changes_per_turn: policy.k, wait_ms, low_percent: policy.low_percent }
    }

    /// Tells those that wait why, for their logs.
    fn say_why(&mut self) {
        for (programs, why) in self.reasons() {
            for program in programs {
                self.order(program, &Order::Waits { why: why.clone() });
            }
        }
    }

    /// Why each gang waits that does.
    fn reasons(&self) -> Vec<(Vec<ProgramId>, String)> {
        let reason = |(_, programs, why): (_, Vec<ProgramId>, Option<Because>)| {
            let why = self.reason(&programs, why?);
            Some((programs, why))
        };
        self.state.gangs().filter_map(reason).collect()
    }

    /// Why these programs wait, who are one gang.
    fn reason(&self, waiting: &[ProgramId], because: Because) -> String {
        let seconds_until = |at: Duration| format!("{:.1} s", at.saturating_sub(self.now()).as_secs_f64());
        let in_place = || in_brackets(self.in_place_beside(waiting).map(|member| member.name.clone()));
        match because {
            Because::Served => "its room is being made".into(),
            Because::Moving => "others change places on its GPUs".into(),
            Because::Behind(gang) => {
                let first = self.state.gangs().find(|(id, ..)| *id == gang).map_or_else(Vec::new, |(_, programs, _)| programs);
                let first = in_brackets(first.into_iter().map(|program| self.name(program)));
                format!("another{first} waits longer, or has a higher priority")
            }
            Because::Until(at) => format!("those in place{} have their turn for {} more", in_place(), seconds_until(at)),
            Because::Busy => format!("those in place{} have a higher priority, or are about to change", in_place()),
            Because::NobodyCan => {
                let obstacles: Vec<_> = self.in_place_beside(waiting).filter_map(obstacle).chain(self.others_beside(waiting)).collect();
                let obstacles = if obstacles.is_empty() { String::new() } else { format!(": {}", obstacles.join(", ")) };
                format!("nobody can give way{obstacles}")
            }
            Because::HostFull => format!("the host has no room for the contents of those who could give way{}", in_place()),
            Because::Retries(at) => format!("a change has failed; the next try is in {}", seconds_until(at)),
        }
    }

    /// The GPUs on which programs want room, or have memory that is there or was.
    fn gpus_of(&self, programs: &[ProgramId]) -> BTreeSet<&str> {
        let members =
            programs.iter().filter_map(|program| self.programs.get(program)).filter_map(|pid| Some((pid, self.members.get(pid)?)));
        let gpus = members.flat_map(|(pid, member)| {
            let devices = self.statuses.get(pid).map_or(&[][..], |status| &status.memory.devices);
            let wanted = member.state.wants.iter().filter_map(|want| want.gpu.as_deref());
            wanted.chain(devices.iter().filter_map(|device| device.uuid.as_deref()))
        });
        gpus.collect()
    }

    /// The other members with memory on the GPUs of these.
    fn in_place_beside(&self, programs: &[ProgramId]) -> impl Iterator<Item = &Member> {
        let gpus = self.gpus_of(programs);
        let is_there = move |pid: &u32| {
            let devices = self.statuses.get(pid).map_or(&[][..], |status| &status.memory.devices);
            devices.iter().any(|device| device.active_bytes > 0 && device.uuid.as_deref().is_some_and(|uuid| gpus.contains(uuid)))
        };
        let others = self.members.iter().filter(|(_, member)| !programs.contains(&member.program));
        others.filter(move |(pid, _)| is_there(pid)).map(|(_, member)| member)
    }

    /// The programs that do not share with memory on the GPUs of these, as far as NVML lists them.
    fn others_beside(&self, programs: &[ProgramId]) -> Vec<String> {
        /// Less is in nobody's way.
        const MUCH: u64 = 32 << 20;
        let members: Vec<_> = self.members.keys().copied().collect();
        let mut bytes = BTreeMap::<u32, u64>::new();
        for gpu in self.gpus_of(programs).into_iter().filter_map(|uuid| self.gpus.number(uuid)) {
            self.gpus.others(gpu, &members).for_each(|(pid, its)| *bytes.entry(pid).or_default() += its);
        }
        let name = |pid| self.statuses.get(&pid).map_or_else(|| format!("process {pid}"), |status| status.process.name.clone());
        let much = bytes.into_iter().filter(|(_, bytes)| *bytes >= MUCH);
        much.map(|(pid, bytes)| format!("{} does not share, and has {}", name(pid), Bytes(bytes))).collect()
    }
}

/// Why a member cannot give way, as far as it shows.
fn obstacle(member: &Member) -> Option<String> {
    let why = if member.paused {
        "is held by somebody else"
    } else if member.state.captures {
        "captures a graph"
    } else {
        return None;
    };
    Some(format!("{} {why}", member.name))
}

/// Some of these names, in brackets; nothing if there are none.
fn in_brackets(names: impl Iterator<Item = String>) -> String {
    const SHOWN: usize = 3;
    let mut names: Vec<_> = names.collect();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    names.extend((more > 0).then(|| format!("{more} more")));
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

fn refused(why: Refusal) -> String {
    match why {
        Refusal::NeverFits => "the GPU is too small".into(),
        Refusal::Unserved(time) => format!("nobody could give way for {} s", time.as_secs()),
    }
}

fn words(why: Why) -> String {
    match why {
        Why::Away => "nobody has called it since it gave way".into(),
        Why::WaitsBehind => "it waits itself, and its turn comes later".into(),
        Why::Idle => "it was idle".into(),
        Why::Lower(_) => "it has a lower priority".into(),
        Why::TurnOver => "its turn was over".into(),
    }
}

/// In metrics.
fn key(why: Why) -> &'static str {
    match why {
        Why::Away => "away",
        Why::WaitsBehind => "waits",
        Why::Idle => "idle",
        Why::Lower(_) => "lower",
        Why::TurnOver => "turn",
    }
}

fn settings(state: &MemberState, status: &ProcessStatus) -> Settings {
    let limit = status.memory.devices.iter().filter_map(|device| device.limit_bytes).max();
    let [idle, wait] = [state.gives_back_after_ms, state.waits_for_ms].map(|time| time.map(Duration::from_millis));
    Settings { priority: priority(state.priority), limit, idle, wait }
}

fn priority(given: SharePriority) -> Priority {
    match given {
        SharePriority::Low => Priority::Low,
        SharePriority::Normal => Priority::Normal,
        SharePriority::High => Priority::High,
    }
}

fn waits_since(state: &MemberState) -> Option<u64> {
    state.wants.iter().map(|want| want.waits_ms).chain(state.calls_wait_ms).max()
}

fn is_paused_by_others(state: &MemberState, status: &ProcessStatus) -> bool {
    !state.away && status.memory.held
}

/// Tells when files of the directory come or go.
fn watch_directory(directory: &Directory, news: Sender<News>) -> io::Result<()> {
    let path = CString::new(directory.path().as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated path.
    let file = unsafe {
        let file = libc::inotify_init1(libc::IN_CLOEXEC);
        if file < 0 || libc::inotify_add_watch(file, path.as_ptr(), libc::IN_CREATE | libc::IN_MOVED_TO | libc::IN_DELETE) < 0 {
            return Err(io::Error::last_os_error());
        }
        file
    };
    thread::Builder::new().name("directory".into()).spawn(move || {
        let mut events = [0_u8; 4096];
        // SAFETY: the buffer is writable.
        while unsafe { libc::read(file, events.as_mut_ptr().cast(), events.len()) } > 0 && news.send(News::Directory).is_ok() {
            // What comes together is looked at once.
            thread::sleep(Duration::from_millis(5));
        }
    })?;
    Ok(())
}

/// Whoever waits for connections there ends when this is dropped.
struct Listening(UnixListener);

impl Drop for Listening {
    fn drop(&mut self) {
        // SAFETY: touches no memory. Unlike its end, this wakes who waits.
        unsafe { libc::shutdown(self.0.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

fn listen(directory: &Directory, news: Sender<News>) -> io::Result<Listening> {
    let listener = view::listen(directory)?;
    let listening = Listening(listener.try_clone()?);
    let serve = move || {
        let mut clients = listener.incoming().map_while(Result::ok);
        while clients.next().is_some_and(|stream| news.send(News::Asked(stream)).is_ok()) {}
    };
    thread::Builder::new().name("view".into()).spawn(serve)?;
    Ok(listening)
}
