//! Roots: files that say what somebody works with who has no image yet. What a root names, `gc` leaves alone.
//!
//! A root is alive as long as somebody has its file locked, be it the command or a program that has got the descriptor, and as long as a process
//! lives that is named in it. Then a program whose command was killed can still be given its contents back.

use crate::disk::{self, Disk};
use crate::piece::PackId;
use crate::{Error, Result, pack};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vramctl_host::file_lock::{self, Sharing};

const FIRST_LINE: &str = "vramctl root 1";

/// Most bytes of a root: so many packs no store has.
const MOST: u64 = 1 << 20;

/// A root of our own.
#[derive(Debug)]
pub struct Root {
    disk: Disk,
    path: PathBuf,
    file: File,
    /// Whether it stays when this is dropped.
    is_kept: bool,
}

impl Root {
    /// Registers a save of an image. Durable when this returns: what the save leaves behind can be told from what others have.
    pub fn create(disk: &Disk, roots: &Path, image: Option<&str>) -> Result<Self> {
        let path = roots.join(pack::new_id()?.to_string());
        let file = disk.create(&path)?;
        let root = Self { disk: disk.clone(), path, file, is_kept: false };
        append_only(&root.file).map_err(Error::io("lock", &root.path))?;
        // Whoever looks whether it is alive has it locked for a moment.
        let until = Instant::now() + Duration::from_secs(10);
        let locked = file_lock::lock_within(&root.file, Sharing::Exclusive, until, Duration::from_millis(1));
        if !locked.map_err(Error::io("lock", &root.path))? {
            return Err(Error::Busy(format!("{} was locked by somebody else", root.path.display())));
        }
        let image = image.map(|image| format!("image {image}\n")).unwrap_or_default();
        root.add(&format!("{FIRST_LINE}\n{image}"))?;
        disk.sync_directory(roots)?;
        Ok(root)
    }

    /// Takes on another process's root. It stays when this is dropped.
    pub fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self { disk: Disk::default(), path: "a root".into(), file: descriptor.into(), is_kept: true }
    }

    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from).map_err(Error::io("open", &self.path))
    }

    /// Has a pack stay as it is.
    pub fn pin(&self, pack: PackId) -> Result<()> {
        self.add(&format!("pack {pack}\n"))
    }

    /// The same for a pack that will be created, or removed: without an index, it goes with the root.
    pub fn pin_new(&self, pack: PackId) -> Result<()> {
        self.add(&format!("new {pack}\n"))
    }

    /// Has the root stay as long as a process lives.
    pub fn keep_for(&mut self, pid: u32) -> Result<()> {
        let process = Process::of(pid).map_err(Error::io("look at", Path::new(&format!("/proc/{pid}"))))?;
        self.add(&format!("process {} {} {} {}\n", process.pid, process.start, process.boot, process.namespace))?;
        self.is_kept = true;
        Ok(())
    }

    /// Has the root stay, for `gc`.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Nobody needs it beyond this any more.
    pub fn release(&mut self) {
        self.is_kept = false;
    }

    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// A line at the end, also if another process adds one at the same time. Durable, so that a crash leaves no half line.
    fn add(&self, text: &str) -> Result<()> {
        self.disk.write(&self.file, &self.path, text.as_bytes(), 0)?;
        self.disk.sync(&self.file, &self.path)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        if !self.is_kept {
            // Otherwise `gc` does.
            drop(self.disk.remove_file(&self.path));
        }
    }
}

fn append_only(file: &File) -> io::Result<()> {
    // SAFETY: touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A process, told from a later one with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    pid: u32,
    start: u64,
    boot: String,
    namespace: u64,
}

impl Process {
    fn of(pid: u32) -> io::Result<Self> {
        let namespace = fs::metadata("/proc/self/ns/pid")?.ino();
        let start = start_of(pid)?.ok_or(io::ErrorKind::NotFound)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { pid, start, boot, namespace })
    }

    /// Whether it may live: `true` also if that cannot be seen from here.
    fn may_live(&self) -> bool {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        if boot.is_ok_and(|boot| boot.trim() != self.boot) {
            return false;
        }
        let is_elsewhere = fs::metadata("/proc/self/ns/pid").is_ok_and(|found| found.ino() != self.namespace);
        is_elsewhere || !matches!(start_of(self.pid), Ok(start) if start != Some(self.start))
    }
}

