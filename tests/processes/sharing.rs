//! CUDA IPC of managed memory, between real processes under the preloaded library on a simulated machine.

use crate::common;
use crate::common::machine::{Machine, NEVER, Program, Ran, Wire, proxy};
use crate::common::sharing::{MIB, PIECE, PROGRAM};
use crate::common::{LONG_MS, eventually};
use proptest::prelude::*;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::{self, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn both_processes_see_the_same_bytes_and_a_pause_waits_until_it_is_closed() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    // Several pieces of physical memory.
    let bytes = 2 * PIECE + 6 * MIB;
    let pointer = owner.number(&format!("malloc({bytes})"));
    assert_eq!(owner.ask(&format!("fill({pointer}, 1, {bytes})")), "0");
    let handle = owner.ask(&format!("get({pointer})"));
    assert_eq!(owner.ask(&format!("get({})", pointer + PIECE)), handle, "every address gives the handle of the allocation");
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("read({theirs}, {bytes})")), "[1]");
    assert_eq!(machine.used(), bytes);
    let last = bytes - MIB;
    assert_eq!(other.ask(&format!("fill({}, 2, {MIB})", theirs + last)), "0");
    assert_eq!(owner.ask(&format!("read({}, {MIB})", pointer + last)), "[2]");
    assert_eq!(owner.ask(&format!("fill({pointer}, 3, 100)")), "0");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[3]");

    assert_eq!(other.number(&format!("open_('{handle}')")), theirs, "open already");
    machine.refused(&owner, &other);
    assert_eq!(machine.used(), bytes);
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    machine.refused(&owner, &other);
    let json = machine.vramctl("pause --name owner --json").json();
    assert!(json.to_string().contains("shared"), "{json}");
    for wrong in [theirs + MIB, 0x1234] {
        assert_eq!(other.ask(&format!("close({wrong})")), "1");
    }
    assert_eq!(other.ask(&format!("free({theirs})")), "1");
    assert_eq!(other.ask(&format!("get({theirs})")), "error 1", "what is open is not shared on");
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    assert_eq!(other.ask(&format!("close({theirs})")), "1", "as often as it was opened");
    assert_eq!(other.ask(&format!("read({theirs}, 1)")), "error 1");

    for round in 0..2 {
        machine.done("pause --name owner");
        assert_eq!(machine.used(), 0);
        assert_eq!(other.ask(&format!("open_('{handle}')")), "error 401", "paused");
        machine.done("resume --name owner");
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.ask(&format!("read({}, {MIB})", theirs + last)), format!("[{}]", round + 2));
        assert_eq!(other.ask(&format!("fill({}, {}, {MIB})", theirs + last, round + 3)), "0");
        assert_eq!(other.ask(&format!("close({theirs})")), "0");
        assert_eq!(owner.ask(&format!("read({}, {MIB})", pointer + last)), format!("[{}]", round + 3));
    }
    assert_eq!(owner.ask(&format!("free({pointer})")), "0");
    assert_eq!(other.ask(&format!("open_('{handle}')")), "error 400", "freed");
    assert_eq!(machine.used(), 0);
    owner.end();
    other.end();
}

/// A process without the library only gets an error that does not say why.
#[test]
fn who_shares_memory_logs_once_that_others_need_the_library() {
    let machine = Machine::pair();
    let path = machine.folder.path().join("log");
    let log = std::fs::File::create(&path).unwrap();
    let mut owner = machine.python_with("owner", |command| _ = command.env("VRAMCTL_LOG", "info").stderr(log));
    let said = || std::fs::read_to_string(&path).unwrap().matches("only if it has this library preloaded, too").count();
    let pointer = owner.number(&format!("malloc({})", 4 * MIB));
    assert_eq!(said(), 0);
    for _ in 0..2 {
        assert_eq!(owner.ask(&format!("get({pointer})")).len(), 128);
        assert_eq!(said(), 1);
    }
}

/// Plain CUDA needs no directory, and another user may have made this one first.
#[test]
fn memory_is_shared_without_a_directory_of_sockets() {
    let close_sockets = "[os.close(int(one)) for one in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{one}') \
                         and os.readlink(f'/proc/self/fd/{one}').startswith('socket:')] and 0";
    let machine = Machine::pair();
    let elsewhere = machine.folder.path().join("elsewhere");
    let unusable = |command: &mut Command| _ = command.env("VRAMCTL_DIR", "/nowhere/to/be/found");
    let (mut hidden, mut apart) =
        (machine.python_with("hidden", unusable), machine.python_with("apart", |command| _ = command.env("VRAMCTL_DIR", &elsewhere)));
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 1, 10)")), "0");
    for one in [&mut apart, &mut hidden, &mut other] {
        let theirs = one.number(&format!("open_('{handle}')"));
        assert_eq!(one.ask(&format!("read({theirs}, 10)")), "[1]");
        machine.refused(&owner, one);
        assert_eq!(one.ask(&format!("close({theirs})")), "0");
    }
    machine.done("pause --name owner");
    assert_eq!(hidden.ask(&format!("open_('{handle}')")), "error 401", "paused");
    machine.done("resume --name owner");

    let own = hidden.number(&format!("malloc({})", 4 * MIB));
    assert_eq!(hidden.ask(&format!("fill({own}, 2, 10)")), "0");
    let handle = hidden.ask(&format!("get({own})"));
    for _ in 0..2 {
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[2]");
        assert_eq!(other.ask(&format!("close({theirs})")), "0");
        // As a program does that becomes a daemon.
        assert_eq!(hidden.ask(close_sockets), "0");
    }
    assert_eq!(hidden.ask(&format!("free({own})")), "0");
    assert_eq!(other.ask(&format!("open_('{handle}')")), "error 400", "freed");
}

#[test]
fn only_open_memory_is_not_paused() {
    let machine = Machine::pair();
    let (mut owner, mut one, mut two) = (machine.python("owner"), machine.python("one"), machine.python("two"));
    let pointers: Vec<_> = (0..3).map(|_| owner.number(&format!("malloc({})", 4 * MIB))).collect();
    let handles: Vec<_> = pointers.iter().map(|pointer| owner.ask(&format!("get({pointer})"))).collect();
    let a = one.number(&format!("open_('{}')", handles[0]));
    let b = one.number(&format!("open_('{}')", handles[1]));
    let c = two.number(&format!("open_('{}')", handles[1]));
    assert_ne!(a, b);
    machine.refused(&owner, &one);
    assert_eq!(one.ask(&format!("close({a}), close({b})")), "(0, 0)");
    machine.refused(&owner, &two);
    assert_eq!(two.ask(&format!("close({c})")), "0");
    machine.done("pause --name owner");
    machine.done("resume --name owner");
    // Both directions at once.
    let mine = two.number(&format!("malloc({})", 4 * MIB));
    let handle = two.ask(&format!("get({mine})"));
    let there = owner.number(&format!("open_('{handle}')"));
    let back = two.number(&format!("open_('{}')", handles[2]));
    assert_eq!(two.ask(&format!("fill({mine}, 9, 10), fill({back}, 8, 10)")), "(0, 0)");
    assert_eq!(owner.ask(&format!("read({there}, 10), read({}, 10)", pointers[2])), "([9], [8])");
    machine.refused(&owner, &two);
    machine.refused(&two, &owner);
}

