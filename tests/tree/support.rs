//! What is supported: docs/support.md is made of the tables in `src/model/support.rs` (`UPDATE=1` writes it), and the doctor, a dry run, status
//! and the operation itself refuse the same, in the same words.

use crate::common;
use crate::common::machine::Machine;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::os::unix::process::CommandExt;
use vramctl_model::ObstacleKind;
use vramctl_model::support::{self, ARCHITECTURE, DRIVER, EXPECTED, MOVE, REFUSED, REQUIREMENTS, RUNS, SUSPEND};

/// A table, with an empty line after it.
fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let head: Vec<_> = head.iter().map(ToString::to_string).collect();
    let rows: String = rows.into_iter().map(|row| line(&row)).collect();
    line(&head) + &line(&vec!["---".to_owned(); head.len()]) + &rows + "\n"
}

fn page() -> String {
    let mut text = String::from(
        "# Support\n\n`UPDATE=1 cargo test --test tree support` makes this page of `src/model/support.rs`; `vramctl doctor` compares your machine with the same tables.\n\n",
    );
    let none = |text: &str| if text.is_empty() { "–".to_owned() } else { text.to_owned() };
    let (driver, cuda) = DRIVER;
    let _ = write!(
        text,
        "## Run\n\nOn real GPUs, {ARCHITECTURE}, Ubuntu 24.04, Python 3.12, driver {driver} (CUDA {cuda}). Figures: [performance.md](performance.md).\n\n"
    );
    text += &table(
        &["GPU", "torch", "program", "what", "last on"],
        RUNS.iter().map(|run| {
            let program = format!("{} {}", run.program, run.version).trim_end().to_owned();
            vec![format!("{} {}", run.gpus, run.gpu), none(run.torch), program, run.what.to_owned(), run.when.to_owned()]
        }),
    );
    text += "## What the driver must be\n\n";
    text += &table(
        &["for", "driver", "CUDA", "with an older one"],
        REQUIREMENTS.map(|need| vec![need.operation.to_owned(), need.driver.to_string(), need.cuda.to_string(), need.otherwise.to_owned()]),
    );
    text += "## Expected to work, not run\n\n";
    text += &table(&["what", "why"], EXPECTED.map(|(what, why)| vec![what.to_owned(), why.to_owned()]));
    text += "## Refused\n\n";
    text += &table(&["what", "what happens"], REFUSED.map(|(what, then)| vec![what.to_owned(), then.to_owned()]));
    text += "`suspend` and `move` are also refused with these; [limits.md](limits.md#suspend-and-move) has the details:\n\n";
    let obstacle = |kind| {
        let (what, then) = support::obstacle(kind);
        vec![what.to_owned(), then.to_owned()]
    };
    text += &table(&["what", "a suspend"], ObstacleKind::ALL.map(obstacle));
    text.trim_end().to_owned() + "\n"
}

#[test]
fn the_page_is_current() {
    common::generated::check("docs/support.md", &page(), "src/model/support.rs");
}

/// The README's summary says the same.
#[test]
fn the_readme_agrees() {
    let readme = fs::read_to_string(crate::root().join("README.md")).unwrap();
    assert!(readme.contains(&format!("`suspend` needs driver {}, `move` {}", SUSPEND.driver, MOVE.driver)));
    assert!(readme.contains(&format!("before CUDA {}, the library unpins", support::UNPIN.cuda)));
    assert!(readme.contains(&format!("{} (CUDA {}) or later", support::PAUSE.driver, support::PAUSE.cuda)));
    let cell = |row: &str| readme.lines().find(|line| line.starts_with(&format!("| {row}"))).unwrap().rsplit('|').nth(1).unwrap().trim();
    let run_with = |of: fn(&support::Run) -> &'static str| {
        let mut all: Vec<_> = RUNS.iter().map(of).filter(|what| !what.is_empty()).collect();
        all.sort_unstable();
        all.dedup();
        all.join(", ")
    };
    assert_eq!(cell("GPU"), run_with(|run| run.gpu));
    assert_eq!(cell("Python"), format!("3.12; torch {}", run_with(|run| run.torch)));
    assert_eq!(cell("CUDA runtime"), RUNS.iter().find(|run| run.program == "CUDA runtime").unwrap().version);
}

