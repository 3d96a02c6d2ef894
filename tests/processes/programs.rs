//! Real programs under the preloaded library on a simulated machine: paused and resumed from the shell, killed, forked,
//! competing for memory, and facing misbehaving clients.

use crate::common;
use crate::common::machine::{Machine, Program, Ran};
use crate::common::{artifacts, library, programs};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use vramctl_intercept::hooks::HOOKED;
use vramctl_intercept::opens::OPENERS;
use vramctl_intercept::resolve::RESOLVERS;
use vramctl_intercept::{entries, nccl};

const MIB: u64 = 1 << 20;

/// A sample program goes on, finds all as it should be, and ends.
#[track_caller]
fn ends_well(mut program: Program) {
    program.tell("go on");
    program.expect("ok");
    program.end();
}

/// The ledger adds up with whatever NVML reports; missing figures are not invented.
#[test]
fn the_ledger_adds_up() {
    const CONTEXT: u64 = 24 * MIB;
    const UUID: &str = "GPU-73696d75-6c61-7465-642d-6770752d3030";
    let machine = Machine { context_bytes: CONTEXT, ..Machine::with(1, "512M") };
    let engine = machine.start("engine", "engine --weights-mib 64 --kv-mib 32");
    let other = machine.hog(0, 48);

    // Keyed by kind, process and owner.
    let ledger = |pids: &str| -> BTreeMap<(String, u64, String), i64> {
        let answer = Ran::of(machine.cli("gpus --json").env("SIMGPU_NVML_PIDS", pids)).json();
        let gpu = &answer["gpus"][0];
        assert_eq!(gpu["used_bytes"], machine.used());
        let shares = gpu["shares"].as_array().unwrap();
        let sum: i64 = shares.iter().map(|share| share["bytes"].as_i64().unwrap()).sum();
        assert_eq!(sum as u64, machine.used(), "{answer}");
        let text = |share: &Value, field: &str| share[field].as_str().unwrap_or_default().to_owned();
        let key = |share: &Value| (text(share, "what"), share["pid"].as_u64().unwrap_or(0), text(share, "of"));
        shares.iter().map(|share| (key(share), share["bytes"].as_i64().unwrap())).collect()
    };
    let (engine_pid, other_pid) = (u64::from(engine.pid()), u64::from(other.pid()));
    let tag = ("tag".to_owned(), engine_pid, "default".to_owned());
    let driver = ("driver".to_owned(), engine_pid, String::new());
    let nobody = |what: &str| (what.to_owned(), 0, String::new());

    let told = ledger("");
    let managed = told[&tag];
    assert!(managed >= 96 * MIB as i64, "{told:?}");
    assert_eq!(told[&("process".to_owned(), other_pid, String::new())] as u64, 48 * MIB + CONTEXT, "{told:?}");
    assert!((CONTEXT..CONTEXT + 8 * MIB).contains(&(told[&driver] as u64)), "{told:?}");
    assert_eq!(told[&nobody("unexplained")], 0, "{told:?}");

    let unseen = ledger("host");
    assert_eq!((unseen[&tag], unseen[&nobody("unexplained")]), (managed, 0), "{unseen:?}");
    assert_eq!(unseen[&nobody("out_of_sight")], told[&driver] + (48 * MIB + CONTEXT) as i64, "{unseen:?}");
    let silent = ledger("none");
    assert_eq!(silent[&nobody("unexplained")], unseen[&nobody("out_of_sight")], "{silent:?}");

    machine.done("pause");
    let paused = ledger("");
    let of_engine: i64 = paused.iter().filter(|((_, pid, _), _)| *pid == engine_pid).map(|(_, bytes)| bytes).sum();
    assert!(!paused.contains_key(&tag) && of_engine >= CONTEXT as i64, "{paused:?}");
    assert_eq!(paused[&nobody("unexplained")], 0, "{paused:?}");
    // The command has told it what NVML counts.
    assert_eq!(machine.status("engine")["processes"][0]["cycles"][0]["driver"][UUID], of_engine, "{paused:?}");
    let text = machine.done("gpus engine");
    assert!(text.contains("backup of default") && text.contains("all else of its own"), "{text}");
    machine.done("resume");

    let text = machine.done("gpus engine");
    for what in ["Host memory: ", "GPU 0, Simulated GPU", "context, loaded code, small allocations", "hog", "all of it", "unexplained"] {
        assert!(text.contains(what), "{what} is not in {text}");
    }
    drop(engine);
    let alone = machine.done("gpus --gpu 0");
    assert!(alone.contains("hog") && !alone.contains("engine"), "without any managed process: {alone}");
}

/// Who watches memory wants to see programs that pause nothing, too.
#[test]
fn a_program_that_leaves_its_memory_to_cuda_is_listed_with_it() {
    let machine = Machine::with(1, "512M");
    // The rest of a job is looked for on the whole machine, by the job's name.
    let name = format!("trainer-{}", std::process::id());
    let start = || machine.start_with(&name, "engine --weights-mib 64 --kv-mib 32", |command| _ = command.env("VRAMCTL_TAG", ""));
    let (engine, _other_rank) = (start(), start());
    let pid = engine.pid().to_string();
    let ledger = machine.vramctl(&["gpus", "--json", "--pid", &pid]).json();
    let process = &ledger["processes"][0];
    assert_eq!((&process["pid"], &process["tags"]), (&engine.pid().into(), &Value::Array(Vec::new())), "{ledger:#}");
    let left: u64 = process["unmanaged"].as_array().unwrap().iter().map(|left| left["bytes"].as_u64().unwrap()).sum();
    assert!(left >= 96 * MIB, "{ledger:#}");
    let host = ledger["host"]["shares"].as_array().unwrap();
    assert!(host.iter().all(|share| share["what"] != "rest_of_job"), "the other rank has the library: {host:#?}");
}

#[test]
fn an_unmodified_engine_is_paused_and_answers_the_same() {
    let machine = Machine::with(1, "512M");
    let mut engine = machine.start("engine", "engine --weights-mib 64 --kv-mib 32");
    let (addresses, first) = (engine.ask("addresses"), engine.ask("generate 1"));
    assert!(first.starts_with("answer"), "{first}");
    let running = machine.used();
    for _ in 0..3 {
        machine.done("pause");
        assert!(machine.used() <= running - 96 * MIB, "{} of {running} bytes are still in use", machine.used());
        let paused = machine.status("engine");
        assert!(paused["processes"][0]["tags"].as_array().unwrap().iter().all(|tag| tag["state"] == "paused"), "{paused}");
        machine.done("resume");
        assert!(engine.ask("verify").contains("ok"));
        assert_eq!(engine.ask("addresses"), addresses);
    }
    assert!(engine.ask("generate 2").starts_with("answer"));
    assert_eq!(engine.ask("quit"), "bye");
    engine.end();
    assert_eq!(machine.used(), 0);
    assert_eq!(fs::read_dir(machine.sockets()).unwrap().count(), 0, "the socket goes with the program");
}

