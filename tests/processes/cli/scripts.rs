//! The scripts that need no `vramctl`.

use super::*;

/// One directory for `PATH` per installed transport, with that transport and the system tools that the scripts need.
fn transports(machine: &Machine) -> Vec<(&'static str, PathBuf)> {
    let folder_with = |transport: &'static str, program: &Path| {
        let folder = machine.folder.path().join(transport);
        fs::create_dir(&folder).unwrap();
        symlink(program, folder.join(transport)).unwrap();
        for tool in ["sh", "ls", "id", "dirname", "cat"] {
            symlink(installed(tool).unwrap(), folder.join(tool)).unwrap();
        }
        (transport, folder)
    };
    let nc = installed("nc").filter(|nc| {
        let help = Command::new(nc).arg("-h").output().unwrap();
        let help = String::from_utf8_lossy(&[help.stdout, help.stderr].concat()).into_owned();
        // A transport that cannot half-close waits until a real server times out; the fake one never does.
        help.contains("Ncat") || (help.contains("UNIX") && help.contains("socket after EOF on stdin"))
    });
    // The interpreter itself, because python3 may be a script that searches `PATH`.
    let python = installed("python3").map(|python| {
        let output = Command::new(python).args(["-c", "import sys; print(sys.executable, end='')"]).output().unwrap();
        PathBuf::from(String::from_utf8(output.stdout).unwrap())
    });
    [("socat", installed("socat")), ("nc", nc), ("python3", python)]
        .into_iter()
        .filter_map(|(transport, program)| {
            if program.is_none() {
                eprintln!("skipped: {transport} is not installed here (nc: with -U, and -N unless it is ncat), so the scripts are not tried with it");
            }
            program.map(|program| folder_with(transport, &program))
        })
        .collect()
}

fn run_script(machine: &Machine, path: &Path, name: &str, arguments: &[&str]) -> Ran {
    Ran::of(machine.command(script(name), arguments).env("PATH", path))
}

#[test]
fn scripts_pause_and_resume_through_every_transport() {
    let try_with = |transport: &'static str, path: &Path| {
        eprintln!("{transport}");
        let machine = Machine::without_gpus();
        let engine = Fake::reacting(&machine, "engine", &["kv_cache", "it's \"odd\" \\ ü"], |request| {
            if is_transition(request) {
                // Longer than any transport waits by default.
                thread::sleep(Duration::from_millis(800));
            }
            None
        });
        let run = |name: &str, arguments: &[&str]| run_script(&machine, path, name, arguments);

        let pause = run("pause.sh", &["it's \"odd\" \\ ü", "--discard", "--timeout", "2.5"]);
        pause.has(0, "\"reply\":\"done\"", "");
        assert_eq!(serde_json::from_str::<Value>(&pause.out).unwrap()["discarded_bytes"], json!(GIB));
        let tags = vec!["it's \"odd\" \\ ü".to_owned()];
        let limit = Some(Duration::from_millis(2500));
        let selection = Selection { tags, ..Selection::default() };
        let wanted = PauseRequest { selection, options: discard(), hold: limit, timeout: limit, ..PauseRequest::default() };
        assert_eq!(engine.asked(), [Request::Pause(wanted)]);

        run("resume.sh", &[]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(engine.asked()[1], Request::Resume(ResumeRequest::default()));
        run("pause.sh", &["kv_cache", "--force"]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(
            engine.asked()[2],
            Request::Pause(PauseRequest {
                selection: Selection { tags: vec!["kv_cache".into()], ..Selection::default() },
                options: PauseOptions { force: true, ..PauseOptions::default() },
                ..held()
            })
        );
        run("pause.sh", &["--no-hold"]).expect(0, "\"reply\":\"done\"", "");
        assert_eq!(engine.asked()[3], Request::Pause(PauseRequest::default()));
        run("pause.sh", &["--hold-timeout", "0.5", "--timeout", "3"]).expect(0, "\"reply\":\"done\"", "");
        let limits =
            PauseRequest { hold: Some(Duration::from_millis(500)), timeout: Some(Duration::from_secs(3)), ..PauseRequest::default() };
        assert_eq!(engine.asked()[4], Request::Pause(limits));
        run("pause.sh", &["lost", "--pid", &engine.pid().to_string()]).expect(6, "\"known_tags\":[\"kv_cache\"", "");
    };
    let machine = Machine::without_gpus();
    thread::scope(|scope| {
        for (transport, path) in transports(&machine) {
            let try_with = &try_with;
            scope.spawn(move || try_with(transport, &path));
        }
    });
}

/// Installed into a directory in `PATH`, as administrators do.
#[test]
fn a_script_works_through_a_link() {
    let machine = Machine::without_gpus();
    let link = machine.folder.path().join("pause");
    std::os::unix::fs::symlink(script("pause.sh"), &link).unwrap();
    Ran::of(&mut machine.command(&link, &["--help"])).expect(0, "usage: pause.sh", "");
}

/// Containers with separate PID namespaces may share the directory, so a PID does not identify the listener.
#[test]
fn scripts_find_processes_by_their_listening_socket() {
    let machine = Machine::without_gpus();
    let stale = std::process::id();
    drop(UnixListener::bind(machine.socket(stale)).unwrap());
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        let run = |arguments: &[&str]| run_script(&machine, &path, "pause.sh", arguments);
        run(&[]).expect(3, "", "no process is managed");
        let engine = Fake::new(&machine, "engine", &["weights"]);
        let elsewhere = 999_999_999;
        fs::rename(machine.socket(engine.pid()), machine.socket(elsewhere)).unwrap();
        run(&["--pid", &stale.to_string()]).expect(3, "", &format!("process {stale} is not managed; managed are: {elsewhere}\n"));
        for arguments in [&[][..], &["--all"], &["--pid", &elsewhere.to_string()]] {
            run(arguments).expect(0, "\"reply\":\"done\"", "");
        }
        assert_eq!(engine.asked().len(), 3);
        fs::rename(machine.socket(elsewhere), machine.socket(engine.pid())).unwrap();
        assert!(machine.socket(stale).exists());
    }
}

