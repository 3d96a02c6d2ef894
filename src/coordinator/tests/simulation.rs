//! What the virtual time of `barrier.rs` leaves out: plans, sockets, checkpoints and the death of commands. The coordinator drives simulated
//! ranks of two jobs on a simulated GPU, at every step of which something may refuse, die, stay silent or be killed.
//!
//! The ranks are processes of this program, which speak the protocol over real sockets; so is every operation, since a coordinator can be
//! killed, too. What they hold lies in a page that all share, where the simulation looks whether the rules hold:
//!
//! 1. A job is paused or resumed as a whole, or not at all.
//! 2. No rank is held, quiesced or locked once its operation has ended well, but while something of it is paused or suspended.
//! 3. A library is quiesced before the driver locks its process, and woken only when the process runs.
//! 4. A restore never begins without room for it.
//! 5. Whatever was refused or killed, a resume without faults brings everything back.
//! 6. After a swap of a job that runs and one that is paused, whatever came of it, one of the two runs and the other is paused.
//!
//! `SIMULATION_SEED` repeats a run, and `SIMULATION_STEPS` makes it longer.

use std::cell::Cell;
use std::env;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio, exit};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vramctl_control::decision::Decision;
use vramctl_control::descriptors::{self, Passed};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, DryRun, Prepare, ProcessStatus, Refusal, Reply, Request};
use vramctl_coordinator::Consent;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::machine::Machine;
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::process::made_up;
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Outcome, Plan, Scope, Suspend, Swap, Swapped};
use vramctl_driver::checkpoint::{GpuMap, ProcessState};
use vramctl_driver::{Card, NoCards};
use vramctl_host::Held;
use vramctl_host::system::poll;
use vramctl_model::support::{self, CudaVersion};
use vramctl_model::{DeviceStatus, Error, Failure, GpuUse, Holder, Report, Shortage, TagState, Transition, Verb, code};

/// Who is in which job.
const JOBS: [&str; 5] = ["a", "a", "a", "b", "b"];
/// Bytes of a rank's tag, and of its context.
const TAG: u64 = 1000;
const CONTEXT: u64 = 100;
/// Both jobs with a little to spare, so that one can be suspended and the other not be resumed beside a third party.
const CAPACITY: u64 = 5 * (TAG + CONTEXT) + 5 * CONTEXT / 4;
/// How long a rank waits in a swap for memory that the other job does not give.
const LACKING: Duration = Duration::from_secs(2);
const UUID: &str = "GPU-00000000-0000-0000-0000-000000000001";

/// What all processes share.
#[repr(C)]
struct Page {
    /// How many requests of a thousand meet a fault.
    faults: AtomicU64,
    /// Bytes that a third party has taken.
    others: AtomicU64,
    /// Broken rules.
    violations: AtomicU64,
    ranks: [Slot; JOBS.len()],
}

/// A rank.
#[repr(C)]
struct Slot {
    pid: AtomicU64,
    /// Bytes on the GPU: of its tag, and of its context.
    tag: AtomicU64,
    context: AtomicU64,
    /// Whether its contents are on the host.
    paused: AtomicU64,
    /// Whether others have taken the memory that it handed over in a swap which was undone. Its contents are on the host.
    lacks: AtomicU64,
    held: AtomicU64,
    quiesced: AtomicU64,
    /// The driver's state of it.
    state: AtomicU64,
}

/// The page, and a lock for changes of more than one figure.
#[derive(Debug, Clone, Copy)]
struct Shared(&'static Page);

impl std::fmt::Debug for Page {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (rank, slot) in self.ranks.iter().enumerate() {
            let figure = |figure: &AtomicU64| figure.load(SeqCst);
            writeln!(
                out,
                "rank {rank} of {}: pid {}, tag {}, context {}, paused {}, held {}, quiesced {}, state {}",
                JOBS[rank],
                figure(&slot.pid),
                figure(&slot.tag),
                figure(&slot.context),
                figure(&slot.paused),
                figure(&slot.held),
                figure(&slot.quiesced),
                figure(&slot.state)
            )?;
        }
        Ok(())
    }
}

impl Shared {
    fn open(folder: &Path) -> Self {
        let path = folder.join("page");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(4096).unwrap();
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of a file that stays that long; every pattern of bits is a `Page`. It is never unmapped.
        Self(unsafe {
            let page = libc::mmap(std::ptr::null_mut(), 4096, access, flags, file.as_raw_fd(), 0);
            assert!(page != libc::MAP_FAILED);
            &*page.cast::<Page>()
        })
    }

