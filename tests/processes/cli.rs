//! The command line and the shell scripts, against fake processes: a thread speaks the protocol on the socket of a sleeping
//! child. Tests that need real memory use the simulated GPU and are elsewhere.

mod audit;
mod background;
mod completions;
mod demo;
mod directory;
mod doctor;
mod documented;
mod ending;
mod engines;
mod operate;
mod output;
mod pause;
mod ray;
mod run;
mod scripts;
mod settings;
mod status;
mod targets;

use crate::common;
use crate::common::machine::{Killed, Machine, Ran, row_of, stop};
use crate::common::{command_line, interruptible, library};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use vramctl_control::protocol::{self, DryRun, Hello, Prepare, ProcessStatus, Refusal, Reply, Request};
use vramctl_model::{
    Cycle, DeviceStatus, Error, Holder, HostRoom, PauseOptions, PauseRequest, Plan, Policy, Progress, Report, ResumeRequest, Selection,
    Shortage, Stage, Status, TagPlan, TagState, TagStatus, Transition,
};

const GIB: u64 = 1 << 30;
const TEN_SECONDS: Duration = Duration::from_secs(10);

/// What `vramctl pause` asks for without options.
fn held() -> PauseRequest {
    PauseRequest { hold: Some(TEN_SECONDS), ..PauseRequest::default() }
}

fn discard() -> PauseOptions {
    PauseOptions { backup: Some(Policy::Discard), ..PauseOptions::default() }
}

const GPU: &str = "GPU-11111111-2222-3333-4444-555555555555";

/// How a fake process misbehaves on a request.
#[allow(clippy::large_enum_variant)]
enum Reaction {
    Answer(Reply),
    HangUp,
    BeSilent,
}

/// A fake process with tags of 1 GiB each.
struct Fake {
    child: Killed,
    socket: PathBuf,
    state: Arc<Mutex<State>>,
}

struct State {
    name: String,
    pid: u32,
    tags: Vec<(String, TagState)>,
    process_tag: Option<String>,
    engine: Option<String>,
    /// The pauses and resumes it was asked for.
    asked: Vec<Request>,
    /// How long it is to wait for its work, while it is held.
    drain_ms: Option<u64>,
    /// The number of them received, whether carried out or not.
    transitions: usize,
    /// The UUID of its GPU.
    gpu: String,
    job: Option<String>,
}

impl Fake {
    fn new(machine: &Machine, name: &str, tags: &[&str]) -> Self {
        Self::reacting(machine, name, tags, |_| None)
    }

    /// A fake process that misbehaves on some requests.
    fn reacting(
        machine: &Machine,
        name: &str,
        tags: &[&str],
        react: impl Fn(&Request) -> Option<Reaction> + Send + Sync + 'static,
    ) -> Self {
        let child = Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let socket = machine.socket(child.id());
        let listener = UnixListener::bind(&socket).unwrap();
        let tags = tags.iter().map(|tag| ((*tag).to_owned(), TagState::Active)).collect();
        let state = State {
            name: name.into(),
            pid: child.id(),
            tags,
            process_tag: Some("default".into()),
            engine: None,
            asked: Vec::new(),
            drain_ms: None,
            transitions: 0,
            gpu: GPU.into(),
            job: None,
        };
        let fake = Self { child: Killed(child), socket, state: Arc::new(Mutex::new(state)) };
        let (state, react) = (Arc::clone(&fake.state), Arc::new(react));
        // The thread ends with the test process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state, react) = (stream.unwrap(), Arc::clone(&state), Arc::clone(&react));
                thread::spawn(move || converse(&stream, &state, &*react));
            }
        });
        fake
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Makes it report this GPU.
    fn on_gpu(self, uuid: &str) -> Self {
        self.state.lock().unwrap().gpu = uuid.into();
        self
    }

    /// Makes it report this job.
    fn of_job(self, name: &str) -> Self {
        self.state.lock().unwrap().job = Some(name.into());
        self
    }

    /// Makes it report this engine.
    fn with_engine(self, name: &str) -> Self {
        self.state.lock().unwrap().engine = Some(name.into());
        self
    }

    /// The pauses and resumes it was asked for.
    fn asked(&self) -> Vec<Request> {
        self.state.lock().unwrap().asked.clone()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // The thread keeps listening, but the socket can no longer be found.
        let _ = fs::remove_file(&self.socket);
    }
}

