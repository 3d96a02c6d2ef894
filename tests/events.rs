//! The events that a process records, and how clients read them.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::{Machine, Program};
use common::{Gpu, MIB, free, malloc, malloc_tagged, pause, resume};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::process::Command;
use std::sync::Once;
use vramctl_core::events::{self, Change, Owner, Presence};
use vramctl_intercept::entries;
use vramctl_model::{Happening, MemoryOwner, OwnersBytes, Stage, TraceEvent, Verb};
use vramctl_observe::trace;

/// The simulated GPU in this process, which records.
fn gpu() -> Gpu {
    static ON: Once = Once::new();
    // SAFETY: the tests wait for the first one here, and nothing has read the environment.
    ON.call_once(|| unsafe { env::set_var("VRAMCTL_TRACE", "64K") });
    Gpu::take()
}

/// The events recorded during `work`, and the owners.
fn recorded(work: impl FnOnce()) -> (Vec<Happening>, BTreeMap<u16, MemoryOwner>) {
    let before = trace::since(u64::MAX, None).next;
    work();
    let after = trace::since(before, None);
    let numbers: Vec<_> = after.events.iter().map(|event| event.number).collect();
    assert_eq!((numbers, after.more), ((before..after.next).collect(), false));
    assert!(
        after.events.windows(2).all(|two| two[0].at_ns <= two[1].at_ns) && after.events.iter().all(|event| event.at_ns <= after.now_ns)
    );
    let owners = after.owners.into_iter().map(|owner| (owner.owner, owner)).collect();
    (after.events.into_iter().map(|TraceEvent { what, .. }| what).collect(), owners)
}

/// The changes among them: kind, bytes, and the total afterwards.
fn changes(all: &[Happening]) -> Vec<(Change, u64, u64)> {
    let change = |what: &Happening| {
        let (change, OwnersBytes { bytes, in_use, .. }) = match what {
            Happening::Allocated(of) => (Change::Allocated, of),
            Happening::Freed(of) => (Change::Freed, of),
            Happening::FreedPaused(of) => (Change::FreedPaused, of),
            Happening::Paused(of) => (Change::Paused, of),
            Happening::Resumed(of) => (Change::Resumed, of),
            _ => return None,
        };
        Some((change, *bytes, *in_use))
    };
    all.iter().filter_map(change).collect()
}

#[test]
fn events_follow_memory_from_allocation_to_free() {
    let _gpu = gpu();
    let mut addresses = Vec::new();
    let (all, owners) = recorded(|| addresses = (1..=2).map(|pages| malloc_tagged("followed", None, pages * 2 * MIB).unwrap()).collect());
    let (one, two) = (2 << 20, 4 << 20);
    assert_eq!(changes(&all), [(Change::Allocated, one, one), (Change::Allocated, two, one + two)]);
    let owner = owners.values().find(|owner| owner.tag.as_deref() == Some("followed")).unwrap();
    assert_eq!((owner.in_use, owner.device), (one + two, Some(0)));
    assert!(owner.gpu.as_deref().unwrap().starts_with("GPU-"), "{owner:?}");

    let (all, _) = recorded(|| _ = pause(&["followed"]).unwrap());
    // By address.
    let taken: BTreeMap<_, _> =
        changes(&all).into_iter().map(|(change, bytes, in_use)| ((change == Change::Paused, bytes), in_use)).collect();
    assert!(taken.keys().eq(&[(true, one), (true, two)]) && taken.values().any(|in_use| *in_use == 0), "{all:?}");
    assert!(matches!(all[0], Happening::Began { verb: Verb::Pause, .. }), "{all:?}");
    let Some(Happening::Ended { verb: Verb::Pause, thread, ns, bytes, error: None }) = all.last().copied() else { panic!("{all:?}") };
    assert_eq!(bytes, one + two);
    for wanted in [Stage::Wait, Stage::Save, Stage::Unmap, Stage::Release] {
        let is_it = |what: &&Happening| matches!(what, Happening::Stage { stage, thread: by, ns: took } if *stage == wanted && *by == thread && *took <= ns);
        assert!(all.iter().any(|what| is_it(&what)), "{wanted:?}: {all:?}");
    }

    let (all, _) = recorded(|| assert_eq!(free(addresses[0]), 0));
    assert_eq!(changes(&all), [(Change::FreedPaused, one, 0)]);
    let (all, _) = recorded(|| _ = resume(&["followed"]).unwrap());
    assert_eq!(changes(&all), [(Change::Resumed, two, two)]);
    assert!(matches!(all.last(), Some(Happening::Ended { verb: Verb::Resume, bytes, .. }) if *bytes == two), "{all:?}");
    let (all, _) = recorded(|| assert_eq!(free(addresses[1]), 0));
    assert_eq!(changes(&all), [(Change::Freed, two, 0)]);
}

#[test]
fn memory_left_to_cuda_is_attributed_to_the_calling_library() {
    let _gpu = gpu();
    let this = env::current_exe().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let mut address = 0;
    let (all, owners) = recorded(|| {
        assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, 4 * MIB) }, 0);
        assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 0);
        // Not counted.
        assert_eq!(unsafe { entries::cuMemAlloc_v2(&raw mut address, 4096) }, 0);
        assert_eq!(unsafe { entries::cuMemFree_v2(address) }, 0);
    });
    assert_eq!(changes(&all), [(Change::Allocated, 4 << 20, 4 << 20), (Change::Freed, 4 << 20, 0)]);
    assert!(owners.values().any(|owner| owner.library.as_deref() == Some(&*this) && owner.tag.is_none()), "{owners:?}");
}

