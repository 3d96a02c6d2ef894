//! Access of one device to another's memory.
//!
//! In CUDA, a context opens all of its plain memory to another context, and a pool all of its memory to a device, independently of each
//! other. Managed memory is virtual memory, where access is set for each mapping. So the library remembers what the program has enabled. It
//! sets access to active memory at once; later memory, and memory that is resumed, gets it when it is mapped.

use super::{Allocation, Memory};
use crate::{contexts, drain};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use vramctl_driver::{self as driver, Access, CUdevice, Context, Current, Manner};
use vramctl_host::Unpoison;
use vramctl_model::{Error, Failure};

/// A device, and another whose memory it may use.
type Pair = (CUdevice, CUdevice);

/// What the program has enabled.
#[derive(Default)]
pub(super) struct Peers {
    enabled: RwLock<Enabled>,
    /// How often it has changed.
    changes: AtomicU64,
}

#[derive(Default)]
struct Enabled {
    /// `cuCtxEnablePeerAccess`: for each pair the contexts of both, because each context enables and disables access for itself. A pair
    /// without contexts has no entry.
    contexts: BTreeMap<Pair, BTreeSet<(Context, Context)>>,
    /// Opened for copies, which may reach plain memory from everywhere ([`Memory::open_to_copies`]).
    copies: BTreeSet<Pair>,
    /// `cuMemPoolSetAccess`: what the device may do with memory from the other's default pool, if anything.
    pools: BTreeMap<Pair, Access>,
}

impl Enabled {
    fn pairs(&self) -> BTreeSet<Pair> {
        self.contexts.keys().chain(self.pools.keys()).copied().collect()
    }

    /// Whether the device may use the other's memory of `cudaMalloc`.
    fn is_open(&self, pair: Pair) -> bool {
        self.contexts.contains_key(&pair) || self.copies.contains(&pair)
    }

    /// Whether the device may use it for these contexts alone.
    fn is_open_only_for(&self, pair: Pair, contexts: &(Context, Context)) -> bool {
        !self.copies.contains(&pair) && self.contexts.get(&pair).is_some_and(|enabled| enabled.iter().eq([contexts]))
    }

    fn of_pool(&self, (device, owner): Pair) -> Access {
        self.pools.get(&(device, owner)).copied().unwrap_or_else(|| Access::none(device))
    }
}

impl Peers {
    fn read(&self) -> RwLockReadGuard<'_, Enabled> {
        self.enabled.read().unpoisoned()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Enabled> {
        self.enabled.write().unpoisoned()
    }

    /// Counts the changes of access to memory that is active at the time. Stays the same while the transition lock is held.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// The pairs that the program has given access to a whole default pool.
    pub fn of_pools(&self) -> BTreeSet<Pair> {
        self.read().pools.keys().copied().collect()
    }

    /// The devices that may use memory of these.
    pub fn of_owners(&self, owners: &BTreeSet<CUdevice>) -> BTreeSet<CUdevice> {
        let enabled = self.read();
        let pairs = enabled.pairs().into_iter().chain(enabled.copies.iter().copied());
        pairs.filter(|(_, owner)| owners.contains(owner)).map(|(device, _)| device).collect()
    }

    /// The contexts that may use plain memory of a device.
    pub fn contexts_with_access(&self, owner: CUdevice) -> BTreeSet<Context> {
        let enabled = self.read();
        let of_owner = enabled.contexts.iter().filter(|((_, of), _)| *of == owner);
        of_owner.flat_map(|(_, contexts)| contexts.iter().map(|(context, _)| *context)).collect()
    }

