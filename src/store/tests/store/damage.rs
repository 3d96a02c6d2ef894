//! Files are not what was written. No wrong contents are loaded, and what is whole is still there once the file is.

use crate::common::{Folder, Program};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use vramctl_store::{Caller, Error, Store};

/// All files of a directory of images, but locks.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            all.extend(files(&path));
        } else if path.file_name().unwrap() != "lock" {
            all.push(path);
        }
    }
    all.sort();
    all
}

fn programs() -> [(&'static str, Program); 2] {
    [("one", Program::of(&[1, 2, 3, 0])), ("two", Program::of(&[1, 5, 6]))]
}

fn prepare() -> Folder {
    let folder = Folder::new();
    let store = folder.store();
    for (name, program) in programs() {
        program.save(&store, name).unwrap();
    }
    // Something for `gc` to do, in a pack with what the others need.
    Program::of(&[20, 21, 22, 6, 23]).save(&store, "gone").unwrap();
    store.remove("gone").unwrap();
    folder
}

/// Loads all, and cleans up meanwhile.
fn check(folder: &Folder, context: &str) -> usize {
    let Ok(store) = Store::open(&folder.images()) else { return 2 };
    let load = || {
        let mut refused = 0;
        for (name, program) in programs() {
            match Program::load(&store, name) {
                Ok(found) => assert_eq!(found, program, "{context}: {name}"),
                Err(_) => refused += 1,
            }
        }
        refused
    };
    let refused = load();
    drop(store.gc(Duration::from_secs(60)));
    assert!(load() <= refused, "{context}: cleaning up has broken an image");
    for image in store.images().unwrap() {
        drop(store.inspect(&image.name).map(|image| image.verify()));
    }
    refused
}

/// Damages each file in one way after the other.
fn each_file(what: &str, damage: impl Fn(&Path, &[u8], &Path) -> bool, shows: impl Fn(&Path) -> bool) {
    let folder = prepare();
    let all = files(&folder.images());
    assert!(all.len() > 10, "{all:?}");
    for path in &all {
        // Cleaning up may have moved what it had.
        let Ok(before) = fs::read(path) else { continue };
        let same_kind = |other: &&PathBuf| other != &path && other.extension() == path.extension() && other.exists();
        let other = all.iter().rev().find(same_kind).unwrap_or(path);
        if !damage(path, &before, other) {
            continue;
        }
        let context = format!("{what}: {}", path.strip_prefix(folder.images()).unwrap().display());
        let refused = check(&folder, &context);
        assert!(refused > 0 || !shows(path), "{context}: nobody noticed");
        if path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            fs::remove_dir(path).unwrap();
        } else {
            drop(fs::remove_file(path));
        }
        fs::write(path, &before).unwrap();
        assert_eq!(check(&folder, &format!("{context}, mended")), 0, "{context}");
    }
}

/// Whether each image's load reads it: the packs of an image that is gone are nobody's.
fn is_of_an_image(path: &Path) -> bool {
    path.components().all(|part| part.as_os_str() != "packs")
}

#[test]
fn truncated_and_longer_files() {
    for part in [0, 1, 2, 3] {
        let cut = move |path: &Path, before: &[u8], _: &Path| {
            let length = [0, before.len() / 2, before.len().saturating_sub(1), before.len().saturating_sub(100)][part];
            fs::write(path, &before[..length]).unwrap();
            length != before.len()
        };
        // A manifest's last byte is the end of its line.
        each_file(&format!("cut {part}"), cut, |path| is_of_an_image(path) && (part != 2 || !path.ends_with("manifest.json")));
    }
    let longer = |path: &Path, before: &[u8], _: &Path| fs::write(path, [before, b"x"].concat()).is_ok();
    each_file("longer", longer, is_of_an_image);
}

#[test]
fn flipped_bits() {
    for place in 0..8 {
        let flip = move |path: &Path, before: &[u8], _: &Path| {
            let mut flipped = before.to_vec();
            let at = before.len() * place / 8;
            flipped[at] ^= 1 << (place % 8);
            fs::write(path, &flipped).is_ok()
        };
        each_file(&format!("flip {place}"), flip, |path| is_of_an_image(path) && !path.ends_with("manifest.json"));
    }
}

#[test]
fn files_that_are_another_one() {
    let swap = |path: &Path, before: &[u8], other: &Path| {
        let there = fs::read(other).unwrap();
        fs::write(path, &there).unwrap();
        there != before
    };
    // Another image's manifest is a manifest, but its other files are here.
    each_file("another one's", swap, is_of_an_image);
    let torn = |path: &Path, before: &[u8], _: &Path| {
        let mut torn = before.to_vec();
        let half = torn.len() / 2;
        torn[half..].fill(0);
        fs::write(path, &torn).unwrap();
        torn != before
    };
    each_file("torn", torn, is_of_an_image);
}

