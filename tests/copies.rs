//! Copies of one device's memory while another device is current, or in its streams: with managed memory, every copy does what it does
//! with memory of CUDA's own. The sample program `copies` makes them all.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

mod common;

use common::machine::{Machine, Ran};
use common::{Gpu, MIB, Stream, built, free, library, malloc, malloc_tagged, pattern, pause, read, resume, set_device, write};
use std::collections::BTreeMap;
use std::path::Path;
use vramctl_backup::HOST_PIECE;
use vramctl_core::memory::Memory;
use vramctl_intercept::{hooks, launch, tms};

/// What each copy has answered and changed.
fn table(arguments: &[&str], managed: bool, has_path: bool) -> BTreeMap<String, String> {
    let (machine, library) = (Machine::with(2, "256M"), library());
    let preloaded: &[&Path] = if managed { &[&library] } else { &[] };
    let mut command = machine.preloaded(preloaded, built("copies", "copies.c", &[]), arguments);
    command.env("VRAMCTL_TAG", "default");
    if !has_path {
        command.env("SIMGPU_NO_P2P", "1");
    }
    let text = Ran::of(&mut command).expect(0, "", "").out;
    let table: BTreeMap<_, _> = text.lines().filter_map(|line| line.split_once(": ")).map(|(a, b)| (a.to_owned(), b.to_owned())).collect();
    assert!(table.len() > 600, "{}", table.len());
    table
}

#[track_caller]
fn compare(arguments: &[&str], has_path: bool, may_differ: fn(&str) -> bool) {
    let (plain, managed) = (table(arguments, false, has_path), table(arguments, true, has_path));
    assert!(plain.keys().eq(managed.keys()));
    let differ = plain.iter().filter(|(copy, result)| managed[*copy] != **result && !may_differ(copy));
    let differ: Vec<_> = differ.map(|(copy, result)| format!("{copy}: {result}, managed: {}", managed[copy])).collect();
    assert!(differ.is_empty(), "{arguments:?}: {} differ:\n{}", differ.len(), differ.join("\n"));
}

/// Once memory is open to the other device, what is no copy can use it, too. CUDA refuses that without peer access.
fn is_no_copy(copy: &str) -> bool {
    copy.contains("set")
}

#[test]
fn managed_memory_is_copied_from_every_device_as_plain_memory_is() {
    compare(&["plain"], true, is_no_copy);
}

#[test]
fn and_with_peer_access() {
    compare(&["plain", "peers"], true, |_| false);
}

/// Without a path between the devices, what can name no contexts stays refused: captured copies between devices, and graph nodes in a
/// context of the other device.
#[test]
fn and_without_a_path_between_the_devices() {
    compare(&["plain"], false, |copy| {
        let is_between = ["in", "out", "IN", "OUT", "OUT_ANY"]
            .iter()
            .any(|way| copy.split(' ').next().is_some_and(|name| name.ends_with(&format!("_{way}"))));
        (is_between && copy.ends_with("captured")) || copy.starts_with("node_")
    });
}

/// Memory that CUDA does not copy from everywhere stays as it is: the program's own virtual memory, and that of pools.
#[test]
fn other_memory_is_as_closed_as_without_the_library() {
    compare(&["virtual"], true, |_| false);
    compare(&["pool"], true, |_| false);
}