/// Until then, the program runs on.
#[test]
fn a_pause_with_a_timeout_waits_until_it_is_closed() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    let theirs = other.number(&format!("open_('{handle}')"));
    let mut waiting = machine.cli("pause --name owner --timeout 60").stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(waiting.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let who = format!("owner (pid {}): waiting until this is closed: default by pid {}", owner.pid(), other.pid());
    assert!(said.contains(&who), "{said}");
    assert!(!machine.is_held(&owner));
    assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
    assert_eq!(other.ask(&format!("read({theirs}, 100), close({theirs})")), "([7], 0)");
    assert!(waiting.wait().unwrap().success());
    assert_eq!(machine.used(), 0);
    machine.done("resume --name owner");
    let theirs = other.number(&format!("open_('{handle}')"));
    machine.vramctl("pause --name owner --timeout 0.5").expect(5, "", "");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
}

/// Some programs keep memory open for as long as they run.
#[test]
fn open_memory_can_be_left_out_of_a_pause() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let lent = owner.number(&format!("malloc({})", 4 * MIB));
    owner.number(&format!("malloc({})", 6 * MIB));
    let handle = owner.ask(&format!("get({lent})"));
    let theirs = other.number(&format!("open_('{handle}')"));
    for how in [&["--registered", "refuse"][..], &["--registered", "take"], &["--dry-run"], &["--dry-run", "--registered", "take"]] {
        let output = machine.vramctl(&[&["pause", "--name", "owner", "--json"], how].concat());
        assert_eq!(output.code, Some(5), "{how:?}: {output:?}");
        let text = output.out;
        assert!(text.contains("\"shared\"") && text.contains(&other.pid().to_string()), "{how:?}: {text}");
        assert_eq!(machine.used(), 10 * MIB);
    }
    let keep = ["pause", "--name", "owner", "--no-hold", "--registered", "keep"];
    assert!(machine.done(&[&keep[..], &["--dry-run"]].concat()).contains("6.00 MiB"));
    assert_eq!(machine.used(), 10 * MIB);
    machine.done(&keep);
    assert_eq!(machine.used(), 4 * MIB);
    assert_eq!(other.ask(&format!("fill({theirs}, 4, 10)")), "0");
    assert_eq!(owner.ask(&format!("read({lent}, 10)")), "[4]");
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    machine.done(&keep);
    assert_eq!(machine.used(), 0);
    machine.done("resume --name owner");
    assert_eq!(owner.ask(&format!("read({lent}, 10)")), "[4]");
}

/// Custom all-reduce: each process has memory of the other open for as long as it runs.
#[test]
fn processes_that_are_paused_together_may_have_memory_of_each_other_open() {
    let machine = Machine::pair();
    let (mut one, mut two) = (machine.python("one"), machine.python("two"));
    let bytes = PIECE + 4 * MIB;
    let (a, b) = (one.number(&format!("malloc({bytes})")), two.number(&format!("malloc({bytes})")));
    let (handle_a, handle_b) = (one.ask(&format!("get({a})")), two.ask(&format!("get({b})")));
    let (mut a_in_two, b_in_one) = (two.number(&format!("open_('{handle_a}')")), one.number(&format!("open_('{handle_b}')")));
    for round in 1..4 {
        assert_eq!(two.ask(&format!("fill({a_in_two}, {round}, {bytes})")), "0");
        assert_eq!(one.ask(&format!("fill({b_in_one}, {}, {bytes})", 10 + round)), "0");
        machine.refused(&one, &two);
        // To the program it is memory of CUDA IPC, also while it is not there.
        let queries = format!("[2, 0, True, 0, {bytes}, 0, {bytes}, 0, 0, 0, {bytes}, 1]");
        assert_eq!(two.ask(&format!("queries({a_in_two})")), queries);
        machine.both("pause", &one, &two);
        assert_eq!(two.ask(&format!("queries({a_in_two})")), queries);
        assert_eq!(machine.used(), 0, "neither holds on to the other's");
        assert_eq!(two.ask(&format!("close({a_in_two})")), "0");
        assert_eq!(two.ask(&format!("open_('{handle_a}')")), "error 401");
        machine.both("resume", &one, &two);
        assert!(!machine.is_held(&two));
        machine.goes_on(&one);
        assert_eq!(one.ask(&format!("read({a}, {bytes}), read({b_in_one}, {bytes})")), format!("([{round}], [{}])", 10 + round));
        a_in_two = two.number(&format!("open_('{handle_a}')"));
        assert_eq!(two.ask(&format!("read({b}, {bytes}), read({a_in_two}, {bytes})")), format!("([{}], [{round}])", 10 + round));
    }
    machine.refused(&one, &two);
    assert_eq!(one.ask(&format!("close({b_in_one})")), "0");
    assert_eq!(two.ask(&format!("close({a_in_two})")), "0");
    machine.done("pause --all");
    assert_eq!(machine.used(), 0);
}

/// The command line pauses all processes of a job together, including one without memory of its own.
#[test]
fn a_job_is_paused_with_what_its_processes_have_open_of_each_other() {
    let machine = Machine::pair();
    let mut ranks: Vec<_> = (0..3).map(|_| machine.python("job")).collect();
    let bytes = 4 * MIB;
    let handles: Vec<_> = ranks[..2]
        .iter_mut()
        .zip(1..)
        .map(|(rank, value)| {
            let mine = rank.number(&format!("malloc({bytes})"));
            assert_eq!(rank.ask(&format!("fill({mine}, {value}, {bytes})")), "0");
            rank.ask(&format!("get({mine})"))
        })
        .collect();
    let opened: Vec<_> = [(0, 1), (1, 0), (2, 0), (2, 1)]
        .into_iter()
        .map(|(rank, of)| (rank, of + 1, ranks[rank].number(&format!("open_('{}')", handles[of]))))
        .collect();
    for round in 0..3 {
        machine.done("pause --name job");
        assert_eq!(machine.used(), 0, "round {round}");
        assert!(ranks.iter().all(|rank| machine.is_held(rank)));
        machine.done("resume --name job");
        assert!(!ranks.iter().any(|rank| machine.is_held(rank)));
        for (rank, value, at) in &opened {
            assert_eq!(ranks[*rank].ask(&format!("read({at}, {bytes})")), format!("[{value}]"), "round {round}");
        }
    }
}

/// So do a suspend and a move.
#[test]
fn a_job_is_suspended_and_moved_with_what_its_processes_have_open_of_each_other() {
    let machine = Machine::pair();
    let start = || machine.python_with("job", |command| _ = command.env("SIMGPU_DEVICES", "2"));
    let (mut owner, mut borrower) = (start(), start());
    let bytes = 4 * MIB;
    let mine = owner.number(&format!("malloc({bytes})"));
    assert_eq!(owner.ask(&format!("fill({mine}, 7, {bytes})")), "0");
    let handle = owner.ask(&format!("get({mine})"));
    let theirs = borrower.number(&format!("open_('{handle}')"));
    for steps in [&[&["suspend", "job"][..], &["resume", "--name", "job"]][..], &[&["move", "job", "--to", "1"]]] {
        for step in steps {
            machine.done(step);
        }
        for (rank, at) in [(&mut owner, mine), (&mut borrower, theirs)] {
            assert!(!machine.is_held(rank), "{steps:?}");
            assert_eq!(rank.ask(&format!("read({at}, {bytes})")), "[7]", "{steps:?}");
        }
    }
    assert_eq!(machine.used(), 0, "all of it is on the other GPU");
}

