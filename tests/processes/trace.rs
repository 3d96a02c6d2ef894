//! `vramctl trace`: real programs under the preloaded library on a simulated machine, and the trace of what they did.

use crate::common::eventually;
use crate::common::machine::{Machine, Program, Ran};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

fn traced(command: &mut Command) {
    command.env("VRAMCTL_TRACE", "1");
}

fn start(machine: &Machine, name: &str) -> Program {
    machine.engine_with(name, traced)
}

fn file(machine: &Machine, name: &str) -> PathBuf {
    machine.folder.path().join(name)
}

/// Records a trace, and reads it.
fn trace(machine: &Machine, arguments: &str) -> (Vec<Value>, Ran) {
    let path = file(machine, "trace.json");
    let ran = machine.vramctl(&format!("trace {arguments} -o {}", path.display())).expect(0, "trace.json: ", "");
    (read(&fs::read_to_string(path).unwrap()), ran)
}

/// The events of a trace, whose structure is as Perfetto expects it.
fn read(text: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_str(text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().clone();
    let mut counted = BTreeMap::new();
    let mut open = BTreeMap::<_, Vec<(f64, f64)>>::new();
    for event in &events {
        let (at, pid) = (event["ts"].as_f64().unwrap(), event["pid"].as_u64().unwrap());
        assert!(at >= 0.0 && event["name"].is_string(), "{event}");
        match event["ph"].as_str().unwrap() {
            "M" => assert!(event["args"]["name"].is_string(), "{event}"),
            "C" => {
                assert!(event["args"]["bytes"].is_u64() && event["args"].as_object().unwrap().len() == 1, "{event}");
                let before = counted.insert((pid, event["name"].as_str().unwrap().to_owned()), at);
                assert!(before.is_none_or(|before| before <= at), "{event} after {before:?}");
            }
            "X" => {
                let end = at + event["dur"].as_f64().unwrap();
                let stack = open.entry((pid, event["tid"].as_u64().unwrap())).or_default();
                stack.retain(|(_, outer)| *outer > at + 1e-6);
                assert!(stack.last().is_none_or(|(from, to)| *from <= at && end <= to + 1e-6), "{event} overlaps {stack:?}");
                stack.push((at, end));
            }
            "i" => assert_eq!(event["s"], "p", "{event}"),
            other => panic!("{other}: {event}"),
        }
    }
    events
}

fn slices<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["ph"] == "X" && event["name"] == name).collect()
}

/// The final value of each counter of a process.
fn in_the_end(events: &[Value], pid: u32) -> BTreeMap<String, u64> {
    let counters = events.iter().filter(|event| event["ph"] == "C" && event["pid"] == pid);
    counters.map(|event| (event["name"].as_str().unwrap().to_owned(), event["args"]["bytes"].as_u64().unwrap())).collect()
}

#[test]
fn a_job_is_on_one_axis() {
    let machine = Machine::new();
    let ranks = [start(&machine, "engine"), start(&machine, "engine")];
    machine.vramctl("pause --name engine").expect(0, "", "");
    machine.vramctl("resume --name engine").expect(0, "", "");
    machine.vramctl("pause --name engine --no-hold").expect(0, "", "");
    let (events, ran) = trace(&machine, "engine");
    assert!(ran.out.contains("s of 2 processes"), "{}", ran.out);

    let pids = BTreeSet::from(ranks.each_ref().map(Program::pid).map(u64::from));
    assert_eq!(events.iter().map(|event| event["pid"].as_u64().unwrap()).collect::<BTreeSet<_>>(), pids);
    let pauses = slices(&events, "pause");
    assert_eq!((pauses.len(), slices(&events, "resume").len()), (4, 2));
    assert!(pauses.iter().all(|pause| pause["args"]["bytes"].as_u64().unwrap() > 0));
    // Both processes are held before either is paused, and each is paused until the command has committed both.
    let of = |rank: &Program| *pauses.iter().find(|pause| pause["pid"] == rank.pid()).unwrap();
    let from_to = |slice: &Value| (slice["ts"].as_f64().unwrap(), slice["ts"].as_f64().unwrap() + slice["dur"].as_f64().unwrap());
    let (one, other) = (from_to(of(&ranks[0])), from_to(of(&ranks[1])));
    assert!(one.0 < other.1 && other.0 < one.1, "{one:?} {other:?}");
    for stage in ["wait", "save", "unmap", "release"] {
        assert!(slices(&events, stage).iter().all(|slice| slice["cat"] == "stage") && slices(&events, stage).len() >= 4, "{stage}");
    }
    assert!(slices(&events, "map").len() == 2 && slices(&events, "restore").len() == 2);
    for rank in &ranks {
        assert_eq!(in_the_end(&events, rank.pid()), [("default".to_owned(), 0)].into());
    }
    machine.vramctl("resume").expect(0, "", "");
    let (events, _) = trace(&machine, "");
    for rank in &ranks {
        let status = machine.connect(rank).ask(&json!({"request": "status"}));
        assert_eq!(in_the_end(&events, rank.pid()), [("default".to_owned(), status["tags"][0]["bytes"].as_u64().unwrap())].into());
    }
}

