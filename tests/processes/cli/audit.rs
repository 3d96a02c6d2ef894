//! What the system's log is told, and the programs of other users.

use super::*;
use std::os::unix::net::UnixDatagram;

#[test]
fn the_systems_log_is_told_who_did_what_to_whom() {
    let machine = Machine::new();
    let log = machine.folder.path().join("log");
    let socket = UnixDatagram::bind(&log).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    let told = |line: &str, code| {
        Ran::of(machine.cli(line).env("VRAMCTL_AUDIT", &log)).expect(code, "", "");
        let mut text = vec![0; 4096];
        let count = socket.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..count]).into_owned()
    };
    let engine = machine.engine("engine");
    let pid = engine.pid();
    // SAFETY: touches no memory.
    let user = unsafe { libc::getuid() };
    let paused = told("pause engine", 0);
    assert!(paused.starts_with("<86>vramctl["), "{paused}");
    for part in [
        &format!("verb=pause job=\"engine\" pids={pid} owner={user} result=done bytes="),
        &format!(" user={user}"),
        "/vramctl pause engine\"",
        &format!("parent={}", std::process::id()),
    ] {
        assert!(paused.contains(part), "{part} is not in {paused}");
    }
    assert!(told("resume engine", 0).contains("verb=resume job=\"engine\""));
    assert!(told("suspend engine", 0).contains("verb=suspend"));
    told("resume engine", 0);
    let stopped = told("stop engine --timeout 100", 0);
    assert!(stopped.contains(&format!("verb=stop job=\"engine (pid {pid})\" pids={pid} result=done")), "{stopped}");
}

/// Nobody's pause waits, or fails, because nobody listens.
#[test]
fn a_log_that_is_not_there_is_nobodys_trouble() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    Ran::of(machine.cli("pause").env("VRAMCTL_AUDIT", machine.folder.path().join("none"))).expect(0, "", "");
    assert_eq!(engine.asked().len(), 1);
}

/// Another directory stands for another user's: a test has one user.
#[test]
fn root_sees_the_programs_of_all_directories() {
    let (machine, other) = (Machine::new(), Machine::new());
    let (own, theirs) = (machine.engine("own"), other.engine("theirs"));
    // SAFETY: touches no memory.
    if unsafe { libc::getuid() } != 0 {
        return machine.vramctl("ps --all-users").has(2, "", "only root sees the programs of all users");
    }
    let list = machine.vramctl("ps --all-users").expect(0, "USER", "").out;
    for program in [&own, &theirs] {
        let line = row_of(&list, program.pid()).unwrap_or_else(|| panic!("{list}"));
        assert!(line.contains("root") && line.contains("active"), "{line}");
    }
    assert!(!machine.done("ps").contains("theirs"), "unless they are asked for");
    assert!(!machine.done("ps --all-users -o name").contains("theirs"), "names are for commands that would not find it");
    let json = machine.vramctl("ps --all-users --json").expect(0, "", "").json();
    let told = json["processes"].as_array().unwrap().iter().find(|one| one["pid"] == theirs.pid()).unwrap();
    assert_eq!((&told["name"], &told["user"]), (&json!("theirs"), &json!("root")));
    let page = machine.done("metrics --all-users");
    for program in [&own, &theirs] {
        let line = format!("pid=\"{}\",user=\"root\"", program.pid());
        assert!(page.lines().any(|one| one.starts_with("vramctl_process_user_info") && one.contains(&line)), "{line} is not in {page}");
    }
    assert!(machine.vramctl("gpus --all-users").expect(0, "", "").out.contains("theirs"));
}
