//! What a program that shares its GPU waits for (`vramctl run --share`), and what it does not.

use crate::common::machine::{Machine, Program};
use crate::common::{compile, own_folder, programs};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const MIB: u64 = 1 << 20;
/// Of a context, and of what is loaded.
const FIXED: u64 = 4;

fn crowded() -> Machine {
    let mut machine = Machine::new();
    (machine.memory, machine.context_bytes) = ("96M", FIXED * MIB);
    machine
}

fn sharing(machine: &Machine, name: &str, program: &[&str]) -> Command {
    let mut command = machine.cli(&["run", "--share", "--name", name, "--no-python", "--"]);
    command.args(program).env("SIMGPU_CODE_BYTES", (FIXED * MIB).to_string());
    command
}

/// A program with this much memory, which is idle.
fn idle(machine: &Machine, mib: u32) -> Program {
    let engine = programs().join("engine");
    let weights = (mib - 8).to_string();
    Program::ready(&mut sharing(machine, "idle", &[engine.to_str().unwrap(), "--weights-mib", &weights, "--kv-mib", "8"]))
}

/// The program of `tests/apps/room.c`.
fn room() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = own_folder().join("room");
        compile(&program, &["room.c"], &["-l:libcuda.so.1", "-l:libcudart.so.13"]);
        program
    })
}

fn asking(machine: &Machine) -> Program {
    Program::ready(&mut sharing(machine, "asking", &[room().to_str().unwrap()]))
}

fn changes(machine: &Machine) -> usize {
    let view: Value = machine.vramctl("share --json").expect(0, "", "").json();
    view["changes"].as_array().unwrap().iter().filter(|change| change["outcome"] == "changed").count()
}

/// Fills the GPU with a program that does not share, so that there is no room for anything fixed.
fn fill(machine: &Machine) -> Program {
    let mut program = Program::ready(&mut machine.command(room(), &[]));
    assert_eq!(program.ask("first"), "0");
    let free = 96 - machine.used() / MIB;
    assert_eq!(program.ask(&format!("take {}", free - 2)), "0");
    program
}

/// On a full GPU, they would all be out of memory.
#[test]
fn contexts_and_code_wait_for_room() {
    for first in ["first", "runtime"] {
        let machine = crowded();
        let mut idle = idle(&machine, 48);
        let mut asking = asking(&machine);
        for request in [first, "context", "load", "launch", "graph", "order 4"] {
            idle.verify();
            let (before, hog) = (changes(&machine), fill(&machine));
            assert_eq!(asking.ask(request), "0", "{request}");
            assert_eq!(asking.ask("error"), "0", "{request}");
            assert!(changes(&machine) > before, "{request}: nobody has given way");
            drop(hog);
        }
        idle.verify();
        assert_eq!(asking.ask("check"), "ok");
    }
}
