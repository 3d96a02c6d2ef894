//! Starts a program from an image.
//!
//! It gets a PID and a mount namespace of its own, with a first process that is vramctl's ([`init`](crate::init)), so that an image can be loaded
//! several times at once, and on another day.

use crate::bare::Bare;
use crate::copies::Agreement;
use crate::criu::Criu;
use crate::details::{Details, counted, failed, refused, split};
use crate::init::{self, Report, Task};
use crate::look;
use crate::namespace::{self, pid_there};
use crate::placement::{Placement, Saved};
use crate::read_ahead::{self, ReadAhead};
use crate::relay::Port;
use crate::save::{image_name, send_origin, wait_until};
use crate::shared::{self, SOCKETS_ELSEWHERE};
use crate::surroundings;
use crate::tree::{Kind, Tree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{env, io};
use vramctl_config::socket_directory;
use vramctl_control::client::Client;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::checkpoint::{check_driver, room_for, short};
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::lock::FileLock;
use vramctl_coordinator::operation::HowToPause;
use vramctl_coordinator::plan::STAY_SUSPENDED;
use vramctl_coordinator::processes::{self, Target};
use vramctl_coordinator::{Consent, Operation, Plan, Reporter, Scope, proc};
use vramctl_driver::checkpoint::GpuMap;
use vramctl_driver::{self as driver, Card};
use vramctl_model::{Bytes, Verb, checked_name, support};
use vramctl_store::{Caller, Image, Listed, Manifest, Process, Store};

/// How long the library may take to listen, once the program is back.
const SOCKET_WITHIN: Duration = Duration::from_secs(30);

/// What a load will do.
pub struct Load {
    store: Store,
    image: Image,
    details: Details,
    name: String,
    streams: Streams,
    /// For each copy in turn.
    placements: Vec<Placement>,
    /// Of a network of its own. `None`: it has this command's.
    ports: Option<Vec<Port>>,
    /// With other copies.
    agreement: Option<Agreement>,
    timeout: Option<Duration>,
}

/// How a program is to be loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Its name, if it is not to be that which it had.
    pub name: Option<String>,
    /// Where its streams lead.
    pub streams: Streams,
    /// The GPUs that it is to get, as the user names them. None: its own, or those that can only be meant.
    pub gpus: Vec<String>,
    /// Whether another driver than that of the save is tried.
    pub any_driver: bool,
    /// So many copies, each with a number in its name, and with as many of the GPUs as it needs, in turn.
    pub copies: Option<u16>,
    /// Of the wait for room on the GPUs.
    pub timeout: Option<Duration>,
}

/// Where the program's standard streams lead.
#[derive(Debug, Clone, Default)]
pub struct Streams {
    /// The file to which it writes, in place of this command's own streams.
    pub log: Option<PathBuf>,
    /// Whether it has none of this command's.
    pub detached: bool,
}

impl Streams {
    /// Why the program cannot go on with these: CRIU sets the modes of a terminal only on another.
    fn no_terminal_for(&self, manifest: &Manifest) -> Option<CommandError> {
        // SAFETY: touches no memory.
        let is_terminal = |number: i32| !self.detached && (number == 0 || self.log.is_none()) && unsafe { libc::isatty(number) } == 1;
        init::streams(manifest).into_iter().find(|(number, name)| name.starts_with("tty[") && !is_terminal(*number))?;
        let why = "its streams were a terminal, and what takes their place is none: load it on one (such as by `script -qec 'vramctl load …' LOG`), and \
                   start programs that are to be saved without (`vramctl run -d`). Nothing was started";
        Some(CommandError::new(Exit::Failed, why))
    }
}

/// A program that runs again.
#[derive(Debug)]
pub struct Loaded {
    /// Its id. `None`: it has ended by itself already.
    pub pid: Option<u32>,
    /// Its name.
    pub name: String,
    /// The GPUs that it has in place of others, for people.
    pub placement: String,
    /// It has no network, in which another copy has its addresses.
    pub lost_network: bool,
    /// How long each stage took.
    pub stages: Vec<(&'static str, Duration)>,
    first: Child,
}

impl Load {
    /// Looks whether the image can be loaded. Starts nothing.
    pub fn plan(image: &Path, options: &LoadOptions, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let (load, obstacles) = Self::look(image, options, reporter);
        let all = obstacles.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        match (load, obstacles.into_iter().next()) {
            (Some(load), None) => Ok(load),
            (_, first) => Err(first.unwrap_or_else(|| CommandError::new(Exit::Failed, "there is no image")).saying(all)),
        }
    }

