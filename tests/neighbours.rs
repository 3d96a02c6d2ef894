//! Allocations of a region whose contents are dropped share physical memory after a resume, which makes the next pause and
//! resume cheap. What may go wrong: contents of a neighbour lost, memory that is never given back, or too late.
#![allow(missing_docs)]

mod common;

use common::{DEVICE_BYTES, Gpu, MIB, OwnContext, Stream, free, malloc, malloc_tagged, pattern, pause, read, request, resume, write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vramctl_core::memory::{Memory, region};
use vramctl_driver::{self as driver, Reservation};
use vramctl_model::{Backup, TagState, TagStatus, TransitionRequest};

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

/// So many that share one piece.
fn sharing(count: usize) -> (Gpu, common::Footprint, Vec<u64>) {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let addresses = allocate("cache", Backup::Discard, count);
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    (gpu, before, addresses)
}

/// Contents that differ from one to the next.
fn fill(addresses: &[u64]) {
    for address in addresses {
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
}

fn assert_filled(addresses: &[u64]) {
    for address in addresses {
        assert!(read(*address, EACH).unwrap() == pattern(*address, EACH), "contents at {address:#x} are not what they were");
    }
}

/// What is freed has memory of its own, which the driver has back.
fn assert_goes_at_once(gpu: &Gpu, address: u64) {
    let used = gpu.used(0);
    assert_eq!(free(address), 0);
    assert_eq!(gpu.used(0), used - EACH as u64);
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
    fill(&addresses);
    assert_eq!(pieces_after_a_cycle(&gpu), 1);
    for address in &addresses {
        assert!(read(*address, EACH).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(write(*address, &pattern(*address, EACH)), 0);
    }
    // What lies between them belongs to each alone.
    assert_filled(&addresses);
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
    let discard = TransitionRequest { backup: Some(Backup::Discard), ..request(&[]) };
    for wanted in [request(&[]), discard] {
        Memory::get().pause(&wanted, &mut ()).unwrap();
        gpu.reset_counts();
        resume(&[]).unwrap();
        assert_eq!(gpu.calls("cuMemCreate"), addresses.len() as u64);
    }
    assert_goes_at_once(&gpu, addresses.pop().unwrap());
    end(&gpu, addresses, &before);
}

/// What `torch_memory_saver`'s functions manage on a thread's ground is dropped, but may be anything.
#[test]
fn those_of_a_ground_do_not_share() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            region::set_managed(true).unwrap();
            let addresses: Vec<_> = (0..3).map(|_| malloc(EACH).unwrap()).collect();
            assert_eq!(status(vramctl_model::DEFAULT_TAG).backup, [(Backup::Discard, 3 * EACH as u64)].into());
            assert_eq!(pieces_after_a_cycle(&gpu), 3);
            end(&gpu, addresses, &before);
        });
    });
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
    let (gpu, before, mut addresses) = sharing(4);
    fill(&addresses);
    let used = gpu.used(0);
    let freed = addresses.remove(1);
    assert_eq!(free(freed), 0);
    assert_ne!(free(freed), 0, "it is freed once");
    assert!(Memory::get().find(freed).is_none());
    assert_eq!((gpu.used(0), status("cache").freed_bytes), (used, EACH as u64), "the neighbours have it, and the status says so");
    assert_filled(&addresses);

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
    assert_goes_at_once(&gpu, addresses.pop().unwrap());
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

/// Right after a release, a large piece takes the driver twice as long as several.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "the simulated devices are smaller than a piece")]
fn a_piece_is_not_larger_than_is_good() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let each = driver::PHYSICAL_PIECE / 2 - (2 << 20);
    let addresses: Vec<_> = (0..5).map(|_| malloc_tagged("cache", Some(Backup::Discard), each).unwrap()).collect();
    assert_eq!(pieces_after_a_cycle(&gpu), 3, "two each, and one");
    // One allocation may have several pieces, and shares none.
    let large = malloc_tagged("cache", Some(Backup::Discard), driver::PHYSICAL_PIECE + each).unwrap();
    assert_eq!(pieces_after_a_cycle(&gpu), 3 + 2);
    end(&gpu, addresses.into_iter().chain([large]), &before);
}

