//! A simulated machine: its GPUs and its socket directory, the programs that run on it under the preloaded library, the commands that run
//! there, and clients for both.

use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::descriptors::{self, Passed};
use vramctl_host::Held;

/// Longer than any answer or command may take, however busy the machine is.
pub const NEVER: Duration = Duration::from_secs(200);

/// A simulated machine with a socket directory of its own, which the first program on it makes.
pub struct Machine {
    pub folder: tempfile::TempDir,
    /// The memory of each GPU.
    pub memory: &'static str,
    /// How many GPUs it has. Without any, it has no driver either.
    pub devices: u32,
    /// Which machine it is: its GPUs have UUIDs of their own.
    pub serial: u32,
    /// The model of its GPUs.
    pub model: u32,
    /// The bytes of a process on a GPU apart from its allocations.
    pub context_bytes: u64,
    /// The memory of its engines: MiB of weights, and of the KV cache.
    pub engine_mib: [u32; 2],
}

/// A command's arguments: words in a string, or a list of arguments that may contain spaces.
pub trait Arguments {
    fn arguments(&self) -> Vec<&str>;
}

impl Arguments for str {
    fn arguments(&self) -> Vec<&str> {
        self.split_whitespace().collect()
    }
}

impl<A: Arguments + ?Sized> Arguments for &A {
    fn arguments(&self) -> Vec<&str> {
        (**self).arguments()
    }
}

impl Arguments for String {
    fn arguments(&self) -> Vec<&str> {
        self.as_str().arguments()
    }
}

impl<T: AsRef<str>> Arguments for [T] {
    fn arguments(&self) -> Vec<&str> {
        self.iter().map(AsRef::as_ref).collect()
    }
}

impl<T: AsRef<str>> Arguments for Vec<T> {
    fn arguments(&self) -> Vec<&str> {
        self.as_slice().arguments()
    }
}

impl<T: AsRef<str>, const N: usize> Arguments for [T; N] {
    fn arguments(&self) -> Vec<&str> {
        self.as_slice().arguments()
    }
}

impl Machine {
    pub fn new() -> Self {
        Self::with(1, "1G")
    }

