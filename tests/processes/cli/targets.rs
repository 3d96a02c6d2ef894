//! Which processes a command means.

use super::*;

#[test]
fn without_processes_the_message_says_what_to_do() {
    let machine = Machine::without_gpus();
    let ps = machine.vramctl("ps");
    ps.has(0, "", "vramctl run");
    assert_eq!(ps.out, "", "a script that reads a table reads none");
    assert_eq!(machine.vramctl("ps --json").only_json(), json!({"processes": []}));
    for command in ["status", "pause", "resume --all", "pause --name engine", "set-tag x", "status engine"] {
        machine.vramctl(command).expect(3, "", "no process is managed");
    }
    let answer = machine.vramctl("pause --json");
    assert_eq!(answer.code, Some(3));
    assert_eq!(answer.only_json()["error"]["code"], "no_process");
    assert_eq!(answer.only_json()["processes"], json!([]));

    fs::remove_dir(machine.sockets()).unwrap();
    machine.vramctl("ps").expect(0, "", machine.sockets().to_str().unwrap());
    machine.vramctl("pause").expect(3, "", "no process is managed");
}

#[test]
fn a_silent_process_does_not_hide_the_others() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["weights"]);
    let stopped = Fake::reacting(&machine, "stopped", &["weights"], |_| Some(Reaction::BeSilent));
    let ps = machine.vramctl("ps -o wide");
    ps.has(0, "engine --serve", "");
    let row = row_of(&ps.out, stopped.pid()).unwrap();
    assert!(row.contains("no answer within 2 s"), "{row}");
    machine.vramctl("status").expect(5, "engine --serve", &format!("error: process {}: no answer", stopped.pid()));
    let status = machine.vramctl("status --json").expect(5, "", "").json();
    let silent = status["processes"].as_array().unwrap().iter().find(|process| process["pid"] == stopped.pid()).unwrap();
    assert_eq!((silent.get("name").is_some(), &silent["error"]["code"]), (true, &json!("busy")), "{status}");
}

/// A half-paused engine is the worst possible outcome.
#[test]
fn nothing_is_done_if_a_matching_process_does_not_answer() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let who_knows = [Stopped::new(&machine, None, 100), Stopped::new(&machine, Some("engine"), 100)];
    // In parallel, because each of them waits.
    thread::scope(|scope| {
        for line in ["pause --name engine", "resume --name engine", "pause --all", "pause --name engine --quiet", "set-tag x --name engine"]
        {
            let (machine, who_knows) = (&machine, &who_knows);
            scope.spawn(move || {
                let ran = machine.vramctl(line);
                ran.has(5, "", "kill -CONT");
                assert!(who_knows.iter().all(|stopped| ran.err.contains(&stopped.pid().to_string())), "{ran:?}");
                assert_eq!(ran.out, "", "{line}");
            });
        }
        scope.spawn(|| {
            let json = machine.vramctl("pause --name engine --json");
            assert_eq!(
                (json.code, &json.only_json()["error"]["code"], &json.only_json()["processes"]),
                (Some(5), &json!("busy"), &json!([]))
            );
        });
        scope.spawn(|| {
            let said = format!("error: engine (pid {}): no answer", who_knows[1].pid());
            machine.vramctl("status --name engine").expect(5, "engine --serve", &said);
        });
    });
    assert!(engine.asked().is_empty(), "{:?}", engine.asked());
    assert_eq!(engine.state.lock().unwrap().process_tag.as_deref(), Some("default"));
    machine.vramctl(&format!("pause --pid {}", engine.pid())).expect(0, "paused weights", "");
}

#[test]
fn a_stopped_process_with_another_name_does_not_matter() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let trainer = Stopped::new(&machine, Some("trainer"), 100);
    machine.vramctl("pause --name engine").expect(0, "paused weights of engine", "");
    machine.vramctl("status --name engine").expect(0, "weights", "");
    machine.vramctl("pause --name trainer").expect(5, "", &format!("trainer (pid {})", trainer.pid()));
    assert_eq!(engine.asked().len(), 1);
}