/// Memory that is not paused stays open, and a process that uses no paused memory keeps running.
#[test]
fn a_held_job_gives_up_only_what_is_paused() {
    let machine = Machine::pair();
    let (mut owner, mut one, mut two) = (machine.python("job"), machine.python("job"), machine.python("job"));
    let mut shared = |tag: &str, value: u32| {
        // The first allocation starts the socket.
        let pointer = owner.number(&format!("malloc({})", 2 * MIB));
        machine.done(&["set-tag", tag, "--pid", &owner.pid().to_string()]);
        assert_eq!(owner.ask(&format!("free({pointer})")), "0");
        let pointer = owner.number(&format!("malloc({})", 4 * MIB));
        assert_eq!(owner.ask(&format!("fill({pointer}, {value}, 100)")), "0");
        owner.ask(&format!("get({pointer})"))
    };
    let (weights, cache) = (shared("weights", 7), shared("cache", 8));
    let (weights, cache) = (one.number(&format!("open_('{weights}')")), two.number(&format!("open_('{cache}')")));
    for round in 0..2 {
        machine.done("pause weights --name job");
        assert_eq!([&owner, &one, &two].map(|process| machine.is_held(process)), [true, true, false]);
        assert_eq!(two.ask(&format!("read({cache}, 100)")), format!("[{}]", 8 + round));
        assert_eq!(two.ask(&format!("fill({cache}, {}, 100)", 9 + round)), "0");
        machine.done("resume --name job");
        assert_eq!([&owner, &one, &two].map(|process| machine.is_held(process)), [false; 3]);
        assert_eq!(one.ask(&format!("read({weights}, 100)")), "[7]");
        assert_eq!(two.ask(&format!("read({cache}, 100)")), format!("[{}]", 9 + round));
    }
}

/// Every process that uses memory on the GPU takes part, even if only that of others.
#[test]
fn a_pause_of_a_gpu_includes_processes_with_open_memory_there() {
    let machine = Machine::pair();
    let (mut owner, mut other, mut elsewhere) = (machine.python("job"), machine.python("job"), machine.python("job"));
    let pointers = [(0, 7), (1, 8)].map(|(device, value)| {
        assert_eq!(owner.ask(&format!("cuda.cudaSetDevice({device})")), "0");
        let pointer = owner.number(&format!("malloc({})", 4 * MIB));
        assert_eq!(owner.ask(&format!("fill({pointer}, {value}, 100)")), "0");
        pointer
    });
    let handles = pointers.map(|pointer| owner.ask(&format!("get({pointer})")));
    let theirs = other.number(&format!("open_('{}')", handles[0]));
    let there = elsewhere.number(&format!("open_('{}')", handles[1]));
    let held = |processes: [&Program; 3]| processes.map(|process| machine.is_held(process));
    machine.done("pause --gpu 0 --name job");
    assert_eq!((machine.used(), held([&owner, &other, &elsewhere])), (0, [true, true, false]));
    assert_eq!(elsewhere.ask(&format!("read({there}, 100)")), "[8]");
    machine.done("resume --gpu 0 --name job");
    assert_eq!(held([&owner, &other, &elsewhere]), [false; 3]);
    machine.done("pause --name job");
    machine.done("resume --gpu 1 --name job");
    assert_eq!(held([&owner, &other, &elsewhere]), [true, true, false], "its memory is back, though that of the others is not");
    machine.done("resume --gpu 0 --name job");
    assert_eq!(held([&owner, &other, &elsewhere]), [false; 3]);
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
    assert_eq!(elsewhere.ask(&format!("read({there}, 100)")), "[8]");
}

/// A process paused without hold may use memory that others have open of it, and its open memory of others.
#[test]
fn a_job_that_is_not_held_keeps_what_its_processes_have_open() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("job"), machine.python("job"));
    let lent = owner.number(&format!("malloc({})", 4 * MIB));
    assert_eq!(owner.ask(&format!("fill({lent}, 7, 100)")), "0");
    let handle = owner.ask(&format!("get({lent})"));
    other.number(&format!("malloc({})", 2 * MIB));
    machine.done("set-tag weights --all");
    owner.number(&format!("malloc({})", 4 * MIB));
    other.number(&format!("malloc({})", 4 * MIB));
    let theirs = other.number(&format!("open_('{handle}')"));
    machine.done("pause weights --no-hold --name job");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]", "nobody has paused it");
    assert_eq!(other.ask(&format!("fill({theirs}, 8, 100)")), "0");
    assert_eq!(owner.ask(&format!("read({lent}, 100)")), "[8]");
    for dry_run in [&[][..], &["--dry-run"]] {
        machine.vramctl(&[&["pause", "--no-hold", "--name", "job"], dry_run].concat()).expect(5, "", "");
    }
    // Nor does any other client get it.
    let (owners, others) = ([owner.pid()], [other.pid()]);
    for part in ["partners", "borrowers"] {
        let answer = machine.answer(&owner, &json!({"request": "pause", part: others}));
        assert_eq!(answer["code"], "shared", "{answer}");
    }
    let answer = machine.answer(&other, &json!({"request": "pause", "partners": owners}));
    assert_eq!(answer["reply"], "done", "{answer}");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[8]", "only its own is paused");
    machine.done("resume --name job");
    machine.done("pause --name job");
    machine.done("resume --name job");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[8]");
}

/// The owner has passed its memory, and is paused before the other process has it at an address.
#[test]
fn memory_being_opened_during_a_pause_is_paused() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
    other.number(&format!("malloc({})", 4 * MIB));
    let slow = |milliseconds| {
        format!("ctypes.CDLL('libcuda.so.1').simgpu_slow_down(b'cuMemImportFromShareableHandle', ctypes.c_uint64({milliseconds}))")
    };
    assert_eq!(other.ask(&slow(LONG_MS)), "0");
    other.ask(&format!("globals().update(end=start(lambda: open_('{handle}')))"));
    let calls = "ctypes.CDLL('libcuda.so.1').simgpu_calls(b'cuMemImportFromShareableHandle')";
    eventually("it has it", || other.ask(calls) != "0");
    machine.both("pause", &owner, &other);
    assert_eq!(other.ask(&slow(0)), "0");
    assert_eq!(other.ask("end()"), "error 401");
    assert_eq!(machine.used(), 0, "the owner's memory from before the pause");
    machine.both("resume", &owner, &other);
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(owner.ask(&format!("fill({pointer}, 8, 100)")), "0");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[8]");
}

/// A process that is paused first does not reopen memory that its partner is about to give up.
#[test]
fn a_process_that_is_paused_before_its_partner_waits_for_it() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(machine.request(&other, "pause", &[&owner])["reply"], "done");
    thread::sleep(Duration::from_millis(300));
    assert_eq!(machine.request(&owner, "pause", &[&other])["reply"], "done");
    assert!(machine.is_held(&other));
    assert_eq!(machine.used(), 0);
    assert_eq!(machine.request(&owner, "resume", &[])["reply"], "done");
    machine.goes_on(&other);
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
}