#[test]
fn scripts_refuse_as_the_command_line_does() {
    let machine = Machine::without_gpus();
    let path = std::env::var_os("PATH").unwrap();
    let run = |name: &str, arguments: &[&str]| run_script(&machine, Path::new(&path), name, arguments);
    run("pause.sh", &[]).expect(3, "", "no process is managed");
    run("pause.sh", &["--help"]).expect(0, "Not supported: process names, jobs of several processes", "");
    run("resume.sh", &["--help"]).expect(0, "Not supported: process names.\n", "");
    run("pause.sh", &["--explode"]).expect(2, "", "--explode");
    run("pause.sh", &["--timeout", "soon"]).expect(2, "", "number of seconds");
    run("pause.sh", &["--pid", "x"]).expect(2, "", "process id");
    run("resume.sh", &["--discard"]).expect(2, "", "for a pause");
    run("resume.sh", &["--force"]).expect(2, "", "for a pause");
    run("resume.sh", &["--no-hold"]).expect(2, "", "for a pause");
    run("resume.sh", &["--hold-timeout", "1"]).expect(2, "", "for a pause");
    run("pause.sh", &["--hold-timeout", "soon"]).expect(2, "", "number of seconds");
    run("pause.sh", &["--no-hold", "--hold-timeout", "1"]).expect(2, "", "exclude each other");

    let engine = Fake::new(&machine, "engine", &["weights"]);
    let trainer = Fake::reacting(&machine, "trainer", &["optimizer"], |request| match request {
        Request::Resume(_) => Some(Reaction::Answer(shortage(1))),
        _ => None,
    });
    run("pause.sh", &[]).expect(2, "", &engine.pid().to_string());
    run("pause.sh", &["--pid", "1"]).expect(3, "", "process 1 is not managed");
    run("pause.sh", &["--all"]).expect(0, "\"reply\":\"done\"", &format!("process {}:", trainer.pid()));
    assert_eq!((engine.asked().len(), trainer.asked().len()), (1, 1));
    run("resume.sh", &["--all"]).expect(4, "\"code\":\"device_memory\"", "");
    assert_eq!(engine.asked().len(), 2, "the others are resumed all the same");
    run("pause.sh", &["weights", "--all"]).expect(0, "\"reply\":\"done\"", "");
    run("pause.sh", &["lost", "--all"]).expect(6, "unknown_tag", "");

    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o750)).unwrap();
    run("pause.sh", &["--all"]).expect(1, "", "chmod 700");
    fs::set_permissions(machine.sockets(), Permissions::from_mode(0o700)).unwrap();
    let link = machine.folder.path().join("link");
    symlink(machine.sockets(), &link).unwrap();
    let ran = Ran::of(machine.command(script("pause.sh"), &["--all"]).env("VRAMCTL_DIR", &link));
    ran.has(1, "", "symbolic link");
}

/// One after another, an error would leave half of a job paused.
#[test]
fn a_script_does_not_pause_half_a_job() {
    let machine = Machine::without_gpus();
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        let run = |name: &str, arguments: &[&str]| run_script(&machine, &path, name, arguments);
        let strange = "it's a \"job\" \\ * ü";
        let ranks = [strange, "other", strange].map(|job| Fake::new(&machine, "engine", &["weights"]).of_job(job));
        let alone = Fake::new(&machine, "alone", &["weights"]);
        for options in [&["--all"][..], &["weights", "--all"], &["--all", "--no-hold"]] {
            run("pause.sh", options).expect(2, "", "`vramctl pause`");
        }
        assert!(ranks.iter().all(|rank| rank.asked().is_empty()) && alone.asked().is_empty());
        // What was paused by other means may come back in any order.
        run("resume.sh", &["--all"]).expect(0, "\"reply\":\"done\"", "");
        run("pause.sh", &["--pid", &ranks[0].pid().to_string()]).expect(0, "\"reply\":\"done\"", "");
        // Each is a whole job.
        let [_first, _other, second] = ranks;
        drop(second);
        run("pause.sh", &["--all"]).expect(0, "\"reply\":\"done\"", "");
    }
}

#[test]
fn a_script_sees_a_process_end_in_the_middle() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| is_transition(request).then_some(Reaction::HangUp));
    for (transport, path) in transports(&machine) {
        eprintln!("{transport}");
        run_script(&machine, &path, "pause.sh", &[]).expect(1, "", "has ended or does not answer");
    }
}
