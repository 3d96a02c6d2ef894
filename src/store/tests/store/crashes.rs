//! Whoever works with a store ends at any step: by an error, by a kill, with the machine. An image is whole or not there, and no other is lost.

use crate::common::{Folder, Program};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs, io};
use vramctl_store::{Error, Hook, Result, Step, Store};

/// What is done when it is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Save,
    Remove,
    Gc,
    Export,
}

const ALL: [Work; 4] = [Work::Save, Work::Remove, Work::Gc, Work::Export];

/// Pieces of these are in common, and some of what `gone` had is left behind by its removal.
fn programs() -> [(&'static str, Program); 2] {
    [("old", Program::of(&[1, 2, 3])), ("second", Program::of(&[2, 7, 0]))]
}

fn new() -> Program {
    Program::of(&[1, 4, 0, 5, 4])
}

fn prepare(folder: &Folder) {
    let store = folder.store();
    Program::of(&[1, 2, 11, 12, 13, 14]).save(&store, "gone").unwrap();
    for (name, program) in programs() {
        program.save(&store, name).unwrap();
    }
    store.remove("gone").unwrap();
}

impl Work {
    fn run(self, store: &Store) -> Result<()> {
        match self {
            Self::Save => new().save(store, "new"),
            Self::Remove => store.remove("second"),
            Self::Gc => store.gc(Duration::from_secs(60)).and_then(|cleaned| cleaned.left.into_iter().next().map_or(Ok(()), Err)),
            Self::Export => store.export("old", &store.images_path().join("../exported")).map(drop),
        }
    }

    /// What must hold, wherever it has ended.
    fn check(self, folder: &Folder, context: &str) {
        let store = folder.store();
        let check = |name: &str, wanted: &Program, may_be_absent: bool| match Program::load(&store, name) {
            Ok(found) => assert_eq!(&found, wanted, "{context}: {name}"),
            Err(Error::NoImage(_)) if may_be_absent => (),
            Err(error) => panic!("{context}: {name}: {error}"),
        };
        let all = |exported: bool| {
            for (name, program) in programs() {
                check(name, &program, self == Self::Remove && name == "second");
            }
            check("new", &new(), true);
            if exported && folder.path("exported").exists() {
                match Store::create(&folder.path("exported")).and_then(|store| Program::load(&store, "old")) {
                    Ok(found) => assert_eq!(found, programs()[0].1, "{context}: exported"),
                    Err(Error::NoImage(_)) => (),
                    Err(error) => panic!("{context}: exported: {error}"),
                }
            }
        };
        all(true);
        let cleaned = store.gc(Duration::from_secs(60)).unwrap_or_else(|error| panic!("{context}: {error}"));
        assert!(cleaned.left.is_empty(), "{context}: {:?}", cleaned.left);
        all(false);
        let endings = |folder_of: &str, ending: &str| folder.in_store(folder_of, ending).len();
        assert_eq!(endings("packs", "pack"), endings("packs", "index"), "{context}");
        assert_eq!(endings("roots", "") + endings("roots", "removed") + endings("packs", "new"), 0, "{context}");
        if store.names().unwrap().iter().all(|name| name != "new") {
            new().save(&store, "new").unwrap_or_else(|error| panic!("{context}: {error}"));
        }
        all(false);
    }
}

/// A hook that counts steps, and has those fail that a function names.
fn failing(counter: &Arc<AtomicUsize>, fails: impl Fn(usize) -> Option<i32> + Send + Sync + 'static) -> Arc<Hook> {
    let counter = counter.clone();
    Arc::new(move |_, _| {
        let at = counter.fetch_add(1, Ordering::Relaxed);
        fails(at).map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
    })
}

/// Runs a work with one step after the other as the first that fails, until none does.
fn at_every_step(work: Work, fails: impl Fn(usize, usize) -> Option<i32> + Send + Sync + Copy + 'static, check: impl Fn(&Folder, &str)) {
    for first in 0.. {
        let folder = Folder::new();
        prepare(&folder);
        let counter = Arc::new(AtomicUsize::new(0));
        let done =
            Store::create_with_hook(&folder.images(), failing(&counter, move |at| fails(first, at))).and_then(|store| work.run(&store));
        let steps = counter.load(Ordering::Relaxed);
        check(&folder, &format!("{work:?}, step {first} of {steps}"));
        if steps <= first {
            done.unwrap();
            assert!(first > 5, "only {first} steps");
            return;
        }
    }
}

/// Nothing that a dead process would do is done: neither the rest of the work nor what tidies up.
#[test]
fn whoever_ends_at_any_step_leaves_a_whole_image_or_none() {
    for work in ALL {
        at_every_step(work, |first, at| (at >= first).then_some(libc::EIO), |folder, context| work.check(folder, context));
    }
}

/// What fails is undone, so that nothing is left for `gc`.
#[test]
fn a_step_that_fails_is_undone() {
    let (all, tidy) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for code in [libc::ENOSPC, libc::EIO] {
        at_every_step(
            Work::Save,
            move |first, at| (at == first).then_some(code),
            |folder, context| {
                let store = folder.store();
                let is_there = store.names().unwrap().iter().any(|name| name == "new");
                assert_eq!(is_there, folder.images().join("new").exists(), "{context}");
                // A step of what tidies up may be the one that fails.
                let without_index = folder.in_store("packs", "pack").len() - folder.in_store("packs", "index").len();
                let roots = folder.in_store("roots", "").len();
                assert!(without_index <= roots && roots <= 1, "{context}: {without_index} packs, {roots} roots");
                tidy.fetch_add(usize::from(roots == 0), Ordering::Relaxed);
                all.fetch_add(1, Ordering::Relaxed);
                Work::Save.check(folder, context);
            },
        );
    }
}

/// Errors while an image is read show, and are gone with their cause.
#[test]
fn what_cannot_be_read_is_an_error() {
    let folder = Folder::new();
    prepare(&folder);
    let program = &programs()[0].1;
    let mut shown = 0;
    for first in 0.. {
        let counter = Arc::new(AtomicUsize::new(0));
        let hook = failing(&counter, move |at| (at == first).then_some(libc::EIO));
        let loaded = Store::create_with_hook(&folder.images(), hook).and_then(|store| Program::load(&store, "old"));
        if counter.load(Ordering::Relaxed) <= first {
            assert_eq!(&loaded.unwrap(), program);
            assert!(shown * 2 > first, "{shown} of {first}");
            return;
        }
        match loaded {
            // The index of a pack that the image does not need.
            Ok(found) => assert_eq!(&found, program, "step {first}"),
            Err(error) => {
                assert!(error.to_string().contains("Input/output error"), "step {first}: {error}");
                shown += 1;
            }
        }
        assert_eq!(&Program::load(&folder.store(), "old").unwrap(), program);
    }
}

const KILLED_IN: &str = "STORE_KILLED_IN";
const KILLED_AT: &str = "STORE_KILLED_AT";

/// The process that the next test kills. By itself it does nothing.
#[test]
fn saves_until_the_kill() {
    let Ok(images) = env::var(KILLED_IN) else { return };
    let last: usize = env::var(KILLED_AT).unwrap().parse().unwrap();
    let counter = AtomicUsize::new(0);
    let hook = move |_: Step, _: &Path| {
        if counter.fetch_add(1, Ordering::Relaxed) == last {
            // SAFETY: ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        Ok(())
    };
    Work::Save.run(&Store::create_with_hook(Path::new(&images), Arc::new(hook)).unwrap()).unwrap();
}

/// The same by the kernel, which gives the locks back. Some steps are enough for that.
#[test]
fn whoever_is_killed_leaves_a_whole_image_or_none() {
    for last in (3..).step_by(9) {
        let mut folder = Folder::new();
        prepare(&folder);
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "crashes::saves_until_the_kill"]).env(KILLED_IN, folder.images()).env(KILLED_AT, last.to_string());
        let ended = folder.lend(&mut child);
        Work::Save.check(&folder, &format!("killed at step {last}"));
        if ended.success() {
            assert!(last > 20);
            return;
        }
    }
}