    /// Who has access to a device's memory, itself first.
    pub fn usual_access(&self, owner: CUdevice, from_pool: bool) -> Arc<[Access]> {
        let of_owner = |pair: &&Pair| pair.1 == owner;
        if from_pool {
            let enabled = self.read();
            let others = enabled.pools.iter().filter(|(pair, _)| of_owner(pair)).map(|(_, access)| *access);
            return std::iter::once(Access::of_device(owner)).chain(others).collect();
        }
        let (by_program, for_copies): (BTreeSet<_>, BTreeSet<_>) = {
            let enabled = self.read();
            let devices = |pairs: &mut dyn Iterator<Item = &Pair>| pairs.filter(of_owner).map(|(device, _)| *device).collect();
            (devices(&mut enabled.contexts.keys()), devices(&mut enabled.copies.iter()))
        };
        // After a move, two devices may have no path between them. The program did not ask for this access, so it does without.
        let for_copies: Vec<_> = for_copies.difference(&by_program).map(|device| Access::of_device(*device)).collect();
        let for_copies = for_copies.into_iter().filter(|access| access.check(owner).is_ok());
        let others = by_program.iter().map(|device| Access::of_device(*device)).chain(for_copies);
        std::iter::once(Access::of_device(owner)).chain(others).collect()
    }

    /// Forgets what ends with these contexts. Active memory stays open until it is paused: no work is left that may use it.
    pub fn forget_gone(&self, gone: &[Context]) {
        self.forget(|(context, other)| gone.contains(context) || gone.contains(other));
    }

    fn forget(&self, is_over: impl Fn(&(Context, Context)) -> bool) {
        self.write().contexts.retain(|_, contexts| {
            contexts.retain(|both| !is_over(both));
            !contexts.is_empty()
        });
    }
}

/// Whether a copy has named a context for each side. Such copies need no access: any context's work may reach any memory.
static CROSSED: AtomicBool = AtomicBool::new(false);

/// Records that a copy is about to name a context for each side.
#[inline]
pub fn note_crossing() {
    if !CROSSED.load(Ordering::Relaxed) {
        CROSSED.store(true, Ordering::Relaxed);
    }
}

/// Whether one has.
pub(super) fn has_crossed() -> bool {
    CROSSED.load(Ordering::Relaxed)
}

/// The devices of two contexts of a call of the program's, which pauses then know of.
fn pair_of(current: &Current, other: Context) -> Result<Pair, Failure> {
    let other = Current::push_of_program(other)?;
    contexts::note(current);
    contexts::note(&other);
    Ok((current.device(), other.device()))
}

impl Memory {
    /// Gives the current context's device access to plain memory of another context's device, present and future. On error nothing changes.
    pub fn enable_peer(&self, current: &Current, other: Context) -> Result<(), Error> {
        let pair = pair_of(current, other)?;
        let _exclusive = self.exclude();
        if !self.peers.read().is_open(pair) {
            self.set_device_access(pair.1, false, &[Access::of_device(pair.0)], &[Access::none(pair.0)])?;
        }
        self.peers.write().contexts.entry(pair).or_default().insert((current.context(), other));
        Ok(())
    }

    /// Takes it away again, unless another context of the device has it too, or copies need it. On error nothing changes. If the driver
    /// refuses, active memory stays open: to the program, nothing is left that uses it there.
    pub fn disable_peer(&self, current: &Current, other: Context) -> Result<(), Error> {
        let pair = pair_of(current, other)?;
        let contexts = (current.context(), other);
        if !self.peers.read().contexts.get(&pair).is_some_and(|enabled| enabled.contains(&contexts)) {
            return Ok(());
        }
        // The context's work may use the memory. Before taking the lock, as in `free`.
        drain::wait(BTreeSet::from([current.context()]), Manner::AsFree)?;
        let _exclusive = self.exclude();
        let is_last = self.peers.read().is_open_only_for(pair, &contexts);
        if is_last && let Err(failure) = self.set_device_access(pair.1, false, &[Access::none(pair.0)], &[Access::of_device(pair.0)]) {
            if !failure.is_refusal() {
                return Err(failure.into());
            }
            let [one, other] = [pair.0, pair.1].map(driver::gpu_in_words);
            log::warn!("{one} keeps access to managed memory of {other} until that is paused: {failure}");
        }
        self.peers.forget(|one| *one == contexts);
        Ok(())
    }

