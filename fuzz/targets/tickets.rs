//! A ticket in the queue, which another user's process may have written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fs::File;
use std::io::Write;
use std::sync::LazyLock;
use std::time::Instant;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::queue::{Entry, Stage, Ticket};
use vramctl_host::file_lock::{Sharing, try_lock};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a directory"));

fuzz_target!(|text: &[u8]| {
    let directory = Directory::at(FOLDER.path()).expect("the directory");
    let ahead = FOLDER.path().join("1.ticket");
    let mut file = File::create(&ahead).expect("a file");
    file.write_all(text).expect("room for it");
    assert!(try_lock(&file, Sharing::Exclusive).expect("a lock"));
    let ticket = Ticket { who: "next".into(), gpus: vec!["GPU-1".into()], command: 1, stage: Stage::Queued, within: None, pid: 0 };
    let entry = Entry::take(&directory, ticket).expect("an entry");
    let before = entry.wait(Instant::now(), true, &mut |_| ());
    if let Ok(ticket) = serde_json::from_slice::<Ticket>(text) {
        let counts = ticket.gpus.iter().any(|gpu| gpu == "GPU-1") && ticket.within.is_none() && ticket.command != 1;
        assert!(!counts || before == Err(vec![ticket]), "it is ahead");
    } else {
        assert_eq!(before, Ok(()), "what is no ticket stops nobody");
    }
    drop(file);
    assert_eq!(entry.wait(Instant::now(), true, &mut |_| ()), Ok(()), "its owner has died");
    assert!(!ahead.exists());
});