    /// The same, with all that is in the way. `None` if the image itself cannot be used.
    pub fn look(image: &Path, options: &LoadOptions, reporter: &dyn Reporter) -> (Option<Self>, Vec<CommandError>) {
        let LoadOptions { name, streams, timeout, .. } = options.clone();
        let mut obstacles = Vec::new();
        // SAFETY: touches no memory.
        if unsafe { libc::geteuid() } == 0 {
            match Criu::find().and_then(|criu| criu.check().map(|()| criu)) {
                Ok(criu) => obstacles.extend(not_hidden("CRIU is", criu.program(), "install it elsewhere")),
                Err(failure) => obstacles.push(failure),
            }
        } else {
            let why = "to load an image takes root: it makes namespaces, and CRIU brings the process back";
            obstacles.push(CommandError::new(Exit::Failed, why));
        }
        let opened = split(image).and_then(|(directory, image)| {
            let store = Store::open(directory).map_err(failed)?;
            let image = Caller::current().and_then(|caller| store.load(image, &caller)).map_err(failed)?;
            let details = Details::of(image.manifest())?;
            Ok((store, image, details))
        });
        let (store, image, details) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                obstacles.push(failure);
                return (None, obstacles);
            }
        };
        obstacles.extend(in_surroundings(image.manifest(), &details));
        obstacles.extend(streams.no_terminal_for(image.manifest()));
        if let Some(other) = surroundings::other_kernel(&image.manifest().versions, &surroundings::versions()) {
            reporter.warn(&other);
        }
        obstacles.extend(in_driver(image.manifest(), &details, options.any_driver, reporter));
        let old = init::program_name(image.manifest()).unwrap_or_default();
        let name = name.unwrap_or_else(|| old.to_owned());
        obstacles.extend(checked_name(&name).err().map(|why| CommandError::new(Exit::Usage, why.to_string())));
        let sockets = socket_directory();
        if *sockets != details.sockets {
            let text = format!(
                "the program's control socket is in {}, and this command looks in {}: set VRAMCTL_DIR to the former",
                details.sockets.display(),
                sockets.display()
            );
            obstacles.push(CommandError::new(Exit::Failed, text));
        }
        obstacles.extend(not_hidden("the control sockets are in", sockets, SOCKETS_ELSEWHERE));
        let placed = placements(image.manifest(), &details, options).unwrap_or_else(|failure| {
            obstacles.push(failure);
            Vec::new()
        });
        let has_all = |placement: &Placement| placement.map.is_empty() || placement.map.len() >= details.machine.len();
        if !placed.iter().all(has_all) {
            let had = counted(details.machine.len(), "GPU", "s");
            reporter.warn(&format!(
                "the machine of the save had {had}, and the driver may want one for each, also for those that the program had not"
            ));
        }
        let load = Self { store, image, details, name, streams, placements: placed, ports: None, agreement: None, timeout };
        (Some(load), obstacles)
    }

    /// What is in the way now and may not be later: memory, of which a load waits for its `--timeout`, and ports.
    /// `copies`: that many, each with a number in its name.
    pub fn look_for_room(&self, copies: Option<u16>) -> Vec<CommandError> {
        let (are_numbered, copies) = (copies.is_some(), copies.unwrap_or(1));
        let mut needs = BTreeMap::<&str, u64>::new();
        for placement in self.placements.iter().cycle().take(copies.into()) {
            for gpu in &self.details.gpus {
                let contents: u64 = self.details.contents.iter().filter(|of| of.uuid == gpu.uuid).map(|of| of.bytes).sum();
                *needs.entry(placement.onto(&gpu.uuid)).or_default() += room_for(gpu.bytes) + contents;
            }
        }
        let cards = driver::cards().unwrap_or_default();
        let is_short = |card: &Card| needs.get(&*card.uuid).copied().filter(|needed| *needed > card.free);
        let short = cards.iter().filter_map(|card| Some(short(card, is_short(card)?)));
        let names = (1..=copies).map(|number| if are_numbered { format!("{}-{number}", self.name) } else { self.name.clone() });
        let names_taken = names.filter_map(|name| name_taken(&name));
        let taken =
            (0..copies).flat_map(|further| self.ports.iter().flatten().map(move |port| port.further(further))).filter_map(
                |port| match port {
                    Some(port) => listen(&port).err(),
                    None => Some(CommandError::new(Exit::Usage, "there are not so many ports")),
                },
            );
        short.chain(names_taken).chain(self.listeners_taken()).chain(taken).collect()
    }

    /// The addresses at which the program will listen in this network.
    fn listeners(&self) -> BTreeSet<SocketAddr> {
        let all = self.image.manifest().listeners.iter().filter(|_| self.ports.is_none());
        all.filter_map(|one| one.address.parse().ok()).collect()
    }

    /// Keeps other loads from these ports until the program listens there.
    fn lock_ports(&self) -> Result<Vec<FileLock>, CommandError> {
        let ports: BTreeSet<_> = self.listeners().iter().map(SocketAddr::port).collect();
        let lock = |port: u16| match FileLock::take(&format!("load-port-{port}.lock"), Duration::ZERO) {
            Ok(lock) => Ok(lock),
            Err(others) => {
                let why = format!("{} loads a program that listens at port {port}, too. Nothing was started", others.who());
                Err(CommandError::new(Exit::Busy, why))
            }
        };
        ports.into_iter().filter_map(|port| lock(port).transpose()).collect()
    }

    /// Waits until the kernel has let go of what ended processes have left at the ports: CRIU could not listen there.
    fn wait_for_ports(&self, reporter: &dyn Reporter) {
        /// Longer than the kernel keeps anything.
        const GONE_WITHIN: Duration = Duration::from_secs(70);
        let is_kept = |address: &SocketAddr| TcpListener::bind(*address).is_err() && look::is_left_behind(address.port());
        if let Some(kept) = self.listeners().iter().find(|address| is_kept(address)) {
            let what = "the kernel keeps connections of a program that has ended";
            reporter.warn(&format!("{what} at {kept}, for a minute at most: the load waits for that"));
            wait_until(GONE_WITHIN, || !self.listeners().iter().any(is_kept));
        }
    }

    /// Those where others listen.
    fn listeners_taken(&self) -> Vec<CommandError> {
        let taken = |address: SocketAddr| {
            let error = TcpListener::bind(address).err()?;
            let port = address.port();
            if look::is_left_behind(port) {
                return None;
            }
            let way = format!("end who listens there, or give it a network of its own (--port {port}=NEW)");
            Some(CommandError::new(Exit::Failed, format!("the program listens at {address}: {error}; {way}. Nothing was started")))
        };
        self.listeners().into_iter().filter_map(taken).collect()
    }

    fn contents_bytes(&self) -> u64 {
        self.image.manifest().contents.iter().filter(|listed| !listed.of.ranges.is_empty()).map(|listed| listed.of.bytes).sum()
    }

    /// Its name, and what it needs of the machine, for people.
    pub fn in_words(&self) -> String {
        let manifest = self.image.manifest();
        let (processes, gpus) = (counted(manifest.processes.len(), "process", "es"), counted(self.details.gpus.len(), "GPU", "s"));
        let contents = Bytes(self.contents_bytes());
        let places = self.placements.iter().map(Placement::in_words).filter(|words| !words.is_empty());
        let first = format!("{} can be loaded: {processes}, {contents} of contents, on {gpus}", self.name);
        [first].into_iter().chain(places).collect::<Vec<_>>().join("\n  ")
    }

    /// The program gets a network of its own: nothing leads there but these ports, and nothing leads out.
    #[must_use]
    pub fn with_own_network(self, ports: Vec<Port>, reporter: &dyn Reporter) -> Self {
        let listeners = self.listeners();
        for port in ports.iter().filter(|port| listeners.iter().all(|one| one.port() != port.old)) {
            let at = listeners.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let at = if at.is_empty() { "no port".into() } else { at };
            reporter.warn(&format!("the program listens at {at}, and not at port {}, which is to be reached at {}", port.old, port.new));
        }
        Self { ports: Some(ports), ..self }
    }

    /// It goes on once the others do.
    #[must_use]
    pub fn with_agreement(self, agreement: Option<Agreement>) -> Self {
        Self { agreement, ..self }
    }

    fn operation(&self, target: Target) -> Operation {
        let scope = Scope::Tags { words: Vec::new(), may_name: false, gpus: Vec::new() };
        Operation::new(Verb::Resume, target, scope, Deadline::new(self.timeout), HowToPause::default())
    }

    /// Starts it. After a failure, nothing of it is left.
    pub fn run(self, reporter: &dyn Reporter) -> Result<Loaded, CommandError> {
        let mut stages = Vec::new();
        let begun = Instant::now();
        // Of two loads at once, one is first.
        let lock = FileLock::take(&format!("load-{}.lock", self.name.replace('/', "_")), Duration::ZERO).map_err(|others| {
            CommandError::new(Exit::Busy, format!("{} loads a program of the name {}. Nothing was started", others.who(), self.name))
        })?;
        // With SO_REUSEPORT, both would listen, and each would get some of the requests.
        let ports = self.lock_ports()?;
        let interruptible = Interruptible::begin().map_err(refused("watch", Path::new("signals")))?;
        self.wait_for_ports(reporter);
        if let Some(taken) = name_taken(&self.name).into_iter().chain(self.listeners_taken()).next() {
            return Err(taken);
        }
        let (mut first, mut report, mut decision) = self.start()?;
        let mut text = Vec::new();
        let ahead = ReadAhead::of(&self.image).ok();
        // Others read the same at the same time.
        let by_cache = self.agreement.is_some() && ahead.as_ref().is_some_and(ReadAhead::has_room);
        let reading = ahead.and_then(|ahead| ahead.begin().ok());
        let _ = report.read_to_end(&mut text);
        drop(reading);
        drop(ports);
        stages.push(("restore", begun.elapsed()));
        let begun = Instant::now();
        let brought = self.bring_back(&text, &first, by_cache, reporter);
        let brought = brought.and_then(|pid| self.agreement.map_or(Ok(()), Agreement::reach).map(|()| pid));
        // From now on, signals are the program's.
        drop((interruptible, lock));
        stages.push(("resume", begun.elapsed()));
        let failure = match brought {
            Err(failure) if !self.has_ended_by_itself(&text, &first) => failure,
            brought => {
                // If nobody reads it, the program has ended by itself meanwhile.
                let _ = decision.write_all(&[1]);
                let placement = self.placements.first().map(Placement::in_words).unwrap_or_default();
                let lost_network = serde_json::from_slice::<Report>(&text).is_ok_and(|report| report.lost_network);
                return Ok(Loaded { pid: brought.ok(), name: self.name, placement, lost_network, stages, first });
            }
        };
        let ended = first.try_wait().ok().flatten();
        // The namespace ends with its first process.
        let _ = first.kill();
        let _ = first.wait();
        let said = failure.to_string();
        // That would be so if it were not loaded.
        let said = said.strip_suffix(STAY_SUSPENDED).unwrap_or(&said);
        Err(match ended {
            Some(status) => CommandError::new(Exit::Failed, format!("the program has ended before it was back ({status}): {said}")),
            None => failure.saying(format!("{said}. Nothing of the program is left")),
        })
    }

    /// Starts the first process of the namespaces. It reports through the first file, and ends if the second is closed before anything is written to it.
    fn start(&self) -> Result<(Child, File, File), CommandError> {
        let cannot = |error: io::Error| CommandError::new(Exit::Failed, format!("cannot start the program's namespace: {error}"));
        self.agreement.map_or(Ok(()), Agreement::keep_to_itself).map_err(cannot)?;
        let [(report, reports), (decision, decides)] = [init::pipe().map_err(cannot)?, init::pipe().map_err(cannot)?];
        let directory = self.store.images_path().to_owned();
        let listeners = self.ports.iter().flatten().map(|port| Ok((port.old, listen(port)?))).collect::<Result<Vec<_>, CommandError>>()?;
        let ports: Vec<_> = listeners.iter().map(|(port, listener)| (*port, listener.as_raw_fd())).collect();
        let task = Task {
            directory,
            own_network: self.ports.as_ref().map(|_| ports.clone()),
            image: self.image.name().to_owned(),
            name: self.name.clone(),
            report: reports.as_raw_fd(),
            decision: decision.as_raw_fd(),
        };
        let mut command = Command::new(env::current_exe().map_err(cannot)?);
        command.args(["image-init", &task.to_argument()]);
        let files: Vec<_> = ports.iter().map(|(_, file)| *file).chain([reports.as_raw_fd(), decision.as_raw_fd()]).collect();
        crate::criu::inherit(&mut command, &files);
        if self.streams.detached {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        }
        if let Some(log) = &self.streams.log {
            let opened = File::options().append(true).create(true).mode(0o600).open(log).map_err(refused("open", log))?;
            command.stdout(opened.try_clone().map_err(cannot)?).stderr(opened);
        }
        let child = namespace::spawn_apart(&mut command).map_err(cannot)?;
        Ok((child, report, decides))
    }

    /// Whether the program has ended after it was there again, as it may at any time. Then its namespace ends as it has. `report`: the first process's.
    fn has_ended_by_itself(&self, report: &[u8], first: &Child) -> bool {
        let was_there = serde_json::from_slice::<Report>(report).is_ok_and(|report| report.failure.is_none());
        let root = self.image.manifest().processes.first().map(|process| process.pid);
        let lives = |pid: &u32| pid_there(*pid) == root && !proc::has_ended(*pid);
        was_there && !Tree::of(first.id(), &BTreeSet::new()).pids().iter().any(lives)
    }

    /// Gives the program its memory back, and lets it run. `report`: the first process's. `by_cache`: its contents are read by the page cache alone.
    fn bring_back(&self, report: &[u8], first: &Child, by_cache: bool, reporter: &dyn Reporter) -> Result<u32, CommandError> {
        /// A process that has hung up may take so long to end.
        const ENDS_WITHIN: Duration = Duration::from_millis(200);
        let ended = || CommandError::new(Exit::Failed, "the program's namespace has ended before the program was back");
        let Report { failure, .. } = serde_json::from_slice(report).map_err(|_| ended())?;
        if let Some(failure) = failure {
            return Err(CommandError::new(Exit::Failed, failure));
        }
        let back = self.processes(first.id())?;
        let of_kind = |kinds: &[Kind]| {
            let is_meant = |(process, _): &&(&Process, u32)| kinds.iter().any(|kind| process.kind == kind.to_string());
            back.iter().filter(is_meant).copied().collect::<Vec<_>>()
        };
        let of_library = of_kind(&[Kind::Library]);
        let listens = |pid: u32| matches!(Directory::open(), Ok(Some(directory)) if directory.connect(pid).is_ok());
        let ended_one = || of_library.iter().find(|(_, pid)| proc::has_ended(pid));
        let are_there = wait_until(SOCKET_WITHIN, || ended_one().is_some() || of_library.iter().all(|(_, pid)| listens(*pid)));
        if let Some((process, _)) = ended_one() {
            return Err(has_ended(process));
        }
        if !are_there {
            return Err(CommandError::new(Exit::Failed, "the library in the program does not open its socket"));
        }
        let bare = of_kind(&[Kind::Driver, Kind::Nvml]).into_iter().map(|(_, pid)| pid).collect();
        let given = of_library.iter().try_for_each(|(process, pid)| self.give_contents(process, *pid, by_cache));
        if let Err(failure) = given.and_then(|()| self.resume(&of_library, bare, reporter)) {
            // One that has ended in the middle of that is the reason, whatever its client says.
            wait_until(ENDS_WITHIN, || ended_one().is_some());
            return Err(ended_one().map_or(failure, |(process, _)| has_ended(process)));
        }
        back.first().map(|(_, pid)| *pid).ok_or_else(ended)
    }

    /// Gives these processes the GPUs, and has them get their contents. `bare`: those without memory of the library's.
    fn resume(&self, of_library: &[(&Process, u32)], bare: Vec<u32>, reporter: &dyn Reporter) -> Result<(), CommandError> {
        let target = Target::of(of_library.iter().map(|(_, pid)| Target::Pid(*pid)).collect());
        let target = target.ok_or_else(|| CommandError::new(Exit::Failed, "the image has no process with GPU memory"))?;
        let own = GpuMap::new();
        let map = self.placements.first().map_or(&own, |placement| &placement.map);
        let plan = Plan::make(self.operation(target), reporter)?.restore_suspended_on(map, reporter)?;
        // They have a CUDA context at most, and those above have the room that they need.
        Bare::new(bare).free_on(map)?;
        let outcome = plan.run(&Consent::default(), reporter);
        let failures = outcome.all().filter_map(|one| one.result.as_ref().err());
        CommandError::original(failures.cloned()).map_or(Ok(()), Err)
    }

    /// The processes of the image, each with its id as seen from here. `first`: that of their namespace. One without memory of the library's may have
    /// ended meanwhile, as it may a moment later.
    fn processes(&self, first: u32) -> Result<Vec<(&Process, u32)>, CommandError> {
        let there: BTreeMap<_, _> =
            Tree::of(first, &BTreeSet::new()).pids().into_iter().filter_map(|pid| Some((pid_there(pid)?, pid))).collect();
        let all = &self.image.manifest().processes;
        let is_needed = |process: &Process| process.parent == 0 || process.kind == Kind::Library.to_string();
        if let Some(missing) = all.iter().find(|process| is_needed(process) && !there.contains_key(&process.pid)) {
            return Err(has_ended(missing));
        }
        Ok(all.iter().filter_map(|process| Some((process, *there.get(&process.pid)?))).collect())
    }

    /// Gives the library in a process the files by which it reads its contents.
    fn give_contents(&self, process: &Process, pid: u32, by_cache: bool) -> Result<(), CommandError> {
        // An image of one process may have been written by a version that knew no others.
        let is_its = |listed: &&Listed| [0, process.pid].contains(&listed.of.process);
        let listed = self.image.manifest().contents.iter().filter(is_its);
        let pieces = listed.map(|listed| self.image.pieces_of(listed)).collect::<Result<Vec<_>, _>>().map_err(failed)?.concat();
        let source = self.image.source(&pieces).map_err(failed)?;
        let source = if by_cache { Arc::new(read_ahead::by_cache(&source, self.image.name())?) } else { source };
        let gone = || CommandError::new(Exit::NoProcess, "the program has ended");
        let directory = Directory::open().ok().flatten().ok_or_else(gone)?;
        send_origin(&mut Client::connect(&directory, pid)?, image_name(&self.store, self.image.name())?, &source, &pieces)
    }
}

