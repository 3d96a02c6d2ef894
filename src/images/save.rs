//! Saves a program, a process and all that came of it, as an image.
//!
//! | step | undone by |
//! | --- | --- |
//! | look whether it can be saved | |
//! | idle engines reset their prefix caches: their KV caches are not kept | |
//! | hold and pause all memory | resume |
//! | the library writes the contents to the image, and keeps them there alone | the resume reads them |
//! | the driver locks the processes without memory; look whether there are others now | unlock |
//! | the library leaves the driver, which locks and checkpoints all | restore, unlock, awake |
//! | the library closes its sockets, as long as a lock is held | the lock |
//! | CRIU writes the processes, and leaves them stopped | SIGCONT |
//! | the manifest gets its name: **the decision** | |
//! | the processes are killed, or all that is undone | |
//!
//! If this command dies, the kernel gives the locks back, and a child of it ([`Guard`]) continues the processes, and frees those that only it knows.
//! Then the program is suspended, and any `vramctl resume` brings it back.

use crate::bare::Bare;
use crate::criu::{self, Criu};
use crate::details::{Details, failed, refused, split};
use crate::guard::{self, Guard};
use crate::look::{self, Look};
use crate::patch::{self, Link};
use crate::shared;
use crate::tree::{self, Kind, Tree};
use crate::{content, namespace, own_files, surroundings};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Seek};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use std::{iter, thread};
use vramctl_control::absence::{Mark, Marked, Says};
use vramctl_control::address::Address;
use vramctl_control::client::Client;
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::ImageName;
use vramctl_coordinator::checkpoint::{self, Checkpoint, Member};
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};
use vramctl_coordinator::{Operation, Reporter, parallel, proc};
use vramctl_driver::{self as driver, checkpoint::GpuMap};
use vramctl_model::{Bytes, GpuUse, PauseRequest};
use vramctl_store::{
    Allocation, Connection, Contents, FilePolicy, Gpu, Listener, Manifest, OpenFile, PackId, Piece, Process, Remap, Saving, Source, Store,
    Stream, Versions,
};

/// How long the process may take to close its socket, or to have it again.
const SOCKET_WITHIN: Duration = Duration::from_secs(10);
/// How long another program may be written.
const NAMES_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What a save will do.
pub struct Save {
    /// The processes.
    tree: Tree,
    /// Those with memory of the library's.
    checkpoint: Checkpoint,
    directory: Directory,
    request: PauseRequest,
    /// The directory of images, and the name in there.
    images: PathBuf,
    name: String,
    criu: Criu,
    keeps: bool,
    verifies: bool,
    copies_files: bool,
    /// How long it has taken to find out.
    looked: Duration,
}

/// How a program is to be saved.
#[derive(Debug, Clone, Copy, Default)]
pub struct HowToSave {
    /// It goes on afterwards.
    pub keeps: bool,
    /// The image is read back, and the program ends only if all is as it was written.
    pub verifies: bool,
    /// The image has copies of the files that the program writes at any place.
    pub copies_files: bool,
}