#[test]
fn regions_by_tag_one_kept_and_one_discarded() {
    let machine = Machine::with(1, "512M");
    let mut engine = machine.start("engine", "engine_regions --weights-mib 32 --kv-mib 32");
    let status = machine.status("engine");
    let tags: Vec<_> = status["processes"][0]["tags"].as_array().unwrap().iter().map(|tag| tag["tag"].as_str().unwrap()).collect();
    assert!(tags.contains(&"weights") && tags.contains(&"kv_cache"), "{tags:?}");
    machine.done("pause kv_cache");
    machine.done("pause weights");
    machine.done("resume weights kv_cache");
    let verified = engine.ask("verify");
    assert!(verified.contains("zero") && !verified.contains("corrupt 1"), "{verified}");
    machine.vramctl("pause nonsense").expect(6, "", "kv_cache").has(6, "", "weights");
}

/// An engine sleeps while its trainer works, and both are paused by an operator: after the resume, the engine still sleeps, so that there is room for the
/// trainer.
#[test]
fn what_a_program_has_paused_itself_stays_paused_when_others_pause_and_resume_it() {
    const GPU: u64 = 512;
    let machine = Machine::with(2, "512M");
    let mut engine = machine.start("engine", "engine_regions --weights-mib 32 --kv-mib 40");
    let states = || {
        let status = machine.status("engine");
        let process = &status["processes"][0];
        let tags = process["tags"].as_array().unwrap().iter().map(|tag| format!("{} {}", tag["tag"], tag["state"]).replace('"', ""));
        (tags.filter(|tag| !tag.starts_with("default")).collect::<Vec<_>>().join(", "), process["held"] == true)
    };
    let (asleep, awake) = ("kv_cache paused, weights active", "kv_cache active, weights active");
    assert_eq!(engine.ask("pause kv_cache"), "paused kv_cache");
    assert_eq!(states(), (asleep.into(), false));
    let hog = machine.hog(0, (GPU - machine.used() / MIB - 20) as u32);
    let full = machine.used();
    for (away, back) in [("pause engine", "resume engine"), ("pause weights", "resume weights"), ("suspend engine", "resume engine")] {
        machine.done(away);
        assert!(states().1, "{away}");
        let resumed = machine.done(back);
        assert_eq!((states(), machine.used()), ((asleep.into(), false), full), "{away}: {resumed}");
        let says = resumed.contains("40.00 MiB stay paused, because engine");
        assert_eq!(says, back == "resume engine", "{resumed}");
    }
    drop(hog);
    // Asked again, a resume does no more.
    assert!(machine.done("resume engine").contains("nothing to do: 40.00 MiB stay paused"));
    machine.done("move engine --to 1");
    assert_eq!(states(), (asleep.into(), false));
    machine.done("pause weights");
    machine.done("move engine --to 0");
    machine.done("resume weights");
    assert_eq!(states(), (asleep.into(), false));
    machine.done("pause engine");
    machine.done("resume weights default");
    assert_eq!(states(), (asleep.into(), false));
    // Whoever names the tag means all of it.
    machine.done("pause engine");
    machine.done("resume engine kv_cache");
    assert_eq!(states(), ("kv_cache active, weights paused".into(), true));
    machine.done("resume engine");
    assert_eq!(states(), (awake.into(), false));

    // All of it sleeps: it is held nevertheless, until it is resumed.
    assert_eq!(engine.ask("pause all"), "paused all");
    assert!(machine.done("pause engine").contains("is held from now on"));
    assert_eq!(states(), ("kv_cache paused, weights paused".into(), true));
    assert!(machine.done("resume engine").contains("is not held any more"));
    assert!(machine.done("status engine").contains("paused by itself") && machine.done("ps").contains("paused by itself"));
    assert_eq!(states(), ("kv_cache paused, weights paused".into(), false));
    assert_eq!(engine.ask("resume all"), "resumed all");

    // It goes to sleep, or wakes, while others have paused it.
    machine.done("pause engine");
    assert_eq!(engine.ask("pause kv_cache"), "paused kv_cache");
    machine.done("resume engine");
    assert_eq!(states(), (asleep.into(), false));
    assert_eq!(engine.ask("resume kv_cache"), "resumed kv_cache");
    assert_eq!(states(), (awake.into(), false));
    engine.verify();
}

#[test]
fn the_python_program_marks_regions_and_pauses_itself() {
    let machine = Machine::with(1, "512M");
    Ran::of(machine.cli("run -- python3").arg(programs().join("engine.py"))).expect(0, "", "");
}

#[test]
fn the_doctor_approves_a_good_machine_and_names_what_is_missing() {
    let machine = Machine::with(1, "256M");
    let doctor = |change: &dyn Fn(&mut Command)| {
        let mut command = machine.cli("doctor --json");
        change(&mut command);
        let ran = Ran::of(&mut command);
        (ran.code, ran.json()["checks"].as_array().unwrap().clone())
    };
    let found = |checks: &[Value], name: &str| checks.iter().find(|check| check["check"] == name).cloned().unwrap_or_default();
    let (code, checks) = doctor(&|_| ());
    assert_eq!(code, Some(0), "{checks:?}");
    for name in ["library", "driver", "GPU"] {
        assert_eq!(found(&checks, name)["verdict"], "ok", "{checks:?}");
    }
    assert!(found(&checks, "library")["message"].as_str().unwrap().contains(env!("CARGO_PKG_VERSION")));
    let gpu = &found(&checks, "GPU")["data"];
    assert_eq!((&gpu["total_bytes"], &gpu["virtual_memory"]), (&(256 * MIB).into(), &true.into()));
    assert!(gpu["uuid"].as_str().unwrap().starts_with("GPU-"), "{gpu}");

    let (code, checks) = doctor(&|command| _ = command.env("SIMGPU_NO_VMM", "1"));
    assert_eq!((code, &found(&checks, "GPU")["verdict"]), (Some(1), &"failed".into()), "{checks:?}");
    let (code, checks) = doctor(&|command| _ = command.env("LD_LIBRARY_PATH", "/nowhere"));
    assert_eq!((code, &found(&checks, "driver")["verdict"]), (Some(1), &"failed".into()), "{checks:?}");
    let (_, checks) = doctor(&|command| _ = command.env("VRAMCTL_HOST_CAP", "64M"));
    assert_eq!(found(&checks, "host memory")["verdict"], "warning", "less than the GPU has: {checks:?}");
    assert_eq!(machine.used(), 0);
}