fn converse(mut stream: &UnixStream, state: &Mutex<State>, react: &dyn Fn(&Request) -> Option<Reaction>) {
    // The transition that waits for the commit. Like a real process, it can only fail before.
    let mut prepared = None;
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let mut request = match protocol::parse(line.as_bytes()) {
            Ok(request) => request,
            Err(error) => {
                let _ = stream.write_all(&protocol::line(&Reply::Error(Refusal::from(&error))));
                continue;
            }
        };
        let in_steps = matches!(request, Request::Prepare(_));
        if let Request::Prepare(Prepare { transition, .. }) = request {
            request = match transition {
                Transition::Pause(pause) => Request::Pause(pause),
                Transition::Resume(resume) => Request::Resume(resume),
            };
        }
        state.lock().unwrap().transitions += usize::from(is_transition(&request));
        if let Request::Pause(PauseRequest { progress: true, .. }) = &request {
            let progress = Reply::Progress(Progress { stage: Stage::Save, done: 1, total: 2 });
            let _ = stream.write_all(&protocol::line(&progress));
        }
        let reply = match (react(&request), request) {
            (Some(Reaction::Answer(done @ Reply::Done(_))), _) if in_steps => {
                prepared = Some(done);
                Reply::Prepared
            }
            (Some(Reaction::Answer(reply)), _) => reply,
            (Some(Reaction::HangUp), _) => return,
            (Some(Reaction::BeSilent), _) => loop {
                thread::park();
            },
            (None, Request::Renew) => continue,
            (None, Request::Commit) => prepared.take().expect("something is prepared"),
            (None, Request::Abort) => Reply::Error(Refusal::from(&Error::Aborted("a test".into()))),
            (None, request) => match state.lock().unwrap().carry_out(&request) {
                done @ Reply::Done(_) if in_steps => {
                    prepared = Some(done);
                    Reply::Prepared
                }
                reply => reply,
            },
        };
        if stream.write_all(&protocol::line(&reply)).is_err() {
            return;
        }
    }
}

impl State {
    fn carry_out(&mut self, request: &Request) -> Reply {
        match request {
            Request::Hello => Reply::Hello(self.hello()),
            Request::Status => Reply::Status(self.status()),
            Request::SetTag { tag } => {
                self.process_tag.clone_from(tag);
                Reply::Tag { tag: tag.clone() }
            }
            Request::Pause(wanted) => {
                // The remaining time depends on this machine's speed, so round it to tens of seconds.
                let drained = self.drain_ms.take().map(|limit| Duration::from_millis(limit.max(1).next_multiple_of(10_000)));
                let timeout = wanted.timeout.filter(|_| drained.is_none());
                // A request without steps says it itself.
                let hold = drained.or(wanted.hold);
                self.asked.push(Request::Pause(PauseRequest { hold, timeout, ..wanted.clone() }));
                match self.foretell(wanted).plan.prefix_cache {
                    Some(engine) if !wanted.options.force => Reply::Error(Refusal::from(&Error::PrefixCache(engine))),
                    _ => self.transition(&wanted.selection.tags, wanted.options.backup, TagState::Paused),
                }
            }
            Request::Plan(Transition::Pause(wanted)) => Reply::Plan(self.foretell(wanted)),
            Request::Plan(Transition::Resume(_)) => panic!("tests/processes/swap.rs has real processes"),
            Request::Resume(wanted) => {
                self.asked.push(request.clone());
                self.transition(&wanted.selection.tags, None, TagState::Active)
            }
            Request::Share { .. } | Request::Order(_) | Request::Holdings | Request::Sharing(_) | Request::Room(_) => {
                panic!("tests/processes/taking_turns.rs has real processes")
            }
            Request::Events { .. } | Request::Record => panic!("tests/events.rs has real processes"),
            Request::Suspend | Request::Awake => panic!("tests/suspend.rs has real processes"),
            Request::Hold { .. } => Reply::Held,
            Request::Drain { limit_ms } => {
                self.drain_ms = Some(*limit_ms);
                Reply::Drained
            }
            Request::Advance { .. } => panic!("a job over nodes"),
            Request::Prepare(_) | Request::Renew | Request::Commit | Request::Abort => panic!("the conversation knows the steps"),
            Request::Counted { .. } => Reply::Counted,
            Request::Cache | Request::Trim { .. } | Request::Watch { .. } => panic!("python/tests/test_trim.py has real processes"),
            Request::Store(_) | Request::Origin { .. } | Request::Detach => panic!("tests/images.rs has real processes"),
            Request::SetAside(_) => panic!("tests/processes/shared.rs has real processes"),
            Request::ResetPrefixCache { .. } => panic!("only the scheduler and a save ask for it"),
            Request::Open { .. } | Request::Claim | Request::Close { .. } => panic!("the command line shares no memory"),
        }
    }

