//! The driver takes note of what it has cleaned, before anybody waits for that.
//!
//! Memory that is given back is cleaned in the background (96 GiB in 0.3 s on an H200). But the driver looks at what is clean
//! only when it is next asked for memory or given some, and whoever that is waits for the look: 0.2 ms for each GiB, so that
//! a pause or resume of 64 GiB takes 10 to 20 ms longer than its own calls do (`docs/performance.md`). So some time after
//! each large one a thread of ours takes a little memory and gives it back. Then it ends: nothing wakes up in a process that
//! is left alone.

use crate::driver::{self, CUdevice, RelaxedCapture};
use crate::process::{self, PerProcess};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// Device memory that is to be free, or the driver is not made to look: far more than it takes, in bytes.
pub const SPARE: u64 = 64 << 20;

/// By then the driver has cleaned what a large device has, and some more time is left.
const CLEANED_AFTER: Duration = Duration::from_millis(400);

struct Cleaning {
    state: Mutex<State>,
    changed: Condvar,
    /// What takes less than 0.2 ms to look at is not worth a thread, in bytes of a device.
    worth_it: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Where memory was given back.
    devices: BTreeSet<CUdevice>,
    /// When to look; there is a thread that waits for it.
    due: Option<Instant>,
    /// Whether the thread is in the driver.
    looking: bool,
    /// The program ends: the driver must not be called any more.
    ended: bool,
}

static CLEANING: PerProcess<Cleaning> =
    PerProcess::new(|| Cleaning { state: Mutex::default(), changed: Condvar::new(), worth_it: AtomicU64::new(1 << 30) });

/// So many bytes of devices were given back or taken just now.
pub fn expect(bytes: impl Iterator<Item = (CUdevice, u64)>) {
    let cleaning = CLEANING.get();
    let worth_it = cleaning.worth_it.load(Ordering::Relaxed);
    let mut state = cleaning.lock();
    state.devices.extend(bytes.filter(|(_, bytes)| *bytes >= worth_it).map(|(device, _)| device));
    if state.devices.is_empty() || state.due.replace(Instant::now() + CLEANED_AFTER).is_some() {
        return;
    }
    drop(state);
    end_with_the_program();
    if let Err(error) = process::spawn("vramctl-clean", || cleaning.look_when_due()) {
        log::debug!("no thread could be started: {error}");
        cleaning.lock().due = None;
    }
}

/// Waits until the driver has been made to look. For tests.
pub fn settle() {
    let cleaning = CLEANING.get();
    drop(cleaning.changed.wait_while(cleaning.lock(), |state| state.due.is_some()).unwrap_or_else(PoisonError::into_inner));
}

/// From how many bytes of a device on the driver is made to look; `None`: as measured. For tests.
pub fn set_worth_it(bytes: Option<u64>) {
    CLEANING.get().worth_it.store(bytes.unwrap_or(1 << 30), Ordering::Relaxed);
}

impl Cleaning {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_when_due(&self) {
        let mut state = self.lock();
        while let Some(due) = state.due {
            let left = due.saturating_duration_since(Instant::now());
            if state.ended || state.devices.is_empty() {
                state.due = None;
            } else if left.is_zero() {
                let devices = std::mem::take(&mut state.devices);
                state.looking = true;
                drop(state);
                look(&devices);
                state = self.lock();
                state.looking = false;
                self.changed.notify_all();
            } else {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        self.changed.notify_all();
    }
}

fn look(devices: &BTreeSet<CUdevice>) {
    let _relaxed = RelaxedCapture::enter();
    for &device in devices {
        let started = Instant::now();
        match driver::granularity(device).and_then(|bytes| driver::Memory::create(device, bytes)) {
            Ok(memory) => drop(memory),
            // A device without so little memory has nothing clean to look at.
            Err(failure) => log::debug!("{failure}: nothing was looked at"),
        }
        log::debug!("device {device} has taken note of what it has cleaned, in {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    }
}

/// The driver must not be called while it is taken down, nor be taken down under a thread that is in it.
fn end_with_the_program() {
    extern "C" fn end() {
        /// Far more than a look takes.
        const LONGEST: Duration = Duration::from_secs(5);
        if let Some(cleaning) = CLEANING.existing() {
            let mut state = cleaning.lock();
            state.ended = true;
            drop(cleaning.changed.wait_timeout_while(state, LONGEST, |state| state.looking).unwrap_or_else(PoisonError::into_inner));
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| process::at_exit(end));
}