/// When a process began, in ticks since the boot. `None` if there is none, or only its remains.
fn start_of(pid: u32) -> io::Result<Option<u64>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        other => other?,
    };
    // The name may have anything in it, also parentheses.
    let mut fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let is_over = fields.next().is_none_or(|state| matches!(state, "Z" | "X"));
    let start = fields.nth(18).and_then(|start| start.parse().ok());
    Ok(start.filter(|_| !is_over))
}

/// A root that was found.
#[derive(Debug)]
pub struct Found {
    pub path: PathBuf,
    /// The image that is, or was, being saved.
    pub image: Option<String>,
    /// All packs that it pins.
    pub packs: BTreeSet<PackId>,
    /// Those of them that its save has created.
    pub new: BTreeSet<PackId>,
    pub is_alive: bool,
    /// Why not all of it can be read.
    pub damage: Option<Error>,
}

/// All roots.
pub fn list(disk: &Disk, roots: &Path) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(roots).map_err(Error::io("read", roots))? {
        let path = entry.map_err(Error::io("read", roots))?.path();
        if path.extension().is_some() {
            continue;
        }
        match read(disk, path) {
            // Its save has ended meanwhile.
            Err(Error::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => (),
            found => all.push(found?),
        }
    }
    Ok(all)
}

fn read(disk: &Disk, path: PathBuf) -> Result<Found> {
    // Locked first: who still adds lines has it.
    let file = disk.open(&path)?;
    let is_free = file_lock::try_lock(&file, Sharing::Shared).map_err(Error::io("lock", &path))?;
    let text = disk.read_whole(&path, MOST)?;
    let mut found = Found { path, image: None, packs: BTreeSet::new(), new: BTreeSet::new(), is_alive: !is_free, damage: None };
    // A line without an end was never relied on.
    for line in String::from_utf8_lossy(&text).split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        if line != FIRST_LINE && found.take_in(line).is_none() {
            found.damage = Some(Error::damaged(&found.path, format!("{line:?} is no line of a root")));
        }
    }
    Ok(found)
}

impl Found {
    fn take_in(&mut self, line: &str) -> Option<()> {
        match *line.split(' ').collect::<Vec<_>>() {
            ["image", name] => self.image = Some(name.to_owned()),
            [kind @ ("pack" | "new"), id] => {
                let id = PackId(u64::from_str_radix(id, 16).ok()?);
                self.packs.insert(id);
                if kind == "new" {
                    self.new.insert(id);
                }
            }
            ["process", pid, start, boot, namespace] => {
                let boot = boot.to_owned();
                let process = Process { pid: pid.parse().ok()?, start: start.parse().ok()?, boot, namespace: namespace.parse().ok()? };
                self.is_alive |= process.may_live();
            }
            _ => return None,
        }
        Some(())
    }
}

/// Removes what a dead save has left: the image without a manifest and the packs without an index, then its root, without which nobody would know
/// whose they are.
pub fn clear(disk: &Disk, images: &Path, packs: &Path, root: &Found) -> Result<()> {
    if let Some(name) = &root.image {
        clear_half(disk, images, name)?;
    }
    remove_unfinished(disk, packs, &root.new)?;
    disk.remove_file(&root.path)
}

/// Removes packs without an index, durably.
pub fn remove_unfinished(disk: &Disk, packs: &Path, new: &BTreeSet<PackId>) -> Result<()> {
    for id in new {
        let index = pack::index_path(packs, *id);
        if index.symlink_metadata().is_err() {
            disk.remove_file(&disk::new_name(&index))?;
            disk.remove_file(&pack::pack_path(packs, *id))?;
        }
    }
    if new.is_empty() { Ok(()) } else { disk.sync_directory(packs) }
}

/// Removes an image without a manifest. A root must name it: other directories are not ours.
pub fn clear_half(disk: &Disk, images: &Path, name: &str) -> Result<()> {
    crate::name::check(name)?;
    let image = images.join(name);
    match disk::check_directory(&image) {
        Err(Error::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        checked => checked?,
    }
    if image.join(crate::name::MANIFEST).symlink_metadata().is_ok() {
        return Ok(());
    }
    disk.remove_tree(&image)?;
    disk.sync_directory(images)
}