/// What was run is not among what was not.
#[test]
fn what_was_run_is_not_expected_only() {
    let number = |version: &str| version.split('.').map(|part| part.parse::<u32>().unwrap()).collect::<Vec<_>>();
    let run = |program: &str| -> Vec<Vec<u32>> {
        let version = |run: &&support::Run| {
            if program == "torch" {
                run.torch
            } else if run.program == program {
                run.version
            } else {
                ""
            }
        };
        RUNS.iter().map(|run| version(&run)).filter(|version| !version.is_empty()).map(number).collect()
    };
    for program in ["torch", "vLLM", "SGLang"] {
        let expected = EXPECTED.iter().flat_map(|(what, _)| {
            what.split(", ").scan("", |of, part| {
                *of = part.split(' ').next().filter(|word| word.chars().all(char::is_alphabetic) && *word != "and").unwrap_or(of);
                Some((*of, part))
            })
        });
        let ranges: Vec<_> = expected.filter(|(of, _)| *of == program).map(|(_, part)| part).collect();
        assert!(!ranges.is_empty(), "{program}");
        for range in ranges {
            let ends: Vec<_> = range.split(' ').filter(|word| word.starts_with(|c: char| c.is_ascii_digit())).map(number).collect();
            let is_open = range.ends_with("or later");
            for version in run(program) {
                let version = version[..ends[0].len().min(version.len())].to_vec();
                let is_in = ends[0] <= version && (is_open || version <= *ends.last().unwrap());
                assert!(!is_in, "{program} {version:?} was run, and is in {range:?}");
            }
        }
    }
}

/// What becomes of programs that cannot be managed, said in two places.
#[test]
fn security_agrees() {
    let page = fs::read_to_string(crate::root().join("SECURITY.md")).unwrap();
    let (_, then) = REFUSED.iter().find(|(what, _)| what.contains("set-uid")).unwrap();
    assert_eq!(*then, "it runs without the library; `vramctl run` says so");
    assert!(page.contains("set-user-id programs: they run without the library, and `run` says so"));
}

/// What `command` says on a machine where a variable makes the driver or the GPU another one.
fn told(machine: &Machine, (name, value): (&str, &str), line: &str) -> (Option<i32>, String) {
    let output = machine.cli(line).env(name, value).env("VRAMCTL_HOST_CAP", "64M").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).split_whitespace().collect::<Vec<_>>().join(" ");
    (output.status.code(), text(&output.stdout) + " " + &text(&output.stderr))
}

/// A program under a driver that is too old runs as without the library, which says so once.
#[test]
fn a_driver_before_cuda_12_is_refused_by_name() {
    let machine = Machine::new();
    let too_old = support::PAUSE.text();
    let (code, text) = told(&machine, ("SIMGPU_CUDA", "11.8"), "doctor");
    assert!(code == Some(1) && text.contains(&too_old) && text.contains(support::PAUSE.otherwise), "{code:?} {text}");
    let (_, text) = told(&machine, ("SIMGPU_CUDA", "12.0"), "doctor");
    assert!(!text.contains(&too_old), "{text}");
    // Two contexts, of which one is destroyed. At the end, whether any memory is managed.
    let program = "import ctypes, vramctl; cu = ctypes.CDLL('libcuda.so.1'); c, d = ctypes.c_void_p(), ctypes.c_uint64(); a = ctypes.byref; \
                   print([cu.cuInit(0), *[r for _ in 'ab' for r in (cu.cuCtxCreate_v2(a(c), 0, 0), cu.cuMemAlloc_v2(a(d), ctypes.c_size_t(4 << 20)))], \
                   cu.cuCtxDestroy_v2(c), cu.cuMemAlloc_v2(a(d), ctypes.c_size_t(4 << 20)), cu.cuMemFree_v2(d)], \
                   bool(vramctl.status().tags))";
    for (cuda, wanted) in [("11.8", ("[0, 0, 0, 0, 0, 0, 0, 0] False", 1)), ("12.0", ("[0, 0, 0, 0, 0, 0, 0, 0] True", 0))] {
        let output = machine.cli("run -- python3 -c").arg(program).env("SIMGPU_CUDA", cuda).output().unwrap();
        let (told, warned) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!((told.trim(), warned.matches(&too_old).count()), wanted, "{cuda}: {warned}");
    }
}

