//! The first process of a loaded program's PID namespace: brings the program back, reaps, passes signals on, and ends as the program does.

use crate::criu::{Criu, errors_in, inherit};
use crate::details::{Details, failed, refused};
use crate::namespace::{self, mount};
use crate::own_files;
use crate::patch;
use crate::relay;
use crate::shared;
use crate::tree::Kind;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use std::{mem, ptr, thread};
use vramctl_control::absence::{Mark, Marked, Says};
use vramctl_control::address::Address;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_store::{Manifest, Process, Store};

/// What it is told, as its only argument.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// The directory of images.
    pub directory: PathBuf,
    /// The image's name.
    pub image: String,
    /// The program's name.
    pub name: String,
    /// Whether the program gets a network of its own, and its ports there with the sockets outside that lead to them.
    pub own_network: Option<Vec<(u16, RawFd)>>,
    /// The descriptor to which it writes a [`Report`].
    pub report: RawFd,
    /// The descriptor from which it reads a byte once all is done. At its end before that, whoever loads has died, and nothing is left of the program.
    pub decision: RawFd,
}

/// What it says once the program is back, or is not.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Why not.
    pub failure: Option<String>,
    /// It is back without a network, in which another copy has its addresses.
    #[serde(default)]
    pub lost_network: bool,
}

/// How often the files that CRIU reads are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Signals that are the program's.
const PASSED: [libc::c_int; 9] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM, libc::SIGWINCH, libc::SIGCONT];

/// The signals that [`Loaded`](crate::Loaded) and this process wait for.
pub(crate) fn waited_for() -> libc::sigset_t {
    // SAFETY: plain data, and writable.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in PASSED.iter().chain(&[libc::SIGCHLD]) {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Blocks them in this thread, and in those that it starts.
pub fn hold_signals() {
    // SAFETY: an initialised set.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &waited_for(), ptr::null_mut()) };
}

/// A pipe: the end to read, and the end to write.
pub(crate) fn pipe() -> io::Result<(File, File)> {
    let mut ends = [0; 2];
    // SAFETY: two numbers, writable.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    Ok((read.into(), write.into()))
}

/// A file from which the signals can be read that end a load. They must be blocked.
pub(crate) fn ends() -> io::Result<File> {
    // SAFETY: plain data, and writable.
    let number = unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::signalfd(-1, ptr::from_ref(&set), libc::SFD_CLOEXEC)
    };
    // SAFETY: just opened, and nobody else's.
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(number) }.into()) }
}

/// The next signal that such a file has.
pub(crate) fn next_signal(signals: &mut File) -> io::Result<libc::c_int> {
    let mut one = [0; mem::size_of::<libc::signalfd_siginfo>()];
    signals.read_exact(&mut one)?;
    // Its first field.
    Ok(u32::from_ne_bytes([one[0], one[1], one[2], one[3]]).cast_signed())
}

/// Waits for the end of a child, and passes signals on to it meanwhile. Returns its exit code. Reaps whatever else ends.
pub(crate) fn wait_for(child: libc::pid_t) -> i32 {
    loop {
        let mut status = 0;
        // SAFETY: writable; touches nothing else.
        let ended = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if ended == child {
            return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        }
        if ended > 0 {
            continue;
        }
        // SAFETY: as above.
        if ended < 0 && unsafe { *libc::__errno_location() } == libc::ECHILD {
            return 1;
        }
        let mut signal = 0;
        // SAFETY: an initialised set, and a writable number.
        if unsafe { libc::sigwait(&waited_for(), &raw mut signal) } == 0 && signal != libc::SIGCHLD {
            // SAFETY: touches no memory.
            unsafe { libc::kill(child, signal) };
        }
    }
}

/// Does it. Returns the program's exit code.
pub fn run(task: &Task) -> i32 {
    hold_signals();
    // SAFETY: touches no memory. The terminal's ^C is passed on, and must not reach the program twice.
    unsafe { libc::setsid() };
    // SAFETY: opened for this process alone.
    let mut report = unsafe { File::from_raw_fd(task.report) };
    let watched = end_without(task.decision);
    let restored = watched.map_err(refused("watch", Path::new("the command"))).and_then(|()| restore(task)).and_then(|restored| {
        // Not before: the ids of threads may be those of the program.
        let mut ports = task.own_network.iter().flatten();
        let relayed = ports.try_for_each(|(port, listener)| relay::start(*listener, *port));
        relayed.map_err(refused("relay", Path::new("ports")))?;
        Ok(restored)
    });
    let failure = restored.as_ref().err().map(ToString::to_string);
    let lost_network = restored.as_ref().is_ok_and(|back| back.lost_network);
    let _ = report.write_all(&serde_json::to_vec(&Report { failure, lost_network }).unwrap_or_default());
    drop(report);
    restored.map_or(1, |Back { program, _marked, .. }| match program {
        Restored::Runs(pid) => wait_for(pid),
        Restored::Ended(code) => code,
    })
}

