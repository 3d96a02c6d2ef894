//! A guard: one block of memory per device, mapped repeatedly under paused addresses. A stray access hits this memory instead of an illegal
//! address, which would destroy the context.
//!
//! It is for pauses that do not hold the program, as through an inference engine's own API; in a held program nothing can go astray. A pause
//! maps guards after the release (`Memory::guard`), a resume removes them before the mapping (`Memory::unguard`).
//!
//! Best effort: without memory for the block, the paused addresses stay unmapped. All guarded memory of a device shares the block, so a
//! write at one address shows at others. Writes are detected when a guard is removed; reads are not detected.

use super::registry::Contents;
use super::{Allocation, Memory, State};
use crate::drain;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vramctl_driver::{self as driver, Access, Account, Addresses, CUdevice, Context, Direction, Lane, Physical, Place, RelaxedCapture};
use vramctl_model::{Bytes, Error, Failure, Observer, Span};

/// The block's largest piece. The others, each half as long down to the granularity, are for the ends of allocations. Debug builds
/// use a smaller one, to match the small devices in tests.
const LARGEST: usize = if cfg!(debug_assertions) { 8 << 20 } else { 32 << 20 };

/// The fill value: small as a number of any type and harmless as an index, but not zero, because zero is what programs write most.
const UNTOUCHED: u32 = 1;

impl Memory {
    /// After the release: maps guards under paused memory, on each device under all of it or none. Returns the guarded bytes. Under the
    /// exclusive transition lock.
    pub(crate) fn guard(&self, paused: &[Arc<Allocation>]) -> u64 {
        let _relaxed = RelaxedCapture::enter();
        let mut guarded = 0;
        for (device, on_device) in by_device(paused) {
            let bytes = on_device.iter().map(|allocation| allocation.bytes() as u64).sum();
            match self.guard_on(device, &on_device) {
                Ok(()) => guarded += bytes,
                Err(failure) => {
                    let without: Vec<_> = on_device.iter().map(|allocation| take_guard(allocation)).collect();
                    drop(without);
                    log::warn!("{} of paused memory has no guard: {failure}", Bytes(bytes));
                }
            }
        }
        guarded
    }

    fn guard_on(&self, device: CUdevice, paused: &[&Arc<Allocation>]) -> Result<(), Failure> {
        let Some(first) = paused.first() else { return Ok(()) };
        let block = block_of(&self.registry.snapshot(), device).map_or_else(|| make_block(device, first.context_for_copies()), Ok)?;
        paused.iter().try_for_each(|allocation| put_under(allocation, &block))?;
        self.open(paused.iter().map(|allocation| &***allocation))
    }

    /// Waits for most of the work that may use guards. Without the transition lock, so that the program can allocate and free meanwhile.
    pub(crate) fn wait_for_guarded(&self, paused: &[Arc<Allocation>], limit: Duration, observer: &mut dyn Observer) -> Result<(), Error> {
        let guarded = guarded(paused);
        if guarded.is_empty() {
            return Ok(());
        }
        let contexts = self.contexts_that_use(guarded.iter().map(|allocation| &**allocation));
        drain::wait_at_most(contexts, limit, &mut || observer.is_wanted())
    }

    /// Before the mapping: removes the guards under paused memory, once the device's work, which may use them, has ended. On error, all of it
    /// is still guarded. Under the exclusive transition lock.
    pub(crate) fn unguard(&self, paused: &[Arc<Allocation>], limit: Duration) -> Result<Unguarded<'_>, Error> {
        let unguarded = |allocations| Unguarded { memory: self, allocations };
        let guarded = guarded(paused);
        if guarded.is_empty() {
            return Ok(unguarded(guarded));
        }
        let _relaxed = RelaxedCapture::enter();
        drain::wait_at_most(self.contexts_that_use(guarded.iter().map(|allocation| &**allocation)), limit, &mut || true)?;
        if let Err(failure) = unmap(&guarded) {
            // A guard that cannot be mapped again is removed at the next try.
            for allocation in &guarded {
                let _ = allocation.contents().state.backing_mut().map_or(Ok(()), Physical::map_again);
            }
            let _ = self.open(guarded.iter().map(|allocation| &**allocation));
            return Err(failure.into());
        }
        let guards: Vec<_> = guarded.iter().map(|allocation| (allocation.context_for_copies(), take_guard(allocation))).collect();
        let blocks: BTreeMap<_, _> = guards
            .iter()
            .filter_map(|(context, guard)| guard.as_ref()?.block().map(|block| (Arc::as_ptr(block), (*context, Arc::clone(block)))))
            .collect();
        drop(guards);
        for (context, block) in blocks.into_values() {
            self.look_at(context, &block);
        }
        Ok(unguarded(guarded))
    }

    /// Counts what was written to a block, and restores its fill value if it is still in use.
    fn look_at(&self, context: Context, block: &Arc<Physical>) {
        let looked = written(context, block).and_then(|bytes| {
            if bytes > 0 {
                self.written.fetch_add(bytes, Ordering::Relaxed);
                log::warn!("something wrote to paused memory: {} of its guard has changed", Bytes(bytes));
            }
            if bytes > 0 && Arc::strong_count(block) > 1 { fill(context, block) } else { Ok(()) }
        });
        if let Err(failure) = looked {
            log::warn!("could not check whether something wrote to paused memory: {failure}");
        }
    }

    /// Takes the number of bytes that were found written in guards and not reported yet.
    pub(crate) fn take_written(&self) -> u64 {
        self.written.swap(0, Ordering::Relaxed)
    }
}

