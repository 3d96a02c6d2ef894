//! Moments of a program at which the preloaded library must not be noticed.

use crate::common;
use crate::common::machine::{Machine, Program, Ran};
use crate::common::{SHARED, built, compile, own_folder, programs};
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

impl Program {
    /// Waits until it has ended well. Returns what it has written to its standard error.
    #[track_caller]
    fn ends(mut self) -> String {
        let (text, mut errors) = (self.rest(), String::new());
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let status = self.ended();
        assert!(status.success(), "{status}: {text}{errors}");
        errors
    }
}

/// The end of a thread unwinds its stack. Rust aborts the process if that meets what catches its panics.
#[test]
fn threads_are_cancelled_in_the_drivers_functions() {
    let machine = Machine::new();
    let mut command = machine.command(programs().join("guest"), &["cancelled"]);
    let preloaded = format!("{}:{}", common::library().display(), built("waits.so", "waits.c", &SHARED).display());
    Ran::of(command.env("LD_PRELOAD", preloaded)).expect(0, "ok", "");
}

/// A constructor that waits at the gate has the loader's lock. Nothing of a pause, a suspend or a resume may need that, or nobody could let it go on.
#[test]
fn a_library_is_opened_while_its_program_is_held() {
    // Without an answer of NVML, a suspended process counts as usual: 1 GiB.
    let machine = Machine::with(1, "2G");
    let (program, library) = (own_folder().join("opens"), own_folder().join("constructor.so"));
    let runtime = "-l:libcudart.so.13";
    compile(&program, &["constructor.c"], &[runtime]);
    compile(&library, &["constructor.c"], &["-shared", "-fPIC", "-DLIBRARY", runtime]);
    let mut program = machine.start_with("opens", program.to_str().unwrap(), |command| _ = command.arg(&library));
    machine.vramctl("pause").expect(0, "", "");
    assert_eq!(program.ask("open"), "ok");
    let waits = || machine.status("opens")["processes"][0]["waiting_threads"] == 1;
    common::eventually("the constructor waits at the gate", waits);
    // The first of it goes on, and is held again.
    for _ in 0..3 {
        machine.vramctl("resume").expect(0, "", "");
        machine.vramctl("pause").expect(0, "", "");
        common::eventually("the constructor waits at the gate", waits);
    }
    machine.vramctl("suspend").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    assert_eq!(program.ask("end"), "ok");
    program.end();
}