/// The program has memory by then, which is in the trace from its first moment on, whoever has it and wherever it is.
#[test]
fn a_trace_begins_in_a_running_program() {
    let machine = Machine::new();
    let engine = machine.engine("engine");
    let paused = machine.engine("paused");
    let left_to_cuda = machine.engine_with("plain", |command| _ = command.env("VRAMCTL_TAG", ""));
    machine.vramctl("pause --name paused").expect(0, "", "");
    for (program, name) in [(&engine, "engine"), (&paused, "paused"), (&left_to_cuda, "plain")] {
        let pid = program.pid();
        let begins = format!("{name} (pid {pid}): the trace begins; `vramctl trace {pid} -o page.html` writes it\n");
        assert_eq!(machine.done(&format!("trace {name} --start")), begins);
        assert_eq!(machine.done(&format!("trace {name} --start")), format!("{name} (pid {pid}) has a trace already\n"));
    }
    let bytes = machine.connect(&engine).ask(&json!({"request": "status"}))["tags"][0]["bytes"].as_u64().unwrap();
    let (events, _) = trace(&machine, "");
    let of = |program: &Program| in_the_end(&events, program.pid());
    assert_eq!((of(&engine), of(&paused)), ([("default".to_owned(), bytes)].into(), BTreeMap::new()));
    assert!(of(&left_to_cuda).values().sum::<u64>() >= 16 << 20, "{:?}", of(&left_to_cuda));

    machine.vramctl("pause --name engine").expect(0, "", "");
    machine.vramctl("resume --name paused").expect(0, "", "");
    let (events, _) = trace(&machine, "");
    let of = |program: &Program| in_the_end(&events, program.pid());
    assert_eq!((of(&engine)["default"], of(&paused)["default"]), (0, bytes));
    assert_eq!(slices(&events, "pause")[0]["args"], json!({"bytes": bytes, "tags": {"default": bytes}}));
    assert_eq!(slices(&events, "resume")[0]["args"], json!({"bytes": bytes, "tags": {"default": bytes}}));
}

/// Whatever a thread is doing at that moment: each piece of memory is counted once.
#[test]
fn a_trace_that_begins_beside_allocations_is_right() {
    let machine = Machine::new();
    let mut churn = machine.start("churn", "churn");
    let begin = machine.cli("trace churn --start").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    churn.ask("3000");
    Ran::end_of(begin).expect(0, "the trace begins", "");
    let bytes = machine.connect(&churn).ask(&json!({"request": "status"}))["tags"][0]["bytes"].as_u64().unwrap();
    let (events, _) = trace(&machine, "churn");
    assert_eq!(in_the_end(&events, churn.pid()), [("default".to_owned(), bytes)].into());
}