/// Memory whose guards are removed. They are mapped again when this is dropped, unless they are removed [for good](Self::for_good).
pub(crate) struct Unguarded<'a> {
    memory: &'a Memory,
    allocations: Vec<Arc<Allocation>>,
}

impl Unguarded<'_> {
    /// Whether there were no guards.
    pub fn is_empty(&self) -> bool {
        self.allocations.is_empty()
    }

    /// The memory needs no guards any more.
    pub fn for_good(mut self) {
        self.allocations.clear();
    }
}

impl Drop for Unguarded<'_> {
    fn drop(&mut self) {
        if !self.is_empty() {
            self.memory.guard(&self.allocations);
        }
    }
}

/// Maps a block in place of an allocation's memory, not accessible yet.
fn put_under(allocation: &Allocation, block: &Arc<Physical>) -> Result<(), Failure> {
    let Contents { state: State::Released(released), mappings, .. } = &mut *allocation.contents() else { return Ok(()) };
    let mut guard = Physical::repeated(block, allocation.bytes())?;
    mappings.values().try_for_each(|mapping| guard.map(&mapping.place))?;
    released.guard = Some(guard);
    Ok(())
}

fn take_guard(allocation: &Allocation) -> Option<Physical> {
    allocation.contents().state.guard_mut().and_then(Option::take)
}

/// Those that have a guard.
fn guarded(allocations: &[Arc<Allocation>]) -> Vec<Arc<Allocation>> {
    allocations.iter().filter(|allocation| allocation.contents().state.guard().is_some()).map(Arc::clone).collect()
}

/// Device memory that guards take on a device.
fn bytes(allocations: &[Arc<Allocation>], device: CUdevice) -> u64 {
    block_of(allocations, device).map_or(0, |block| block.bytes() as u64)
}

/// Device memory that becomes free when these are no longer guarded: none if others on the device still are.
pub(crate) fn bytes_left_by(allocations: &[Arc<Allocation>], device: CUdevice) -> u64 {
    let Some(block) = block_of(allocations, device) else { return 0 };
    let leave: BTreeSet<_> = allocations.iter().map(Arc::as_ptr).collect();
    let stays =
        |one: &Arc<Allocation>| one.device == device && !leave.contains(&Arc::as_ptr(one)) && one.contents().state.guard().is_some();
    if Memory::get().registry.snapshot().iter().any(stays) { 0 } else { block.bytes() as u64 }
}

/// Device memory that guards take on all devices.
pub(crate) fn all_bytes(allocations: &[Arc<Allocation>]) -> u64 {
    let devices: BTreeSet<_> = allocations.iter().map(|allocation| allocation.device).collect();
    devices.into_iter().map(|device| bytes(allocations, device)).sum()
}

fn block_of(allocations: &[Arc<Allocation>], device: CUdevice) -> Option<Arc<Physical>> {
    let mut on_device = allocations.iter().filter(|allocation| allocation.device == device);
    on_device.find_map(|allocation| allocation.contents().state.guard()?.block().map(Arc::clone))
}

fn by_device(allocations: &[Arc<Allocation>]) -> BTreeMap<CUdevice, Vec<&Arc<Allocation>>> {
    let mut devices = BTreeMap::<_, Vec<_>>::new();
    for allocation in allocations {
        if let Some(device) = allocation.on_device() {
            devices.entry(device).or_default().push(allocation);
        }
    }
    devices
}

/// Unmaps the guards. On error, some may be unmapped.
fn unmap(guarded: &[Arc<Allocation>]) -> Result<(), Failure> {
    let mut contents: Vec<_> = guarded.iter().map(|allocation| allocation.contents()).collect();
    driver::unmap(&mut contents.iter_mut().filter_map(|contents| contents.state.guard_mut()?.as_mut()).collect::<Vec<_>>())
}

/// A new block, which is also mapped at addresses of its own, for copies.
fn make_block(device: CUdevice, context: Context) -> Result<Arc<Physical>, Failure> {
    let mut block = Physical::in_halves(Account { device, label: None }, LARGEST, driver::granularity(device)?)?;
    let place = Place::of(&Arc::new(Addresses::reserve(block.bytes())?));
    block.map(&place)?;
    driver::open([(place.span(), [Access::of_device(device)].into())])?;
    let block = Arc::new(block);
    fill(context, &block)?;
    Ok(block)
}

fn fill(context: Context, block: &Physical) -> Result<(), Failure> {
    copy(Direction::ToDevice, context, block, |_| ())
}

/// Bytes of the block that have changed, in whole words.
fn written(context: Context, block: &Physical) -> Result<u64, Failure> {
    let mut bytes = 0;
    copy(Direction::FromDevice, context, block, |words| {
        bytes += words.iter().filter(|word| **word != UNTOUCHED).map(|word| size_of_val(word) as u64).sum::<u64>();
    })?;
    Ok(bytes)
}

/// Copies the block from or to a small host buffer, part by part.
fn copy(direction: Direction, context: Context, block: &Physical, mut copied: impl FnMut(&[u32])) -> Result<(), Failure> {
    const PART: usize = 1 << 20;
    let mut words = vec![UNTOUCHED; PART / size_of::<u32>()];
    for Span { address, bytes } in block.spans() {
        for offset in (0..bytes).step_by(PART) {
            let words = &mut words[..PART.min(bytes - offset) / size_of::<u32>()];
            let mut lane = Lane::default();
            // SAFETY: the buffer outlives the lane, which finishes before the buffer is used again.
            unsafe { lane.queue(direction, context, address + offset as u64, words.as_mut_ptr().cast(), size_of_val(words))? };
            lane.finish()?;
            copied(words);
        }
    }
    Ok(())
}
