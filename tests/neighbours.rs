//! Allocations of a region whose contents are dropped share physical memory after a resume, which makes the next pause and
//! resume cheap. What may go wrong: contents of a neighbour lost, memory that is never given back, or too late.
#![allow(missing_docs)]

mod common;

use common::{DEVICE_BYTES, Gpu, MIB, free, malloc, malloc_tagged, pattern, pause, read, request, resume, write};
use vramctl::memory::{Backup, Memory, Request, TagStatus, region};

const EACH: usize = 4 * MIB;

/// So many of them under a tag, next to each other.
fn allocate(tag: &str, backup: Backup, count: usize) -> Vec<u64> {
    (0..count).map(|_| malloc_tagged(tag, Some(backup), EACH).unwrap()).collect()
}

/// Pauses and resumes all, and says how many pieces of physical memory the resume took.
fn pieces_after_a_cycle(gpu: &Gpu) -> u64 {
    pause(&[]).unwrap();
    gpu.reset_counts();
    resume(&[]).unwrap();
    gpu.calls("cuMemCreate")
}

fn status(tag: &str) -> TagStatus {
    Memory::get().status().tags.into_iter().find(|status| status.tag == tag).unwrap()
}

fn end(gpu: &Gpu, addresses: impl IntoIterator<Item = u64>, before: &common::Footprint) {
    for address in addresses {
        assert_eq!(free(address), 0);
    }
    assert_eq!(&gpu.footprint(), before, "something is left");
}

#[test]
fn they_get_one_piece_and_read_as_zero() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let addresses = allocate("cache", Backup::Discard, 5);
    for address in &addresses {
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    for address in &addresses {
        assert!(read(*address, EACH).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
    // What lies between them belongs to each alone.
    for address in &addresses {
        assert!(read(*address, EACH).unwrap() == pattern(*address, EACH));
    }
    gpu.reset_counts();
    pause(&[]).unwrap();
    assert_eq!((gpu.calls("cuMemUnmap"), gpu.calls("cuMemRelease")), (1, 1));
    assert_eq!(gpu.used(0), before.used()[0], "all of it is given back");
    resume(&[]).unwrap();
    end(&gpu, addresses, &before);
}

/// Who said nothing of a region, or has contents to keep, may free one by one and has the memory back each time.
#[test]
fn those_that_are_kept_or_in_no_region_do_not_share() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let mut addresses = allocate("weights", Backup::Host, 3);
    addresses.extend(allocate("cold", Backup::Disk, 2));
    Memory::get().set_process_tag(Some("all")).unwrap();
    addresses.extend((0..3).map(|_| malloc(EACH).unwrap()));
    Memory::get().set_process_tag(None).unwrap();
    let discard = Request { backup: Some(Backup::Discard), ..request(&[]) };
    for wanted in [request(&[]), discard] {
        Memory::get().pause(&wanted, &mut ()).unwrap();
        gpu.reset_counts();
        resume(&[]).unwrap();
        assert_eq!(gpu.calls("cuMemCreate"), addresses.len() as u64);
    }
    let used = gpu.used(0);
    assert_eq!(free(addresses.pop().unwrap()), 0);
    assert_eq!(gpu.used(0), used - EACH as u64);
    end(&gpu, addresses, &before);
}

/// Two tags are paused apart, so they have no memory together, wherever they lie.
#[test]
fn tags_and_devices_are_kept_apart() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let mut addresses = Vec::new();
    for _ in 0..3 {
        addresses.extend(allocate("cache", Backup::Discard, 1));
        addresses.extend(allocate("graph", Backup::Discard, 1));
        common::set_device(1);
        addresses.extend(allocate("cache", Backup::Discard, 1));
        common::set_device(0);
    }
    assert_eq!(pieces_after_a_cycle(&gpu), 3);
    let used = (gpu.used(0), gpu.used(1));
    pause(&["graph"]).unwrap();
    assert_eq!((gpu.used(0), gpu.used(1)), (used.0 - 3 * EACH as u64, used.1));
    for allocation in addresses.iter().map(|address| Memory::get().find(*address).unwrap()).filter(|found| &*found.tag == "cache") {
        common::set_device(allocation.device);
        assert_eq!(write(allocation.address(), &pattern(1, EACH)), 0, "it is active");
    }
    common::set_device(0);
    resume(&["graph"]).unwrap();
    end(&gpu, addresses, &before);
}