/// A graph that was captured with a copy between devices works after pauses of both memories: what was opened for it stays open.
#[test]
fn a_captured_copy_between_devices_survives_pauses() {
    let _gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("there", None, 2 * MIB).unwrap();
    set_device(0);
    let here = malloc_tagged("here", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    stream.begin_capture(1);
    assert_eq!(unsafe { launch::cuMemcpyDtoDAsync_v2(here as usize, there as usize, 2 * MIB, stream.0 as usize) }, 0);
    let graph = stream.end_capture().unwrap();
    for seed in 1..4 {
        let contents = pattern(seed, 2 * MIB);
        set_device(1);
        assert_eq!(write(there, &contents), 0);
        set_device(0);
        common::cycle(&[]);
        assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
        assert!(read(here, 2 * MIB).unwrap() == contents);
    }
}

/// What a captured copy needs stays open when the program disables peer access, which plain copies do not need either.
#[test]
fn copies_are_made_after_peer_access_was_disabled() {
    let _gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("there", None, 2 * MIB).unwrap();
    set_device(0);
    let here = malloc_tagged("here", None, 2 * MIB).unwrap();
    let stream = Stream::create();
    let capture = || {
        stream.begin_capture(1);
        let answer = unsafe { launch::cuMemcpyDtoDAsync_v2(here as usize, there as usize, 2 * MIB, stream.0 as usize) };
        (answer, stream.end_capture().unwrap())
    };
    let (answer, before) = capture();
    assert_eq!(answer, 0);
    unsafe {
        assert_eq!(hooks::cudaDeviceEnablePeerAccess(1, 0), 0);
        assert_eq!(hooks::cudaDeviceDisablePeerAccess(1), 0);
    }
    let (answer, after) = capture();
    assert_eq!(answer, 0, "a new copy");
    for graph in [before, after] {
        assert_eq!((stream.launch(&graph), stream.synchronize()), (0, 0));
    }
}

/// The driver knows a backup in pieces and refuses a copy across them. A program that reads a backup knows nothing of pieces.
#[test]
fn a_backup_is_copied_from_whatever_its_size() {
    const BYTES: usize = HOST_PIECE + 2 * MIB;
    /// Of several rows. The piece ends inside the last one.
    const ROW: usize = BYTES / 4;
    type Copy<'a> = (&'a str, &'a dyn Fn() -> u32);
    let _gpu = Gpu::take();
    let kept = malloc_tagged("kept", None, BYTES).unwrap();
    let contents = pattern(1, BYTES);
    assert_eq!(write(kept, &contents), 0);
    pause(&["kept"]).unwrap();
    let backup = tms::tms_get_cpu_backup_pointer(kept as *const u8, BYTES as u64) as usize;
    let (managed, plain) = (malloc_tagged("other", None, BYTES).unwrap(), malloc(BYTES).unwrap());
    assert!(Memory::get().registry.find(plain).is_none());
    let stream = Stream::create();
    let handle = stream.0 as usize;
    // `CUDA_MEMCPY2D` in words. Of each side: x, y, 1 for the host's memory or 2 for a device's, and address of either, an array, the pitch.
    let plane = |to: u64| [0, 0, 1, backup, 0, 0, ROW, 0, 0, 2, 0, to as usize, 0, ROW, ROW, BYTES / ROW];
    for (to, count) in [(managed, 7), (plain, 2)] {
        let (there, from, bytes, attributes) = ([to], [backup], [BYTES], [1_u64, 0, 0]);
        let [there, from, bytes] = [there.as_ptr() as usize, from.as_ptr() as usize, bytes.as_ptr() as usize];
        let (attributes, first) = (attributes.as_ptr() as usize, [0_usize]);
        let copies: [Copy; 7] = [
            ("cuMemcpyHtoD", &|| unsafe { launch::cuMemcpyHtoD_v2(to as usize, backup, BYTES) }),
            ("cuMemcpyHtoDAsync", &|| unsafe { launch::cuMemcpyHtoDAsync_v2(to as usize, backup, BYTES, handle) }),
            ("cuMemcpy", &|| unsafe { launch::cuMemcpy(to as usize, backup, BYTES) }),
            ("cuMemcpyAsync", &|| unsafe { launch::cuMemcpyAsync(to as usize, backup, BYTES, handle) }),
            ("cuMemcpy2D", &|| unsafe { launch::cuMemcpy2D_v2(plane(to).as_ptr() as usize) }),
            ("cuMemcpy2DAsync", &|| unsafe { launch::cuMemcpy2DAsync_v2(plane(to).as_ptr() as usize, handle) }),
            ("cuMemcpyBatchAsync", &|| unsafe {
                launch::cuMemcpyBatchAsync_v2(there, from, bytes, 1, attributes, first.as_ptr() as usize, 1, handle)
            }),
        ];
        for (name, copy) in &copies[..count] {
            assert_eq!(unsafe { launch::cuMemsetD8_v2(to as usize, 0, BYTES) }, 0);
            assert_eq!(read(to, 1).unwrap(), [0], "the memset is over, for the stream that does not wait for it, too");
            assert_eq!((copy(), stream.synchronize()), (0, 0), "{name}");
            assert!(read(to, BYTES).unwrap() == contents, "{name}");
        }
    }
    resume(&["kept"]).unwrap();
    for address in [kept, managed, plain] {
        assert_eq!(free(address), 0);
    }
}

/// The driver refuses these before it reads anything, so nothing may be there to be read.
#[test]
fn a_call_without_its_structure_is_refused() {
    let _gpu = Gpu::take();
    set_device(1);
    let there = malloc_tagged("there", None, 2 * MIB).unwrap();
    set_device(0);
    let stream = Stream::create();
    let handle = stream.0 as usize;
    let (address, bytes, attributes) = ([there], [MIB], [0_u64; 3]);
    let (address, bytes, attributes) = (address.as_ptr() as usize, bytes.as_ptr() as usize, attributes.as_ptr() as usize);
    unsafe {
        assert_eq!(launch::cuMemcpy2D_v2(0), 1);
        assert_eq!(launch::cuMemcpy2DAsync_v2(0, handle), 1);
        assert_eq!(launch::cuMemcpy3D_v2(0), 1);
        assert_eq!(launch::cuMemcpy3DPeerAsync(0, handle), 1);
        assert_eq!(launch::cuMemcpyBatchAsync_v2(address, 0, bytes, 1, attributes, 0, 1, handle), 1);
        assert_eq!(
            launch::cuMemcpyBatchAsync_v2(address, address, bytes, 1, attributes, 0, 1 << 40, handle),
            1,
            "one attribute a copy at most"
        );
    }
}