/// As in a container without the driver capability `utility`, and with an NVML that fails.
#[test]
fn without_nvml_each_command_says_why_and_shows_the_rest() {
    const CAPABILITY: &str = "NVIDIA_DRIVER_CAPABILITIES=compute,utility";
    let machine = Machine::with(1, "512M");
    let _engine = machine.start("engine", "engine --weights-mib 64 --kv-mib 32");
    let libraries = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(artifacts().join("libsimgpu.so"), libraries.path().join("libcuda.so.1")).unwrap();
    let ask = |line: &str, variable: &str, value: &std::ffi::OsStr| {
        let ran = Ran::of(machine.cli(line).env(variable, value));
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        (ran.code, words(&ran.out), words(&ran.err))
    };
    let missing = |line: &str| ask(line, "LD_LIBRARY_PATH", libraries.path().as_os_str());

    // What they do without NVML.
    for (line, code, rest) in [
        ("gpus", Some(1), "default"),
        ("gpus", Some(1), "Host memory:"),
        ("metrics", Some(0), "vramctl_host_free_bytes"),
        ("suspend engine --dry-run", Some(0), "default"),
    ] {
        let (ended, out, err) = missing(line);
        assert!(ended == code && out.contains(rest), "{line}: {ended:?} {out} {err}");
        assert_eq!(err.matches(CAPABILITY).count(), 1, "{line}: {err}");
    }
    for line in ["top --once", "doctor"] {
        let (ended, out, err) = missing(line);
        assert!(ended.is_some() && out.contains("NVML cannot be loaded") && out.contains(CAPABILITY), "{line}: {out} {err}");
    }
    // What cannot be done without it.
    for line in ["ps --gpu 0", "pause --gpu 0 --dry-run", "move engine --to 0"] {
        let (ended, out, err) = missing(line);
        assert!(ended == Some(1) && err.contains("libnvidia-ml.so.1") && err.contains(CAPABILITY), "{line}: {ended:?} {out} {err}");
    }
    let (ended, out, _) = missing("gpus --json");
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert!(answer["error"]["message"].as_str().unwrap().contains(CAPABILITY), "{answer}");
    assert_eq!((ended, answer["processes"][0]["name"].as_str(), answer["gpus"].as_array().unwrap().len()), (Some(1), Some("engine"), 0));
    assert!(answer["host"]["free_bytes"].is_u64(), "{answer}");

    for call in ["nvmlInit_v2", "nvmlDeviceGetCount_v2"] {
        let (ended, out, err) = ask("gpus", "SIMGPU_FAIL", format!("{call}:1:9:*").as_ref());
        let why = format!("NVML fails: {call} answers 9 (");
        assert!(ended == Some(1) && out.contains("default") && err.contains(&why), "{call}: {ended:?} {out} {err}");
    }
    let (ended, _, err) = ask("gpus --gpu GPU-none", "SIMGPU_FAIL", "".as_ref());
    assert!(ended == Some(1) && err.contains("NVML does not report GPU-none here"), "{err}");
}

/// The process, the command line and NVML identify a GPU by the same UUID.
#[test]
fn gpus_are_chosen_by_index_and_by_uuid() {
    let machine = Machine::with(2, "256M");
    let mut program = machine.start("engine", "odd plain");
    let status = machine.status("engine");
    let uuid = status["processes"][0]["devices"][0]["uuid"].as_str().unwrap();
    for gpu in ["0", uuid] {
        machine.vramctl(&["ps", "--gpu", gpu]).expect(0, "engine", "");
    }
    machine.vramctl("pause --gpu 1").expect(3, "", "no managed process has memory on GPU 1 (GPU-73696d76); ");
    machine.vramctl("pause --gpu 9").expect(2, "", "there is no GPU 9: NVML reports 2, from 0 on (`nvidia-smi -L` lists them)");
    for request in ["pause", "resume"] {
        machine.vramctl(&[request, "--gpu", "0"]).expect(0, "engine", "");
    }
    program.tell("go on");
    program.end();
}