/// Each reason to refuse a suspend or a move that the doctor can know.
#[test]
fn doctor_dry_run_status_and_the_page_agree() {
    let mut machine = Machine::new();
    machine.devices = 2;
    let (mut engine, mut behind) =
        (machine.engine("engine"), machine.engine_with("behind", |command: &mut std::process::Command| _ = command.env("SIMGPU_MPS", "1")));
    let page = page();
    for (variable, name, refused, why) in [
        (("SIMGPU_CUDA", "12.4"), "engine", &["suspend", "move"][..], SUSPEND.text()),
        (("SIMGPU_CUDA", "12.8"), "engine", &["move"], MOVE.text()),
        (("SIMGPU_MIG", "1"), "engine", &["suspend", "move"], support::in_mig_mode(0)),
        (("SIMGPU_MPS", "1"), "behind", &["suspend", "move"], support::BEHIND_MPS.to_owned()),
        (("SIMGPU_CUDA", "13.0"), "engine", &[], "cannot be suspended".to_owned()),
    ] {
        let doctor: Value = serde_json::from_str(&told(&machine, variable, "doctor --json").1).unwrap();
        for operation in ["suspend", "move"] {
            let check = doctor["checks"].as_array().unwrap().iter().find(|check| check["check"] == operation).unwrap();
            let is_refused = refused.contains(&operation);
            assert_eq!(check["verdict"] == "warning", is_refused, "{variable:?} {check}");
            // A driver that is too old for a suspend is told as that by both.
            let needed = if why == SUSPEND.text() && operation == "move" { MOVE.text() } else { why.clone() };
            assert_eq!(check["message"].as_str().unwrap().contains(&needed), is_refused, "{variable:?} {check}");
        }
        let (code, text) = told(&machine, variable, &format!("suspend {name} --dry-run"));
        assert_eq!(
            (code == Some(7), text.contains(&why)),
            (refused.contains(&"suspend"), refused.contains(&"suspend")),
            "{variable:?} {text}"
        );
        if refused.contains(&"suspend") {
            let (code, text) = told(&machine, variable, &format!("suspend {name}"));
            assert!(code == Some(7) && text.contains(&why) && text.contains("Nothing has changed"), "{variable:?} {code:?} {text}");
        }
        let (_, text) = told(&machine, variable, &format!("status {name}"));
        assert_eq!(text.contains(&why), !refused.is_empty(), "{variable:?} {text}");
        if refused.contains(&"move") {
            let (code, text) = told(&machine, variable, &format!("move {name} --to 1"));
            assert!(code == Some(7) && text.contains(&why) && text.contains("Nothing has changed"), "{variable:?} {code:?} {text}");
        }
    }
    for words in ["570", "580", "MIG mode", support::BEHIND_MPS] {
        assert!(page.contains(words), "{words}");
    }
    assert!(!machine.vramctl("status").text().contains("paused "), "something has changed");
    for rank in [&mut engine, &mut behind] {
        rank.verify();
    }
}

