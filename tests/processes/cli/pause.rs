//! `vramctl pause` and `vramctl resume`.

use super::*;

#[test]
fn a_dry_run_says_what_a_pause_would_do_and_does_nothing() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("vllm");
    let run = machine.vramctl("pause weights --dry-run");
    run.has(0, &format!("engine (pid {}): a pause would free 1.00 GiB", engine.pid()), "");
    run.has(0, "Host memory for the contents: 1.00 GiB needed, 1.50 GiB available.", "");
    let row: Vec<_> = run.out.lines().find(|line| line.starts_with("weights")).unwrap().split_whitespace().collect();
    assert_eq!(row, ["weights", "1.00", "GiB", "1", "1.00", "GiB", "host"]);
    assert!(!run.out.contains("kv_cache"), "{run:?}");

    machine.vramctl("pause --dry-run").expect(4, "", "too little host memory to keep the contents: 2.00 GiB needed, 1.50 GiB available");
    let refused = machine.vramctl("pause --discard --dry-run");
    refused.has(1, "1.00 GiB discard", "the prefix cache of vllm");
    machine.vramctl("pause --discard --dry-run --force").expect(0, "0 B needed", "");
    let json = machine.vramctl("pause --discard --dry-run --json");
    assert_eq!(json.code, Some(1));
    let process = &json.only_json()["processes"][0];
    assert_eq!(process["plan"]["tags"][1], json!({"tag": "weights", "allocations": 1, "bytes": GIB, "backup": {"discard": GIB}}));
    assert_eq!(process["error"]["code"], "prefix_cache");
    assert!(machine.vramctl("pause weights --dry-run --json").only_json()["processes"][0].get("error").is_none());
    machine.vramctl("pause lost --dry-run").expect(6, "", "lost is neither a tag nor a process");
    assert!(engine.asked().is_empty(), "{:?}", engine.asked());
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("pause --dry-run").expect(0, "nothing to pause", "");
}

#[test]
fn one_process_is_paused_and_resumed_without_a_target() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let who = format!("engine (pid {})", engine.pid());

    let pause = machine.vramctl("pause kv_cache --discard --timeout 2.5");
    assert_eq!(pause.out, format!("paused kv_cache of {who}: 1.00 GiB freed in 23 ms\n  1.00 GiB discarded\n  wait 3, unmap 20 ms\n"));
    pause.has(0, "", "");
    assert_eq!(pause.err, "", "no progress bar where there is no terminal");
    let wanted = PauseRequest {
        selection: Selection { tags: vec!["kv_cache".into()], lenient: true, ..Selection::default() },
        options: discard(),
        ..held()
    };
    assert_eq!(engine.asked(), [Request::Pause(wanted)]);

    machine.vramctl("pause").expect(0, &format!("paused weights of {who}: 1.00 GiB freed"), "");
    assert_eq!(engine.asked()[1], Request::Pause(held()), "all is asked for as all");
    machine.vramctl("pause").expect(0, &format!("nothing to do: kv_cache, weights of {who} are already paused"), "");
    let resumed = format!("resumed weights of {who}: 1.00 GiB allocated in 23 ms\n  1.00 GiB restored from host memory\n");
    machine.vramctl("resume weights").expect(0, &resumed, "");
    let quiet = machine.vramctl("resume --quiet");
    assert_eq!((quiet.code, quiet.out.as_str(), quiet.err.as_str()), (Some(0), "", ""));
}

#[test]
fn a_transition_is_reported_as_json() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let answer = machine.vramctl("pause weights --json");
    assert_eq!(answer.code, Some(0));
    let answer = answer.only_json();
    let process = &answer["processes"][0];
    assert_eq!((&process["pid"], &process["name"], &process["tags"]), (&json!(engine.pid()), &json!("engine"), &json!(["weights"])));
    let report = &process["report"];
    assert_eq!((&report["bytes"], &report["kept_bytes"], &report["discarded_bytes"]), (&json!(GIB), &json!(GIB), &json!(0)));
    assert_eq!((&report["ms"], &report["stages"]["unmap"]), (&json!(23.4), &json!(20.0)));
}

#[test]
fn an_unknown_tag_error_lists_the_known_tags() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    machine.vramctl("pause wieghts").expect(6, "", "wieghts is neither a tag nor a process; did you mean weights?");
    machine.vramctl("pause lost").expect(
        6,
        "",
        "lost is neither a tag nor a process; the tags are kv_cache, weights; the processes are engine",
    );
    let answer = machine.vramctl("pause wieghts --json");
    assert_eq!(answer.code, Some(6));
    assert_eq!(answer.only_json()["error"]["known_tags"], json!(["kv_cache", "weights"]));
    machine.vramctl("pause kv,weights").expect(2, "", "comma");
    assert!(engine.asked().is_empty());
}

