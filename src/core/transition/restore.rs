//! New memory at the addresses of released memory, filled with what was kept of it.

use super::restored::{Restored, can_change_hands};
use super::{Clock, bytes_of_devices};
use crate::memory::{Allocation, Memory, State, guard};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Backup, Flow};
use vramctl_driver::{self as driver, CUdevice, Context, Current, Physical};
use vramctl_host::exit;
use vramctl_model::{Error, Shortage, Stage, code};

impl Memory {
    /// Maps new memory with the old contents for all of them, or for none. Contents are restored while more memory is being
    /// mapped. `needed`: bytes on each device, for the error. `idle`: contexts in which the program has nothing to run on. `arrival`: how the
    /// memory comes. `restored`: if host memory changes hands, receives what is restored; that is active, without a backup, also after an error.
    /// Returns the memory of the others.
    #[allow(clippy::too_many_arguments)] // one for each way
    pub(super) fn bring_back(
        &self,
        paused: &[Arc<Allocation>],
        needed: &BTreeMap<CUdevice, u64>,
        idle: &BTreeSet<Context>,
        arrival: &mut Arrival<'_>,
        mut restored: Option<&mut Vec<Restored>>,
        clock: &mut Clock,
        progress: &mut backup::OnProgress<'_>,
    ) -> Result<Vec<Option<Physical>>, Error> {
        let started = Instant::now();
        let kept: Vec<_> = paused.iter().filter(|allocation| allocation.contents().state.saved().is_some()).map(Arc::clone).collect();
        self.make_reachable(&kept)?;
        let item = |allocation: &Arc<Allocation>| Some((allocation.extent(), allocation.contents().state.saved().cloned()?));
        let mut due = backup::Due::default();
        paused.iter().filter_map(item).for_each(|item| due.add(item));
        let place_of: BTreeMap<_, _> = paused.iter().enumerate().map(|(place, allocation)| (allocation.address(), place)).collect();
        let memories = RefCell::new(Vec::with_capacity(paused.len()));
        // What is taken is filled at once if another process waits for the host memory.
        let (flow, batch) = if restored.is_some() { (Flow::Pieces { within: Duration::MAX }, 0) } else { (Flow::Whole, arrival.batch()) };
        let mut on_restored = |address| {
            if let (Some(restored), Some(&place)) = (&mut restored, place_of.get(&Some(address)))
                && let allocation = &paused[place]
                && can_change_hands(allocation)
                && let Some(memory) = memories.borrow_mut().get_mut(place).and_then(Option::take)
            {
                restored.push(Restored::of(allocation));
                drop(allocation.activate(memory, None));
            }
        };
        let brought = backup::restore(&due, flow, idle, progress, &mut on_restored, |give| {
            let mut from = 0;
            for upto in batches(paused, batch) {
                for allocation in &paused[from..upto] {
                    let needed = needed.get(&allocation.device).copied().unwrap_or_default();
                    let memory = arrival.take(allocation, needed, &mut || give(None))?;
                    memories.borrow_mut().push(Some(memory));
                }
                self.open(paused[from..upto].iter().map(|allocation| &**allocation))?;
                paused[from..upto].iter().filter_map(item).for_each(|item| give(Some(&item)));
                from = upto;
            }
            clock.add(Stage::Map, started.elapsed());
            Ok(())
        });
        clock.add(Stage::Restore, started.elapsed());
        // On error the new memory is released; no copy to it is in flight any more.
        brought.inspect_err(|_| self.show_undoing()).map(|()| memories.into_inner())
    }

    /// Takes new memory for what an undone pause had handed over, as the other job gives it back, and copies the contents there. `within`: how
    /// long to wait for the next piece. `exchanges`: the other job needs the host memory, so each piece goes back for good; after an error,
    /// the rest is still paused.
    pub(super) fn undo_hand_over(&self, gone: &[Arc<Allocation>], within: Duration, exchanges: bool) -> Result<(), Error> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut gone = gone.to_vec();
        gone.sort_by_cached_key(|allocation| turn_of(allocation, exchanges));
        let mut is_wanted = || !exit::is_ending();
        let mut arrival = Arrival::within(within, &mut is_wanted);
        let (mut clock, mut progress, mut restored) = (Clock::default(), |_| Ok(()), Vec::new());
        let restored = exchanges.then_some(&mut restored);
        let memories = self.bring_back(&gone, &needed_by(&gone), &BTreeSet::new(), &mut arrival, restored, &mut clock, &mut progress)?;
        let has_room = backup::has_room_for_copies();
        for (allocation, memory) in gone.iter().zip(memories) {
            // The rest is active already.
            if let Some(memory) = memory {
                drop(activate(allocation, memory, has_room));
            }
        }
        Ok(())
    }
}

/// How the memory for a resume comes.
pub(super) enum Arrival<'a> {
    /// All of it is free, or the resume fails.
    None,
    /// Piece by piece, as another job gives it back.
    Pieces {
        /// How long to wait for the next one.
        within: Duration,
        /// Since when.
        since: Instant,
        /// Whether to go on waiting.
        is_wanted: &'a mut dyn FnMut() -> bool,
    },
}

impl<'a> Arrival<'a> {
    pub fn within(within: Duration, is_wanted: &'a mut dyn FnMut() -> bool) -> Self {
        Self::Pieces { within, since: Instant::now(), is_wanted }
    }

    /// Bytes of a batch ([`batches`]).
    fn batch(&self) -> usize {
        match self {
            // Copying this many bytes takes longer than mapping the next batch.
            Self::None => 256 << 20,
            // What has come is filled while the next batch is waited for.
            Self::Pieces { .. } => backup::HOST_PIECE,
        }
    }

