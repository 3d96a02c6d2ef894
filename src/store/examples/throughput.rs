//! How fast pieces are written and read, beside the storage itself.
//!
//!     cargo run -p vramctl-store --release --example throughput DIR [GIB]
//!
//! In DIR, a file is written and read without the store first: past the page cache (`O_DIRECT`), by as many threads, in requests as large. Each figure
//! that ends with "storage" is from past the page cache, the others are from what the page cache holds. All files are removed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{env, thread};
use vramctl_store::{Allocation, Buffer, Caller, Contents, Error, Manifest, PIECE_BYTES, PieceId, Process, READERS, Store};

const O_DIRECT: i32 = 0o40000;

fn main() -> Result<(), Error> {
    let mut arguments = env::args().skip(1);
    let Some(directory) = arguments.next().map(PathBuf::from) else {
        eprintln!("usage: throughput DIR [GIB]");
        return Ok(());
    };
    let gib: f64 = arguments.next().and_then(|size| size.parse().ok()).unwrap_or(1.0);
    let pieces = ((gib * (1u64 << 30) as f64) as usize / PIECE_BYTES).max(1);
    let memory = filled(pieces);
    println!(
        "{:.1} GB in {pieces} pieces, {READERS} threads, {} processors",
        gb(pieces),
        thread::available_parallelism().map_or(0, usize::from)
    );
    let raw = directory.join("throughput.raw");
    let file = open_raw(&raw);
    time("write, plain", pieces, || each(pieces, |at, _| file.write_all_at(piece(&memory, at), (at * PIECE_BYTES) as u64).unwrap()));
    time("make it durable", pieces, || file.sync_all().unwrap());
    time("read, plain", pieces, || each(pieces, |at, buffer| file.read_exact_at(buffer, (at * PIECE_BYTES) as u64).unwrap()));
    time("hash alone, one thread", pieces, || (0..pieces).for_each(|at| assert!(!PieceId::of(piece(&memory, at)).is_zeros())));
    drop(file);
    fs::remove_file(&raw).unwrap();

    let images = directory.join("throughput.images");
    let store = Store::create(&images)?;
    let caller = Caller::current()?;
    let mut saving = store.save("image")?;
    let ids: Vec<_> = (0..pieces).map(|at| PieceId::of(piece(&memory, at))).collect();
    time("write, store", pieces, || each(pieces, |at, _| assert!(saving.put(piece(&memory, at)).unwrap().place.is_some())));
    let bytes = memory.len() as u64;
    let of = Allocation { tag: "all".into(), bytes, ranges: vec![(0, bytes)], ..Allocation::default() };
    let contents = Contents { of, pieces: ids };
    let process = Process { uids: caller.uids.clone(), gids: caller.gids.clone(), ..Process::default() };
    let manifest = Manifest { processes: vec![process], ..Manifest::default() };
    time("make it an image", pieces, || saving.finish(manifest, &[contents]).unwrap());
    drop(saving);
    time("read, store: storage", pieces, || read(&store, &caller).unwrap());
    each_pack(&images, |pack| drop(fs::read(pack).unwrap()));
    time("read, store: page cache", pieces, || read(&store, &caller).unwrap());
    each_pack(&images, |pack| {
        let file = File::open(pack).unwrap();
        let mut buffer = Buffer::for_piece();
        let length = file.metadata().unwrap().len();
        let start = Instant::now();
        (0..length / PIECE_BYTES as u64).for_each(|at| file.read_exact_at(&mut buffer, at * PIECE_BYTES as u64).unwrap());
        println!("  (plain, one thread, page cache: {:.2} GB/s)", length as f64 / 1e9 / start.elapsed().as_secs_f64());
    });
    fs::remove_dir_all(&images).unwrap();
    Ok(())
}

fn gb(pieces: usize) -> f64 {
    (pieces * PIECE_BYTES) as f64 / 1e9
}

/// Contents of which no piece is like another.
fn filled(pieces: usize) -> Buffer {
    let mut memory = Buffer::new(pieces * PIECE_BYTES);
    for (at, word) in memory.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    }
    memory
}

fn piece(memory: &Buffer, at: usize) -> &[u8] {
    &memory[at * PIECE_BYTES..][..PIECE_BYTES]
}

fn open_raw(path: &Path) -> File {
    let open = |flags| OpenOptions::new().read(true).write(true).create(true).truncate(true).custom_flags(flags).open(path);
    open(O_DIRECT).or_else(|_| open(0)).unwrap()
}

fn time(what: &str, pieces: usize, work: impl FnOnce()) {
    let start = Instant::now();
    work();
    let seconds = start.elapsed().as_secs_f64();
    println!("{what:28} {seconds:7.3} s {:7.2} GB/s", gb(pieces) / seconds);
}

/// Calls a function for each piece, from several threads, each with a buffer.
fn each(pieces: usize, work: impl Fn(usize, &mut [u8]) + Sync) {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut buffer = Buffer::for_piece();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= pieces {
                return;
            }
            work(at, &mut buffer);
        }
    };
    thread::scope(|scope| (0..READERS).for_each(|_| drop(scope.spawn(some))));
}

fn read(store: &Store, caller: &Caller) -> Result<(), Error> {
    let image = store.load("image", caller)?;
    let pieces = image.pieces_of(&image.manifest().contents[0])?;
    let source = image.source(&pieces)?;
    thread::scope(|scope| {
        let mut reading = source.read_ahead(scope, pieces, (0..2 * READERS).map(|_| Buffer::for_piece()).collect());
        while let Some(loaded) = reading.take()? {
            loaded.buffer.into_iter().for_each(|buffer| reading.give_back(buffer));
        }
        Ok(())
    })
}

fn each_pack(images: &Path, work: impl Fn(&Path)) {
    let packs = fs::read_dir(images.join(".store/packs")).unwrap().map(|entry| entry.unwrap().path());
    packs.filter(|path| path.extension().is_some_and(|ending| ending == "pack")).for_each(|path| work(&path));
}