#[test]
fn a_failed_request_is_recorded_with_its_size() {
    let gpu = gpu();
    let failures = |all: &[Happening], owners: &BTreeMap<u16, MemoryOwner>| -> Vec<_> {
        let failure = |what: &Happening| match what {
            Happening::Failed { owner, bytes, code } => Some((owners[owner].tag.clone(), *bytes, *code)),
            _ => None,
        };
        all.iter().filter_map(failure).collect()
    };
    let (all, owners) = recorded(|| assert_eq!(malloc_tagged("greedy", None, 1 << 40), Err(2)));
    assert_eq!(failures(&all, &owners), [(Some("greedy".into()), 1 << 40, 2)]);
    let (all, owners) = recorded(|| assert_eq!(malloc(1 << 40), Err(2)));
    assert_eq!(failures(&all, &owners), [(None, 1 << 40, 2)]);
    assert_eq!(changes(&all), []);

    // A failed pause releases nothing.
    let address = malloc_tagged("failing", None, 2 * MIB).unwrap();
    gpu.fail("cuMemcpyDtoHAsync_v2", 1, 999, 1);
    let (all, _) = recorded(|| assert!(pause(&["failing"]).is_err()));
    assert_eq!(changes(&all), []);
    assert!(matches!(all.last(), Some(Happening::Ended { verb: Verb::Pause, error: Some(_), .. })), "{all:?}");
    free(address);
}

#[test]
fn a_forked_child_starts_empty() {
    let _gpu = gpu();
    free(malloc_tagged("parent", None, 2 * MIB).unwrap());
    let before = trace::since(0, None);
    assert!(before.next > 0);
    // SAFETY: the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let empty = trace::since(0, None);
        events::change(Change::Allocated, Owner::Library("child"), None, 1, &Presence::default());
        let after = trace::since(0, None);
        let fine = empty.on && empty.events.is_empty() && empty.owners.is_empty() && (after.events.len(), after.next) == (1, 1);
        // SAFETY: ends the child without running the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut ended = -1;
    // SAFETY: `child` is ours and `ended` is writable.
    unsafe { libc::waitpid(child, &raw mut ended, 0) };
    assert_eq!(ended, 0);
    assert_eq!(trace::since(0, None).next, before.next);
}

fn traced(command: &mut Command) {
    command.env("VRAMCTL_TRACE", "1");
}

fn bytes_by_tag(owners: &Value) -> BTreeMap<String, u64> {
    let owners = owners.as_array().unwrap().iter();
    owners.filter_map(|owner| Some((owner["tag"].as_str()?.to_owned(), owner["in_use"].as_u64()?))).collect()
}

#[test]
fn a_client_reads_page_by_page_from_any_number() {
    let machine = Machine::new();
    let rank: Program = machine.engine_with("engine", traced);
    let mut wire = machine.connect(&rank);
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    let whole = wire.ask(&json!({"request": "events"}));
    assert_eq!((&whole["reply"], &whole["on"], &whole["more"]), (&json!("events"), &json!(true), &json!(false)), "{whole}");
    let events = whole["events"].as_array().unwrap();
    assert!(events.len() > 20 && whole["next"] == events.len(), "{whole}");

    let (mut pages, mut since) = (Vec::new(), 0);
    loop {
        let page = wire.ask(&json!({"request": "events", "since": since, "most": 7}));
        pages.extend(page["events"].as_array().unwrap().iter().cloned());
        since = page["next"].as_u64().unwrap();
        if page["more"] == false {
            break;
        }
        assert_eq!(since, pages.len() as u64);
    }
    assert_eq!(pages, *events);

    // Each owner's final total matches the status.
    let status = wire.ask(&json!({"request": "status"}));
    let tags =
        status["tags"].as_array().unwrap().iter().map(|tag| (tag["tag"].as_str().unwrap().to_owned(), tag["bytes"].as_u64().unwrap()));
    assert_eq!(bytes_by_tag(&whole["owners"]), tags.collect());

    for since in [json!(whole["next"]), json!(u64::MAX), json!(1_000_000)] {
        let none = wire.ask(&json!({"request": "events", "since": since}));
        assert_eq!((&none["events"], &none["next"], &none["more"]), (&json!([]), &whole["next"], &json!(false)), "{since}");
    }
    for garbage in [json!({"since": -1}), json!({"since": "first"}), json!({"since": 1.5}), json!({"most": -1}), json!({"since": null})] {
        let mut request = garbage.clone();
        request["request"] = json!("events");
        assert_eq!(wire.ask(&request)["code"], "invalid", "{garbage}");
    }
    let one = wire.ask(&json!({"request": "events", "since": 2, "most": 0}));
    assert_eq!((one["events"].as_array().unwrap().len(), &one["next"], &one["more"]), (1, &json!(3), &json!(true)));
    let all = wire.ask(&json!({"request": "events", "most": u64::MAX}));
    assert_eq!(all["events"], whole["events"]);
}

#[test]
fn a_suspended_process_answers_and_one_that_records_nothing_says_so() {
    let machine = Machine::new();
    let rank = machine.engine_with("traced", traced);
    machine.vramctl("suspend --name traced").expect(0, "", "");
    let told = machine.connect(&rank).ask(&json!({"request": "events"}));
    assert!(told["on"] == true && bytes_by_tag(&told["owners"]).values().all(|bytes| *bytes == 0), "{told}");
    machine.vramctl("resume --name traced").expect(0, "", "");

    let rank = machine.engine_with("plain", |command| _ = command.env_remove("VRAMCTL_TRACE"));
    let told = machine.connect(&rank).ask(&json!({"request": "events"}));
    assert_eq!((&told["on"], &told["events"], &told["owners"]), (&json!(false), &json!([]), &json!([])), "{told}");
}