    /// Alone among all processes.
    fn locked<R>(self, work: impl FnOnce(&Page) -> R) -> R {
        let lock = File::create(env::var_os("SIMULATION_FOLDER").map(|folder| Path::new(&folder).join("lock")).unwrap()).unwrap();
        // SAFETY: an open descriptor. Closing it unlocks.
        assert_eq!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }, 0);
        work(self.0)
    }

    fn slot_of(self, pid: i32) -> Option<&'static Slot> {
        self.0.ranks.iter().find(|slot| slot.pid.load(SeqCst) == pid as u64)
    }

    fn violated(self, rule: &str) {
        eprintln!("violated: {rule}");
        self.0.violations.fetch_add(1, SeqCst);
    }
}

fn free(page: &Page) -> u64 {
    let used: u64 = page.ranks.iter().map(|slot| slot.tag.load(SeqCst) + slot.context.load(SeqCst)).sum();
    CAPACITY.saturating_sub(used + page.others.load(SeqCst))
}

/// Numbers from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// The driver and NVML.
#[derive(Debug)]
struct Simulated {
    shared: Shared,
    random: Mutex<u64>,
}

impl Simulated {
    fn fault(&self, call: &'static str) -> Result<(), Failure> {
        let mut seed = self.random.lock().unwrap();
        let mut random = Random(*seed);
        let is_faulty = random.below(1000) < self.shared.0.faults.load(SeqCst);
        *seed = random.next();
        if is_faulty { Err(Failure { call, code: code::NOT_SUPPORTED }) } else { Ok(()) }
    }

    fn change(&self, call: &'static str, pid: i32, from: u64, to: u64) -> Result<&'static Slot, Failure> {
        self.fault(call)?;
        let wrong = Failure { call, code: code::INVALID_VALUE };
        let slot = self.shared.slot_of(pid).ok_or(wrong)?;
        slot.state.compare_exchange(from, to, SeqCst, SeqCst).map(|_| slot).map_err(|_| wrong)
    }
}

impl Machine for Simulated {
    fn cuda(&self) -> Result<CudaVersion, Failure> {
        Ok(support::DRIVER.1)
    }

    fn prepare(&self) -> Result<(), Failure> {
        self.fault("cuInit")
    }

    fn state(&self, pid: i32) -> Result<ProcessState, Failure> {
        let call = "cuCheckpointProcessGetState";
        self.fault(call)?;
        let slot = self.shared.slot_of(pid).ok_or(Failure { call, code: code::INVALID_VALUE })?;
        Ok(match slot.state.load(SeqCst) {
            0 => ProcessState::Running,
            1 => ProcessState::Locked,
            _ => ProcessState::Checkpointed,
        })
    }

    fn lock(&self, pid: i32, _limit: Duration) -> Result<(), Failure> {
        let slot = self.change("cuCheckpointProcessLock", pid, 0, 1)?;
        if slot.quiesced.load(SeqCst) == 0 {
            self.shared.violated("a library is quiesced before the driver locks its process");
        }
        Ok(())
    }

    fn checkpoint(&self, pid: i32) -> Result<(), Failure> {
        let slot = self.change("cuCheckpointProcessCheckpoint", pid, 1, 2)?;
        slot.context.store(0, SeqCst);
        Ok(())
    }

    fn restore(&self, pid: i32, _map: &GpuMap) -> Result<(), Failure> {
        let slot = self.change("cuCheckpointProcessRestore", pid, 2, 1)?;
        self.shared.locked(|page| {
            if free(page) < CONTEXT {
                self.shared.violated("a restore never begins without room for it");
            }
            slot.context.store(CONTEXT, SeqCst);
        });
        Ok(())
    }

    fn unlock(&self, pid: i32) -> Result<(), Failure> {
        self.change("cuCheckpointProcessUnlock", pid, 1, 0).map(drop)
    }

    fn cards(&self) -> Result<Vec<Card>, NoCards> {
        let free = self.shared.locked(free);
        Ok(vec![Card { uuid: UUID.into(), name: "Simulated".into(), free, used: CAPACITY - free, ..Card::default() }])
    }

