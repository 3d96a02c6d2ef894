//! Images on disk: the contents of programs, in pieces of which each is stored once, and what belongs to them. Knows no GPU.
//!
//! ```text
//! /images/.store/format           what this is
//! /images/.store/lock             shared by saves and loads; `gc` has it alone
//! /images/.store/roots/ID         what a save works with (`root.rs`)
//! /images/.store/packs/ID.pack    pieces (`pack.rs`); ID.index says which
//! /images/NAME/manifest.json      makes it an image: renamed into place last (`manifest.rs`)
//! /images/NAME/criu, files        CRIU's part; files of the program
//! /images/NAME/contents           its pieces, in the order of loading (`contents.rs`)
//! ```
//!
//! # Example
//!
//! ```
//! use std::{fs, thread};
//! use vramctl_store::{Allocation, Buffer, Caller, Contents, Manifest, PIECE_BYTES, Process, Store, cut};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let directory = folder.path().join("images");
//! // Save. `put` may be called by several threads, and by other processes (`Saving::hand_out`).
//! let store = Store::create(&directory)?;
//! let mut saving = store.save("llama")?;
//! let mut memory = Buffer::new(3 * PIECE_BYTES + 4096);
//! memory[..PIECE_BYTES].fill(7);
//! let ranges = vec![(0, memory.len() as u64)];
//! let pieces = cut(0, memory.len() as u64).map(|(at, bytes)| Ok(saving.put(&memory[at as usize..][..bytes])?.id));
//! let pieces = pieces.collect::<Result<_, vramctl_store::Error>>()?;
//! let of = Allocation { tag: "weights".into(), bytes: memory.len() as u64, ranges, ..Allocation::default() };
//! let contents = Contents { of, pieces };
//! fs::write(saving.criu_path().join("core-1.img"), "…").unwrap();
//! let caller = Caller::current()?;
//! let process = Process { pid: 7, uids: caller.uids.clone(), gids: caller.gids.clone(), ..Process::default() };
//! saving.finish(Manifest { processes: vec![process], ..Manifest::default() }, &[contents])?;
//! drop(saving);
//!
//! // Load. Whoever reads gives buffers, such as pinned memory, and gives each back once it is copied.
//! let image = store.load("llama", &caller)?;
//! let listed = &image.manifest().contents[0];
//! let pieces = image.pieces_of(listed)?;
//! let source = image.source(&pieces)?;
//! let mut places = listed.of.ranges.iter().flat_map(|(offset, bytes)| cut(*offset, *bytes));
//! thread::scope(|scope| {
//!     let mut reading = source.read_ahead(scope, pieces, (0..8).map(|_| Buffer::for_piece()).collect());
//!     while let Some(loaded) = reading.take()? {
//!         let (at, bytes) = places.next().unwrap();
//!         match loaded.buffer {
//!             Some(buffer) => {
//!                 assert_eq!(buffer[..bytes], memory[at as usize..][..bytes]);
//!                 reading.give_back(buffer);
//!             }
//!             None => assert!(memory[at as usize..][..bytes].iter().all(|byte| *byte == 0)),
//!         }
//!     }
//!     Ok::<_, vramctl_store::Error>(())
//! })?;
//! # Ok::<_, vramctl_store::Error>(())
//! ```
//!
//! # What holds
//!
//! - An image is whole or is not there. All is durable in this order: pack, directory, index, manifest; a save that ends before, however, leaves no
//!   image, and what it leaves else goes with the next save of the name or [`Store::gc`].
//! - A pack with an index never changes. `gc` writes new packs before it removes old ones, so whoever has one open can read it to the end.
//! - Nothing that was read is handed out before its hash was seen to be right.
//! - What somebody else could have put there or could change is refused, as is what the caller may not run.
//! - While a program has its contents in the store alone, they stay where they are: see [`Saving::keep_for`].

mod caller;
mod contents;
mod copying;
mod disk;
mod error;
mod files;
mod gc;
mod hash;
mod image;
mod listing;
mod manifest;
mod name;
mod owner;
mod pack;
mod piece;
mod reading;
mod root;
mod saving;
mod store;
mod summary;
mod writer;

pub use caller::Caller;
pub use contents::{Allocation, Contents, Listed};
pub use disk::is_cached;
#[cfg(feature = "test-support")]
pub use disk::{Hook, Step};
pub use error::{Error, Result};
pub use gc::Cleaned;
pub use hash::Hash;
pub use image::{Image, Verified};
pub use manifest::{Connection, Cpu, FileHash, FilePolicy, Gpu, Listener, Manifest, OpenFile, Process, Remap, Stream, Versions};
pub use pack::{PACK_BYTES, PackFile};
pub use piece::{ALIGNMENT, Buffer, PIECE_BYTES, PackId, Piece, PieceId, Place, cut};
pub use reading::{Loaded, READERS, Reading, Source};
pub use saving::Saving;
pub use store::Store;
pub use summary::Summary;
pub use writer::{Writer, Written};
