//! `vramctl run --detach`, `logs`, `events`, `wait --for idle`, and a program's own commands before a pause and after a resume.

use super::*;
use std::sync::mpsc;

/// A program in the background, which is stopped at the end.
struct Background<'a>(&'a Machine, &'static str);

impl Drop for Background<'_> {
    fn drop(&mut self) {
        self.0.vramctl(&["stop", self.1, "--timeout", "0"]);
    }
}

#[test]
fn a_program_in_the_background_outlives_its_terminal_and_has_a_log() {
    let machine = Machine::new();
    let hog = common::programs().join("hog");
    let start = ["run", "-d", "--name", "engine", "--no-python", "--", hog.to_str().unwrap(), "--mib", "4", "--seconds", "600"];
    machine.vramctl("logs").expect(3, "", "there is no log: `vramctl run --detach` starts a program that has one");
    let ran = machine.vramctl(&start);
    let _stopped = Background(&machine, "engine");
    ran.has(0, "engine (pid ", "");
    let pid: u32 = ran.out.split_once("(pid ").unwrap().1.split_once(')').unwrap().0.parse().unwrap();
    // SAFETY: touches no memory.
    assert_eq!(unsafe { libc::getsid(pid.cast_signed()) }, pid.cast_signed(), "a session of its own");
    machine.done("wait engine --timeout 100");
    machine.vramctl(&start).expect(1, "", "engine runs in the background already: `vramctl stop engine` ends it");
    common::eventually("it says that it is ready", || machine.done("logs engine").contains("holding 4194304"));
    let path = machine.done("logs --path");
    assert_eq!(Path::new(path.trim()), machine.sockets().join("logs/engine.log"));
    assert_eq!(fs::metadata(path.trim()).unwrap().permissions().mode() & 0o777, 0o600);
    machine.vramctl("logs engin").expect(3, "", "there is no log of engin; did you mean engine?");
    let other = machine.engine("other");
    machine.vramctl("logs other").expect(3, "", &format!("other (pid {}) was not started with `vramctl run --detach`", other.pid()));

    // Whoever follows is done when the program is.
    let follows = machine.begin("logs -f -n 1 engine");
    machine.done("stop engine --timeout 100");
    Ran::end_of(follows).has(0, "", "");
    machine.vramctl(&start).has(0, "engine (pid ", "");
    assert!(machine.sockets().join("logs/engine.log.1").exists(), "the last one is kept");
}

/// Whoever starts it has to hear of it: nobody looks into the log of a program that did not start.
#[test]
fn a_program_that_cannot_start_in_the_background_is_refused_as_in_a_shell() {
    let machine = Machine::without_gpus();
    machine.vramctl("run -d -- /no/such/program").expect(127, "", "cannot start /no/such/program");
    machine.vramctl("run -d -- 4711").expect(2, "", "a program in the background needs a name: --name");
    let mut rank = machine.cli("run -d -- sleep 1");
    Ran::of(rank.env("VRAMCTL_JOB", "job")).expect(2, "", "VRAMCTL_JOB is set: a rank of a job stays with those who started it");
    machine.vramctl(&["run", "-d", "--name", "short", "--", "sh", "-c", "echo its end; exit 3"]).has(0, "short (pid ", "");
    machine.vramctl("logs -f short").expect(0, "its end\n", "");
    // Whoever acts on it has not seen it end.
    for command in ["pause short", "resume --name short", "status short", "stop short"] {
        machine.vramctl(command).expect(
            3,
            "",
            "short has run in the background, and has ended: `vramctl logs short` has what it has printed",
        );
    }
}