/// The process itself protects a cache that its engine's prefix cache describes, whichever client asks.
#[test]
fn a_kv_cache_that_an_engine_relies_on_is_discarded_only_by_force() {
    let program = r#"
import ctypes
vramctl, pointer = ctypes.CDLL(None), ctypes.c_void_p()
ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
for tag in TAGS:
    assert vramctl.vramctl_region_begin(tag, 0) == 0
    assert vramctl.cudaMalloc(ctypes.byref(pointer), 8 << 20) == 0
    assert vramctl.vramctl_region_end() == 0
assert vramctl.vramctl_set_engine(b"vllm") == 0
assert vramctl.vramctl_set_engine_tags_cache(TAGGED) == 0
print("ready", flush=True)
input()
print(vramctl.vramctl_pause(None, ctypes.c_int64(-1), 1), flush=True)
"#;
    // Where the engine does not say that it tags all of its cache, what has another tag may be cache, too.
    for (tags, is_tagged, cache) in [
        ("[b'kv_cache', b'weights', b'default']", "1", "kv_cache"),
        ("[b'kv_cache', b'weights', b'default']", "0", "default"),
        ("[b'weights', b'default']", "0", "default"),
    ] {
        let machine = Machine::with(1, "256M");
        let mut command =
            machine.cli(&["run", "--name", "engine", "--", "python3", "-c", &program.replace("TAGS", tags).replace("TAGGED", is_tagged)]);
        let mut engine = Program::ready(&mut command);
        let stream = UnixStream::connect(machine.socket(engine.pid())).unwrap();
        let mut lines = BufReader::new(&stream).lines();
        let mut ask = |request: &str| {
            (&stream).write_all(format!("{{\"version\":1,{request}}}\n").as_bytes()).unwrap();
            serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap()
        };
        let used = machine.used();
        let refused = ask(r#""request":"pause","backup":"discard""#);
        assert_eq!((&refused["reply"], &refused["code"]), (&"error".into(), &"prefix_cache".into()), "{refused}");
        assert!(refused["message"].as_str().unwrap().contains("vllm"), "{refused}");
        assert_eq!(machine.used(), used, "nothing is paused");
        let of_cache = format!(r#""request":"pause","backup":"discard","tags":["{cache}"]"#);
        assert_eq!(ask(&of_cache)["code"], "prefix_cache");
        assert_eq!(ask(r#""request":"plan","of":"pause","backup":"discard""#)["prefix_cache"], "vllm");

        let plan = ask(r#""request":"plan","of":"pause""#);
        assert_eq!((&plan["reply"], &plan["prefix_cache"]), (&"plan".into(), &Value::Null), "what is kept is not lost: {plan}");
        let tags = plan["tags"].as_array().unwrap();
        assert!(tags.iter().all(|tag| tag["backup"]["host"] == 8 * MIB && tag["bytes"] == 8 * MIB), "{plan}");
        // Host memory comes in whole pieces, smaller ones in debug builds.
        assert_eq!(plan["host"]["needed_bytes"], (8 * MIB * tags.len() as u64).next_multiple_of(vramctl_backup::HOST_PIECE as u64));
        assert!(plan["host"]["available_bytes"].as_u64().unwrap() > 0);
        assert_eq!(machine.used(), used, "a plan changes nothing");

        assert_eq!(ask(r#""request":"pause","backup":"discard","tags":["weights"]"#)["reply"], "done", "weights are no cache");
        assert_eq!(ask(r#""request":"pause","backup":"discard","force":true"#)["reply"], "done");
        assert_eq!(ask(r#""request":"pause","backup":"discard""#)["reply"], "done", "what is paused already is not touched");
        assert_eq!(ask(r#""request":"plan","of":"pause""#)["tags"], Value::Array(Vec::new()));
        assert_eq!(ask(r#""request":"resume""#)["reply"], "done");
        assert_eq!(engine.ask("go on"), "0", "the program knows what it does");
    }
}

#[test]
fn a_killed_program_gives_everything_back_and_leaves_no_socket_for_long() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("victim", "odd plain");
    machine.done("pause");
    program.kill();
    assert_eq!(machine.used(), 0);
    assert_eq!(fs::read_dir(machine.sockets()).unwrap().count(), 1, "kill -9 leaves the socket");
    machine.done("ps");
    assert_eq!(fs::read_dir(machine.sockets()).unwrap().count(), 0, "and whoever looks next removes it");
}

#[test]
fn forks_before_and_after_cuda() {
    let machine = Machine::with(1, "256M");
    let mut after = machine.start("after", "odd fork-after-cuda");
    machine.done("pause --name after");
    machine.done("resume --name after");
    after.tell("fork");
    after.expect("forked");
    assert!(machine.socket(after.pid()).exists(), "a child that exits leaves its parent's socket alone");
    machine.done("pause --name after");
    machine.done("resume --name after");
    after.tell("go on");
    after.expect("ok");
    after.end();

    let mut before = Program::spawn(&mut machine.program("before", "odd fork-before-cuda"));
    let child = before.expect("child");
    before.expect("ready");
    let both = machine.done("ps");
    assert!(both.contains(&before.pid().to_string()) && both.contains(child.trim_start_matches("child ")), "{both}");
    machine.done("pause --name before");
    assert_eq!(machine.used(), 0, "both are paused");
    machine.done("resume --name before");
    before.tell("go on");
    before.expect("ok");
    before.end();
}

#[test]
fn forking_all_the_time_while_paused_and_resumed() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("forking", "odd forking-all-the-time");
    for _ in 0..20 {
        machine.done("pause --name forking");
        machine.done("resume --name forking");
    }
    program.expect("forked");
    ends_well(program);
}

/// The child must not inherit the socket, or a client would wait for a dead server.
#[test]
fn a_dead_programs_child_does_not_keep_its_socket_alive() {
    let machine = Machine::with(1, "256M");
    let mut program = Program::spawn(&mut machine.program("parent", "odd orphan"));
    let child: i32 = program.expect("child").trim_start_matches("child ").parse().unwrap();
    program.expect("ready");
    let pid = program.pid();
    program.kill();
    let listed = machine.done("ps --json");
    unsafe { libc::kill(child, libc::SIGKILL) };
    // The child is of the run, and may be listed as one that has no GPU memory yet.
    assert!(!listed.contains(&format!("\"pid\": {pid},")) && !listed.contains(&format!("\"pid\":{pid},")), "{listed}");
}

/// Programs run for days, and the cause of the failure may have been fixed since.
#[test]
fn a_socket_that_could_not_be_created_is_retried() {
    let machine = Machine::with(1, "256M");
    let place = machine.folder.path().join("later");
    let mut program = machine.start_with("late", "odd plain", |command| {
        command.env("VRAMCTL_DIR", place.join("sockets"));
    });
    fs::create_dir(&place).unwrap();
    for request in ["pause", "resume"] {
        succeeds(|| Ran::of(machine.cli(&[request, "--name", "late"]).env("VRAMCTL_DIR", place.join("sockets"))));
    }
    program.tell("go on");
    program.end();
    assert_eq!(fs::read_dir(place.join("sockets")).unwrap().count(), 0, "its socket went with it");
}

/// A cleaner of `/tmp` deletes sockets, and the end of a login session their whole directory. Whoever is paused then must come back.
#[test]
fn a_program_whose_socket_is_deleted_is_found_again() {
    let machine = Machine::with(1, "256M");
    let place = machine.folder.path().join("session");
    let sockets = place.join("sockets");
    fs::create_dir(&place).unwrap();
    let mut program = machine.start_with("found", "odd plain", |command| {
        command.env("VRAMCTL_DIR", &sockets);
    });
    let socket = sockets.join(format!("{}.sock", program.pid()));
    let vramctl = |arguments: &[&str]| Ran::of(machine.cli(arguments).env("VRAMCTL_DIR", &sockets));
    let deletions: [(&str, &dyn Fn()); 4] = [
        ("pause", &|| fs::remove_file(&socket).unwrap()),
        ("pause", &|| fs::remove_dir_all(&sockets).unwrap()),
        ("suspend", &|| fs::remove_dir_all(&place).unwrap()),
        // Moved away, and something else in its place.
        ("pause", &|| {
            fs::rename(&sockets, place.join("before")).unwrap();
            fs::DirBuilder::new().mode(0o700).create(&sockets).unwrap();
            fs::write(&socket, "").unwrap();
        }),
    ];
    for (away, delete) in deletions {
        succeeds(|| vramctl(&[away, "--name", "found"]));
        delete();
        succeeds(|| vramctl(&["resume", "--name", "found"]));
        assert_eq!(fs::metadata(&sockets).unwrap().mode() & 0o777, 0o700);
    }
    program.tell("go on");
    program.end();
    assert_eq!(fs::read_dir(&sockets).unwrap().count(), 0, "its socket went with it");
}

/// Its name is known without its answer, also if it has none of its own, or has overwritten its environment as `setproctitle` does.
#[test]
fn a_stopped_program_is_in_the_way_of_its_own_name_only() {
    let machine = Machine::with(1, "256M");
    let _engine = machine.start("engine", "odd plain");
    let unnamed = Program::ready(machine.cli("run --").arg(programs().join("odd")).arg("plain"));
    let overwritten = machine.start("trainer", "odd overwritten");
    let environment = fs::read(format!("/proc/{}/environ", overwritten.pid())).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("VRAMCTL_NAME"), "it is overwritten");
    for program in [&unnamed, &overwritten] {
        program.stop();
    }
    let code = |arguments: &str| machine.vramctl(arguments).code;
    assert_eq!(code("pause --name engine"), Some(0));
    assert_eq!(code("resume --name engine"), Some(0));
    assert_eq!(code("pause --name nobody"), Some(3));
    for (name, program) in [("odd", &unnamed), ("trainer", &overwritten)] {
        machine.vramctl(&["pause", "--name", name]).expect(5, "", &format!("{name} (pid {})", program.pid()));
    }
}

#[test]
fn a_program_that_closes_the_socket_keeps_its_files_and_gets_another() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("tidy", "odd close-sockets");
    let socket = machine.socket(program.pid());
    let first = fs::metadata(&socket).unwrap().ino();
    program.tell("go on");
    program.expect("closed");
    // The first client's connection makes the library notice the loss, and waits for the new socket, but not for long.
    for request in ["pause", "resume"] {
        succeeds(|| machine.vramctl(&[request, "--name", "tidy"]));
    }
    assert_ne!(fs::metadata(&socket).unwrap().ino(), first);
    program.tell("go on");
    program.end();
}

#[test]
fn a_program_in_the_background_is_found_and_keeps_its_files() {
    for mode in ["daemon-with-files", "daemon-without-streams"] {
        let machine = Machine::with(1, "256M");
        let stop = machine.folder.path().join("stop");
        fs::write(&stop, "").unwrap();
        let mut program = machine.start_with(mode, &format!("odd {mode}"), |command| {
            command.env("ODD_STOP", &stop);
        });
        // A new socket may get the old one's inode number.
        let path = machine.socket(program.pid());
        let socket = || fs::metadata(&path).map(|socket| (socket.ino(), socket.ctime(), socket.ctime_nsec())).unwrap();
        let first = socket();
        program.tell("go on");
        // It has closed its end of the pipe, and then the rest: whoever opens a file meanwhile can lose its number to the program.
        program.rest();
        common::eventually("all of its files are open", || fs::metadata(&stop).is_ok_and(|stop| stop.len() == 1));
        // Several clients at once: none may remove the new socket, mistaking it for the old one.
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    // Until it has its new socket, it is listed as starting.
                    let is_found = |listed: String| listed.contains(mode) && !listed.contains("starting");
                    common::eventually("it is listed", || is_found(machine.done("ps -o wide")));
                });
            }
        });
        machine.done("pause --backup disk");
        machine.done("resume");
        assert_ne!(socket(), first);
        fs::remove_file(&stop).unwrap();
        let ended = program.ended();
        assert!(ended.success(), "{mode}: {ended}");
    }
}

/// Two containers that share a directory may have processes with the same PID. The one without a socket must not remove the
/// other's when it exits.
#[test]
fn a_socket_of_another_process_with_the_same_pid_is_left_alone() {
    let machine = Machine::with(1, "256M");
    fs::DirBuilder::new().mode(0o700).create(machine.sockets()).unwrap();
    let mut command = machine.cli(&["run", "--name", "second", "--", "sh", "-c", "read line; exec \"$0\" plain"]);
    let mut program = Program::spawn(command.arg(programs().join("odd")));
    let place = machine.socket(program.pid());
    let first = UnixListener::bind(&place).unwrap();
    program.tell("go on");
    program.expect("ready");
    first.set_nonblocking(true).unwrap();
    assert!(first.accept().is_ok(), "it has looked whether somebody listens");
    program.tell("go on");
    program.end();
    assert!(place.exists());
}

/// In two containers with a common directory. Both have the same pid there, and others here, by which users know them.
#[test]
fn programs_with_the_same_pid_in_two_containers_are_both_managed() {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["-p", "-f", "--mount-proc", "--kill-child"]);
        command
    };
    if !unshare().arg("true").output().is_ok_and(|done| done.status.success()) {
        eprintln!("not run: PID namespaces cannot be made here");
        return;
    }
    let machine = Machine::with(1, "256M");
    let mut programs: Vec<_> = ["a", "b"]
        .iter()
        .map(|name| {
            let run = machine.cli(&["run", "--name", name, "--"]);
            let mut command = unshare();
            command.arg(run.get_program()).args(run.get_args()).arg(programs().join("odd")).arg("plain");
            for (name, value) in run.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            Program::ready(&mut command)
        })
        .collect();
    let listed = || -> Value { machine.vramctl("ps --json").json() };
    common::eventually("both are listed", || listed()["processes"].as_array().unwrap().len() == 2);
    for (program, name) in programs.iter().zip(["a", "b"]) {
        // The child of `unshare`.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", program.pid())).unwrap();
        let pid = children.trim();
        assert!(machine.done("ps").lines().any(|line| line.contains(pid) && line.contains(name)), "{name} is {pid} here");
        machine.done(&["pause", "--pid", pid]);
        machine.done(&["resume", "--name", name]);
    }
    let ledger = machine.vramctl("gpus --json").json();
    let pids: Vec<_> = ledger["processes"].as_array().unwrap().iter().map(|process| process["pid"].as_u64().unwrap()).collect();
    assert!(pids.iter().all(|pid| *pid > 1), "{pids:?}");
    for program in &mut programs {
        program.tell("go on");
    }
    for program in programs {
        program.end();
    }
}

/// The program's output must not go to clients or into backups.
#[test]
fn no_file_of_ours_stands_in_for_a_closed_standard_stream() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("closed", "odd closed-input");
    machine.done("pause --backup disk");
    let _client = UnixStream::connect(machine.socket(program.pid())).unwrap();
    // This one was served, so the one before it has been accepted.
    machine.done("status");
    program.tell("go on");
    program.expect("free");
    machine.done("resume");
    program.tell("go on");
    program.end();
}

/// What a program has logged, without the lines that say who holds it and until when.
fn besides_holds(log: &str) -> String {
    log.lines().filter(|line| !line.contains("warn: held by process") && !line.contains("warn: no longer held")).collect()
}

/// Retries until it succeeds.
fn succeeds(ask: impl Fn() -> Ran) {
    common::eventually("it succeeds", || ask().code == Some(0));
}

#[test]
fn signals_exit_handlers_and_large_thread_locals() {
    let machine = Machine::with(1, "256M");
    for mode in ["signals", "exit-with-memory"] {
        let mut program = machine.start(mode, &format!("odd {mode}"));
        machine.done("pause");
        machine.done("resume");
        program.tell("go on");
        program.end();
        assert_eq!(machine.used(), 0, "{mode}");
    }
}

/// In the middle of a pause or resume, or while one waits for device work that never finishes.
#[test]
fn a_program_may_exit_during_a_pause_or_resume_and_the_client_is_told() {
    let ends = |mode: &str, request: &str, thread: &str| {
        let machine = Machine::with(1, "256M");
        let mut program = machine.start_with("leaves", &format!("odd {mode}"), |command| {
            command.env("SIMGPU_OP_DELAY_MS", "1500").env("SIMGPU_END_MS", "20").stderr(Stdio::piped());
        });
        if request == "resume" {
            machine.done("pause");
        }
        let mut client = machine.begin(&[request, "--json"]);
        // On a slow machine, it may be over before that is seen.
        common::eventually("it has begun", || program.threads().contains(&thread.to_owned()) || client.try_wait().unwrap().is_some());
        if mode == "ends-by-signal" {
            unsafe { libc::kill(program.pid().cast_signed(), libc::SIGTERM) };
        } else {
            program.tell("go on");
        }
        let mut said = String::new();
        program.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        program.end();
        assert_eq!(besides_holds(&said), "", "{mode}, {request}");
        let text = Ran::end_of(client).text();
        // It may have had nothing left to do but this one copy.
        let is_told = text.contains("\"ending\"") || text.contains("\"report\"");
        assert!(is_told || text.contains("it ended before it answered"), "{mode}, {request}: {text}");
        is_told
    };
    // A program that ends waits for its answers only so long, which a busy machine may exceed.
    let tells = move |mode, request, thread| assert!((0..10).any(|_| ends(mode, request, thread)), "{mode}, {request}: nobody is told");
    std::thread::scope(|scope| {
        for mode in ["ends", "ends-by-exit", "ends-by-signal"] {
            scope.spawn(move || ["pause", "resume"].map(|request| tells(mode, request, "vramctl-copy")));
        }
        scope.spawn(move || tells("ends-with-endless-work", "pause", "vramctl-wait"));
    });
}

/// Nobody may be there to resume it.
#[test]
fn a_held_program_can_end() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("held", "odd ends-while-held");
    machine.done("pause");
    program.tell("go on");
    common::eventually("it does not wait at the gate", || program.child.try_wait().unwrap().is_some());
    program.end();
    assert_eq!(machine.used(), 0);
}

/// The arena only reserves addresses: `mlockall` must neither fill nor count them, they must not count against the program's data
/// limit, and half of the addresses are left under `ulimit -v`.
#[test]
fn the_programs_limits_are_left_to_the_program() {
    let machine = Machine::with(1, "256M");
    let mut program = Program::spawn(&mut machine.program("locked", "odd locked"));
    let bytes = |program: &Program, which: &str| {
        let status = fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(which)).unwrap().trim();
        line.trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let largest_mapping = |program: &Program| {
        let maps = fs::read_to_string(format!("/proc/{}/maps", program.pid())).unwrap();
        let address = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let bytes = |line: &str| line.split(' ').next().unwrap().split_once('-').map(|(start, end)| address(end) - address(start));
        maps.lines().filter_map(bytes).max().unwrap()
    };
    // The program's limit.
    let left = (6 << 30) - bytes(&program, "VmSize:");
    for _ in 0..2 {
        // Only a privileged user may lock this much.
        if program.line() == "ready" {
            let [resident, locked] = ["VmRSS:", "VmLck:"].map(|which| bytes(&program, which));
            machine.done("pause");
            let paused = ["VmRSS:", "VmLck:"].map(|which| bytes(&program, which));
            assert!(paused[0] < resident + (200 << 20), "{resident} bytes before the pause, {} after it", paused[0]);
            assert!(largest_mapping(&program) <= left / 2, "{left} bytes of addresses were left");
            // The workers' stacks are locked, too.
            assert!(paused[1] < locked + (3 << 29), "{locked} bytes locked before the pause, {} after it", paused[1]);
            machine.done("resume");
        } else {
            eprintln!("memory cannot be locked here: that part was not tested");
        }
        program.tell("go on");
    }
    program.end();

    // A failed prewarm must not count against the program's limit either.
    for (name, prewarm) in [("little", "0"), ("cold", "384M")] {
        let mut program = machine.start_with(name, "odd little-data", |command| {
            command.env("VRAMCTL_PREWARM", prewarm).env("VRAMCTL_HOST_CAP", "32M").env("VRAMCTL_LOG", "error");
        });
        machine.done("pause");
        program.tell("go on");
        program.expect("enough");
        machine.done("resume");
        program.tell("go on");
        program.end();
    }
}

#[test]
fn threads_of_ours_are_named_and_block_all_signals() {
    let machine = Machine::with(1, "256M");
    let program = machine.start_with("threads", "odd plain", |command| {
        command.env("VRAMCTL_HOST_KEEP", "1");
    });
    machine.done("pause");
    machine.done("resume");
    let ours = || {
        let mut ours = Vec::new();
        for task in fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap() {
            // One may end meanwhile.
            let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
            if field("Name:").starts_with("vramctl") {
                ours.push(field("Name:"));
                let blocked = u64::from_str_radix(&field("SigBlk:"), 16).unwrap();
                // All but SIGKILL, SIGSTOP and the two that glibc reserves.
                assert_eq!(blocked | (1 << 8) | (1 << 18) | (3 << 31), u64::MAX, "{blocked:x}");
            }
        }
        ours.sort_unstable();
        ours
    };
    // One that listens, two for when no thread can be started, and one that sleeps until a pause has to wait. The workers that free host memory
    // or served a client end in a moment.
    common::eventually("others are left", || ours() == ["vramctl-control", "vramctl-reserve", "vramctl-reserve", "vramctl-wait"]);
}

/// GPU work that uses paused memory is the program's bug. It is reported, and asking again changes nothing.
#[test]
fn the_programs_own_failed_work_is_reported() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("careless", "odd use-while-paused");
    machine.done("pause --no-hold");
    program.tell("go on");
    program.expect("failed");
    let before = machine.status("careless")["processes"][0]["tags"].clone();
    machine.vramctl("resume --json").expect(1, "work", "");
    assert_eq!(machine.status("careless")["processes"][0]["tags"], before);
}

/// With a guard, it is reported too, and the program goes on.
#[test]
fn the_programs_stray_work_hits_the_guard() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start("careless", "odd use-while-paused");
    let said = machine.done("pause --no-hold --guard");
    assert!(said.contains("guarded by 14.00 MiB"), "{said}");
    let said = machine.done("status");
    assert!(said.contains("The guard of paused memory takes 14.00 MiB of GPU "), "{said}");
    assert_eq!(machine.status("careless")["processes"][0]["devices"][0]["guard_bytes"], 14 << 20);
    program.tell("go on");
    program.expect("went well");
    let said = machine.done("resume");
    assert!(said.contains("warning: careless") && said.contains("something wrote to paused memory"), "{said}");
    assert_eq!(machine.status("careless")["processes"][0]["devices"][0].get("guard_bytes"), None);
    assert_eq!(program.ask("go on"), "ok");
}

