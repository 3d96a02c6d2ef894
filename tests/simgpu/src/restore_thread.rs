//! The thread of a process that others checkpoint: with it, a checkpointed process has no file of the machine open, as with the real driver, nor
//! any of the driver's ([`nodes`]). What the checkpoint has saved is in the process's own memory, so that it can be written to a disk with the process, and restored elsewhere.
//!
//! Who wants the process back leaves a file with its name in the machine's folder. To look for that, the thread opens nothing.

use crate::codes::{OPERATING_SYSTEM, Outcome};
use crate::machine::Machine;
use crate::nodes::{self, Opener};
use std::fs::{self, File};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a process may take to leave or to come back.
pub const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The thread's name while its process has left the machine.
const AWAY: &str = "simgpu-away";

/// The process for which the thread has been started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// As with the real driver, a process listens at an abstract address that is its own: a copy of it finds that taken.
pub fn listen() {
    let address = SocketAddr::from_abstract_name(format!("simgpu-uvm-{}", std::process::id()));
    if let Ok(listener) = address.and_then(|address| UnixListener::bind_addr(&address)) {
        // Until the process ends.
        std::mem::forget(listener);
    }
}

/// Starts the thread, unless it runs, and opens the driver's files.
pub fn start(machine: &'static Machine, opener: Opener) {
    if machine.folder().is_none() {
        return;
    }
    nodes::open(machine, opener);
    let own = std::process::id();
    if STARTED.swap(own, Ordering::SeqCst) != own
        && thread::Builder::new().name("simgpu-restore".into()).spawn(move || work(machine)).is_ok()
    {
        machine.will_leave();
    }
}

fn work(machine: &'static Machine) {
    loop {
        while !machine.is_checkpointed() {
            thread::sleep(LOOK_EVERY);
        }
        nodes::leave();
        rename(AWAY);
        machine.leave();
        while !is_called(machine) {
            thread::sleep(LOOK_EVERY);
        }
        if let Err(error) = machine.come_back() {
            eprintln!("simgpu: cannot come back to the machine: {error}");
        }
        nodes::come_back(machine);
        rename("simgpu-restore");
        // Who has called restores it now. A call may come to nothing, and then the process leaves again.
        while machine.is_checkpointed() && is_called(machine) {
            thread::sleep(LOOK_EVERY);
        }
    }
}

fn rename(name: &str) {
    let _ = fs::write("/proc/thread-self/comm", name);
}

fn is_called(machine: &Machine) -> bool {
    let name = name_of(std::process::id(), "self");
    name.zip(machine.folder()).is_some_and(|(name, folder)| fs::symlink_metadata(folder.join(name)).is_ok())
}

/// Whether a process has left the machine: then it is checkpointed.
pub fn has_left(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).any(|name| name.trim_end() == AWAY)
}

/// The file that calls a process: its PID namespace, and its id there.
fn name_of(pid_there: u32, folder: &str) -> Option<String> {
    let namespace = fs::metadata(format!("/proc/{folder}/ns/pid")).ok()?.ino();
    Some(format!("restore-{namespace}-{pid_there}"))
}

/// The id of a process in its own PID namespace.
fn pid_there(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// A process that has been called back to the machine. When this is dropped and nobody has restored it, it leaves again.
#[derive(Debug)]
pub struct Called(PathBuf);

impl Called {
    /// Calls a process, and waits until it is there.
    pub fn back(machine: &Machine, pid: u32) -> Outcome<Self> {
        let name = pid_there(pid).and_then(|there| name_of(there, &pid.to_string())).ok_or(OPERATING_SYSTEM)?;
        let call = Self(machine.folder().ok_or(OPERATING_SYSTEM)?.join(name));
        File::create(&call.0).map_err(|_| OPERATING_SYSTEM)?;
        let begun = Instant::now();
        while has_left(pid) {
            if begun.elapsed() > PATIENCE {
                return Err(OPERATING_SYSTEM);
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(call)
    }
}

impl Drop for Called {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