#[test]
fn a_trace_cannot_begin_while_its_program_cannot_say_where_its_memory_is() {
    let machine = Machine::new();
    let engine = machine.engine("engine");
    machine.vramctl("suspend engine").expect(0, "", "");
    machine.vramctl("trace engine --start").expect(5, "", &format!("engine (pid {}) has no trace: ", engine.pid()));
    machine.vramctl("resume engine").expect(0, "", "");
    machine.vramctl("trace engine --start").expect(0, "the trace begins", "");
    machine.vramctl("trace engine").expect(2, "", "--output <FILE>");
    machine.vramctl("trace engine --start --follow").expect(2, "", "--output <FILE>");
    let path = file(&machine, "followed.json");
    let mut command = machine.cli(&["trace", "engine", "--start", "--follow", "-o", path.to_str().unwrap()]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it records", || path.exists() && blocks(child.id(), libc::SIGINT));
    drop(engine);
    let ran = Ran::end_of(child);
    // It may have ended before it was asked for the first time.
    if ran.code == Some(0) {
        ran.expect(0, "s of 1 process", "up to its last answer");
    }
}

fn follow(machine: &Machine, arguments: &[&str]) -> (Child, PathBuf) {
    let path = file(machine, "followed.json");
    let mut command = machine.cli(&["trace", "-o", path.to_str().unwrap()]);
    let child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    (child, path)
}

/// How long it may take until a recording has begun and has asked all processes. With the last it has, on any machine.
const BEGINS_WITHIN: [Duration; 3] = [Duration::from_millis(600), Duration::from_secs(6), Duration::from_secs(60)];

fn until_followed(path: &Path, begins_within: Duration) {
    eventually("it records", || path.exists());
    thread::sleep(begins_within);
}

#[test]
fn a_process_that_dies_while_followed_is_in_the_trace_until_then() {
    let recorded = |begins_within| {
        let machine = Machine::new();
        let (stays, dies) = (start(&machine, "stays"), start(&machine, "dies"));
        let (child, path) = follow(&machine, &["--follow"]);
        until_followed(&path, begins_within);
        let dead = dies.pid();
        drop(dies);
        machine.vramctl("pause --name stays").expect(0, "", "");
        machine.vramctl("resume --name stays").expect(0, "", "");
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
        let ran = Ran::end_of(child);
        ran.out.contains("s of 2 processes").then_some((ran, machine, stays, dead, path))
    };
    let (ran, _machine, mut stays, dead, path) = BEGINS_WITHIN.into_iter().find_map(recorded).unwrap();
    let ran = ran.expect(0, "", "^C writes the trace");
    assert!(ran.err.contains(&format!("dies (pid {dead}) is in the trace up to its last answer: ")), "{}", ran.err);
    let events = read(&fs::read_to_string(path).unwrap());
    assert!(in_the_end(&events, dead)["default"] > 0);
    let pauses = slices(&events, "pause");
    assert_eq!((pauses.len(), &pauses[0]["pid"]), (1, &json!(stays.pid())));
    stays.verify();
}

/// As from `timeout`, or a service manager: the recording is not lost.
#[test]
fn a_recording_that_is_ended_is_written() {
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        let machine = Machine::new();
        let _engine = start(&machine, "engine");
        let (child, path) = follow(&machine, &["--follow"]);
        // By then, it has blocked the signals: they are blocked before it asks for its first answer.
        eventually("it records", || path.exists() && blocks(child.id(), signal));
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        Ran::end_of(child).expect(0, "s of 1 process", "");
        assert!(!read(&fs::read_to_string(path).unwrap()).is_empty());
    }
}

/// Whether a process has blocked a signal in one of its threads. The one that waits for it (`sigtimedwait`) does not count as one while it waits.
fn blocks(pid: u32, signal: i32) -> bool {
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().any(|thread| {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap_or_default();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        blocked.is_some_and(|blocked| u64::from_str_radix(blocked.trim(), 16).unwrap() >> (signal - 1) & 1 == 1)
    })
}

#[test]
fn the_recording_ends_when_all_processes_have_ended() {
    let recorded = |begins_within| {
        let machine = Machine::new();
        let rank = start(&machine, "engine");
        let (child, path) = follow(&machine, &["--seconds", "600"]);
        until_followed(&path, begins_within);
        drop(rank);
        let ran = Ran::end_of(child);
        // It may have ended before it was asked for the first time.
        (ran.code == Some(0)).then(|| (ran, fs::read_to_string(path).unwrap()))
    };
    let (ran, text) = BEGINS_WITHIN.into_iter().find_map(recorded).unwrap();
    ran.expect(0, "s of 1 process", "up to its last answer");
    read(&text);
}

#[test]
fn a_recording_lasts_the_given_seconds() {
    let machine = Machine::new();
    let rank = start(&machine, "engine");
    for (pauses, seconds) in [(1, "2.5"), (2, "20"), (3, "120")] {
        let (mut child, path) = follow(&machine, &["--seconds", seconds]);
        until_followed(&path, BEGINS_WITHIN[0]);
        machine.vramctl("pause").expect(0, "", "");
        let is_in_time = child.try_wait().unwrap().is_none();
        Ran::end_of(child).expect(0, "s of 1 process", "");
        let events = read(&fs::read_to_string(&path).unwrap());
        if is_in_time {
            assert_eq!((slices(&events, "pause").len(), in_the_end(&events, rank.pid())["default"]), (pauses, 0));
            return;
        }
        // This machine is too slow for so few seconds.
        machine.vramctl("resume").expect(0, "", "");
        fs::remove_file(path).unwrap();
    }
    panic!("no pause within two minutes");
}

