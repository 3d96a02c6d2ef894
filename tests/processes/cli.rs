//! The command line and the shell scripts, against fake processes: a thread speaks the protocol on the socket of a sleeping
//! child. Tests that need real memory use the simulated GPU and are elsewhere.

use crate::common;
use crate::common::machine::{Machine, Ran};
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
    Cycle, DeviceStatus, Error, Holder, HostRoom, Plan, Policy, Progress, Report, Shortage, Stage, Status, TagPlan, TagState, TagStatus,
    TransitionRequest, Verb,
};

const GIB: u64 = 1 << 30;
const TEN_SECONDS: Duration = Duration::from_secs(10);
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
    child: Child,
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
        let fake = Self { child, socket, state: Arc::new(Mutex::new(state)) };
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
        let _ = self.child.kill();
        let _ = self.child.wait();
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
        if let Request::Prepare(Prepare { of, transition, .. }) = request {
            request = if of == Verb::Pause { Request::Pause(transition) } else { Request::Resume(transition) };
        }
        state.lock().unwrap().transitions += usize::from(is_transition(&request));
        if let Request::Pause(TransitionRequest { progress: true, .. }) = &request {
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
                self.asked.push(Request::Pause(TransitionRequest { hold, timeout, ..wanted.clone() }));
                match self.foretell(wanted).plan.prefix_cache {
                    Some(engine) if !wanted.force => Reply::Error(Refusal::from(&Error::PrefixCache(engine))),
                    _ => self.transition(wanted, TagState::Paused),
                }
            }
            Request::Plan(wanted) => Reply::Plan(self.foretell(wanted)),
            Request::Resume(wanted) => {
                self.asked.push(request.clone());
                self.transition(wanted, TagState::Active)
            }
            Request::Events { .. } => panic!("tests/events.rs has real processes"),
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
            Request::SetAside(_) => panic!("tests/processes/shared.rs has real processes"),
            Request::Open { .. } | Request::Claim | Request::Close { .. } => panic!("the command line shares no memory"),
        }
    }

    fn foretell(&self, wanted: &TransitionRequest) -> DryRun {
        let policy = wanted.backup.unwrap_or(Policy::Host);
        let meant =
            |(tag, state): &&(String, TagState)| *state != TagState::Paused && (wanted.tags.is_empty() || wanted.tags.contains(tag));
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

    fn transition(&mut self, wanted: &TransitionRequest, end: TagState) -> Reply {
        let known: Vec<_> = self.tags.iter().map(|(tag, _)| tag.clone()).collect();
        let unknown: Vec<_> = wanted.tags.iter().filter(|tag| !known.contains(tag)).cloned().collect();
        if !unknown.is_empty() {
            return Reply::Error(Refusal::from(&Error::UnknownTag { unknown, known }));
        }
        let mut report = Report { stages: [(Stage::Wait, 3.0), (Stage::Unmap, 20.0)].into(), ms: 23.4, ..Report::default() };
        for (tag, state) in &mut self.tags {
            if (wanted.tags.is_empty() || wanted.tags.contains(tag)) && *state != end {
                *state = end;
                report.allocations += 1;
                report.bytes += GIB;
            }
        }
        let discarded = if wanted.backup == Some(Policy::Discard) { report.bytes } else { 0 };
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
            trims: false,
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
            guard_bytes: 0,
            limit_bytes: None,
            counted_bytes: 0,
            free_bytes: Some(7 * GIB),
            total_bytes: Some(80 * GIB),
        };
        let memory = Status {
            held: false,
            waiting_threads: 0,
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

/// A copy to execute. Another process writes it: a program that another thread is just starting would still have our descriptor, and what
/// is open for writing cannot be executed.
fn copy_command(to: &Path) {
    assert!(Command::new("cp").arg(command_line()).arg(to).status().unwrap().success());
}

// ---- looking ----

#[test]
fn ps_and_status_show_the_processes() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let pid = engine.pid().to_string();

    let ps = machine.vramctl("ps -o wide");
    ps.has(0, "kv_cache 1.00 GiB, weights 1.00 GiB", "");
    let row = ps.out.lines().nth(1).unwrap();
    assert_eq!(row.split_whitespace().take(5).collect::<Vec<_>>(), [&pid, "engine", "active", "2.00", "GiB"]);
    assert!(row.ends_with("engine --serve"));

    for target in ["", "engine", &pid, "--name engine", "--all"] {
        let status = machine.vramctl(&format!("status {target}"));
        status.has(0, &format!("engine (pid {pid}): engine --serve"), "");
        status.has(0, "get the tag default", "");
        let words: Vec<_> = status.out.lines().find(|line| line.starts_with("kv_cache")).unwrap().split_whitespace().collect();
        assert_eq!(words, ["kv_cache", "active", "1.00", "GiB", "1", "host", "0", "B", "0", "B"]);
        status.has(0, "7.00 GiB", "");
        status.has(0, "80.00 GiB", "");
    }

    let (ps, status) = (machine.vramctl("ps --json").only_json(), machine.vramctl("status --json").only_json());
    assert_eq!(ps, status);
    let process = &ps["processes"][0];
    assert_eq!((&process["pid"], &process["name"]), (&json!(engine.pid()), &json!("engine")));
    assert_eq!(process["tags"][1]["tag"], "weights");
    assert_eq!(process["tags"][1]["backup"], json!({"host": GIB}));
    assert_eq!(process["devices"][0]["free_bytes"], json!(7 * GIB));
    assert_eq!(process["devices"][0]["uuid"], GPU);
}

/// Ordinals are meaningless outside their process.
#[test]
fn gpus_are_identified_by_uuid() {
    let machine = Machine::without_gpus();
    let (first, second) = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-aaaabbbb-0000-0000-0000-000000000000");
    let engine = Fake::new(&machine, "engine", &["weights"]).on_gpu(first);
    let trainer = Fake::new(&machine, "trainer", &["weights"]).on_gpu(second);
    machine.vramctl("status").expect(0, "GPU-aaaaaaaa", "");
    machine.vramctl("ps").expect(0, "GPU-aaaaaaaa", "");
    let shown = |line: &str| {
        let ran = machine.vramctl(line);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        (ran.out.contains("engine --serve"), ran.out.contains("trainer --serve"))
    };
    for gpu in [second, "gpu-aaaab", "aaaab"] {
        assert_eq!(shown(&format!("ps -o wide --gpu {gpu}")), (false, true));
        assert_eq!(shown(&format!("status --gpu {gpu}")), (false, true));
    }
    assert_eq!(shown(&format!("ps -o wide --gpu {first} --gpu {second}")), (true, true));
    machine.vramctl("ps --gpu aaaa").expect(2, "", "GPU-aaaaaaaa-0000-0000-0000-000000000000, GPU-aaaabbbb");
    machine.vramctl("pause --gpu GPU-cccc").expect(3, "", "no managed process has memory on GPU-cccc");

    machine.vramctl("pause --gpu aaaab").expect(0, "paused weights of trainer", "");
    assert_eq!(
        trainer.asked(),
        [Request::Pause(TransitionRequest { gpus: vec![second.into()], hold: Some(TEN_SECONDS), ..TransitionRequest::default() })]
    );
    machine.vramctl("pause --gpu aaaab").expect(0, &format!("trainer (pid {}) has nothing there to pause", trainer.pid()), "");
    machine.vramctl("resume --all --gpu aaaab").expect(0, "resumed weights of trainer", "");
    assert!(engine.asked().is_empty());

    // A stopped process cannot be asked whether it has memory there.
    let stopped = Stopped::new(&machine, None, 100);
    machine.vramctl("pause --all --gpu aaaab").expect(5, "", &format!("kill -CONT {}", stopped.pid()));
}

#[test]
fn a_dry_run_says_what_a_pause_would_do_and_does_nothing() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("vllm");
    let run = machine.vramctl("pause weights --dry-run");
    run.has(0, &format!("engine (pid {}): a pause would free 1.00 GiB", engine.pid()), "");
    run.has(0, "Host memory for the contents: 1.00 GiB needed, 1.50 GiB available.", "");
    let row: Vec<_> = run.out.lines().find(|line| line.starts_with("weights")).unwrap().split_whitespace().collect();
    assert_eq!(row, ["weights", "1.00", "GiB", "1", "1.00", "GiB", "host"]);
    assert!(!run.out.contains("kv_cache"), "{run:?}");

    machine.vramctl("pause --dry-run").expect(4, "", "too little host memory to keep the contents: 2.00 GiB needed, 1.50 GiB available");
    let refused = machine.vramctl("pause --discard --dry-run");
    refused.has(1, "1.00 GiB discard", "the prefix cache of vllm");
    machine.vramctl("pause --discard --dry-run --force").expect(0, "0 B needed", "");
    let json = machine.vramctl("pause --discard --dry-run --json");
    assert_eq!(json.code, Some(1));
    let process = &json.only_json()["processes"][0];
    assert_eq!(process["plan"]["tags"][1], json!({"tag": "weights", "allocations": 1, "bytes": GIB, "backup": {"discard": GIB}}));
    assert_eq!(process["error"]["code"], "prefix_cache");
    assert!(machine.vramctl("pause weights --dry-run --json").only_json()["processes"][0].get("error").is_none());
    machine.vramctl("pause lost --dry-run").expect(6, "", "lost is neither a tag nor a process");
    assert!(engine.asked().is_empty(), "{:?}", engine.asked());
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("pause --dry-run").expect(0, "nothing to pause", "");
}

#[test]
fn without_processes_the_message_says_what_to_do() {
    let machine = Machine::without_gpus();
    let ps = machine.vramctl("ps");
    ps.has(0, "", "vramctl run");
    assert_eq!(ps.out, "", "a script that reads a table reads none");
    assert_eq!(machine.vramctl("ps --json").only_json(), json!({"processes": []}));
    for command in ["status", "pause", "resume --all", "pause --name engine", "set-tag x", "status engine"] {
        machine.vramctl(command).expect(3, "", "no process is managed");
    }
    let answer = machine.vramctl("pause --json");
    assert_eq!(answer.code, Some(3));
    assert_eq!(answer.only_json()["error"]["code"], "no_process");
    assert_eq!(answer.only_json()["processes"], json!([]));

    fs::remove_dir(machine.sockets()).unwrap();
    machine.vramctl("ps").expect(0, "", machine.sockets().to_str().unwrap());
    machine.vramctl("pause").expect(3, "", "no process is managed");
}

#[test]
fn a_silent_process_does_not_hide_the_others() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    let stopped = Fake::reacting(&machine, "stopped", &["weights"], |_| Some(Reaction::BeSilent));
    let ps = machine.vramctl("ps -o wide");
    ps.has(0, "engine --serve", "");
    let row = ps.out.lines().find(|line| line.starts_with(&stopped.pid().to_string())).unwrap();
    assert!(row.contains("no answer within 2 s"), "{row}");
    machine.vramctl("status").expect(5, "engine --serve", &format!("error: process {}: no answer", stopped.pid()));
    let status = machine.vramctl("status --json").expect(5, "", "").json();
    let silent = status["processes"].as_array().unwrap().iter().find(|process| process["pid"] == stopped.pid()).unwrap();
    assert_eq!((silent.get("name").is_some(), &silent["error"]["code"]), (true, &json!("busy")), "{status}");
}

/// A listening process that is stopped, as by a debugger or a frozen cgroup.
struct Stopped {
    child: Child,
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
        // SAFETY: touches no memory; the child is ours.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) }, 0);
        Self { socket: machine.socket(child.id()), child }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// A half-paused engine is the worst possible outcome.
#[test]
fn nothing_is_done_if_a_matching_process_does_not_answer() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let who_knows = [Stopped::new(&machine, None, 100), Stopped::new(&machine, Some("engine"), 100)];
    // In parallel, because each of them waits.
    thread::scope(|scope| {
        for line in ["pause --name engine", "resume --name engine", "pause --all", "pause --name engine --quiet", "set-tag x --name engine"]
        {
            let (machine, who_knows) = (&machine, &who_knows);
            scope.spawn(move || {
                let ran = machine.vramctl(line);
                ran.has(5, "", "kill -CONT");
                assert!(who_knows.iter().all(|stopped| ran.err.contains(&stopped.pid().to_string())), "{ran:?}");
                assert_eq!(ran.out, "", "{line}");
            });
        }
        scope.spawn(|| {
            let json = machine.vramctl("pause --name engine --json");
            assert_eq!(
                (json.code, &json.only_json()["error"]["code"], &json.only_json()["processes"]),
                (Some(5), &json!("busy"), &json!([]))
            );
        });
        scope.spawn(|| {
            let said = format!("error: engine (pid {}): no answer", who_knows[1].pid());
            machine.vramctl("status --name engine").expect(5, "engine --serve", &said);
        });
    });
    assert!(engine.asked().is_empty(), "{:?}", engine.asked());
    assert_eq!(engine.state.lock().unwrap().process_tag.as_deref(), Some("default"));
    machine.vramctl(&format!("pause --pid {}", engine.pid())).expect(0, "paused weights", "");
}