#[test]
fn two_programs_wait_for_each_others_memory() {
    let machine = Machine::with(1, "256M");
    let sizes = "engine --weights-mib 128 --kv-mib 16";
    let mut first = machine.start("first", sizes);
    machine.done("pause --name first");
    let mut second = machine.start("second", sizes);

    // Not enough for both: the error has numbers and names.
    let text = machine.vramctl("resume --name first").expect(4, "", "").err;
    assert!(text.contains("needed") && text.contains("free") && text.contains(&second.pid().to_string()), "{text}");
    let refused = machine.vramctl("resume --name first --json").json();
    let uuid = &machine.status("first")["processes"][0]["devices"][0]["uuid"];
    assert_eq!(&refused["processes"][0]["error"]["shortage"]["uuid"], uuid, "an ordinal says nothing outside of the process: {refused}");
    assert!(uuid.is_string(), "{refused}");

    for _ in 0..3 {
        let patient = machine.cli("resume --name first --timeout 30").stdout(Stdio::null()).spawn().unwrap();
        machine.done("pause --name second");
        assert!(patient.wait_with_output().unwrap().status.success());
        assert!(first.ask("verify").contains("ok"));
        let patient = machine.cli("resume --name second --timeout 30").stdout(Stdio::null()).spawn().unwrap();
        machine.done("pause --name first");
        assert!(patient.wait_with_output().unwrap().status.success());
        assert!(second.ask("verify").contains("ok"));
    }
}

