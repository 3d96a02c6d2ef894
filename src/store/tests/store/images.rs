//! Images, as long as nothing goes wrong.

use crate::common::{Folder, Program, SMALL, random, read_all};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use vramctl_store::{Allocation, Caller, Contents, Error, PIECE_BYTES, Piece, Source, Store, Writer, cut};

#[test]
fn what_was_saved_is_loaded() {
    let folder = Folder::on_disk();
    let store = folder.store();
    let mut program = Program::of(&[1, 0, 2, 1]);
    // Several pieces, of which one is zeros, and one is no whole block.
    let mut large = random(9, 3 * PIECE_BYTES + 777);
    large[PIECE_BYTES..2 * PIECE_BYTES].fill(0);
    program.memory.push(("large".into(), large));
    program.save(&store, "one").unwrap();
    assert_eq!(Program::load(&store, "one").unwrap(), program);
    assert_eq!(Program::load(&Store::open(&folder.images()).unwrap(), "one").unwrap(), program);
    let image = store.inspect("one").unwrap();
    let verified = image.verify().unwrap();
    assert!(verified.errors.is_empty(), "{:?}", verified.errors);
    assert_eq!(image.manifest().contents.len(), 5);
    assert!(matches!(store.load("other", &Caller::default()), Err(Error::NoImage(_))));
    assert!(matches!(program.save(&store, "one"), Err(Error::Exists(_))));
    assert_eq!(Program::load(&store, "one").unwrap(), program);
    for entry in ["one", ".store", ".store/packs", ".store/roots", "one/files/deep"] {
        assert_eq!(fs::metadata(folder.images().join(entry)).unwrap().permissions().mode() & 0o777, 0o700, "{entry}");
    }
    assert!(folder.in_store("roots", "").is_empty(), "a save that has ended has no root");
}

#[test]
fn equal_pieces_are_stored_once() {
    let folder = Folder::on_disk();
    let store = folder.store();
    Program::of(&[1, 2, 1, 0]).save(&store, "one").unwrap();
    Program::of(&[1, 2, 5]).save(&store, "two").unwrap();
    let sizes: Vec<_> = folder.packs().iter().map(|pack| fs::metadata(pack).unwrap().len()).collect();
    let all: u64 = sizes.iter().sum();
    assert_eq!(all, 4 * SMALL as u64, "{sizes:?}: 1, 2, 5, and the first once more, which is longer than the third");
    let images = store.images().unwrap();
    let told: Vec<_> = images.iter().map(|image| (&*image.name, image.contents, image.stored, image.shared)).collect();
    let small = SMALL as u64;
    assert_eq!(told[0], ("one", 4 * small - 300, 3 * small - 300, 2 * small - 100));
    assert_eq!(told[1], ("two", 3 * small - 300, 3 * small - 300, 2 * small - 100));
}

/// In a program's own process, and others write beside it.
#[test]
fn several_threads_and_processes_write_one_image() {
    let folder = Folder::on_disk();
    let store = folder.store();
    Program::of(&[1]).save(&store, "before").unwrap();
    let mut saving = store.save("one").unwrap();
    let programs = [random(2, PIECE_BYTES + 10), random(3, 3 * PIECE_BYTES), random(1, SMALL)];
    let put_all = |writer: &Writer, memory: &[u8]| {
        let cuts: Vec<_> = cut(0, memory.len() as u64).collect();
        let next = AtomicUsize::new(0);
        let put = || {
            let mut own = Vec::new();
            while let Some((at, bytes)) = cuts.get(next.fetch_add(1, Ordering::Relaxed)) {
                own.push((*at, writer.put(&memory[*at as usize..][..*bytes]).unwrap()));
            }
            own
        };
        let mut pieces: Vec<(u64, Piece)> =
            thread::scope(|scope| [(); 3].map(|()| scope.spawn(put)).into_iter().flat_map(|thread| thread.join().unwrap()).collect());
        pieces.sort_by_key(|(at, _)| *at);
        pieces.into_iter().map(|(_, piece)| piece).collect::<Vec<_>>()
    };
    let own = put_all(saving.writer(), &programs[0]);
    let mut others = Vec::new();
    for memory in &programs[1..] {
        // The descriptors are all that another process has.
        let writer = Writer::from_descriptors(saving.hand_out(memory.len() as u64).unwrap()).unwrap();
        others.push(put_all(&writer, memory));
        assert_eq!(writer.written().bytes, memory.len() as u64);
        writer.finish().unwrap();
        assert!(writer.put(&[1]).is_err(), "it has finished");
    }
    assert!(others[1][0].place.is_some() && saving.written().known == 0, "the other process knows what the store has");
    // Until then, it can read its pieces back.
    let packs: Vec<_> = others[0].iter().map(|piece| piece.place.unwrap().pack).collect();
    let source = Source::new("one", store.open_packs(&packs).unwrap());
    let (packs, descriptors) = source.descriptors().unwrap();
    let source = Source::from_descriptors("one", &packs, descriptors).unwrap();
    assert_eq!(read_all(&source.into(), others[0].clone(), 2).unwrap(), programs[1]);
    others.insert(0, own);
    let contents = others.iter().zip(&programs).map(|(pieces, memory)| {
        let bytes = memory.len() as u64;
        let of = Allocation { bytes, ranges: vec![(0, bytes)], ..Allocation::default() };
        Contents { of, pieces: pieces.iter().map(|piece| piece.id).collect() }
    });
    saving.finish(Program::manifest(), &contents.collect::<Vec<_>>()).unwrap();
    drop(saving);
    let loaded = Program::load(&store, "one").unwrap();
    assert_eq!(loaded.memory.into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>(), programs);
    assert_eq!(
        folder.in_store("packs", "index").len(),
        3,
        "the first image's, this process's, and one of another: packs without pieces are gone"
    );
    assert!(folder.in_store("packs", "new").is_empty());
}