/// A program that is back.
struct Back {
    program: Restored,
    /// What says that it is being loaded, until it listens.
    _marked: Vec<Marked>,
    /// It has no network, in which another copy has its addresses.
    lost_network: bool,
}

/// A program that was there again.
enum Restored {
    Runs(libc::pid_t),
    /// By itself, while CRIU let go of it.
    Ended(i32),
}

/// Ends this process, and with it all of its namespace, if the command dies before it has said that all is done.
fn end_without(decision: RawFd) -> io::Result<()> {
    // SAFETY: opened for this process alone.
    let mut decision = unsafe { File::from_raw_fd(decision) };
    let watch = move || {
        if decision.read_exact(&mut [0]).is_err() {
            // SAFETY: ends this process, without what others might wait for.
            unsafe { libc::_exit(1) };
        }
    };
    thread::Builder::new().spawn(watch).map(drop)
}

fn restore(task: &Task) -> Result<Back, CommandError> {
    let image = Store::open(&task.directory).and_then(|store| store.inspect(&task.image)).map_err(failed)?;
    let (manifest, details) = (image.manifest(), Details::of(image.manifest())?);
    let root = manifest.processes.first().ok_or_else(|| CommandError::new(Exit::Failed, "the image has no process"))?;
    let criu = Criu::find()?;
    // Something may be mounted over it, as over what is in /dev/shm.
    let folder = |path: &Path| File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path).map_err(refused("open", path));
    let opened = folder(image.path())?;
    let reached = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    let [images, files] = [image.criu_path(), image.files_path()].map(|path| reached.join(path.file_name().unwrap_or_default()));
    mount_own().map_err(|error| CommandError::new(Exit::Failed, format!("cannot mount /proc and /dev/shm: {error}")))?;
    open_null_anew().map_err(refused("open", Path::new("/dev/null")))?;
    let (in_shared, elsewhere): (Vec<_>, Vec<_>) = manifest.remaps.iter().partition(|remap| shared::is_here(Path::new(&remap.to)));
    shared::put_back(&files, &in_shared)?;
    own_files::put_back(&files, &elsewhere, Path::new("/dev/shm/.vramctl"))?;
    let of_library = manifest.processes.iter().filter(|process| process.kind == Kind::Library.to_string());
    let marked = of_library.map(|process| tell_library(name_of(process, &task.name, manifest), process.pid, &details));
    let marked = marked.collect::<Result<Vec<_>, _>>()?;
    let work = Path::new("/dev/shm/.vramctl");
    fs::create_dir(work).map_err(refused("make", work))?;
    let (images_open, work_open) = (folder(&images)?, folder(work)?);
    let (mut more, mut replacing) = (Vec::new(), Vec::new());
    for (number, name) in streams(manifest) {
        // CRIU has its own standard streams.
        let copy = copy_of(number).map_err(refused("copy", Path::new("a standard stream")))?;
        more.extend(["--inherit-fd".to_owned(), format!("fd[{}]:{name}", copy.as_raw_fd())]);
        replacing.push(copy);
    }
    if details.has_connections {
        more.extend(["--tcp-established", "--network-lock", "skip"].map(str::to_owned));
    }
    let bring_back = || -> Result<Option<String>, CommandError> {
        let mut command = criu.restore(images_open.as_fd(), work_open.as_fd(), &more);
        inherit(&mut command, &replacing.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let cannot = |error: io::Error| CommandError::new(Exit::Failed, format!("CRIU cannot be run: {error}"));
        let mut running = command.spawn().map_err(cannot)?;
        let done = loop {
            if let Some(done) = running.try_wait().map_err(cannot)? {
                break done;
            }
            wait_for_an_end(LOOK_EVERY);
            // CRIU reads for ever where a file has ended.
            image.check_sizes(&reached).inspect_err(|_| end_all_others()).map_err(failed)?;
        };
        if !done.success() {
            image.check_sizes(&reached).map_err(failed)?;
        }
        Ok((!done.success()).then(|| format!("({done}): {}", errors_in(work))))
    };
    // Those of the machine, at which it may listen or talk to itself.
    let addresses =
        fs::read(images.join("files.img")).and_then(|files| patch::addresses(&files)).map_err(refused("read", &image.criu_path()))?;
    if task.own_network.is_some() {
        namespace::leave_network(&addresses).map_err(refused("make", Path::new("a network namespace")))?;
    }
    let mut failure = bring_back()?;
    let lost_network = failure.as_ref().is_some_and(|why| is_abstract_address_taken(why));
    if lost_network {
        end_all_others();
        namespace::leave_network(&addresses).map_err(refused("make", Path::new("a network namespace")))?;
        failure = bring_back()?;
    }
    let _ = fs::remove_dir_all(work);
    match failure {
        None => Ok(Back { program: Restored::Runs(root.pid.cast_signed()), _marked: marked, lost_network }),
        Some(why) => {
            marked.into_iter().for_each(Marked::remove);
            match own_end(root.pid, &why) {
                Some(code) => Ok(Back { program: Restored::Ended(code), _marked: Vec::new(), lost_network }),
                None => Err(CommandError::new(Exit::Failed, format!("CRIU could not bring the process back {why}"))),
            }
        }
    }
}