/// Whatever arrives on the socket, the program keeps running with its state intact and serves the next client.
#[test]
fn rude_clients_do_no_harm() {
    let machine = Machine::with(1, "256M");
    let program = machine.start("polite", "odd plain");
    let path = machine.socket(program.pid());
    assert_eq!(fs::metadata(machine.sockets()).unwrap().permissions().mode() & 0o777, 0o700);
    let connect = || UnixStream::connect(&path).unwrap();
    let answer = |mut stream: &UnixStream| {
        let mut line = String::new();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut byte = [0];
        while stream.read(&mut byte).unwrap_or(0) == 1 && byte[0] != b'\n' {
            line.push(byte[0] as char);
        }
        line
    };
    let garbage: [&[u8]; 6] = [
        b"\n\n \nhello\n",
        b"{}\n",
        b"\xff\xfe\0\n",
        b"{\"version\":9,\"request\":\"hello\"}\n",
        b"[[[[[[\n",
        b"{\"version\":1,\"request\":\"pause\",\"tags\":7}\n",
    ];
    for bytes in garbage {
        let mut stream = connect();
        stream.write_all(bytes).unwrap();
        let line = answer(&stream);
        assert!(line.contains("\"error\""), "{line}");
    }
    // Too long: rejected before it is read completely.
    let mut endless = connect();
    let _ = endless.write_all(&vec![b'x'; 5 << 20]);
    assert!(answer(&endless).contains("4194304"));
    // Half a request, then a hangup.
    connect().write_all(b"{\"version\":1,\"requ").unwrap();
    let mut half = connect();
    half.write_all(b"{\"version\":1,\"requ").unwrap();
    half.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(answer(&half).contains("middle"));
    // Many silent clients: the limit is reported, and others are served once they leave.
    let crowd: Vec<_> = (0..30).map(|_| connect()).collect();
    let is_refused = |stream: &UnixStream| {
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let mut line = [0; 200];
        (&mut &*stream).read(&mut line).is_ok_and(|count| String::from_utf8_lossy(&line[..count]).contains("too many"))
    };
    common::eventually("some are refused", || crowd.iter().any(is_refused));
    drop(crowd);
    let serves_nobody = || !program.threads().contains(&"vramctl-client".to_owned());
    common::eventually("it has noticed", serves_nobody);
    // Requests a pause with progress and never reads; many others wait their turn.
    let mut deaf = connect();
    for _ in 0..50 {
        deaf.write_all(
            b"{\"version\":1,\"request\":\"pause\",\"progress\":true}\n{\"version\":1,\"request\":\"resume\",\"progress\":true}\n",
        )
        .unwrap();
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    machine.done("pause");
                    machine.done("resume");
                }
            });
        }
    });
    drop(deaf);
    // The deaf client's request is carried out or dropped, but it ends eventually.
    common::eventually("it ends", serves_nobody);
    machine.done("resume");
    ends_well(program);
}

