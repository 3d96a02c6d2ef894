//! What the tree says of itself: the drawing of the modules, the table of the driver's functions, pages, header and snapshots that are made of the code.
//! `UPDATE=1` writes what is made.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};

mod docs;
mod errors;
mod header;
mod snapshots;
mod structure;
mod support;
mod table;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below a folder of the repository that end so; an empty ending: those without one.
fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    fn walk(folder: &Path, endings: &[&str], into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, endings, into);
            } else if endings.contains(&path.extension().unwrap_or_default().to_str().unwrap()) {
                into.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), endings, &mut found);
    found
}

/// rustfmt breaks neither comments nor macros.
#[test]
fn no_line_is_too_wide() {
    const WIDTH: usize = 180;
    let endings = ["rs", "py", "c", "h", "cu", "cuh", "sh", "toml", "js", ""];
    let all = ["src", "tests", "scripts", "python", "fuzz/targets", ".ci"].map(|folder| files(folder, &endings)).concat();
    assert!(all.len() > 400, "only {} files: is this test still looking?", all.len());
    let mut wide = Vec::new();
    // What others have packed is left as it is.
    for path in all.iter().filter(|path| !path.to_str().unwrap().contains(".min.")) {
        let text = fs::read(path).unwrap();
        for (number, line) in String::from_utf8_lossy(&text).lines().enumerate().filter(|(_, line)| line.chars().count() > WIDTH) {
            wide.push(format!("{}:{}: {} characters", path.strip_prefix(root()).unwrap().display(), number + 1, line.chars().count()));
        }
    }
    assert!(wide.is_empty(), "lines of more than {WIDTH} characters:\n{}", wide.join("\n"));
}