/// Nothing is paused there any more, so nobody would resume it.
#[test]
fn a_process_that_closes_its_paused_open_memory_continues() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    let theirs = other.number(&format!("open_('{handle}')"));
    machine.both("pause", &owner, &other);
    assert!(machine.is_held(&other));
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    assert!(!machine.is_held(&other) && machine.is_held(&owner));
}

/// A resume that leaves the program held says whose memory is missing, and what to do.
#[test]
fn a_resume_says_whose_memory_is_missing() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
    let theirs = other.number(&format!("open_('{handle}')"));
    other.number(&format!("malloc({})", 2 * MIB));
    machine.both("pause", &owner, &other);
    assert!(machine.done("status other").contains(&format!("Opened from process {}: 4.00 MiB, 4.00 MiB of it paused.", owner.pid())));
    for arguments in [&["resume", "--name", "other"][..], &["resume", "--pid", &other.pid().to_string()]] {
        let text = machine.vramctl(arguments).expect(5, "", "").err;
        let said =
            format!("other (pid {}) stays held: 4.00 MiB that it has opened from process {1} is still paused", other.pid(), owner.pid());
        assert!(text.contains(&said) && text.contains(&format!("vramctl resume --pid {}", owner.pid())), "{text}");
    }
    let output = machine.vramctl("resume --name other --json").expect(5, "", "");
    let missing = &output.json()["processes"][0]["report"]["missing"];
    assert_eq!((&missing[0]["owner"], &missing[0]["paused_bytes"]), (&owner.pid().into(), &(4 * MIB).into()), "{missing}");
    assert!(machine.is_held(&other));
    // So does that of a move, and of one that has come to nothing.
    let stays_held = format!("other (pid {}) stays held: 4.00 MiB that it has opened from process {}", other.pid(), owner.pid());
    for (fault, to, code, said) in [("", "1", 5, "moved other"), ("cuCheckpointProcessRestore:1:801", "0", 1, "The job is where it was")] {
        let text = Ran::of(machine.cli(&["move", "other", "--to", to]).env("SIMGPU_FAIL", fault)).expect(code, "", "").text();
        assert!(text.contains(said) && text.contains(&stays_held), "{text}");
    }
    let output = machine.vramctl("move other --to 0 --json").expect(5, "", "");
    assert_eq!(&output.json()["processes"][0]["report"]["missing"], missing);
    machine.done("resume --name owner");
    machine.goes_on(&other);
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
    machine.done("resume --name other");
}

/// If an owner is stopped, or ends, the resume does not wait long for it, and the program continues as soon as it can.
#[test]
fn a_resume_does_not_wait_for_an_owner_that_is_stopped() {
    let machine = Machine::pair();
    let (mut owner, mut ends, mut other) = (machine.python("owner"), machine.python("ends"), machine.python("other"));
    let mut open = |process: &mut Program| {
        let pointer = process.number(&format!("malloc({})", 4 * MIB));
        assert_eq!(process.ask(&format!("fill({pointer}, 7, 100)")), "0");
        let handle = process.ask(&format!("get({pointer})"));
        other.number(&format!("open_('{handle}')"))
    };
    let (theirs, lost) = (open(&mut owner), open(&mut ends));
    other.number(&format!("malloc({})", 2 * MIB));
    for (process, partners) in [(&owner, vec![&other, &ends]), (&ends, vec![&other, &owner]), (&other, vec![&owner, &ends])] {
        assert_eq!(machine.request(process, "pause", &partners)["reply"], "done");
    }
    owner.stop();
    let answer = machine.request(&other, "resume", &[]);
    let mut missing: Vec<_> = answer["missing"].as_array().unwrap().iter().map(|one| one["owner"].as_u64().unwrap() as u32).collect();
    missing.sort_unstable();
    let mut owners = [owner.pid(), ends.pid()];
    owners.sort_unstable();
    assert_eq!(missing, owners, "{answer}");
    assert!(machine.is_held(&other));
    ends.kill();
    assert!(machine.is_held(&other));
    owner.go_on();
    assert_eq!(machine.request(&owner, "resume", &[])["reply"], "done");
    machine.goes_on(&other);
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
    assert_ne!(other.ask(&format!("read({lost}, 100)")), "[7]");
}

/// A question that is on its way when the owner is resumed has been answered already.
#[test]
fn a_resume_asks_again_for_what_was_refused_before_it() {
    let machine = Machine::pair();
    let (mut owner, held) = (machine.python("owner"), Arc::new((Mutex::new(None), Condvar::new())));
    let pointer = owner.number(&format!("malloc({})", 4 * MIB));
    assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
    let handle = owner.ask(&format!("get({pointer})"));
    // Once there is `Some(false)`, the next refusal stays on its way until there is `None`, and makes it `Some(true)`.
    let between = {
        let held = Arc::clone(&held);
        proxy(&machine, [&owner], move |_, request, line, is_answer| {
            let (state, changed) = &*held;
            let mut now = state.lock().unwrap();
            if *now == Some(false) && is_answer && request == "open" && String::from_utf8_lossy(line).contains("\"error\"") {
                *now = Some(true);
                changed.notify_all();
                drop(changed.wait_while(now, |now| now.is_some()).unwrap());
            }
            true
        })
    };
    let mut other = machine.python_with("other", |command| _ = command.env("VRAMCTL_DIR", between.path()));
    let theirs = other.number(&format!("open_('{handle}')"));
    let connect = || {
        let stream = UnixStream::connect(between.path().join(format!("{}.sock", other.pid()))).unwrap();
        stream.set_read_timeout(Some(NEVER)).unwrap();
        Wire(BufReader::new(stream))
    };
    // The owner knows the proxy, which is in this process, for the borrower.
    let pause = json!({ "request": "pause", "partners": [process::id()], "hold_ms": 60_000 });
    assert_eq!(machine.answer(&owner, &pause)["reply"], "done");
    let paused = connect().ask(&json!({ "request": "pause", "partners": [owner.pid()], "hold_ms": 60_000 }));
    assert_eq!(paused["reply"], "done", "{paused}");
    let (state, changed) = &*held;
    *state.lock().unwrap() = Some(false);
    let refused = changed.wait_timeout_while(state.lock().unwrap(), NEVER, |now| *now != Some(true)).unwrap();
    assert!(!refused.1.timed_out(), "it asks until it has its memory");
    drop(refused);
    assert_eq!(machine.request(&owner, "resume", &[])["reply"], "done");
    let mut resumes = connect();
    resumes.send(&json!({ "request": "resume" }), None);
    // By then, the resume waits. If it comes later, the memory is back.
    thread::sleep(Duration::from_millis(200));
    *state.lock().unwrap() = None;
    changed.notify_all();
    let answer = resumes.answer();
    assert!(answer["reply"] == "done" && answer.get("missing").is_none(), "{answer}");
    assert_eq!(other.ask(&format!("read({theirs}, 100)")), "[7]");
}