#[test]
fn a_stopped_process_with_another_name_does_not_matter() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let trainer = Stopped::new(&machine, Some("trainer"), 100);
    machine.vramctl("pause --name engine").expect(0, "paused weights of engine", "");
    machine.vramctl("status --name engine").expect(0, "weights", "");
    machine.vramctl("pause --name trainer").expect(5, "", &format!("trainer (pid {})", trainer.pid()));
    assert_eq!(engine.asked().len(), 1);
}

/// The dead process's child holds its socket open and never answers. Nobody may wait for it or be refused because of it.
#[test]
fn a_dead_process_does_not_count_as_silent() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let program = "\
import os, socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ['VRAMCTL_DIR'] + '/%d.sock' % os.getpid())
listener.listen()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
else:
    os._exit(0)";
    let mut dead = machine.command("python3", &["-c", program]).stdout(Stdio::piped()).spawn().unwrap();
    let child: i32 = BufReader::new(dead.stdout.take().unwrap()).lines().next().unwrap().unwrap().parse().unwrap();
    dead.wait().unwrap();
    let pause = machine.vramctl("pause --name engine");
    let ps = machine.vramctl("ps");
    // SAFETY: touches no memory; the process is the one that was just started.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    pause.has(0, "paused weights", "");
    assert!(!ps.out.contains(&dead.id().to_string()), "{ps:?}");
    assert_eq!(engine.asked().len(), 1);
}

/// Each has a connection; the usual limit is 1024 open files.
#[test]
fn more_processes_are_reached_than_the_limit_of_open_files_allows() {
    let machine = Machine::without_gpus();
    let all: Vec<_> = (0..40).map(|_| Fake::new(&machine, "engine", &["weights"])).collect();
    let limited = format!("ulimit -S -n 32; exec {} pause --all --json", command_line());
    let ran = Ran::of(&mut machine.command("sh", &["-c", &limited]));
    assert_eq!((ran.code, ran.only_json()["processes"].as_array().map(Vec::len)), (Some(0), Some(all.len())), "{ran:?}");
}

/// A stopped process accepts nothing, so once its backlog is full, connecting blocks until it continues.
#[test]
fn a_stopped_process_with_a_full_queue_delays_nobody() {
    let machine = Machine::without_gpus();
    let stopped = Stopped::new(&machine, None, 0);
    let _waiting = UnixStream::connect(machine.socket(stopped.pid())).unwrap();
    let row = machine.vramctl("ps");
    row.has(0, &stopped.pid().to_string(), "");
    machine.vramctl("pause").expect(5, "", &format!("kill -CONT {}", stopped.pid()));
}

// ---- pausing and resuming ----

#[test]
fn one_process_is_paused_and_resumed_without_a_target() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let who = format!("engine (pid {})", engine.pid());

    let pause = machine.vramctl("pause kv_cache --discard --timeout 2.5");
    assert_eq!(pause.out, format!("paused kv_cache of {who}: 1.00 GiB freed in 23 ms\n  1.00 GiB discarded\n  wait 3, unmap 20 ms\n"));
    pause.has(0, "", "");
    assert_eq!(pause.err, "", "no progress bar where there is no terminal");
    let wanted = TransitionRequest {
        tags: vec!["kv_cache".into()],
        lenient: true,
        backup: Some(Policy::Discard),
        hold: Some(TEN_SECONDS),
        ..TransitionRequest::default()
    };
    assert_eq!(engine.asked(), [Request::Pause(wanted)]);

    machine.vramctl("pause").expect(0, &format!("paused weights of {who}: 1.00 GiB freed"), "");
    let held = TransitionRequest { hold: Some(TEN_SECONDS), ..TransitionRequest::default() };
    assert_eq!(engine.asked()[1], Request::Pause(held), "all is asked for as all");
    machine.vramctl("pause").expect(0, &format!("nothing to do: kv_cache, weights of {who} are already paused"), "");
    let resumed = format!("resumed weights of {who}: 1.00 GiB allocated in 23 ms\n  1.00 GiB restored from host memory\n");
    machine.vramctl("resume weights").expect(0, &resumed, "");
    let quiet = machine.vramctl("resume --quiet");
    assert_eq!((quiet.code, quiet.out.as_str(), quiet.err.as_str()), (Some(0), "", ""));
}

#[test]
fn a_transition_is_reported_as_json() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let answer = machine.vramctl("pause weights --json");
    assert_eq!(answer.code, Some(0));
    let answer = answer.only_json();
    let process = &answer["processes"][0];
    assert_eq!((&process["pid"], &process["name"], &process["tags"]), (&json!(engine.pid()), &json!("engine"), &json!(["weights"])));
    let report = &process["report"];
    assert_eq!((&report["bytes"], &report["kept_bytes"], &report["discarded_bytes"]), (&json!(GIB), &json!(GIB), &json!(0)));
    assert_eq!((&report["ms"], &report["stages"]["unmap"]), (&json!(23.4), &json!(20.0)));
}

#[test]
fn an_unknown_tag_error_lists_the_known_tags() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    machine.vramctl("pause wieghts").expect(6, "", "wieghts is neither a tag nor a process; did you mean weights?");
    machine.vramctl("pause lost").expect(
        6,
        "",
        "lost is neither a tag nor a process; the tags are kv_cache, weights; the processes are engine",
    );
    let answer = machine.vramctl("pause wieghts --json");
    assert_eq!(answer.code, Some(6));
    assert_eq!(answer.only_json()["error"]["known_tags"], json!(["kv_cache", "weights"]));
    machine.vramctl("pause kv,weights").expect(2, "", "comma");
    assert!(engine.asked().is_empty());
}

#[test]
fn several_processes_need_a_target() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let twin = Fake::new(&machine, "engine", &["weights"]);
    let trainer = Fake::new(&machine, "trainer", &["optimizer"]);

    let pause = machine.vramctl("pause");
    pause.has(2, "", "choose some by name or id, or all of them with --all");
    for fake in [&engine, &twin, &trainer] {
        pause.has(2, "", &fake.pid().to_string());
    }
    machine.vramctl("pause --name nobody").expect(3, "", "trainer");
    let sockets = format!("VRAMCTL_DIR (looked in {})", machine.sockets().display());
    let unmanaged = machine.vramctl("pause --pid 1");
    unmanaged.has(3, "", "process 1 is not managed");
    unmanaged.has(3, "", &sockets);
    machine.vramctl("pause --pid 4294967295").expect(3, "", "there is no process 4294967295");
    machine.vramctl("pause --pid 1 --all").expect(2, "", "cannot be used with");

    machine.vramctl(&format!("pause --pid {}", twin.pid())).expect(0, &format!("(pid {})", twin.pid()), "");
    assert_eq!((engine.asked().len(), twin.asked().len()), (0, 1));
    let pause = machine.vramctl("pause --name engine");
    pause.has(0, &format!("paused weights of engine (pid {})", engine.pid()), "");
    pause.has(0, &format!("weights of engine (pid {}) is already paused", twin.pid()), "");
    assert!(trainer.asked().is_empty());

    // Resuming a tag that some processes lack is a no-op there.
    let pause = machine.vramctl("pause optimizer --all");
    pause.has(0, "paused optimizer of trainer", "");
    pause.has(0, &format!("nothing to do: engine (pid {}) has none of these tags", engine.pid()), "");
    machine.vramctl("pause optimizer lost --all").expect(6, "", "the tag lost; the tags are optimizer, weights");
}

#[test]
fn a_shortage_says_what_is_missing_and_what_helps() {
    let machine = Machine::without_gpus();
    let trainer = Fake::new(&machine, "trainer", &["optimizer"]);
    let holder = trainer.pid();
    let engine =
        Fake::reacting(&machine, "engine", &["weights"], move |request| is_transition(request).then(|| Reaction::Answer(shortage(holder))));
    let resume = machine.vramctl("resume --name engine");
    resume.has(4, "", &format!("error: engine (pid {}): too little memory on device 0: 4.00 GiB needed, 1.00 GiB free", engine.pid()));
    resume.has(4, "", &format!("3.00 GiB short; held by pid {holder} (trainer) 3.00 GiB"));
    resume.has(4, "", &format!("hint: trainer (pid {holder}) is managed too; `vramctl pause --pid {holder}` frees 1.00 GiB"));

    let answer = machine.vramctl("resume --name engine --json");
    assert_eq!(answer.code, Some(4));
    let error = &answer.only_json()["processes"][0]["error"];
    assert_eq!((&error["code"], &error["shortage"]["needed"]), (&json!("device_memory"), &json!(4 * GIB)));

    // If one of several cannot be resumed, the others still are.
    machine.vramctl("pause --name trainer").expect(0, "", "");
    machine.vramctl("resume --all").expect(4, "resumed optimizer of trainer", "too little memory");
}

#[test]
fn refusals_have_exit_codes_of_their_own() {
    let machine = Machine::without_gpus();
    let errors = [
        (Error::Busy(Duration::from_millis(50)), 5, "had not finished after 50 ms"),
        (Error::Capturing, 5, "captured"),
        (Error::HostMemory { needed: 2 * GIB, available: GIB, capped: false }, 4, "2.00 GiB needed, 1.00 GiB available. Free 1.00 GiB, or"),
        (
            Error::HostMemory { needed: 2 * GIB, available: GIB, capped: true },
            4,
            "available under VRAMCTL_HOST_CAP. Start the program again with 1.00 GiB more",
        ),
        (Error::Internal("x".into()), 1, "please report it"),
    ];
    for (error, code, text) in errors {
        let refusal = Refusal::from(&error);
        let fake = Fake::reacting(&machine, "engine", &["weights"], move |request| {
            is_transition(request).then(|| Reaction::Answer(Reply::Error(refusal.clone())))
        });
        machine.vramctl(&format!("pause --hold-timeout 0.2 --pid {}", fake.pid())).expect(code, "", text);
    }
}

#[test]
fn late_memory_is_reported() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| {
        let report = Report { allocations: 1, bytes: GIB, kept_bytes: GIB, late_bytes: GIB / 2, ..Report::default() };
        is_transition(request).then_some(Reaction::Answer(Reply::Done(report)))
    });
    machine.vramctl("pause --quiet").expect(0, "", "warning: engine");
    machine.vramctl("pause").expect(0, "paused weights of engine", "512.00 MiB back yet");
}

/// Optional details are printed only if present.
#[test]
fn status_shows_missing_memory_and_its_owner() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let usual = machine.vramctl("status");
    usual.has(0, "kv_cache", "");
    assert!(["go back", "not taken", "Host memory", "left to CUDA"].iter().all(|text| !usual.out.contains(text)), "{}", usual.out);
    let mut status = engine.state.lock().unwrap().status();
    drop(engine);

    status.memory.late_bytes = GIB / 8;
    status.memory.unmanaged =
        vec![vramctl_model::Unmanaged { owner: "libnccl.so.2".into(), bytes: GIB / 4, gpus: [(GPU.into(), GIB / 4)].into() }];
    let cycle = |mib: u64| Cycle { unmanaged: [("libnccl.so.2".into(), mib << 20)].into(), ..Cycle::default() };
    status.memory.cycles = vec![Cycle::default(), cycle(56), cycle(156), cycle(256)];
    status.memory.growing = Cycle::growing(&status.memory.cycles);
    status.memory.host.ready_bytes = 4 * GIB;
    status.memory.host.used_bytes = GIB;
    status.memory.host.pinned_bytes = 3 * GIB;
    let _engine = Fake::reacting(&machine, "engine", &["kv_cache", "weights"], move |request| {
        matches!(request, Request::Status).then(|| Reaction::Answer(Reply::Status(status.clone())))
    });
    let status = machine.vramctl("status");
    status.has(0, "The driver has not taken 128.00 MiB back yet; every pause and resume retries.", "");
    status.has(0, "libnccl.so.2 (left to CUDA): 256.00 MiB.", "");
    status.has(0, "OWNER         -3  -2         -1          LAST PAUSE\nlibnccl.so.2  ?   56.00 MiB  156.00 MiB  256.00 MiB", "");
    status.has(0, "A leak? libnccl.so.2: 100.00 MiB more in each cycle, over the last 3.", "");
    status.expect(
        0,
        "Host memory for backups: 0 B used of 4.00 GiB. The rest is ready for the next pause. 1.00 GiB could not be pinned",
        "",
    );
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