/// What a save has done.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The program, as a message names it.
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
    /// Finds the program and looks whether it can be saved. Changes nothing.
    pub fn plan(operation: &Operation, image: &Path, how: HowToSave, reporter: &dyn Reporter) -> Result<Self, CommandError> {
        let HowToSave { keeps, verifies, copies_files } = how;
        let begun = Instant::now();
        let criu = Criu::find()?;
        // SAFETY: touches no memory.
        if unsafe { libc::geteuid() } != 0 {
            return Err(cannot("to save a process takes root: CRIU reads all of it"));
        }
        criu.check()?;
        let Operation { target, deadline, pause, .. } = operation;
        let chosen = Checkpoint::of(&Found::look_in_turn(target, deadline)?, target)?;
        let seen: Vec<_> = chosen.members.iter().map(|member| member.pid.cast_unsigned()).filter(|pid| *pid != 0).collect();
        if seen.len() < chosen.members.len() {
            return Err(cannot("it is in another container: run vramctl there"));
        }
        let root = match target {
            Target::Pid(_) => seen.first().copied().ok_or_else(|| cannot("there is no process"))?,
            _ => tree::root_of(&seen)?,
        };
        let directory = chosen.found.directory(chosen.pids().first().copied().unwrap_or_default())?;
        if let Some(why) = shared::hidden("its control socket is in", directory.path(), shared::SOCKETS_ELSEWHERE) {
            return Err(cannot(&why));
        }
        let mut tree = Tree::of(root, &listening(&directory));
        let mut checkpoint = whole(operation, &tree, chosen)?;
        if let Some(member) = checkpoint.members.iter().find(|member| member.process.suspended().is_some()) {
            return Err(cannot(&format!("{} is suspended; resume it first", member.process)));
        }
        let request = pause.request(deadline);
        checkpoint.check_restorable(&request, reporter).map_err(|failure| failure.adding(". Nothing has changed"))?;
        let program = named(&checkpoint, &tree);
        let looked = look_at(&mut tree, &directory);
        let looked = looked.map_err(|error| cannot(&format!("{program} cannot be looked at: {error}")))?;
        let come_and_go = || CommandError::new(Exit::Busy, "at every attempt, a process had just started or ended. The program goes on");
        let (look, obstacles) = looked.ok_or_else(come_and_go)?;
        if !obstacles.is_empty() {
            return Err(cannot(&format!("{program} cannot be saved: {}", obstacles.join("; "))));
        }
        if !look.outside.is_empty() {
            let all: Vec<_> = look.outside.iter().map(|one| format!("{} to {}", one.local, one.remote)).collect();
            let what = "connections to outside are not in the image: whoever uses one after a load gets an error";
            reporter.warn(&format!("{what} ({})", all.join(", ")));
        }
        if fs::symlink_metadata(image.join("manifest.json")).is_ok() {
            return Err(cannot(&format!("{} is there already", image.display())));
        }
        let (images, name) = split(image)?;
        let images = std::path::absolute(images).map_err(refused("find", images))?;
        Ok(Self {
            tree,
            checkpoint,
            directory,
            request,
            images,
            name: name.to_owned(),
            criu,
            keeps,
            verifies,
            copies_files,
            looked: begun.elapsed(),
        })
    }

    /// Saves it. After a failure, the program goes on.
    pub fn run(mut self, reporter: &dyn Reporter) -> Result<Saved, CommandError> {
        let guard = Guard::start().map_err(|error| cannot(&format!("no child can be started: {error}")))?;
        let store = Store::create(&self.images).map_err(failed)?;
        let saving = store.save(&self.name).map_err(failed)?;
        let part = |member: &Member| Part::new(member.pid.cast_unsigned(), member.process.pid);
        let parts = self.checkpoint.members.iter().map(part).collect::<Result<_, _>>()?;
        let stages = vec![("look", self.looked)];
        let mut run = Run {
            save: &mut self,
            store,
            saving: Some(saving),
            contents: Vec::new(),
            parts,
            guard,
            stages,
            links: Vec::new(),
            stay: BTreeSet::new(),
            is_stopped: false,
            is_off: false,
            is_paused: false,
        };
        match run.save(reporter) {
            Ok(saved) => Ok(saved),
            Err(failure) => {
                // What is of the image goes with `run`, unless the program still needs it.
                Err(match run.undo(reporter) {
                    // Then all that came of it ends, too, or is no program.
                    _ if proc::has_ended(run.root()) => failure.adding(". The program has ended"),
                    Ok(()) => failure.adding(". The program goes on"),
                    Err(second) => failure.adding(&format!("; {second}. `vramctl resume` tries again")),
                })
            }
        }
    }
}

/// What has been seen of a program, and what is in the way. `None`: at every attempt, something else was.
fn look_at(tree: &mut Tree, directory: &Directory) -> io::Result<Option<(Look, Vec<String>)>> {
    /// How often, if it starts processes all the time.
    const TRIES: usize = 10;
    let cards = driver::cards().unwrap_or_default();
    let mut before = Obstacles::default();
    for _ in 0..TRIES {
        let (look, obstacles) = all_in_the_way(tree, &cards)?;
        if let Some(stands) = before.standing(obstacles) {
            return Ok(Some((look, stands)));
        }
        *tree = Tree::of(tree.root(), &listening(directory));
    }
    Ok(None)
}

/// What has been in the way at the last look.
#[derive(Default)]
struct Obstacles(Vec<String>);

impl Obstacles {
    /// Those that are still there; none if nothing is in the way now. `None`: all are new. What is seen once may be of a process that has just begun,
    /// or has ended since.
    fn standing(&mut self, now: Vec<String>) -> Option<Vec<String>> {
        let stand: Vec<_> = now.iter().filter(|one| self.0.contains(one)).cloned().collect();
        let is_known = now.is_empty() || !stand.is_empty();
        self.0 = now;
        is_known.then_some(stand)
    }
}

fn all_in_the_way(tree: &Tree, cards: &[driver::Card]) -> io::Result<(Look, Vec<String>)> {
    let look = look::look(&tree.pids(), true)?;
    let holders: Vec<_> = cards.iter().flat_map(|card| driver::holders_of(&card.uuid)).collect();
    let obstacles = [tree.obstacles(&holders), look.obstacles.clone()].concat();
    Ok((look, obstacles))
}

/// The processes that have memory of the library's.
fn listening(directory: &Directory) -> BTreeSet<u32> {
    directory.processes().unwrap_or_default().into_iter().collect()
}

