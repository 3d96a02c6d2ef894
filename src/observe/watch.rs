//! The watch (`VRAMCTL_WATCH`, `vramctl watch`): when little of a device is free, logs once who uses the memory and, if requested, has the
//! program's own allocator return what it has cached.
//!
//! One process per GPU asks the driver every 50 ms and shares the answer (`control/gauge.rs`). In between, each process tracks its own
//! allocations (`watermark`). It logs only if the driver confirms the shortage.

use crate::allowance::Allowance;
use crate::watermark::{Watermark, level};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::gauge::Gauge;
use vramctl_core::memory::{Memory, unmanaged};
use vramctl_core::{cache, contexts};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::{PerProcess, exit, worker};
use vramctl_model::{Bytes, Error, unmanaged_of};

/// How often the driver is asked for a device.
const EVERY: Duration = Duration::from_millis(50);
/// An answer older than this is not used: the asking process is stopped, or suspended.
const STALE: Duration = Duration::from_millis(250);
/// By how much, at least, free memory must recover above the level before the next fall is logged.
const REARM: u64 = 64 << 20;
/// How long the program's allocator may take to report what it has cached, and to return it.
const ASK_WITHIN: Duration = Duration::from_millis(200);
const TRIM_WITHIN: Duration = Duration::from_secs(10);

static RUNS: PerProcess<AtomicBool> = PerProcess::new(AtomicBool::default);

/// Starts the watch if a level is set.
pub fn ensure_running() {
    let level = level();
    if level.below() != 0
        && !RUNS.get().swap(true, Ordering::SeqCst)
        && let Err(error) = worker::spawn("vramctl-watch", || watch(level))
    {
        log::warn!("no watch: could not start a thread: {error}");
    }
}

/// Sets the level: watch for less than `below` free bytes; 0 stops the watch.
pub fn set(below: u64, trims: bool) {
    level().set(below, trims);
    // A thread that starts before CUDA is in use would outlive the driver at the program's end. The first allocation starts it.
    if !contexts::devices().is_empty() {
        ensure_running();
    }
}

/// The level, and whether cached memory is returned.
pub fn get() -> (u64, bool) {
    (level().below(), level().trims())
}

/// A device that is watched.
struct Watched {
    gauge: Option<Gauge>,
    is_low: bool,
    /// Limits how often: a program that crosses the level at every step would be slowed by a trim at each.
    allowance: Allowance,
}

impl Default for Watched {
    fn default() -> Self {
        Self { gauge: None, is_low: false, allowance: Allowance::full(Instant::now()) }
    }
}

fn watch(level: &'static Watermark) {
    let (mut devices, mut times) = (BTreeMap::<CUdevice, Watched>::new(), exit::quiesced_times());
    level.wake_this_thread();
    loop {
        if level.below() == 0 {
            devices.clear();
            thread::park();
        } else {
            thread::park_timeout(EVERY);
        }
        if exit::is_ending() {
            return;
        }
        // While this process is quiesced, another one asks. Afterwards, a device may be another GPU. The whole look is one entry: a thread
        // that waits within it would keep others from asking.
        let inside = exit::enter_driver_at_once();
        let Some(_inside) = inside.filter(|_| times == exit::quiesced_times()) else {
            times = exit::quiesced_times();
            devices.clear();
            continue;
        };
        let there = contexts::devices();
        devices.retain(|device, _| there.contains(device));
        for device in there {
            devices.entry(device).or_default().look(level, device);
        }
    }
}

impl Watched {
    fn look(&mut self, level: &'static Watermark, device: CUdevice) {
        let below = level.below();
        if self.gauge.is_none() {
            self.gauge = driver::uuid(device).and_then(|uuid| Gauge::open(&uuid).ok());
        }
        let known = self.gauge.as_ref().filter(|gauge| !gauge.is_ours()).and_then(|gauge| gauge.read(STALE));
        let may_be_low = |free: u64| free < below || level.free(device).is_some_and(|free| free < below);
        // Own allocations may have been counted twice, or freed again.
        let enough = known.filter(|free| self.is_low || !may_be_low(*free));
        let Some(free) = enough.or_else(|| contexts::memory_info(device).map(|(free, _)| free)) else {
            // Give up the gauge: another process may be able to ask.
            self.gauge = None;
            return;
        };
        if let (None, Some(gauge)) = (known, &self.gauge)
            && gauge.write(free).is_err()
        {
            self.gauge = None;
        }
        level.note_sample(device, free);
        // During a pause or resume, it is not clear whose memory is moving. A later sample will do.
        if !Memory::get().is_in_transition() && self.note_sample(free, below, Instant::now()) {
            // In its own thread: the program's allocator may take longer than until the next sample.
            if let Err(error) = worker::spawn("vramctl-low", move || report_fall(level, device, free)) {
                log::debug!("could not start a thread: {error}");
            }
        }
    }