/// The dead process's child holds its socket open and never answers. Nobody may wait for it or be refused because of it.
#[test]
fn a_dead_process_does_not_count_as_silent() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let program = "\
import os, socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ['VRAMCTL_DIR'] + '/%d.sock' % os.getpid())
listener.listen()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
else:
    os._exit(0)";
    let mut dead = machine.command("python3", &["-c", program]).stdout(Stdio::piped()).spawn().unwrap();
    let child: i32 = BufReader::new(dead.stdout.take().unwrap()).lines().next().unwrap().unwrap().parse().unwrap();
    dead.wait().unwrap();
    let pause = machine.vramctl("pause --name engine");
    let ps = machine.vramctl("ps");
    // SAFETY: touches no memory; the process is the one that was just started.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    pause.has(0, "paused weights", "");
    assert_eq!(row_of(&ps.out, dead.id()), None, "{ps:?}");
    assert_eq!(engine.asked().len(), 1);
}

/// Each has a connection; the usual limit is 1024 open files.
#[test]
fn more_processes_are_reached_than_the_limit_of_open_files_allows() {
    let machine = Machine::without_gpus();
    let all: Vec<_> = (0..40).map(|_| Fake::new(&machine, "engine", &["weights"])).collect();
    let limited = format!("ulimit -S -n 32; exec {} pause --all --json", command_line());
    let ran = Ran::of(&mut machine.command("sh", &["-c", &limited]));
    assert_eq!((ran.code, ran.only_json()["processes"].as_array().map(Vec::len)), (Some(0), Some(all.len())), "{ran:?}");
}

/// A stopped process accepts nothing, so once its backlog is full, connecting blocks until it continues.
#[test]
fn a_stopped_process_with_a_full_queue_delays_nobody() {
    let machine = Machine::without_gpus();
    let stopped = Stopped::new(&machine, None, 0);
    let _waiting = UnixStream::connect(machine.socket(stopped.pid())).unwrap();
    let row = machine.vramctl("ps");
    row.has(0, &stopped.pid().to_string(), "");
    machine.vramctl("pause").expect(5, "", &format!("kill -CONT {}", stopped.pid()));
}

#[test]
fn several_processes_need_a_target() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]).of_job("engine");
    let twin = Fake::new(&machine, "engine", &["weights"]).of_job("engine");
    let trainer = Fake::new(&machine, "trainer", &["optimizer"]);

    let pause = machine.vramctl("pause");
    pause.has(2, "", "choose some by name or id, or all of them with --all");
    for fake in [&engine, &twin, &trainer] {
        pause.has(2, "", &fake.pid().to_string());
    }
    machine.vramctl("pause --name nobody").expect(3, "", "trainer");
    machine.vramctl("pause --pid 1").expect(3, "", "process 1 is not managed");
    machine.vramctl("pause --pid 4294967295").expect(3, "", "there is no process 4294967295");
    machine.vramctl("pause --pid 1 --all").expect(2, "", "cannot be used with");

    machine.vramctl(&format!("pause --pid {}", twin.pid())).expect(0, &format!("(pid {})", twin.pid()), "");
    assert_eq!((engine.asked().len(), twin.asked().len()), (0, 1));
    let pause = machine.vramctl("pause --name engine");
    pause.has(0, &format!("paused weights of engine (pid {})", engine.pid()), "");
    pause.has(0, &format!("weights of engine (pid {}) is already paused", twin.pid()), "");
    assert!(trainer.asked().is_empty());

    // Resuming a tag that some processes lack is a no-op there.
    let pause = machine.vramctl("pause optimizer --all");
    pause.has(0, "paused optimizer of trainer", "");
    pause.has(0, &format!("nothing to do: engine (pid {}) has none of these tags", engine.pid()), "");
    machine.vramctl("pause optimizer lost --all").expect(6, "", "the tag lost; the tags are optimizer, weights");
}

/// Nobody has named them: they have their program's name.
#[test]
fn a_name_that_means_several_jobs_is_refused_for_a_change() {
    let machine = Machine::without_gpus();
    let fakes = ["run-1", "run-2", "run-2"].map(|run| Fake::new(&machine, "serve", &["weights"]).of_job(run));
    let refused = "error: 2 programs that do not belong together are called serve; choose by id, or all of them with a pattern ('serve*'); \
                   `vramctl run --name` gives a program a name of its own:\nPID";
    for line in ["pause serve", "resume --name serve", "suspend serve", "move serve --to 1", "set-tag x --name serve", "swap serve serve*"]
    {
        let ran = machine.vramctl(line).expect(2, "", refused);
        let words = |fake: &Fake| row_of(&ran.err, fake.pid()).map(|row| row.split_whitespace().collect::<Vec<_>>());
        assert!(fakes.iter().all(|fake| words(fake).is_some_and(|words| words[1..3] == ["serve", "active"])), "{ran:?}");
    }
    let error = machine.vramctl("pause serve --json").only_json()["error"].clone();
    assert_eq!((&error["code"], error["pids"].as_array().map(Vec::len)), (&json!("several_processes"), Some(3)));
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
    machine.vramctl("status serve").expect(0, "serve --serve", "");
    machine.vramctl("pause serve*").expect(0, "paused weights of serve", "");
    assert!(fakes.iter().all(|fake| fake.asked().len() == 1));
}

