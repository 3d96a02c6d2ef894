//! A directory of images, and the store below it that has their pieces.

#[cfg(feature = "test-support")]
use crate::disk::Hook;
use crate::disk::{self, Disk};
use crate::hash::Hash;
use crate::pack::{Known, PackFile};
use crate::piece::PackId;
use crate::{Error, Result, name, owner, root};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramctl_host::file_lock::{self, Sharing};

const FORMAT: &str = "vramctl store 1\n";

/// How long a save, a load and a removal wait for a `gc`.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often they look.
const EVERY: Duration = Duration::from_millis(20);

/// A directory of images.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    disk: Disk,
    images: PathBuf,
    patience: Duration,
}

impl Store {
    /// Opens a directory of images.
    pub fn open(images: &Path) -> Result<Self> {
        Self::at(Disk::default(), images)
    }

    /// The same, and makes what is not there. Its parent must exist.
    pub fn create(images: &Path) -> Result<Self> {
        Self::create_at(Disk::default(), images)
    }

    /// Opens or creates a directory with a hook before each step on the file system.
    #[cfg(feature = "test-support")]
    pub fn create_with_hook(images: &Path, hook: Arc<Hook>) -> Result<Self> {
        Self::create_at(Disk::with_hook(hook), images)
    }

    fn at(disk: Disk, images: &Path) -> Result<Self> {
        let images = owner::check_way(images)?;
        let store = Self { shared: Arc::new(Shared { disk, images, patience: PATIENCE }) };
        if store.path().symlink_metadata().is_err() || store.path().join("format").symlink_metadata().is_err() {
            return Err(Error::NoStore(store.images_path().to_owned()));
        }
        for path in [store.path(), store.roots(), store.packs()] {
            disk::check_directory(&path)?;
        }
        let format = store.path().join("format");
        let found = store.disk().read_whole(&format, 4096)?;
        if found != FORMAT.as_bytes() {
            return Err(Error::Format { file: format, found: String::from_utf8_lossy(&found).trim_end().to_owned() });
        }
        Ok(store)
    }

    fn create_at(disk: Disk, images: &Path) -> Result<Self> {
        let images = std::path::absolute(images).map_err(Error::io("find", images))?;
        let parent = images.parent().unwrap_or(Path::new("/"));
        if images.symlink_metadata().is_err() {
            owner::check_parent(parent)?;
            disk.make_directory(&images)?;
            disk.sync_directory(parent)?;
        }
        match Self::at(disk.clone(), &images) {
            Err(Error::NoStore(images)) => Self::fill(&disk, &images)?,
            other => return other,
        }
        Self::at(disk, &images)
    }

    /// Makes the store. Its format comes last; another process may do the same.
    fn fill(disk: &Disk, images: &Path) -> Result<()> {
        let store = images.join(".store");
        [store.clone(), store.join("roots"), store.join("packs")].iter().try_for_each(|path| disk.make_directory(path))?;
        let lock = store.join("lock");
        match disk.create(&lock) {
            Err(Error::Io { error, .. }) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
            created => drop(created?),
        }
        // Under the lock, so that two do not write it at once.
        let lock = disk.open_to_write(&lock)?;
        lock_file(&lock, &store, Sharing::Exclusive, PATIENCE)?;
        if store.join("format").symlink_metadata().is_err() {
            disk.write_whole(&store.join("format"), FORMAT.as_bytes())?;
            disk.sync_directory(&store)?;
            disk.sync_directory(images)?;
        }
        Ok(())
    }

    /// The directory of the images, without links on its way.
    pub fn images_path(&self) -> &Path {
        &self.shared.images
    }

    pub(crate) fn disk(&self) -> &Disk {
        &self.shared.disk
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.images_path().join(".store")
    }

    pub(crate) fn packs(&self) -> PathBuf {
        self.path().join("packs")
    }

    pub(crate) fn roots(&self) -> PathBuf {
        self.path().join("roots")
    }

    /// The directory of an image.
    pub fn image_path(&self, name: &str) -> Result<PathBuf> {
        name::check(name)?;
        Ok(self.images_path().join(name))
    }

    /// Shares the store with others that save and load, or has it alone.
    pub(crate) fn lock(&self, sharing: Sharing) -> Result<File> {
        self.lock_within(sharing, self.shared.patience)
    }

