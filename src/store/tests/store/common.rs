//! Programs made up, and their images.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use vramctl_store::{Allocation, Buffer, Caller, Contents, Error, Image, Manifest, Process, Result, Saving, Store, cut};

pub struct Folder {
    folder: tempfile::TempDir,
    working: Option<Working>,
}

/// How many folders are in use. A process that another test starts has this one's files, and so its locks, until it runs its program: so none is started
/// meanwhile.
static WORKING: Mutex<usize> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

struct Working;

impl Working {
    fn new() -> Self {
        *WORKING.lock().unwrap() += 1;
        Self
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        *WORKING.lock().unwrap() -= 1;
        CHANGED.notify_all();
    }
}

/// Starts a process once no folder is in use.
pub fn start(command: &mut Command) -> Child {
    const LIMIT: Duration = Duration::from_secs(600);
    let (working, waited) = CHANGED.wait_timeout_while(WORKING.lock().unwrap(), LIMIT, |working| *working > 0).unwrap();
    assert!(!waited.timed_out(), "{} folders are still in use", *working);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

impl Folder {
    /// In memory, where there is such a place: many tests make much durable.
    pub fn new() -> Self {
        Self::of(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    pub fn on_disk() -> Self {
        Self::of(tempfile::tempdir().unwrap())
    }

    fn of(folder: tempfile::TempDir) -> Self {
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Self { folder, working: Some(Working::new()) }
    }

    /// Starts a process that uses the folder, and waits for its end. Nobody else uses the folder meanwhile.
    pub fn lend(&mut self, command: &mut Command) -> ExitStatus {
        self.working = None;
        let ended = start(command).wait().unwrap();
        self.working = Some(Working::new());
        ended
    }

    pub fn images(&self) -> PathBuf {
        self.folder.path().join("images")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn store(&self) -> Store {
        Store::create(&self.images()).unwrap()
    }

    /// The packs' files, sorted.
    pub fn packs(&self) -> Vec<PathBuf> {
        self.in_store("packs", "pack")
    }

    pub fn in_store(&self, folder: &str, ending: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.images().join(".store").join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<_> = entries.filter(|path| path.extension().unwrap_or_default() == ending).collect();
        all.sort();
        all
    }
}

/// A process that lives until this is dropped. Made before any [`Folder`] of its test.
pub struct Living(Child);

impl Living {
    pub fn new() -> Self {
        Self(start(Command::new("sleep").arg("600")))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).unwrap();
    }
}

/// A program: what it has in memory, by tag.
#[derive(Clone, PartialEq, Eq)]
pub struct Program {
    pub memory: Vec<(String, Vec<u8>)>,
    pub files: HashMap<String, Vec<u8>>,
}

impl fmt::Debug for Program {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |bytes: &Vec<u8>| format!("{} bytes from {:?}", bytes.len(), &bytes[..bytes.len().min(4)]);
        let memory = self.memory.iter().map(|(tag, bytes)| (tag, short(bytes)));
        out.debug_map().entries(memory).entries(self.files.iter().map(|(path, bytes)| (path, short(bytes)))).finish()
    }
}

/// Bytes that look random and are the same for a seed.
pub fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next()).take(bytes).collect()
}

/// Bytes of a piece in most tests. The store takes any size; [`cut`] is for whole programs.
pub const SMALL: usize = 8192;

impl Program {
    /// One whose tags have contents of these seeds, one piece each. Seed 0: zeros.
    pub fn of(seeds: &[u64]) -> Self {
        let memory = seeds.iter().enumerate().map(|(at, seed)| {
            let bytes = if *seed == 0 { vec![0; SMALL] } else { random(*seed, SMALL - at % 3 * 100) };
            (format!("tag-{at}"), bytes)
        });
        let files = [("criu/core-1.img", random(seeds.len() as u64 + 1, 5000)), ("files/deep/shm", random(3, 100))];
        Self { memory: memory.collect(), files: files.map(|(path, bytes)| (path.to_owned(), bytes)).into() }
    }

    pub fn contents(&self, mut put: impl FnMut(&[u8]) -> Result<vramctl_store::Piece>) -> Result<Vec<Contents>> {
        let contents = self.memory.iter().map(|(tag, bytes)| {
            let size = bytes.len() as u64;
            let pieces = cut(0, size).map(|(at, length)| Ok(put(&bytes[at as usize..][..length])?.id)).collect::<Result<_>>()?;
            let of = Allocation { tag: tag.clone(), bytes: size, ranges: vec![(0, size)], ..Allocation::default() };
            Ok(Contents { of, pieces })
        });
        contents.collect()
    }

    pub fn manifest() -> Manifest {
        let caller = Caller::current().unwrap();
        let process = Process { pid: 7, uids: caller.uids, gids: caller.gids, ..Process::default() };
        Manifest { processes: vec![process], ..Manifest::default() }
    }

    /// What a save does: all but `finish`.
    pub fn put(&self, saving: &Saving) -> Result<Vec<Contents>> {
        let contents = self.contents(|piece| saving.put(piece))?;
        for (path, bytes) in &self.files {
            let path = saving.criu_path().parent().unwrap().join(path);
            let write = || fs::create_dir_all(path.parent().unwrap()).and_then(|()| fs::write(&path, bytes));
            // Half of the save may be gone where tests have steps fail.
            write().map_err(|error| Error::Io { doing: "write", path: path.clone(), error })?;
        }
        Ok(contents)
    }

    pub fn save(&self, store: &Store, name: &str) -> Result<()> {
        let mut saving = store.save(name)?;
        let contents = self.put(&saving)?;
        saving.finish(Self::manifest(), &contents)
    }

    /// What is in an image, verified.
    pub fn load(store: &Store, name: &str) -> Result<Self> {
        let image = store.load(name, &Caller::current()?)?;
        let mut files = HashMap::new();
        for file in image.manifest().hashes.iter().filter(|file| file.path != "contents") {
            files.insert(file.path.clone(), fs::read(image.criu_path().parent().unwrap().join(&file.path)).unwrap());
        }
        Ok(Self { memory: Self::read(&image)?, files })
    }

    fn read(image: &Image) -> Result<Vec<(String, Vec<u8>)>> {
        let listed = &image.manifest().contents;
        let pieces = listed.iter().map(|one| image.pieces_of(one)).collect::<Result<Vec<_>>>()?.concat();
        let source = image.source(&pieces)?;
        let bytes = read_all(&source, pieces, 3)?;
        let mut left = bytes.as_slice();
        let memory = listed.iter().map(|one| {
            let (own, rest) = left.split_at(one.of.bytes as usize);
            left = rest;
            (one.of.tag.clone(), own.to_vec())
        });
        Ok(memory.collect())
    }
}

/// Reads pieces one after the other.
pub fn read_all(source: &Arc<vramctl_store::Source>, pieces: Vec<vramctl_store::Piece>, buffers: usize) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    thread::scope(|scope| {
        let mut reading = source.read_ahead(scope, pieces, (0..buffers).map(|_| Buffer::for_piece()).collect());
        while let Some(loaded) = reading.take()? {
            let bytes = loaded.id.bytes as usize;
            match loaded.buffer {
                Some(buffer) => {
                    all.extend_from_slice(&buffer[..bytes]);
                    reading.give_back(buffer);
                }
                None => all.resize(all.len() + bytes, 0),
            }
        }
        Ok(all)
    })
}