    fn foretell(&self, wanted: &PauseRequest) -> DryRun {
        let policy = wanted.options.backup.unwrap_or(Policy::Host);
        let meant = |(tag, state): &&(String, TagState)| {
            *state != TagState::Paused && (wanted.selection.tags.is_empty() || wanted.selection.tags.contains(tag))
        };
        let tag = |(tag, _): &(String, TagState)| TagPlan { tag: tag.clone(), allocations: 1, bytes: GIB, backup: [(policy, GIB)].into() };
        let tags: Vec<_> = self.tags.iter().filter(meant).map(tag).collect();
        let lost = policy == Policy::Discard && tags.iter().any(|tag| tag.tag == "kv_cache");
        let needed_bytes = if policy == Policy::Host { GIB * tags.len() as u64 } else { 0 };
        let host = HostRoom { needed_bytes, available_bytes: 3 * GIB / 2 };
        let short = Error::HostMemory { needed: needed_bytes, available: host.available_bytes, capped: false };
        let refused = (needed_bytes > host.available_bytes).then(|| Box::new(Refusal::from(&short)));
        let prefix_cache = self.engine.clone().filter(|_| lost);
        DryRun { plan: Plan { tags, host, prefix_cache, ..Plan::default() }, refused }
    }

    fn transition(&mut self, tags: &[String], backup: Option<Policy>, end: TagState) -> Reply {
        let known: Vec<_> = self.tags.iter().map(|(tag, _)| tag.clone()).collect();
        let unknown: Vec<_> = tags.iter().filter(|tag| !known.contains(tag)).cloned().collect();
        if !unknown.is_empty() {
            return Reply::Error(Refusal::from(&Error::UnknownTag { unknown, known }));
        }
        let mut report = Report { stages: [(Stage::Wait, 3.0), (Stage::Unmap, 20.0)].into(), ms: 23.4, ..Report::default() };
        for (tag, state) in &mut self.tags {
            if (tags.is_empty() || tags.contains(tag)) && *state != end {
                *state = end;
                report.allocations += 1;
                report.bytes += GIB;
            }
        }
        let discarded = if backup == Some(Policy::Discard) { report.bytes } else { 0 };
        Reply::Done(Report { kept_bytes: report.bytes - discarded, discarded_bytes: discarded, ..report })
    }

    fn hello(&self) -> Hello {
        let program = format!("{} --serve", self.name);
        Hello {
            protocol: 1,
            library: "9.9.9".into(),
            pid: self.pid,
            name: self.name.clone(),
            program,
            engine: self.engine.clone(),
            job: self.job.clone(),
            run: None,
            age_s: None,
            ranks: Vec::new(),
            shares: false,
            trims: false,
            on_pause: None,
            on_resume: None,
        }
    }

    fn status(&self) -> ProcessStatus {
        let tag = |(tag, state): &(String, TagState)| TagStatus {
            tag: tag.clone(),
            state: *state,
            allocations: 1,
            bytes: GIB,
            paused_bytes: if *state == TagState::Paused { GIB } else { 0 },
            self_paused_bytes: 0,
            both_paused_bytes: 0,
            away_bytes: 0,
            host_bytes: if *state == TagState::Paused { GIB } else { 0 },
            disk_bytes: 0,
            backup: [(Policy::Host, GIB)].into(),
            retained: false,
            progress: None,
        };
        let device = DeviceStatus {
            device: 0,
            uuid: Some(self.gpu.clone()),
            active_bytes: 2 * GIB,
            tags: [("kv_cache".into(), GIB), ("weights".into(), GIB)].into(),
            paused_bytes: 0,
            self_paused_bytes: 0,
            away_bytes: 0,
            guard_bytes: 0,
            limit_bytes: None,
            counted_bytes: 0,
            free_bytes: Some(7 * GIB),
            total_bytes: Some(80 * GIB),
        };
        let memory = Status {
            held: false,
            standing: None,
            waiting_threads: 0,
            idle_ms: None,
            suspended: None,
            obstacles: Vec::new(),
            communicators: BTreeSet::new(),
            process_tag: self.process_tag.clone(),
            tags: self.tags.iter().map(tag).collect(),
            devices: vec![device],
            borrowed: Vec::new(),
            host: vramctl_model::HostStatus::default(),
            late_bytes: 0,
            refusals: Vec::new(),
            passing_by: Vec::new(),
            unmanaged: Vec::new(),
            cycles: Vec::new(),
            growing: Vec::new(),
            totals: std::collections::BTreeMap::new(),
            cache: Vec::new(),
        };
        ProcessStatus { process: self.hello(), memory }
    }
}