#[test]
fn a_python_program_is_called_as_its_script_or_its_module() {
    let machine = Machine::without_gpus();
    let script = machine.folder.path().join("serve.py");
    fs::write(&script, "import time; time.sleep(100)").unwrap();
    let mut programs =
        [machine.cli(&["run", "--", "python3", "-u", script.to_str().unwrap()]), machine.cli(&["run", "--", "python3", "-m", "serve"])]
            .map(|mut command| command.current_dir(machine.folder.path()).spawn().unwrap());
    common::eventually("both are listed", || machine.vramctl("ps serve").out.matches("serve  starting").count() == 2);
    for program in &mut programs {
        program.kill().unwrap();
        program.wait().unwrap();
    }
}

/// Words may be processes, as for other commands, if they are no tags and nothing else chooses the processes.
#[test]
fn a_process_may_be_named_in_place_of_a_tag() {
    let machine = Machine::without_gpus();
    let (engine, weights) = (Fake::new(&machine, "engine", &["weights", "kv"]), Fake::new(&machine, "weights", &["kv"]));
    machine.vramctl("pause weights --all").expect(0, "paused weights of engine", "");
    assert!(weights.asked().is_empty(), "a tag stays a tag");
    machine.vramctl("pause engine").expect(0, "paused kv of engine", "");
    machine.vramctl(&format!("resume kv {}", engine.pid())).expect(0, "resumed kv of engine", "");
    assert!(weights.asked().is_empty());
    let asked = engine.asked().len();
    machine.vramctl("pause engine --all").expect(6, "", "the tags are kv, weights; engine is a process: `vramctl pause --name=engine`");
    machine.vramctl("resume engine nosuch").expect(6, "", "no allocation has the tag nosuch");
    machine.vramctl("pause weights").expect(2, "", "weights is the name of processes, and a tag");
    assert_eq!((engine.asked().len(), weights.asked().len()), (asked, 0));
}

#[test]
fn several_processes_are_named_by_words_and_patterns() {
    let machine = Machine::without_gpus();
    let [one, two, other] = ["engine-1", "engine-2", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]));
    let asked = || [&one, &two, &other].map(|fake| fake.asked().len());
    machine.vramctl(&format!("pause engine-1 {}", other.pid())).expect(0, "paused weights of trainer", "");
    assert_eq!(asked(), [1, 0, 1]);
    machine.vramctl("pause weights engine-*").expect(0, "paused weights of engine-2", "");
    machine.vramctl("resume -n engine-1 -n trainer").expect(0, "resumed weights of trainer", "");
    assert_eq!(asked(), [3, 1, 2]);
    for (line, wanted) in
        [("ps engine-*", [true, true, false]), ("status trainer engine-2", [false, true, true]), ("gpus engine-?", [true, true, false])]
    {
        let ran = machine.vramctl(line);
        assert_eq!(["engine-1", "engine-2", "trainer"].map(|name| ran.out.contains(name)), wanted, "{ran:?}");
    }
    let quoted = machine.vramctl("suspend eng* nobody --dry-run");
    quoted.has(3, "", "no managed process is named nobody");
}

/// `resume nccl` of a suspended job with this name would bring one tag back, and leave the others away.
#[test]
fn a_word_that_is_a_tag_and_a_name_is_refused() {
    let machine = Machine::without_gpus();
    let fakes = ["nccl", "engine"].map(|name| Fake::new(&machine, name, &["nccl", "weights"]));
    let wanted = "nccl is the name of processes, and a tag: `--name nccl` means the processes, `--all nccl` the tag";
    machine.vramctl("pause nccl").expect(2, "", wanted);
    machine.vramctl("resume weights nccl").expect(2, "", wanted);
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
    machine.vramctl("pause --name nccl").expect(0, "paused weights of nccl", "");
    machine.vramctl("pause --name nccl nccl").expect(0, "of nccl", "");
    machine.vramctl("pause --all nccl").expect(0, "of engine", "");
}