/// What a process itself has is of a kind that the page and the help name. A dry run, status and the operation tell it in the same words, until
/// the program ends it as docs/limits.md says.
#[test]
fn an_obstacle_is_told_alike_by_dry_run_status_help_and_the_pages() {
    let machine = Machine::pair();
    let mut engine = machine.python("engine");
    engine.number("malloc(4 << 20)");
    engine.ask("globals().update(driver=ctypes.CDLL('libcuda.so.1'), at=ctypes.c_uint64(), pool=ctypes.c_void_p(), file=ctypes.c_int())");
    let help = told(&machine, ("COLUMNS", "1000"), "suspend --help").1;
    for (kind, word) in ObstacleKind::ALL.map(|kind| (kind, word_of(kind))) {
        assert!(support::obstacle(kind).0.contains(word), "{kind:?}: docs/support.md does not say {word}");
        assert!(help.contains(word), "{kind:?}: the help does not say {word}: {help}");
    }
    let limits = fs::read_to_string(crate::root().join("docs/limits.md")).unwrap();
    for words in [
        "exit code 7",
        "(support.md#refused)",
        "frees, closes or unmaps the memory, destroys the pool or the memory's context, or withdraws the access",
    ] {
        assert!(limits.split_whitespace().collect::<Vec<_>>().join(" ").contains(words), "{words}");
    }

    let pool = "driver.cuMemPoolCreate(ctypes.byref(pool), (ctypes.c_uint32 * 22)(1, 1, 1, 0))";
    let access = |flags| format!("driver.cuMemPoolSetAccess(pool, (ctypes.c_uint32 * 3)(1, 1, {flags}), ctypes.c_size_t(1))");
    let export = "driver.cuMemPoolExportToShareableHandle(ctypes.byref(file), pool, 1, ctypes.c_uint64(0))";
    let (managed, small) = (
        "driver.cuMemAllocManaged(ctypes.byref(at), ctypes.c_size_t(4096), 1)",
        "driver.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(4096))",
    );
    let register = "driver.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint32(1)), 6, at)";
    let (free, destroy) = ("driver.cuMemFree_v2(at)", "driver.cuMemPoolDestroy(pool)");
    for (kind, begins, ends) in [
        (ObstacleKind::Unified, vec![managed.to_owned()], free.to_owned()),
        (ObstacleKind::Registered, vec![small.to_owned(), register.to_owned()], free.to_owned()),
        (ObstacleKind::Peers, vec![pool.to_owned(), access(3)], access(0)),
        (ObstacleKind::Shared, vec![export.to_owned()], destroy.to_owned()),
    ] {
        for call in &begins {
            assert_eq!(engine.ask(call), "0", "{call}");
        }
        let none = ("LANG", "C");
        let (code, text) = told(&machine, none, "suspend engine --dry-run --json");
        let plan: Value = serde_json::from_str(&text).unwrap();
        let status: Value = serde_json::from_str(&told(&machine, none, "status engine --json").1).unwrap();
        let obstacles = &status["processes"][0]["obstacles"];
        assert_eq!((code, obstacles), (Some(7), &plan["processes"][0]["plan"]["obstacles"]), "{kind:?} {status}");
        let (what, named) = (obstacles[0]["what"].as_str().unwrap(), &obstacles[0]["kind"]);
        assert_eq!((obstacles.as_array().unwrap().len(), named), (1, &serde_json::to_value(kind).unwrap()), "{status}");
        assert!(what.contains(word_of(kind)), "{kind:?} {what}");
        for (command, before, code) in [
            ("suspend engine --dry-run", "", Some(7)),
            ("suspend engine", "", Some(7)),
            ("move engine --to 1", "", Some(7)),
            ("status engine", "Cannot be suspended: ", Some(0)),
        ] {
            let (found, text) = told(&machine, none, command);
            assert!(found == code && text.contains(&format!("{before}{what}")), "{kind:?}: {command}: {found:?} {text}");
        }
        assert_eq!(engine.ask(&ends), "0", "{ends}");
        assert_eq!(told(&machine, none, "suspend engine --dry-run").0, Some(0), "{kind:?} has ended");
        assert!(!told(&machine, none, "status engine").1.contains("Cannot be suspended"), "{kind:?} has ended");
    }
}

