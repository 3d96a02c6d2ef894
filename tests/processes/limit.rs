//! Programs with a limit: what they can get, what they are shown, and what operators see of it.

use crate::common::machine::{Machine, Program, Ran};
use crate::common::sharing::MIB;
use serde_json::{Value, json};
use std::process::Command;

const CONTEXT: u64 = 96 * MIB;

fn machine(devices: u32) -> Machine {
    Machine { context_bytes: CONTEXT, ..Machine::with(devices, "512M") }
}

/// A process that evaluates expressions, with this limit.
fn python(machine: &Machine, limit: &str, change: impl FnOnce(&mut Command)) -> Program {
    machine.python_with("limited", |command| {
        command.env("VRAMCTL_LIMIT", limit);
        change(command);
    })
}

/// What `cudaMemGetInfo` shows, in MiB: free and total.
fn shown(program: &mut Program) -> String {
    let free = "(lambda f, t: (cuda.cudaMemGetInfo(ctypes.byref(f), ctypes.byref(t)), f.value >> 20, t.value >> 20)[1:])";
    program.ask(&format!("{free}(ctypes.c_size_t(), ctypes.c_size_t())"))
}

fn malloc(program: &mut Program, mib: u64) -> String {
    program.ask(&format!("malloc({mib} << 20)"))
}

/// The limit and what counts of it, in MiB, as `status` says of each GPU.
fn taken(machine: &Machine) -> Value {
    let status = machine.status("limited");
    let devices = status["processes"][0]["devices"].as_array().unwrap().clone();
    devices
        .iter()
        .map(|device| json!([device["limit_bytes"].as_u64().unwrap() / MIB, device["counted_bytes"].as_u64().unwrap() / MIB]))
        .collect()
}

#[test]
fn the_context_counts_and_operators_see_how_near_the_limit_is() {
    let machine = machine(1);
    let mut program = python(&machine, "192M", |_| ());
    let held = program.number(&format!("malloc({})", 32 * MIB));
    assert_eq!(shown(&mut program), "(64, 192)");
    assert_eq!(malloc(&mut program, 65), "error 2");
    assert_eq!(taken(&machine), json!([[192, 128]]));
    machine.vramctl("status limited").expect(0, ") is 192.00 MiB: 128.00 MiB is taken.", "");
    machine.vramctl("ps -o wide").expect(0, "128.00 MiB of 192.00 MiB", "");
    let metrics = machine.done("metrics");
    for (name, bytes) in [("limit", 192 * MIB), ("counted", 128 * MIB)] {
        let line = metrics.lines().find(|line| line.starts_with(&format!("vramctl_gpu_{name}_bytes{{"))).unwrap();
        assert!(line.contains("name=\"limited\"") && line.ends_with(&format!(" {bytes}")), "{line}");
    }
    assert_eq!(program.ask(&format!("free({held})")), "0");
    assert_eq!((shown(&mut program), taken(&machine)), ("(96, 192)".into(), json!([[192, 96]])));
    // The context ends, and with it what it has counted.
    assert_eq!(program.ask("cuda.cudaDeviceReset()"), "0");
    assert_eq!((taken(&machine), shown(&mut program)), (json!([]), "(96, 192)".into()));
}

#[test]
fn nothing_is_allocated_above_a_limit_that_the_context_alone_exceeds() {
    let machine = machine(1);
    let mut command = machine.cli(&["run", "--limit", "64M", "--name", "limited", "--no-python", "--"]);
    let ran = Ran::of(command.arg(crate::common::programs().join("allocates")));
    for way in ["cudaMalloc", "cudaMallocPitch", "cudaMalloc3D", "cudaMallocAsync"] {
        ran.has(0, &format!("{way}: 2 -1 -1 -1\n"), "");
    }
    ran.has(0, "ready 2 2\n", "the CUDA context alone takes 96.00 MiB, and the limit is 64.00 MiB: every allocation will be refused");
    ran.has(0, "", "96.00 MiB by the context");
}