#[test]
fn what_happens_is_told_as_it_happens() {
    let machine = Machine::new();
    let mut told = Killed(machine.cli("events --json").stdout(Stdio::piped()).spawn().unwrap());
    let (tell, events) = mpsc::channel();
    let lines = BufReader::new(told.0.stdout.take().unwrap()).lines();
    thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(serde_json::from_str::<Value>(&line).unwrap())));
    // What is there at its first look is no event.
    let first = machine.engine("first");
    common::eventually("it has looked", || {
        machine.done("pause first");
        machine.done("resume first");
        events.try_recv().is_ok()
    });
    drop(first);
    // A look in the middle of a pause finds that something has changed, and on a busy machine there may be no answer in time. Both are said first.
    let is_of_the_look = |event: &Value| event["event"] == "changed" || event["event"] == "silent";
    let next_of = |pid: u32| events.iter().find(|event| event["pid"] == pid && !is_of_the_look(event)).unwrap();
    let engine = machine.engine("engine");
    let started = next_of(engine.pid());
    assert_eq!((&started["event"], &started["name"]), (&json!("started"), &json!("engine")), "{started}");
    machine.done("pause engine");
    let paused = next_of(engine.pid());
    assert_eq!((&paused["event"], &paused["state"]), (&json!("paused"), &json!("held, paused")), "{paused}");
    assert!(paused["bytes"].as_u64().unwrap() >= 16 << 20 && paused["by"]["program"] == "vramctl", "{paused}");
    machine.done("resume engine");
    assert_eq!(next_of(engine.pid())["event"], "resumed");
    let pid = engine.pid();
    drop(engine);
    let ended = next_of(pid);
    assert_eq!(ended["event"], "ended", "{ended}");
}

#[test]
fn an_idle_program_is_waited_for() {
    let machine = Machine::new();
    let mut engine = machine.engine("engine");
    engine.ask("1 2 3");
    machine.vramctl("wait engine --for idle --timeout 100").expect(0, &format!("engine (pid {}): active", engine.pid()), "");
    machine.done("pause engine");
    machine.vramctl("wait engine --for idle --timeout 0").expect(5, "", "is held, paused");
}

/// The program's own commands: an engine is drained before it stands still, and takes requests when it is back.
#[test]
fn a_programs_commands_are_run_around_its_pauses() {
    let machine = Machine::new();
    let said = machine.folder.path().join("said");
    let note = |word: &str| format!("echo \"{word} $VRAMCTL_HOOK_NAME $VRAMCTL_HOOK_PID\" >>{}", said.display());
    let ready = machine.folder.path().join("ready");
    let drained = format!("{}; test -e {} || {{ echo not yet >&2; exit 1; }}", note("pause"), ready.display());
    let engine = machine.engine_with("engine", |command| {
        command.env("VRAMCTL_ON_PAUSE", drained).env("VRAMCTL_ON_RESUME", note("resume"));
    });
    let told = || fs::read_to_string(&said).unwrap_or_default();
    let line = |word: &str| format!("{word} engine {}\n", engine.pid());
    machine.vramctl("pause engine").expect(1, "", "the command of --on-pause failed (exit status: 1: not yet)");
    assert_eq!(machine.state(&engine), "active", "nothing was done");
    assert_eq!(told(), line("pause") + &line("resume"), "who was told of a pause is told that it is none");
    fs::write(&ready, "").unwrap();
    fs::remove_file(&said).unwrap();
    machine.done("pause engine");
    machine.done("pause engine");
    assert_eq!(told(), line("pause"), "what is paused is not paused again");
    machine.done("resume engine");
    machine.done("resume engine");
    assert_eq!(told(), line("pause") + &line("resume"));
    machine.done("suspend engine");
    machine.done("resume engine");
    assert_eq!(told(), (line("pause") + &line("resume")).repeat(2));
}

#[test]
fn a_command_after_a_resume_that_fails_is_a_warning() {
    let machine = Machine::new();
    let mut command = machine.cli(&["run", "--name", "engine", "--on-resume", "exit 3", "--no-python", "--"]);
    let _engine =
        common::machine::Program::ready(command.arg(common::programs().join("engine")).args(["--weights-mib", "4", "--kv-mib", "4"]));
    machine.done("pause engine");
    machine.vramctl("resume engine").expect(0, "resumed", "the command of --on-resume failed (exit status: 3): exit 3");
    machine.vramctl("run --on-pause= -- true").expect(2, "", "--on-pause");
}