/// Those of the tree. `chosen`: some of them.
fn whole(operation: &Operation, tree: &Tree, chosen: Checkpoint) -> Result<Checkpoint, CommandError> {
    let of_library = tree.nodes().iter().filter(|node| node.kind == Kind::Library);
    let pids: Vec<_> = of_library.map(|node| node.pid).collect();
    if pids.len() == chosen.members.len() {
        return Ok(chosen);
    }
    let target = Target::of(pids.into_iter().map(Target::Pid).collect()).ok_or_else(|| cannot("there is no process"))?;
    Checkpoint::of(&Found::look_in_turn(&target, &operation.deadline)?, &target)
}

/// The program in messages.
fn named(checkpoint: &Checkpoint, tree: &Tree) -> String {
    let first = checkpoint.members.first().map(|member| member.process.to_string()).unwrap_or_default();
    match tree.nodes().len() {
        1 => first,
        count => format!("{first} and what belongs to it, {count} processes"),
    }
}

/// A process with memory of the library's.
struct Part {
    pid: u32,
    /// As commands name it.
    known_as: u32,
    /// As the program names it.
    there: u32,
    /// The files that have its contents.
    packs: Vec<PackId>,
    /// What keeps it from listening.
    away: Option<Marked>,
}

impl Part {
    fn new(pid: u32, known_as: u32) -> Result<Self, CommandError> {
        Ok(Self { pid, known_as, there: pid_there(pid)?, packs: Vec::new(), away: None })
    }

    fn has_ended(&self) -> bool {
        proc::has_ended(self.pid)
    }
}

/// A save that has begun, and what has to be undone of it.
struct Run<'a> {
    save: &'a mut Save,
    store: Store,
    /// `None` once the image is there and others may look at it.
    saving: Option<Saving>,
    contents: Vec<Contents>,
    parts: Vec<Part>,
    guard: Guard,
    stages: Vec<(&'static str, Duration)>,
    /// The names that CRIU has given.
    links: Vec<Link>,
    /// Those that somebody else had stopped.
    stay: BTreeSet<u32>,
    /// CRIU has, or may have, stopped it.
    is_stopped: bool,
    /// It is, or may be, off its GPUs.
    is_off: bool,
    /// Its memory is, or may be, paused.
    is_paused: bool,
}