/// `loading.c` as a program, and as libraries of these names.
fn loading<const N: usize>(libraries: [&str; N]) -> (PathBuf, [PathBuf; N]) {
    let (folder, cuda) = (own_folder().join(format!("loading-{}", libraries.concat())), ["-l:libcuda.so.1", "-l:libcudart.so.13"]);
    std::fs::create_dir(&folder).unwrap();
    let (program, nccl) = (folder.join("loading"), folder.join("libnccl.so.2"));
    compile(&program, &["loading.c"], &cuda);
    compile(&nccl, &["nccl/nccl.c"], &[&SHARED[..], &["-Wl,-soname,libnccl.so.2"]].concat());
    let options = [&SHARED[..], &["-DLIBRARY", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN"], &cuda].concat();
    let libraries = libraries.map(|name| {
        let built = folder.join(name);
        compile(&built, &["loading.c"], &options);
        built
    });
    (program, libraries)
}

/// The constructor has the loader's lock, so the thread that it waits for must not need that: CUDA itself does not.
#[test]
fn a_constructor_waits_for_a_thread_that_calls_cuda() {
    let machine = Machine::new();
    let (program, [plugin]) = loading(["libplugin.so"]);
    let run = |libraries: &[&Path]| {
        let mut command = machine.preloaded(libraries, &program, &["waits", plugin.to_str().unwrap()]);
        Ran::of(command.env("VRAMCTL_LOG", "warn"))
    };
    run(&[]).expect(0, "ok", "");
    let report = run(&[&common::library()]).expect(0, "ok", "out of memory").err;
    assert!(report.contains("libplugin.so+0x"), "the frames have names: {report}");
}

/// A plug-in of NCCL's is closed, and the library that comes in its place allocates: that is not NCCL's memory.
#[test]
fn memory_is_that_of_the_library_that_is_there_now() {
    let machine = Machine::new();
    // Of the same length, so that the loader has the new path at the address of the old one, too.
    let (program, [plugin, model]) = loading(["libnccl-plugin.so", "libmodel-layer.so"]);
    let paths = [&plugin, &model].map(|path| path.to_str().unwrap());
    let program = machine.start_with("loading", program.to_str().unwrap(), |command| _ = command.arg("closes").args(paths));
    let status = machine.status("loading");
    let tags: Vec<_> =
        status["processes"][0]["tags"].as_array().unwrap().iter().map(|tag| (tag["tag"].clone(), tag["bytes"].clone())).collect();
    assert_eq!(tags, [("default".into(), (8 << 20).into()), ("nccl".into(), (4 << 20).into())]);
    program.end();
}

/// An exit in a signal handler that has interrupted `malloc` would hang if an exit handler needed memory. Reports that are held back,
/// because the program would try again, are made all the same.
#[test]
fn a_program_that_exits_in_malloc_ends_with_its_reports() {
    let machine = Machine::new();
    // The name of torch's allocator, which tries again.
    let torch = machine.folder.path().join("libc10_cuda.so");
    symlink(programs().join("guest"), &torch).unwrap();
    let mut program = machine.start_with("ends", torch.to_str().unwrap(), |command| {
        command.arg("exit-in-malloc").stderr(Stdio::piped());
    });
    let socket = machine.socket(program.pid());
    // From the first hold on, there is an exit handler for that, too.
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    assert!(socket.exists());
    program.tell("end");
    let said = program.ends();
    // Three at once, as the rate limit wants it.
    assert_eq!(said.matches("out of memory: libc10_cuda.so asked for 1024.00 GiB").count(), 3, "{said}");
    // They were held back, so the last ones are counted after the pages.
    assert!(said.contains("more requests that have failed since the last report: 2"), "{said}");
    assert!(!socket.exists());
}

/// The kernel's answer to a file that would get too large ends a program that does not expect it.
#[test]
fn a_message_that_finds_no_space_does_no_harm() {
    let machine = Machine::new();
    let mut errors = tempfile::tempfile().unwrap();
    errors.write_all(&[b'\n'; 64]).unwrap();
    let mut command = machine.command(programs().join("guest"), &["no-space"]);
    command.env("LD_PRELOAD", common::library()).env("VRAMCTL_TAG", "default");
    // Which gives a warning.
    command.env("SIMGPU_NO_VMM", "1").stdout(Stdio::piped()).stderr(errors.try_clone().unwrap());
    Ran::end_of(command.spawn().unwrap()).expect(0, "ok", "");
    assert_eq!(errors.metadata().unwrap().len(), 64);
}

/// What has the number of a standard error that the program has closed may be its data.
#[test]
fn a_message_goes_into_no_file_of_the_program() {
    let machine = Machine::new();
    for (mode, start) in [("another-error", "exec \"$0\" \"$@\""), ("without-error", "exec \"$0\" \"$@\" 2>&-")] {
        let mut command = machine.command("sh", &["-c", start]);
        command.arg(programs().join("guest")).arg(mode);
        command.env("LD_PRELOAD", common::library()).env("VRAMCTL_TAG", "default");
        // Which gives a warning.
        Ran::of(command.env("SIMGPU_NO_VMM", "1")).expect(0, "ok", "");
    }
}

/// A child that is made past the fork handlers has its parent's state, and exit handlers.
#[test]
fn a_child_that_no_fork_handler_has_seen_ends_without_a_trace() {
    let machine = Machine::new();
    let mut program = machine.start_with("parent", "guest", |command| {
        command.arg("stray-child").stderr(Stdio::piped());
    });
    assert_eq!(program.ask("fork"), "still ready");
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    program.tell("end");
    program.ends();
}

/// Only what the program itself writes may stop it there.
#[test]
fn a_message_does_not_stop_a_program_in_the_background() {
    let machine = Machine::new();
    let mut command = machine.command(programs().join("guest"), &["in-the-background"]);
    command.env("LD_PRELOAD", common::library()).env("VRAMCTL_TAG", "default");
    // Which gives a warning.
    Ran::of(command.env("SIMGPU_NO_VMM", "1")).expect(0, "ok", "");
}

/// Neither a defect nor a reason to lose anything.
#[test]
fn a_program_that_must_not_start_threads_is_told_so_by_a_pause() {
    let machine = Machine::new();
    let mut command = machine.command(programs().join("guest"), &["no-threads"]);
    command.env("LD_PRELOAD", common::library()).env("VRAMCTL_TAG", "default");
    let warned = "no control socket: could not start a thread: Resource temporarily unavailable";
    let ran = Ran::of(&mut command).expect(0, "pause: 4 vramctl could not start a thread in the process: ", warned);
    assert!(ran.out.ends_with("ok\n"), "{}", ran.out);
}

/// Pauses a program so that it is held, and has it reach a limit.
fn held_at_limit(machine: &Machine, limit: &str, backup: &str) -> Program {
    let mut program = machine.start_with("held", limit, |command| _ = command.env("VRAMCTL_DISK_DIR", machine.folder.path()));
    machine.done(&["pause", "held", "--backup", backup]);
    assert_eq!(program.ask("go on"), "at the limit");
    program
}

/// A held server accepts connections until it has no descriptor for more. Whatever it does then, it can be resumed.
#[test]
fn a_held_program_without_descriptors_is_resumed() {
    for limit in ["guest held-at-soft-limit", "guest held-at-hard-limit"] {
        let machine = Machine::new();
        let mut program = held_at_limit(&machine, limit, "host");
        // It takes each descriptor that a client has given up.
        for _ in 0..20 {
            assert_eq!(machine.status("held")["processes"][0]["held"], true);
            assert_eq!(program.ask("again"), "at the limit");
        }
        machine.done("resume held");
        program.tell("end");
        program.end();
    }
}

/// One that asks for a descriptor again and again gets what is free for a moment. Nothing is, unless a client comes.
#[test]
fn a_program_that_asks_for_descriptors_leaves_the_reserve() {
    let machine = Machine::new();
    let mut program = held_at_limit(&machine, "guest held-at-limit-and-asking", "host");
    assert_eq!(program.ask("again"), "at the limit");
    machine.done("resume held");
    program.tell("end");
    program.end();
}

/// A held server has a thread for each request that waits, until it gets no more. It can be resumed all the same.
#[test]
fn a_held_program_without_threads_is_resumed() {
    for backup in ["host", "disk"] {
        let machine = Machine::new();
        let mut program = held_at_limit(&machine, "guest held-without-threads", backup);
        // They keep what threads they have.
        let _idle = [(); 4].map(|()| machine.connect(&program));
        assert_eq!(machine.status("held")["processes"][0]["held"], true);
        machine.done("resume held");
        program.tell("end");
        program.end();
    }
}

/// `/proc/self` is the main thread's, and most of that ends with it.
#[test]
fn a_program_whose_main_thread_has_ended_is_reached() {
    let machine = Machine::new();
    let mut program = machine.start("ended", "guest end-main-thread");
    machine.done("pause ended --backup host");
    // Somebody deletes the socket.
    std::fs::remove_file(machine.socket(program.pid())).unwrap();
    common::eventually("the socket is there again", || machine.socket(program.pid()).exists());
    machine.vramctl("suspend ended").expect(7, "", "its main thread has ended, through which the driver reaches a process");
    machine.done("resume ended");
    program.tell("end");
    program.end();
}

/// They wait as any others: what is saved there must be saved.
#[test]
fn the_main_threads_last_calls_wait_while_the_program_is_held() {
    let machine = Machine::new();
    let mut program = machine.start("ends", "guest save-at-the-end-of-main-thread");
    machine.done("pause ends --backup host");
    program.tell("end");
    common::eventually("it waits at the gate", || machine.status("ends")["processes"][0]["waiting_threads"] == 1);
    machine.done("resume ends");
    program.expect("ready");
    program.tell("end");
    program.end();
}

/// Somebody would have to resume it first, for no purpose.
#[test]
fn a_held_program_exits_by_itself() {
    for exit in ["guest exit-while-held", "guest exit-quickly-while-held"] {
        let machine = Machine::new();
        let mut program = machine.start("ends", exit);
        let socket = machine.socket(program.pid());
        machine.done("pause ends");
        program.tell("end");
        common::eventually("it ends", || program.child.try_wait().unwrap().is_some());
        program.end();
        assert!(!socket.exists());
    }
}

/// Threads inherit how the thread runs that starts them.
#[test]
fn the_librarys_threads_run_as_the_process_was_started() {
    let machine = Machine::new();
    let mut program = machine.start("bound", "guest bound");
    machine.done("pause bound");
    machine.done("resume bound");
    program.tell("end");
    program.end();
}

/// Rust ends a process that gets no memory. CUDA answers an error, if it needs any.
#[test]
fn a_program_at_its_limit_of_memory_goes_on() {
    let machine = Machine::new();
    let mut program = machine.start("short", "guest host-memory-short");
    machine.done("pause short");
    machine.done("resume short");
    assert_eq!(program.ask("go on"), "done");
    machine.done("pause short --backup host");
    machine.done("resume short");
    program.tell("end");
    program.end();
}

/// A program whose signal handlers make calls, and pauses of it that hold it.
struct Interrupted {
    machine: Machine,
    program: Program,
}

impl Interrupted {
    fn start() -> Self {
        let machine = Machine::new();
        let program =
            machine.start_with("handlers", "handlers", |command| _ = command.env("LD_PRELOAD", built("counts.so", "counts.c", &SHARED)));
        Self { machine, program }
    }

    #[track_caller]
    fn pause(&self) {
        let answer = self.machine.connect(&self.program).ask(&json!({"request": "pause", "tags": [], "hold_ms": 20_000}));
        assert_eq!(answer["reply"], "done", "{answer}");
    }

    #[track_caller]
    fn resume(&self) {
        let answer = self.machine.connect(&self.program).ask(&json!({"request": "resume"}));
        assert_eq!(answer["reply"], "done", "{answer}");
    }

    /// How many threads wait at the gate; `None` if the program is not held.
    fn waiting(&self) -> Option<u64> {
        let status = self.machine.connect(&self.program).ask(&json!({"request": "status"}));
        (status["held"] == true).then(|| status["waiting_threads"].as_u64().unwrap_or(0))
    }

    #[track_caller]
    fn waits(&self) {
        common::eventually("it waits at the gate", || self.waiting().unwrap() > 0);
    }

    fn ask(&mut self, command: &str) -> String {
        self.program.ask(command)
    }

    #[track_caller]
    fn gets_to(&mut self, progress: &str) {
        common::eventually("its calls return", || self.ask("progress") == progress);
        assert_eq!((self.ask("verify").as_str(), self.waiting()), ("ok", None));
    }
}

/// The handler's launch waits as any other: on its own, in a thread that waits itself, and in a handler that waits. Queries pass.
#[test]
fn calls_of_signal_handlers_wait_while_held() {
    let mut held = Interrupted::start();
    held.pause();
    assert_eq!(held.ask("interrupt"), "ok");
    held.waits();
    assert_eq!(held.ask("progress"), "0 0");
    held.resume();
    held.gets_to("0 1");

    held.pause();
    assert_eq!(held.ask("call"), "ok");
    held.waits();
    assert_eq!((held.ask("interrupt"), held.ask("interrupt")), ("ok".to_owned(), "ok".to_owned()));
    thread::sleep(Duration::from_millis(20));
    assert_eq!((held.ask("progress").as_str(), held.waiting()), ("0 1", Some(1)));
    held.resume();
    held.gets_to("1 3");
    // Nobody is counted as inside or as waiting any more.
    held.pause();
    assert_eq!(held.waiting(), Some(0));
    held.resume();
}

/// Handlers interrupt a thread in the gate itself, on its way in and out, and each other.
#[test]
fn signal_handlers_interrupt_the_gate_at_any_moment() {
    let mut busy = Interrupted::start();
    assert_eq!(busy.ask("bombard"), "ok");
    for round in 0..40 {
        busy.pause();
        let before = busy.ask("counts");
        let (begun, ended) = before.split_once(' ').unwrap();
        assert_eq!(begun, ended, "round {round}: somebody is inside");
        thread::sleep(Duration::from_millis(2));
        assert_eq!(busy.ask("counts"), before, "round {round}: somebody has got inside");
        busy.resume();
        common::eventually("it runs on", || busy.ask("counts") != before);
    }
    assert_eq!(busy.ask("cease"), "ok");
    busy.pause();
    assert_eq!(busy.waiting(), Some(0));
    busy.resume();
    assert_eq!(busy.ask("verify"), "ok");
}