/// A program that frees one and allocates as much again must not find the device full that was not full before.
#[test]
fn a_full_device_has_room_for_what_was_freed() {
    let (gpu, before, mut addresses) = sharing(4);
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

/// What a context has is gone with it, and so would be the memory of neighbours of another.
#[test]
fn contexts_share_nothing() {
    let (gpu, before, mut addresses) = sharing(3);
    std::thread::scope(|scope| {
        let other = || {
            let _context = OwnContext::create(0);
            let own = allocate("cache", Backup::Discard, 2);
            assert_eq!(pieces_after_a_cycle(&gpu), 2, "one for each context");
            fill(&addresses);
            fill(&own);
            // A place that is free is the other context's.
            assert_eq!(free(addresses.remove(1)), 0);
            gpu.occupy(0, DEVICE_BYTES - gpu.used(0) as usize);
            assert_eq!(malloc_tagged("cache", Some(Backup::Discard), EACH), Err(2));
            gpu.occupy(0, 0);
            assert_filled(&own);
        };
        scope.spawn(other).join().unwrap();
    });
    // The context is gone, and what it had. The neighbours of the first are whole.
    assert_filled(&addresses);
    pause(&[]).unwrap();
    assert_eq!(status("cache").allocations, addresses.len() as u64);
    resume(&[]).unwrap();
    fill(&addresses);
    end(&gpu, addresses, &before);
}

/// A pause may be told to keep what is otherwise dropped: of each that shares memory, and all of it.
#[test]
fn what_is_kept_for_once_is_kept_of_each() {
    let (gpu, before, addresses) = sharing(3);
    fill(&addresses);
    for backup in [Backup::Host, Backup::Disk] {
        Memory::get().pause(&TransitionRequest { backup: Some(backup), ..request(&[]) }, &mut ()).unwrap();
        assert_eq!(gpu.used(0), before.used()[0]);
        gpu.reset_counts();
        resume(&[]).unwrap();
        assert_eq!(gpu.calls("cuMemCreate"), 3, "what has contents has memory of its own");
        assert_filled(&addresses);
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

/// A status looks at the memory that a pause is about to give back. It must not hold on to it: who waits for the memory would
/// find it missing.
#[test]
fn a_status_does_not_keep_memory_from_going_back() {
    let (gpu, before, addresses) = sharing(3);
    let over = AtomicBool::new(false);
    gpu.slow_down("cuMemUnmap", 3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let freed: u64 = Memory::get().status().tags.iter().map(|tag| tag.freed_bytes).sum();
                assert_eq!(freed, 0, "nothing was freed");
            }
        });
        let still_used = (0..50).filter(|_| {
            pause(&[]).unwrap();
            let used = gpu.used(0);
            resume(&[]).unwrap();
            used != before.used()[0]
        });
        let still_used = still_used.count();
        over.store(true, Ordering::Relaxed);
        assert_eq!(still_used, 0, "pauses that returned before the memory was given back");
    });
    gpu.clear_faults();
    end(&gpu, addresses, &before);
}

/// What the driver refuses to take back is counted and had again, whoever freed it.
#[test]
fn a_refused_unmap_of_the_last_one_is_an_error_of_the_free() {
    let (gpu, before, addresses) = sharing(3);
    assert_eq!((free(addresses[0]), free(addresses[1])), (0, 0));
    gpu.fail("cuMemUnmap", 1, 999, 1);
    assert_ne!(free(addresses[2]), 0, "as without neighbours");
    assert_eq!(status("cache").allocations, 1);
    gpu.fail("cuMemRelease", 1, 999, 1);
    assert_eq!(free(addresses[2]), 0);
    let late = Memory::get().status().late_bytes;
    assert_eq!(late, gpu.used(0) - before.used()[0], "what is still in use is late");
    // A full device: the next allocation has it back.
    gpu.clear_faults();
    gpu.occupy(0, DEVICE_BYTES - gpu.used(0) as usize);
    let another = malloc_tagged("weights", Some(Backup::Host), EACH).unwrap();
    gpu.occupy(0, 0);
    end(&gpu, [another], &before);
}

/// A vacant place needs no memory of the device, so a margin does not forbid it.
#[test]
fn a_margin_does_not_stand_in_the_way_of_a_vacant_place() {
    let (gpu, before, mut addresses) = sharing(3);
    gpu.occupy(0, DEVICE_BYTES - gpu.used(0) as usize);
    Memory::get().set_margin(2 << 20);
    assert_eq!(free(addresses.remove(0)), 0);
    let again = malloc_tagged("cache", Some(Backup::Discard), EACH);
    Memory::get().set_margin(0);
    gpu.occupy(0, 0);
    addresses.push(again.unwrap());
    end(&gpu, addresses, &before);
}