/// The process that is resumed first waits for the other, but not for a process that is gone.
#[test]
fn a_process_stays_held_until_its_open_memory_is_back() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let pointers: Vec<_> = (0..2).map(|_| owner.number(&format!("malloc({})", 4 * MIB))).collect();
    let opened: Vec<_> = pointers
        .iter()
        .map(|pointer| {
            assert_eq!(owner.ask(&format!("fill({pointer}, 7, 100)")), "0");
            let handle = owner.ask(&format!("get({pointer})"));
            other.number(&format!("open_('{handle}')"))
        })
        .collect();
    machine.both("pause", &owner, &other);
    assert_eq!(machine.used(), 0);
    assert_eq!(machine.request(&other, "resume", &[])["reply"], "done");
    assert!(machine.is_held(&other), "its calls would use memory that is not there");
    assert_eq!(machine.request(&owner, "resume", &[])["reply"], "done");
    assert!(!machine.is_held(&owner));
    machine.goes_on(&other);
    assert_eq!(other.ask(&format!("read({}, 100), read({}, 100)", opened[0], opened[1])), "([7], [7])");

    // Freed meanwhile, and then the owner ends.
    machine.both("pause", &owner, &other);
    assert_eq!(owner.ask(&format!("free({})", pointers[0])), "0");
    assert_eq!(machine.request(&owner, "resume", &[])["reply"], "done");
    assert_eq!(machine.request(&other, "resume", &[])["reply"], "done");
    assert!(!machine.is_held(&other));
    assert_eq!(other.ask(&format!("read({}, 100)", opened[1])), "[7]");
    assert_ne!(other.ask(&format!("read({}, 100)", opened[0])), "[7]");
    machine.both("pause", &owner, &other);
    owner.kill();
    machine.goes_on(&other);
    assert_eq!(other.ask(&format!("close({}), close({})", opened[0], opened[1])), "(0, 0)");
    assert_eq!(machine.used(), 0);
}

#[test]
fn a_process_that_is_killed_has_nothing_open_any_more() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    other.number(&format!("open_('{handle}')"));
    machine.refused(&owner, &other);
    other.kill();
    machine.done("pause --name owner");
    machine.done("resume --name owner");

    // One that ends with its memory open, too.
    let mut other = machine.python("other");
    other.number(&format!("open_('{handle}')"));
    machine.refused(&owner, &other);
    other.end();
    machine.done("pause --name owner");
}

#[test]
fn memory_outlives_its_owner_and_handles_do_not() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 5, {})", 4 * MIB)), "0");
    let theirs = other.number(&format!("open_('{handle}')"));
    owner.kill();
    assert_eq!(other.ask(&format!("read({theirs}, {})", 4 * MIB)), "[5]");
    assert_eq!(machine.used(), 4 * MIB);
    assert_eq!(other.number(&format!("open_('{handle}')")), theirs, "open already");
    assert_eq!(other.ask(&format!("close({theirs}), close({theirs})")), "(0, 0)");
    assert_eq!(machine.used(), 0);
    assert_eq!(other.ask(&format!("open_('{handle}')")), "error 400");
    other.end();
}

#[test]
fn wrong_handles_get_the_drivers_error_codes() {
    let machine = Machine::pair();
    let (mut owner, mut other, _, handle) = machine.sharing();
    assert_eq!(handle.len(), 128);
    assert_eq!(owner.ask(&format!("open_('{handle}')")), "error 201", "not in the process itself");
    for flags in [0, 2] {
        assert_eq!(other.ask(&format!("open_('{handle}', {flags})")), "error 1");
    }
    // Of the library, and unknown: the owner's pid, and the token.
    for (at, code) in [(16, 400), (17, 400), (32, 400), (79, 400), (0, 1), (14, 1)] {
        let mut wrong = handle.clone().into_bytes();
        wrong[at] = if wrong[at] == b'0' { b'1' } else { b'0' };
        let wrong = String::from_utf8(wrong).unwrap();
        assert_eq!(other.ask(&format!("open_('{wrong}')")), format!("error {code}"), "{at}");
        if at == 32 {
            assert_eq!(owner.ask(&format!("open_('{wrong}')")), "error 400", "of an earlier process with the same pid");
        }
    }
    assert_eq!(other.ask("open_('00' * 64), open_('ff' * 64)"), "('error 1', 'error 1')");
    for wrong in ["0", "0x1234"] {
        assert_eq!(owner.ask(&format!("get({wrong})")), "error 1");
    }
    machine.done("pause --name owner");
}

/// Plain memory is shared by the driver, and a process without the library opens only that.
#[test]
fn unmanaged_memory_and_processes_use_the_drivers_handles() {
    let machine = Machine::pair();
    let mut owner = machine.python_with("owner", |command| _ = command.env("VRAMCTL_MIN_BYTES", "1M"));
    let mut other = machine.python("other");
    let mut bare = Program::ready(&mut machine.command("python3", &["-c", PROGRAM]));
    let (plain, managed) = (owner.number("malloc(4096)"), owner.number(&format!("malloc({})", 4 * MIB)));
    assert_eq!(owner.ask(&format!("fill({plain}, 6, 4096)")), "0");
    let handle = owner.ask(&format!("get({plain})"));
    for process in [&mut other, &mut bare] {
        let theirs = process.number(&format!("open_('{handle}')"));
        assert_eq!(process.ask(&format!("read({theirs}, 4096)")), "[6]");
        assert_eq!(process.ask(&format!("close({theirs}), close({theirs})")), "(0, 1)");
    }
    let handle = owner.ask(&format!("get({managed})"));
    assert_eq!(bare.ask(&format!("open_('{handle}')")), "error 1");
    let of_bare = bare.number("malloc(4096)");
    let handle = bare.ask(&format!("get({of_bare})"));
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
}

/// A forked child has no CUDA. It neither closes what its parent has open nor keeps it open.
#[test]
fn forked_children_do_not_affect_open_memory() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("fork(lambda: close({theirs}))")), "3");
    assert_eq!(other.ask(&format!("fork(lambda: int(open_('{handle}')[6:]))")), "3");
    assert_eq!(owner.ask(&format!("fork(lambda: int(get({pointer})[6:]))")), "3");
    machine.refused(&owner, &other);
    assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]");
    // A child that lives on.
    assert_eq!(other.ask("(child := os.fork()) or signal.pause()").parse::<u32>().map(drop), Ok(()));
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    machine.done("pause --name owner");
    assert_eq!(other.ask("os.kill(child, 9)"), "None");
}

#[test]
fn a_reset_closes_what_was_opened() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    let theirs = other.number(&format!("open_('{handle}')"));
    machine.refused(&owner, &other);
    assert_eq!(other.ask("cuda.cudaDeviceReset()"), "0");
    machine.done("pause --name owner");
    machine.done("resume --name owner");
    assert_eq!(other.ask(&format!("close({theirs})")), "1");
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]");
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
}

/// The driver fails each call on the way, at every attempt of one opening. The program gets an error that plain CUDA gives, too.
#[test]
fn a_failed_opening_leaves_nothing_open() {
    let machine = Machine::pair();
    let fail = |call: &'static str| move |command: &mut Command| _ = command.env("SIMGPU_FAIL", format!("{call}:1:999:2"));
    let mut owner = machine.python_with("owner", fail("cuMemExportToShareableHandle"));
    let pointer = owner.number(&format!("malloc({})", PIECE + 4 * MIB));
    let handle = owner.ask(&format!("get({pointer})"));
    for call in [
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemSetAccess",
    ] {
        let mut other = machine.python_with("other", fail(call));
        assert_eq!(other.ask(&format!("open_('{handle}')")), "error 205", "{call}");
        machine.done("pause --name owner");
        assert_eq!(machine.used(), 0, "{call}");
        machine.done("resume --name owner");
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]");
        assert_eq!(other.ask(&format!("close({theirs})")), "0");
    }
    machine.done("pause --name owner");
}