    pub(crate) fn lock_within(&self, sharing: Sharing, limit: Duration) -> Result<File> {
        let path = self.path().join("lock");
        let file = self.disk().open_to_write(&path)?;
        lock_file(&file, &self.path(), sharing, limit)?;
        Ok(file)
    }

    /// Has an image's name, alone or with others.
    pub(crate) fn lock_name(&self, name: &str, sharing: Sharing) -> Result<File> {
        name::check(name)?;
        let path = self.path().join("lock");
        let file = self.disk().open_to_write(&path)?;
        // 62 bits, which the kernel can count to. Two names with one byte are not met in practice, and would only refuse.
        let byte = u64::from_le_bytes(*Hash::of(name.as_bytes()).0.first_chunk().expect("32 bytes")) >> 2;
        if file_lock::try_lock_byte(&file, byte, sharing).map_err(Error::io("lock", &path))? {
            return Ok(file);
        }
        let who = match sharing {
            Sharing::Shared => "being saved or removed",
            Sharing::Exclusive => "being saved, loaded or removed",
        };
        Err(Error::Busy(format!("image {name} is {who} by another command; try again once that has ended")))
    }

    /// The names of all images, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.images_path()).map_err(Error::io("read", self.images_path()))? {
            let entry = entry.map_err(Error::io("read", self.images_path()))?;
            let name = entry.file_name().to_str().map(str::to_owned).filter(|name| name::check(name).is_ok());
            if let Some(name) = name.filter(|_| entry.path().join(name::MANIFEST).symlink_metadata().is_ok()) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes an image that nobody saves or loads. Its pieces go with the next [`Store::gc`].
    pub fn remove(&self, name: &str) -> Result<()> {
        let image = self.image_path(name)?;
        let _shared = self.lock(Sharing::Shared)?;
        let _name = self.lock_name(name, Sharing::Exclusive)?;
        disk::check_directory(&image).map_err(|error| absent(error, &image))?;
        if image.join(name::MANIFEST).symlink_metadata().is_err() {
            return Err(Error::NoImage(image));
        }
        // At once, so that there is no half image.
        let removed = self.roots().join(format!("{}.removed", crate::pack::new_id()?));
        self.disk().rename(&image, &removed)?;
        self.disk().sync_directory(self.images_path())?;
        self.disk().remove_tree(&removed)
    }

    /// Opens packs to read pieces back, for [`crate::Source::new`]: of a program that is kept ([`crate::Saving::keep_for`]).
    pub fn open_packs(&self, packs: &[PackId]) -> Result<Vec<(PackId, PackFile)>> {
        packs.iter().map(|id| Ok((*id, PackFile::open(self.disk(), &self.packs(), *id)?))).collect()
    }

    /// Which pieces the store has, and where.
    pub(crate) fn known(&self) -> Result<Known> {
        Known::read(self.disk(), &self.packs())
    }

    /// Clears what dead saves of an image have left. The name is locked.
    pub(crate) fn clear(&self, image: &str) -> Result<()> {
        for found in root::list(self.disk(), &self.roots())?.into_iter().filter(|found| found.image.as_deref() == Some(image)) {
            if found.is_alive {
                // The program needs the packs, not the half image.
                root::clear_half(self.disk(), self.images_path(), image)?;
            } else {
                root::clear(self.disk(), self.images_path(), &self.packs(), &found)?;
            }
        }
        Ok(())
    }
}

/// What is not there is no image.
pub(crate) fn absent(error: Error, image: &Path) -> Error {
    if error.io_kind() == Some(std::io::ErrorKind::NotFound) { Error::NoImage(image.to_owned()) } else { error }
}

fn lock_file(file: &File, store: &Path, sharing: Sharing, limit: Duration) -> Result<()> {
    let locked = file_lock::lock_within(file, sharing, Instant::now() + limit, EVERY).map_err(Error::io("lock", store))?;
    let why = match sharing {
        Sharing::Shared => "is being cleaned up (gc)",
        Sharing::Exclusive => "is in use by a save or a load",
    };
    if locked { Ok(()) } else { Err(Error::Busy(format!("the store {} {why}; try again once that has ended", store.display()))) }
}