/// Other users are refused even if they get past the directory's mode.
#[test]
fn another_users_client_is_refused() {
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("not run: only root can be somebody else");
        return;
    }
    let machine = Machine::with(1, "256M");
    let program = machine.start("mine", "odd plain");
    let socket = machine.socket(program.pid());
    let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    [machine.folder.path(), &machine.sockets(), &socket].into_iter().for_each(open);
    let client = r#"
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try:
    s.sendall(b'{"version":1,"request":"pause"}\n')
except BrokenPipeError:
    pass  # it was told off and hung up on before it said a word
print(s.makefile().readline())
"#;
    Ran::of(machine.command("python3", &["-c", client]).arg(&socket)).expect(0, "another user", "");
    fs::set_permissions(machine.sockets(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(machine.status("mine")["processes"][0]["tags"][0]["state"], "active");
}

#[test]
fn programs_without_cuda_are_unaffected() {
    let machine = Machine::with(1, "256M");
    // In the shell itself: while it starts a pipeline, it may still have an end of the pipe.
    let script = "set -- /proc/$$/task/*; echo $#; set -- /proc/$$/fd/*; echo $#; grep -c libcuda /proc/$$/maps; echo $?";
    let run = |preload: bool| {
        let mut command = machine.command("bash", &[]);
        command.args(["-c", script]).env("VRAMCTL_TAG", "default");
        // SAFETY: one system call. Descriptors that other tests have open must not reach the program.
        unsafe {
            command.pre_exec(|| {
                libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
                Ok(())
            });
        }
        if preload {
            command.env("LD_PRELOAD", library());
        }
        command.output().unwrap()
    };
    assert_eq!(run(true), run(false));
    assert!(!machine.sockets().exists(), "no directory, no socket");
    let python = machine
        .command("python3", &[])
        .env("LD_PRELOAD", library())
        .args(["-c", "import os; os.fork() and os.wait(); print(1)"])
        .output()
        .unwrap();
    assert!(python.status.success() && python.stderr.is_empty());
}

#[test]
fn works_with_another_preloaded_library() {
    let candidates =
        ["/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2", "/usr/lib64/libjemalloc.so.2"];
    let Some(jemalloc) = candidates.iter().find(|path| Path::new(path).exists()) else {
        println!("not run: no jemalloc (Debian, Ubuntu: apt-get install libjemalloc2)");
        return;
    };
    let machine = Machine::with(1, "256M");
    let ours = library().display().to_string();
    for preload in [format!("{jemalloc}:{ours}"), format!("{ours}:{jemalloc}")] {
        let mut command = machine.command(programs().join("odd"), &[]);
        command.arg("forking-all-the-time").env("LD_PRELOAD", &preload).env("VRAMCTL_TAG", "default");
        let mut program = Program::ready(&mut command);
        for _ in 0..5 {
            machine.done("pause");
            machine.done("resume");
        }
        program.expect("forked");
        ends_well(program);
    }
}

#[test]
fn a_device_without_virtual_memory_is_left_to_cuda_with_one_warning() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start_with("old", "odd plain", |command| {
        command.env("SIMGPU_NO_VMM", "1").stderr(Stdio::piped());
    });
    let mut errors = program.child.stderr.take().unwrap();
    ends_well(program);
    let mut text = String::new();
    errors.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("warn").count(), 1, "{text}");
}