    /// Opens plain memory of these devices, present and future, to the process's other devices, for copies that plain memory of CUDA's own
    /// permits without enabled peer access. Where no path connects two devices, nothing changes. Returns whether anything did.
    ///
    /// More than CUDA permits: a kernel of the other device, which would fail with an illegal address, can then use the memory too.
    pub fn open_to_copies(&self, owners: &BTreeSet<CUdevice>) -> Result<bool, Error> {
        contexts::of_devices(&driver::devices().collect());
        let devices = contexts::devices();
        let _exclusive = self.exclude_unless_quiesced()?;
        let mut any = false;
        for owner in owners {
            let mut new: Vec<_> = devices.iter().copied().filter(|device| device != owner).collect();
            new.retain(|device| !self.peers.read().is_open((*device, *owner)) && Access::of_device(*device).check(*owner).is_ok());
            if new.is_empty() {
                continue;
            }
            let access: Vec<_> = new.iter().copied().map(Access::of_device).collect();
            let before: Vec<_> = new.iter().copied().map(Access::none).collect();
            self.set_device_access(*owner, false, &access, &before)?;
            self.peers.write().copies.extend(new.into_iter().map(|device| (device, *owner)));
            any = true;
        }
        Ok(any)
    }

    /// Sets what other devices may do with memory from a device's default pool, present and future. On error nothing changes.
    pub fn set_pool_access(&self, owner: CUdevice, wanted: &[Access]) -> Result<(), Error> {
        let wanted = wanted.iter().filter_map(|access| Some((access.location.device()?, *access)));
        let wanted: BTreeMap<_, _> = wanted.filter(|(device, _)| *device != owner).collect();
        let changes = || -> Vec<(CUdevice, Access, Access)> {
            let enabled = self.peers.read();
            let now = wanted.iter().map(|(device, access)| (*device, *access, enabled.of_pool((*device, owner))));
            now.filter(|(_, access, before)| access != before).collect()
        };
        // The work of devices that lose access may use the memory. Before taking the lock, as in `free`.
        let losing = changes().into_iter().filter(|(_, _, before)| before.is_any()).map(|(device, ..)| device).collect();
        drain::wait(contexts::of_devices(&losing), Manner::AsFree)?;
        let _exclusive = self.exclude();
        let changes = changes();
        if changes.is_empty() {
            return Ok(());
        }
        let (access, before): (Vec<_>, Vec<_>) = changes.iter().map(|(_, access, before)| (*access, *before)).unzip();
        self.set_device_access(owner, true, &access, &before)?;
        let mut enabled = self.peers.write();
        enabled.pools.extend(changes.into_iter().map(|(device, access, _)| ((device, owner), access)));
        enabled.pools.retain(|_, access| access.is_any());
        Ok(())
    }

    /// Sets access to a device's active memory of `cudaMalloc`, or from its pool. On error it is `before` again, as far as the driver
    /// permits. Under the exclusive transition lock.
    fn set_device_access(&self, owner: CUdevice, from_pool: bool, access: &[Access], before: &[Access]) -> Result<(), Failure> {
        let is_meant = |one: &&Arc<Allocation>| {
            one.device == owner && one.is_from_pool() == from_pool && one.origin().is_malloc() && !one.is_unmapped()
        };
        let all = self.registry.snapshot();
        let active: Vec<_> = all.iter().filter(is_meant).collect();
        let set = |access: &[Access]| {
            let access = access.into();
            driver::open(active.iter().flat_map(|one| one.ranges(&access)))
        };
        self.peers.changes.fetch_add(1, Ordering::Relaxed);
        // What a driver refuses once, it may grant a moment later.
        set(access).or_else(|failure| if failure.is_refusal() { set(access) } else { Err(failure) }).inspect_err(|_| _ = set(before))
    }
}
