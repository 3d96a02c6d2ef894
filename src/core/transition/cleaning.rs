//! Makes the driver account for zeroed memory early, so that no later call has to wait for that.
//!
//! The driver zeroes released memory in the background (96 GiB in 0.25 s on an H200). But it checks what is done only at the next
//! allocation or release (`_pmaCheckScrubbedPages` in NVIDIA's open kernel modules), which waits for the check: 0.2 ms per GiB. A
//! pause or resume of 64 GiB therefore takes 10 to 20 ms longer than its own calls: a release of 64 GiB half a second later took 35 to
//! 54 ms, and 16 to 20 after 2 MiB had been allocated and released; an allocation of as much 13 ms, and 1. So a while after each large
//! one, a worker thread allocates a little memory and releases it. The thread then exits: an idle process has no wakeups.

use super::bytes_of_devices;
use crate::memory::{Allocation, Memory};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdevice, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, worker};

/// When to make the driver check.
#[derive(Debug, Clone, Copy)]
pub struct When {
    /// Delay after a pause or resume. By then the driver has cleaned all of a large device (140 GiB would take 0.37 s).
    pub after: Duration,
    /// Minimum bytes per device. Below this, the check takes less than 0.2 ms and is not worth a thread.
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
    /// Set while the thread waits for this time or is checking.
    due: Option<Instant>,
}

static CLEANING: PerProcess<Cleaning> = PerProcess::new(Cleaning::default);

/// Schedules a check if enough of a device's memory has just been released or allocated.
pub(super) fn expect(bytes: &BTreeMap<CUdevice, u64>) {
    let cleaning = CLEANING.get();
    let mut state = cleaning.lock();
    let when = state.when;
    if bytes.values().all(|bytes| *bytes < when.bytes) || state.due.replace(Instant::now() + when.after).is_some() {
        return;
    }
    drop(state);
    if let Err(error) = worker::spawn("vramctl-clean", || cleaning.look_when_due()) {
        log::debug!("could not start a thread: {error}");
        cleaning.lock().due = None;
    }
}

/// Runs a scheduled check now and waits for it. For tests.
pub fn settle() {
    let cleaning = CLEANING.get();
    let mut state = cleaning.lock();
    state.due = state.due.map(|_| Instant::now());
    cleaning.changed.notify_all();
    drop(cleaning.changed.wait_while(state, |state| state.due.is_some()).unpoisoned());
}

/// Sets when to check. For tests.
pub fn set_when(when: When) {
    CLEANING.get().lock().when = when;
}

impl Cleaning {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    fn look_when_due(&self) {
        let mut state = self.lock();
        while let Some(left) = state.due.map(|due| due.saturating_duration_since(Instant::now())) {
            if !left.is_zero() {
                // The deadline may move meanwhile.
                state = self.changed.wait_timeout(state, left).unpoisoned().0;
                continue;
            }
            let (due, when) = (state.due, state.when);
            drop(state);
            let looked = look(when);
            state = self.lock();
            if !looked {
                state.due = Some(Instant::now() + when.after);
            } else if state.due == due {
                // Nothing has scheduled another check meanwhile.
                state.due = None;
            }
        }
        self.changed.notify_all();
    }
}

/// Makes the driver check each device where it pays off. `false` to retry later: a pause or resume is in progress, and it
/// must not find memory missing because this function holds it.
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
        let of_device = |allocation: &&Arc<Allocation>| allocation.on_device() == Some(device);
        if !all.iter().find(of_device).is_some_and(|allocation| driver::has_to_spare(allocation.context_for_copies())) {
            continue;
        }
        let started = Instant::now();
        match driver::granularity(device)
            .and_then(|bytes| driver::Physical::create_for_a_moment(device, bytes, driver::Extras::of(device)))
            .map(drop)
        {
            Ok(()) => {
                let gpu = driver::gpu_in_words(device);
                log::debug!("{gpu} checked for clean memory in {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
            }
            Err(failure) => log::debug!("{failure}: could not make the driver check for clean memory"),
        }
    }
    true
}