#[test]
fn one_that_is_freed_leaves_its_neighbours_alone_and_goes_at_the_next_pause() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let mut addresses = allocate("cache", Backup::Discard, 4);
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    for address in &addresses {
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
    let used = gpu.used(0);
    let freed = addresses.remove(1);
    assert_eq!(free(freed), 0);
    assert_ne!(free(freed), 0, "it is freed once");
    assert!(Memory::get().find(freed).is_none());
    assert_eq!((gpu.used(0), status("cache").freed_bytes), (used, EACH as u64), "the neighbours have it, and the status says so");
    for address in &addresses {
        assert!(read(*address, EACH).unwrap() == pattern(*address, EACH));
    }

    // One in its stead gets memory and addresses of its own.
    let another = malloc_tagged("cache", Some(Backup::Discard), EACH).unwrap();
    assert!(!addresses.contains(&another) && another != freed);
    addresses.push(another);
    assert_eq!(gpu.used(0), used + EACH as u64);

    pause(&["cache"]).unwrap();
    assert_eq!((gpu.used(0), status("cache").freed_bytes), (before.used()[0], 0));
    gpu.reset_counts();
    resume(&["cache"]).unwrap();
    // Its program frees one by one.
    assert_eq!(gpu.calls("cuMemCreate"), addresses.len() as u64);
    let used = gpu.used(0);
    assert_eq!(free(addresses.pop().unwrap()), 0);
    assert_eq!(gpu.used(0), used - EACH as u64);
    end(&gpu, addresses, &before);
}

#[test]
fn all_that_are_freed_give_the_memory_back_and_the_next_ones_share_again() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    for _ in 0..2 {
        let addresses = allocate("cache", Backup::Discard, 3);
        assert_eq!(pieces_after_a_cycle(&gpu), 1);
        end(&gpu, addresses, &before);
    }
    // While paused, each goes at once, and those that are left share.
    let mut addresses = allocate("cache", Backup::Discard, 4);
    pause(&[]).unwrap();
    assert_eq!(free(addresses.pop().unwrap()), 0);
    gpu.reset_counts();
    resume(&[]).unwrap();
    assert_eq!(gpu.calls("cuMemCreate"), 1);
    assert_eq!(status("cache").freed_bytes, 0);
    end(&gpu, addresses, &before);
}

/// A program that frees one and allocates as much again must not find the device full that was not full before.
#[test]
fn a_full_device_has_room_for_what_was_freed() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let mut addresses = allocate("cache", Backup::Discard, 4);
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    let contents = pattern(7, EACH);
    assert_eq!(write(addresses[3], &contents), 0);
    gpu.occupy(0, DEVICE_BYTES - gpu.used(0) as usize);
    for _ in 0..2 {
        assert_eq!(malloc_tagged("cache", Some(Backup::Discard), EACH), Err(2), "the device is full");
        assert_eq!(free(addresses.remove(1)), 0);
        assert_eq!(malloc_tagged("other", Some(Backup::Discard), EACH), Err(2), "another tag is paused apart");
        assert_eq!(malloc_tagged("cache", Some(Backup::Host), EACH), Err(2), "what is kept has memory of its own");
        let again = malloc_tagged("cache", Some(Backup::Discard), EACH).unwrap();
        assert_eq!(write(again, &pattern(8, EACH)), 0);
        addresses.insert(1, again);
        assert!(read(addresses[3], EACH).unwrap() == contents);
        assert_eq!(status("cache").freed_bytes, 0);
    }
    gpu.occupy(0, 0);
    pause(&["cache"]).unwrap();
    assert_eq!(gpu.used(0), before.used()[0]);
    resume(&["cache"]).unwrap();
    end(&gpu, addresses, &before);
}

/// A pause may be told to keep what is otherwise dropped: of each that shares memory, and all of it.
#[test]
fn what_is_kept_for_once_is_kept_of_each() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let addresses = allocate("cache", Backup::Discard, 3);
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    for address in &addresses {
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
    for backup in [Backup::Host, Backup::Disk] {
        Memory::get().pause(&Request { backup: Some(backup), ..request(&[]) }, &mut ()).unwrap();
        assert_eq!(gpu.used(0), before.used()[0]);
        resume(&[]).unwrap();
        for address in &addresses {
            assert!(read(*address, EACH).unwrap() == pattern(*address, EACH));
        }
    }
    assert_eq!(pieces_after_a_cycle(&gpu), 1, "with nothing kept, they share again");
    end(&gpu, addresses, &before);
}

/// Threads free what shares memory at the same time: whoever is last gives it back.
#[test]
fn many_threads_free_what_shares_memory() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    for _ in 0..30 {
        let addresses = allocate("cache", Backup::Discard, 8);
        assert_eq!(pieces_after_a_cycle(&gpu), 1);
        std::thread::scope(|scope| {
            for address in &addresses {
                scope.spawn(|| assert_eq!(free(*address), 0));
            }
            scope.spawn(|| drop(Memory::get().status()));
        });
        assert_eq!(gpu.footprint(), before);
    }
    region::end().unwrap_err();
}