#[test]
fn a_shortage_says_what_is_missing_and_what_helps() {
    let machine = Machine::without_gpus();
    let trainer = Fake::new(&machine, "trainer", &["optimizer"]);
    let holder = trainer.pid();
    let engine =
        Fake::reacting(&machine, "engine", &["weights"], move |request| is_transition(request).then(|| Reaction::Answer(shortage(holder))));
    let resume = machine.vramctl("resume --name engine");
    resume.has(4, "", &format!("error: engine (pid {}): too little memory on device 0: 4.00 GiB needed, 1.00 GiB free", engine.pid()));
    resume.has(4, "", &format!("3.00 GiB short; held by pid {holder} (trainer) 3.00 GiB"));
    resume.has(4, "", &format!("hint: trainer (pid {holder}) is managed too; `vramctl pause --pid {holder}` frees 1.00 GiB"));

    let answer = machine.vramctl("resume --name engine --json");
    assert_eq!(answer.code, Some(4));
    let error = &answer.only_json()["processes"][0]["error"];
    assert_eq!((&error["code"], &error["shortage"]["needed"]), (&json!("device_memory"), &json!(4 * GIB)));

    // If one of several cannot be resumed, the others still are.
    machine.vramctl("pause --name trainer").expect(0, "", "");
    machine.vramctl("resume --all").expect(4, "resumed optimizer of trainer", "too little memory");
}

#[test]
fn refusals_have_exit_codes_of_their_own() {
    let machine = Machine::without_gpus();
    let errors = [
        (Error::Busy(Duration::from_millis(50)), 5, "had not finished after 50 ms"),
        (Error::Capturing, 5, "captured"),
        (Error::HostMemory { needed: 2 * GIB, available: GIB, capped: false }, 4, "2.00 GiB needed, 1.00 GiB available. Free 1.00 GiB, or"),
        (
            Error::HostMemory { needed: 2 * GIB, available: GIB, capped: true },
            4,
            "available under VRAMCTL_HOST_CAP. Start the program again with 1.00 GiB more",
        ),
        (Error::Internal("x".into()), 1, "please report it"),
    ];
    for (error, code, text) in errors {
        let refusal = Refusal::from(&error);
        let fake = Fake::reacting(&machine, "engine", &["weights"], move |request| {
            is_transition(request).then(|| Reaction::Answer(Reply::Error(refusal.clone())))
        });
        machine.vramctl(&format!("pause --hold-timeout 0.2 --pid {}", fake.pid())).expect(code, "", text);
    }
}

#[test]
fn late_memory_is_reported() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| {
        let report = Report { allocations: 1, bytes: GIB, kept_bytes: GIB, late_bytes: GIB / 2, ..Report::default() };
        is_transition(request).then_some(Reaction::Answer(Reply::Done(report)))
    });
    machine.vramctl("pause --quiet").expect(0, "", "warning: engine");
    machine.vramctl("pause").expect(0, "paused weights of engine", "512.00 MiB back yet");
}

/// After ^C, users want to know the state of the pause.
#[test]
fn an_interrupted_command_reports_the_state_of_the_pause() {
    let interrupted = |machine: &Machine, engine: &Fake, line: &[&str]| {
        let mut command = machine.cli(line);
        let child = interruptible(&mut command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while engine.state.lock().unwrap().transitions == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: touches no memory; the child is ours and has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGINT), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "");
        String::from_utf8(output.stderr).unwrap()
    };
    let machine = Machine::without_gpus();
    let engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains(&format!("engine (pid {}): the pause is being undone (save 256.00 MiB of 1.00 GiB)", engine.pid())), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    drop(engine);

    let silent = |request: &Request| is_transition(request).then_some(Reaction::BeSilent);
    let engine = Fake::reacting(&machine, "engine", &["weights"], silent);
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains("the pause was cancelled; nothing has changed"), "{text}");
    drop(engine);

    let engine = Fake::reacting(&machine, "engine", &["weights"], silent);
    engine.state.lock().unwrap().tags[0].1 = TagState::Paused;
    let text = interrupted(&machine, &engine, &["resume"]);
    assert!(text.contains("the resume was cancelled; nothing has changed"), "{text}");
    engine.state.lock().unwrap().transitions = 0;
    let text = interrupted(&machine, &engine, &["pause"]);
    assert!(text.contains("the pause is complete"), "{text}");
}

