//! The directory of the control sockets.

use super::*;

#[test]
fn stale_sockets_are_removed() {
    let machine = Machine::without_gpus();
    let stale = machine.socket(999_999_999);
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    machine.vramctl("ps").expect(0, "", "no process is managed");
    assert!(!stale.exists());
}

#[test]
fn files_that_are_not_sockets_are_left_alone() {
    let machine = Machine::without_gpus();
    for name in ["notes.txt", "x.sock", "-1.sock"] {
        fs::write(machine.sockets().join(name), "mine").unwrap();
    }
    machine.vramctl("ps").expect(0, "", "no process is managed");
    assert_eq!(fs::read_dir(machine.sockets()).unwrap().count(), 3);
}

#[test]
fn an_unsafe_directory_is_refused() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    // Open to the group only, to others only, and to both.
    for open in [0o750, 0o720, 0o710, 0o705, 0o755] {
        fs::set_permissions(machine.sockets(), Permissions::from_mode(open)).unwrap();
        machine.vramctl("ps").expect(1, "", "chmod 700 it if only you use it, else set VRAMCTL_DIR");
    }
    let pause = machine.vramctl("pause --json");
    assert_eq!((pause.code, &pause.only_json()["error"]["code"]), (Some(1), &json!("failed")));

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let link = machine.folder.path().join("link");
    symlink(machine.sockets(), &link).unwrap();
    let ps = Ran::of(machine.cli("ps").env("VRAMCTL_DIR", &link));
    ps.has(1, "", "/link: a symbolic link; set VRAMCTL_DIR to the directory itself");
    let file = machine.folder.path().join("file");
    fs::write(&file, "").unwrap();
    for arguments in [&["ps"][..], &["top", "--once"]] {
        let ran = Ran::of(machine.cli(arguments).env("VRAMCTL_DIR", &file));
        ran.has(1, "", "/file: not a directory; set VRAMCTL_DIR to one");
        assert_eq!(ran.err.matches("/file").count(), 1, "{ran:?}");
    }
    // Only root can become another user.
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        fs::set_permissions(machine.folder.path(), Permissions::from_mode(0o711)).unwrap();
        // Where the other user can execute it.
        let copy = machine.folder.path().join("vramctl");
        copy_command(&copy);
        let ran = Ran::of(machine.command(&copy, &["ps"]).uid(65534));
        ran.has(1, "", "owned by user 0, not by you; set VRAMCTL_DIR to a directory of yours");
    }
}

/// Root sees it, and does not find it where root's own programs are. It was said to be starting: its directory has its user's number.
#[test]
fn a_program_of_another_user_is_told_from_one_that_starts() {
    const NOBODY: u32 = 65534;
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let machine = Machine::without_gpus();
    fs::set_permissions(machine.folder.path(), Permissions::from_mode(0o711)).unwrap();
    let copy = machine.folder.path().join("libvramctl.so");
    fs::copy(library(), &copy).unwrap();
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).unwrap();
    let name = format!("theirs-{}", std::process::id());
    let mut command = machine.command("sleep", &["600"]);
    command.env("LD_PRELOAD", &copy).env("VRAMCTL_NAME", &name).env("VRAMCTL_JOB", format!("run-{name}"));
    command.env_remove("VRAMCTL_DIR").env_remove("XDG_RUNTIME_DIR");
    let theirs = Killed(command.uid(NOBODY).spawn().unwrap());
    let pid = theirs.0.id();
    let is = format!("is nobody's: `sudo -u nobody vramctl …`, or with VRAMCTL_DIR=/tmp/vramctl-{NOBODY}");
    common::eventually("it runs", || fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("libvramctl.so"));
    // Where root's programs without these variables are looked for, too.
    for command in [format!("pause {name}"), format!("status {name}"), format!("resume --name {name}")] {
        let mut as_root = machine.cli(&*command);
        Ran::of(as_root.env_remove("VRAMCTL_DIR").env_remove("XDG_RUNTIME_DIR")).expect(3, "", &format!("{name} (pid {pid}) {is}"));
    }
    let mut as_root = machine.cli("pause");
    Ran::of(as_root.env_remove("VRAMCTL_DIR").env("XDG_RUNTIME_DIR", machine.folder.path())).expect(
        3,
        "",
        "to act on one: `sudo -u USER vramctl …`",
    );
    machine.vramctl(&format!("pause --pid {pid}")).expect(3, "", &format!("process {pid} is not managed: it {is}"));
}

/// Names come from other programs: one must not pass for a message of the command, nor do harm where it is copied into a shell.
#[test]
fn a_name_may_be_anything() {
    let machine = Machine::without_gpus();
    let strange = "it's a\nerror: all is lost";
    let (odd, even) = (Fake::new(&machine, strange, &["x"]), Fake::new(&machine, "a b", &["x"]));
    let place_of = |line: &str| line.starts_with("error: all is lost");
    for arguments in ["ps", "status", "pause --all", "pause --name nobody", "resume"] {
        let ran = machine.vramctl(arguments);
        assert!(!format!("{}\n{}", ran.out, ran.err).lines().any(place_of), "{arguments}: {ran:?}");
    }
    let pause = |word: &str| Ran::of(&mut machine.cli(&["pause", word]));
    let all = Ran::of(&mut machine.cli(&["pause", "a b", "--all"]));
    all.has(6, "", "a b is a process: `vramctl pause --name='a b'`");
    pause("a b").expect(0, "nothing to do: x of a b", "");
    pause(strange).expect(2, "", "");
    let exact = Ran::of(&mut machine.cli(&["pause", "--name", strange]));
    exact.has(0, &format!("it's a error: all is lost (pid {})", odd.pid()), "");
    assert_eq!((odd.asked().len(), even.asked().len()), (2, 2));
}

#[test]
fn sockets_are_in_the_runtime_directory_by_default() {
    let machine = Machine::without_gpus();
    let base = machine.folder.path();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    fs::rename(machine.sockets(), base.join("vramctl")).unwrap();
    for program in [PathBuf::from(command_line()), script("pause.sh")] {
        let arguments: &[&str] = if program.extension().is_some() { &[] } else { &["pause"] };
        let mut command = machine.command(program, arguments);
        command.env_remove("VRAMCTL_DIR").env("XDG_RUNTIME_DIR", base);
        let ran = Ran::of(&mut command);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
}