#[test]
fn the_progress_of_a_long_pause_is_shown() {
    let machine = Machine::without_gpus();
    let engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    machine.vramctl("status").expect(0, "pausing (save 256.00 MiB of 1.00 GiB)", "");
    let tag = machine.vramctl("status --json").only_json()["processes"][0]["tags"][1].clone();
    assert_eq!((&tag["state"], &tag["progress"]), (&json!("pausing"), &json!({"stage": "save", "done": GIB / 4, "total": GIB})));
    machine.vramctl("ps").expect(0, "weights pausing", "");
    drop(engine);
    let _engine = in_the_middle(&machine, TagState::Resuming, Stage::Restore);
    machine.vramctl("status").expect(0, "resuming (restore 256.00 MiB of 1.00 GiB)", "");
    machine.vramctl("ps").expect(0, "weights resuming", "");
}

#[test]
fn ps_says_which_tags_are_paused() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    machine.vramctl("pause kv_cache").expect(0, "", "");
    let ps = machine.vramctl("ps");
    ps.has(0, "kv_cache paused", "");
    assert!(!ps.out.contains("mixed"), "{ps:?}");
}

/// Words may be processes, as for other commands, if they are no tags and nothing else chooses the processes.
#[test]
fn a_process_may_be_named_in_place_of_a_tag() {
    let machine = Machine::without_gpus();
    let (engine, weights) = (Fake::new(&machine, "engine", &["weights", "kv"]), Fake::new(&machine, "weights", &["kv"]));
    machine.vramctl("pause weights --all").expect(0, "paused weights of engine", "");
    assert!(weights.asked().is_empty(), "a tag stays a tag");
    machine.vramctl("pause engine").expect(0, "paused kv of engine", "");
    machine.vramctl(&format!("resume kv {}", engine.pid())).expect(0, "resumed kv of engine", "");
    assert!(weights.asked().is_empty());
    let asked = engine.asked().len();
    machine.vramctl("pause engine --all").expect(6, "", "the tags are kv, weights; engine is a process: `vramctl pause --name=engine`");
    machine.vramctl("resume engine nosuch").expect(6, "", "no allocation has the tag nosuch");
    machine.vramctl("pause weights").expect(2, "", "weights is the name of processes, and a tag");
    assert_eq!((engine.asked().len(), weights.asked().len()), (asked, 0));
}

#[test]
fn several_processes_are_named_by_words_and_patterns() {
    let machine = Machine::without_gpus();
    let [one, two, other] = ["engine-1", "engine-2", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]));
    let asked = || [&one, &two, &other].map(|fake| fake.asked().len());
    machine.vramctl(&format!("pause engine-1 {}", other.pid())).expect(0, "paused weights of trainer", "");
    assert_eq!(asked(), [1, 0, 1]);
    machine.vramctl("pause weights engine-*").expect(0, "paused weights of engine-2", "");
    machine.vramctl("resume -n engine-1 -n trainer").expect(0, "resumed weights of trainer", "");
    assert_eq!(asked(), [3, 1, 2]);
    for (line, wanted) in
        [("ps engine-*", [true, true, false]), ("status trainer engine-2", [false, true, true]), ("gpus engine-?", [true, true, false])]
    {
        let ran = machine.vramctl(line);
        assert_eq!(["engine-1", "engine-2", "trainer"].map(|name| ran.out.contains(name)), wanted, "{ran:?}");
    }
    let quoted = machine.vramctl("suspend eng* nobody --dry-run");
    quoted.has(3, "", "no managed process is named nobody");
}

/// `resume nccl` of a suspended job with this name would bring one tag back, and leave the others away.
#[test]
fn a_word_that_is_a_tag_and_a_name_is_refused() {
    let machine = Machine::without_gpus();
    let fakes = ["nccl", "engine"].map(|name| Fake::new(&machine, name, &["nccl", "weights"]));
    let wanted = "nccl is the name of processes, and a tag: `--name nccl` means the processes, `--all nccl` the tag";
    machine.vramctl("pause nccl").expect(2, "", wanted);
    machine.vramctl("resume weights nccl").expect(2, "", wanted);
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
    machine.vramctl("pause --name nccl").expect(0, "paused weights of nccl", "");
    machine.vramctl("pause --name nccl nccl").expect(0, "of nccl", "");
    machine.vramctl("pause --all nccl").expect(0, "of engine", "");
}

#[test]
fn a_mistyped_name_is_answered_with_the_right_one() {
    let machine = Machine::without_gpus();
    let fakes = ["engine", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]));
    machine.vramctl("pause engin").expect(3, "", "engin is neither a tag nor a process; did you mean engine?");
    machine.vramctl("pause something").expect(
        3,
        "",
        "neither a tag nor a process; the tags are weights; the processes are engine, trainer",
    );
    machine.vramctl("pause wieghts").expect(6, "", "did you mean weights?");
    for command in ["status", "ps", "gpus", "suspend", "trim", "watch"] {
        machine.vramctl(&format!("{command} tainer")).expect(3, "", "no managed process is named tainer; did you mean trainer?");
    }
    machine.vramctl("pause x* --all").expect(6, "", "no allocation has the tag x*");
    machine.vramctl("status x*").expect(3, "", "no managed process has a name like x*; the processes are engine, trainer");
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
}

#[test]
fn a_gpu_chooses_the_processes_on_it() {
    let machine = Machine::without_gpus();
    let (here, there) = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000");
    let _fakes = ["engine", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]).on_gpu(here));
    let other = Fake::new(&machine, "other", &["weights"]).on_gpu(there);
    let pause = machine.vramctl("pause --gpu aaaa");
    pause.has(0, "paused weights of engine", "");
    pause.has(0, "paused weights of trainer", "");
    assert!(other.asked().is_empty());
}

#[test]
fn a_list_has_the_columns_the_order_and_the_form_that_are_wanted() {
    let machine = Machine::without_gpus();
    let (_big, _small) = (Fake::new(&machine, "big", &["a", "b", "c"]), Fake::new(&machine, "a-small-one", &["a"]));
    let names = |line: &str| machine.vramctl(line).out.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names("list -o name --sort name"), ["a-small-one", "big"]);
    assert_eq!(names("ps -o name --sort bytes"), ["big", "a-small-one"]);
    let titles = |line: &str| machine.vramctl(line).out.lines().next().unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(titles("ps"), ["PID", "NAME", "STATE", "BYTES", "GPU", "JOB"]);
    assert_eq!(titles("ps -o wide"), ["PID", "NAME", "STATE", "BYTES", "GPU", "JOB", "LIMIT", "TAGS", "PROGRAM"]);
    assert_eq!(machine.vramctl("ps -o json").only_json(), machine.vramctl("ps --json").only_json());
}

#[test]
fn colours_are_for_those_who_want_them() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    let run = |variables: &[(&str, &str)], words: &[&str]| {
        let mut command = machine.cli(words);
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").envs(variables.iter().copied());
        Ran::of(&mut command)
    };
    let forced = ("CLICOLOR_FORCE", "1");
    for words in [&["ps"][..], &["status"]] {
        assert!(run(&[forced], words).out.contains("\u{1b}[38;5;10mactive"), "{words:?}");
        assert!(!run(&[], words).out.contains('\u{1b}') && !run(&[forced, ("NO_COLOR", "1")], words).out.contains('\u{1b}'));
    }
    assert!(run(&[forced], &["pause", "nobody"]).err.starts_with("\u{1b}[1m\u{1b}[31merror:\u{1b}[0m nobody"));
    assert!(run(&[], &["pause", "nobody"]).err.starts_with("error: nobody"));
}

#[test]
fn the_short_help_is_short_and_the_long_help_has_the_rest() {
    let machine = Machine::without_gpus();
    for command in ["pause", "resume", "suspend", "move", "ps", "run"] {
        let (short, long) = (machine.vramctl(&format!("{command} -h")), machine.vramctl(&format!("{command} --help")));
        assert!(!short.out.contains("Examples:") && short.out.contains("--help"), "{short:?}");
        assert!(long.out.contains("Examples:") && long.out.lines().count() > short.out.lines().count(), "{long:?}");
    }
}

#[test]
fn a_message_in_json_has_no_table_in_it() {
    let machine = Machine::without_gpus();
    let _processes = [Fake::new(&machine, "engine", &["weights"]), Fake::new(&machine, "trainer", &["weights"])];
    for line in ["pause --json", "pause --name nobody --json", "status --name nobody --json"] {
        let answer = machine.vramctl(line).only_json();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(!message.contains('\n') && !message.contains("PID") && !message.ends_with(':'), "{line}: {message}");
    }
    machine.vramctl("pause").expect(2, "", "PID");
}

/// After ^C, users want to know the state of the pause.
#[test]
fn an_interrupted_command_reports_the_state_of_the_pause() {
    let interrupted = |machine: &Machine, engine: &Fake, line: &[&str]| {
        let mut command = machine.cli(line);
        let child = interruptible(&mut command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while engine.state.lock().unwrap().transitions == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: touches no memory; the child is ours and has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGINT), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "");
        String::from_utf8(output.stderr).unwrap()
    };
    let machine = Machine::without_gpus();
    let engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains(&format!("engine (pid {}): the pause is being undone (save 256.00 MiB of 1.00 GiB)", engine.pid())), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    drop(engine);

    let silent = |request: &Request| is_transition(request).then_some(Reaction::BeSilent);
    let engine = Fake::reacting(&machine, "engine", &["weights"], silent);
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains("the pause was cancelled; nothing has changed"), "{text}");
    drop(engine);

    let engine = Fake::reacting(&machine, "engine", &["weights"], silent);
    engine.state.lock().unwrap().tags[0].1 = TagState::Paused;
    let text = interrupted(&machine, &engine, &["resume"]);
    assert!(text.contains("the resume was cancelled; nothing has changed"), "{text}");
    engine.state.lock().unwrap().transitions = 0;
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains("the pause is complete"), "{text}");
}

/// The progress bar and the terminal's `^C` are cleared before the message.
#[test]
fn on_a_terminal_an_interrupted_command_leaves_a_clean_line() {
    let machine = Machine::without_gpus();
    let _engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    let program = "\
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    # A background job that runs these tests has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[1], [sys.argv[1], 'pause'])
said = b''
while b'wait' not in said:
    said += os.read(terminal, 4096)
os.write(terminal, b'\\x03')
try:
    while part := os.read(terminal, 4096):
        said += part
except OSError:
    pass
sys.stdout.buffer.write(said)";
    let ran = machine.command("python3", &["-c", program, command_line()]).env("TERM", "xterm").env("NO_COLOR", "1").output().unwrap();
    let said = String::from_utf8(ran.stdout).unwrap();
    let (before, message) = said.rsplit_once("\r\u{1b}[2K").unwrap_or_else(|| panic!("nothing was wiped: {said:?}"));
    assert!(before.contains("wait") && message.starts_with("interrupted: engine"), "{said:?}");
    assert!(message.contains("the pause is being undone") && message.ends_with('\n') && message.lines().count() == 1, "{said:?}");
}

#[test]
fn the_command_waits_for_a_long_pause() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| {
        if is_transition(request) {
            // Longer than the client's own polling interval.
            thread::sleep(Duration::from_millis(2500));
        }
        None
    });
    machine.vramctl("pause").expect(0, "paused weights of engine", "");
}

#[test]
fn a_process_that_ends_in_the_middle_is_an_error() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| is_transition(request).then_some(Reaction::HangUp));
    machine.vramctl("pause").expect(1, "", "ended before it answered");
    let answer = machine.vramctl("pause --json");
    assert_eq!(answer.code, Some(1));
    assert_eq!(answer.only_json()["processes"][0]["error"]["code"], "failed");
}

/// A child of the program may hold the socket open after the program's death, so no end of file is seen.
#[test]
fn a_dead_process_whose_socket_stays_open_is_given_up() {
    let machine = Machine::without_gpus();
    // Answers only a status, and has a child that keeps its descriptors open.
    let program = r#"
import json, os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["VRAMCTL_DIR"] + "/%d.sock" % os.getpid())
listener.listen()
print("ready", flush=True)
hello = dict(protocol=1, library="9.9.9", pid=os.getpid(), name="engine", program="engine")
tag = dict(tag="weights", state="active", allocations=1, bytes=1, paused_bytes=0, host_bytes=0, disk_bytes=0, backup={})
host = dict(used_bytes=0, ready_bytes=0, pinned_bytes=0)
status = dict(hello, reply="status", process_tag=None, tags=[tag], devices=[], host=host, late_bytes=0)
while True:
    client, _ = listener.accept()
    for line in client.makefile("r"):
        request = json.loads(line)["request"]
        if request not in ("hello", "status"):
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            print(child, flush=True)
            time.sleep(600)
        try:
            client.sendall(json.dumps(status if request == "status" else dict(hello, reply="hello")).encode() + b"\n")
        except BrokenPipeError:
            break
