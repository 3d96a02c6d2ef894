//! The limit on this process's memory of each GPU (`VRAMCTL_LIMIT`), and what counts against it.
//!
//! - Memory that the program allocates is charged before it is made, until it has ended. Paused memory stays charged: it must fit when it
//!   comes back. What the program imports is charged to its owner.
//! - A pool of CUDA's is charged for what it has reserved; a request that may make it grow is charged beside that until it is answered.
//! - The context is measured once after its creation: what NVML reports for the process then, less what has been charged. Where NVML cannot
//!   identify the process, as in some containers, the context does not count.
//!
//! Charging is one atomic operation: threads that race for the last bytes never exceed the limit together.
//!
//! A program that shares its GPUs is shown what others leave to it beside what it has itself, so that is counted without a limit, too. In other
//! programs without a limit, nothing is.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use vramctl_config::Config;
use vramctl_driver::{self as driver, CUdevice, Context, Current};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Bytes, Limit, OverLimit};

/// Whether this process's memory is counted: it has a limit, or shares its GPUs.
#[inline]
pub fn counts() -> bool {
    let config = Config::get();
    config.limit.is_some() || config.shares
}

/// The limit that somebody has set since the start.
static NEW: PerProcess<Mutex<Option<Limit>>> = PerProcess::new(Mutex::default);

/// Sets another limit of a program that shares its GPUs. What the process has already stays, whatever the limit.
pub(crate) fn set(limit: Limit) {
    *NEW.get().lock().unpoisoned() = Some(limit);
    for budget in BUDGETS.existing().into_iter().flatten() {
        if let Ok(total) = driver::total_memory(budget.device) {
            budget.limit.store(limit.of(total), Ordering::Relaxed);
        }
    }
}

/// What no program gets that shares a GPU, as the scheduler has last said.
#[derive(Debug, Clone, Copy)]
pub struct Unavailable {
    /// Bytes that are kept free.
    pub reserve: u64,
    /// Bytes that programs have that do not share.
    pub others: u64,
}

static UNAVAILABLE: PerProcess<Mutex<BTreeMap<String, Unavailable>>> = PerProcess::new(Mutex::default);

pub(crate) fn set_unavailable(reserve: u64, gpus: BTreeMap<String, u64>) {
    let of = |(uuid, others)| (uuid, Unavailable { reserve, others });
    *UNAVAILABLE.get().lock().unpoisoned() = gpus.into_iter().map(of).collect();
}

/// What no program gets that shares a device; `None` if no scheduler has said it yet.
pub fn unavailable(device: CUdevice) -> Option<Unavailable> {
    UNAVAILABLE.existing()?.lock().unpoisoned().get(&driver::uuid(device)?).copied()
}

/// One for each device that the process sees, by ordinal.
static BUDGETS: PerProcess<Vec<Budget>> = PerProcess::new(|| driver::devices().filter_map(Budget::of).collect());

/// More than any device has.
const NONE: u64 = u64::MAX;

struct Budget {
    device: CUdevice,
    /// [`NONE`] without a limit.
    limit: AtomicU64,
    counted: AtomicU64,
    /// Whether the context has been measured, or is being measured.
    is_context_known: AtomicBool,
    context: Mutex<Option<(Context, Charge)>>,
    /// By the driver's handle. Held while the driver reads a pool's size, so that the last to write has read the newest.
    pools: Mutex<BTreeMap<usize, PoolCharge>>,
}

/// What counts of a pool.
struct PoolCharge {
    reserved: Charge,
    /// Bytes of requests under way that the pool has enough unused memory for.
    claimed: u64,
}

/// Memory that counts against the limit, until dropped.
#[must_use]
#[derive(Debug)]
pub struct Charge {
    counted: &'static AtomicU64,
    bytes: u64,
}

