//! Stand-ins for the driver's files, such as `/dev/nvidiactl`: device nodes in the machine's folder, of which a process has descriptors open as it
//! has with the real driver. Nobody can write them to a disk with the process, so they must be closed before.
//!
//! Seen with driver 580: `cuInit` and NVML each open some, a checkpoint closes what the process has opened itself, and a forked child inherits its
//! parent's, which its own checkpoint leaves open.
//!
//! To make a device node takes root. Without, there are none.

use crate::machine::Machine;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::{io, mem, process};

/// Who has opened a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opener {
    /// `cuInit`.
    Cuda,
    /// NVML.
    Nvml,
}

#[derive(Debug)]
struct Open {
    /// A forked child has this, too, but must not touch it.
    process: u32,
    files: Vec<(Opener, File)>,
    /// Who has files while there are no checkpoints.
    openers: Vec<Opener>,
}

static OPEN: Mutex<Open> = Mutex::new(Open { process: 0, files: Vec::new(), openers: Vec::new() });

fn with_own<R>(work: impl FnOnce(&mut Open) -> R) -> R {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if open.process != process::id() {
        let new = Open { process: process::id(), files: Vec::new(), openers: Vec::new() };
        // The files are the parent's, and stay open here.
        mem::forget(mem::replace(&mut *open, new));
    }
    work(&mut open)
}

/// Opens the files that the driver opens for it, unless they are open.
pub fn open(machine: &Machine, opener: Opener) {
    with_own(|open| {
        if !open.openers.contains(&opener) {
            open.openers.push(opener);
            open.files.extend(files(machine, opener));
        }
    });
}

/// Closes them.
pub fn close(opener: Opener) {
    with_own(|open| {
        open.openers.retain(|its| *its != opener);
        open.files.retain(|(its, _)| *its != opener);
    });
}

/// Closes all that this process has opened, as its checkpoint does.
pub fn leave() {
    with_own(|open| open.files.clear());
}

/// Opens them again, as its restore does.
pub fn come_back(machine: &Machine) {
    with_own(|open| open.files = open.openers.iter().flat_map(|opener| files(machine, *opener)).collect());
}

fn files(machine: &Machine, opener: Opener) -> Vec<(Opener, File)> {
    const FRONTEND: u32 = 195;
    const CONTROL: u32 = 255;
    /// Of the numbers for devices that have none of their own, as `nvidia-uvm` gets them.
    const UVM: u32 = 511;
    let Some(folder) = machine.folder().map(|folder| folder.join("dev")) else { return Vec::new() };
    let _ = fs::create_dir(&folder);
    let devices = (0..machine.devices() as u32).map(|device| (format!("nvidia{device}"), FRONTEND, device));
    let uvm = (opener == Opener::Cuda).then(|| ("nvidia-uvm".into(), UVM, 0));
    let all = [("nvidiactl".into(), FRONTEND, CONTROL)].into_iter().chain(uvm).chain(devices);
    all.filter_map(|(name, major, minor)| Some((opener, node(&folder.join(name), major, minor).ok()?))).collect()
}

fn node(path: &Path, major: u32, minor: u32) -> io::Result<File> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated name.
    let made = unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(major, minor)) };
    let error = io::Error::last_os_error();
    if made != 0 && error.kind() != io::ErrorKind::AlreadyExists {
        return Err(error);
    }
    // There is no driver for it, so this is all that can be opened.
    File::options().read(true).custom_flags(libc::O_PATH).open(path)
}