/// The progress bar and the terminal's `^C` are cleared before the message.
#[test]
fn on_a_terminal_an_interrupted_command_leaves_a_clean_line() {
    let machine = Machine::without_gpus();
    let _engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    let program = "\
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    # A background job that runs these tests has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[1], [sys.argv[1], 'pause'])
signal.alarm(100)
said = b''
while b'wait' not in said:
    said += os.read(terminal, 4096)
os.write(terminal, b'\\x03')
try:
    while part := os.read(terminal, 4096):
        said += part
except OSError:
    pass
sys.stdout.buffer.write(said)";
    let ran = machine.command("python3", &["-c", program, command_line()]).env("TERM", "xterm").env("NO_COLOR", "1").output().unwrap();
    let said = String::from_utf8(ran.stdout).unwrap();
    let (before, message) = said.rsplit_once("\r\u{1b}[2K").unwrap_or_else(|| panic!("nothing was wiped: {said:?}"));
    assert!(before.contains("wait") && message.starts_with("interrupted: engine"), "{said:?}");
    assert!(message.contains("the pause is being undone") && message.ends_with('\n') && message.lines().count() == 1, "{said:?}");
}

#[test]
fn the_command_waits_for_a_long_pause() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| {
        if is_transition(request) {
            // Longer than the client's own polling interval.
            thread::sleep(Duration::from_millis(2500));
        }
        None
    });
    machine.vramctl("pause").expect(0, "paused weights of engine", "");
}

#[test]
fn a_process_that_ends_in_the_middle_is_an_error() {
    let machine = Machine::without_gpus();
    let _engine = Fake::reacting(&machine, "engine", &["weights"], |request| is_transition(request).then_some(Reaction::HangUp));
    machine.vramctl("pause").expect(1, "", "ended before it answered");
    let answer = machine.vramctl("pause --json");
    assert_eq!(answer.code, Some(1));
    assert_eq!(answer.only_json()["processes"][0]["error"]["code"], "failed");
}

/// A child of the program may hold the socket open after the program's death, so no end of file is seen.
#[test]
fn a_dead_process_whose_socket_stays_open_is_given_up() {
    let machine = Machine::without_gpus();
    // Answers only a status, and has a child that keeps its descriptors open.
    let program = r#"
import json, os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["VRAMCTL_DIR"] + "/%d.sock" % os.getpid())
listener.listen()
print("ready", flush=True)
hello = dict(protocol=1, library="9.9.9", pid=os.getpid(), name="engine", program="engine")
tag = dict(tag="weights", state="active", allocations=1, bytes=1, paused_bytes=0, host_bytes=0, disk_bytes=0, backup={})
host = dict(used_bytes=0, ready_bytes=0, pinned_bytes=0)
status = dict(hello, reply="status", process_tag=None, tags=[tag], devices=[], host=host, late_bytes=0)
while True:
    client, _ = listener.accept()
    for line in client.makefile("r"):
        request = json.loads(line)["request"]
        if request not in ("hello", "status"):
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            print(child, flush=True)
            time.sleep(600)
        try:
            client.sendall(json.dumps(status if request == "status" else dict(hello, reply="hello")).encode() + b"\n")
        except BrokenPipeError:
            break
"#;
    let mut engine = machine.command("python3", &["-c", program]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(engine.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    let pause = machine.begin("pause");
    let child: i32 = said.next().unwrap().unwrap().parse().unwrap();
    engine.kill().unwrap();
    engine.wait().unwrap();
    let ran = Ran::end_of(pause);
    // SAFETY: touches no memory; the process is the one that was just started.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0, "its child was still there");
    ran.has(1, "", "ended before it answered");
}

/// The last option wins, so that users can override an alias.
#[test]
fn a_program_is_held_unless_told_otherwise() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["cache"]);
    for (line, wanted) in
        [("pause --no-hold", None), ("pause --hold-timeout 300 --timeout 100", Some(300)), ("pause --timeout 100", Some(100))]
    {
        machine.vramctl(line).expect(0, "paused cache", "");
        machine.vramctl("resume").expect(0, "resumed cache", "");
        let asked = engine.asked();
        assert!(
            matches!(&asked[asked.len() - 2], Request::Pause(PauseRequest { hold, .. }) if *hold == wanted.map(Duration::from_secs)),
            "{line}: {asked:?}"
        );
    }
    machine.vramctl("pause --no-hold --hold-timeout 3").expect(2, "", "--hold-timeout");
}

#[test]
fn pause_requests_a_guard_only_if_told() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["cache"]);
    for (line, wanted) in [("pause --no-hold --guard", true), ("pause", false)] {
        machine.vramctl(line).expect(0, "paused cache", "");
        machine.vramctl("resume").expect(0, "resumed cache", "");
        let asked = engine.asked();
        assert!(matches!(&asked[asked.len() - 2], Request::Pause(pause) if pause.options.guard == wanted), "{line}: {asked:?}");
    }
}
