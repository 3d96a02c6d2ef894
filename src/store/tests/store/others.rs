//! Several work with one store at once, and programs whose contents are there alone.

use crate::common::{Folder, Living, Program, SMALL, random, read_all};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use std::{fs, io};
use vramctl_store::{Error, Hook, Source, Store, Writer};

#[test]
fn two_saves_have_two_names() {
    let folder = Folder::new();
    let store = folder.store();
    let mut first = store.save("one").unwrap();
    assert!(matches!(store.save("one"), Err(Error::Busy(_))));
    assert!(matches!(store.inspect("one"), Err(Error::Busy(_))), "half an image");
    assert!(matches!(store.remove("one"), Err(Error::Busy(_))));
    assert!(matches!(store.gc(Duration::ZERO), Err(Error::Busy(_))));
    let program = Program::of(&[1, 2]);
    program.save(&store, "two").unwrap();
    let contents = program.put(&first).unwrap();
    first.finish(Program::manifest(), &contents).unwrap();
    assert!(matches!(store.gc(Duration::ZERO), Err(Error::Busy(_))), "the command still needs it");
    drop(first);
    // The second did not see the first's pieces in time, and one copy is enough.
    store.gc(Duration::ZERO).unwrap();
    assert_eq!(folder.packs().len(), 1);
    for name in ["one", "two"] {
        assert_eq!(Program::load(&store, name).unwrap(), program);
    }
}

#[test]
fn what_is_no_image_is_left_alone() {
    let folder = Folder::new();
    let store = folder.store();
    fs::create_dir(folder.images().join("mine")).unwrap();
    fs::write(folder.images().join("mine/notes"), "x").unwrap();
    assert!(matches!(store.save("mine"), Err(Error::Exists(_))));
    assert!(matches!(store.remove("mine"), Err(Error::NoImage(_))));
    store.gc(Duration::ZERO).unwrap();
    assert_eq!(fs::read(folder.images().join("mine/notes")).unwrap(), b"x");
    assert!(matches!(Store::open(&folder.images().join("mine")), Err(Error::NoStore(_))));
}

#[test]
fn many_work_at_once() {
    let folder = Folder::new();
    let store = folder.store();
    let work = |own: u64| {
        for round in 0..4 {
            let (name, program) = (format!("{own}-{round}"), Program::of(&[1, own * 10 + round, 0, 2]));
            program.save(&store, &name).unwrap();
            assert_eq!(Program::load(&store, &name).unwrap(), program);
            if round % 2 == 0 {
                store.remove(&name).unwrap();
            }
            match store.gc(Duration::from_millis(1)) {
                Ok(cleaned) => assert!(cleaned.left.is_empty(), "{:?}", cleaned.left),
                Err(error) => assert!(matches!(error, Error::Busy(_)), "{error}"),
            }
        }
    };
    thread::scope(|scope| (1..=4).for_each(|own| drop(scope.spawn(move || work(own)))));
    store.gc(Duration::from_secs(60)).unwrap();
    assert_eq!(store.names().unwrap().len(), 8);
    for own in 1..=4 {
        for round in [1, 3] {
            assert_eq!(Program::load(&store, &format!("{own}-{round}")).unwrap(), Program::of(&[1, own * 10 + round, 0, 2]));
        }
    }
}

/// A store in which nothing happens any more once the command is dead.
fn mortal(folder: &Folder) -> (Store, Arc<AtomicBool>) {
    let is_dead = Arc::new(AtomicBool::new(false));
    let dead = is_dead.clone();
    let hook: Arc<Hook> = Arc::new(move |_, _| if dead.load(Ordering::Relaxed) { Err(io::ErrorKind::Other.into()) } else { Ok(()) });
    (Store::create_with_hook(&folder.images(), hook).unwrap(), is_dead)
}

#[test]
fn a_program_whose_command_is_dead_gets_its_contents_back() {
    let program = Living::new();
    let folder = Folder::new();
    let store = folder.store();
    Program::of(&[1, 2, 3, 4, 5]).save(&store, "before").unwrap();
    let (mortal, is_dead) = mortal(&folder);
    let saving = mortal.save("one").unwrap();
    saving.keep_for(program.pid()).unwrap();
    let memory = [random(1, SMALL), random(8, SMALL)];
    let pieces = memory.each_ref().map(|piece| saving.put(piece).unwrap());
    is_dead.store(true, Ordering::Relaxed);
    drop(saving);
    // Its contents are half in a pack that nobody else needs, half in one that is not finished.
    store.remove("before").unwrap();
    store.gc(Duration::ZERO).unwrap();
    let packs = pieces.map(|piece| piece.place.unwrap().pack);
    let source = Source::new("one", store.open_packs(&packs).unwrap());
    assert_eq!(read_all(&source.into(), pieces.to_vec(), 1).unwrap(), memory.concat());
    assert!(!folder.images().join("one").exists() || store.names().unwrap().is_empty());
    // Its name is free meanwhile.
    Program::of(&[9]).save(&store, "one").unwrap();
    store.gc(Duration::ZERO).unwrap();
    assert!(store.open_packs(&packs).is_ok());
    drop(program);
    store.gc(Duration::ZERO).unwrap();
    assert!(store.open_packs(&packs).is_err());
    assert_eq!(folder.packs().len(), 1);
    assert_eq!(Program::load(&store, "one").unwrap(), Program::of(&[9]));
}

#[test]
fn a_program_that_has_the_root_is_enough() {
    let folder = Folder::new();
    let store = folder.store();
    let (mortal, is_dead) = mortal(&folder);
    let saving = mortal.save("one").unwrap();
    let writer = Writer::from_descriptors(saving.hand_out(1 << 20).unwrap()).unwrap();
    let memory = random(1, SMALL);
    let piece = writer.put(&memory).unwrap();
    is_dead.store(true, Ordering::Relaxed);
    drop(saving);
    let packs = [piece.place.unwrap().pack];
    store.gc(Duration::ZERO).unwrap();
    let source = Source::new("one", store.open_packs(&packs).unwrap());
    assert_eq!(read_all(&source.into(), vec![piece], 1).unwrap(), memory);
    drop(writer);
    store.gc(Duration::ZERO).unwrap();
    assert!(store.open_packs(&packs).is_err() && folder.in_store("packs", "new").is_empty());
}

/// The program goes on after the save, and reads from the store until it has all.
#[test]
fn a_kept_program_keeps_its_pieces() {
    let program = Living::new();
    let folder = Folder::new();
    let store = folder.store();
    let mut saving = store.save("one").unwrap();
    saving.keep_for(program.pid()).unwrap();
    let saved = Program::of(&[1, 2]);
    let contents = saved.put(&saving).unwrap();
    let pack = saving.put(&saved.memory[0].1).unwrap().place.unwrap().pack;
    saving.finish(Program::manifest(), &contents).unwrap();
    let again = store.open_packs(&[pack]);
    drop(saving);
    store.remove("one").unwrap();
    store.gc(Duration::ZERO).unwrap();
    assert!(again.is_ok() && store.open_packs(&[pack]).is_ok(), "it may still read them");
    drop(program);
    store.gc(Duration::ZERO).unwrap();
    assert!(store.open_packs(&[pack]).is_err());
    let mut saving = store.save("two").unwrap();
    saving.keep_for(std::process::id()).unwrap();
    let contents = saved.put(&saving).unwrap();
    saving.finish(Program::manifest(), &contents).unwrap();
    saving.release();
    drop(saving);
    assert!(folder.in_store("roots", "").is_empty());
}