/// While this is, a signal that ends programs ends this command. As it has not decided yet, nothing is left of the program then.
struct Interruptible {
    stop: Option<File>,
    watch: Option<JoinHandle<()>>,
}

impl Interruptible {
    /// [`init::hold_signals`] must have been called.
    fn begin() -> io::Result<Self> {
        let mut signals = init::ends()?;
        let (stopped, stop) = init::pipe()?;
        let watch = move || {
            let mut files = [&signals, &stopped].map(|file| libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            // SAFETY: two structures, writable.
            while unsafe { libc::poll(files.as_mut_ptr(), 2, -1) } < 0 {}
            if files[1].revents == 0
                && let Ok(signal) = init::next_signal(&mut signals)
            {
                eprintln!("interrupted: nothing of the program is left");
                process::exit(128 + signal);
            }
        };
        Ok(Self { stop: Some(stop), watch: Some(thread::Builder::new().spawn(watch)?) })
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        drop(self.stop.take());
        // It ends at once.
        let _ = self.watch.take().map(JoinHandle::join);
    }
}

fn has_ended(process: &Process) -> CommandError {
    let name = if process.name.is_empty() { String::new() } else { format!("{}, ", process.name) };
    CommandError::new(Exit::NoProcess, format!("a process of the program has ended meanwhile ({name}there {})", process.pid))
}

/// The name of the program of an image, and how many GPUs it has.
pub fn known_of(image: &Path) -> Result<(String, usize), CommandError> {
    let (directory, image) = split(image)?;
    let image = Store::open(directory).and_then(|store| store.inspect(image)).map_err(failed)?;
    Ok((init::program_name(image.manifest()).unwrap_or_default().to_owned(), image.manifest().gpus.len()))
}

/// The GPUs of each copy in turn: as many of those that the user names as a program has.
fn placements(manifest: &Manifest, details: &Details, options: &LoadOptions) -> Result<Vec<Placement>, CommandError> {
    let cards = driver::cards().map_err(|none| CommandError::new(Exit::Failed, none.to_string()))?;
    let saved = Saved { own: &manifest.gpus, all: &details.machine };
    let each = gpus_of_copies(&options.gpus, manifest.gpus.len(), options.copies);
    let mut found = each.map(|named| Placement::find(saved, named, &cards)).collect::<Result<Vec<_>, _>>()?;
    if let Err(too_old) = check_driver(&support::MOVE) {
        if found.iter().any(Placement::is_elsewhere) {
            return Err(too_old.adding(". Nothing was started"));
        }
        // It cannot be told that they are where they were.
        for placement in &mut found {
            placement.map.clear();
        }
    }
    Ok(found)
}

/// The GPUs of each copy in turn, of those that are named for all. `own`: how many each has. What cannot be divided so is left whole.
pub fn gpus_of_copies(gpus: &[String], own: usize, copies: Option<u16>) -> impl Iterator<Item = &[String]> {
    let is_divided = copies.is_some() && own > 0 && gpus.len().is_multiple_of(own) && !gpus.is_empty();
    let (each, count) = if is_divided { (own, gpus.len() / own) } else { (gpus.len(), 1) };
    (0..count).map(move |place| &gpus[place * each..(place + 1) * each])
}

/// Whether the driver is another one than that of the save. `is_tried`: then it is only told.
fn in_driver(manifest: &Manifest, details: &Details, is_tried: bool, reporter: &dyn Reporter) -> Option<CommandError> {
    let cuda = driver::cuda_version().map(|version| version.to_string()).unwrap_or_default();
    let other = surroundings::other_driver((&manifest.versions, &details.cuda), (&surroundings::versions(), &cuda))?;
    if is_tried {
        reporter.warn(&other);
        return None;
    }
    let why =
        format!("{other}: a driver restores what the same one has saved, and --any-driver tries it with another. Nothing was started");
    Some(CommandError::new(Exit::Failed, why))
}

/// Why the program could not go on here as it was.
fn in_surroundings(manifest: &Manifest, details: &Details) -> Vec<CommandError> {
    /// More says nothing more.
    const MOST_NAMED: usize = 5;
    let mut found = Vec::new();
    found.extend(surroundings::lacks_of(&manifest.cpu, &surroundings::processor()));
    found.extend(manifest.processes.iter().map(|process| process.pid).max().and_then(surroundings::no_such_id));
    let taken = surroundings::taken(&details.locks);
    if !taken.is_empty() {
        found.push(format!("it has a lock on each of these files, which are locked: {}; end whoever has them", taken.join(", ")));
    }
    let missing = surroundings::missing(&details.folders);
    if !missing.is_empty() {
        found.push(format!("folders that it has open or works in are not here: {}; make them", missing.join(", ")));
    }
    let changes = surroundings::changes(&manifest.files);
    if !changes.is_empty() {
        let more =
            changes.len().checked_sub(MOST_NAMED).filter(|more| *more > 0).map_or_else(String::new, |more| format!(", and {more} more"));
        let named = changes.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join(", ");
        found.push(format!(
            "files that it has open or loaded have changed since it was saved: {named}{more}; put them back, or save it anew"
        ));
    }
    let refused = |why| CommandError::new(Exit::Failed, format!("the program cannot go on here: {why}. Nothing was started"));
    found.into_iter().map(refused).collect()
}

/// Fails for what the program would not see, as it gets a `/dev/shm` of its own.
fn not_hidden(what: &str, path: &Path, remedy: &str) -> Option<CommandError> {
    let why = shared::hidden(what, path, remedy)?;
    Some(CommandError::new(Exit::Failed, format!("{why}. Nothing was started")))
}

/// Why no program can be called so now.
fn name_taken(name: &str) -> Option<CommandError> {
    let directory = Directory::open().ok().flatten()?;
    let listening = processes::ask(&directory, &directory.processes().ok()?).into_iter().map(|process| (process.pid, process.name));
    let absent = directory.absent().into_iter().map(|absent| (absent.pid, absent.name));
    let (pid, _) = listening.chain(absent).find(|(_, its)| its.as_deref() == Some(name))?;
    Some(CommandError::new(Exit::Failed, format!("process {pid} is called {name}; give it another name (--name). Nothing was started")))
}

fn listen(port: &Port) -> Result<TcpListener, CommandError> {
    port.listen().map_err(|error| CommandError::new(Exit::Failed, format!("cannot listen at {}: {error}", port.new)))
}

impl Loaded {
    /// Waits until the program ends, and passes signals on to it. Returns its exit code. [`init::hold_signals`] must have been called before there were
    /// other threads.
    pub fn wait(self) -> i32 {
        init::wait_for(self.first.id().cast_signed())
    }
}