/// What a driver refuses once, it may grant a moment later.
#[test]
fn an_opening_that_is_refused_once_is_tried_again() {
    let machine = Machine::pair();
    let fail = |call: &'static str| move |command: &mut Command| _ = command.env("SIMGPU_FAIL", format!("{call}:1:600:1"));
    let mut owner = machine.python_with("owner", fail("cuMemExportToShareableHandle"));
    let pointer = owner.number(&format!("malloc({})", 4 * MIB));
    let handle = owner.ask(&format!("get({pointer})"));
    for call in ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"] {
        let mut other = machine.python_with("other", fail(call));
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]", "{call}");
    }
}

#[test]
fn without_descriptors_nothing_is_opened_and_nothing_stays_open() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    // Several pieces, of which the first arrives.
    let pointer = owner.number(&format!("malloc({})", 2 * PIECE + 4 * MIB));
    let small = owner.number(&format!("malloc({})", 2 * MIB));
    let (handle, small) = (owner.ask(&format!("get({pointer})")), owner.ask(&format!("get({small})")));
    // With other memory open, the connection stays.
    let kept = other.number(&format!("open_('{small}')"));
    assert_eq!(other.ask(&format!("with_descriptors(1, lambda: open_('{handle}'))")), "error 205");
    machine.refused(&owner, &other);
    assert!(machine.done("pause --name owner --registered keep").contains("paused"));
    assert_eq!(machine.used(), 2 * MIB);
    machine.done("resume --name owner");
    assert_eq!(other.ask(&format!("close({kept})")), "0");
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]");
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
}

/// It is not asked again until it is resumed, which may take long.
#[test]
fn memory_of_a_suspended_owner_cannot_be_opened() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    machine.done("suspend owner");
    assert_eq!(other.ask(&format!("open_('{handle}')")), "error 205");
    machine.done("resume --name owner");
    let theirs = other.number(&format!("open_('{handle}')"));
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    owner.end();
}

/// An owner accepts only so many connections.
#[test]
fn the_last_close_ends_the_connection() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let handles = [(); 2].map(|()| {
        let pointer = owner.number(&format!("malloc({})", 2 * MIB));
        owner.ask(&format!("get({pointer})"))
    });
    let sockets = "sum(1 for one in os.scandir('/proc/self/fd') if os.path.islink(one) and os.readlink(one).startswith('socket:'))";
    let first = other.number(&format!("open_('{}')", handles[0]));
    let with_connection = other.number(sockets);
    let second = other.number(&format!("open_('{}')", handles[1]));
    assert_eq!(other.number(sockets), with_connection, "one for both");
    assert_eq!(other.ask(&format!("close({second})")), "0");
    assert_eq!(other.number(sockets), with_connection, "still in use");
    let second = other.number(&format!("open_('{}')", handles[1]));
    assert_eq!(other.number(sockets), with_connection, "the same one");
    assert_eq!(other.ask(&format!("close({second})")), "0");
    assert_eq!(other.ask(&format!("close({first})")), "0");
    assert_eq!(other.number(sockets), with_connection - 1);
}

/// A stopped owner confirms no close, but reads all of them when it continues.
#[test]
fn an_owner_that_was_stopped_learns_of_every_close() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let opened = [(); 3].map(|()| {
        let pointer = owner.number(&format!("malloc({})", 2 * MIB));
        let handle = owner.ask(&format!("get({pointer})"));
        other.number(&format!("open_('{handle}')"))
    });
    owner.stop();
    assert_eq!(other.ask(&format!("close({}), close({})", opened[0], opened[1])), "(0, 0)");
    owner.go_on();
    // The third is still open over the same connection.
    eventually("both are closed", || {
        machine.done("pause --name owner --registered keep");
        machine.used() == 2 * MIB
    });
    let kept = machine.done("pause --name owner --registered keep");
    assert!(kept.contains("nothing was paused: default of owner") && kept.contains("others have it open"), "{kept}");
    machine.done("resume --name owner");
    assert_eq!(other.ask(&format!("read({}, 10)", opened[2])), "[0]");
}

/// As a program's timer does.
#[test]
fn a_signal_does_not_end_an_opening() {
    let machine = Machine::pair();
    let (owner, mut other, _, handle) = machine.sharing();
    other.ask("signal.signal(signal.SIGUSR1, lambda *_: None)");
    owner.stop();
    let id = other.ask(&format!("(waiting := start(lambda: open_('{handle}'))) and threading.enumerate()[-1].native_id"));
    let call = format!("/proc/{}/task/{id}/syscall", other.pid());
    // Not every system shows it.
    let is_receiving = || std::fs::read_to_string(&call).map_or(true, |call| call.starts_with(&format!("{} ", libc::SYS_recvfrom)));
    eventually("it waits for the answer", is_receiving);
    assert_eq!(other.ask("signal.pthread_kill(threading.enumerate()[-1].ident, signal.SIGUSR1)"), "None");
    owner.go_on();
    let theirs = other.number("waiting()");
    assert_eq!(other.ask(&format!("read({theirs}, 10)")), "[0]");
}

/// As one that is paused for long does not.
#[test]
fn a_silent_owner_does_not_delay_memory_of_other_owners() {
    let machine = Machine::pair();
    let (mut stopped, mut running, mut other) = (machine.python("stopped"), machine.python("running"), machine.python("other"));
    let handles = |owner: &mut Program| {
        let pointer = owner.number(&format!("malloc({})", 2 * MIB));
        owner.ask(&format!("get({pointer})"))
    };
    let (first, second, of_running) = (handles(&mut stopped), handles(&mut stopped), handles(&mut running));
    let known = other.number(&format!("open_('{first}')"));
    let theirs = other.number(&format!("open_('{of_running}')"));
    stopped.stop();
    other.ask(&format!("(opening := start(lambda: open_('{second}')))"));
    thread::sleep(Duration::from_millis(200));
    let started = Instant::now();
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    let theirs = other.number(&format!("open_('{of_running}')"));
    assert_eq!(other.number(&format!("open_('{first}')")), known, "open already");
    assert_eq!(other.ask(&format!("close({known})")), "0");
    assert!(started.elapsed() < Duration::from_secs(30));
    stopped.go_on();
    let opened = other.number("opening()");
    assert_eq!(other.ask(&format!("close({opened}), close({known}), close({theirs})")), "(0, 0, 0)");
    machine.done("pause --name stopped");
}

#[test]
fn an_owner_with_too_many_connections_is_asked_again() {
    let machine = Machine::pair();
    let (mut owner, mut other) = (machine.python("owner"), machine.python("other"));
    let pointer = owner.number(&format!("malloc({})", 2 * MIB));
    let handle = owner.ask(&format!("get({pointer})"));
    let socket = machine.socket(owner.pid());
    let others: Vec<_> = (0..16).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let mut refused = String::new();
    BufReader::new(UnixStream::connect(&socket).unwrap()).read_line(&mut refused).unwrap();
    assert!(refused.contains("\"busy\""), "{refused}");
    other.ask(&format!("(opening := start(lambda: open_('{handle}')))"));
    thread::sleep(Duration::from_millis(300));
    drop(others);
    let theirs = other.number("opening()");
    assert_eq!(other.ask(&format!("close({theirs})")), "0");
    machine.done("pause --name owner");
}