"#;
    let mut engine = machine.command("python3", &["-c", program]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(engine.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    let pause = machine.begin("pause");
    let child: i32 = said.next().unwrap().unwrap().parse().unwrap();
    engine.kill().unwrap();
    engine.wait().unwrap();
    let ran = Ran::end_of(pause);
    // SAFETY: touches no memory; the process is the one that was just started.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0, "its child was still there");
    ran.has(1, "", "ended before it answered");
}

#[test]
fn the_process_tag_is_set() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &[]);
    machine.vramctl("set-tag weights").expect(0, "get the tag weights from now on", "");
    assert_eq!(engine.state.lock().unwrap().process_tag.as_deref(), Some("weights"));
    let answer = machine.vramctl("set-tag --none --json").only_json();
    assert_eq!(answer, json!({"processes": [{"pid": engine.pid(), "name": "engine", "tag": null}]}));
    assert_eq!(engine.state.lock().unwrap().process_tag, None);
    machine.vramctl("set-tag").expect(2, "", "vramctl set-tag --none");
    machine.vramctl("set-tag a=b").expect(2, "", "equals");
}

// ---- the directory ----

#[test]
fn stale_sockets_are_removed() {
    let machine = Machine::without_gpus();
    let stale = machine.socket(999_999_999);
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    machine.vramctl("ps").expect(0, "", "no process is managed");
    assert!(!stale.exists());
}

#[test]
fn files_that_are_not_sockets_are_left_alone() {
    let machine = Machine::without_gpus();
    for name in ["notes.txt", "x.sock", "-1.sock"] {
        fs::write(machine.sockets().join(name), "mine").unwrap();
    }
    machine.vramctl("ps").expect(0, "", "no process is managed");
    assert_eq!(fs::read_dir(machine.sockets()).unwrap().count(), 3);
}

#[test]
fn an_unsafe_directory_is_refused() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    // Open to the group only, to others only, and to both.
    for open in [0o750, 0o720, 0o710, 0o705, 0o755] {
        fs::set_permissions(machine.sockets(), Permissions::from_mode(open)).unwrap();
        machine.vramctl("ps").expect(1, "", "chmod 700 it if only you use it, else set VRAMCTL_DIR");
    }
    let pause = machine.vramctl("pause --json");
    assert_eq!((pause.code, &pause.only_json()["error"]["code"]), (Some(1), &json!("failed")));

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let link = machine.folder.path().join("link");
    symlink(machine.sockets(), &link).unwrap();
    let ps = Ran::of(machine.cli("ps").env("VRAMCTL_DIR", &link));
    ps.has(1, "", "/link: a symbolic link; set VRAMCTL_DIR to the directory itself");
    let file = machine.folder.path().join("file");
    fs::write(&file, "").unwrap();
    for arguments in [&["ps"][..], &["top", "--once"]] {
        let ran = Ran::of(machine.cli(arguments).env("VRAMCTL_DIR", &file));
        ran.has(1, "", "/file: not a directory; set VRAMCTL_DIR to one");
        assert_eq!(ran.err.matches("/file").count(), 1, "{ran:?}");
    }
    // Only root can become another user.
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        fs::set_permissions(machine.folder.path(), Permissions::from_mode(0o711)).unwrap();
        // Where the other user can execute it.
        let copy = machine.folder.path().join("vramctl");
        copy_command(&copy);
        let ran = Ran::of(machine.command(&copy, &["ps"]).uid(65534));
        ran.has(1, "", "owned by user 0, not by you; set VRAMCTL_DIR to a directory of yours");
    }
}

/// Names come from other programs: one must not pass for a message of the command, nor do harm where it is copied into a shell.
#[test]
fn a_name_may_be_anything() {
    let machine = Machine::without_gpus();
    let strange = "it's a\nerror: all is lost";
    let (odd, even) = (Fake::new(&machine, strange, &["x"]), Fake::new(&machine, "a b", &["x"]));
    let place_of = |line: &str| line.starts_with("error: all is lost");
    for arguments in ["ps", "status", "pause --all", "pause --name nobody", "resume"] {
        let ran = machine.vramctl(arguments);
        assert!(!format!("{}\n{}", ran.out, ran.err).lines().any(place_of), "{arguments}: {ran:?}");
    }
    let pause = |word: &str| Ran::of(&mut machine.cli(&["pause", word]));
    let all = Ran::of(&mut machine.cli(&["pause", "a b", "--all"]));
    all.has(6, "", "a b is a process: `vramctl pause --name='a b'`");
    pause("a b").expect(0, "nothing to do: x of a b", "");
    pause(strange).expect(2, "", "");
    let exact = Ran::of(&mut machine.cli(&["pause", "--name", strange]));
    exact.has(0, &format!("it's a error: all is lost (pid {})", odd.pid()), "");
    assert_eq!((odd.asked().len(), even.asked().len()), (2, 2));
}

#[test]
fn sockets_are_in_the_runtime_directory_by_default() {
    let machine = Machine::without_gpus();
    let base = machine.folder.path();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    fs::rename(machine.sockets(), base.join("vramctl")).unwrap();
    for program in [PathBuf::from(command_line()), script("pause.sh")] {
        let arguments: &[&str] = if program.extension().is_some() { &[] } else { &["pause"] };
        let mut command = machine.command(program, arguments);
        command.env_remove("VRAMCTL_DIR").env("XDG_RUNTIME_DIR", base);
        let ran = Ran::of(&mut command);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
}

// ---- output ----

#[test]
fn a_closed_output_pipe_is_no_error() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    for arguments in [&["ps"][..], &["status", "--json"], &["completions", "bash"], &["pause"]] {
        let (reader, writer) = UnixStream::pair().unwrap();
        drop(reader);
        let output = machine.cli(arguments).stdout(OwnedFd::from(writer)).output().unwrap();
        assert_eq!((output.status.code(), output.status.signal()), (Some(0), None), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn help_and_completions_exist() {
    let machine = Machine::without_gpus();
    machine.vramctl("--help").expect(0, "Exit codes:", "");
    for command in ["run", "ps", "status", "gpus", "pause", "resume", "set-tag", "doctor", "python-path", "completions"] {
        machine.vramctl(&format!("{command} --help")).expect(0, "Examples:", "");
    }
    for shell in ["bash", "zsh", "fish"] {
        machine.vramctl(&format!("completions {shell}")).expect(0, "VRAMCTL_COMPLETE", "");
    }
    machine.vramctl("").expect(2, "", "Usage");
    machine.vramctl("explode").expect(2, "", "explode");
}

/// The shell passes the words typed so far; the last one is to be completed.
#[test]
fn shells_complete_tags_processes_and_gpus() {
    let machine = Machine::without_gpus();
    let complete = |words: &[&str]| {
        let arguments: Vec<_> = ["--", "vramctl"].iter().chain(words).copied().collect();
        let output = machine.cli(&arguments).env("VRAMCTL_COMPLETE", "fish").output().unwrap();
        let ran = Ran::new(&output);
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{ran:?}");
        let first = |line: &str| line.split('\t').next().unwrap().to_owned();
        ran.out.lines().map(first).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["set-t"]), ["set-tag"]);
    assert!(complete(&["pause", "w"]).is_empty(), "nobody is there, and nobody complains");
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let _trainer = Fake::new(&machine, "trainer", &["optimizer", "weights"]);
    assert_eq!(complete(&["pause", "w"]), ["weights"]);
    assert_eq!(complete(&["resume", "weights", "o"]), ["optimizer"]);
    assert_eq!(complete(&["set-tag", "k"]), ["kv_cache"]);
    assert_eq!(complete(&["pause", "--name", ""]), ["engine", "trainer"]);
    assert_eq!(complete(&["status", "tr"]), ["trainer"]);
    assert_eq!(complete(&["pause", "--pid", &engine.pid().to_string()]), [engine.pid().to_string()]);
    assert_eq!(complete(&["ps", "--gpu", "GPU"]), [GPU]);
}

#[test]
fn a_command_is_completed_from_the_path_and_its_arguments_as_paths() {
    let machine = Machine::new();
    let programs = machine.folder.path().join("programs");
    fs::create_dir(&programs).unwrap();
    for (name, mode) in [("serve-it", 0o755), ("serve.txt", 0o644)] {
        fs::write(programs.join(name), "").unwrap();
        fs::set_permissions(programs.join(name), Permissions::from_mode(mode)).unwrap();
    }
    let complete = |words: &[&str]| {
        let arguments: Vec<_> = ["--", "vramctl", "run", "--"].iter().chain(words).copied().collect();
        let mut command = machine.command(command_line(), &arguments);
        command.env("VRAMCTL_COMPLETE", "fish").env("PATH", &programs).current_dir(machine.folder.path());
        Ran::new(&command.output().unwrap()).out.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["serv"]), ["serve-it"]);
    assert_eq!(complete(&["serve-it", "prog"]), ["programs/"]);
}

/// Where zsh is installed, it runs the script as it does at the first Tab; elsewhere, the script is read.
#[test]
fn zsh_completes_at_the_first_tab() {
    let machine = Machine::new();
    let script = machine.vramctl("completions zsh").out;
    assert!(
        script.trim_end().ends_with("if [ \"$funcstack[1]\" = \"_vramctl\" ]; then\n    _clap_dynamic_completer_vramctl \"$@\"\nfi"),
        "{script}"
    );
    let Some(zsh) = installed("zsh") else { return };
    fs::write(machine.folder.path().join("_vramctl"), script).unwrap();
    let program = "compdef() { :; }; _describe() { print -l \"${(P@)@[-1]}\"; }; fpath=($1 $fpath); autoload -U _vramctl; words=(vramctl set-t); \
                   CURRENT=2; _vramctl";
    let mut command = machine.command(zsh, &["-f", "-c", program, "zsh", machine.folder.path().to_str().unwrap()]);
    let path = format!("{}:{}", Path::new(command_line()).parent().unwrap().display(), std::env::var("PATH").unwrap());
    Ran::new(&command.env("PATH", path).output().unwrap()).has(0, "set-tag", "");
}

#[test]
fn pause_and_resume_have_help_of_their_own_for_json() {
    let machine = Machine::new();
    let help = |command: &str| machine.vramctl(&format!("{command} --help")).out;
    assert!(!help("pause").contains("\"restored\"") && help("resume").contains("\"restored\""));
}

/// They would see each other's processes, and a memory that is not that of the machine would be believed.
#[test]
fn simulated_machines_have_sockets_and_a_size_of_their_own() {
    let machine = Machine::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/simgpu");
    let run = |words: &[&str]| {
        let mut command = machine.command(script, words);
        command.env_remove("VRAMCTL_DIR").current_dir(machine.folder.path());
        for name in ["SIMGPU_DIR", "SIMGPU_MEMORY", "SIMGPU_DEVICES"] {
            command.env_remove(name);
        }
        Ran::new(&command.output().unwrap())
    };
    let sockets = |name: &str| machine.folder.path().join(name).join("sockets").to_str().unwrap().to_owned();
    let first = run(&["--dir", "one", "--memory", "64M", "sh", "-c", "simgpu-smi >&2 && echo $VRAMCTL_DIR"]);
    first.has(0, &sockets("one"), "64 MiB");
    let nested = run(&["--dir", "one", script, "--dir", "two", "printenv", "VRAMCTL_DIR"]);
    nested.has(0, &sockets("two"), "");
    run(&["--dir", "one", "--memory", "32M", "true"]).has(2, "", "has 1 GPUs of 64 MiB each. To join it, leave out");
    run(&["--dir", "one", "--devices", "2", "true"]).has(2, "", "leave out --devices and --memory");
    run(&["--dir", "one", "--memory", "64M", "true"]).has(0, "", "");
}

// ---- doctor ----

#[test]
fn the_doctor_reports_what_would_fail() {
    let machine = Machine::without_gpus();
    let doctor = |change: &dyn Fn(&mut Command)| {
        let mut command = machine.cli("doctor");
        // No driver here: checks of GPUs are tested with the simulated one.
        change(command.env("LD_LIBRARY_PATH", "/nowhere").env("VRAMCTL_HOST_CAP", "64M"));
        Ran::of(&mut command)
    };
    let line = |ran: &Ran, check: &str| {
        let line = ran.out.lines().find(|line| line[9..].starts_with(check));
        line.unwrap_or_else(|| panic!("{check} is not in {ran:?}")).to_owned()
    };
    let missing = doctor(&|command| _ = command.env("VRAMCTL_LIB", "/nowhere/libvramctl.so"));
    assert_eq!(missing.code, Some(1), "{missing:?}");
    assert!(line(&missing, "library").starts_with("failed") && line(&missing, "library").contains("/nowhere/libvramctl.so"));

    let foreign = doctor(&|command| _ = command.env("VRAMCTL_LIB", harmless_library()));
    assert!(line(&foreign, "library").contains("it has no vramctl_version"), "{foreign:?}");
    let damaged = machine.folder.path().join("damaged.so");
    fs::write(&damaged, "\x7fELF and then nothing").unwrap();
    let damaged = doctor(&|command| _ = command.env("VRAMCTL_LIB", &damaged));
    assert!(line(&damaged, "library").starts_with("failed") && line(&damaged, "library").contains("damaged.so: "), "{damaged:?}");

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o755)).unwrap();
    let open = doctor(&|_| ());
    assert!(line(&open, "sockets").starts_with("failed") && line(&open, "sockets").contains("chmod 700"), "{open:?}");
    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let sockets = line(&doctor(&|_| ()), "sockets");
    assert!(sockets.starts_with("ok") && sockets.contains(machine.sockets().to_str().unwrap()), "{sockets}");
    let sockets = line(&doctor(&|command| _ = command.env("VRAMCTL_DIR", "/nowhere/sockets")), "sockets");
    assert!(sockets.starts_with("failed") && sockets.contains("VRAMCTL_DIR"), "{sockets}");

    let host = line(&doctor(&|command| _ = command.env("VRAMCTL_HOST_CAP", "3G")), "host memory");
    assert!(host.contains("3.00 GiB for backups") && host.contains(" GB/s "), "{host}");
}