#[test]
fn files_that_are_none() {
    each_file("absent", |path, _, _| fs::remove_file(path).is_ok(), is_of_an_image);
    let link = |path: &Path, _: &[u8], other: &Path| fs::remove_file(path).and_then(|()| symlink(other, path)).is_ok();
    each_file("a link", link, is_of_an_image);
    let own = |path: &Path, before: &[u8], _: &Path| {
        let elsewhere = std::env::temp_dir().join(format!("vramctl-store-{}", std::process::id()));
        fs::write(&elsewhere, before).unwrap();
        fs::remove_file(path).and_then(|()| symlink(elsewhere, path)).is_ok()
    };
    each_file("a link to the same contents", own, is_of_an_image);
    drop(fs::remove_file(std::env::temp_dir().join(format!("vramctl-store-{}", std::process::id()))));
    each_file("a directory", |path, _, _| fs::remove_file(path).and_then(|()| fs::create_dir(path)).is_ok(), is_of_an_image);
    let pipe = |path: &Path, _: &[u8], _: &Path| {
        fs::remove_file(path).unwrap();
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with NUL.
        unsafe { libc::mkfifo(name.as_ptr(), 0o600) == 0 }
    };
    each_file("a pipe", pipe, is_of_an_image);
}

#[test]
fn a_message_names_image_file_and_offset() {
    let folder = prepare();
    let store = folder.store();
    // The second piece of the first image, wherever it is.
    let image = store.inspect("one").unwrap();
    let place = image.pieces_of(&image.manifest().contents[1]).unwrap()[0].place.unwrap();
    drop(image);
    let pack = folder.images().join(format!(".store/packs/{}.pack", place.pack));
    let mut bytes = fs::read(&pack).unwrap();
    bytes[place.offset as usize + 5] ^= 1;
    fs::write(&pack, bytes).unwrap();
    let error = Program::load(&store, "one").unwrap_err().to_string();
    let wanted = format!("image one is damaged: {}, at byte {}: ", pack.display(), place.offset);
    assert!(error.starts_with(&wanted), "{error}");
    let image = store.inspect("one").unwrap();
    let verified = image.verify().unwrap();
    assert_eq!(verified.errors.iter().map(ToString::to_string).collect::<Vec<_>>(), [error]);
    assert_eq!(Program::load(&store, "two").unwrap(), programs()[1].1);
}

/// Files that nobody has put there by a save.
#[test]
fn a_planted_file_is_refused() {
    let folder = prepare();
    let store = folder.store();
    let planted = folder.images().join("one/criu/planted.img");
    fs::write(&planted, "x").unwrap();
    assert!(Program::load(&store, "one").unwrap_err().to_string().contains("the manifest does not know it"));
    fs::remove_file(&planted).unwrap();
    let linked = folder.images().join("linked");
    symlink(folder.images().join("one"), &linked).unwrap();
    assert!(matches!(Program::load(&store, "linked"), Err(Error::Unsafe { .. })));
    for name in ["../images/one", "one/", "/one", "..", ".store", ""] {
        assert!(matches!(store.load(name, &Caller::default()), Err(Error::Name(_))), "{name}");
        assert!(matches!(store.save(name), Err(Error::Name(_))) && matches!(store.remove(name), Err(Error::Name(_))), "{name}");
    }
    assert_eq!(Program::load(&store, "one").unwrap(), programs()[0].1);
}

/// Another user could have changed it, or it is another user's.
#[test]
fn what_is_not_the_callers_is_refused() {
    let folder = prepare();
    let all =
        ["", ".store", ".store/packs", ".store/roots", ".store/format", "one", "one/manifest.json", "one/criu", "one/criu/core-1.img"];
    let packs = folder.packs().into_iter().chain(folder.in_store("packs", "index"));
    let all: Vec<_> = all.iter().map(|name| folder.images().join(name)).chain(packs).collect();
    let load = || Store::open(&folder.images()).and_then(|store| Program::load(&store, "one")).map(drop);
    load().unwrap();
    let mut refused = 0;
    for path in &all {
        let mode = fs::metadata(path).unwrap().permissions();
        fs::set_permissions(path, Permissions::from_mode(mode.mode() | 0o020)).unwrap();
        let open = load();
        fs::set_permissions(path, mode).unwrap();
        // SAFETY: cannot fail and touches no memory.
        let others = unsafe { libc::geteuid() } != 0 || {
            chown(path, Some(65_534), None).unwrap();
            let others = load();
            chown(path, Some(0), None).unwrap();
            others.is_err()
        };
        let is_pack = path.ends_with("") || path.parent().unwrap().ends_with("packs");
        // Of the packs, those of the image.
        assert!(is_pack || open.is_err() && others, "{}", path.display());
        refused += usize::from(open.is_err() && others);
    }
    assert!(refused >= 10, "{refused} of {}", all.len());
    load().unwrap();
}