    fn holders_of(&self, _uuid: &str) -> Vec<Holder> {
        let holder = |slot: &Slot| {
            let bytes = slot.tag.load(SeqCst) + slot.context.load(SeqCst);
            (bytes > 0).then(|| Holder { pid: slot.pid.load(SeqCst) as u32, bytes: Some(bytes), program: None })
        };
        self.shared.0.ranks.iter().filter_map(holder).collect()
    }
}

/// A rank: the library's part of the protocol, on one tag.
struct Rank {
    shared: Shared,
    slot: &'static Slot,
    job: &'static str,
    remembered: Mutex<Vec<u32>>,
    /// One client at a time.
    turn: Mutex<()>,
    random: Mutex<Random>,
}

/// A client's connection.
struct Client {
    stream: UnixStream,
    unread: Vec<u8>,
    file: Option<Held>,
}

/// The client has hung up, or its time is up.
struct Gone;

impl Client {
    /// The next request. `look`: whether to give up.
    fn next(&mut self, look: &dyn Fn() -> bool) -> Result<Request, Gone> {
        /// As long as the library's lease.
        const LEASE: Duration = Duration::from_secs(5);
        let mut deadline = Instant::now() + LEASE;
        loop {
            if let Some(at) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(at + 1);
                let line = std::mem::replace(&mut self.unread, rest);
                match protocol::parse(&line).unwrap() {
                    Request::Renew => deadline = Instant::now() + LEASE,
                    request => return Ok(request),
                }
                continue;
            }
            if look() || Instant::now() >= deadline {
                return Err(Gone);
            }
            self.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            let (mut part, mut passed) = ([0; 4096], Passed::default());
            match descriptors::receive(&self.stream, &mut part, &mut passed) {
                Ok(0) => return Err(Gone),
                Ok(count) => self.unread.extend_from_slice(&part[..count]),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => (),
                Err(_) => return Err(Gone),
            }
            self.file = passed.files.pop().or(self.file.take());
        }
    }

    fn answer(&self, reply: &Reply) -> Result<(), Gone> {
        descriptors::send_line(&self.stream, &protocol::line(reply), &[], 0).map_err(|_| Gone)
    }

    fn is_gone(&self) -> bool {
        poll(self.stream.as_fd(), 0, 0).is_ok_and(|found| found & (libc::POLLHUP | libc::POLLERR) != 0)
    }

    fn refuse(&self, error: &Error) -> Result<(), Gone> {
        self.answer(&Reply::Error(Refusal::from(error)))
    }
}