#[test]
fn the_doctor_knows_the_limits_that_matter() {
    let machine = Machine::without_gpus();
    let doctor = |limits: &str| {
        let script = format!("{limits}; exec \"$0\" doctor --json");
        let mut command = machine.command("sh", &["-c", &script, command_line()]);
        let checks = Ran::of(command.env("VRAMCTL_HOST_CAP", "64M")).only_json()["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["check"] == "limits").unwrap()
    };
    let free = doctor("true");
    assert_eq!((&free["verdict"], &free["data"]["address_bytes"]), (&json!("ok"), &Value::Null));
    let tight = doctor("ulimit -v 8388608; ulimit -l 64");
    assert_eq!(tight["verdict"], "warning");
    assert_eq!((&tight["data"]["address_bytes"], &tight["data"]["locked_bytes"]), (&json!(8 * GIB), &json!(64 << 10)));
    assert!(tight["message"].as_str().unwrap().contains("8.00 GiB (ulimit -v)"), "{tight}");
}

#[test]
fn the_doctor_knows_the_engines_of_the_python_on_the_path() {
    let machine = Machine::without_gpus();
    let Some(_) = installed("python3") else { return eprintln!("skipped: no python3 here") };
    let site = machine.folder.path().join("site");
    for (engine, version) in [("vllm", "0.26.0"), ("sglang", "0.1.2")] {
        let folder = site.join(format!("{engine}-{version}.dist-info"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("METADATA"), format!("Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")).unwrap();
    }
    let mut command = machine.cli("doctor");
    let ran = Ran::of(command.env("PYTHONPATH", &site).env("VRAMCTL_HOST_CAP", "64M"));
    assert!(ran.out.lines().any(|line| line.starts_with("ok ") && line.ends_with(" vllm 0.26.0")), "{ran:?}");
    assert!(ran.out.lines().any(|line| line.starts_with("warning ") && line.contains("sglang 0.1.2 is not a known version")), "{ran:?}");
}

/// The library would ignore them, and say so in the program's log at most.
#[test]
fn the_doctor_checks_variables_and_directories() {
    let machine = Machine::without_gpus();
    let doctor = |name: &str, value: &str, check: &str| {
        let mut command = machine.cli("doctor");
        let ran = Ran::of(command.env("LD_LIBRARY_PATH", "/nowhere").env("VRAMCTL_HOST_CAP", "64MB").env(name, value));
        let line = ran.out.lines().find(|line| line[9..].starts_with(check)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{check} is not in {ran:?}"))
    };
    assert!(doctor("NOTHING", "", "variables").starts_with("ok "), "MB is a unit, too");
    for (name, value, verdict, said) in [
        ("VRAMCTL_RETIAN", "weights", "failed", "VRAMCTL_RETIAN is not read; is VRAMCTL_RETAIN meant?"),
        ("VRAMCTL_OF_SOMEBODY_ELSE", "1", "warning", "not read: VRAMCTL_OF_SOMEBODY_ELSE"),
        ("VRAMCTL_PREWARM", "1TB", "failed", "VRAMCTL_PREWARM=1TB is not a size such as 1048576 or 1M; ignored"),
        ("VRAMCTL_BACKUP", "kv=tape", "failed", "VRAMCTL_BACKUP: 'kv=tape' is not TAG=host, TAG=disk or TAG=discard"),
        ("VRAMCTL_LOG", "loud", "failed", "VRAMCTL_LOG=loud is none of off, "),
    ] {
        let line = doctor(name, value, "variables");
        assert!(line.starts_with(verdict) && line.contains(said), "{line}");
    }
    let (file, folder) = (machine.folder.path().join("file"), machine.folder.path().join("read-only"));
    fs::write(&file, "").unwrap();
    fs::create_dir(&folder).unwrap();
    for (name, check) in [("VRAMCTL_DISK_DIR", "disk"), ("VRAMCTL_REPORT_DIR", "reports")] {
        for (path, why) in [("/nowhere/at-all", "no such directory"), (file.to_str().unwrap(), "not a directory")] {
            let line = doctor(name, path, check);
            assert!(line.starts_with("failed") && line.contains(why) && line.contains(name), "{line}");
        }
        let line = doctor(name, folder.to_str().unwrap(), check);
        assert!(line.starts_with("ok ") || check == "disk" && line.contains("a tmpfs"), "{line}");
    }
    if fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| mounts.lines().any(|line| line.contains(" /dev/shm tmpfs rw"))) {
        let line = doctor("VRAMCTL_DISK_DIR", "/dev/shm", "disk");
        assert!(line.starts_with("warning") && line.contains("a tmpfs, so what the policy disk keeps stays in host memory"), "{line}");
    }
    assert!(doctor("TMPDIR", "/nowhere/at-all", "disk").starts_with("warning"), "only one policy needs it");

    fs::set_permissions(&folder, Permissions::from_mode(0o500)).unwrap();
    // Root may write there; for it, only a read-only file system will do.
    let is_root = fs::write(folder.join("file"), "").is_ok();
    let refusing = if is_root { Path::new("/sys/kernel").to_owned() } else { folder };
    if is_root && fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| !mounts.lines().any(|line| line.contains(" /sys sysfs ro"))) {
        println!("not run: no read-only file system");
        return;
    }
    for (name, check) in [("VRAMCTL_DISK_DIR", "disk"), ("VRAMCTL_REPORT_DIR", "reports")] {
        assert!(doctor(name, refusing.to_str().unwrap(), check).starts_with("failed"));
    }
    let line = doctor("VRAMCTL_DIR", refusing.join("sockets").to_str().unwrap(), "sockets");
    assert!(line.starts_with("failed") && line.contains("cannot be created") && line.contains("VRAMCTL_DIR"), "{line}");
}

// ---- run ----

/// The library, which does nothing in programs without CUDA.
/// Another library: the C library.
fn harmless_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.split_whitespace().find(|word| word.contains("/libc.so") || word.contains("/libc-2")).expect("a libc");
    PathBuf::from(path)
}

fn run(machine: &Machine, arguments: &[&str], environment: &[(&str, &str)]) -> Ran {
    let arguments: Vec<_> = ["run"].iter().chain(arguments).copied().collect();
    let mut command = machine.cli(&arguments);
    command.env("VRAMCTL_LIB", library()).envs(environment.iter().copied());
    Ran::of(&mut command)
}

#[test]
fn run_sets_the_environment() {
    let machine = Machine::without_gpus();
    let library = library();
    let arguments =
        ["--name", "my engine", "--backup", "kv=discard", "--backup", "w=host", "--min-bytes", "64K", "--log", "off", "--", "env"];
    let ran = run(&machine, &arguments, &[("LD_PRELOAD", "")]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    let library = library.to_str().unwrap();
    for (name, value) in [
        ("LD_PRELOAD", library),
        ("VRAMCTL_TAG", "default"),
        ("VRAMCTL_NAME", "my engine"),
        ("VRAMCTL_BACKUP", "kv=discard,w=host"),
        ("VRAMCTL_MIN_BYTES", "64K"),
        ("VRAMCTL_LOG", "off"),
    ] {
        assert!(ran.out.lines().any(|line| line == format!("{name}={value}")), "{name}={value} is not in {}", ran.out);
    }
    let ran = run(&machine, &["--no-tag", "env"], &[("LD_PRELOAD", library), ("VRAMCTL_TAG", "x")]);
    assert!(ran.out.lines().any(|line| line == format!("LD_PRELOAD={library}")), "not twice: {}", ran.out);
    assert!(!ran.out.contains("VRAMCTL_TAG"));
    let ran = run(&machine, &["env"], &[("VRAMCTL_TAG", "")]);
    assert!(ran.out.lines().any(|line| line == "VRAMCTL_TAG="), "an empty one is not replaced: {}", ran.out);
}

#[test]
fn a_number_for_a_name_is_ignored_with_a_warning_and_the_program_runs() {
    let machine = Machine::new();
    let mut command = machine.cli(&["run", "--no-python", "--"]);
    command.arg(common::programs().join("engine")).args(["--weights-mib", "4", "--kv-mib", "4"]).env("VRAMCTL_NAME", "123");
    let mut engine = common::machine::Program::ready(command.stderr(Stdio::piped()));
    machine.vramctl("ps --output name").expect(0, "engine\n", "");
    let list = machine.done("ps --json");
    assert!(list.contains("\"index\":0") && list.contains("\"uuid\":\"GPU-73696d75-"), "{list}");
    let mut warning = engine.child.stderr.take().unwrap();
    drop(engine);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut warning, &mut text).unwrap();
    assert_eq!(text.matches("VRAMCTL_NAME=123: commands would take a number for a process id").count(), 1, "{text}");
}

#[test]
fn a_policy_for_a_tag_is_not_one_for_a_pause() {
    let ran = Machine::without_gpus().vramctl("pause --backup weigths=disk");
    ran.has(2, "", "a pause has one policy for all that it pauses: to pause the tag weigths alone, `vramctl pause weigths --backup disk`");
}

#[test]
fn run_is_replaced_by_the_command() {
    let machine = Machine::without_gpus();
    run(&machine, &["--", "sh", "-c", "echo out; echo err >&2; exit 7"], &[]).expect(7, "out\n", "err\n");
    run(&machine, &["sh", "-c", "exit $#", "sh", "--name", "x"], &[]).expect(2, "", "");

    let child = machine
        .command(command_line(), &["run", "--", "sh", "-c", "echo $$; kill -TERM $$"])
        .env("VRAMCTL_LIB", library())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), pid.to_string(), "the command has the id of `vramctl run`");
    assert_eq!(output.status.signal(), Some(libc::SIGTERM));
}

/// What was done is done, and what is wrong is told.
#[test]
fn a_full_stdout_hides_nothing() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let full = |words: &str| {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        Ran::end_of(machine.cli(words).stdout(full).stderr(Stdio::piped()).spawn().unwrap())
    };
    for words in ["pause", "resume --json", "pause --json", "resume"] {
        full(words).expect(1, "", "stdout: No space left on device (os error 28); what was asked for is done all the same");
    }
    assert_eq!(engine.asked().len(), 4);
    full("pause nobody").expect(6, "", "nobody is neither a tag nor a process");
    full("pause nobody --json").expect(6, "", "nobody is neither a tag nor a process");
    let refusing = Fake::reacting(&machine, "refusing", &["weights"], |request| {
        is_transition(request).then(|| Reaction::Answer(Reply::Error(Refusal::from(&Error::Capturing))))
    });
    full("pause --all").expect(5, "", "a CUDA stream is being captured");
    drop(refusing);
}

/// Of two jobs, each is paused as a whole or not at all.
#[test]
fn a_pause_of_which_a_part_is_done_is_neither_done_nor_undone() {
    let machine = Machine::without_gpus();
    let _done = Fake::new(&machine, "done", &["weights"]);
    let _refuses = Fake::reacting(&machine, "refuses", &["weights"], |request| {
        matches!(request, Request::Pause(_)).then(|| Reaction::Answer(Reply::Error(Refusal::from(&Error::Capturing))))
    });
    let outcome = operate(&machine, &request("pause", &json!({ "target": "all" })));
    assert_eq!((&outcome["committed"], &outcome["error"]["code"]), (&json!(null), &json!("capturing")), "{outcome}");
}