impl Charge {
    /// Counts so many bytes from now on, whatever the limit.
    fn set(&mut self, bytes: u64) {
        // Sums wrap, so one addition does both.
        self.counted.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.counted.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// How much of a device's limit is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The device.
    pub device: CUdevice,
    /// The limit in bytes; `None`: there is none.
    pub limit: Option<u64>,
    /// Bytes that count against it, or would.
    pub counted: u64,
}

fn budget(device: CUdevice) -> Option<&'static Budget> {
    if !counts() {
        return None;
    }
    BUDGETS.get().iter().find(|budget| budget.device == device)
}

/// Charges memory that is about to be allocated on a device. `None` without a limit.
pub(crate) fn charge(device: CUdevice, bytes: u64) -> Result<Option<Charge>, OverLimit> {
    let Some(budget) = budget(device) else { return Ok(None) };
    budget.measure_context();
    budget.try_charge(bytes).map(Some).ok_or_else(|| budget.refusal(bytes))
}

/// A request that a pool of CUDA's is about to serve, until dropped.
#[derive(Debug)]
pub struct Growth {
    device: CUdevice,
    pool: usize,
    part: Part,
}

/// Where a request's memory is to come from.
#[derive(Debug)]
enum Part {
    /// From unused memory of the pool: so many bytes.
    Unused(u64),
    /// The pool may grow.
    New { _charge: Charge },
}

/// Charges a request to a pool of a device. `None` without a limit.
///
/// # Safety
/// `pool` must be a pool of the driver's.
pub(crate) unsafe fn charge_pool(device: CUdevice, pool: *mut c_void, bytes: u64) -> Result<Option<Growth>, OverLimit> {
    /// Pools grow by multiples of it (driver 580).
    const STEP: u64 = 32 << 20;
    let Some(budget) = budget(device) else { return Ok(None) };
    budget.measure_context();
    // SAFETY: the caller's promise.
    let is_unused = unsafe { budget.claim(pool, bytes) };
    let part = if is_unused {
        Part::Unused(bytes)
    } else {
        let grown = bytes.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        Part::New { _charge: budget.try_charge(grown).ok_or_else(|| budget.refusal(bytes))? }
    };
    Ok(Some(Growth { device, pool: pool as usize, part }))
}

impl Drop for Growth {
    fn drop(&mut self) {
        let Some(budget) = budget(self.device) else { return };
        let mut pools = budget.pools();
        if let Some(pool) = pools.get_mut(&self.pool) {
            if let Part::Unused(bytes) = self.part {
                pool.claimed = pool.claimed.saturating_sub(bytes);
            }
            // SAFETY: it is forgotten before it is destroyed.
            unsafe { pool.read(self.pool) };
        }
    }
}

/// A pool is about to be destroyed.
pub fn forget_pool(pool: *mut c_void) {
    for budget in BUDGETS.existing().into_iter().flatten() {
        budget.pools().remove(&(pool as usize));
    }
}

/// Forgets the context of a device if it has ended, and reads again how large the pools are.
pub(crate) fn refresh(device: CUdevice) {
    if let Some(budget) = budget(device) {
        budget.refresh();
        budget.measure_context();
    }
}

/// The same for all devices that the process has used.
pub(crate) fn refresh_all() {
    used().for_each(Budget::refresh);
}

/// The devices that the process has used.
fn used() -> impl Iterator<Item = &'static Budget> {
    BUDGETS.existing().into_iter().flatten().filter(|budget| budget.counted.load(Ordering::Relaxed) > 0)
}

/// How much of a device's limit is taken. `None` if nothing is counted.
pub fn taken(device: CUdevice) -> Option<Taken> {
    budget(device).map(Budget::taken)
}

/// The same for all devices that the process has used.
pub(crate) fn all_taken() -> Vec<Taken> {
    used().map(Budget::taken).collect()
}

/// Whether the limit leaves room for so many bytes.
pub(crate) fn has_room(device: CUdevice, bytes: u64) -> bool {
    taken(device).is_none_or(|taken| taken.limit.is_none_or(|limit| taken.counted.saturating_add(bytes) <= limit))
}