#[test]
fn a_mistyped_name_is_answered_with_the_right_one() {
    let machine = Machine::without_gpus();
    let fakes = ["engine", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]));
    machine.vramctl("pause engin").expect(3, "", "engin is neither a tag nor a process; did you mean engine?");
    machine.vramctl("pause something").expect(
        3,
        "",
        "neither a tag nor a process; the tags are weights; the processes are engine, trainer",
    );
    machine.vramctl("pause wieghts").expect(6, "", "did you mean weights?");
    for command in ["status", "ps", "gpus", "suspend", "trim", "watch"] {
        machine.vramctl(&format!("{command} tainer")).expect(3, "", "no managed process is named tainer; did you mean trainer?");
    }
    machine.vramctl("pause x* --all").expect(6, "", "no allocation has the tag x*");
    machine.vramctl("status x*").expect(3, "", "no managed process has a name like x*; the processes are engine, trainer");
    assert!(fakes.iter().all(|fake| fake.asked().is_empty()));
}

#[test]
fn a_gpu_chooses_the_processes_on_it() {
    let machine = Machine::without_gpus();
    let (here, there) = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000");
    let _fakes = ["engine", "trainer"].map(|name| Fake::new(&machine, name, &["weights"]).on_gpu(here));
    let other = Fake::new(&machine, "other", &["weights"]).on_gpu(there);
    let pause = machine.vramctl("pause --gpu aaaa");
    pause.has(0, "paused weights of engine", "");
    pause.has(0, "paused weights of trainer", "");
    assert!(other.asked().is_empty());
}

/// It does not listen before it has GPU memory.
#[test]
fn a_program_that_is_starting_is_there() {
    let machine = Machine::without_gpus();
    let mut program = machine.cli("run --name engine -- sleep 100").spawn().unwrap();
    common::eventually("it is listed", || machine.vramctl("ps").out.contains("engine  starting"));
    let why = format!("engine (pid {}) is starting: it has not allocated GPU memory yet", program.id());
    machine.vramctl("pause engine").expect(3, "", &why);
    let _other = Fake::new(&machine, "other", &["weights"]);
    for line in ["pause engine", "pause --name engine", "resume eng*", "status engine", "suspend engine"] {
        machine.vramctl(line).expect(3, "", &why);
    }
    machine.vramctl("ps").expect(0, "engine  starting", "").expect(0, "other", "");
    machine.vramctl("ps engine").expect(0, "starting", "");
    let json = machine.vramctl("ps --json").only_json();
    assert_eq!((&json["starting"][0]["name"], &json["starting"][0]["program"]), (&json!("engine"), &json!("sleep 100")));
    // With a timeout, the command waits for it.
    let waiting = machine.cli("pause engine --timeout 60").stdout(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(300));
    let _engine = Fake::new(&machine, "engine", &["cache"]);
    let done = waiting.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&done.stdout).contains("paused cache of engine"), "{done:?}");
    program.kill().unwrap();
    program.wait().unwrap();
}

/// Each reason has another way out.
#[test]
fn a_process_that_is_not_managed_is_told_why() {
    let machine = Machine::without_gpus();
    let plain = machine.command("sleep", &["100"]).spawn().unwrap();
    let start_again = "it was not started under `vramctl run`. Start it again: vramctl run -- sleep 100";
    machine.vramctl(&format!("pause --pid {}", plain.id())).expect(3, "", start_again);
    let starting = machine.cli("run sleep 100").spawn().unwrap();
    let pid = starting.id();
    // `vramctl run` itself opens the library, too, before it becomes the program.
    common::eventually("the program has the library", || {
        let has = |file: &str, text: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).is_ok_and(|all| all.contains(text));
        has("comm", "sleep") && has("maps", "libvramctl")
    });
    machine.vramctl(&format!("pause --pid {pid}")).expect(3, "", "is starting: it has not allocated GPU memory yet");
    let other = Machine::without_gpus();
    let there = format!("it listens in another directory (VRAMCTL_DIR={})", machine.sockets().display());
    other.vramctl(&format!("pause --pid {pid}")).expect(3, "", &there);
    for mut program in [plain, starting] {
        program.kill().unwrap();
        program.wait().unwrap();
    }
}