/// All interfaces have the same codes.
#[test]
fn the_same_failure_has_the_same_code_as_json() {
    let machine = Machine::without_gpus();
    let [one, two] = ["one", "two"].map(|name| Fake::new(&machine, name, &["weights"]));
    let pids = json!([one.pid().min(two.pid()), one.pid().max(two.pid())]);
    let of_command = machine.vramctl("pause --json").expect(2, "", "").only_json()["error"].clone();
    let of_operation = operate(&machine, &request("pause", &json!({})))["error"].clone();
    for error in [of_command, of_operation] {
        assert_eq!((&error["code"], &error["pids"]), (&json!("several_processes"), &pids), "{error}");
    }
}

#[test]
fn a_command_that_cannot_start_ends_as_in_a_shell() {
    let machine = Machine::without_gpus();
    let missing = |command: &str| run(&machine, &["--", command], &[]);
    missing("no-such-command-here").expect(
        127,
        "",
        "cannot start no-such-command-here: No such file or directory (os error 2); is it on PATH?",
    );
    assert!(!missing("/no/such/command").err.contains("PATH"));
    let file = machine.folder.path().join("file");
    fs::write(&file, "").unwrap();
    run(&machine, &["--", file.to_str().unwrap()], &[]).expect(126, "", "denied");
    // It is there; what it needs is not.
    fs::write(&file, "#!/no/such/interpreter -x\n").unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    run(&machine, &["--", file.to_str().unwrap()], &[]).expect(126, "", "the file is there, and /no/such/interpreter that it names");
    run(&machine, &[], &[]).expect(2, "", "COMMAND");
    run(&machine, &["--backup", "kv=tape", "--", "true"], &[]).expect(2, "", "host, disk or discard");
    run(&machine, &["--", "true"], &[("VRAMCTL_TAG", "a,b")]).expect(2, "", "VRAMCTL_TAG: the tag 'a,b' contains a comma");
    run(&machine, &["--tag", "a", "--", "true"], &[("VRAMCTL_TAG", "a,b")]).expect(0, "", "");
}

#[test]
fn a_missing_library_is_explained() {
    let machine = Machine::without_gpus();
    run(&machine, &["--", "true"], &[("VRAMCTL_LIB", "/nowhere/libvramctl.so")]).expect(1, "", "/nowhere/libvramctl.so");
    let spaced = machine.folder.path().join("with space.so");
    symlink(library(), &spaced).unwrap();
    run(&machine, &["--", "true"], &[("VRAMCTL_LIB", spaced.to_str().unwrap())]).expect(1, "", "symbolic link");

    // A copy of the binary finds the library in ../lib.
    let (bin, lib) = (machine.folder.path().join("bin"), machine.folder.path().join("lib"));
    fs::create_dir(&bin).unwrap();
    copy_command(&bin.join("vramctl"));
    let run = || Ran::of(&mut machine.command(bin.join("vramctl"), &["run", "--", "env"]));
    run().expect(1, "", "set VRAMCTL_LIB");
    fs::create_dir(&lib).unwrap();
    symlink(library(), lib.join("libvramctl.so")).unwrap();
    run().expect(0, &format!("LD_PRELOAD={}", lib.join("libvramctl.so").display()), "");
}

/// A directory that looks like the Python package.
fn package(machine: &Machine) -> PathBuf {
    let package = machine.folder.path().join("vramctl");
    for folder in ["site", "dropin"] {
        fs::create_dir_all(package.join(folder)).unwrap();
    }
    fs::write(package.join("__init__.py"), "").unwrap();
    package
}

#[test]
fn python_programs_find_the_package() {
    let machine = Machine::without_gpus();
    let package = package(&machine);
    let (site, dropin) = (package.join("site"), package.join("dropin"));
    let ours = format!("{}:{}", site.display(), dropin.display());
    let chosen = ("VRAMCTL_PYTHON", package.to_str().unwrap());
    let path = |arguments: &[&str], present: &str| {
        let ran = run(&machine, arguments, &[chosen, ("PYTHONPATH", present)]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.out.lines().find_map(|line| line.strip_prefix("PYTHONPATH=")).unwrap_or_default().to_owned()
    };
    assert_eq!(path(&["env"], ""), ours);
    assert_eq!(path(&["env"], "/mine"), format!("{ours}:/mine"));
    assert_eq!(path(&["--no-python", "env"], "/mine"), "/mine");
    assert_eq!(path(&["--", command_line(), "run", "--", "env"], "/mine"), format!("{ours}:/mine"), "once");

    let printed = |value: &str| Ran::of(machine.cli("python-path").env(chosen.0, value));
    assert_eq!(printed(chosen.1).out, format!("{ours}\n"));
    fs::remove_dir(&dropin).unwrap();
    assert_eq!(printed(chosen.1).out, format!("{}\n", site.display()), "what is not there is not named");
    printed("/nowhere").expect(1, "", "set VRAMCTL_PYTHON");
    run(&machine, &["env"], &[("VRAMCTL_PYTHON", "/nowhere")]).expect(1, "", "/nowhere");
}

/// As pip installs a wheel: into a Python prefix, or into a separate directory.
#[test]
fn a_pip_installation_is_found() {
    let machine = Machine::without_gpus();
    for site in ["venv/lib/python3.12/site-packages", "target"] {
        let site = machine.folder.path().join(site);
        let prefix = machine.folder.path().join(site.strip_prefix(machine.folder.path()).unwrap().iter().next().unwrap());
        fs::create_dir_all(prefix.join("bin")).unwrap();
        copy_command(&prefix.join("bin/vramctl"));
        fs::create_dir_all(site.join("vramctl/site")).unwrap();
        fs::write(site.join("vramctl/__init__.py"), "").unwrap();
        symlink(library(), site.join("vramctl/libvramctl.so")).unwrap();
        let ran = Ran::of(&mut machine.command(prefix.join("bin/vramctl"), &["run", "env"]));
        ran.has(0, &format!("LD_PRELOAD={}", site.join("vramctl/libvramctl.so").display()), "");
        ran.has(0, &format!("PYTHONPATH={}", site.join("vramctl/site").display()), "");
    }
}

/// They are for programs, or for the project.
#[test]
fn help_leaves_out_what_nobody_types() {
    let help = Machine::without_gpus().vramctl("--help").out;
    assert!(help.contains("gpus") && !help.contains("python-path") && !help.contains("operate"), "{help}");
}

// ---- operations of programs ----

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

#[test]
fn a_program_hears_what_comes_of_its_operation() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights", "kv_cache"]);
    let pause = request("pause", &json!({ "target": { "name": "engine" }, "tags": ["kv_cache"], "backup": "discard", "progress": true }));
    let (lines, code) = Operating::new(&machine, &pause).ends();
    assert_eq!(code, Some(0));
    assert_eq!(lines[0], json!({ "reply": "progress", "pid": engine.pid(), "stage": "save", "done": 1, "total": 2 }));
    let outcome = &lines[lines.len() - 1];
    assert_eq!((&outcome["committed"], &outcome["error"]), (&json!(true), &Value::Null), "{outcome}");
    let of_process = &outcome["processes"][0];
    assert_eq!(
        (&of_process["pid"], &of_process["tags"], &of_process["report"]["discarded_bytes"]),
        (&json!(engine.pid()), &json!(["kv_cache"]), &json!(GIB))
    );
    assert_eq!((&outcome["jobs"][0]["pids"], &outcome["jobs"][0]["attempts"]), (&json!([engine.pid()]), &json!(1)));
    let status = operate(&machine, &request("status", &json!({ "target": { "pid": engine.pid() } })));
    let of_tags: Vec<_> = status["processes"][0]["tags"].as_array().unwrap().iter().map(|tag| tag["state"].clone()).collect();
    assert_eq!(of_tags, ["active", "paused"]);
    assert_eq!(operate(&machine, &request("resume", &json!({})))["processes"][0]["report"]["bytes"], json!(GIB));
}

#[test]
fn a_program_hears_why_its_operation_failed() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let failed = |request: &Value| {
        let outcome = operate(&machine, request);
        assert_eq!(outcome["committed"], false, "{outcome}");
        outcome["error"].clone()
    };
    let pause = |fields: Value| failed(&request("pause", &fields));
    assert_eq!(pause(json!({ "target": { "name": "nobody" } }))["code"], "no_process");
    // A word of a person may name the process. A program says which is which.
    let unknown = pause(json!({ "tags": ["engine"] }));
    assert_eq!((&unknown["code"], &unknown["known_tags"]), (&json!("unknown_tag"), &json!(["weights"])));
    let held = pause(json!({ "target": "all", "waiting": engine.pid() }));
    assert!(held["code"] == "invalid" && held["message"].as_str().unwrap().contains("a program cannot hold itself"), "{held}");
    for (fields, why) in [
        (json!({ "sharde": true }), "unknown field `sharde`"),
        (json!({ "backup": "tape" }), "unknown variant `tape`"),
        (json!({ "hold": false, "shared": true }), "need `hold`"),
        (json!({ "engines": ["ftp://engine"] }), "not an address"),
    ] {
        let wrong = pause(fields);
        assert!(wrong["code"] == "invalid" && wrong["message"].as_str().unwrap().contains(why), "{wrong}");
    }
    assert_eq!(failed(&request("suspend", &json!({ "registered": "keep" })))["code"], "invalid");
    assert_eq!(failed(&request("explode", &json!({})))["code"], "invalid");
    let newer = failed(&json!({ "version": 2, "operation": "pause" }));
    assert!(newer["message"].as_str().unwrap().contains("version 2"), "{newer}");
    let other = Fake::new(&machine, "other", &["weights"]);
    let several = pause(json!({}));
    let mut pids = [engine.pid(), other.pid()];
    pids.sort_unstable();
    assert_eq!((&several["code"], &several["pids"]), (&json!("several_processes"), &json!(pids)));
    assert!(engine.asked().is_empty() && other.asked().is_empty());
    // Held by nobody, it waits for the answer only.
    for fields in [json!({ "target": { "name": "other" } }), json!({ "target": { "name": "engine" }, "hold": false })] {
        let mut fields = fields;
        fields["waiting"] = json!(engine.pid());
        assert_eq!(operate(&machine, &request("pause", &fields))["committed"], true);
    }
}

/// However the program says that it does not want it any more.
#[test]
fn a_program_can_cancel_its_operation() {
    for by_a_line in [false, true] {
        let machine = Machine::without_gpus();
        let engine =
            Fake::reacting(&machine, "engine", &["weights"], |request| matches!(request, Request::Pause(_)).then_some(Reaction::BeSilent));
        let mut operating = Operating::new(&machine, &request("pause", &json!({})));
        while engine.state.lock().unwrap().transitions == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        let mut stdin = operating.child.stdin.take().unwrap();
        if by_a_line {
            writeln!(stdin).unwrap();
        } else {
            drop(stdin);
        }
        let (lines, code) = operating.ends();
        let outcome = &lines[lines.len() - 1];
        assert_eq!((code, &outcome["committed"], &outcome["error"]["code"]), (Some(1), &json!(false), &json!("cancelled")), "{outcome}");
        assert_eq!(outcome["processes"], json!([{ "pid": engine.pid(), "name": "engine", "left": "as_it_was" }]));
    }
}

/// The example in the page is one that the command understands.
#[test]
fn the_documented_operation_runs() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]);
    let page = protocol_page();
    let mut documented = blocks(&page, "jsonl")[0].lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let (lines, _) = Operating::new(&machine, &documented.next().unwrap()).ends();
    for wanted in documented {
        let told = lines.iter().find(|line| line["reply"] == wanted["reply"]).unwrap_or_else(|| panic!("{wanted} in {lines:?}"));
        let names = |line: &Value| line.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(told), names(&wanted));
    }
    assert_eq!(engine.asked().len(), 1);
}

// ---- scripts ----

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name)
}

/// The first program with this name in `PATH`.
fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// One directory for `PATH` per installed transport, with that transport and the system tools that the scripts need.
fn transports(machine: &Machine) -> Vec<(&'static str, PathBuf)> {
    let folder_with = |transport: &'static str, program: &Path| {
        let folder = machine.folder.path().join(transport);
        fs::create_dir(&folder).unwrap();
        symlink(program, folder.join(transport)).unwrap();
        for tool in ["sh", "ls", "id", "dirname", "cat"] {
            symlink(installed(tool).unwrap(), folder.join(tool)).unwrap();
        }
        (transport, folder)
    };
    let nc = installed("nc").filter(|nc| {
        let help = Command::new(nc).arg("-h").output().unwrap();
        let help = String::from_utf8_lossy(&[help.stdout, help.stderr].concat()).into_owned();
        // A transport that cannot half-close waits until a real server times out; the fake one never does.
        help.contains("Ncat") || (help.contains("UNIX") && help.contains("socket after EOF on stdin"))
    });
    // The interpreter itself, because python3 may be a script that searches `PATH`.
    let python = installed("python3").map(|python| {
        let output = Command::new(python).args(["-c", "import sys; print(sys.executable, end='')"]).output().unwrap();
        PathBuf::from(String::from_utf8(output.stdout).unwrap())
    });
    [("socat", installed("socat")), ("nc", nc), ("python3", python)]
        .into_iter()
        .filter_map(|(transport, program)| {
            if program.is_none() {
                eprintln!("skipped: {transport} is not installed here (nc: with -U, and -N unless it is ncat), so the scripts are not tried with it");
            }
            program.map(|program| folder_with(transport, &program))
        })
        .collect()
}

