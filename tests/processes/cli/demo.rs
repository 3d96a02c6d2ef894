//! `vramctl demo`, which needs no GPU and no checkout.

use super::*;

#[test]
fn a_demo_takes_memory_from_a_program_and_gives_it_back() {
    let machine = Machine::without_gpus();
    let mut demo = machine.cli("demo");
    let ran = Ran::of(demo.env("TMPDIR", machine.folder.path()).env("VRAMCTL_LIB", library()).env("VRAMCTL_TAG", "of-the-user"));
    let text = ran.expect(0, "Demo OK: 128 MiB were taken from a running program", "").out;
    for part in ["engine", "out of memory: there are less than 192 MiB", "held, paused", "are as they were written"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains("of-the-user"), "the user's settings are not the demo's: {text}");
    let left: Vec<_> = fs::read_dir(machine.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("demo")), "{left:?}");
}

#[test]
fn a_shell_of_the_demo_has_a_program_to_pause() {
    let machine = Machine::without_gpus();
    let shell = machine.folder.path().join("shell");
    common::write_executable(
        &shell,
        "#!/bin/sh\nvramctl pause engine && vramctl ps && vramctl run -d --no-python --name other -- vramctl demo-program && \
         vramctl wait other --for active --timeout 100 && vramctl status other --json && echo \"$VRAMCTL_CRIU\"\n",
    );
    let mut demo = machine.cli("demo --shell");
    demo.env("TMPDIR", machine.folder.path()).env("VRAMCTL_LIB", library()).env("SHELL", &shell);
    demo.env("VRAMCTL_CRIU", "/where/criu/is");
    let ran = Ran::of(&mut demo).expect(0, "held, paused", "").expect(0, "other (pid ", "");
    // It has no input, and stays.
    ran.has(0, "\"active\"", "");
    ran.has(0, "/where/criu/is", "");
}

#[test]
fn an_installation_without_the_simulated_gpu_says_so() {
    let machine = Machine::without_gpus();
    let alone = machine.folder.path().join("libvramctl.so");
    fs::copy(library(), &alone).unwrap();
    let mut demo = machine.cli("demo");
    Ran::of(demo.env("VRAMCTL_LIB", &alone)).expect(1, "", "libsimgpu.so is missing; it is in the wheel and the archive");
}