impl Run<'_> {
    fn root(&self) -> u32 {
        self.save.tree.root()
    }

    fn bare(&self) -> Bare {
        Bare::new(self.save.tree.bare())
    }

    fn client(&self, part: &Part) -> Result<Client, CommandError> {
        Ok(Client::connect(&self.save.directory, part.known_as)?)
    }

    fn timed<R>(&mut self, stage: &'static str, step: impl FnOnce(&mut Self) -> Result<R, CommandError>) -> Result<R, CommandError> {
        let begun = Instant::now();
        let result = step(self)?;
        self.stages.push((stage, begun.elapsed()));
        Ok(result)
    }

    fn save(&mut self, reporter: &dyn Reporter) -> Result<Saved, CommandError> {
        self.watch()?;
        self.is_paused = true;
        if self.save.request.options.forgets_cache {
            self.reset_prefix_caches();
        }
        let request = self.save.request.clone();
        self.timed("pause", |run| run.save.checkpoint.pause(&request, None, reporter).map(drop))?;
        let (contents_bytes, written_bytes) = self.timed("store", Self::store)?;
        self.timed("checkpoint", |run| run.leave_gpus(reporter))?;
        self.timed("detach", Self::detach)?;
        let names = self.lock_names()?;
        let look = self.timed("dump", Self::dump)?;
        let kept = self.timed("copy", |run| run.copy_files(&look))?;
        drop(names);
        let process_bytes = self.process_bytes();
        let manifest = self.timed("describe", |run| run.describe(&look, kept))?;
        // The decision.
        self.timed("sync", |run| {
            let Run { saving, contents, .. } = run;
            saving.as_mut().map_or(Ok(()), |saving| saving.finish(manifest, contents)).map_err(failed)
        })?;
        let process = named(&self.save.checkpoint, &self.save.tree);
        if self.save.keeps {
            let kept = self.timed("resume", |run| run.undo(reporter));
            kept.map_err(|failure| {
                failure.clone().saying(format!("the image is complete, but the program could not be brought back at once: {failure}"))
            })?;
        }
        if self.save.verifies {
            self.timed("verify", Self::verify)?;
        }
        if !self.save.keeps {
            self.timed("end", Self::kill)?;
        }
        Ok(Saved { process, contents_bytes, written_bytes, process_bytes, stages: std::mem::take(&mut self.stages) })
    }

    /// The KV cache of an idle engine is worth less than its copy. One that has requests keeps it: the pause finds out.
    fn reset_prefix_caches(&self) {
        let reset = |part: &Part| self.client(part).is_ok_and(|mut client| client.reset_prefix_cache(None).is_ok());
        let _ = parallel::each_well(&self.parts, reset);
    }

    /// Has the library write the contents of each process.
    fn store(&mut self) -> Result<(u64, u64), CommandError> {
        let list = Path::new("the list of contents");
        let (mut contents_bytes, mut written_bytes) = (0, 0);
        for place in 0..self.parts.len() {
            let part = &self.parts[place];
            self.saving()?.keep_for(part.pid).map_err(failed)?;
            let mut client = self.client(part)?;
            let tags = client.status()?.memory.tags;
            let bytes = tags.iter().map(|tag| tag.host_bytes + tag.disk_bytes).sum();
            let descriptors = self.saving()?.hand_out(bytes).map_err(failed)?;
            let mut file = memory_file().map_err(refused("make", list))?;
            let all: Vec<_> = descriptors.iter().map(AsFd::as_fd).chain([file.as_fd()]).collect();
            let (its_bytes, its_written) = client.store(self.image()?, &all)?;
            file.rewind().map_err(refused("read", list))?;
            let described: (Vec<Contents>, Vec<PackId>) =
                serde_json::from_reader(&file).map_err(|error| refused("read", list)(error.into()))?;
            let process = part.there;
            self.contents
                .extend(described.0.into_iter().map(|contents| Contents { of: Allocation { process, ..contents.of }, ..contents }));
            self.parts[place].packs = described.1;
            contents_bytes += its_bytes;
            written_bytes += its_written;
        }
        Ok((contents_bytes, written_bytes))
    }

    /// Has the driver lock and checkpoint all: first those without memory, as there may be more of them by then.
    fn leave_gpus(&mut self, reporter: &dyn Reporter) -> Result<(), CommandError> {
        let deadline = Deadline::new(self.save.request.hold);
        checkpoint::load()?;
        self.is_off = true;
        loop {
            for pid in self.save.tree.bare() {
                self.guard.watch_bare(pid).map_err(not_watched)?;
            }
            self.bare().lock(deadline.left_or_a_moment())?;
            let now = self.tree_now();
            let is_known = |pid: &u32| self.parts.iter().any(|part| part.pid == *pid);
            let new = now.nodes().iter().filter(|node| node.kind == Kind::Library).map(|node| node.pid).find(|pid| !is_known(pid));
            if let Some(pid) = new {
                return Err(CommandError::new(Exit::Busy, format!("{} has allocated GPU memory meanwhile; try again", tree::named(pid))));
            }
            let is_as_before = now.bare() == self.save.tree.bare();
            self.save.tree = now;
            if is_as_before {
                break;
            }
        }
        self.save.checkpoint.leave_gpus(deadline, reporter)?;
        self.bare().checkpoint()
    }

    /// The processes that there are now. Those that were known keep their kind: what is checkpointed has nothing open.
    fn tree_now(&self) -> Tree {
        let known: BTreeSet<_> = self.save.tree.pids().into_iter().collect();
        let now = Tree::of(self.root(), &self.parts.iter().map(|part| part.pid).collect());
        let has_new = now.pids().iter().any(|pid| !known.contains(pid));
        let now = if has_new { Tree::of(self.root(), &listening(&self.save.directory)) } else { now };
        now.with_kinds_of(&self.save.tree)
    }

    fn image(&self) -> Result<ImageName, CommandError> {
        image_name(&self.store, &self.save.name)
    }

    /// Has each library close everything by which it is reached.
    fn detach(&mut self) -> Result<(), CommandError> {
        let directory = self.save.directory.clone();
        for (part, member) in self.parts.iter_mut().zip(&self.save.checkpoint.members) {
            let address = Address::distinct(part.pid).ok_or_else(|| cannot("the process has ended"))?;
            let says = Says { name: member.process.name.clone() };
            let marked = Marked::new(directory.folder(), Mark::Saving, &address, &says).map_err(refused("lock", directory.path()))?;
            part.away = Some(marked.ok_or_else(|| CommandError::new(Exit::Busy, "another vramctl saves this process"))?);
        }
        let sockets: Vec<_> = self.parts.iter().map(|part| directory.path().join(directory.beside(part.known_as, "sock"))).collect();
        for part in &self.parts {
            self.client(part)?.detach()?;
        }
        let are_gone = || sockets.iter().all(|socket| fs::symlink_metadata(socket).is_err());
        if wait_until(SOCKET_WITHIN, are_gone) {
            return Ok(());
        }
        Err(CommandError::new(Exit::Busy, "the library has not closed its socket"))
    }

    /// From now on, all of them go on whatever becomes of this command.
    fn watch(&mut self) -> Result<(), CommandError> {
        let pids = self.save.tree.pids();
        self.stay = pids.iter().copied().filter(|pid| tree::is_stopped(*pid)).collect();
        self.stay.iter().try_for_each(|pid| self.guard.leave_stopped(*pid)).map_err(not_watched)?;
        self.guard.watch(&pids).map_err(not_watched)
    }

    /// Looks at the processes again, now that neither the driver's files nor the library's should be open.
    /// `None`: something is in the way that was not there before.
    fn look(&self, before: &mut Obstacles) -> Result<Option<Look>, CommandError> {
        let mut look = look::look(&self.save.tree.pids(), false).map_err(|error| cannot(&error.to_string()))?;
        match before.standing(look.obstacles.clone()) {
            None => Ok(None),
            Some(stand) if stand.is_empty() => {
                look.copy(&self.copied(&look));
                Ok(Some(look))
            }
            Some(stand) => Err(CommandError::new(Exit::Unsuspendable, format!("it cannot be saved: {}", stand.join("; ")))),
        }
    }

    /// The files of which the image gets copies: if it is not asked for, those of which the program has its own.
    fn copied(&self, look: &Look) -> BTreeSet<PathBuf> {
        let root = self.root_folder();
        let is_meant =
            |path: &&PathBuf| !path.starts_with(self.save.directory.path()) && (self.save.copies_files || own_files::is_own(&root, path));
        look.written.iter().filter(is_meant).cloned().collect()
    }

    /// Keeps others from being written meanwhile if CRIU has to give names, which are the same for every program.
    fn lock_names(&self) -> Result<Option<File>, CommandError> {
        if !shared::has_other_names(&self.save.tree.pids()) {
            return Ok(None);
        }
        let (root, mut locked) = (self.root_folder(), Ok(None));
        let is_decided = || {
            locked = shared::lock(&root);
            !matches!(locked, Ok(None))
        };
        if wait_until(NAMES_WITHIN, is_decided) {
            return locked.map_err(refused("lock", &root.join("dev/shm")));
        }
        Err(CommandError::new(Exit::Busy, "another program with shared memory is being saved"))
    }

    /// The program's root, as seen from here.
    fn root_folder(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.root()))
    }

    /// Returns what CRIU has seen.
    fn dump(&mut self) -> Result<Look, CommandError> {
        /// How often the library may have been looking for its lock at the moment of the dump, or the program may have started or ended a process.
        const TRIES: usize = 5;
        let images = self.saving()?.criu_path();
        let mut before = Obstacles::default();
        for _ in 0..TRIES {
            self.save.tree = self.tree_now();
            let Some(look) = self.look(&mut before)? else { continue };
            self.watch()?;
            self.is_stopped = true;
            shared::unlink_what_is_left(&self.save.tree.pids().into_iter().collect());
            self.dump_to(&images, &look)?;
            self.links = shared::links_in(&images).map_err(refused("read", &images))?;
            if let Some(link) = self.links.iter().find(|link| !shared::is_here(&link.name)) {
                let was = link.was.display();
                let text = format!("it has {was} open, which was removed while the file has another name; have it closed");
                return Err(CommandError::new(Exit::Unsuspendable, text));
            }
            // CRIU has written no memory of one that had ended before.
            if let Some(part) = self.parts.iter().find(|part| !images.join(format!("mm-{}.img", part.there)).exists()) {
                return Err(CommandError::new(Exit::NoProcess, format!("{} has ended meanwhile", tree::named(part.pid))));
            }
            // All are stopped, so this is what CRIU has seen, too.
            let has_file = self.parts.iter().any(|part| part.away.as_ref().is_some_and(|away| look::has_file(part.pid, away.name())));
            if !has_file && self.tree_now() == self.save.tree {
                return Ok(look);
            }
            self.go_on();
            fs::remove_dir_all(&images).and_then(|()| make(&images)).map_err(refused("empty", &images))?;
        }
        Err(CommandError::new(Exit::Busy, "at every attempt, a process had just started or ended, or the library had a file open"))
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
        let locks = self.parts.iter().filter_map(|part| part.away.as_ref()?.lock()).map(|lock| lock.as_raw_fd());
        let kept: Vec<_> = locks.chain([self.guard.held_open()]).collect();
        let dump = || self.save.criu.dump(self.root(), images_open.as_fd(), work_open.as_fd(), &more, &kept);
        let dumped = while_written_back(images, dump);
        let said = criu::errors_in(&work);
        fs::remove_dir_all(&work).map_err(refused("remove", &work))?;
        match dumped {
            Ok(status) if status.success() => patch(images, look, &self.save.tree.pids()).map_err(refused("change", images)),
            Ok(_) if shared::are_names_taken(&said) => {
                let names = shared::names_taken(&self.root_folder()).join(", ");
                let what = "CRIU has no names for the program's shared memory, because of some that another CRIU has left";
                Err(CommandError::new(Exit::Unsuspendable, format!("{what}: {names}; remove them, unless somebody restores from them")))
            }
            Ok(status) => Err(CommandError::new(Exit::Failed, format!("CRIU could not write the process ({status}): {said}"))),
            Err(error) => Err(CommandError::new(Exit::Failed, format!("CRIU cannot be run: {error}"))),
        }
    }

    /// Copies what is gone when the process is, and removes what CRIU has left.
    fn copy_files(&mut self, look: &Look) -> Result<Vec<Remap>, CommandError> {
        let (root, files) = (self.root_folder(), self.saving()?.files_path());
        let kept = shared::copy(&self.save.tree.pids(), &root, &self.links, &files)?;
        self.unlink();
        let copied = look.files.iter().filter(|file| file.policy == FilePolicy::Copy).map(|file| PathBuf::from(&file.path)).collect();
        let own = own_files::copy(&root, &copied, &self.saving()?.criu_path(), &files)?;
        Ok([kept, own].concat())
    }

    fn unlink(&mut self) {
        shared::unlink(&self.root_folder(), &self.links);
        self.links.clear();
    }

    fn process_bytes(&self) -> u64 {
        let sizes = |folder: &Path| {
            fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>()
        };
        self.saving.as_ref().map_or(0, |saving| sizes(&saving.criu_path()) + sizes(&saving.files_path()))
    }

    fn saving(&self) -> Result<&Saving, CommandError> {
        self.saving.as_ref().ok_or_else(|| cannot("the save has ended"))
    }

    /// Reads the image back.
    fn verify(&mut self) -> Result<(), CommandError> {
        // Its name is this save's alone.
        self.saving = None;
        let found = self.store.inspect(&self.save.name).and_then(|image| image.verify()).map_err(failed)?;
        if found.errors.is_empty() {
            return Ok(());
        }
        let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
        let text = format!("what was written is not what is read back: {}; `vramctl images` removes it", errors.join("; "));
        Err(CommandError::new(Exit::Failed, text))
    }

    /// What the image says of itself.
    fn describe(&self, look: &Look, remaps: Vec<Remap>) -> Result<Manifest, CommandError> {
        let members = &self.save.checkpoint.members;
        let hello = |pid: u32| {
            let member = members.iter().find(|member| member.pid.cast_unsigned() == pid)?;
            Some((member, member.process.status.as_ref().ok()?.process.clone()))
        };
        let first = members.first().and_then(|member| hello(member.pid.cast_unsigned())).map(|(_, hello)| hello);
        let there = pid_there(self.root())?;
        let mut needed = BTreeMap::<String, u64>::new();
        for gpu in members.iter().flat_map(|member| &member.gpus) {
            *needed.entry(gpu.uuid.clone()).or_default() += gpu.bytes;
        }
        let cards = driver::cards().unwrap_or_default();
        let machine = cards.iter().map(|card| Gpu { uuid: card.uuid.clone(), model: card.name.clone(), bytes: card.total });
        let machine: Vec<_> = machine.collect();
        // Those that NVML does not show come last.
        let unknown = needed.keys().filter(|uuid| machine.iter().all(|gpu| gpu.uuid != **uuid));
        let unknown = unknown.map(|uuid| Gpu { uuid: uuid.clone(), ..Gpu::default() });
        let seen = machine.iter().filter(|gpu| needed.contains_key(&gpu.uuid)).cloned().chain(unknown).collect();
        let process = |node: &tree::Node| {
            let known = hello(node.pid);
            Ok(Process {
                pid: pid_there(node.pid)?,
                parent: if node.pid == self.root() { 0 } else { pid_there(node.parent)? },
                kind: node.kind.to_string(),
                name: known.as_ref().map(|(_, hello)| hello.name.clone()).unwrap_or_default(),
                gpus: known.iter().flat_map(|(member, _)| &member.gpus).map(|gpu| gpu.uuid.clone()).collect(),
                ..look::credentials(node.pid)
            })
        };
        let known = |file: &OpenFile| {
            let path = PathBuf::from(format!("/proc/{}/root/{}", self.root(), file.path));
            let content = (file.policy == FilePolicy::Read).then(|| content::of(&path)).flatten();
            OpenFile { content, ..file.clone() }
        };
        let connection =
            |one: &look::Outside| Ok(Connection { process: pid_there(one.pid)?, local: one.local.clone(), remote: one.remote.clone() });
        let listener = |(pid, address): &(u32, SocketAddr)| Ok(Listener { process: pid_there(*pid)?, address: address.to_string() });
        let streams = look
            .streams
            .iter()
            .zip(0..)
            .filter_map(|(stream, descriptor)| Some(Stream { process: there, descriptor, was: stream.as_ref()?.name.clone() }));
        let mut manifest = Manifest {
            saved_at: SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
            versions: Versions {
                vramctl: env!("CARGO_PKG_VERSION").into(),
                library: first.as_ref().map(|hello| hello.library.clone()).unwrap_or_default(),
                criu: self.save.criu.version().into(),
                ..surroundings::versions()
            },
            cpu: surroundings::processor(),
            page_size: 4096,
            gpus: seen,
            processes: self.save.tree.nodes().iter().map(process).collect::<Result<_, CommandError>>()?,
            listeners: look.listeners.iter().map(listener).collect::<Result<_, CommandError>>()?,
            connections: look.outside.iter().map(connection).collect::<Result<_, CommandError>>()?,
            streams: streams.collect(),
            // The library looks for its lock now and then.
            files: look.files.iter().filter(|file| !Path::new(&file.path).starts_with(self.save.directory.path())).map(known).collect(),
            remaps,
            ..Manifest::default()
        };
        Details {
            program: first.map(|hello| hello.program).unwrap_or_default(),
            sockets: self.save.directory.path().to_owned(),
            gpus: needed.into_iter().map(|(uuid, bytes)| GpuUse { uuid, bytes }).collect(),
            contents: self.contents_by_gpu(),
            machine,
            cuda: driver::cuda_version().map(|version| version.to_string()).unwrap_or_default(),
            has_connections: look.has_connections,
            folders: look.folders.iter().filter(|folder| !folder.starts_with(self.save.directory.path())).cloned().collect(),
            locks: look.locks.iter().filter(|lock| !lock.path.starts_with(self.save.directory.path())).cloned().collect(),
        }
        .put(&mut manifest);
        Ok(manifest)
    }

    /// The bytes that the allocations need on each GPU.
    fn contents_by_gpu(&self) -> Vec<GpuUse> {
        let mut found = BTreeMap::<String, u64>::new();
        for (part, member) in self.parts.iter().zip(&self.save.checkpoint.members) {
            let devices = member.process.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
            for of in self.contents.iter().map(|contents| &contents.of).filter(|of| of.process == part.there) {
                let device = devices.iter().find(|device| device.device.cast_unsigned() == of.gpu);
                if let Some(uuid) = device.and_then(|device| device.uuid.clone()) {
                    *found.entry(uuid).or_default() += of.bytes;
                }
            }
        }
        found.into_iter().map(|(uuid, bytes)| GpuUse { uuid, bytes }).collect()
    }

    /// Ends the program, which goes on from the image. All of it is stopped, so nothing new comes of it. Children go first: the kernel continues those
    /// that lose their parent.
    fn kill(&mut self) -> Result<(), CommandError> {
        let failed = |error: io::Error| CommandError::new(Exit::Failed, format!("the image is complete, but the program lives: {error}"));
        for pid in self.save.tree.pids().into_iter().rev() {
            kill(pid).or_else(|error| if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(failed(error)) })?;
        }
        self.parts.iter_mut().filter_map(|part| part.away.take()).for_each(Marked::remove);
        (self.is_stopped, self.is_off, self.is_paused) = (false, false, false);
        self.saving.iter().for_each(Saving::release);
        Ok(())
    }

    fn go_on(&mut self) {
        self.unlink();
        guard::go_on(&self.save.tree.pids(), &self.stay);
        self.is_stopped = false;
    }

    /// Undoes what has been done.
    fn undo(&mut self, reporter: &dyn Reporter) -> Result<(), CommandError> {
        if self.is_stopped {
            self.go_on();
        }
        self.parts.iter_mut().filter_map(|part| part.away.as_mut()).for_each(Marked::let_go);
        self.leave_out_ended();
        if self.is_off {
            // As far as that goes, whatever becomes of the others.
            let freed = self.bare().free();
            let directory = self.save.directory.clone();
            // Not always where each has listened before: of two with the same id in their namespaces, the other may have ended.
            let are_there = || {
                let there = listening(&directory);
                self.parts.iter().all(|part| there.contains(&part.known_as) || part.has_ended())
            };
            if !wait_until(SOCKET_WITHIN, are_there) {
                return Err(CommandError::new(Exit::Busy, "the process has not opened its socket again"));
            }
            self.leave_out_ended();
            self.parts.iter_mut().filter_map(|part| part.away.take()).for_each(Marked::remove);
            if !self.parts.is_empty() {
                self.save.checkpoint.restore(&GpuMap::new(), &Deadline::new(None), reporter)?;
            }
            freed?;
            self.is_off = false;
        }
        if self.is_paused && !self.parts.is_empty() {
            self.parts.iter().try_for_each(|part| self.give_contents(part))?;
            self.save.checkpoint.resume(reporter)?;
        }
        self.is_paused = false;
        self.saving.iter().for_each(Saving::release);
        Ok(())
    }

    /// Those that have ended need nothing of what is undone.
    fn leave_out_ended(&mut self) {
        self.parts.extract_if(.., |part| part.has_ended()).filter_map(|part| part.away).for_each(Marked::remove);
        let parts = &self.parts;
        self.save.checkpoint.members.retain(|member| parts.iter().any(|part| part.known_as == member.process.pid));
    }

    /// Gives the library the files by which it reads its contents: it may have no right to open them.
    fn give_contents(&self, part: &Part) -> Result<(), CommandError> {
        if part.packs.is_empty() {
            return Ok(());
        }
        let source = Source::new(&self.save.name, self.store.open_packs(&part.packs).map_err(failed)?);
        // Each is where it was put.
        send_origin(&mut self.client(part)?, self.image()?, &source, &[])
    }
}