fn run_script(machine: &Machine, path: &Path, name: &str, arguments: &[&str]) -> Ran {
    Ran::of(machine.command(script(name), arguments).env("PATH", path))
}

#[test]
fn scripts_pause_and_resume_through_every_transport() {
    let try_with = |transport: &'static str, path: &Path| {
        eprintln!("{transport}");
        let machine = Machine::without_gpus();
        let slow = |request: &Request| {
            if is_transition(request) {
                // Longer than any transport waits by default.
                thread::sleep(Duration::from_millis(800));
            }
            None
        };
        let engine = Fake::reacting(&machine, "engine", &["kv_cache", "it's \"odd\" \\ ü"], slow);
        let run = |name: &str, arguments: &[&str]| run_script(&machine, path, name, arguments);

        let pause = run("pause.sh", &["it's \"odd\" \\ ü", "--discard", "--timeout", "2.5"]);
        pause.has(0, "\"reply\":\"done\"", "");
        assert_eq!(serde_json::from_str::<Value>(&pause.out).unwrap()["discarded_bytes"], json!(GIB));
        let tags = vec!["it's \"odd\" \\ ü".to_owned()];
        let held = TransitionRequest { hold: Some(TEN_SECONDS), ..TransitionRequest::default() };
        let wanted = TransitionRequest {
            tags,
            backup: Some(Policy::Discard),
            hold: Some(Duration::from_millis(2500)),
            timeout: Some(Duration::from_millis(2500)),
            ..held.clone()
        };
        assert_eq!(engine.asked(), [Request::Pause(wanted)]);

        run("resume.sh", &[]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(engine.asked()[1], Request::Resume(TransitionRequest::default()));
        run("pause.sh", &["kv_cache", "--force"]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(engine.asked()[2], Request::Pause(TransitionRequest { tags: vec!["kv_cache".into()], force: true, ..held }));
        run("pause.sh", &["--no-hold"]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(engine.asked()[3], Request::Pause(TransitionRequest::default()));
        run("pause.sh", &["--hold-timeout", "0.5", "--timeout", "3"]).expect(0, "\"reply\":\"done\"", "");
        let limits = TransitionRequest {
            hold: Some(Duration::from_millis(500)),
            timeout: Some(Duration::from_secs(3)),
            ..TransitionRequest::default()
        };
        assert_eq!(engine.asked()[4], Request::Pause(limits));
        run("pause.sh", &["lost", "--pid", &engine.pid().to_string()]).expect(6, "\"known_tags\":[\"kv_cache\"", "");
    };
    let machine = Machine::without_gpus();
    thread::scope(|scope| {
        for (transport, path) in transports(&machine) {
            let try_with = &try_with;
            scope.spawn(move || try_with(transport, &path));
        }
    });
}

/// Installed into a directory in `PATH`, as administrators do.
#[test]
fn a_script_works_through_a_link() {
    let machine = Machine::without_gpus();
    let link = machine.folder.path().join("pause");
    std::os::unix::fs::symlink(script("pause.sh"), &link).unwrap();
    Ran::of(&mut machine.command(&link, &["--help"])).expect(0, "usage: pause.sh", "");
}

/// Containers with separate PID namespaces may share the directory, so a PID does not identify the listener.
#[test]
fn scripts_find_processes_by_their_listening_socket() {
    let machine = Machine::without_gpus();
    let stale = std::process::id();
    drop(UnixListener::bind(machine.socket(stale)).unwrap());
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        let run = |arguments: &[&str]| run_script(&machine, &path, "pause.sh", arguments);
        run(&[]).expect(3, "", "no process is managed");
        let engine = Fake::new(&machine, "engine", &["weights"]);
        let elsewhere = 999_999_999;
        fs::rename(machine.socket(engine.pid()), machine.socket(elsewhere)).unwrap();
        run(&["--pid", &stale.to_string()]).expect(3, "", &format!("process {stale} is not managed; managed are: {elsewhere}\n"));
        for arguments in [&[][..], &["--all"], &["--pid", &elsewhere.to_string()]] {
            run(arguments).expect(0, "\"reply\":\"done\"", "");
        }
        assert_eq!(engine.asked().len(), 3);
        fs::rename(machine.socket(elsewhere), machine.socket(engine.pid())).unwrap();
        assert!(machine.socket(stale).exists());
    }
}

#[test]
fn scripts_refuse_as_the_command_line_does() {
    let machine = Machine::without_gpus();
    let path = std::env::var_os("PATH").unwrap();
    let run = |name: &str, arguments: &[&str]| run_script(&machine, Path::new(&path), name, arguments);
    run("pause.sh", &[]).expect(3, "", "no process is managed");
    run("pause.sh", &["--help"]).expect(0, "Not supported: process names, jobs of several processes", "");
    run("resume.sh", &["--help"]).expect(0, "Not supported: process names.\n", "");
    run("pause.sh", &["--explode"]).expect(2, "", "--explode");
    run("pause.sh", &["--timeout", "soon"]).expect(2, "", "number of seconds");
    run("pause.sh", &["--pid", "x"]).expect(2, "", "process id");
    run("resume.sh", &["--discard"]).expect(2, "", "for a pause");
    run("resume.sh", &["--force"]).expect(2, "", "for a pause");
    run("resume.sh", &["--no-hold"]).expect(2, "", "for a pause");
    run("resume.sh", &["--hold-timeout", "1"]).expect(2, "", "for a pause");
    run("pause.sh", &["--hold-timeout", "soon"]).expect(2, "", "number of seconds");
    run("pause.sh", &["--no-hold", "--hold-timeout", "1"]).expect(2, "", "exclude each other");

    let engine = Fake::new(&machine, "engine", &["weights"]);
    let trainer = Fake::reacting(&machine, "trainer", &["optimizer"], |request| match request {
        Request::Resume(_) => Some(Reaction::Answer(shortage(1))),
        _ => None,
    });
    run("pause.sh", &[]).expect(2, "", &engine.pid().to_string());
    run("pause.sh", &["--pid", "1"]).expect(3, "", "process 1 is not managed");
    run("pause.sh", &["--all"]).expect(0, "\"reply\":\"done\"", &format!("process {}:", trainer.pid()));
    assert_eq!((engine.asked().len(), trainer.asked().len()), (1, 1));
    run("resume.sh", &["--all"]).expect(4, "\"code\":\"device_memory\"", "");
    assert_eq!(engine.asked().len(), 2, "the others are resumed all the same");
    run("pause.sh", &["weights", "--all"]).expect(0, "\"reply\":\"done\"", "");
    run("pause.sh", &["lost", "--all"]).expect(6, "unknown_tag", "");

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o750)).unwrap();
    run("pause.sh", &["--all"]).expect(1, "", "chmod 700");
    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let link = machine.folder.path().join("link");
    symlink(machine.sockets(), &link).unwrap();
    let ran = Ran::of(machine.command(script("pause.sh"), &["--all"]).env("VRAMCTL_DIR", &link));
    ran.has(1, "", "symbolic link");
}

/// One after another, an error would leave half of a job paused.
#[test]
fn a_script_does_not_pause_half_a_job() {
    let machine = Machine::without_gpus();
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        let run = |name: &str, arguments: &[&str]| run_script(&machine, &path, name, arguments);
        let strange = "it's a \"job\" \\ * ü";
        let ranks = [strange, "other", strange].map(|job| Fake::new(&machine, "engine", &["weights"]).of_job(job));
        let alone = Fake::new(&machine, "alone", &["weights"]);
        for options in [&["--all"][..], &["weights", "--all"], &["--all", "--no-hold"]] {
            run("pause.sh", options).expect(2, "", "`vramctl pause`");
        }
        assert!(ranks.iter().all(|rank| rank.asked().is_empty()) && alone.asked().is_empty());
        // What was paused by other means may come back in any order.
        run("resume.sh", &["--all"]).expect(0, "\"reply\":\"done\"", "");
        run("pause.sh", &["--pid", &ranks[0].pid().to_string()]).expect(0, "\"reply\":\"done\"", "");
        // Each is a whole job.
        let [_first, _other, second] = ranks;
        drop(second);
        run("pause.sh", &["--all"]).expect(0, "\"reply\":\"done\"", "");
    }
}

#[test]
fn a_script_sees_a_process_end_in_the_middle() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| is_transition(request).then_some(Reaction::HangUp));
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        run_script(&machine, &path, "pause.sh", &[]).expect(1, "", "has ended or does not answer");
    }
}

// ---- engines ----

/// An HTTP server that acts as an engine: `answers` has a status and a body by method and path; anything else is 404.
struct Http {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Http {
    fn new(answer: impl Fn(&str) -> (u16, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        // The thread ends with the test process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let Some(request) = lines.next() else { continue };
                let key = lines.take_while(|line| !line.is_empty()).find(|line| line.to_lowercase().starts_with("authorization:"));
                let request = request.trim_end_matches(" HTTP/1.1").to_owned();
                let (status, body) = answer(&(request.clone() + key.as_deref().unwrap_or("")));
                log.lock().unwrap().push(request);
                let length = body.len();
                let _ = write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            }
        });
        Self { address, asked }
    }

    /// A vLLM that reports these request counts, one per query; the last one repeats.
    fn vllm(running: &'static [u32], reset: (u16, &'static str)) -> Self {
        let looks = AtomicUsize::new(0);
        Self::new(move |request| match request {
            "GET /metrics" => {
                let look = looks.fetch_add(1, Ordering::Relaxed).min(running.len() - 1);
                let gauge = |name: &str, count: u32| format!("vllm:num_requests_{name}{{engine=\"0\"}} {count}.0\n");
                (200, gauge("running", running[look]) + &gauge("waiting", 0))
            }
            "POST /reset_prefix_cache" => (reset.0, reset.1.into()),
            _ => (404, String::new()),
        })
    }

    fn sglang(running: u32, flush: (u16, &'static str)) -> Self {
        Self::new(move |request| match request {
            "GET /v1/loads?include=core" => (200, json!({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]}).to_string()),
            "POST /flush_cache" => (flush.0, flush.1.into()),
            _ => (404, "{}".into()),
        })
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

/// Discarding contents without telling the engine would silently produce wrong answers later.
#[test]
fn an_engines_kv_cache_is_not_discarded_without_asking() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("vllm");
    for line in ["pause --discard", "pause kv_cache --discard"] {
        machine.vramctl(line).expect(1, "", "--engine URL");
    }
    let trainer = Fake::new(&machine, "trainer", &["weights"]);
    machine.vramctl("pause --all --discard").expect(1, "", &format!("engine (pid {}): the contents of the KV cache", engine.pid()));
    assert!(trainer.asked().is_empty());
    drop(trainer);
    let json = machine.vramctl("pause --discard --json").only_json();
    assert_eq!((&json["error"]["code"], &json["processes"]), (&json!("prefix_cache"), &json!([])));
    assert!(engine.asked().is_empty(), "a refusal comes before anything is done");
    machine.vramctl("status").expect(0, "Inference engine: vllm.", "");
    machine.vramctl("pause weights --discard").expect(0, "paused weights", "");
    machine.vramctl("pause kv_cache").expect(0, "1.00 GiB kept", "");
    machine.vramctl("resume").expect(0, "resumed", "");
    machine.vramctl("pause --discard --force").expect(0, "discarded", "");
    assert!(matches!(engine.asked().last(), Some(Request::Pause(TransitionRequest { force: true, .. }))), "the process is told so");
}

