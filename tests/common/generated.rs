//! Files of the repository that a test makes.

use std::fs;
use std::path::Path;

/// Fails if a file is not as it is wanted to be; with `UPDATE=1`, writes it first. `of`: what it is made of.
#[track_caller]
pub fn check(file: &str, wanted: &str, of: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("UPDATE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, wanted).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let differ =
        found.lines().map(Some).chain([None; 1]).zip(wanted.lines().map(Some).chain([None; 1])).find(|(found, wanted)| found != wanted);
    let test = env!("CARGO_CRATE_NAME");
    assert!(found == wanted, "{file} is not what {of} says; `UPDATE=1 cargo test --test {test}` writes it. First difference: {differ:?}");
}