/// What is on the disk when the machine loses its power: only what was made durable, of files and of directories.
#[derive(Default)]
struct Durable {
    /// Files and their contents, by number.
    files: HashMap<u64, Vec<u8>>,
    /// Directories and their entries, by number: a name, the entry's number, and whether it is a directory.
    directories: HashMap<u64, BTreeMap<PathBuf, (u64, bool)>>,
    /// So that no number is used again.
    pins: PathBuf,
}

impl Durable {
    fn of(images: &Path, pins: &Path) -> Self {
        fs::create_dir(pins).unwrap();
        let mut durable = Self { pins: pins.to_owned(), ..Self::default() };
        durable.take_in(images);
        durable
    }

    fn take_in(&mut self, directory: &Path) {
        self.sync_directory(directory);
        for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() { self.take_in(&entry) } else { self.sync(&entry) }
        }
    }

    fn pin(&self, path: &Path, number: u64) {
        drop(fs::hard_link(path, self.pins.join(number.to_string())));
    }

    fn sync(&mut self, file: &Path) {
        let number = fs::metadata(file).unwrap().ino();
        self.pin(file, number);
        self.files.insert(number, fs::read(file).unwrap());
    }

    fn sync_directory(&mut self, directory: &Path) {
        let mut entries = BTreeMap::new();
        for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap()) {
            let found = entry.metadata().unwrap();
            if found.is_file() {
                self.pin(&entry.path(), found.ino());
            }
            entries.insert(entry.file_name().into(), (found.ino(), found.is_dir()));
        }
        self.directories.insert(fs::metadata(directory).unwrap().ino(), entries);
    }

    /// The machine starts again, with its disk elsewhere.
    fn write(&self, directory: u64, to: &Path) {
        fs::DirBuilder::new().mode(0o700).create(to).unwrap();
        for (name, (number, is_directory)) in self.directories.get(&directory).into_iter().flatten() {
            let path = to.join(name);
            if *is_directory {
                self.write(*number, &path);
            } else {
                fs::write(path, self.files.get(number).map_or(&[][..], |bytes| bytes)).unwrap();
            }
        }
    }
}

