//! What `ps`, `status` and `gpus` show.

use super::*;

#[test]
fn ps_and_status_show_the_processes() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let pid = engine.pid().to_string();

    let ps = machine.vramctl("ps -o wide");
    ps.has(0, "kv_cache 1.00 GiB, weights 1.00 GiB", "");
    let row = ps.out.lines().nth(1).unwrap();
    assert_eq!(row.split_whitespace().take(5).collect::<Vec<_>>(), [&pid, "engine", "active", "2.00", "GiB"]);
    assert!(row.ends_with("engine --serve"));

    for target in ["", "engine", &pid, "--name engine", "--all"] {
        let status = machine.vramctl(&format!("status {target}"));
        status.has(0, &format!("engine (pid {pid}): engine --serve"), "");
        status.has(0, "get the tag default", "");
        let words: Vec<_> = status.out.lines().find(|line| line.starts_with("kv_cache")).unwrap().split_whitespace().collect();
        assert_eq!(words, ["kv_cache", "active", "1.00", "GiB", "1", "host", "0", "B", "0", "B"]);
        status.has(0, "7.00 GiB", "");
        status.has(0, "80.00 GiB", "");
    }

    let (ps, status) = (machine.vramctl("ps --json").only_json(), machine.vramctl("status --json").only_json());
    assert_eq!(ps, status);
    let process = &ps["processes"][0];
    assert_eq!((&process["pid"], &process["name"]), (&json!(engine.pid()), &json!("engine")));
    assert_eq!(process["tags"][1]["tag"], "weights");
    assert_eq!(process["tags"][1]["backup"], json!({"host": GIB}));
    assert_eq!(process["devices"][0]["free_bytes"], json!(7 * GIB));
    assert_eq!(process["devices"][0]["uuid"], GPU);
}

/// Ordinals are meaningless outside their process.
#[test]
fn gpus_are_identified_by_uuid() {
    let machine = Machine::without_gpus();
    let (first, second) = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-aaaabbbb-0000-0000-0000-000000000000");
    let engine = Fake::new(&machine, "engine", &["weights"]).on_gpu(first);
    let trainer = Fake::new(&machine, "trainer", &["weights"]).on_gpu(second);
    machine.vramctl("status").expect(0, "GPU-aaaaaaaa", "");
    machine.vramctl("ps").expect(0, "GPU-aaaaaaaa", "");
    let shown = |line: &str| {
        let ran = machine.vramctl(line);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        (ran.out.contains("engine --serve"), ran.out.contains("trainer --serve"))
    };
    for gpu in [second, "gpu-aaaab", "aaaab"] {
        assert_eq!(shown(&format!("ps -o wide --gpu {gpu}")), (false, true));
        assert_eq!(shown(&format!("status --gpu {gpu}")), (false, true));
    }
    assert_eq!(shown(&format!("ps -o wide --gpu {first} --gpu {second}")), (true, true));
    machine.vramctl("ps --gpu aaaa").expect(2, "", "GPU-aaaaaaaa-0000-0000-0000-000000000000, GPU-aaaabbbb");
    machine.vramctl("pause --gpu GPU-cccc").expect(3, "", "no managed process has memory on GPU-cccc");

    machine.vramctl("pause --gpu aaaab").expect(0, "paused weights of trainer", "");
    assert_eq!(
        trainer.asked(),
        [Request::Pause(PauseRequest { selection: Selection { gpus: vec![second.into()], ..Selection::default() }, ..held() })]
    );
    machine.vramctl("pause --gpu aaaab").expect(0, &format!("trainer (pid {}) has nothing there to pause", trainer.pid()), "");
    machine.vramctl("resume --all --gpu aaaab").expect(0, "resumed weights of trainer", "");
    assert!(engine.asked().is_empty());

    // A stopped process cannot be asked whether it has memory there.
    let stopped = Stopped::new(&machine, None, 100);
    machine.vramctl("pause --all --gpu aaaab").expect(5, "", &format!("kill -CONT {}", stopped.pid()));
}

/// Optional details are printed only if present.
#[test]
fn status_shows_missing_memory_and_its_owner() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    let usual = machine.vramctl("status");
    usual.has(0, "kv_cache", "");
    assert!(["go back", "not taken", "Host memory", "left to CUDA"].iter().all(|text| !usual.out.contains(text)), "{}", usual.out);
    let mut status = engine.state.lock().unwrap().status();
    drop(engine);

    status.memory.late_bytes = GIB / 8;
    status.memory.unmanaged =
        vec![vramctl_model::Unmanaged { owner: "libnccl.so.2".into(), bytes: GIB / 4, gpus: [(GPU.into(), GIB / 4)].into() }];
    let cycle = |mib: u64| Cycle { unmanaged: [("libnccl.so.2".into(), mib << 20)].into(), ..Cycle::default() };
    status.memory.cycles = vec![Cycle::default(), cycle(56), cycle(156), cycle(256)];
    status.memory.growing = Cycle::growing(&status.memory.cycles);
    status.memory.host.ready_bytes = 4 * GIB;
    status.memory.host.used_bytes = GIB;
    status.memory.host.pinned_bytes = 3 * GIB;
    let _engine = Fake::reacting(&machine, "engine", &["kv_cache", "weights"], move |request| {
        matches!(request, Request::Status).then(|| Reaction::Answer(Reply::Status(status.clone())))
    });
    let status = machine.vramctl("status");
    status.has(0, "The driver has not taken 128.00 MiB back yet; every pause and resume retries.", "");
    status.has(0, "libnccl.so.2 (left to CUDA): 256.00 MiB.", "");
    status.has(0, "OWNER         -3  -2         -1          LAST PAUSE\nlibnccl.so.2  ?   56.00 MiB  156.00 MiB  256.00 MiB", "");
    status.has(0, "A leak? libnccl.so.2: 100.00 MiB more in each cycle, over the last 3.", "");
    status.expect(
        0,
        "Host memory for backups: 0 B used of 4.00 GiB. The rest is ready for the next pause. 1.00 GiB could not be pinned",
        "",
    );
}