/// As in a container that does not know the host's process ids.
#[test]
fn a_context_that_cannot_be_measured_does_not_count() {
    let machine = machine(1);
    for pids in ["host", "none"] {
        let mut program = python(&machine, "64M", |command| _ = command.env("SIMGPU_NVML_PIDS", pids));
        assert_eq!((shown(&mut program), malloc(&mut program, 65)), ("(64, 64)".into(), "error 2".into()));
        assert_ne!(malloc(&mut program, 64), "error 2");
        program.end();
    }
}

#[test]
fn a_percentage_is_of_each_gpu() {
    let machine = machine(2);
    let mut program = python(&machine, "50%", |_| ());
    for device in 0..2 {
        assert_eq!(program.ask(&format!("cuda.cudaSetDevice({device})")), "0");
        assert_eq!(shown(&mut program), "(160, 256)");
        assert_eq!(malloc(&mut program, 161), "error 2");
        program.number(&format!("malloc({})", 160 * MIB));
        assert_eq!(shown(&mut program), "(0, 256)");
    }
    assert_eq!(taken(&machine), json!([[256, 256], [256, 256]]));
}

/// Each process has the limit, and none counts another's memory.
#[test]
fn a_forked_child_and_an_executed_program_have_the_limit_anew() {
    let machine = machine(1);
    let mut program = python(&machine, "192M", |_| ());
    let uses = "(isinstance(malloc(96 << 20), int), malloc(1 << 20) == 'error 2') == (True, True)";
    assert_eq!(program.ask(&format!("fork(lambda: 0 if {uses} else 1)")), "0");
    assert_eq!(program.ask(&format!("fork(lambda: 0 if {uses} else 1)")), "0", "the first child has nothing of it any more");
    assert_eq!(program.ask(uses), "True");
    let again = "__import__('subprocess').run([sys.executable, '-c', \"import ctypes as c; r = c.CDLL('libcudart.so.13'); p = c.c_void_p(); \
                 print([r.cudaMalloc(c.byref(p), c.c_size_t(n << 20)) for n in (97, 96, 1)])\"], capture_output=True, text=True).stdout.strip()";
    assert_eq!(program.ask(again), "[2, 0, 2]");
    assert_eq!(taken(&machine), json!([[192, 192]]));
}

/// Paused, suspended or moved: its memory counts all the time, and comes back within the limit.
#[test]
fn an_engine_with_a_limit_goes_and_comes_back() {
    let machine = Machine { engine_mib: [32, 32], ..machine(2) };
    let mut engine = machine.engine_with("limited", |command| _ = command.env("VRAMCTL_LIMIT", "256M"));
    let before = engine.ask("memory");
    assert!(before.ends_with(&format!("total={}", 256 * MIB)), "{before}");
    let has = taken(&machine);
    for (away, back) in
        [("pause limited", "resume limited"), ("suspend limited", "resume limited"), ("move limited --to 1", "move limited --to 0")]
    {
        machine.done(away);
        if !away.starts_with("move") {
            assert_eq!(taken(&machine), has, "{away}");
        }
        machine.done(back);
        assert_eq!((engine.ask("memory"), taken(&machine)), (before.clone(), has.clone()), "{away}");
        engine.verify();
    }
    assert_eq!(engine.ask("quit"), "bye");

    let large = Ran::of(machine.program("limited", "engine --weights-mib 32 --kv-mib 32").env("VRAMCTL_LIMIT", "128M"));
    large.has(1, "", "this process's limit of 128.00 MiB refuses it");
}

#[test]
fn a_wrong_limit_is_refused_before_the_program_starts() {
    let machine = machine(1);
    machine.vramctl("run --limit 120% -- true").expect(2, "", "120% is neither a size such as 20G nor a share such as 25%");
    Ran::of(machine.cli("run -- true").env("VRAMCTL_LIMIT", "lots")).expect(2, "", "VRAMCTL_LIMIT: lots is neither a size");
    machine.vramctl("run --limit 25% -- true").expect(0, "", "");
}