/// The driver does not choose an address behind the last one at the end of the address space, it refuses. Programs that
/// allocate and free for days come there.
#[test]
fn addresses_begin_again_at_the_end_of_the_space() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    // The first ones lie high, and behind them there is no room for the second.
    for bytes in [1 << 40, 32 << 40] {
        gpu.reset_counts();
        drop(Reservation::new(bytes).unwrap());
    }
    assert_eq!(gpu.calls("cuMemAddressReserve"), 2, "refused, and asked for without a wish");
    let addresses = allocate("cache", Backup::Discard, 1);
    end(&gpu, addresses, &before);
}

/// Who may use the memory of another device may do so after each resume, whatever shares it.
#[test]
fn a_peer_reaches_what_shares_memory() {
    let (gpu, before, mut addresses) = sharing(3);
    let copy = |addresses: &[u64]| {
        common::set_device(1);
        let local = malloc(EACH).unwrap();
        let stream = Stream::create();
        let codes: Vec<_> = addresses.iter().map(|address| stream.copy(local, *address, EACH) | stream.synchronize()).collect();
        drop(stream);
        assert_eq!(free(local), 0);
        common::set_device(0);
        codes
    };
    common::set_device(1);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { vramctl_intercept::hooks::cudaDeviceEnablePeerAccess(0, 0) }, 0);
    common::set_device(0);
    assert_eq!(copy(&addresses), [0; 3]);
    gpu.reset_counts();
    pause(&[]).unwrap();
    resume(&[]).unwrap();
    assert_eq!(gpu.calls("cuMemSetAccess"), 2, "one for each device");
    assert_eq!(free(addresses.remove(1)), 0);
    assert_eq!(copy(&addresses), [0; 2]);
    Memory::get().disable_peer(1, 0);
    end(&gpu, addresses, &before);
}

/// Undoing can fail as well. Then all that share memory are paused, none of them half.
#[test]
fn what_shares_memory_is_stranded_together() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    for second in ["cuMemMap", "cuMemSetAccess"] {
        let mut addresses = allocate("cache", Backup::Discard, 3);
        addresses.extend(allocate("graph", Backup::Discard, 3));
        let kept = malloc_tagged("weights", Some(Backup::Host), EACH).unwrap();
        assert_eq!(pieces_after_a_cycle(&gpu), 3);
        // The first unmap is of what is kept; of the others, one tag's memory is unmapped already when the other's is not to be.
        gpu.fail("cuMemUnmap", 3, 999, 1);
        gpu.fail(second, 1, 999, u64::MAX);
        let answer = pause(&[]);
        gpu.clear_faults();
        assert!(answer.is_err());
        let mut states = [status("cache").state, status("graph").state];
        states.sort_unstable_by_key(|state| *state != TagState::Paused);
        assert_eq!(states, [TagState::Paused, TagState::Active], "{answer:?}");
        resume(&[]).unwrap();
        for address in addresses.iter().chain([&kept]) {
            assert_eq!(write(*address, &pattern(*address, EACH)), 0);
        }
        end(&gpu, addresses.into_iter().chain([kept]), &before);
    }
}

/// The last of those that share memory has been freed by one thread, and another still sees it: nothing is there any more.
#[test]
fn a_place_in_memory_that_is_unmapped_is_not_given_out() {
    let gpu = Gpu::take();
    let before = gpu.footprint();
    let addresses = allocate("cache", Backup::Discard, 1);
    let reservation = Arc::new(Reservation::new(2 * EACH).unwrap());
    let parts: Vec<_> = (0..2).map(|_| Arc::new(reservation.take(EACH).unwrap())).collect();
    let mut memory = driver::Physical::create(0, 2 * EACH).unwrap();
    memory.map(parts.clone()).unwrap();
    memory.leave(&parts[0]);
    assert_eq!((memory.is_shared(), memory.vacant_bytes()), (false, EACH as u64));
    assert!(memory.take_vacancy(2 * EACH).is_none(), "it is not as large");
    assert!(memory.take_vacancy(EACH).is_some_and(|place| place.base() == parts[0].base()));
    assert!(memory.take_vacancy(EACH).is_none(), "it is given once");
    memory.leave(&parts[0]);
    driver::unmap(&mut [&mut memory]).unwrap();
    assert!(memory.take_vacancy(EACH).is_none());
    drop((memory, parts, reservation));
    end(&gpu, addresses, &before);
}