impl Budget {
    fn of(device: CUdevice) -> Option<Self> {
        let total = driver::total_memory(device).ok()?;
        let limit = (*NEW.get().lock().unpoisoned()).or(Config::get().limit);
        Some(Self {
            device,
            limit: AtomicU64::new(limit.map_or(NONE, |limit| limit.of(total))),
            counted: AtomicU64::new(0),
            is_context_known: AtomicBool::new(false),
            context: Mutex::default(),
            pools: Mutex::default(),
        })
    }

    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    fn pools(&self) -> MutexGuard<'_, BTreeMap<usize, PoolCharge>> {
        self.pools.lock().unpoisoned()
    }

    fn taken(&self) -> Taken {
        let limit = Some(self.limit()).filter(|limit| *limit != NONE);
        Taken { device: self.device, limit, counted: self.counted.load(Ordering::Relaxed) }
    }

    fn try_charge(&'static self, bytes: u64) -> Option<Charge> {
        let limit = self.limit();
        let with = |counted: u64| counted.checked_add(bytes).filter(|sum| *sum <= limit);
        self.counted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with).ok()?;
        Some(Charge { counted: &self.counted, bytes })
    }

    fn nothing(&'static self) -> Charge {
        Charge { counted: &self.counted, bytes: 0 }
    }

    fn refusal(&self, needed: u64) -> OverLimit {
        let context = self.context.lock().unpoisoned().as_ref().map_or(0, |(_, charge)| charge.bytes);
        let Taken { device, counted, .. } = self.taken();
        OverLimit { device, uuid: driver::uuid(device), needed, limit: self.limit(), counted, context }
    }

    /// Forgets the context if it has ended, and reads how large the pools are.
    fn refresh(&self) {
        let known = self.context.lock().unpoisoned().as_ref().map(|(context, _)| *context);
        if known.is_some_and(Context::is_gone) {
            *self.context.lock().unpoisoned() = None;
            self.is_context_known.store(false, Ordering::Relaxed);
        }
        for (handle, pool) in self.pools().iter_mut() {
            // SAFETY: a pool is forgotten before it is destroyed.
            unsafe { pool.read(*handle) };
        }
    }

    /// Measures the context if the calling thread is the first that has one of the device.
    fn measure_context(&'static self) {
        if self.is_context_known.load(Ordering::Relaxed) {
            return;
        }
        let Ok(Some(current)) = Current::of_thread() else { return };
        // Nobody waits for the one who measures: loading NVML needs the loader's lock, which a thread that allocates may hold.
        if current.device() != self.device || self.is_context_known.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut charge = self.nothing();
        charge.set(driver::own_use(self.device).unwrap_or(0).saturating_sub(self.counted.load(Ordering::Relaxed)));
        if charge.bytes >= self.limit() {
            let [context, limit] = [charge.bytes, self.limit()].map(Bytes);
            log::warn!("the CUDA context alone takes {context}, and the limit is {limit}: every allocation will be refused");
        }
        *self.context.lock().unpoisoned() = Some((current.owner(), charge));
    }

    /// Claims unused memory of a pool, if there is enough.
    ///
    /// # Safety
    /// `pool` must be a pool of the driver's.
    unsafe fn claim(&'static self, pool: *mut c_void, bytes: u64) -> bool {
        let mut pools = self.pools();
        let known = pools.entry(pool as usize).or_insert_with(|| PoolCharge { reserved: self.nothing(), claimed: 0 });
        // SAFETY: the caller's promise.
        let unused = unsafe { known.read(pool as usize) };
        let is_enough = unused.saturating_sub(known.claimed) >= bytes;
        if is_enough {
            known.claimed += bytes;
        }
        is_enough
    }
}

impl PoolCharge {
    /// Reads how large the pool is, and returns how much of it is unused.
    ///
    /// # Safety
    /// `handle` must be that of a pool of the driver's.
    unsafe fn read(&mut self, handle: usize) -> u64 {
        // SAFETY: the caller's promise.
        match unsafe { driver::extent_of_pool(handle as *mut c_void) } {
            Ok((reserved, used)) => {
                self.reserved.set(reserved);
                reserved.saturating_sub(used)
            }
            Err(failure) => {
                log::debug!("the driver does not report the size of a pool: {failure}");
                0
            }
        }
    }
}