impl Rank {
    fn serve(&'static self, listener: &std::os::unix::net::UnixListener) {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut client = Client { stream, unread: Vec::new(), file: None };
                while let Ok(request) = client.next(&|| false) {
                    if self.handle(request, &mut client).is_err() {
                        break;
                    }
                }
            });
        }
    }

    /// What happens instead of an answer: a refusal, silence, the end of the connection, or of the process.
    fn fault(&self, client: &Client) -> Result<bool, Gone> {
        let mut random = self.random.lock().unwrap();
        if random.below(1000) >= self.shared.0.faults.load(SeqCst) {
            return Ok(false);
        }
        match random.below(4) {
            0 => client.refuse(&Error::Busy(Duration::from_millis(1))).map(|()| true),
            1 => client.refuse(&Error::Internal("simulated".into())).map(|()| true),
            2 => Err(Gone),
            _ => {
                let silence = Duration::from_millis(random.below(60));
                drop(random);
                thread::sleep(silence);
                Ok(false)
            }
        }
    }

    fn handle(&self, request: Request, client: &mut Client) -> Result<(), Gone> {
        match request {
            Request::Hello => client.answer(&Reply::Hello(self.status().process)),
            Request::Status => client.answer(&Reply::Status(self.status())),
            Request::Counted { .. } => client.answer(&Reply::Counted),
            Request::Plan(_) => client.answer(&Reply::Plan(DryRun { plan: vramctl_model::Plan::default(), refused: None })),
            Request::Suspend => self.suspend(client),
            Request::Awake => {
                if self.slot.state.load(SeqCst) != 0 {
                    self.shared.violated("a library is woken only when its process runs");
                }
                self.slot.quiesced.store(0, SeqCst);
                client.answer(&Reply::Awake)
            }
            Request::Hold { .. } | Request::Prepare(_) => self.in_steps(request, client),
            // It has given up by itself before its client could say so.
            Request::Abort => client.refuse(&Error::Invalid("nothing has begun".into())),
            other => panic!("the coordinator does not ask for {other:?}"),
        }
    }

    fn suspend(&self, client: &Client) -> Result<(), Gone> {
        if self.slot.quiesced.load(SeqCst) == 0 {
            let Ok(_turn) = self.turn.try_lock() else { return client.refuse(&Error::Busy(Duration::from_millis(1))) };
            if self.fault(client)? {
                return Ok(());
            }
            if self.slot.paused.load(SeqCst) == 0 {
                return client.refuse(&Error::Leased);
            }
            self.slot.quiesced.store(1, SeqCst);
            if client.is_gone() {
                self.slot.quiesced.store(0, SeqCst);
                return Err(Gone);
            }
        }
        client.answer(&Reply::Suspended { gpus: vec![GpuUse { uuid: UUID.into(), bytes: CONTEXT }] })
    }

    /// A pause or resume, whose steps are undone unless it is committed.
    fn in_steps(&self, first: Request, client: &mut Client) -> Result<(), Gone> {
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return client.refuse(&Error::Leased),
        };
        let was_held = self.slot.held.load(SeqCst);
        let (took, prepared) = (AtomicU64::new(0), Cell::new(None));
        let decision = client.file.take().map(|file| Decision::open(file.get().unwrap()).unwrap());
        let done = self.steps(first, client, decision.as_ref(), &took, &prepared);
        let is_committed = match &done {
            Ok(is_committed) => *is_committed,
            // Whoever does not hear of the decision makes it.
            Err(Gone) => decision.as_ref().is_some_and(|decision| !decision.abort()),
        };
        let verb = prepared.get().filter(|_| is_committed);
        match verb {
            Some(Verb::Pause) => {
                self.slot.paused.store(1, SeqCst);
                self.slot.tag.store(0, SeqCst);
            }
            Some(Verb::Resume) => {
                self.slot.paused.store(0, SeqCst);
                self.slot.lacks.store(0, SeqCst);
                self.slot.held.store(0, SeqCst);
            }
            None => {
                self.slot.tag.fetch_sub(took.load(SeqCst), SeqCst);
                if let Some(decision) = &decision {
                    decision.abort();
                }
                let is_whole = self.takes_back();
                self.slot.held.store(if is_whole { was_held } else { 1 }, SeqCst);
            }
        }
        match verb {
            Some(_) => client.answer(&Reply::Done(Report { allocations: 1, bytes: TAG, ..Report::default() })),
            None => Err(Gone),
        }
    }

    /// Whether the client commits what is prepared then.
    fn steps(
        &self,
        first: Request,
        client: &mut Client,
        decision: Option<&Decision>,
        took: &AtomicU64,
        prepared: &Cell<Option<Verb>>,
    ) -> Result<bool, Gone> {
        let is_aborted = || decision.is_some_and(Decision::is_aborted);
        let aborted = || Error::Aborted("another process of the job could not prepare".into());
        let mut request = first;
        loop {
            if self.slot.quiesced.load(SeqCst) != 0 {
                client.refuse(&Error::Suspended)?;
                return Ok(false);
            }
            // Once everything is prepared, nothing can be refused.
            if prepared.get().is_none() && self.fault(client)? {
                return Ok(false);
            }
            match request {
                Request::Hold { .. } => {
                    self.slot.held.store(1, SeqCst);
                    client.answer(&Reply::Held)?;
                }
                Request::Drain { .. } => client.answer(&Reply::Drained)?,
                Request::Prepare(Prepare { ranks, transition: Transition::Pause(pause), .. }) => {
                    self.remember(ranks);
                    if pause.swap.is_some() {
                        self.slot.tag.store(0, SeqCst);
                    }
                    prepared.set(Some(Verb::Pause));
                    client.answer(&Reply::Prepared)?;
                }
                Request::Prepare(Prepare { ranks, transition: Transition::Resume(resume), .. }) => {
                    self.remember(ranks);
                    let patience = if resume.swap.is_some() { LACKING } else { Duration::MAX };
                    let deadline = Instant::now() + resume.timeout.unwrap_or_default().min(patience);
                    let is_there = || self.slot.paused.load(SeqCst) == 0 || self.take(took);
                    while !is_there() {
                        if is_aborted() {
                            client.refuse(&aborted())?;
                            return Ok(false);
                        }
                        if Instant::now() >= deadline {
                            let short =
                                Shortage { device: 0, uuid: Some(UUID.into()), index: None, needed: TAG, free: 0, holders: Vec::new() };
                            client.refuse(&Error::DeviceMemory(short))?;
                            return Ok(false);
                        }
                        thread::sleep(Duration::from_millis(2));
                    }
                    prepared.set(Some(Verb::Resume));
                    client.answer(&Reply::Prepared)?;
                }
                Request::Commit if decision.is_none_or(Decision::commit) => return Ok(true),
                Request::Commit | Request::Abort => {
                    client.refuse(&aborted())?;
                    return Ok(false);
                }
                other => panic!("the coordinator does not ask for {other:?} here"),
            }
            request = match client.next(&is_aborted) {
                Ok(request) => request,
                Err(Gone) if is_aborted() => {
                    client.refuse(&aborted())?;
                    return Ok(false);
                }
                Err(Gone) => return Err(Gone),
            };
        }
    }

    fn remember(&self, ranks: Vec<u32>) {
        if !ranks.is_empty() {
            *self.remembered.lock().unwrap() = ranks;
        }
    }

    /// Undoes what it has handed over in a swap: its memory comes back once the other job has given it back. Returns whether it is there.
    fn takes_back(&self) -> bool {
        let (deadline, took) = (Instant::now() + LACKING, AtomicU64::new(0));
        let is_there = || self.slot.paused.load(SeqCst) == 1 || self.slot.tag.load(SeqCst) == TAG || self.take(&took);
        while !is_there() {
            if Instant::now() >= deadline {
                self.slot.paused.store(1, SeqCst);
                self.slot.lacks.store(1, SeqCst);
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
        true
    }

    fn take(&self, took: &AtomicU64) -> bool {
        self.shared.locked(|page| {
            let fits = free(page) >= TAG;
            if fits {
                self.slot.tag.fetch_add(TAG, SeqCst);
                took.store(TAG, SeqCst);
            }
            fits
        })
    }

    fn status(&self) -> ProcessStatus {
        let is_paused = self.slot.paused.load(SeqCst) != 0;
        let tags = [("weights", if is_paused { TagState::Paused } else { TagState::Active })];
        let mut status = made_up::process(std::process::id(), self.job, &tags).status.unwrap();
        status.process.job = Some(self.job.into());
        status.process.ranks.clone_from(&self.remembered.lock().unwrap());
        let (active_bytes, paused_bytes) = if is_paused { (0, TAG) } else { (TAG, 0) };
        status.memory.held = self.slot.held.load(SeqCst) != 0;
        status.memory.devices =
            vec![DeviceStatus { device: 0, uuid: Some(UUID.into()), active_bytes, paused_bytes, ..DeviceStatus::default() }];
        let gpus = || vec![GpuUse { uuid: UUID.into(), bytes: CONTEXT }];
        status.memory.suspended = (self.slot.quiesced.load(SeqCst) != 0).then(gpus);
        status
    }
}

fn be_a_rank(shared: Shared, rank: usize, seed: u64) -> ! {
    let (held, _bound) = Directory::open_or_create().unwrap().bind().unwrap();
    let listener = held.as_type().unwrap();
    let slot = &shared.0.ranks[rank];
    let new =
        Rank { shared, slot, job: JOBS[rank], remembered: Mutex::default(), turn: Mutex::default(), random: Mutex::new(Random(seed)) };
    slot.tag.store(TAG, SeqCst);
    slot.context.store(CONTEXT, SeqCst);
    slot.pid.store(std::process::id().into(), SeqCst);
    println!("ready");
    Box::leak(Box::new(new)).serve(&listener);
    exit(1)
}

/// An operation, as its words say.
fn operate(shared: Shared, words: &[&str], seed: u64) -> i32 {
    let machine: &'static Simulated = Box::leak(Box::new(Simulated { shared, random: Mutex::new(seed) }));
    let [verb, target, timeout] = words else { panic!("{words:?}") };
    let timeout: u64 = timeout.parse().unwrap();
    let operation = |verb: &str, target: &str| Operation {
        machine,
        verb: if verb == "resume" { Verb::Resume } else { Verb::Pause },
        target: if target == "all" { Target::All } else { Target::Name(target.to_owned()) },
        scope: if verb == "suspend" { Scope::Device } else { Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() } },
        ranks: None,
        deadline: Deadline::new((timeout > 0).then(|| Duration::from_millis(timeout))),
        pause: HowToPause { hold: Hold::Within(Duration::from_millis(500)), ..HowToPause::default() },
        nodes: None,
        self_paused: None,
    };
    let run = || match *verb {
        "suspend" => Suspend::plan(&operation(verb, target), &())?.check(&())?.run(&()),
        "pause" => Plan::make(operation(verb, target), &()).map(|plan| plan.run(&Consent::default(), &())),
        "swap" => {
            let swap = Swap::plan(operation("pause", target), operation("resume", other(target)), &())?;
            let Swapped { left, came, .. } = swap.run(&Consent::default(), &());
            Ok(Outcome { processes: left.processes.into_iter().chain(came.processes).collect(), ..Outcome::default() })
        }
        _ => Plan::make(operation(verb, target), &())?.restore_suspended(&()).map(|plan| plan.run(&Consent::default(), &())),
    };
    let failures: Vec<_> = match run() {
        Ok(outcome) => outcome.processes.into_iter().filter_map(|one| one.result.err()).collect(),
        Err(failure) => vec![failure],
    };
    for failure in &failures {
        println!("{failure}");
    }
    i32::from(!failures.is_empty())
}