#[test]
fn the_prefix_cache_is_reset_before_the_kv_cache_is_discarded() {
    const LOADS: &str = "GET /v1/loads?include=core";
    let engines: [(Http, &[&str]); 2] = [
        (
            Http::vllm(&[0], (200, r#"{"success":true}"#)),
            &["GET /metrics", "GET /metrics", "POST /reset_prefix_cache", "GET /metrics", "POST /reset_prefix_cache"],
        ),
        (
            Http::sglang(0, (200, "Cache flushed.")),
            // Its loads are asked for once more in the pause.
            &["GET /metrics", LOADS, LOADS, "POST /flush_cache", LOADS],
        ),
    ];
    for (http, wanted) in &engines {
        let machine = Machine::without_gpus();
        let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("whatever it says");
        let address = &http.address;
        machine.vramctl(&format!("pause weights --engine {address}")).expect(0, "paused weights", "");
        assert!(!http.asked().iter().any(|request| request.starts_with("POST")), "kept contents need not be forgotten");
        http.asked.lock().unwrap().clear();
        let ran = Ran::of(machine.cli("pause --discard").env("VRAMCTL_ENGINE", address));
        ran.has(0, "paused kv_cache", "");
        assert_eq!(http.asked(), *wanted);
        assert_eq!(engine.asked().len(), 2);
        // Everything is paused: a second pause has nothing to ask about.
        machine.vramctl(&format!("pause --engine {address}")).expect(0, "nothing to do", "");
        assert_eq!(http.asked(), *wanted);
    }
}

/// What the engine has taken of it is not there for the program's work any more.
#[test]
fn a_timeout_is_for_all_that_a_pause_waits_for() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    // It is asked again after 100 ms.
    let busy = Http::vllm(&[0, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --discard --timeout 30.08 --engine {}", busy.address)).expect(0, "paused kv_cache", "");
    // Rounded up to tens of seconds.
    assert!(
        matches!(engine.asked()[..], [Request::Pause(TransitionRequest { hold: Some(limit), .. })] if limit.as_secs() <= 30),
        "{:?}",
        engine.asked()
    );
}

/// It has written to the KV cache when the program is held.
#[test]
fn a_request_that_comes_after_the_reset_keeps_its_memory() {
    let late = "a request has come meanwhile";
    for how in ["--discard", "--discard --no-hold", "--no-hold"] {
        let machine = Machine::without_gpus();
        let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
        let busy = Http::vllm(&[0, 0, 1], (200, "{}"));
        machine.vramctl(&format!("pause {how} --engine {}", busy.address)).expect(5, "", late);
    }
    // With a timeout, it is waited for, and the prefix cache is reset again. Nothing is prepared before.
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let soon = Http::vllm(&[0, 0, 1, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --discard --timeout 60 --engine {}", soon.address)).expect(0, "paused kv_cache", "");
    assert_eq!(engine.asked().len(), 1);
    assert_eq!(soon.asked().iter().filter(|request| request.starts_with("POST")).count(), 3);
    // A count that is not up to date: the prefix cache is in use again.
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let resets = AtomicUsize::new(0);
    let stale = Http::new(move |request| match request {
        "GET /metrics" => (200, "vllm:num_requests_running{engine=\"0\"} 0.0\n".into()),
        _ => (200, format!("{{\"success\":{}}}", resets.fetch_add(1, Ordering::Relaxed) == 0)),
    });
    machine.vramctl(&format!("pause --discard --engine {}", stale.address)).expect(5, "", late);
    // It waits for the GPU.
    let asked = AtomicUsize::new(0);
    let stuck = Http::new(move |request| {
        if request.starts_with("GET /v1") && asked.fetch_add(1, Ordering::Relaxed) == 2 {
            thread::sleep(Duration::from_secs(30));
        }
        if request == "GET /metrics" { (404, String::new()) } else { (200, "{\"loads\":[]}".into()) }
    });
    machine.vramctl(&format!("pause --discard --engine {}", stuck.address)).expect(5, "", "it does not answer while it is held");
    machine.vramctl("ps").expect(0, "active", "");
}

#[test]
fn an_engine_with_requests_is_not_paused() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let busy = Http::vllm(&[3], (200, "{}"));
    let loaded = Http::sglang(2, (400, "pending"));
    let would_lose = |requests: u32| format!("it has requests that would lose their memory ({requests})");
    for how in ["--no-hold", "--discard"] {
        machine.vramctl(&format!("pause {how} --engine {}", busy.address)).expect(5, "", &would_lose(3));
        machine.vramctl(&format!("pause {how} --engine {} --timeout 0.3", busy.address)).expect(5, "", &would_lose(3));
        machine.vramctl(&format!("pause {how} --engine {}", loaded.address)).expect(5, "", &would_lose(2));
    }
    assert!(engine.asked().is_empty());
    let soon = Http::vllm(&[2, 2, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --no-hold --engine {} --timeout 20", soon.address)).expect(0, "paused kv_cache", "");
    machine.vramctl("resume").expect(0, "resumed", "");
    machine.vramctl(&format!("pause --no-hold --force --engine {}", busy.address)).expect(0, "paused kv_cache", "");
}

/// Requests lose nothing if the engine is held and all contents are kept, so nobody is asked.
#[test]
fn an_engine_with_requests_is_held() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let busy = Http::vllm(&[3], (200, "{}"));
    machine.vramctl(&format!("pause --engine {}", busy.address)).expect(0, "1.00 GiB kept", "");
    assert!(busy.asked().is_empty());
    assert!(matches!(engine.asked()[..], [Request::Pause(TransitionRequest { hold: Some(TEN_SECONDS), .. })]));
}

/// The last option wins, so that users can override an alias.
#[test]
fn a_program_is_held_unless_told_otherwise() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["cache"]);
    for (line, wanted) in
        [("pause --no-hold", None), ("pause --hold-timeout 300 --timeout 100", Some(300)), ("pause --timeout 100", Some(100))]
    {
        machine.vramctl(line).expect(0, "paused cache", "");
        machine.vramctl("resume").expect(0, "resumed cache", "");
        let asked = engine.asked();
        assert!(
            matches!(&asked[asked.len() - 2], Request::Pause(TransitionRequest { hold, .. }) if *hold == wanted.map(Duration::from_secs)),
            "{line}: {asked:?}"
        );
    }
    machine.vramctl("pause --no-hold --hold-timeout 3").expect(2, "", "--hold-timeout");
}

#[test]
fn pause_requests_a_guard_only_if_told() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["cache"]);
    for (line, wanted) in [("pause --no-hold --guard", true), ("pause", false)] {
        machine.vramctl(line).expect(0, "paused cache", "");
        machine.vramctl("resume").expect(0, "resumed cache", "");
        let asked = engine.asked();
        assert!(
            matches!(&asked[asked.len() - 2], Request::Pause(TransitionRequest { guard, .. }) if *guard == wanted),
            "{line}: {asked:?}"
        );
    }
}

/// If the engine cannot reset its cache, nothing is paused, and the message says what to do.
#[test]
fn an_engine_that_cannot_reset_its_prefix_cache_keeps_its_memory() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let pause = |http: &Http| machine.vramctl(&format!("pause --discard --engine {}", http.address));
    pause(&Http::vllm(&[0], (404, ""))).expect(1, "", "VLLM_SERVER_DEV_MODE=1");
    pause(&Http::vllm(&[0], (200, r#"{"success":false}"#))).expect(5, "", "still in use");
    pause(&Http::sglang(0, (400, "Flush cache failed.\nmore"))).expect(5, "", "Flush cache failed.");
    pause(&Http::vllm(&[0], (500, "oh"))).expect(1, "", "answers 500: oh");
    pause(&Http::new(|_| (404, String::new()))).expect(1, "", "/v1/loads");
    machine.vramctl("pause --no-hold --engine http://127.0.0.1:1").expect(1, "", "does not answer");
    machine.vramctl("pause --engine 127.0.0.1:8000").expect(2, "", "http://127.0.0.1:8000");
    assert!(engine.asked().is_empty());
}

#[test]
fn an_engines_api_key_comes_from_the_environment() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("sglang");
    let http = Http::new(|request| match request.to_lowercase().as_str() {
        "get /v1/loads?include=coreauthorization: bearer secret" => (200, r#"{"loads":[]}"#.into()),
        "post /flush_cacheauthorization: bearer secret" => (200, String::new()),
        "get /metricsauthorization: bearer secret" | "get /metrics" => (404, String::new()),
        _ => (401, String::new()),
    });
    let arguments = ["pause", "--discard", "--engine", &http.address];
    machine.vramctl(&arguments.join(" ")).expect(1, "", "VRAMCTL_ENGINE_KEY");
    let mut command = machine.cli(&arguments);
    Ran::of(command.env("VRAMCTL_ENGINE_KEY", "secret")).expect(0, "discarded", "");
}

// ---- the documentation ----

fn protocol_page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/protocol.md")).unwrap()
}

/// The code blocks of a page in one language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn the_documented_client_runs() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]);
    let page = protocol_page();
    let client = blocks(&page, "python")[0];
    let Some(python) = installed("python3") else { return eprintln!("skipped: no python3 here") };
    let ran = Ran::of(&mut machine.command(&python, &["-c", client, &engine.pid().to_string()]));
    ran.has(0, "'reply': 'done'", "");
    assert!(matches!(engine.asked()[..], [Request::Pause(TransitionRequest { hold: Some(TEN_SECONDS), .. })]));

    let base = machine.folder.path();
    fs::rename(machine.sockets(), base.join("vramctl")).unwrap();
    let mut command = machine.command(&python, &["-c", client, &engine.pid().to_string()]);
    command.env_remove("VRAMCTL_DIR").env("XDG_RUNTIME_DIR", base);
    Ran::of(&mut command).expect(0, "'reply': 'done'", "");
}

/// Every example line in the page parses, and contains no unknown field.
#[test]
fn the_documented_messages_match_the_code() {
    let page = protocol_page();
    let mut seen = 0;
    for line in blocks(&page, "json").iter().flat_map(|block| block.lines()).filter(|line| !line.is_empty()) {
        let documented: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let understood = if documented.get("request").is_some() {
            let request = protocol::parse(line.as_bytes()).unwrap_or_else(|error| panic!("{error}: {line}"));
            serde_json::to_value(protocol::Message { version: protocol::VERSION, request }).unwrap()
        } else {
            serde_json::to_value(serde_json::from_str::<Reply>(line).unwrap_or_else(|error| panic!("{error}: {line}"))).unwrap()
        };
        assert_eq!(documented, understood, "{line}");
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} messages were found: is this test still looking?");
}

/// An engine that reports requests and then nonsense is not idle.
#[test]
fn an_engine_that_starts_to_answer_with_errors_is_not_idle() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let looks = AtomicUsize::new(0);
    let http = Http::new(move |request| match request {
        "GET /metrics" if looks.fetch_add(1, Ordering::Relaxed) == 0 => (200, "vllm:num_requests_running{engine=\"0\"} 3.0\n".into()),
        "GET /metrics" => (503, "overloaded".into()),
        _ => (404, String::new()),
    });
    let ran = machine.vramctl(&format!("pause --no-hold --engine {}", http.address));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(!engine.asked().iter().any(|request| matches!(request, Request::Pause(_))), "{:?}", engine.asked());
}

/// Each engine has its own prefix cache; one that is not reset would return wrong answers.
#[test]
fn one_engine_url_does_not_cover_two_engines() {
    let machine = Machine::without_gpus();
    let engines = ["a", "b"].map(|name| Fake::new(&machine, name, &["kv_cache"]).with_engine("vllm"));
    let http = Http::vllm(&[0], (200, r#"{"success":true}"#));
    let ran = machine.vramctl(&format!("pause kv_cache --discard --all --engine {}", http.address));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("a, b"), "{ran:?}");
    assert!(http.asked().is_empty());
    assert!(engines.iter().all(|engine| !engine.asked().iter().any(|request| matches!(request, Request::Pause(_)))));
}

/// `vramctl ray` becomes a program in the Python that comes first on PATH, which may have no Ray.
#[test]
fn ray_is_handed_over_to_python() {
    let machine = Machine::new();
    let folder = machine.folder.path().join("python");
    fs::create_dir(&folder).unwrap();
    let ran = |arguments: &[&str]| machine.cli("ray").args(arguments).env("PATH", &folder).output().unwrap();
    let nobody = ran(&["pause", "engine"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("cannot start python3"), "{nobody:?}");
    let python = folder.join("python3");
    fs::write(&python, "#!/bin/sh\nshift 3\nprintf '%s;' \"$@\"\nexit 5\n").unwrap();
    fs::set_permissions(&python, Permissions::from_mode(0o755)).unwrap();
    let handed = ran(&["pause", "engine", "--json", "--help"]);
    assert_eq!((handed.status.code(), handed.stdout.as_slice()), (Some(5), b"pause;engine;--json;--help;".as_slice()), "{handed:?}");
    fs::write(&python, format!("#!/bin/sh\nexec {} -S \"$@\"\n", python_without_packages())).unwrap();
    let without = ran(&["pause", "engine"]);
    assert_eq!(without.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&without.stderr).contains("has no module ray; put the python3"), "{without:?}");
}

fn python_without_packages() -> String {
    let ran = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(ran.stdout).unwrap().trim().to_owned()
}
