//! A program exits in the middle of a pause or resume, at each driver call in turn. No worker is in the driver when it shuts down
//! or calls it later, the client is told what happened, and the program exits normally.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::{Gpu, MIB, malloc_tagged, pattern, pause, release, resume, write};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vramctl_backup::CopyBy;
use vramctl_model::Policy;

/// Environment variables of the program: the transition in progress when it exits and who requested it, and the driver call.
const PATH: &str = "ENDING_PATH";
const NTH: &str = "ENDING_NTH";
/// Exit codes of the program: it exited at the call, or there was no such call.
const AT_THE_CALL: i32 = 42;
const WITHOUT_IT: i32 = 43;

/// Allocates contents for host memory, for retained and hashed host memory, for a file, and to be discarded.
fn start(path: &str) -> Gpu {
    let gpu = Gpu::take();
    let tags = [("weights", Policy::Host), (common::RETAINED_TAG, Policy::Host), ("cold", Policy::Disk), ("cache", Policy::Discard)];
    let addresses = tags.map(|(tag, backup)| malloc_tagged(tag, Some(backup), 2 * MIB).unwrap());
    // Makes a retained copy, part of which is then written to.
    pause(&[common::RETAINED_TAG]).and_then(|_| resume(&[common::RETAINED_TAG])).unwrap();
    for address in addresses {
        assert_eq!(write(address, &pattern(address, 4096)), 0);
    }
    if path.contains("kernel") {
        vramctl_backup::set_copy_by(CopyBy::Kernel, None);
    }
    if path.contains("resume") {
        pause(&[]).unwrap();
    }
    vramctl_backup::settle();
    gpu
}

static OVER: AtomicBool = AtomicBool::new(false);

/// Exits at a driver call. Runs in a process of its own.
#[test]
#[ignore = "run by the tests below"]
fn ends_at_a_call() {
    extern "C" fn go_on() {
        release();
    }
    extern "C" fn end_here(_signal: i32) {
        std::process::exit(AT_THE_CALL);
    }
    let (path, nth) = (std::env::var(PATH).expect("a path"), std::env::var(NTH).unwrap().parse().unwrap());
    let gpu = start(&path);
    // Registered last, so it runs first: the call is still in the driver when the exit handlers begin.
    assert_eq!(unsafe { libc::atexit(go_on) }, 0);
    gpu.reset_counts();
    gpu.hold(nth);
    let change = if path.contains("resume") { resume } else { pause };
    let in_thread = path.contains("thread").then(|| {
        std::thread::spawn(move || {
            let _ = change(&[]);
            OVER.store(true, Ordering::SeqCst);
        })
    });
    if path.contains("signal") {
        unsafe { libc::signal(libc::SIGUSR1, end_here as *const () as libc::sighandler_t) };
    }
    println!("\nsocket {}/sockets/{}.sock", common::own_folder().display(), std::process::id());
    std::thread::spawn(|| {
        // Until the test reports that the request has been answered.
        let _ = std::io::stdin().read(&mut [0]);
        OVER.store(true, Ordering::SeqCst);
    });
    while !gpu.is_holding() {
        if OVER.load(Ordering::SeqCst) {
            println!("\ncalls {}", common::calls(""));
            std::process::exit(WITHOUT_IT);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    match in_thread {
        Some(thread) if path.contains("signal") => {
            use std::os::unix::thread::JoinHandleExt;
            unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
            std::thread::sleep(Duration::from_secs(600));
        }
        // Runs the exit handlers, as returning from main does.
        _ => std::process::exit(AT_THE_CALL),
    }
}

/// Makes the program exit at a call. Returns the client's reply and, if there was no such call, the number of calls.
fn end_at(path: &str, nth: u64) -> (Option<Value>, Option<u64>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "ends_at_a_call"]);
    command.env(PATH, path).env(NTH, nth.to_string()).env("SIMGPU_END_MS", "20").env(common::LOG_LEVEL, "warn").env(common::BUILT, "1");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let socket = lines.find_map(|line| Some(line.strip_prefix("socket ")?.to_owned()));
    let told = (!path.contains("thread")).then(|| {
        let answer = socket.and_then(|socket| ask(&socket, if path.contains("resume") { "resume" } else { "pause" }));
        input.as_mut().map(over);
        answer.unwrap_or_else(|| panic!("{path}, call {nth}: no answer"))
    });
    let calls = lines.find_map(|line| line.strip_prefix("calls ")?.parse().ok());
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    let expected = if calls.is_some() { WITHOUT_IT } else { AT_THE_CALL };
    assert_eq!(ended.status.code(), Some(expected), "{path}, call {nth}: {:?} {said}", ended.status);
    assert!(said.is_empty(), "{path}, call {nth}: {said}");
    (told, calls)
}

fn over(input: &mut ChildStdin) {
    // It may have exited.
    let _ = input.write_all(b"\n");
}

fn ask(socket: &str, request: &str) -> Option<Value> {
    let mut stream = UnixStream::connect(socket).ok()?;
    writeln!(stream, r#"{{"version":1,"request":"{request}"}}"#).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

/// Exits at each call of a path in turn, or at every `step`-th if another path makes the same calls.
fn end_at_each(path: &str, step: u64) {
    common::artifacts();
    let (_, calls) = end_at(path, u64::MAX);
    let calls = calls.expect("the number of calls");
    assert!(calls > 20, "{path} makes {calls} calls only");
    let (next, told_of_the_end) = (AtomicU64::new(1), AtomicU64::new(0));
    let work = || {
        while let Some(nth) = Some(next.fetch_add(step, Ordering::Relaxed)).filter(|nth| *nth <= calls) {
            let (told, _) = end_at(path, nth);
            match told {
                Some(told) if told["reply"] == "error" => {
                    assert_eq!(told["code"], "ending", "{path}, call {nth}: {told}");
                    told_of_the_end.fetch_add(1, Ordering::Relaxed);
                }
                // The transition was almost complete.
                Some(told) => assert_eq!(told["reply"], "done", "{path}, call {nth}"),
                None => (),
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
    let told_of_the_end = told_of_the_end.into_inner();
    println!("{path}: {calls} calls, {told_of_the_end} clients were told");
    assert!(path.contains("thread") || told_of_the_end > calls / step / 2, "{path}: {told_of_the_end} of {calls}");
}

#[test]
fn in_a_pause() {
    end_at_each("pause", 1);
}

#[test]
fn in_a_resume() {
    end_at_each("resume", 1);
}

#[test]
fn in_a_resume_by_a_kernel() {
    end_at_each("resume by kernel", 3);
}

/// Requested by a thread of the program, as through the C ABI or from Python.
#[test]
fn in_what_another_thread_of_the_program_has_asked_for() {
    end_at_each("pause in thread", 3);
    end_at_each("resume in thread", 3);
}

/// Exits in a signal handler that has interrupted the library.
#[test]
fn in_a_signal_handler() {
    end_at_each("pause in thread by signal", 3);
}
