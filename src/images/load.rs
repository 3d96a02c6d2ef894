//! Starts a program from an image.
//!
//! It gets a PID and a mount namespace of its own, with a first process that is vramctl's ([`init`](crate::init)), so that an image can be loaded
//! several times at once, and on another day.

use crate::criu::Criu;
use crate::folder::{self, failed};
use crate::init::{self, Report, Task};
use crate::look::children;
use crate::manifest::Manifest;
use crate::namespace;
use crate::save::wait_until;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io};
use vramctl_config::socket_directory;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::HowToPause;
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Consent, Operation, Plan, Reporter, Scope};
use vramctl_model::{Verb, checked_name};

/// How long the library may take to listen, once the program is back.
const SOCKET_WITHIN: Duration = Duration::from_secs(30);

/// What a load will do.
pub struct Load {
    image: PathBuf,
    manifest: Manifest,
    name: String,
    streams: Streams,
    timeout: Option<Duration>,
}

/// Where the program's standard streams lead.
#[derive(Debug, Clone, Default)]
pub struct Streams {
    /// The file to which it writes, in place of this command's own streams.
    pub log: Option<PathBuf>,
    /// Whether it has none of this command's.
    pub detached: bool,
}

/// A program that runs again.
#[derive(Debug)]
pub struct Loaded {
    /// Its id.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// How long each stage took.
    pub stages: Vec<(&'static str, Duration)>,
    first: Child,
}

impl Load {
    /// Looks whether the image can be loaded. Starts nothing. `name`: the program's, else that which it had.
    pub fn plan(
        image: &Path,
        name: Option<&str>,
        streams: Streams,
        timeout: Option<Duration>,
        reporter: &dyn Reporter,
    ) -> Result<Self, CommandError> {
        // SAFETY: touches no memory.
        if unsafe { libc::geteuid() } != 0 {
            return Err(CommandError::new(
                Exit::Failed,
                "to load an image takes root: it makes namespaces, and CRIU brings the process back",
            ));
        }
        folder::check_owner(image)?;
        let image = fs::canonicalize(image).map_err(failed("open", image))?;
        let manifest = Manifest::read(&image)?;
        Criu::find()?.check()?;
        let name = name.unwrap_or(&manifest.process.name).to_owned();
        checked_name(&name).map_err(|why| CommandError::new(Exit::Usage, why.to_string()))?;
        let sockets = socket_directory();
        if *sockets != manifest.process.sockets {
            let text = format!(
                "the program's control socket is in {}, and this command looks in {}: set VRAMCTL_DIR to the former",
                manifest.process.sockets.display(),
                sockets.display()
            );
            return Err(CommandError::new(Exit::Failed, text));
        }
        manifest.check_files(&image)?;
        let load = Self { image, manifest, name, streams, timeout };
        load.check_gpus(reporter)?;
        Ok(load)
    }

    fn check_gpus(&self, reporter: &dyn Reporter) -> Result<(), CommandError> {
        let machine = self.operation(0).machine;
        if let Ok(cards) = machine.cards() {
            let missing = self.manifest.process.gpus.iter().find(|gpu| cards.iter().all(|card| card.uuid != gpu.uuid));
            if let Some(gpu) = missing {
                return Err(CommandError::new(Exit::Failed, format!("the image was made with {}, which is not here", gpu.uuid)));
            }
        }
        let now = machine.cuda().map(|version| version.to_string()).unwrap_or_default();
        if now != self.manifest.cuda {
            reporter.warn(&format!("the image was made with a driver for CUDA {}, and here is one for {now}", self.manifest.cuda));
        }
        Ok(())
    }

    fn operation(&self, pid: u32) -> Operation {
        let scope = Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() };
        Operation::new(Verb::Resume, Target::Pid(pid), scope, Deadline::new(self.timeout), HowToPause::default())
    }

    /// Starts it. After a failure, nothing of it is left.
    pub fn run(self, reporter: &dyn Reporter) -> Result<Loaded, CommandError> {
        let mut stages = Vec::new();
        let begun = Instant::now();
        let (mut first, mut report) = self.start()?;
        let mut text = Vec::new();
        let _ = report.read_to_end(&mut text);
        stages.push(("restore", begun.elapsed()));
        let begun = Instant::now();
        let brought = self.bring_back(&text, &first, reporter);
        stages.push(("resume", begun.elapsed()));
        match brought {
            Ok(pid) => Ok(Loaded { pid, name: self.name, stages, first }),
            Err(failure) => {
                // The namespace ends with its first process.
                let _ = first.kill();
                let _ = first.wait();
                Err(failure)
            }
        }
    }

    /// Starts the first process of the namespaces. It reports through the file.
    fn start(&self) -> Result<(Child, File), CommandError> {
        let cannot = |error: io::Error| CommandError::new(Exit::Failed, format!("cannot start the program's namespace: {error}"));
        let mut ends = [0; 2];
        // SAFETY: two numbers, writable.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(cannot(io::Error::last_os_error()));
        }
        // SAFETY: just opened, and nobody else's.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let task = Task { image: self.image.clone(), name: self.name.clone(), report: write.as_raw_fd() };
        let mut command = Command::new(env::current_exe().map_err(cannot)?);
        command.args(["image-init", &task.to_argument()]);
        crate::criu::inherit(&mut command, &[write.as_raw_fd()]);
        if self.streams.detached {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        }
        if let Some(log) = &self.streams.log {
            let opened = File::options().append(true).create(true).mode(0o600).open(log).map_err(failed("open", log))?;
            command.stdout(opened.try_clone().map_err(cannot)?).stderr(opened);
        }
        let child = namespace::spawn_apart(&mut command).map_err(cannot)?;
        Ok((child, read.into()))
    }

    /// Gives the program its memory back, and lets it run. `report`: the first process's.
    fn bring_back(&self, report: &[u8], first: &Child, reporter: &dyn Reporter) -> Result<u32, CommandError> {
        let ended = || CommandError::new(Exit::Failed, "the program's namespace has ended before the program was back");
        let Report { failure } = serde_json::from_slice(report).map_err(|_| ended())?;
        if let Some(failure) = failure {
            return Err(CommandError::new(Exit::Failed, failure));
        }
        let is_it = |pid: &u32| namespace::pid_there(*pid) == Some(self.manifest.process.pid);
        let pid = children(first.id()).into_iter().find(is_it).ok_or_else(ended)?;
        let listens = || matches!(Directory::open(), Ok(Some(directory)) if directory.connect(pid).is_ok());
        if !wait_until(SOCKET_WITHIN, listens) {
            return Err(CommandError::new(Exit::Failed, "the library in the program does not open its socket"));
        }
        let plan = Plan::make(self.operation(pid), reporter)?.restore_suspended(reporter)?;
        let outcome = plan.run(&Consent::default(), reporter);
        let failures = outcome.all().filter_map(|one| one.result.as_ref().err());
        CommandError::original(failures.cloned()).map_or(Ok(pid), Err)
    }
}

impl Loaded {
    /// Waits until the program ends, and passes signals on to it. Returns its exit code. [`init::hold_signals`] must have been called before there were
    /// other threads.
    pub fn wait(self) -> i32 {
        init::wait_for(self.first.id().cast_signed())
    }
}
