//! The driver takes note of what it has cleaned, before anybody waits for that.
//!
//! Memory that is given back is cleaned in the background (96 GiB in 0.25 s on an H200). But the driver looks at what is clean
//! only when it is next asked for memory or given some, and whoever that is waits for the look: 0.2 ms for each GiB, so that
//! a pause or resume of 64 GiB takes 10 to 20 ms longer than its own calls do (`docs/performance.md`). So some time after
//! each large one a thread of ours takes a little memory and gives it back. Then it ends: nothing wakes up in a process that
//! is left alone.

use super::bytes_of_devices;
use crate::memory::{Allocation, Memory};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdevice, RelaxedCapture};
use vramctl_host::{PerProcess, worker};

/// When to look.
#[derive(Debug, Clone, Copy)]
pub struct When {
    /// How long after a pause or resume. By then the driver has cleaned all of a large device (140 GiB would take 0.37 s).
    pub after: Duration,
    /// From how many bytes of a device on: what takes less than 0.2 ms to look at is not worth a thread.
    pub bytes: u64,
}

impl Default for When {
    fn default() -> Self {
        Self { after: Duration::from_millis(400), bytes: 1 << 30 }
    }
}

#[derive(Default)]
struct Cleaning {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    when: When,
    /// There is a thread that waits for this, or is looking.
    due: Option<Instant>,
}

static CLEANING: PerProcess<Cleaning> = PerProcess::new(Cleaning::default);

/// So many bytes of each device were given back or taken just now.
pub(super) fn expect(bytes: &BTreeMap<CUdevice, u64>) {
    let cleaning = CLEANING.get();
    let mut state = cleaning.lock();
    let when = state.when;
    if bytes.values().all(|bytes| *bytes < when.bytes) || state.due.replace(Instant::now() + when.after).is_some() {
        return;
    }
    drop(state);
    if let Err(error) = worker::spawn("vramctl-clean", || cleaning.look_when_due()) {
        log::debug!("no thread could be started: {error}");
        cleaning.lock().due = None;
    }
}

/// Has the driver made to look at once, if that is due, and waits until it is done. For tests.
pub fn settle() {
    let cleaning = CLEANING.get();
    let mut state = cleaning.lock();
    state.due = state.due.map(|_| Instant::now());
    cleaning.changed.notify_all();
    drop(cleaning.changed.wait_while(state, |state| state.due.is_some()).unwrap_or_else(PoisonError::into_inner));
}

/// When to look from now on. For tests.
pub fn set_when(when: When) {
    CLEANING.get().lock().when = when;
}

impl Cleaning {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_when_due(&self) {
        let mut state = self.lock();
        while let Some(left) = state.due.map(|due| due.saturating_duration_since(Instant::now())) {
            if !left.is_zero() {
                // Until then it may be put off.
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let (due, when) = (state.due, state.when);
            drop(state);
            let looked = look(when);
            state = self.lock();
            if !looked {
                state.due = Some(Instant::now() + when.after);
            } else if state.due == due {
                // Nothing has happened meanwhile that asks for another.
                state.due = None;
            }
        }
        self.changed.notify_all();
    }
}

/// Makes the driver look, on each device that is worth it. `false`: later, because a pause or resume is under way, which
/// must not find memory missing that we have.
fn look(when: When) -> bool {
    let Some(memory) = Memory::existing() else { return true };
    let _shared = match memory.transition.try_read() {
        Err(TryLockError::WouldBlock) => return false,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Ok(shared) => shared,
    };
    let _relaxed = RelaxedCapture::enter();
    let all = memory.snapshot();
    let mut by_device = bytes_of_devices(all.iter().map(|allocation| &**allocation));
    by_device.retain(|_, bytes| *bytes >= when.bytes);
    for device in by_device.into_keys() {
        let of_device = |allocation: &&Arc<Allocation>| allocation.device == device;
        if !all.iter().find(of_device).is_some_and(|allocation| driver::has_to_spare(allocation.context())) {
            continue;
        }
        let started = Instant::now();
        match driver::granularity(device).and_then(|bytes| driver::Physical::create(device, bytes)).map(drop) {
            Ok(()) => log::debug!("device {device} has looked at what is clean, in {:.1} ms", started.elapsed().as_secs_f64() * 1e3),
            Err(failure) => log::debug!("{failure}: nothing was looked at"),
        }
    }
    true
}
