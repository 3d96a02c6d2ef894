//! `vramctl ray`.

use super::*;

/// `vramctl ray` becomes a program in the Python that comes first on PATH, which may have no Ray.
#[test]
fn ray_is_handed_over_to_python() {
    let machine = Machine::new();
    let folder = machine.folder.path().join("python");
    fs::create_dir(&folder).unwrap();
    let ran = |arguments: &[&str]| machine.cli("ray").args(arguments).env("PATH", &folder).output().unwrap();
    let nobody = ran(&["pause", "engine"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("cannot start python3"), "{nobody:?}");
    let python = folder.join("python3");
    common::write_executable(&python, "#!/bin/sh\nshift 3\nprintf '%s;' \"$@\"\nexit 5\n");
    let handed = ran(&["pause", "engine", "--json", "--help"]);
    assert_eq!((handed.status.code(), handed.stdout.as_slice()), (Some(5), b"pause;engine;--json;--help;".as_slice()), "{handed:?}");
    common::write_executable(&python, format!("#!/bin/sh\nexec {} -S \"$@\"\n", python_without_packages()));
    let without = ran(&["pause", "engine"]);
    assert_eq!(without.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&without.stderr).contains("has no module ray; put the python3"), "{without:?}");
}

fn python_without_packages() -> String {
    let ran = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(ran.stdout).unwrap().trim().to_owned()
}
