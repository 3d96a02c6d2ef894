//! Saves a process as an image.
//!
//! | step | undone by |
//! | --- | --- |
//! | look whether it can be saved | |
//! | hold and pause all memory | resume |
//! | the library writes the contents to the image, and keeps them there alone | the resume reads them |
//! | it leaves the driver, which locks and checkpoints the process | restore, unlock, awake |
//! | it closes its socket, as long as a lock is held | the lock |
//! | CRIU writes the process, and leaves it stopped | SIGCONT |
//! | the manifest gets its name: **the decision** | |
//! | the process is killed, or all that is undone | |
//!
//! If this command dies, the kernel gives the lock back, and a child of it ([`Guard`]) continues the process. Then the process is suspended, and any
//! `vramctl resume` brings it back.

use crate::criu::{self, Criu};
use crate::details::{Details, failed, refused, split};
use crate::guard::Guard;
use crate::look::{self, Look};
use crate::{namespace, patch};
use std::fs::{self, DirBuilder, File};

use std::io::{self, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use std::{env, iter, thread};
use vramctl_control::absence::{Mark, Marked, Says};
use vramctl_control::address::Address;
use vramctl_control::client::Client;
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::ImageName;
use vramctl_coordinator::checkpoint::{self, Checkpoint};
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::Found;
use vramctl_coordinator::{Operation, Reporter};
use vramctl_driver::{self as driver, checkpoint::GpuMap};
use vramctl_model::{Bytes, PauseRequest};
use vramctl_store::{Contents, Cpu, Gpu, Manifest, PackId, Piece, Process, Remap, Saving, Source, Store, Stream, Versions};

/// How long the process may take to close its socket, or to have it again.
const SOCKET_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What a save will do.
pub struct Save {
    checkpoint: Checkpoint,
    directory: Directory,
    request: PauseRequest,
    /// The directory of images, and the name in there.
    images: PathBuf,
    name: String,
    criu: Criu,
    keeps: bool,
}

/// What a save has done.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The process, as a message names it.
    pub process: String,
    /// Bytes of contents.
    pub contents_bytes: u64,
    /// Of these, those that are written.
    pub written_bytes: u64,
    /// Bytes of CRIU's part.
    pub process_bytes: u64,
    /// How long each stage took.
    pub stages: Vec<(&'static str, Duration)>,
}

fn cannot(why: &str) -> CommandError {
    CommandError::new(Exit::Unsuspendable, format!("{why}. Nothing has changed"))
}

impl Save {
    /// Finds the process and looks whether it can be saved. Changes nothing. `keeps`: the process goes on afterwards.
    pub fn plan(operation: &Operation, image: &Path, keeps: bool, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let criu = Criu::find()?;
        // SAFETY: touches no memory.
        if unsafe { libc::geteuid() } != 0 {
            return Err(cannot("to save a process takes root: CRIU reads all of it"));
        }
        criu.check()?;
        let Operation { target, deadline, pause, .. } = operation;
        let found = Found::look_in_turn(target, deadline)?;
        let mut checkpoint = Checkpoint::of(&found, target)?;
        let [member] = checkpoint.members.as_slice() else {
            let several: Vec<_> = checkpoint.members.iter().map(|member| member.process.to_string()).collect();
            return Err(cannot(&format!("an image is of one process, and these are {}: {}", several.len(), several.join(", "))));
        };
        if member.process.suspended().is_some() {
            return Err(cannot(&format!("{} is suspended; resume it first", member.process)));
        }
        let (pid, name) = (member.pid.cast_unsigned(), member.process.to_string());
        let directory = found.directory(member.process.pid)?;
        let request = pause.request(deadline);
        checkpoint.check_restorable(&request, reporter).map_err(|failure| failure.adding(". Nothing has changed"))?;
        let look = look::look(pid, true).map_err(|error| cannot(&format!("{name} cannot be looked at: {error}")))?;
        if !look.obstacles.is_empty() {
            return Err(cannot(&format!("{name} cannot be saved: {}", look.obstacles.join("; "))));
        }
        if fs::symlink_metadata(image.join("manifest.json")).is_ok() {
            return Err(cannot(&format!("{} is there already", image.display())));
        }
        let (images, name) = split(image)?;
        let images = std::path::absolute(images).map_err(refused("find", images))?;
        Ok(Self { checkpoint, directory, request, images, name: name.to_owned(), criu, keeps })
    }

    /// Saves it. After a failure, the process goes on.
    pub fn run(mut self, reporter: &dyn Reporter) -> Result<Saved, CommandError> {
        let guard = Guard::start().map_err(|error| cannot(&format!("no child can be started: {error}")))?;
        let store = Store::create(&self.images).map_err(failed)?;
        let saving = store.save(&self.name).map_err(failed)?;
        let (contents, packs) = (Vec::new(), Vec::new());
        let mut run = Run {
            save: &mut self,
            store,
            saving,
            contents,
            packs,
            guard,
            stages: Vec::new(),
            away: None,
            is_stopped: false,
            is_off: false,
            is_paused: false,
        };
        match run.save(reporter) {
            Ok(saved) => Ok(saved),
            Err(failure) => {
                // What is of the image goes with `run`, unless the program still needs it.
                Err(match run.undo(reporter) {
                    Ok(()) => failure.adding(". The program goes on"),
                    Err(second) => failure.adding(&format!("; {second}. `vramctl resume` tries again")),
                })
            }
        }
    }
}

impl Save {
    fn pid(&self) -> u32 {
        self.checkpoint.members.first().map_or(0, |member| member.pid.cast_unsigned())
    }
}

/// A save that has begun, and what has to be undone of it.
struct Run<'a> {
    save: &'a mut Save,
    store: Store,
    saving: Saving,
    contents: Vec<Contents>,
    /// The files that have the contents.
    packs: Vec<PackId>,
    guard: Guard,
    stages: Vec<(&'static str, Duration)>,
    /// What keeps the process from listening.
    away: Option<Marked>,
    /// CRIU has, or may have, stopped it.
    is_stopped: bool,
    /// It is, or may be, off its GPUs.
    is_off: bool,
    /// Its memory is, or may be, paused.
    is_paused: bool,
}

impl Run<'_> {
    fn pid(&self) -> u32 {
        self.save.pid()
    }

    /// The process as commands name it.
    fn known_as(&self) -> u32 {
        self.save.checkpoint.members.first().map_or(0, |member| member.process.pid)
    }

    fn client(&self) -> Result<Client, CommandError> {
        Ok(Client::connect(&self.save.directory, self.known_as())?)
    }

    fn timed<R>(&mut self, stage: &'static str, step: impl FnOnce(&mut Self) -> Result<R, CommandError>) -> Result<R, CommandError> {
        let begun = Instant::now();
        let result = step(self)?;
        self.stages.push((stage, begun.elapsed()));
        Ok(result)
    }

    fn save(&mut self, reporter: &dyn Reporter) -> Result<Saved, CommandError> {
        self.guard.watch(self.pid()).map_err(|error| cannot(&format!("the child that watches has ended: {error}")))?;
        self.is_paused = true;
        let request = self.save.request.clone();
        self.timed("pause", |run| run.save.checkpoint.pause(&request, None, reporter).map(drop))?;
        let (contents_bytes, written_bytes) = self.timed("store", Self::store)?;
        self.timed("checkpoint", |run| {
            checkpoint::load()?;
            run.is_off = true;
            run.save.checkpoint.leave_gpus(Deadline::new(run.save.request.hold), reporter)
        })?;
        self.timed("detach", Self::detach)?;
        let look = self.look()?;
        self.timed("dump", |run| run.dump(&look))?;
        let kept = self.timed("copy", Self::copy_files)?;
        let process_bytes = self.process_bytes();
        let manifest = self.describe(&look, kept)?;
        // The decision.
        self.timed("sync", |run| run.saving.finish(manifest, &run.contents).map_err(failed))?;
        let process = self.save.checkpoint.members.first().map(|member| member.process.to_string()).unwrap_or_default();
        if self.save.keeps {
            self.timed("resume", |run| run.undo(reporter))?;
        } else {
            self.kill()?;
        }
        Ok(Saved { process, contents_bytes, written_bytes, process_bytes, stages: std::mem::take(&mut self.stages) })
    }

    /// Has the library write the contents.
    fn store(&mut self) -> Result<(u64, u64), CommandError> {
        let list = Path::new("the list of contents");
        self.saving.keep_for(self.pid()).map_err(failed)?;
        let mut client = self.client()?;
        let tags = client.status()?.memory.tags;
        let bytes = tags.iter().map(|tag| tag.host_bytes + tag.disk_bytes).sum();
        let descriptors = self.saving.hand_out(bytes).map_err(failed)?;
        let mut file = memory_file().map_err(refused("make", list))?;
        let all: Vec<_> = descriptors.iter().map(AsFd::as_fd).chain([file.as_fd()]).collect();
        let stored = client.store(self.image()?, &all)?;
        file.rewind().map_err(refused("read", list))?;
        (self.contents, self.packs) = serde_json::from_reader(&file).map_err(|error| refused("read", list)(error.into()))?;
        Ok(stored)
    }

    fn image(&self) -> Result<ImageName, CommandError> {
        image_name(&self.store, &self.save.name)
    }

    /// Has the library close everything by which it is reached.
    fn detach(&mut self) -> Result<(), CommandError> {
        let (known_as, directory) = (self.known_as(), self.save.directory.clone());
        let socket = directory.path().join(directory.beside(known_as, "sock"));
        let address = Address::distinct(self.pid()).ok_or_else(|| cannot("the process has ended"))?;
        let name = self.save.checkpoint.members.first().and_then(|member| member.process.name.clone());
        let marked = Marked::new(directory.folder(), Mark::Saving, &address, &Says { name }).map_err(refused("lock", directory.path()))?;
        self.away = Some(marked.ok_or_else(|| CommandError::new(Exit::Busy, "another vramctl saves this process"))?);
        self.client()?.detach()?;
        if wait_until(SOCKET_WITHIN, || fs::symlink_metadata(&socket).is_err()) {
            return Ok(());
        }
        Err(CommandError::new(Exit::Busy, "the library has not closed its socket"))
    }

    /// Looks at the process again, now that neither the driver's files nor the library's should be open.
    fn look(&self) -> Result<Look, CommandError> {
        let look = look::look(self.pid(), false).map_err(|error| cannot(&error.to_string()))?;
        if look.obstacles.is_empty() {
            return Ok(look);
        }
        Err(CommandError::new(Exit::Unsuspendable, format!("it cannot be saved: {}", look.obstacles.join("; "))))
    }

    fn dump(&mut self, look: &Look) -> Result<(), CommandError> {
        /// How often the library may have been looking for its lock at the moment of the dump.
        const TRIES: usize = 5;
        let images = self.saving.criu_path();
        for _ in 0..TRIES {
            self.is_stopped = true;
            self.dump_to(&images, look)?;
            // It is stopped, so this is what CRIU has seen, too.
            if !self.away.as_ref().is_some_and(|away| look::has_file(self.pid(), away.name())) {
                return Ok(());
            }
            self.go_on();
            fs::remove_dir_all(&images).and_then(|()| make(&images)).map_err(refused("empty", &images))?;
        }
        Err(CommandError::new(Exit::Busy, "the library has had a file open at every attempt"))
    }

    fn dump_to(&self, images: &Path, look: &Look) -> Result<(), CommandError> {
        let work = images.join("work");
        make(&work).map_err(refused("make", &work))?;
        let open = |path: &Path| {
            let folder = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path);
            folder.map_err(refused("open", path))
        };
        let (images_open, work_open) = (open(images)?, open(&work)?);
        let mut more: Vec<_> = look.streams.iter().flatten().filter_map(|stream| stream.external.clone()).collect();
        more.dedup();
        let mut more: Vec<_> = more.into_iter().flat_map(|external| ["--external".to_owned(), external]).collect();
        if look.has_connections {
            more.extend(["--tcp-established", "--network-lock", "skip"].map(str::to_owned));
        }
        let away = self.away.as_ref().and_then(Marked::lock);
        let kept: Vec<_> = away.into_iter().map(|lock| lock.as_raw_fd()).chain([self.guard.held_open()]).collect();
        let dumped = self.save.criu.dump(self.pid(), images_open.as_fd(), work_open.as_fd(), &more, &kept);
        let said = criu::errors_in(&work);
        fs::remove_dir_all(&work).map_err(refused("remove", &work))?;
        match dumped {
            Ok(status) if status.success() => patch(images, look).map_err(refused("change", images)),
            Ok(status) => Err(CommandError::new(Exit::Failed, format!("CRIU could not write the process ({status}): {said}"))),
            Err(error) => Err(CommandError::new(Exit::Failed, format!("CRIU cannot be run: {error}"))),
        }
    }

    /// Copies what is gone when the process is.
    fn copy_files(&mut self) -> Result<Vec<Remap>, CommandError> {
        let top = self.saving.files_path();
        let mut kept = Vec::new();
        let root = PathBuf::from(format!("/proc/{}/root", self.pid()));
        let shared = look::shared_files(self.pid()).into_keys();
        let beside = |path: &PathBuf| root.join(path.strip_prefix("/").unwrap_or(path));
        // What CRIU has linked so that it is found again.
        let linked = files_in(&root.join("dev/shm")).into_iter().filter(|name| name.starts_with("link_remap."));
        let mut paths: Vec<_> = shared.chain(linked.map(|name| Path::new("/dev/shm").join(name))).collect();
        paths.sort();
        paths.dedup();
        for (number, path) in paths.into_iter().enumerate() {
            let from = beside(&path);
            let found = fs::symlink_metadata(&from).map_err(refused("look at", &path))?;
            let name = number.to_string();
            fs::copy(&from, top.join(&name)).map_err(refused("copy", &path))?;
            let to = path.to_string_lossy().into_owned();
            kept.push(Remap { from: name, to, mode: found.mode() & 0o7777, uid: found.uid(), gid: found.gid() });
        }
        Ok(kept)
    }

    fn process_bytes(&self) -> u64 {
        let sizes = |folder: &Path| {
            fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>()
        };
        sizes(&self.saving.criu_path()) + sizes(&self.saving.files_path())
    }

    /// What the image says of itself.
    fn describe(&self, look: &Look, remaps: Vec<Remap>) -> Result<Manifest, CommandError> {
        let member = self.save.checkpoint.members.first().ok_or_else(|| cannot("there is no process"))?;
        let hello = member.process.status.as_ref().map(|status| status.process.clone()).ok();
        let there = namespace::pid_there(self.pid()).ok_or_else(|| cannot("the process has ended"))?;
        let gpus: Vec<_> = member.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let cards = driver::cards().unwrap_or_default();
        let card = |uuid: &String| cards.iter().find(|card| card.uuid == *uuid);
        let gpu = |uuid: &String| Gpu { uuid: uuid.clone(), bytes: card(uuid).map_or(0, |card| card.total), ..Gpu::default() };
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let streams = look
            .streams
            .iter()
            .zip(0..)
            .filter_map(|(stream, descriptor)| Some(Stream { process: there, descriptor, was: stream.as_ref()?.name.clone() }));
        let mut manifest = Manifest {
            saved_at: SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
            versions: Versions {
                vramctl: env!("CARGO_PKG_VERSION").into(),
                library: hello.as_ref().map(|hello| hello.library.clone()).unwrap_or_default(),
                criu: self.save.criu.version().into(),
                kernel: kernel.trim().into(),
                ..Versions::default()
            },
            cpu: Cpu { architecture: env::consts::ARCH.into(), ..Cpu::default() },
            page_size: 4096,
            gpus: gpus.iter().map(gpu).collect(),
            processes: vec![Process {
                pid: there,
                kind: "library".into(),
                name: hello.as_ref().map(|hello| hello.name.clone()).unwrap_or_default(),
                gpus,
                ..look::credentials(self.pid())
            }],
            streams: streams.collect(),
            remaps,
            ..Manifest::default()
        };
        Details {
            program: hello.map(|hello| hello.program).unwrap_or_default(),
            sockets: self.save.directory.path().to_owned(),
            gpus: member.gpus.clone(),
            cuda: driver::cuda_version().map(|version| version.to_string()).unwrap_or_default(),
            has_connections: look.has_connections,
        }
        .put(&mut manifest);
        Ok(manifest)
    }

    /// Ends the process, which goes on from the image.
    fn kill(&mut self) -> Result<(), CommandError> {
        let failed =
            |error: std::io::Error| CommandError::new(Exit::Failed, format!("the image is complete, but the process lives: {error}"));
        // SAFETY: touches no memory.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid(), 0) };
        if opened < 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        // SAFETY: just opened, and nobody else's.
        let process = unsafe { OwnedFd::from_raw_fd(opened as libc::c_int) };
        // SAFETY: as above; there are no details of the signal.
        let sent = unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), libc::SIGKILL, std::ptr::null::<libc::siginfo_t>(), 0)
        };
        if sent != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        // Until then, its lock keeps it from being taken for one that somebody has deleted the socket of.
        let mut ended = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, writable.
        unsafe { libc::poll(&raw mut ended, 1, SOCKET_WITHIN.as_millis() as libc::c_int) };
        self.away.take().into_iter().for_each(Marked::remove);
        (self.is_stopped, self.is_off, self.is_paused) = (false, false, false);
        self.saving.release();
        Ok(())
    }

    fn go_on(&mut self) {
        // SAFETY: touches no memory.
        unsafe { libc::kill(self.pid().cast_signed(), libc::SIGCONT) };
        self.is_stopped = false;
    }

    /// Undoes what has been done.
    fn undo(&mut self, reporter: &dyn Reporter) -> Result<(), CommandError> {
        if self.is_stopped {
            self.go_on();
        }
        self.away.iter_mut().for_each(Marked::let_go);
        if self.is_off {
            let known_as = self.known_as();
            let directory = self.save.directory.clone();
            if !wait_until(SOCKET_WITHIN, || directory.connect(known_as).is_ok()) {
                let ended = self.away.take_if(|_| namespace::pid_there(self.save.pid()).is_none());
                ended.into_iter().for_each(Marked::remove);
                return Err(CommandError::new(Exit::Busy, "the process has not opened its socket again"));
            }
            self.away.take().into_iter().for_each(Marked::remove);
            self.save.checkpoint.restore(&GpuMap::new(), &Deadline::new(None), reporter)?;
            self.is_off = false;
        }
        if self.is_paused {
            self.give_contents()?;
            self.save.checkpoint.resume(reporter)?;
            self.is_paused = false;
        }
        self.saving.release();
        Ok(())
    }

    /// Gives the library the files by which it reads its contents: it may have no right to open them.
    fn give_contents(&self) -> Result<(), CommandError> {
        if self.packs.is_empty() {
            return Ok(());
        }
        let source = Source::new(&self.save.name, self.store.open_packs(&self.packs).map_err(failed)?);
        // Each is where it was put.
        send_origin(&mut self.client()?, self.image()?, &source, &[])
    }
}

