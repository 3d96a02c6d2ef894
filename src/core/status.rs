//! The status of this process, by tag and by device.

use crate::memory::{Memory, PausedBy, Released, State, UnderWay, borrow, communicators, limited, unmanaged};
use crate::suspend::saved_status;
use crate::transition::passing_by;
use crate::{contexts, events, gate, holder};
use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Backup};
use vramctl_driver::{self as driver, Account, CUdevice};
use vramctl_host::{PerProcess, Unpoison, worker};
use vramctl_model::{DeviceStatus, Error, Status, TagState, TagStatus};

/// Rounds of asking the driver: one thread at a time asks, and its answer is for all who have asked before it began.
#[derive(Default)]
struct StatusRounds {
    state: Mutex<StatusRound>,
    changed: Condvar,
}

/// The round that has begun last.
#[derive(Default)]
struct StatusRound {
    begun: u64,
    since: Option<Instant>,
    /// Equal to `begun` while nobody asks.
    done: u64,
    /// The answer of the last round that is done; `None` if that has failed.
    answer: Option<Arc<Status>>,
}

/// The current status, for a client. The driver may take for ever: it blocks while somebody else has locked the process. So clients wait at
/// most this long, and once a round has taken that long, only for a moment: they must not use up the connections.
pub fn ask(within: Duration) -> Result<Status, Error> {
    /// Enough for a round, once the driver answers again.
    const A_MOMENT: Duration = Duration::from_millis(100);
    static ROUNDS: PerProcess<StatusRounds> = PerProcess::new(StatusRounds::default);
    if let Some(status) = saved_status() {
        return Ok(status);
    }
    let (rounds, now) = (ROUNDS.get(), Instant::now());
    let mut round = rounds.state.lock().unpoisoned();
    // A round that has begun before may have seen what has changed since.
    let wanted = round.begun + 1;
    let asked_since = round.since.filter(|_| round.begun > round.done).unwrap_or(now);
    let deadline = (asked_since + within).max(now + A_MOMENT);
    while round.done < wanted {
        if round.begun == round.done {
            round.begun += 1;
            round.since = Some(Instant::now());
            if worker::spawn("vramctl-status", || rounds.ask_driver()).is_err() {
                // At a limit of threads or memory, this thread asks.
                drop(round);
                rounds.ask_driver();
                round = rounds.state.lock().unpoisoned();
                continue;
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let silent_for = round.since.map_or(within, |since| since.elapsed());
            return Err(Error::Late(format!(
                "no answer from the driver for {} ms; has another tool locked the process?",
                silent_for.as_millis()
            )));
        }
        round = rounds.changed.wait_timeout(round, left).unpoisoned().0;
    }
    let answer = round.answer.clone().ok_or_else(|| Error::Internal("the status panicked".into()))?;
    drop(round);
    Ok((*answer).clone())
}

impl StatusRounds {
    fn ask_driver(&self) {
        let answer = panic::catch_unwind(AssertUnwindSafe(|| Memory::get().status())).ok();
        let mut round = self.state.lock().unpoisoned();
        round.answer = answer.map(Arc::new);
        round.done = round.begun;
        drop(round);
        self.changed.notify_all();
    }
}

impl Memory {
    /// The current status, queried from the driver.
    pub(crate) fn status_now(&self) -> Status {
        let under_way = self.under_way().clone();
        let (tags, devices) = self.tags_and_devices();
        events::complete(Status {
            held: gate::is_held(),
            standing: holder::standing(),
            waiting_threads: gate::waiting(),
            idle_ms: (!gate::is_held()).then(|| u64::try_from(gate::idle_for().as_millis()).unwrap_or(u64::MAX)),
            suspended: None,
            obstacles: self.obstacles(),
            refusals: self.refusals.now(),
            passing_by: passing_by(),
            process_tag: self.process_tag().map(|tag| tag.to_string()),
            tags: tags.into_iter().map(|(name, tag)| complete(name, tag, under_way.as_ref())).collect(),
            devices: devices.into_values().map(with_room).collect(),
            borrowed: borrow::status(),
            communicators: communicators::list(),
            host: backup::status(),
            late_bytes: driver::leftover_bytes(),
            unmanaged: unmanaged::status(),
            cache: Vec::new(),
            // The subscriber counts these.
            growing: Vec::new(),
            cycles: Vec::new(),
            totals: BTreeMap::new(),
        })
    }

    /// What is allocated, by tag and by device.
    fn tags_and_devices(&self) -> (BTreeMap<String, TagStatus>, BTreeMap<CUdevice, DeviceStatus>) {
        let mut tags = BTreeMap::<String, TagStatus>::new();
        let mut devices = BTreeMap::<CUdevice, DeviceStatus>::new();
        for allocation in &self.registry.snapshot() {
            let bytes = allocation.bytes() as u64;
            let (paused_by, host_bytes, disk_bytes) = {
                let contents = allocation.contents();
                let paused_by = match &contents.state {
                    State::Active(_) | State::Unmapped(..) => None,
                    State::Stranded(_, by) | State::Released(Released { by, .. }) => Some(*by),
                    State::Freed => continue,
                };
                match contents.state.backup().map(|saved| &**saved) {
                    Some(saved @ Backup::Host(_)) => (paused_by, saved.kept_bytes(), 0),
                    Some(Backup::Disk(_)) => (paused_by, 0, bytes),
                    Some(saved @ Backup::Stored(_)) => (paused_by, 0, saved.kept_bytes()),
                    None => (paused_by, 0, 0),
                }
            };
            let paused_bytes = if paused_by.is_some() { bytes } else { 0 };
            let self_paused_bytes = if paused_by.is_some_and(PausedBy::is_self_paused) { bytes } else { 0 };
            let away_bytes = if paused_by == Some(PausedBy::SCHEDULER) { bytes } else { 0 };
            let tag = tags.entry(allocation.tag.to_string()).or_default();
            tag.allocations += 1;
            tag.bytes += bytes;
            tag.paused_bytes += paused_bytes;
            tag.self_paused_bytes += self_paused_bytes;
            tag.both_paused_bytes += if paused_by.is_some_and(|by| by.is_self_paused() && by.is_held()) { bytes } else { 0 };
            tag.away_bytes += away_bytes;
            tag.host_bytes += host_bytes;
            tag.disk_bytes += disk_bytes;
            *tag.backup.entry(allocation.backup).or_default() += bytes;
            let Some(ordinal) = allocation.on_device() else { continue };
            let device = devices.entry(ordinal).or_insert_with(|| DeviceStatus { device: ordinal, ..DeviceStatus::default() });
            device.active_bytes += bytes - paused_bytes;
            device.paused_bytes += paused_bytes;
            device.self_paused_bytes += self_paused_bytes;
            device.away_bytes += away_bytes;
        }
        for (Account { device: ordinal, label }, bytes) in driver::device_memory() {
            let device = devices.entry(ordinal).or_insert_with(|| DeviceStatus { device: ordinal, ..DeviceStatus::default() });
            match label {
                Some(tag) => _ = device.tags.insert(tag.to_string(), bytes),
                None => device.guard_bytes = bytes,
            }
        }
        let limits = limited::all_taken().into_iter().filter_map(|taken| Some((taken.device, taken.limit?, taken.counted)));
        for (ordinal, limit, counted) in limits {
            let device = devices.entry(ordinal).or_insert_with(|| DeviceStatus { device: ordinal, ..DeviceStatus::default() });
            (device.limit_bytes, device.counted_bytes) = (Some(limit), counted);
        }
        (tags, devices)
    }
}

/// Adds a tag's name and state.
fn complete(name: String, tag: TagStatus, under_way: Option<&UnderWay>) -> TagStatus {
    let at_rest = match tag.paused_bytes {
        0 => TagState::Active,
        paused if paused == tag.bytes => TagState::Paused,
        _ => TagState::Mixed,
    };
    let (state, progress) = under_way.and_then(|it| it.of(&name)).unwrap_or((at_rest, None));
    TagStatus { retained: backup::retains(&name), tag: name, state, progress, ..tag }
}

/// Adds what the driver says of the device.
fn with_room(device: DeviceStatus) -> DeviceStatus {
    let info = contexts::memory_info(device.device);
    let uuid = driver::uuid(device.device);
    DeviceStatus { uuid, free_bytes: info.map(|(free, _)| free), total_bytes: info.map(|(_, total)| total), ..device }
}