/// The job that changes places with this one.
fn other(job: &str) -> &'static str {
    if job == "a" { "b" } else { "a" }
}

fn itself(role: &str, folder: &Path, seed: u64) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env("SIMULATION_ROLE", role).env("SIMULATION_FOLDER", folder).env("VRAMCTL_DIR", folder.join("sockets"));
    command.env("SIMULATION_SEED", seed.to_string()).stdout(Stdio::piped());
    command
}

struct Simulation {
    folder: TempDir,
    shared: Shared,
    ranks: Vec<Child>,
    random: Random,
    log: Vec<String>,
}

impl Drop for Simulation {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // SAFETY: there is no other thread yet.
        unsafe { env::set_var("SIMULATION_FOLDER", folder.path()) };
        let shared = Shared::open(folder.path());
        let mut new = Self { folder, shared, ranks: Vec::new(), random: Random(seed), log: Vec::new() };
        for rank in 0..JOBS.len() {
            let child = new.start(rank);
            new.ranks.push(child);
        }
        new
    }

    fn start(&mut self, rank: usize) -> Child {
        let mut child = itself(&format!("rank {rank}"), self.folder.path(), self.random.next()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        child
    }

    fn operate(&mut self, words: &str) -> Child {
        self.log.push(words.to_owned());
        itself(&format!("operate {words}"), self.folder.path(), self.random.next()).spawn().unwrap()
    }

    /// Runs it to its end, and returns whether all went well and what it said.
    fn run(&mut self, words: &str) -> (bool, String) {
        let done = self.operate(words).wait_with_output().unwrap();
        (done.status.success(), String::from_utf8(done.stdout).unwrap())
    }

    fn step(&mut self) {
        let mut target = ["a", "b", "all"][self.random.below(3) as usize];
        let verb = ["pause", "resume", "suspend", "resume", "swap", "swap"][self.random.below(6) as usize];
        if verb == "swap" {
            target = self.prepare_a_swap();
        }
        let before = self.runs();
        let timeout = [0, 0, 60, 200][self.random.below(4) as usize];
        let words = format!("{verb} {target} {timeout}");
        self.shared.0.others.store(0, SeqCst);
        let (others, free) = ([0, 0, TAG, 3 * TAG][self.random.below(4) as usize], self.shared.locked(free));
        // A third party has what is free, or less; otherwise it would seem to take what a swap hands over.
        let others = if verb != "swap" {
            others
        } else if self.random.one_in(2) {
            free
        } else {
            others.min(free)
        };
        self.shared.0.others.store(others, SeqCst);
        self.shared.0.faults.store([0, 20, 60, 200][self.random.below(4) as usize], SeqCst);
        let how = self.random.below(4);
        match how {
            // Killed at any moment.
            0 => {
                let mut killed = self.operate(&words);
                let time = Duration::from_micros(self.random.below(40_000));
                self.log.push(format!("(killed after {time:?})"));
                thread::sleep(time);
                killed.kill().unwrap();
                killed.wait().unwrap();
            }
            // Two at once.
            1 => {
                let other = ["pause a 0", "resume a 60", "resume b 60", "suspend b 0", "pause all 0"][self.random.below(5) as usize];
                let mut both = [self.operate(&words), self.operate(other)];
                for one in &mut both {
                    one.wait().unwrap();
                }
            }
            _ => {
                let (is_well, said) = self.run(&words);
                if is_well {
                    self.look_after(verb, target);
                    if verb == "swap" {
                        self.look_after("resume", other(target));
                    }
                } else {
                    self.log.push(format!("({})", said.trim()));
                }
            }
        }
        self.shared.0.faults.store(0, SeqCst);
        self.settle();
        let after = self.runs();
        // Two at once may both have an effect.
        if verb == "swap" && how != 1 && before[0] != before[1] {
            assert!(after[0] != after[1], "of two jobs that change places, one runs: {before:?}, {after:?}");
        }
        if self.random.one_in(3) {
            self.bring_everything_back();
        }
        assert_eq!(self.shared.0.violations.load(SeqCst), 0);
    }

    fn slots_of(&self, target: &str) -> impl Iterator<Item = &'static Slot> {
        let page = self.shared.0;
        JOBS.iter().zip(&page.ranks).filter(move |(job, _)| target == "all" || **job == target).map(|(_, slot)| slot)
    }

    /// An operation that went well has done what it says.
    fn look_after(&self, verb: &str, target: &str) {
        for slot in self.slots_of(target) {
            let figures = [&slot.paused, &slot.quiesced, &slot.state, &slot.held].map(|figure| figure.load(SeqCst));
            match verb {
                "pause" => assert_eq!(figures[0], 1),
                "suspend" => assert_eq!(figures[..3], [1, 1, 2]),
                "swap" => assert_eq!((figures[0], figures[3]), (1, 1)),
                _ => assert_eq!(figures, [0; 4]),
            }
        }
    }

    /// Which of the two jobs run.
    fn runs(&self) -> [bool; 2] {
        ["a", "b"].map(|job| self.slots_of(job).all(|slot| slot.paused.load(SeqCst) == 0))
    }

    /// Often has only one of the two run. Returns the one that is to leave.
    fn prepare_a_swap(&mut self) -> &'static str {
        let leaving = ["a", "b"][self.random.below(2) as usize];
        if self.random.below(4) > 0 {
            self.bring_everything_back();
            let (is_well, said) = self.run(&format!("pause {} 0", other(leaving)));
            assert!(is_well, "{said}");
        }
        leaving
    }

    /// All or nothing, once every rank has noticed that its client is gone.
    fn settle(&self) {
        let is_whole = |job: &str| {
            let paused: Vec<_> = self.slots_of(job).map(|slot| slot.paused.load(SeqCst)).collect();
            let lacks = self.slots_of(job).any(|slot| slot.lacks.load(SeqCst) == 1);
            lacks || paused.iter().all(|one| *one == paused[0])
        };
        let is_free = |slot: &Slot| slot.held.load(SeqCst) == 0 || slot.paused.load(SeqCst) == 1;
        let deadline = Instant::now() + Duration::from_secs(20);
        while !(["a", "b"].iter().all(|job| is_whole(job)) && self.shared.0.ranks.iter().all(is_free)) {
            assert!(Instant::now() < deadline, "a job is half paused, or a program is held for nothing");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn bring_everything_back(&mut self) {
        self.shared.0.others.store(0, SeqCst);
        let (is_well, said) = self.run("resume all 10000");
        assert!(is_well, "{said}");
        self.look_after("resume", "all");
    }
}

fn main() {
    let seed = env::var("SIMULATION_SEED").ok().and_then(|seed| seed.parse().ok());
    if let (Ok(role), Some(folder)) = (env::var("SIMULATION_ROLE"), env::var_os("SIMULATION_FOLDER")) {
        let shared = Shared::open(Path::new(&folder));
        match &role.split(' ').collect::<Vec<_>>()[..] {
            ["rank", rank] => be_a_rank(shared, rank.parse().unwrap(), seed.unwrap()),
            ["operate", words @ ..] => exit(operate(shared, words, seed.unwrap())),
            other => panic!("{other:?}"),
        }
    }
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = seed.unwrap_or_else(now);
    let steps = env::var("SIMULATION_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(60);
    let mut simulation = Simulation::new(seed);
    for step in 0..steps {
        let before = simulation.log.len();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| simulation.step()));
        if done.is_err() {
            eprintln!("step {step} of SIMULATION_SEED={seed}: {:#?}\n{:?}", &simulation.log[before..], simulation.shared.0);
            drop(simulation);
            exit(1);
        }
    }
    simulation.bring_everything_back();
    println!("simulation: {steps} steps of seed {seed}, ok");
}