/// The last of several concurrent closes waits for the device.
#[test]
fn concurrent_closes_are_safe() {
    let machine = Machine::pair();
    let mut owner = machine.python("owner");
    let mut other = machine.python_with("other", |command| _ = command.env("SIMGPU_OP_DELAY_MS", "20"));
    let pointer = owner.number(&format!("malloc({})", 2 * MIB));
    let handle = owner.ask(&format!("get({pointer})"));
    for _ in 0..10 {
        let theirs = other.number(&format!("open_('{handle}')"));
        assert_eq!(other.number(&format!("open_('{handle}')")), theirs);
        let set = format!("cuda.cudaMemset(ctypes.c_void_p({theirs}), 3, ctypes.c_size_t({MIB}))");
        let close = format!("start(lambda: close({theirs}))");
        assert_eq!(other.ask(&format!("({set}, *[end() for end in [{close}, {close}]])")), "(0, 0, 0)");
        assert_eq!(other.ask("cuda.cudaDeviceSynchronize()"), "0");
        assert_eq!(owner.ask(&format!("read({pointer}, {MIB})")), "[3]");
        assert_eq!(other.ask(&format!("close({theirs})")), "1");
    }
    machine.done("pause --name owner");
}

/// The close waits for the device's work. What another thread opens meanwhile is open.
#[test]
fn what_is_opened_while_the_last_close_waits_stays_open() {
    let machine = Machine::pair();
    let (mut owner, mut other, pointer, handle) = machine.sharing();
    assert_eq!(owner.ask(&format!("fill({pointer}, 5, {MIB})")), "0");
    for _ in 0..3 {
        let theirs = other.number(&format!("open_('{handle}')"));
        let delay = |ms| format!("ctypes.CDLL('libcuda.so.1').simgpu_set_op_delay_ms(ctypes.c_uint64({ms}))");
        other.ask(&delay(LONG_MS));
        assert_eq!(other.ask(&format!("cuda.cudaMemsetAsync(ctypes.c_void_p({theirs}), 5, ctypes.c_size_t({MIB}), None)")), "0");
        other.ask(&format!("(closing := start(lambda: close({theirs})))"));
        // By then, the close waits. If it begins later, it finds two opens.
        thread::sleep(Duration::from_millis(100));
        assert_eq!(other.number(&format!("open_('{handle}')")), theirs);
        other.ask(&delay(0));
        assert_eq!(other.ask("closing()"), "0");
        assert_eq!(other.ask(&format!("read({theirs}, {MIB})")), "[5]");
        machine.refused(&owner, &other);
        assert_eq!(other.ask(&format!("close({theirs})")), "0");
        assert_eq!(other.ask(&format!("close({theirs})")), "1");
    }
    machine.done("pause --name owner");
}

/// Handles are asked for and opened while the owner is paused and resumed, and by threads of several processes.
#[test]
fn opening_and_pausing_concurrently_is_safe() {
    let machine = Machine::pair();
    let mut owner = machine.python("owner");
    let handles: Vec<_> = (0..8)
        .map(|_| {
            let pointer = owner.number(&format!("malloc({})", 2 * MIB));
            assert_eq!(owner.ask(&format!("fill({pointer}, 7, {})", 2 * MIB)), "0");
            owner.ask(&format!("get({pointer})"))
        })
        .collect();
    thread::scope(|scope| {
        let opening: Vec<_> = (0..3)
            .map(|index| {
                let (machine, handles) = (&machine, &handles);
                scope.spawn(move || {
                    let mut other = machine.python(&format!("other{index}"));
                    let (begun, mut opened) = (Instant::now(), 0);
                    // On a busy machine, the owner may be paused during all of the first rounds.
                    let goes_on = |round: usize, opened| round < 60 || opened == 0 && begun.elapsed() < Duration::from_secs(60);
                    let mut round = 0;
                    while goes_on(round, opened) {
                        let handle = &handles[(round * 3 + index) % handles.len()];
                        round += 1;
                        let answer = other.ask(&format!("open_('{handle}')"));
                        let Ok(pointer) = answer.parse::<u64>() else {
                            assert_eq!(answer, "error 401");
                            continue;
                        };
                        assert_eq!(other.ask(&format!("read({pointer}, {})", 2 * MIB)), "[7]");
                        assert_eq!(other.ask(&format!("close({pointer})")), "0");
                        opened += 1;
                    }
                    opened
                })
            })
            .collect();
        while opening.iter().any(|thread| !thread.is_finished()) {
            let output = machine.vramctl("pause --name owner");
            assert!(matches!(output.code, Some(0 | 5)), "{output:?}");
            machine.done("resume --name owner");
        }
        for thread in opening {
            assert!(thread.join().unwrap() > 0);
        }
    });
    machine.done("pause --name owner");
    assert_eq!(machine.used(), 0);
}

/// The actions of two processes on their own and each other's memory. Numbers choose among existing objects.
#[derive(Debug, Clone, Copy)]
enum Step {
    Allocate { by: usize },
    Free { which: usize },
    Open { which: usize },
    Close { which: usize },
    Write { by: usize, which: usize, value: u8 },
    PauseBoth,
    PauseAlone { who: usize },
    PauseShared { who: usize },
    Resume { who: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let (who, which) = (|| 0..2usize, any::<usize>);
    prop_oneof![
        4 => who().prop_map(|by| Step::Allocate { by }),
        1 => which().prop_map(|which| Step::Free { which }),
        5 => which().prop_map(|which| Step::Open { which }),
        2 => which().prop_map(|which| Step::Close { which }),
        5 => (who(), which(), any::<u8>()).prop_map(|(by, which, value)| Step::Write { by, which, value }),
        3 => Just(Step::PauseBoth),
        1 => who().prop_map(|who| Step::PauseAlone { who }),
        3 => who().prop_map(|who| Step::PauseShared { who }),
        4 => who().prop_map(|who| Step::Resume { who }),
    ]
}

/// An allocation of one process, and what the other has of it.
#[derive(Debug)]
struct Piece {
    owner: usize,
    handle: String,
    /// In each process, if it has it there.
    at: [Option<u64>; 2],
    /// How often the other has it open.
    opened: usize,
    value: u8,
    paused: bool,
    /// The other has it open and has given it up.
    aside: bool,
}

impl Piece {
    fn other(&self) -> usize {
        1 - self.owner
    }

    /// Where a process that runs can use it.
    fn usable(&self, by: usize) -> Option<u64> {
        // Memory that is freed while the other has it open has no owner any more.
        self.at[self.owner]?;
        self.at[by].filter(|_| if by == self.owner { !self.paused } else { !self.aside })
    }
}

struct Two {
    machine: Machine,
    programs: [Program; 2],
    pieces: Vec<Piece>,
}

impl Two {
    const BYTES: u64 = 2 * MIB;

    fn new() -> Self {
        let machine = Machine::pair();
        let mut programs = ["one", "two"].map(|name| machine.python(name));
        // The first allocation starts the socket.
        for program in &mut programs {
            assert_eq!(program.ask(&format!("free(malloc({}))", Self::BYTES)), "0");
        }
        Self { machine, programs, pieces: Vec::new() }
    }