#[test]
fn pieces_go_with_the_last_image_that_has_them() {
    let folder = Folder::on_disk();
    let store = folder.store();
    let soon = Duration::ZERO;
    let [one, two] = [Program::of(&[1, 2, 3, 4, 5]), Program::of(&[1, 6])];
    one.save(&store, "one").unwrap();
    two.save(&store, "two").unwrap();
    assert_eq!(store.gc(soon).unwrap().packs, 0);
    let image = store.inspect("one").unwrap();
    assert!(matches!(store.remove("one"), Err(Error::Busy(_))), "somebody loads it");
    assert!(matches!(store.gc(soon), Err(Error::Busy(_))));
    drop(image);
    store.remove("one").unwrap();
    assert!(matches!(store.remove("one"), Err(Error::NoImage(_))));
    let cleaned = store.gc(soon).unwrap();
    assert!(cleaned.left.is_empty(), "{:?}", cleaned.left);
    assert_eq!((cleaned.packs, cleaned.freed), (1, 4 * SMALL as u64), "piece 1 is in a new pack");
    assert_eq!(Program::load(&store, "two").unwrap(), two);
    store.remove("two").unwrap();
    assert_eq!(store.gc(soon).unwrap().packs, 2);
    assert!(folder.packs().is_empty() && folder.in_store("packs", "index").is_empty());
    assert!(store.images().unwrap().is_empty());
    one.save(&store, "one").unwrap();
    assert_eq!(Program::load(&store, "one").unwrap(), one);
}

#[test]
fn an_image_goes_elsewhere_and_comes_back() {
    let folder = Folder::on_disk();
    let store = folder.store();
    let program = Program::of(&[1, 2, 0, 3]);
    program.save(&store, "one").unwrap();
    Program::of(&[7]).save(&store, "other").unwrap();
    let exported = folder.path("exported");
    assert_eq!(store.export("one", &exported).unwrap().stored(), 3 * SMALL as u64 - 100);
    assert!(matches!(store.export("one", &exported), Err(Error::Exists(_))));
    assert_eq!(Program::load(&Store::open(&exported).unwrap(), "one").unwrap(), program);
    assert_eq!(store.import(&exported, "one", "again").unwrap().stored(), 0, "the store has all of it");
    assert_eq!(Program::load(&store, "again").unwrap(), program);
    assert_eq!(store.names().unwrap(), ["again", "one", "other"]);
}

/// The caller has them all, and asks for more.
#[test]
fn no_buffer_is_an_error() {
    let folder = Folder::on_disk();
    let store = folder.store();
    let saving = store.save("one").unwrap();
    let pieces = [1, 2].map(|seed| saving.put(&random(seed, SMALL)).unwrap());
    let source = std::sync::Arc::new(Source::new("one", store.open_packs(&[pieces[0].place.unwrap().pack]).unwrap()));
    thread::scope(|scope| {
        let mut reading = source.read_ahead(scope, pieces.to_vec(), vec![vec![0; SMALL]]);
        let loaded = reading.take().unwrap().unwrap();
        assert!(reading.take().unwrap_err().to_string().contains("give one back"));
        reading.give_back(loaded.buffer.unwrap());
        assert_eq!(reading.take().unwrap().unwrap().index, 1);
        assert!(reading.take().unwrap().is_none());
    });
}

/// A write to a file waits for others to the same file, so much is written to several; little is not, and no piece is lost or twice there.
#[test]
fn much_goes_to_several_packs_at_once() {
    let folder = Folder::new();
    let store = folder.store();
    let much = 75;
    for (name, pieces, packs) in [("little", 3, 1..2), ("much", much, 3..4)] {
        let before = folder.in_store("packs", "pack").len();
        let saving = store.save(name).unwrap();
        let contents = |at: u64| random(at + 1000 * pieces, PIECE_BYTES);
        thread::scope(|scope| {
            for part in 0..4 {
                let (saving, contents) = (&saving, &contents);
                scope.spawn(move || {
                    (0..pieces).filter(|at| at % 4 == part).for_each(|at| assert!(saving.put(&contents(at)).unwrap().place.is_some()));
                });
            }
        });
        let made = folder.in_store("packs", "pack").len() - before;
        assert!(packs.contains(&made), "{pieces} pieces are in {made} packs");
        let mut saving = saving;
        let ids = (0..pieces).map(|at| vramctl_store::PieceId::of(&contents(at))).collect();
        let bytes = pieces * PIECE_BYTES as u64;
        let of = Allocation { bytes, ranges: vec![(0, bytes)], ..Allocation::default() };
        saving.finish(Program::manifest(), &[Contents { of, pieces: ids }]).unwrap();
        drop(saving);
        assert!(store.inspect(name).unwrap().verify().unwrap().errors.is_empty());
        let stored: u64 = folder.in_store("packs", "pack").iter().map(|pack| fs::metadata(pack).unwrap().len()).sum();
        assert_eq!(stored, if name == "little" { bytes } else { bytes + 3 * PIECE_BYTES as u64 });
    }
}
