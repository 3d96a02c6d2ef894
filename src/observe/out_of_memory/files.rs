//! Reports as files in `VRAMCTL_REPORT_DIR`. A process keeps its last ten and touches nobody else's.

use super::page::ReportPage;
use std::collections::VecDeque;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use vramctl_config as config;
use vramctl_host::{PerProcess, Unpoison};

const KEPT: usize = 10;

/// The files that this process has written, the oldest first.
static WRITTEN: PerProcess<Mutex<VecDeque<PathBuf>>> = PerProcess::new(Mutex::default);

/// Writes a page; `None` if no directory is configured.
pub fn write(page: &ReportPage) -> Option<io::Result<PathBuf>> {
    config::report_directory().map(|directory| {
        // One thread at a time, so that exactly the last ten are kept.
        let mut written = WRITTEN.get().lock().unpoisoned();
        let path = put(directory, page)?;
        written.push_back(path.clone());
        while written.len() > KEPT {
            // Somebody else may have removed it.
            let _ = written.pop_front().map(fs::remove_file);
        }
        Ok(path)
    })
}

/// Readers find a file whole or not at all.
fn put(directory: &Path, page: &ReportPage) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    // Unique: a later process, or one in another container, may have the same pid.
    let name = format!("out-of-memory-{:.6}-{}", page.time, std::process::id());
    let (unfinished, path) = (directory.join(format!(".{name}")), directory.join(format!("{name}.json")));
    let mut text = serde_json::to_vec_pretty(page)?;
    text.push(b'\n');
    let done = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished).and_then(|mut file| {
        let done = file.write_all(&text).and_then(|()| fs::rename(&unfinished, &path));
        done.inspect_err(|_| _ = fs::remove_file(&unfinished))
    });
    done.map(|()| path)
}