    fn has_paused(&self, who: usize) -> bool {
        self.pieces.iter().any(|piece| piece.owner == who && piece.paused)
    }

    /// A program is held exactly while memory that it owns or has open is paused.
    fn is_held(&self, who: usize) -> bool {
        self.has_paused(who) || self.pieces.iter().any(|piece| piece.other() == who && piece.aside)
    }

    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        let count = self.pieces.len();
        let chosen = |which: usize| if count > 0 { which % count } else { 0 };
        match step {
            Step::Allocate { by } if count < 8 => {
                let address = self.programs[by].number(&format!("malloc({})", Self::BYTES));
                let mut at = [None; 2];
                at[by] = Some(address);
                let handle = self.programs[by].ask(&format!("get({address})"));
                self.pieces.push(Piece { owner: by, handle, at, opened: 0, value: 0, paused: false, aside: false });
            }
            Step::Free { which } if count > 0 => {
                let piece = &mut self.pieces[chosen(which)];
                if let Some(address) = piece.at[piece.owner].take() {
                    prop_assert_eq!(self.programs[piece.owner].ask(&format!("free({address})")), "0");
                    (piece.paused, piece.aside) = (false, false);
                }
            }
            Step::Open { which } if count > 0 => {
                let piece = &mut self.pieces[chosen(which)];
                let answer = self.programs[piece.other()].ask(&format!("open_('{}')", piece.handle));
                match (piece.at[piece.other()], piece.at[piece.owner]) {
                    (Some(address), _) => prop_assert_eq!(answer, address.to_string()),
                    (None, None) => {
                        prop_assert_eq!(answer, "error 400");
                        return Ok(());
                    }
                    (None, Some(_)) if piece.paused => {
                        prop_assert_eq!(answer, "error 401");
                        return Ok(());
                    }
                    (None, Some(_)) => {
                        let address = answer.parse().map_err(|_| TestCaseError::fail(answer))?;
                        piece.at[1 - piece.owner] = Some(address);
                    }
                }
                piece.opened += 1;
            }
            Step::Close { which } if count > 0 => {
                let piece = &mut self.pieces[chosen(which)];
                let other = piece.other();
                if let Some(address) = piece.at[other] {
                    prop_assert_eq!(self.programs[other].ask(&format!("close({address})")), "0");
                    piece.opened -= 1;
                    if piece.opened == 0 {
                        (piece.at[other], piece.aside) = (None, false);
                    }
                }
            }
            Step::Write { by, which, value } if count > 0 && !self.is_held(by) => {
                let piece = &mut self.pieces[chosen(which)];
                if let Some(address) = piece.usable(by) {
                    prop_assert_eq!(self.programs[by].ask(&format!("fill({address}, {value}, {})", Self::BYTES)), "0");
                    piece.value = value;
                }
            }
            Step::PauseBoth => {
                self.machine.both("pause", &self.programs[0], &self.programs[1]);
                for piece in self.pieces.iter_mut().filter(|piece| piece.at[piece.owner].is_some()) {
                    piece.paused = true;
                    piece.aside = piece.opened > 0;
                }
            }
            Step::PauseAlone { who } => {
                let answer = self.machine.request(&self.programs[who], "pause", &[]);
                let its = |piece: &&mut Piece| piece.owner == who && piece.at[who].is_some();
                let is_lent = self.pieces.iter_mut().filter(its).any(|piece| !piece.paused && piece.opened > 0 && !piece.aside);
                prop_assert_eq!(answer["code"] == "shared", is_lent, "{}", answer);
                if !is_lent {
                    self.pieces.iter_mut().filter(its).for_each(|piece| piece.paused = true);
                }
            }
            Step::PauseShared { who } => {
                let output = self.machine.vramctl(&["pause", "--pid", &self.programs[who].pid().to_string(), "--shared"]);
                prop_assert!(output.code == Some(0), "{:?}", output);
                for piece in self.pieces.iter_mut().filter(|piece| piece.owner == who && !piece.paused && piece.at[who].is_some()) {
                    piece.paused = true;
                    piece.aside = piece.opened > 0;
                }
            }
            Step::Resume { who } => {
                let answer = self.machine.request(&self.programs[who], "resume", &[]);
                prop_assert_eq!(&answer["reply"], "done");
                self.pieces.iter_mut().filter(|piece| piece.owner == who).for_each(|piece| piece.paused = false);
                let missing = self.pieces.iter().filter(|piece| piece.other() == who && piece.aside && piece.paused).count() as u64;
                let told = answer["missing"][0]["paused_bytes"].as_u64().unwrap_or(0);
                prop_assert_eq!(told, missing * Self::BYTES, "{}", answer);
            }
            _ => (),
        }
        // Open memory comes back by itself when its owner is resumed, unless the process stays held anyway.
        for who in 0..2 {
            if !self.has_paused(who) {
                self.pieces.iter_mut().filter(|piece| piece.other() == who && !piece.paused).for_each(|piece| piece.aside = false);
            }
        }
        self.pieces.retain(|piece| piece.at.iter().any(Option::is_some));
        Ok(())
    }

    /// Each process is held or not, as it should be, and finds the contents that either wrote last.
    fn check(&mut self) -> Result<(), TestCaseError> {
        for who in 0..2 {
            let expect = |what: &str, is_so: &dyn Fn() -> bool| {
                common::patiently(|| if is_so() { Ok(()) } else { Err(()) })
                    .map_err(|()| TestCaseError::fail(format!("not in time: {what}")))
            };
            expect(&format!("held: {}", self.is_held(who)), &|| self.machine.is_held(&self.programs[who]) == self.is_held(who))?;
            // While it waits for one piece, it has another back.
            let aside = self.pieces.iter().filter(|piece| piece.other() == who && piece.aside).count() as u64 * Self::BYTES;
            let set_aside = |two: &Self| {
                let status = two.machine.request(&two.programs[who], "status", &[]);
                let borrowed = status["borrowed"].as_array().cloned().unwrap_or_default();
                borrowed.iter().map(|borrowed| borrowed["paused_bytes"].as_u64().unwrap()).sum::<u64>()
            };
            expect(&format!("{aside} set aside"), &|| self.has_paused(who) || set_aside(self) == aside)?;
            if self.is_held(who) {
                continue;
            }
            for piece in &self.pieces {
                if let Some(address) = piece.usable(who) {
                    let found = self.programs[who].ask(&format!("read({address}, {})", Self::BYTES));
                    prop_assert_eq!(found, format!("[{}]", piece.value), "in process {}: {:?}", who, piece);
                }
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(6), max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sequences_of_two_processes_behave_like_the_model(steps in prop::collection::vec(step(), 1..40)) {
        let mut two = Two::new();
        for step in steps {
            println!("{step:?}");
            two.apply(step)?;
            two.check()?;
        }
        for who in [0, 1, 0] {
            two.apply(Step::Resume { who })?;
        }
        two.check()?;
        while !two.pieces.is_empty() {
            two.apply(Step::Close { which: 0 })?;
            if two.pieces.first().is_some_and(|piece| piece.opened == 0) {
                two.apply(Step::Free { which: 0 })?;
            }
        }
        prop_assert_eq!(two.machine.used(), 0);
    }
}
