//! Real programs under the preloaded library on a simulated machine, and clients for them.

use serde_json::{Value, json};
use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use vramctl_control::descriptors::{self, Passed};

/// A simulated machine, with a job on it.
pub struct Machine {
    pub folder: tempfile::TempDir,
    pub memory: &'static str,
    /// How many GPUs it has.
    pub devices: u32,
}

impl Machine {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("gpu")).unwrap();
        DirBuilder::new().mode(0o700).create(folder.path().join("sockets")).unwrap();
        Self { folder, memory: "1G", devices: 1 }
    }

    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env_remove("LD_PRELOAD").env_remove("VRAMCTL_NAME").env_remove("VRAMCTL_JOB").args(arguments);
        command
            .env("LD_LIBRARY_PATH", super::simulated_libraries())
            .env("SIMGPU_DIR", self.folder.path().join("gpu"))
            .env("SIMGPU_MEMORY", self.memory)
            .env("SIMGPU_DEVICES", self.devices.to_string())
            .env("VRAMCTL_LIB", super::artifacts().join("libvramctl.so"))
            .env("VRAMCTL_DIR", self.sockets());
        command
    }

    pub fn vramctl(&self, arguments: &str) -> Ran {
        let arguments: Vec<_> = arguments.split_whitespace().collect();
        Ran::new(&self.command(super::command_line(), &arguments).output().unwrap())
    }

    /// An engine under this name.
    pub fn start_with(&self, name: &str, change: impl Fn(&mut Command)) -> Rank {
        self.start(name, "engine", |command| {
            command.args(["--weights-mib", "8", "--kv-mib", "8"]);
            change(command);
        })
    }

    /// A program of `tests/apps`.
    pub fn start(&self, name: &str, program: &str, change: impl Fn(&mut Command)) -> Rank {
        let mut command = self.command(super::command_line(), &["run", "--name", name, "--no-python", "--"]);
        command.arg(super::programs().join(program)).stdin(Stdio::piped()).stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut rank = Rank { child, input, output };
        assert!(rank.line().starts_with("ready"));
        rank
    }

    pub fn job<const N: usize>(&self, name: &str) -> [Rank; N] {
        // One run, as ranks that are meant to belong together have.
        std::array::from_fn(|_| self.start_with(name, |command| _ = command.env("VRAMCTL_JOB", format!("run-of-{name}"))))
    }

    pub fn sockets(&self) -> PathBuf {
        self.folder.path().join("sockets")
    }

    pub fn socket_of(&self, rank: &Rank) -> PathBuf {
        self.sockets().join(format!("{}.sock", rank.pid()))
    }

    pub fn connect(&self, rank: &Rank) -> Wire {
        // A deleted socket is created again within about a second.
        let stream = super::patiently(|| UnixStream::connect(self.socket_of(rank))).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        Wire(BufReader::new(stream))
    }

    /// The state of a process over all its tags.
    pub fn state(&self, rank: &Rank) -> String {
        // Because of frequent polling it may have too many connections: then it refuses, or has already disconnected.
        let told = super::patiently(|| match self.connect(rank).try_ask(&json!({"request": "status"})) {
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
    pub fn settled(&self, ranks: &[&Rank]) -> String {
        let settled = super::patiently(|| {
            let states: Vec<_> = ranks.iter().map(|rank| self.state(rank)).collect();
            let is_settled = |state: &String| *state == states[0] && ["active", "paused", "paused, held"].contains(&state.as_str());
            if states.iter().all(is_settled) { Ok(states[0].clone()) } else { Err(states) }
        });
        settled.unwrap_or_else(|states| panic!("split: {states:?}"))
    }
}

/// A finished command.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn new(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
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

/// A process of a job.
pub struct Rank {
    pub child: Child,
    pub input: ChildStdin,
    pub output: BufReader<ChildStdout>,
}

impl Rank {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Sends it a line. A program that cannot read the line has ended: its last words tell why.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        if let Err(error) = writeln!(self.input, "{line}") {
            let (ended, mut said) = (self.child.wait(), Vec::new());
            let _ = self.output.read_to_end(&mut said);
            let said = String::from_utf8_lossy(&said);
            panic!("{error}: it has ended with {ended:?}, and said: {said}");
        }
    }

    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
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
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
pub fn pass_on(sides: [UnixStream; 2], may_pass: impl Fn(&str, &mut Vec<u8>, bool) -> bool + Send + Sync + 'static) {
    let (sides, asked, may_pass) = (Arc::new(sides), Arc::new(Mutex::new(String::new())), Arc::new(may_pass));
    for from in [0, 1] {
        let (sides, asked, may_pass) = (Arc::clone(&sides), Arc::clone(&asked), Arc::clone(&may_pass));
        thread::spawn(move || {
            while let Some((mut line, files)) = line_with_files(&sides[from]) {
                let request = match from {
                    0 => serde_json::from_slice::<Value>(&line).unwrap()["request"].as_str().unwrap().to_owned(),
                    _ => asked.lock().unwrap().clone(),
                };
                if from == 0 && request != "renew" {
                    asked.lock().unwrap().clone_from(&request);
                }
                let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
                let passes = may_pass(&request, &mut line, from == 1);
                if !passes || descriptors::send_line(&sides[1 - from], &line, &files, 0).is_err() {
                    break;
                }
            }
            sides.iter().for_each(|side| _ = side.shutdown(Shutdown::Both));
        });
    }
}

fn line_with_files(stream: &UnixStream) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
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