/// The image's name in a request.
pub fn image_name(store: &Store, name: &str) -> Result<ImageName, CommandError> {
    let directory = store.images_path().to_str().ok_or_else(|| cannot("the name of the directory of images is not UTF-8"))?;
    Ok(ImageName { directory: directory.to_owned(), name: name.to_owned() })
}

/// Gives a process the files by which it reads its contents, and where the pieces are.
pub fn send_origin(client: &mut Client, image: ImageName, source: &Source, pieces: &[Piece]) -> Result<(), CommandError> {
    let list = Path::new("the list of pieces");
    let mut file = memory_file().map_err(refused("make", list))?;
    serde_json::to_writer(&file, pieces).map_err(|error| refused("write", list)(error.into()))?;
    file.rewind().map_err(refused("write", list))?;
    let (packs, descriptors) = source.descriptors().map_err(failed)?;
    let all: Vec<BorrowedFd<'_>> = [file.as_fd()].into_iter().chain(descriptors.iter().map(AsFd::as_fd)).collect();
    Ok(client.set_origin(image, packs.into_iter().map(|pack| pack.0).collect(), &all)?)
}

fn memory_file() -> io::Result<File> {
    // SAFETY: a NUL-terminated name.
    let number = unsafe { libc::memfd_create(c"vramctl-image".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: just opened, and nobody else's.
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { File::from_raw_fd(number) }) }
}