#[test]
fn the_progress_of_a_long_pause_is_shown() {
    let machine = Machine::without_gpus();
    let engine = in_the_middle(&machine, TagState::Pausing, Stage::Save);
    machine.vramctl("status").expect(0, "pausing (save 256.00 MiB of 1.00 GiB)", "");
    let tag = machine.vramctl("status --json").only_json()["processes"][0]["tags"][1].clone();
    assert_eq!((&tag["state"], &tag["progress"]), (&json!("pausing"), &json!({"stage": "save", "done": GIB / 4, "total": GIB})));
    machine.vramctl("ps").expect(0, "weights pausing", "");
    drop(engine);
    let _engine = in_the_middle(&machine, TagState::Resuming, Stage::Restore);
    machine.vramctl("status").expect(0, "resuming (restore 256.00 MiB of 1.00 GiB)", "");
    machine.vramctl("ps").expect(0, "weights resuming", "");
}

#[test]
fn ps_says_which_tags_are_paused() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]);
    machine.vramctl("pause kv_cache").expect(0, "", "");
    let ps = machine.vramctl("ps");
    ps.has(0, "kv_cache paused", "");
    assert!(!ps.out.contains("mixed"), "{ps:?}");
}

/// What it takes of the GPU now, and where the rest is, which is no longer there.
#[test]
fn a_list_says_where_memory_is_and_since_when() {
    let machine = Machine::new();
    let _engine = machine.engine_with("engine", |command| {
        command.env("VRAMCTL_TAG", "a").env("VRAMCTL_DISK_DIR", machine.folder.path());
    });
    let row = || {
        let ps = machine.vramctl("ps -o wide").expect(0, "", "").out;
        ps.lines().nth(1).unwrap().split("  ").filter(|cell| !cell.is_empty()).map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(row()[2..5], ["active", "22.00 MiB", "0"]);
    machine.done("pause engine");
    let held = row();
    assert_eq!(held[2..6], ["held, paused", "0 B", "22.00 MiB host", "0"]);
    assert!(held[6].ends_with(" s") && held[8].contains("(vramctl, user "), "{held:?}");
    let status = machine.done("status engine");
    assert!(status.contains("Asked for ") && status.contains(" ago by process "), "{status}");
    machine.done("resume engine");
    machine.done("pause engine --backup disk");
    assert_eq!(row()[2..5], ["held, paused", "0 B", "22.00 MiB files"]);
    machine.done("resume engine");
    machine.done("pause engine --no-hold");
    assert_eq!(row()[2..6], ["paused", "0 B", "22.00 MiB host", "0"]);
    machine.done("resume engine");
}

#[test]
fn a_list_has_the_columns_the_order_and_the_form_that_are_wanted() {
    let machine = Machine::without_gpus();
    let (_big, _small) = (Fake::new(&machine, "big", &["a", "b", "c"]), Fake::new(&machine, "a-small-one", &["a"]));
    let names = |line: &str| machine.vramctl(line).out.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names("list -o name --sort name"), ["a-small-one", "big"]);
    assert_eq!(names("ps -o name --sort bytes"), ["big", "a-small-one"]);
    let titles = |line: &str| machine.vramctl(line).out.lines().next().unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(titles("ps"), ["PID", "NAME", "STATE", "ON", "GPU", "AWAY", "GPU", "SINCE", "JOB", "COMMAND"]);
    assert_eq!(
        titles("ps -o wide"),
        ["PID", "NAME", "STATE", "ON", "GPU", "AWAY", "GPU", "SINCE", "JOB", "BY", "LIMIT", "TAGS", "COMMAND"]
    );
    assert_eq!(machine.vramctl("ps -o json").only_json(), machine.vramctl("ps --json").only_json());
}

#[test]
fn the_process_tag_is_set() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &[]);
    machine.vramctl("set-tag weights").expect(0, "get the tag weights from now on", "");
    assert_eq!(engine.state.lock().unwrap().process_tag.as_deref(), Some("weights"));
    let answer = machine.vramctl("set-tag --none --json").only_json();
    assert_eq!(answer, json!({"processes": [{"pid": engine.pid(), "name": "engine", "tag": null}]}));
    assert_eq!(engine.state.lock().unwrap().process_tag, None);
    machine.vramctl("set-tag").expect(2, "", "vramctl set-tag --none");
    machine.vramctl("set-tag a=b").expect(2, "", "equals");
}