    /// A machine with this many GPUs, of this much memory each.
    pub fn with(devices: u32, memory: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("gpu")).unwrap();
        Self { folder, memory, devices, serial: 0, model: 0, context_bytes: 0, engine_mib: [8, 8] }
    }

    /// From now on, it is another one with the same files. Nothing may run on it.
    pub fn becomes(&mut self, devices: u32, serial: u32, model: u32) {
        assert!(self.gpus().iter().all(|gpu| gpu.1 == 0), "{:?}", self.gpus());
        (self.devices, self.serial, self.model) = (devices, serial, model);
        fs::remove_file(self.folder.path().join("gpu/machine")).unwrap();
    }

    /// A machine with neither a GPU nor a driver, and with an empty socket directory.
    pub fn without_gpus() -> Self {
        let machine = Self::with(0, "0");
        DirBuilder::new().mode(0o700).create(machine.sockets()).unwrap();
        machine
    }

    /// A command on this machine, without the library and with nothing of the test's own settings.
    pub fn command(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let is_setting = ["VRAMCTL_", "SIMGPU_"].iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()));
            let known = ["LD_PRELOAD", "PYTHONPATH", "XDG_RUNTIME_DIR", "COLUMNS", "CLICOLOR_FORCE"];
            if is_setting || known.iter().any(|known| name == **known) {
                command.env_remove(name);
            }
        }
        command.env("VRAMCTL_DIR", self.sockets()).env("XDG_CONFIG_HOME", self.folder.path().join("config")).env("VRAMCTL_AUDIT", "");
        if self.devices > 0 {
            command
                .env("LD_LIBRARY_PATH", super::simulated_libraries())
                .env("SIMGPU_DIR", self.folder.path().join("gpu"))
                .env("SIMGPU_MEMORY", self.memory)
                .env("SIMGPU_DEVICES", self.devices.to_string())
                .env("SIMGPU_SERIAL", self.serial.to_string())
                .env("SIMGPU_MODEL", self.model.to_string())
                .env("SIMGPU_CONTEXT_BYTES", self.context_bytes.to_string());
        }
        command
    }

    /// A program under these preloaded libraries. A hang ends it, and so fails its test.
    pub fn preloaded(&self, libraries: &[&Path], program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
        // Not under `timeout` itself.
        let mut command = self.command("timeout", &["100", "env"]);
        if !libraries.is_empty() {
            let paths: Vec<_> = libraries.iter().map(|path| path.to_str().unwrap()).collect();
            command.arg(format!("LD_PRELOAD={}", paths.join(":")));
        }
        command.arg(program).args(arguments);
        command
    }

    /// A command of the command line.
    pub fn cli(&self, arguments: &(impl Arguments + ?Sized)) -> Command {
        self.command(super::command_line(), &arguments.arguments())
    }

    /// A command of the command line that gets only so many threads (`tests/apps/few_threads.c`). A hang ends it.
    pub fn with_few_threads(&self, threads: usize, words: &str) -> Command {
        let library = super::built("few_threads.so", "few_threads.c", &super::SHARED);
        let preload = format!("LD_PRELOAD={}", library.display());
        let arguments: Vec<_> = ["-k", "5", "60", "env", &preload, super::command_line()].into_iter().chain(words.split(' ')).collect();
        let mut command = self.command("timeout", &arguments);
        command.env("FEW_THREADS", threads.to_string());
        command
    }

    /// Starts it in the background, for [`Ran::end_of`].
    pub fn begin(&self, arguments: &(impl Arguments + ?Sized)) -> Child {
        self.cli(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs it.
    pub fn vramctl(&self, arguments: &(impl Arguments + ?Sized)) -> Ran {
        Ran::of(&mut self.cli(arguments))
    }

    /// Runs it, which must succeed. Returns everything that it wrote.
    #[track_caller]
    pub fn done(&self, arguments: &(impl Arguments + ?Sized)) -> String {
        self.vramctl(arguments).expect(0, "", "").text()
    }

    /// What a user sees of these commands, one after the other, for a snapshot: each with its output, its messages (`! `) and its exit code
    /// (`[1]`). What differs between runs is replaced: the PIDs of these programs by `<name>` and with them the width
    /// of columns, folders by `<folder>`, times by `<time>`.
    pub fn transcript(&self, programs: &[(&str, u32)], commands: &[&str]) -> String {
        let shown = |command: &&str| {
            let ran = Ran::of(self.cli(command).env("COLUMNS", "100").env_remove("NO_COLOR"));
            let messages: String = ran.err.lines().map(|line| ["! ", line, "\n"].concat()).collect();
            let code = if ran.code == Some(0) { String::new() } else { format!("[{}]\n", ran.code.expect("an exit code")) };
            format!("$ vramctl {command}\n{}{messages}{code}", ran.out)
        };
        let mut text = commands.iter().map(shown).collect::<String>();
        for (name, pid) in programs {
            text = replaced(&text, &pid.to_string(), &format!("<{name}>"));
        }
        while text.contains("   ") && !programs.is_empty() {
            text = text.replace("   ", "  ");
        }
        for folder in [self.folder.path(), super::own_folder()] {
            text = text.replace(folder.to_str().unwrap(), "<folder>");
        }
        without_times(&text)
    }

    /// A program of `tests/apps`, or of another folder, with arguments, under the library.
    pub fn program(&self, name: &str, program: &str) -> Command {
        let mut words = program.split(' ');
        let mut command = self.cli(&["run", "--name", name, "--no-python", "--"]);
        command.arg(super::programs().join(words.next().unwrap())).args(words);
        command
    }

    /// Starts it, and waits until it is ready.
    #[track_caller]
    pub fn start(&self, name: &str, program: &str) -> Program {
        self.start_with(name, program, |_| ())
    }

    #[track_caller]
    pub fn start_with(&self, name: &str, program: &str, change: impl FnOnce(&mut Command)) -> Program {
        let mut command = self.program(name, program);
        change(&mut command);
        Program::ready(&mut command)
    }

    /// Starts an engine under this name.
    pub fn engine(&self, name: &str) -> Program {
        self.engine_with(name, |_| ())
    }

    #[track_caller]
    pub fn engine_with(&self, name: &str, change: impl FnOnce(&mut Command)) -> Program {
        let [weights, kv] = self.engine_mib;
        self.start_with(name, &format!("engine --weights-mib {weights} --kv-mib {kv}"), change)
    }

    pub fn job<const N: usize>(&self, name: &str) -> [Program; N] {
        // One run, as ranks that are meant to belong together have.
        std::array::from_fn(|_| self.engine_with(name, |command| _ = command.env("VRAMCTL_JOB", format!("run-of-{name}"))))
    }

    /// Starts a program without the library that fills a GPU with this much, besides a context.
    pub fn hog(&self, gpu: u32, mib: u32) -> Program {
        let mut command = self.command(super::programs().join("hog"), &["--seconds", "600"]);
        let mut hog = Program::spawn(command.args(["--device", &gpu.to_string(), "--mib", &mib.to_string()]));
        hog.expect("holding");
        hog
    }

    /// Bytes in use on each GPU, and the processes that NVML lists there.
    pub fn gpus(&self) -> Vec<(u64, usize)> {
        let status = Ran::of(&mut self.command(super::artifacts().join("simgpu-smi"), &["--json"])).json();
        let gpu = |gpu: &Value| (gpu["used"].as_u64().unwrap(), gpu["processes"].as_array().unwrap().len());
        status["devices"].as_array().unwrap().iter().map(gpu).collect()
    }

    /// Bytes in use on the first GPU, by all processes.
    pub fn used(&self) -> u64 {
        self.gpus()[0].0
    }

    /// What `vramctl status` says of a process.
    #[track_caller]
    pub fn status(&self, name: &str) -> Value {
        self.vramctl(&["status", name, "--json"]).expect(0, "", "").json()
    }

    pub fn sockets(&self) -> PathBuf {
        self.folder.path().join("sockets")
    }

    /// The path of a process's socket.
    pub fn socket(&self, pid: u32) -> PathBuf {
        self.sockets().join(format!("{pid}.sock"))
    }

    pub fn connect(&self, program: &Program) -> Wire {
        // A deleted socket is created again within about a second.
        let stream = super::patiently(|| UnixStream::connect(self.socket(program.pid()))).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        Wire(BufReader::new(stream))
    }

    /// The state of a process over all its tags.
    pub fn state(&self, program: &Program) -> String {
        // Because of frequent polling it may have too many connections: then it refuses, or has already disconnected.
        let told = super::patiently(|| match self.connect(program).try_ask(&json!({"request": "status"})) {
            Ok(told) if told["code"] != "busy" => Ok(told),
            refused => Err(refused),
        })
        .expect("a status");
        let states: Vec<_> = told["tags"].as_array().unwrap().iter().map(|tag| tag["state"].as_str().unwrap().to_owned()).collect();
        assert!(states.iter().all(|state| *state == states[0]), "{told}");
        format!("{}{}", states[0], if told["held"] == true { ", held" } else { "" })
    }

    /// Waits until all survivors are in the same state, with no transition in progress. Returns the state.
    #[track_caller]
    pub fn settled(&self, ranks: &[&Program]) -> String {
        let settled = super::patiently(|| {
            let states: Vec<_> = ranks.iter().map(|rank| self.state(rank)).collect();
            let is_settled = |state: &String| *state == states[0] && ["active", "paused", "paused, held"].contains(&state.as_str());
            if states.iter().all(is_settled) { Ok(states[0].clone()) } else { Err(states) }
        });
        settled.unwrap_or_else(|states| panic!("split: {states:?}"))
    }
}

/// The text with `<time>` in the place of what a pause, a resume and the life of a process have taken, and without whose command it was.
fn without_times(text: &str) -> String {
    let without = |line: &str| match line.split_once(" in ").filter(|(_, after)| after.ends_with(" ms")) {
        Some((before, _)) => format!("{before} in <time>\n"),
        None if line.starts_with("  wait ") && line.ends_with(" ms") => "  <times of the stages>\n".into(),
        None => match line.split_once(", running for ") {
            Some((before, _)) => format!("{before}, running for <time>.\n"),
            None if line.starts_with("Asked for ") => "Asked for <time> ago by <command>.\n".into(),
            None => format!("{line}\n"),
        },
    };
    // A cell of a table.
    let text = (0..NEVER.as_secs()).fold(text.to_owned(), |text, seconds| text.replace(&format!("  {seconds} s  "), "  <time>  "));
    text.lines().map(without).collect()
}

/// The text with another word wherever this number stands by itself, and is not a part of a decimal fraction: an id may be as small as a size.
fn replaced(text: &str, number: &str, word: &str) -> String {
    let (mut done, mut rest) = (String::new(), text);
    let is_digit = |one: char| one.is_ascii_digit();
    while let Some((before, after)) = rest.split_once(number) {
        let is_within = before.ends_with(|last: char| last.is_ascii_alphanumeric())
            || after.starts_with(|first: char| first.is_ascii_alphanumeric())
            || before.strip_suffix('.').is_some_and(|before| before.ends_with(is_digit))
            || after.strip_prefix('.').is_some_and(|after| after.starts_with(is_digit));
        done = done + before + if is_within { number } else { word };
        rest = after;
    }
    done + rest
}

/// The row of a process in a table whose first column has the ids. An id has any number of digits, and may be a part of another number.
pub fn row_of(table: &str, pid: u32) -> Option<&str> {
    table.lines().find(|line| line.split_whitespace().next() == Some(&pid.to_string()))
}

/// A finished command.
#[derive(Debug)]
pub struct Ran {
    /// What was run; empty if it had ended before anybody asked.
    pub command: String,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    fn new(command: &Command, output: &Output) -> Self {
        Self::named(words([command.get_program()].into_iter().chain(command.get_args()).map(OsStr::as_encoded_bytes)), output)
    }

    fn named(command: String, output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { command, code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    #[track_caller]
    pub fn of(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self::new(command, &output_of(child))
    }

    /// Waits for it. It must end.
    #[track_caller]
    pub fn end_of(command: Child) -> Self {
        let line = fs::read(format!("/proc/{}/cmdline", command.id())).unwrap_or_default();
        let line = words(line.split(|byte| *byte == 0).filter(|word| !word.is_empty()));
        Self::named(line, &output_of(command))
    }

    /// All that it wrote.
    pub fn text(&self) -> String {
        format!("{}{}", self.out, self.err)
    }

    #[track_caller]
    pub fn expect(self, code: i32, out: &str, err: &str) -> Self {
        self.has(code, out, err);
        self
    }

    #[track_caller]
    pub fn has(&self, code: i32, out: &str, err: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.out.contains(out), "{out:?} is not in {self:?}");
        assert!(self.err.contains(err), "{err:?} is not in {self:?}");
    }

    /// Its JSON, beside which it wrote nothing to stderr.
    #[track_caller]
    pub fn only_json(&self) -> Value {
        assert_eq!(self.err, "", "with --json everything is on stdout");
        self.json()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

fn words<'a>(words: impl Iterator<Item = &'a [u8]>) -> String {
    words.map(String::from_utf8_lossy).collect::<Vec<_>>().join(" ")
}

/// Waits for a command, which must end.
#[track_caller]
fn output_of(command: Child) -> Output {
    let (pid, (over, wait)) = (command.id().cast_signed(), channel::<()>());
    let watchdog = thread::spawn(move || {
        let is_late = wait.recv_timeout(NEVER) == Err(RecvTimeoutError::Timeout);
        // SAFETY: nobody has waited for the process yet, so the number is still its own.
        is_late && unsafe { libc::kill(pid, libc::SIGKILL) } == 0
    });
    let output = command.wait_with_output().unwrap();
    drop(over);
    assert!(!watchdog.join().unwrap(), "the command does not end: {output:?}");
    output
}

/// A child that ends with the test, however that ends.
pub struct Killed(pub Child);

/// Stops a child. Its threads run until each has noticed, and could still answer somebody: that is awaited.
#[track_caller]
pub fn stop(child: &Child) {
    let pid = child.id().cast_signed();
    // SAFETY: a child of this process, whose status is not asked for.
    assert!(unsafe { libc::kill(pid, libc::SIGSTOP) == 0 && libc::waitpid(pid, std::ptr::null_mut(), libc::WUNTRACED) == pid });
}

/// Has a child go on that was stopped.
#[track_caller]
pub fn go_on(child: &Child) {
    // SAFETY: touches no memory.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGCONT) }, 0);
}

impl Deref for Killed {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program on the machine, which has a pipe at each end.
pub struct Program {
    pub child: Killed,
    pub output: BufReader<ChildStdout>,
}

impl Program {
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child: Killed(child), output }
    }

    /// Waits until it is ready.
    #[track_caller]
    pub fn ready(command: &mut Command) -> Self {
        let mut program = Self::spawn(command);
        program.expect("ready");
        program
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its next line; empty if it has ended.
    #[track_caller]
    pub fn line(&mut self) -> String {
        let (deadline, mut line) = (Instant::now() + NEVER, Vec::new());
        loop {
            self.wait_for_output(deadline);
            let said = self.output.fill_buf().unwrap();
            let end = said.iter().position(|byte| *byte == b'\n');
            let (bytes, is_over) = (end.map_or(said.len(), |end| end + 1), end.is_some() || said.is_empty());
            line.extend_from_slice(&said[..bytes]);
            self.output.consume(bytes);
            if is_over {
                return String::from_utf8(line).unwrap().trim().to_owned();
            }
        }
    }

    /// All that it says until it closes its output.
    #[track_caller]
    pub fn rest(&mut self) -> String {
        let (deadline, mut rest) = (Instant::now() + NEVER, Vec::new());
        loop {
            self.wait_for_output(deadline);
            let said = self.output.fill_buf().unwrap();
            let bytes = said.len();
            if bytes == 0 {
                return String::from_utf8_lossy(&rest).into_owned();
            }
            rest.extend_from_slice(said);
            self.output.consume(bytes);
        }
    }

    /// Waits until its output can be read without waiting.
    #[track_caller]
    fn wait_for_output(&self, deadline: Instant) {
        while self.output.buffer().is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "process {} says nothing", self.pid());
            let mut output = libc::pollfd { fd: self.output.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: it is one valid structure, and `poll` does not keep it.
            if unsafe { libc::poll(&raw mut output, 1, left.as_millis() as i32 + 1) } > 0 {
                break;
            }
        }
    }

    /// Waits until it has ended.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        super::patiently(|| self.child.try_wait().unwrap().ok_or(())).unwrap_or_else(|()| panic!("process {} does not end", self.pid()))
    }

    /// Its next line, which must begin with this.
    #[track_caller]
    pub fn expect(&mut self, beginning: &str) -> String {
        let line = self.line();
        assert!(line.starts_with(beginning), "{beginning:?} does not begin {line:?}");
        line
    }

    /// Sends it a line. A program that cannot read the line has ended: its last words tell why.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        if let Err(error) = writeln!(self.child.stdin.as_mut().unwrap(), "{line}") {
            let (ended, said) = (self.ended(), self.rest());
            panic!("{error}: it has ended with {ended:?}, and said: {said}");
        }
    }

    /// Its answer, unless it has ended. A program that a signal kills may live on for a moment, in which its parent cannot wait for it yet.
    pub fn ask_if_alive(&mut self, line: &str) -> Option<String> {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").ok()?;
        Some(self.line()).filter(|answer| !answer.is_empty())
    }

    /// Whether it has closed its output, as it does when it ends: before its parent can wait for it.
    pub fn is_silent(&self) -> bool {
        let mut output = libc::pollfd { fd: self.output.get_ref().as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: it is one valid structure, and `poll` does not keep it.
        unsafe { libc::poll(&raw mut output, 1, 0) };
        output.revents & libc::POLLHUP != 0
    }

    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    #[track_caller]
    pub fn number(&mut self, line: &str) -> u64 {
        let answer = self.ask(line);
        answer.parse().unwrap_or_else(|_| panic!("{line}: {answer}"))
    }

    /// Checks that its memory is as the program left it.
    #[track_caller]
    pub fn verify(&mut self) {
        let answer = self.ask("verify");
        assert!(answer.contains("ok") && !answer.contains("corrupt"), "{answer}");
    }

    pub fn signal(&self, signal: libc::c_int) {
        assert_eq!(unsafe { libc::kill(self.pid() as i32, signal) }, 0);
    }

    /// The names of its threads.
    pub fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok()).map(|name| name.trim().to_owned()).collect()
    }

    /// Closes its input, at which it must end by itself.
    #[track_caller]
    pub fn end(mut self) {
        drop(self.child.stdin.take());
        let rest = self.rest();
        let status = self.ended();
        assert!(status.success(), "{status}: {rest}");
        assert!(rest.trim().is_empty() || rest.trim().ends_with("ok") || rest.contains("bye"), "{rest}");
    }

    #[track_caller]
    pub fn stop(&self) {
        stop(&self.child);
    }

    #[track_caller]
    pub fn go_on(&self) {
        go_on(&self.child);
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A client that speaks the protocol one step at a time. Dropped, it is a coordinator that was killed.
pub struct Wire(pub BufReader<UnixStream>);

impl Wire {
    pub fn send(&mut self, request: &Value, file: Option<BorrowedFd<'_>>) {
        self.try_send(request, file).unwrap();
    }

    fn try_send(&mut self, request: &Value, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut request = request.clone();
        request["version"] = json!(1);
        descriptors::send_line(self.0.get_ref(), format!("{request}\n").as_bytes(), file.as_slice(), 0)
    }

    fn try_ask(&mut self, request: &Value) -> io::Result<Value> {
        self.try_send(request, None)?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    pub fn ask(&mut self, request: &Value) -> Value {
        self.send(request, None);
        self.answer()
    }

    #[track_caller]
    pub fn step(&mut self, request: &Value, file: Option<BorrowedFd<'_>>, wanted: &str) {
        self.send(request, file);
        let answer = self.answer();
        assert_eq!(answer["reply"], wanted, "{answer}");
    }
}

/// Relays lines between a client and a process, until one of them disconnects or `may_pass` returns false. `may_pass` gets the request, the
/// line, and whether it is an answer.
fn pass_on(sides: [UnixStream; 2], may_pass: impl Fn(&str, &[u8], bool) -> bool + Send + Sync + 'static) {
    let (sides, asked, may_pass) = (Arc::new(sides), Arc::new(Mutex::new(String::new())), Arc::new(may_pass));
    for from in [0, 1] {
        let (sides, asked, may_pass) = (Arc::clone(&sides), Arc::clone(&asked), Arc::clone(&may_pass));
        thread::spawn(move || {
            while let Some((line, files)) = line_with_files(&sides[from]) {
                let request = match from {
                    0 => serde_json::from_slice::<Value>(&line).unwrap()["request"].as_str().unwrap().to_owned(),
                    _ => asked.lock().unwrap().clone(),
                };
                if from == 0 && request != "renew" {
                    asked.lock().unwrap().clone_from(&request);
                }
                let files: Vec<_> = files.iter().map(|file| file.get().unwrap()).collect();
                let passes = may_pass(&request, &line, from == 1);
                if !passes || descriptors::send_line(&sides[1 - from], &line, &files, 0).is_err() {
                    break;
                }
            }
            sides.iter().for_each(|side| _ = side.shutdown(Shutdown::Both));
        });
    }
}

fn line_with_files(stream: &UnixStream) -> Option<(Vec<u8>, Vec<Held>)> {
    let (mut line, mut passed) = (Vec::new(), Passed::default());
    while line.last() != Some(&b'\n') {
        // Byte by byte: data after the line may carry its own files.
        let mut byte = [0];
        if descriptors::receive(stream, &mut byte, &mut passed).ok()? == 0 {
            return None;
        }
        line.push(byte[0]);
    }
    Some((line, passed.files))
}

/// A proxy between a coordinator and processes: a folder with socket names that the coordinator takes for theirs. `may_pass` gets the place
/// of the process, and what it gets from [`pass_on`].
pub fn proxy<'a>(
    machine: &Machine,
    ranks: impl IntoIterator<Item = &'a Program>,
    may_pass: impl Fn(usize, &str, &[u8], bool) -> bool + Send + Sync + 'static,
) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap();
    let may_pass = Arc::new(may_pass);
    for (place, rank) in ranks.into_iter().enumerate() {
        let name = format!("{}.sock", rank.pid());
        let listener = UnixListener::bind(folder.path().join(&name)).unwrap();
        let (own, may_pass) = (machine.sockets().join(name), Arc::clone(&may_pass));
        thread::spawn(move || {
            for coordinator in listener.incoming() {
                let (coordinator, Ok(process)) = (coordinator.unwrap(), UnixStream::connect(&own)) else { continue };
                let may_pass = Arc::clone(&may_pass);
                pass_on([coordinator, process], move |request, line, is_answer| may_pass(place, request, line, is_answer));
            }
        });
    }
    folder
}