fn make(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(folder)
}

/// What replaces a plain file as a stream may have another size.
fn patch(images: &Path, look: &Look) -> std::io::Result<()> {
    let is_replaced = |name: &str| look.streams.iter().flatten().any(|stream| stream.name == name);
    let path = images.join("files.img");
    fs::write(&path, patch::replaced(&fs::read(&path)?, &is_replaced)?)
}

fn files_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Waits until this is so, and returns whether it is.
pub fn wait_until(within: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + within;
    let mut looks = iter::from_fn(|| {
        let is_over = Instant::now() >= deadline;
        let found = is_so();
        if !found && !is_over {
            thread::sleep(LOOK_EVERY);
        }
        Some(if found { Some(true) } else { is_over.then_some(false) })
    });
    looks.find_map(|look| look).unwrap_or_default()
}

impl std::fmt::Display for Saved {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let took: Duration = self.stages.iter().map(|(_, took)| *took).sum();
        let stages: Vec<_> = self.stages.iter().map(|(stage, took)| format!("{stage} {}", took.as_millis())).collect();
        write!(
            out,
            "saved {}: {} of contents, {} of them written, and {} of the process in {} ms\n  {} ms",
            self.process,
            Bytes(self.contents_bytes),
            Bytes(self.written_bytes),
            Bytes(self.process_bytes),
            took.as_millis(),
            stages.join(", ")
        )
    }
}