/// The exit code of a process that ran again, and has ended by itself before CRIU had let go of all.
fn own_end(pid: u32, errors: &str) -> Option<i32> {
    if !errors.contains("Unable to detach") {
        return None;
    }
    let mut status = 0;
    // SAFETY: writable; touches nothing else.
    let ended = unsafe { libc::waitpid(pid.cast_signed(), &raw mut status, 0) };
    (ended == pid.cast_signed() && libc::WIFEXITED(status)).then(|| libc::WEXITSTATUS(status))
}

/// Waits until a child ends, at most so long. [`hold_signals`] must have been called.
fn wait_for_an_end(within: Duration) {
    let time = libc::timespec { tv_sec: within.as_secs().cast_signed(), tv_nsec: within.subsec_nanos().into() };
    // SAFETY: plain data, writable; a set that is initialised; there is no room for details.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const time);
    }
}

/// Ends what an attempt has left in this PID namespace, so that the ids are free.
fn end_all_others() {
    // SAFETY: touches no memory. As the first process of the namespace, this one is left out, and gets what the others leave.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    // SAFETY: touches no memory.
    while unsafe { libc::waitpid(-1, ptr::null_mut(), 0) } > 0 {}
}

/// Whether CRIU has failed because somebody listens at an abstract Unix address of the program. CUDA's driver has one for each process. A path is
/// bound anew, and a port is for the user to free.
fn is_abstract_address_taken(errors: &str) -> bool {
    errors.lines().any(|line| line.contains("sk-unix") && line.contains("Address already in use"))
}

fn copy_of(stream: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: touches no memory.
    let copy = unsafe { libc::fcntl(stream, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: just opened, and nobody else's.
    if copy < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(copy) }) }
}

/// Which descriptor takes the place of which stream.
pub(crate) fn streams(manifest: &Manifest) -> Vec<(i32, &str)> {
    let mut found = Vec::<(i32, &str)>::new();
    // What stdout shares with others is stdout's.
    for number in [1, 2, 0] {
        let stream = manifest.streams.iter().find(|stream| stream.descriptor == number);
        if let Some(name) = stream.map(|stream| stream.was.as_str())
            && found.iter().all(|(_, known)| *known != name)
        {
            found.push((number, name));
        }
    }
    found
}

/// `/proc` of the PID namespace, and a `/dev/shm` of the program's own.
fn mount_own() -> io::Result<()> {
    mount("none", Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE)?;
    mount("proc", Path::new("/proc"), Some("proc"), libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC)?;
    mount("tmpfs", Path::new("/dev/shm"), Some("tmpfs"), libc::MS_NOSUID | libc::MS_NODEV)
}

/// Standard streams that are `/dev/null` are that of the new mount namespace, so that a later save finds them.
fn open_null_anew() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for number in 0..3 {
        let stream = fs::metadata(format!("/proc/self/fd/{number}"));
        if stream.is_ok_and(|found| found.file_type().is_char_device() && found.rdev() == null.metadata().map_or(0, |null| null.rdev())) {
            // SAFETY: touches no memory. Replaces a standard stream of this process by the same device.
            unsafe { libc::dup2(null.as_raw_fd(), number) };
        }
    }
    Ok(())
}

/// The name of a process from now on: that of the program, unless it had another one before.
fn name_of(process: &Process, new: &str, manifest: &Manifest) -> String {
    if Some(process.name.as_str()) == program_name(manifest) { new.to_owned() } else { format!("{new}-{}", process.name) }
}

/// The name that the program of an image had.
pub(crate) fn program_name(manifest: &Manifest) -> Option<&str> {
    manifest.processes.iter().map(|process| process.name.as_str()).find(|name| !name.is_empty())
}

/// Tells the library in a process its new name, and commands that the process is being loaded.
fn tell_library(name: String, pid: u32, details: &Details) -> Result<Marked, CommandError> {
    let [_, address] = Address::beside(pid);
    let write = || {
        // It may be the program's user's.
        let directory = Directory::open()?.map_or_else(Directory::open_or_create_again, Ok)?;
        let marked = Marked::new(directory.folder(), Mark::Loading, &address, &Says { name: Some(name) })?;
        marked.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    };
    write().map_err(refused("write to", &details.sockets))
}

impl Task {
    /// As an argument.
    pub fn to_argument(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From an argument.
    pub fn parse(text: &std::ffi::OsStr) -> Result<Self, CommandError> {
        serde_json::from_slice(text.as_bytes()).map_err(|error| CommandError::new(Exit::Usage, error.to_string()))
    }
}
