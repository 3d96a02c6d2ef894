//! Files of the repository that a test makes.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Fails if a file is not as it is wanted to be; with `UPDATE=1`, writes it first. `of`: what it is made of.
#[track_caller]
pub fn check(file: &str, wanted: &str, of: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("UPDATE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, wanted).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let test = env!("CARGO_CRATE_NAME");
    assert!(found == wanted, "{file} is not what {of} says; `UPDATE=1 cargo test --test {test}` writes it:\n{}", difference(&path, wanted));
}

/// What `diff` shows, from the file to what is wanted.
fn difference(path: &Path, wanted: &str) -> String {
    let here = if path.exists() { path } else { Path::new("/dev/null") };
    let mut diff = Command::new("diff")
        .args(["-u", "--label", "the file", "--label", "wanted"])
        .arg(here)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    diff.stdin.take().unwrap().write_all(wanted.as_bytes()).unwrap();
    String::from_utf8_lossy(&diff.wait_with_output().unwrap().stdout).into_owned()
}