    /// Records a sample. Returns whether it is a fall that is to be logged.
    fn note_sample(&mut self, free: u64, below: u64, now: Instant) -> bool {
        if free >= below.saturating_add((below / 10).max(REARM)) {
            self.is_low = false;
        }
        let is_news = free < below && !self.is_low && self.allowance.take(now);
        // A fall that may not be logged yet is news as long as it lasts.
        self.is_low |= is_news;
        is_news
    }
}

/// Logs who uses a device with so little free memory, and returns what is cached.
fn report_fall(level: &Watermark, device: CUdevice, free: u64) {
    let Some(inside) = exit::enter_driver_at_once() else { return };
    let Some((_, total)) = contexts::memory_info(device) else { return };
    let uuid = driver::uuid(device);
    drop(inside);
    let (mut own, mut whose) = (0, Vec::new());
    let mut tags = BTreeMap::<_, u64>::new();
    for allocation in
        Memory::get().registry.snapshot().iter().filter(|allocation| allocation.on_device() == Some(device) && !allocation.is_unmapped())
    {
        *tags.entry(allocation.tag.to_string()).or_default() += allocation.bytes() as u64;
    }
    whose.extend(tags);
    let left = unmanaged::status().into_iter();
    whose.extend(left.filter_map(|left| Some((unmanaged_of(&left.owner), *left.gpus.get(uuid.as_ref()?)?))));
    whose.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let mut text =
        format!("{} of {} is free on {}, less than {}.", Bytes(free), Bytes(total), driver::gpu_with_index(device), Bytes(level.below()));
    for (what, bytes) in &whose {
        own += bytes;
        let _ = write!(text, " {what}: {};", Bytes(*bytes));
    }
    let rest = total.saturating_sub(free).saturating_sub(own);
    let _ = write!(text, " the driver and other processes: {}.", Bytes(rest));
    if let Ok(parts) = cache::ask(ASK_WITHIN) {
        let parts = parts.iter().filter(|part| part.gpu.is_none() || part.gpu == uuid);
        let (cached, stuck) = parts.fold((0, 0), |(cached, stuck), part| (cached + part.cached_bytes, stuck + part.fragmented_bytes));
        let _ = write!(
            text,
            " The program's allocator has {} cached (`vramctl trim`) and {} free in partly used segments.",
            Bytes(cached),
            Bytes(stuck)
        );
    }
    log::warn!("{text} `vramctl gpus` shows who uses the rest");
    if level.trims() && cache::is_served() {
        match cache::trim(TRIM_WITHIN) {
            Ok(done) => log::warn!("the program's allocator has returned {} in {:.0} ms", Bytes(done.returned_bytes), done.ms),
            Err(Error::Ending) => (),
            Err(error) => log::warn!("nothing could be returned: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fall_is_logged_once_and_repeated_falls_are_limited() {
        const BELOW: u64 = 1 << 30;
        let (low, high, now) = (BELOW - 1, BELOW + (BELOW / 10), Instant::now());
        let mut watched = Watched { allowance: Allowance::full(now), ..Watched::default() };
        let mut warnings = |samples: &[u64], after| {
            let at = now + Duration::from_secs(after);
            samples.iter().filter(|free| watched.note_sample(**free, BELOW, at)).count()
        };
        assert_eq!(warnings(&[high, low, low, BELOW, low, high - 1, low], 0), 1);
        assert_eq!(warnings(&[high, low].repeat(100), 1), 2);
        assert_eq!(warnings(&[high, low].repeat(100), 30), 3);
        assert_eq!((warnings(&[high, low, low], 39), warnings(&[low, low], 40)), (0, 1), "one that lasts is logged as soon as it may be");
    }
}