#[test]
fn the_power_may_fail_at_any_step() {
    for work in [Work::Save, Work::Remove, Work::Gc] {
        for last in 0.. {
            let folder = Folder::new();
            prepare(&folder);
            let root = fs::metadata(folder.images()).unwrap().ino();
            let durable = Arc::new(Mutex::new(Durable::of(&folder.images(), &folder.path("pins"))));
            let (counter, seen) = (Arc::new(AtomicUsize::new(0)), durable.clone());
            let count = counter.clone();
            let hook = move |step: Step, path: &Path| {
                if count.fetch_add(1, Ordering::Relaxed) >= last {
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
                match step {
                    Step::Sync => seen.lock().unwrap().sync(path),
                    Step::SyncDirectory => seen.lock().unwrap().sync_directory(path),
                    _ => (),
                }
                Ok(())
            };
            let done = Store::create_with_hook(&folder.images(), Arc::new(hook)).and_then(|store| work.run(&store));
            let after = Folder::new();
            durable.lock().unwrap().write(root, &after.images());
            let is_done = counter.load(Ordering::Relaxed) <= last;
            if is_done {
                done.unwrap();
                let is_there = |name| after.images().join(name).join("manifest.json").exists();
                assert_eq!(is_there("new"), work == Work::Save);
                assert_eq!(is_there("second"), work != Work::Remove);
            }
            work.check(&after, &format!("{work:?}, power lost before step {last}"));
            if is_done {
                break;
            }
        }
    }
}