/// Has the disk write the files of a folder while they are being made: all must be durable before the program is killed.
fn while_written_back<R>(folder: &Path, work: impl FnOnce() -> R) -> R {
    const EVERY: Duration = Duration::from_millis(50);
    /// Dropped by a panic, too, which would else wait for the thread for ever.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_over = AtomicBool::new(false);
    let write_back = || {
        while !is_over.load(Ordering::Relaxed) {
            let files = fs::read_dir(folder).into_iter().flatten().flatten();
            for file in files.filter_map(|file| File::open(file.path()).ok()) {
                // SAFETY: touches no memory. What it does not write is written later.
                unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
            }
            thread::sleep(EVERY);
        }
    };
    thread::scope(|scope| {
        // Without one, it is only slower.
        let _ = thread::Builder::new().spawn_scoped(scope, write_back);
        let _ends = Ends(&is_over);
        work()
    })
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn not_watched(error: io::Error) -> CommandError {
    cannot(&format!("the child that watches has ended: {error}"))
}

/// The id of a process in its own namespace.
fn pid_there(pid: u32) -> Result<u32, CommandError> {
    namespace::pid_there(pid).ok_or_else(|| CommandError::new(Exit::NoProcess, format!("process {pid} has ended")))
}

/// Kills a process, and waits for its end: until then, the lock of its library keeps it from being taken for one that somebody has deleted the socket
/// of.
fn kill(pid: u32) -> io::Result<()> {
    // SAFETY: touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let process = unsafe { OwnedFd::from_raw_fd(opened as libc::c_int) };
    // SAFETY: as above; there are no details of the signal.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), libc::SIGKILL, std::ptr::null::<libc::siginfo_t>(), 0) };
    if sent != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut ended = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, writable.
    unsafe { libc::poll(&raw mut ended, 1, SOCKET_WITHIN.as_millis() as libc::c_int) };
    Ok(())
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

/// What replaces a plain file as a stream may have another size and is not locked, connections to outside are closed, and a terminal is not that of a
/// session outside. `pids`: all processes of the image.
fn patch(images: &Path, look: &Look, pids: &[u32]) -> io::Result<()> {
    let changes = patch::Changes {
        is_replaced: &|name| {
            let grows = |file: &OpenFile| file.policy == FilePolicy::Append && file.path == name;
            look.streams.iter().flatten().any(|stream| stream.name == name) || look.files.iter().any(grows)
        },
        is_closed: &|inode| look.outside.iter().any(|one| one.inode == inode),
    };
    let path = images.join("files.img");
    fs::write(&path, patch::changed(&fs::read(&path)?, &changes)?)?;
    let locks = images.join("filelocks.img");
    if locks.exists() {
        let there: BTreeSet<_> = look.replaced.iter().filter_map(|(pid, number)| Some((namespace::pid_there(*pid)?, *number))).collect();
        let is_replaced = |pid: u64, number: u64| there.contains(&(pid as u32, number as u32));
        fs::write(&locks, patch::without_locks(&fs::read(&locks)?, &is_replaced)?)?;
    }
    let terminals = images.join("tty-info.img");
    if terminals.exists() {
        let there: BTreeSet<_> = pids.iter().filter_map(|pid| namespace::pid_there(*pid)).map(u64::from).collect();
        fs::write(&terminals, patch::without_other_sessions(&fs::read(&terminals)?, &|leader| there.contains(&leader))?)?;
    }
    for one in &look.outside {
        // What was on its way.
        match fs::remove_file(images.join(format!("tcp-stream-{:x}.img", one.inode))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A child between its fork and its exec has its parent's pipe, and is gone at the next look.
    #[test]
    fn what_is_in_the_way_stands_once_it_has_been_seen_twice() {
        let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut seen = Obstacles::default();
        assert_eq!(seen.standing(all(&["a pipe to one", "a device"])), None);
        assert_eq!(seen.standing(all(&["a pipe to another", "a device"])), Some(all(&["a device"])));
        assert_eq!(seen.standing(all(&["a pipe to a third"])), None);
        assert_eq!(seen.standing(all(&["a pipe to a fourth"])), None);
        assert_eq!(seen.standing(Vec::new()), Some(Vec::new()));
    }
}