fn shortage(holder: u32) -> Reply {
    let holders = vec![Holder { pid: holder, bytes: Some(3 * GIB), program: Some("trainer".into()) }];
    Reply::Error(Refusal::from(&Error::DeviceMemory(Shortage { device: 0, uuid: None, index: None, needed: 4 * GIB, free: GIB, holders })))
}

fn is_transition(request: &Request) -> bool {
    matches!(request, Request::Pause(_) | Request::Resume(_))
}

/// A copy to execute.
fn copy_command(to: &Path) {
    common::write_executable(to, fs::read(command_line()).unwrap());
}

/// A listening process that is stopped, as by a debugger or a frozen cgroup.
struct Stopped {
    child: Killed,
    socket: PathBuf,
}

impl Stopped {
    /// `name`: its `VRAMCTL_NAME`, if any. `queue`: its listen backlog.
    fn new(machine: &Machine, name: Option<&str>, queue: u32) -> Self {
        let program = format!(
            "import os, signal, socket\n\
             listener = socket.socket(socket.AF_UNIX)\n\
             listener.bind(os.environ['VRAMCTL_DIR'] + '/%d.sock' % os.getpid())\n\
             listener.listen({queue})\n\
             print('ready', flush=True)\n\
             signal.pause()"
        );
        let mut command = machine.command("python3", &["-c", &program]);
        command.envs(name.map(|name| ("VRAMCTL_NAME", name))).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "ready");
        let child = Killed(child);
        stop(&child);
        Self { socket: machine.socket(child.id()), child }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.socket);
    }
}

/// A process that is pausing or resuming its `weights`.
fn in_the_middle(machine: &Machine, state: TagState, copying: Stage) -> Fake {
    let engine = Fake::new(machine, "engine", &["kv_cache", "weights"]);
    let mut status = engine.state.lock().unwrap().status();
    drop(engine);
    status.memory.tags[1].state = state;
    status.memory.tags[1].progress = Some(Progress { stage: copying, done: GIB / 4, total: GIB });
    Fake::reacting(machine, "engine", &["kv_cache", "weights"], move |request| match request {
        Request::Status => Some(Reaction::Answer(Reply::Status(ProcessStatus { memory: status.memory.clone(), ..status.clone() }))),
        Request::Pause(_) | Request::Resume(_) => Some(Reaction::BeSilent),
        _ => None,
    })
}

fn run(machine: &Machine, arguments: &[&str], environment: &[(&str, &str)]) -> Ran {
    let arguments: Vec<_> = ["run"].iter().chain(arguments).copied().collect();
    let mut command = machine.cli(&arguments);
    command.env("VRAMCTL_LIB", library()).envs(environment.iter().copied());
    Ran::of(&mut command)
}

/// An operation that a program has asked for.
struct Operating {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Operating {
    fn new(machine: &Machine, request: &Value) -> Self {
        let mut command = machine.cli("operate");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        writeln!(child.stdin.as_ref().unwrap(), "{request}").unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Its lines up to the outcome, and its exit code.
    fn ends(mut self) -> (Vec<Value>, Option<i32>) {
        let lines: Vec<Value> = self.lines.by_ref().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        assert_eq!(lines.last().expect("an outcome")["reply"], "outcome", "{lines:?}");
        (lines, self.child.wait().unwrap().code())
    }
}

/// What comes of a request: the outcome.
fn operate(machine: &Machine, request: &Value) -> Value {
    Operating::new(machine, request).ends().0.pop().unwrap()
}

fn request(operation: &str, fields: &Value) -> Value {
    let mut request = json!({ "version": 1, "operation": operation });
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    request
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name)
}

/// The first program with this name in `PATH`.
fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

fn protocol_page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/protocol.md")).unwrap()
}

/// The code blocks of a page in one language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}