#[test]
fn without_recording_processes_the_message_says_how_to_record() {
    let machine = Machine::new();
    let plain = machine.engine("plain");
    let path = file(&machine, "trace.json");
    let none = machine.vramctl(&format!("trace -o {}", path.display()));
    none.expect(1, "", "`vramctl trace --start` begins, and `vramctl run --trace` from the start on");
    assert!(!path.exists(), "an empty file is left");
    machine.vramctl("trace -o trace.txt").expect(2, "", ".html");
    machine.vramctl(&format!("trace -o {}/no/folder.json", machine.folder.path().display())).expect(1, "", "No such file");
    machine.vramctl(&format!("trace nobody -o {}", path.display())).expect(3, "", "nobody");

    let rank = machine
        .start_with("traced", "engine", |command| _ = command.args(["--weights-mib", "8", "--kv-mib", "8"]).env("VRAMCTL_TRACE", "64K"));
    let stopped = start(&machine, "stopped");
    stopped.stop();
    let (events, ran) = trace(&machine, "");
    assert!(ran.err.contains(&format!("plain (pid {}) is not in the trace: it records nothing", plain.pid())), "{}", ran.err);
    assert!(ran.err.contains("stopped") && ran.err.contains("is it stopped?"), "{}", ran.err);
    assert_eq!(events.iter().map(|event| event["pid"].as_u64().unwrap()).collect::<BTreeSet<_>>(), [u64::from(rank.pid())].into());
    // As other commands.
    machine.vramctl(&format!("trace stopped -o {}", path.display())).expect(5, "", "is it stopped?");
    stopped.go_on();
}

/// With a ring so small that the first events are gone, the counters still begin where they were, and end where they are.
#[test]
fn overwritten_events_are_counted() {
    let machine = Machine::new();
    let mut churn = machine.start_with("churn", "churn", |command| _ = command.env("VRAMCTL_TRACE", "64K"));
    churn.ask("5000");
    let (events, ran) = trace(&machine, "churn");
    assert!(ran.out.contains("older events were overwritten"), "{}", ran.out);
    let status = machine.connect(&churn).ask(&json!({"request": "status"}));
    let bytes = status["tags"][0]["bytes"].as_u64().unwrap();
    assert_eq!(in_the_end(&events, churn.pid()), [("default".to_owned(), bytes)].into());
    let counted: Vec<_> = events.iter().filter(|event| event["ph"] == "C").map(|event| event["args"]["bytes"].as_u64().unwrap()).collect();
    // 32 blocks of 2 to 8 MiB, one of which is being replaced.
    assert!(counted.len() > 1000 && counted.iter().all(|bytes| (31 << 21..=32 << 23).contains(bytes)), "{:?}", counted.iter().min());
}

#[test]
fn the_page_is_self_contained() {
    let machine = Machine::new();
    let rank = machine.start_with("engine", "engine", |command| {
        traced(command);
        command.args(["--weights-mib", "8", "--kv-mib", "8"]).env("VRAMCTL_TAG", "</script><b>");
    });
    machine.vramctl("pause").expect(0, "", "");
    let path = file(&machine, "page.html");
    machine.vramctl(&format!("trace --pid {} -o {}", rank.pid(), path.display())).expect(0, "page.html: ", "");
    let page = fs::read_to_string(&path).unwrap();
    let (_, data) = page.split_once(r#"<script type="application/json" id="data">"#).unwrap();
    let (data, rest) = data.split_once("</script>").unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["gpus"][0]["owners"], json!(["</script><b>"]));
    let bytes = data["gpus"][0]["bytes"][0].as_array().unwrap();
    assert_eq!(bytes.len(), data["gpus"][0]["times"].as_array().unwrap().len());
    assert!(bytes.iter().any(|bytes| bytes.as_u64().unwrap() >= 16 << 20));
    assert!(data["slices"][0]["what"].as_str().unwrap().starts_with("engine: pause of 22.00 MiB (</script><b>) in "), "{}", data["slices"]);
    for outside in ["src=", "href=", "@import", "url(", "fetch(", "XMLHttpRequest", "{{"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(rest.contains("uPlot (v") && rest.contains("Permission is hereby granted"), "the library, and its licence");
    assert!(page.trim_end().ends_with("</html>"));
    assert!(page.contains("), Simulated GPU, "), "the GPU's model and size");
}