/// Where managed memory cannot be shared, the program gets CUDA's own error, and the log explains it once.
#[test]
fn memory_that_cannot_be_shared_is_explained_once() {
    let machine = Machine::with(1, "256M");
    let program = r#"
import ctypes
ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)
pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
print(cuda.cudaIpcGetMemHandle(handle, pointer), cuda.cudaIpcGetMemHandle(handle, pointer))
"#;
    let ran = Ran::of(machine.cli(&["run", "--", "python3", "-c", program]).env("SIMGPU_NO_SHARING", "1"));
    let log = &ran.err;
    assert_eq!(ran.out.trim(), "1 1", "{log}");
    assert_eq!(log.matches("cannot be shared").count(), 1, "{log}");
    assert!(log.contains("--no-tag"), "{log}");
}

#[test]
fn no_more_host_memory_is_prepared_in_advance_than_the_cap_allows() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start_with("capped", "odd plain", |command| {
        command.env("VRAMCTL_PREWARM", "128M").env("VRAMCTL_HOST_CAP", "64M").env("VRAMCTL_LOG", "info").stderr(Stdio::piped());
    });
    let mut log = BufReader::new(program.child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let told = log.find(|line| line.contains("of host memory is ready")).unwrap();
    assert!(told.contains("only 64.00 MiB"), "{told}");
    for transition in ["pause", "resume"] {
        machine.done(&[transition]);
        assert_eq!(machine.status("capped")["processes"][0]["host"]["ready_bytes"], 64 * MIB, "after the {transition}");
    }
    ends_well(program);
}

#[test]
fn host_memory_is_prepared_in_advance_and_unchanged_contents_are_verified() {
    let machine = Machine::with(1, "256M");
    let mut program = machine.start_with("warm", "odd plain", |command| {
        command.env("VRAMCTL_PREWARM", "128M").env("VRAMCTL_RETAIN", "*").stderr(Stdio::piped());
    });
    let ready = || machine.status("warm")["processes"][0]["host"]["ready_bytes"].as_u64().unwrap();
    common::eventually("it is ready", || ready() >= 128 * MIB);
    assert_eq!(ready(), 128 * MIB);
    for round in 0..3 {
        let told = machine.vramctl("pause --json").json();
        let unchanged = if round == 0 { 0 } else { 4 * MIB };
        assert_eq!(told["processes"][0]["report"]["unchanged_bytes"], unchanged, "{told}");
        machine.done("resume");
    }
    assert_eq!(ready(), 128 * MIB, "it stays ready");
    let mut errors = program.child.stderr.take().unwrap();
    ends_well(program);
    let mut text = String::new();
    errors.read_to_string(&mut text).unwrap();
    assert_eq!(besides_holds(&text), "");
}

/// With more dependencies the library could not be preloaded everywhere; with more exports it would intercept unrelated
/// calls.
#[test]
fn the_library_depends_on_little_and_exports_only_the_listed_names() {
    let tool = |program: &str, arguments: &[&str]| {
        let output = Command::new(program)
            .args(arguments)
            .arg(library())
            .output()
            .unwrap_or_else(|error| panic!("{program} (Debian: binutils): {error}"));
        String::from_utf8(output.stdout).unwrap()
    };
    for line in tool("readelf", &["-d"]).lines().filter(|line| line.contains("(NEEDED)")) {
        assert!(["libc.so", "libm.so", "libgcc_s.so", "ld-linux"].iter().any(|known| line.contains(known)), "{line}");
    }
    // torch_memory_saver's functions have no header, because it has none either.
    let promised = ["include/vramctl.h", "docs/torch_memory_saver.md"]
        .map(|file| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap())
        .concat();
    let symbols = tool("nm", &["-D", "--defined-only"]);
    let exported: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    let of_nccl = nccl::FUNCTIONS.iter().map(|function| function.symbol.to_str().unwrap());
    let hooked: Vec<_> = HOOKED
        .iter()
        .copied()
        .chain(entries::all().map(|function| function.symbol.to_str().unwrap()))
        .chain(of_nccl)
        .chain(RESOLVERS)
        .chain(OPENERS)
        .collect();
    for name in &exported {
        let known = hooked.contains(name) || promised.contains(&format!("{name}("));
        assert!(known, "{name} is exported and should not be");
    }
    for name in hooked {
        assert!(exported.contains(&name), "{name} is not exported");
    }
}