/// What everyone calls it, when it is in the way of a suspend.
fn word_of(kind: ObstacleKind) -> &'static str {
    match kind {
        ObstacleKind::Communicator => "NVSHMEM",
        ObstacleKind::Shared => "share",
        ObstacleKind::Registered => "regist",
        ObstacleKind::Peers => "another GPU",
        ObstacleKind::Multicast => "multicast objects",
        ObstacleKind::Unified => "unified memory",
        ObstacleKind::Mps => "MPS",
        ObstacleKind::Mig => "MIG mode",
    }
}

/// Where a container's filter forbids `kcmp`, the doctor says so, and what to do.
#[test]
fn the_doctor_knows_whether_owners_of_shared_memory_can_be_found() {
    let machine = Machine::new();
    let check = |forbidden: bool| {
        let mut command = machine.cli("doctor --json");
        command.env("VRAMCTL_HOST_CAP", "64M");
        if forbidden {
            // SAFETY: between fork and exec, it makes system calls alone.
            unsafe { command.pre_exec(forbid_kcmp) };
        }
        let output = command.output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = said["checks"].as_array().unwrap().iter().find(|check| check["check"] == "shared memory").unwrap().clone();
        (output.status.code(), found["verdict"].as_str().unwrap().to_owned(), found["message"].as_str().unwrap().to_owned())
    };
    let (_, verdict, message) = check(false);
    assert_eq!(verdict, "ok", "{message}");
    let (code, verdict, message) = check(true);
    assert_eq!((code, verdict.as_str()), (Some(0), "warning"), "{message}");
    assert!(message.contains("not permitted") && message.contains(support::WITHOUT_KCMP), "{message}");
}

/// As Docker's default profile does.
fn forbid_kcmp() -> std::io::Result<()> {
    let step = |code: u32, jump: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: jump, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_kcmp as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, refuse),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter outlives the call.
    let answers = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0),
        ]
    };
    if answers == [0, 0] { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// How much there is, how much a pause would take, and how much it takes.
#[test]
fn doctor_dry_run_status_and_the_pause_tell_the_same_numbers() {
    const CAP: u64 = 64 << 20;
    let machine = Machine::new();
    let mut engine = machine.engine_with("engine", |command: &mut std::process::Command| _ = command.env("VRAMCTL_HOST_CAP", "64M"));
    let cap = ("VRAMCTL_HOST_CAP", "64M");
    let json = |line: &str| serde_json::from_str::<Value>(&told(&machine, cap, line).1).unwrap();
    let (doctor, plan, status) = (json("doctor --json"), json("pause engine --dry-run --json"), json("status engine --json"));
    let check = |name: &str| doctor["checks"].as_array().unwrap().iter().find(|check| check["check"] == name).unwrap()["data"].clone();
    let (plan, status) = (&plan["processes"][0]["plan"], &status["processes"][0]);
    assert_eq!((check("host memory")["available_bytes"].as_u64(), plan["host"]["available_bytes"].as_u64()), (Some(CAP), Some(CAP)));
    let (gpu, device) = (check("GPU"), &status["devices"][0]);
    assert_eq!((&gpu["uuid"], &gpu["total_bytes"]), (&device["uuid"], &device["total_bytes"]));
    let bytes = |of: &Value| of["tags"].as_array().unwrap().iter().map(|tag| tag["bytes"].as_u64().unwrap()).sum::<u64>();
    let paused = json("pause engine --json");
    let freed = paused["processes"][0]["report"]["bytes"].as_u64().unwrap();
    assert_eq!([bytes(plan), bytes(status), device["active_bytes"].as_u64().unwrap()], [freed; 3]);
    machine.vramctl("resume").has(0, "resumed", "");
    engine.verify();
}
