//! The memory left after each pause is recorded, and an owner that grows each time is named once.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::Machine;
use common::{Gpu, MIB, free, malloc_tagged, pause, resume, warnings};
use serde_json::json;
use std::env;
use vramctl_core::memory::Memory;
use vramctl_intercept::entries;
use vramctl_model::{Cycle, Growth};

fn warned_of(owner: &str) -> Vec<String> {
    warnings::told(|text| text.starts_with(owner))
}

fn driver_malloc(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, bytes) }, 0);
    address
}

fn growing() -> Vec<Growth> {
    Memory::get().status().growing
}

fn cycles() -> Vec<Cycle> {
    Memory::get().status().cycles
}

/// A library that is left to CUDA and frees nothing: here, this program.
#[test]
fn a_leaking_owner_is_named_after_three_cycles() {
    const LEAK: usize = 20 * MIB;
    warnings::collect();
    let _gpu = Gpu::take();
    let this = env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let managed = [malloc_tagged("first", None, 4 * MIB).unwrap(), malloc_tagged("second", None, 2 * MIB).unwrap()];
    // An earlier test may have paused.
    let (mut leaked, before) = (Vec::new(), cycles().len());
    for number in 1..=5_u64 {
        leaked.push(driver_malloc(LEAK));
        // Two pauses, one cycle.
        pause(&["first"]).unwrap();
        pause(&["second"]).unwrap();
        pause(&["second"]).unwrap();
        let last = cycles().pop().unwrap();
        assert_eq!((cycles().len(), last.unmanaged[&this]), ((before + number as usize).min(8), number * LEAK as u64));
        assert_eq!(last.tags, [("first".to_owned(), 4 << 20), ("second".to_owned(), 2 << 20)].into());
        let wanted = Growth { owner: this.clone(), bytes_per_cycle: LEAK as u64, cycles: number };
        assert_eq!(growing(), if number < 3 { Vec::new() } else { vec![wanted] }, "cycle {number}");
        assert_eq!(warned_of(&this).len(), usize::from(number >= 3), "{:?}", warned_of(&this));
        resume(&[]).unwrap();
    }
    assert!(warned_of(&this)[0].contains("20.00 MiB more in each cycle, over the last 3"), "{:?}", warned_of(&this));

    for address in leaked {
        assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 0);
    }
    for _ in 0..5 {
        pause(&[]).unwrap();
        assert_eq!(growing(), Vec::new(), "it has ended");
        resume(&[]).unwrap();
    }
    assert_eq!(cycles().len(), 8, "the last ones are kept");
    assert_eq!(warned_of("").len(), 1, "{:?}", warned_of(""));
    for address in managed {
        assert_eq!(free(address), 0);
    }
}

/// A suspended process is not on any GPU, so NVML is asked in between.
#[test]
fn nvmls_figure_is_sent_during_a_suspend() {
    let machine = Machine::new();
    let engine = machine.engine("engine");
    for number in 0..2 {
        machine.vramctl("suspend").expect(0, "", "");
        machine.vramctl("resume").expect(0, "", "");
        let status = machine.connect(&engine).ask(&json!({"request": "status"}));
        let cycles = status["cycles"].as_array().unwrap();
        assert_eq!(cycles.len(), number + 1);
        assert!(cycles.iter().all(|cycle| cycle["driver"].as_object().is_some_and(|gpus| gpus.len() == 1)), "{status}");
    }
}

/// NVML's figure for memory that the library cannot see comes from the command or another client.
#[test]
fn nvmls_figure_is_sent_after_a_pause_and_a_leak_in_it_is_named() {
    const GPU: &str = "GPU-73696d75-6c61-7465-642d-6770752d3030";
    const CONTEXT: u64 = 24 << 20;
    const LEAK: u64 = 200 << 20;
    /// In debug builds; NVML counts it too.
    const GUARD: u64 = 14 << 20;
    let machine = Machine::new();
    let engine = machine.engine_with("engine", |command| _ = command.env("SIMGPU_CONTEXT_BYTES", CONTEXT.to_string()));
    let status = || machine.connect(&engine).ask(&json!({"request": "status"}));
    let counted = |bytes| machine.connect(&engine).step(&json!({"request": "counted", "gpus": {GPU: bytes}}), None, "counted");
    counted(CONTEXT);
    assert!(status().get("cycles").is_none(), "{}", status());
    for number in 0..3 {
        let (pause, guard) = if number == 1 { ("pause --guard", GUARD) } else { ("pause", 0) };
        machine.vramctl(pause).expect(0, "", "");
        let told = status()["cycles"][number]["driver"][GPU].as_u64();
        // The program's smallest allocations are not managed.
        assert!(told.is_some_and(|bytes| (CONTEXT..CONTEXT + (4 << 20)).contains(&bytes)), "{}", status());
        assert!(status().get("growing").is_none(), "{}", status());
        counted(CONTEXT + number as u64 * LEAK + guard);
        machine.vramctl("resume").expect(0, "", "");
        counted(1 << 40);
    }
    let named = json!([{"owner": "context, loaded code, small allocations", "bytes_per_cycle": LEAK, "cycles": 3}]);
    assert_eq!(status()["growing"], named);
    machine.vramctl("status").expect(0, "A leak? context, loaded code, small allocations: 200.00 MiB more in each cycle", "");
}