    /// Takes memory for an allocation, as soon as there is room. `needed`: as for [`create`]. `meanwhile`: called before each look.
    fn take(&mut self, allocation: &Allocation, needed: u64, meanwhile: &mut dyn FnMut()) -> Result<Physical, Error> {
        /// The time between two looks: at first, about as long as the other job takes to save 64 MiB, and at most, which the end of a swap may
        /// wait. It doubles each time.
        const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(4));
        let Self::Pieces { within, since, is_wanted } = self else { return create(allocation, needed) };
        let mut pause = LOOK_AGAIN.0;
        loop {
            meanwhile();
            // Large memory is created in several steps, so a try would take what another one needs.
            let taken = check_room_for(allocation, needed).and_then(|()| create(allocation, needed));
            if !matches!(taken, Err(Error::DeviceMemory(_))) || since.elapsed() >= *within {
                *since = Instant::now();
                return taken;
            }
            // Releases that the driver has refused are in the way, too.
            driver::sweep();
            // No more memory comes, and nobody waits for it: this is no shortage.
            if !is_wanted() {
                return Err(Error::Busy(since.elapsed()));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LOOK_AGAIN.1);
        }
    }
}

/// The order in which memory is taken while it comes piece by piece: first what has contents. If host memory changes hands, first that which does, in
/// the order of the host memory, because backups share it with their neighbours.
pub(super) fn turn_of(allocation: &Allocation, exchanges: bool) -> (u8, usize) {
    let changes_hands = exchanges && can_change_hands(allocation);
    match allocation.contents().state.saved() {
        None => (2, 0),
        Some(saved) => saved.place().filter(|_| changes_hands).map_or((1, 0), |place| (0, place)),
    }
}

/// New memory mapped at an allocation's addresses, not accessible yet. `needed` is the total for the resume, for the error.
fn create(allocation: &Allocation, needed: u64) -> Result<Physical, Error> {
    allocation.create_again().map_err(|failure| {
        let is_short = failure.code == code::OUT_OF_MEMORY && !allocation.is_on_host();
        if is_short { shortage(allocation.device, allocation.context_for_copies(), needed) } else { failure.into() }
    })
}

/// Makes a paused allocation active again, and retains its backup if that is wanted. Returns the state before, to be dropped without the
/// lock: freeing a backup may wait for the device's work, and the program may need to allocate in order to finish that work. `has_room`: the host has
/// room for copies that nobody has asked for.
pub(super) fn activate(allocation: &Allocation, memory: Physical, has_room: bool) -> State {
    // Comparing with a file would be slower than writing a new one.
    let is_asked_for = |saved: &Backup| backup::retains(&allocation.tag) && matches!(*saved, Backup::Host(_));
    let is_retained =
        |saved: &&Arc<Backup>| is_asked_for(saved) || has_room && backup::retains_unchanged(&allocation.tag) && saved.is_worth_keeping();
    let retained = allocation.contents().state.saved().filter(is_retained).cloned();
    allocation.activate(memory, retained)
}

/// Where to interrupt mapping to enable access and start restoring. Access to adjacent memory is set in one call, so a call
/// per allocation would be wasteful; so would delaying the copies.
fn batches(allocations: &[Arc<Allocation>], batch: usize) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut bytes = 0;
    for (at, allocation) in allocations.iter().enumerate() {
        // Memory with nothing to restore delays no copy.
        bytes += if allocation.contents().state.saved().is_some() { allocation.bytes() } else { 0 };
        let last = allocations.get(at + 1).is_none_or(|next| next.device != allocation.device);
        if bytes >= batch || last {
            ends.push(at + 1);
            bytes = 0;
        }
    }
    ends
}

/// An error if there is no room for the allocation now.
fn check_room_for(allocation: &Allocation, needed: u64) -> Result<(), Error> {
    let context = allocation.context_for_copies();
    let (free, _) = Current::push(context).and_then(|_current| driver::memory_info())?;
    if allocation.on_device().is_some() && allocation.bytes() as u64 > free {
        Err(shortage(allocation.device, context, needed))
    } else {
        Ok(())
    }
}

/// Bytes needed on each device.
pub(super) fn needed_by(paused: &[Arc<Allocation>]) -> BTreeMap<CUdevice, u64> {
    bytes_of_devices(paused.iter().map(|allocation| &**allocation))
}

/// Bytes needed on each device; an error if they are not free. Memory of guards counts as free if it will be released first.
pub(super) fn check_free(paused: &[Arc<Allocation>]) -> Result<BTreeMap<CUdevice, u64>, Error> {
    let all_needed = needed_by(paused);
    for (&device, &needed) in &all_needed {
        let on_device = paused.iter().find(|allocation| allocation.device == device).map(|allocation| allocation.context_for_copies());
        let Some(context) = on_device else { continue };
        let _current = Current::push(context)?;
        if needed > driver::memory_info()?.0 + guard::bytes_left_by(paused, device) {
            return Err(shortage(device, context, needed));
        }
    }
    Ok(all_needed)
}

/// Whether all of these could be resumed now.
pub(super) fn has_room_for(paused: &[Arc<Allocation>]) -> bool {
    check_free(paused).is_ok()
}

/// A shortage with the bytes free now: another process may have allocated since the check.
fn shortage(device: CUdevice, context: Context, needed: u64) -> Error {
    let free = Current::push(context).and_then(|_current| driver::memory_info()).map_or(0, |(free, _)| free);
    Error::DeviceMemory(Shortage { device, uuid: None, index: None, needed, free, holders: Vec::new() })
}
