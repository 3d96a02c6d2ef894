//! A resume: create, map and fill new memory, then let go of the backups.

use super::{Chosen, Clock, bytes_of_devices, cleaning, milliseconds, tags_text};
use crate::memory::{Allocation, Contents, Memory};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_backup::{self as backup, Saved};
use vramctl_driver::{self as driver, CUdevice, Current, Physical, RelaxedCapture};
use vramctl_model::{Error, Observer, Progress, Report, Shortage, Stage, TagState, TransitionRequest, code};

/// How often a resume that waits for memory looks for it.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Memory {
    /// Resumes: puts new memory at the addresses of paused allocations, and their contents into it. After an error
    /// everything is as it was.
    pub fn resume(&self, request: &TransitionRequest, observer: &mut dyn Observer) -> Result<Report, Error> {
        let started = Instant::now();
        loop {
            let attempt = self.try_resume(request, started, observer);
            let Err(Error::DeviceMemory(_)) = &attempt else {
                return attempt.inspect(|report| log::info!("resumed {}: {report}", tags_text(request)));
            };
            let left = request.timeout.unwrap_or_default().saturating_sub(started.elapsed());
            if left.is_zero() || observer.is_gone() == Some(true) {
                return attempt.map_err(with_holders);
            }
            // Without the lock: the program may free something.
            thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn try_resume(&self, request: &TransitionRequest, started: Instant, observer: &mut dyn Observer) -> Result<Report, Error> {
        let mut clock = Clock::default();
        let _exclusive = self.exclude();
        let _relaxed = RelaxedCapture::enter();
        driver::sweep();
        self.drop_gone();
        self.map_stranded(&self.choose(request)?.paused)?;
        let Chosen { paused, active: already, .. } = self.choose(request)?;
        clock.0.insert(Stage::Wait, milliseconds(started.elapsed()));
        let shown = self.show(TagState::Resuming, &paused);
        let mut progress = |now| {
            shown.progress(now);
            observer.progress(now);
        };
        let memories = self.bring_back(&paused, &mut clock, &mut progress)?;

        let mut report = Report { allocations: paused.len() as u64, unchanged: already.len() as u64, ..Report::default() };
        for (allocation, memory) in paused.iter().zip(memories) {
            let kept_bytes = allocation.contents().saved.as_ref().map_or(0, |saved| saved.kept_bytes());
            report.kept_bytes += kept_bytes;
            report.discarded_bytes += allocation.bytes() as u64 - kept_bytes;
            report.bytes += allocation.bytes() as u64;
            activate(allocation, memory);
        }
        report.late_bytes = driver::leftover_bytes();
        report.stages = clock.0;
        report.ms = milliseconds(started.elapsed());
        // Somebody else may have given it back just before.
        cleaning::expect(&bytes_of_devices(paused.iter().map(|allocation| &**allocation)));
        Ok(report)
    }

    /// Maps what a pause that failed has left unmapped: its memory is there, with the contents.
    fn map_stranded(&self, paused: &[Arc<Allocation>]) -> Result<(), Error> {
        for allocation in paused {
            let mut contents = allocation.contents();
            if let Some(memory) = &mut contents.memory {
                memory.map_again()?;
                self.open(allocation.device, [&*memory])?;
            }
        }
        Ok(())
    }

    /// New memory with the old contents at the addresses of all of them, or none. Contents are copied to memory that is
    /// mapped already while more is being mapped.
    fn bring_back(
        &self,
        paused: &[Arc<Allocation>],
        clock: &mut Clock,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<Physical>, Error> {
        let started = Instant::now();
        let needed = check_free(paused)?;
        let item = |allocation: &Arc<Allocation>| Some((allocation.extent(), allocation.contents().saved.clone()?));
        let saved: Vec<_> = paused.iter().filter_map(item).collect();
        let mut saved_next = saved.iter().peekable();
        let mut memories = Vec::with_capacity(paused.len());
        let brought = backup::restore(&saved, progress, |give| {
            let mut from = 0;
            for upto in batches(paused) {
                for allocation in &paused[from..upto] {
                    memories.push(create(allocation, needed[&allocation.device])?);
                }
                self.open(paused[from].device, &memories[from..upto])?;
                for allocation in &paused[from..upto] {
                    saved_next.next_if(|(next, _)| next.address == allocation.address()).into_iter().for_each(&mut *give);
                }
                from = upto;
            }
            clock.add(Stage::Map, started.elapsed());
            Ok(())
        });
        clock.add(Stage::Restore, started.elapsed());
        // After an error the new memory goes as it came; nothing is being copied to it any more.
        brought.map(|()| memories)
    }
}

/// New memory at the addresses of an allocation, not accessible yet. `needed`: by all of the resume.
fn create(allocation: &Allocation, needed: u64) -> Result<Physical, Error> {
    let mut memory = Physical::create(allocation.device, allocation.bytes())
        .map_err(|failure| if failure.code == code::OUT_OF_MEMORY { shortage(allocation, needed) } else { failure.into() })?;
    memory.map(allocation.addresses())?;
    Ok(memory)
}

/// A paused allocation has its memory and contents back.
fn activate(allocation: &Allocation, memory: Physical) {
    let saved = allocation.contents().saved.take();
    // What is in a file is slower to compare with than to write anew.
    let saved = saved.filter(|saved| backup::retains(&allocation.tag) && matches!(**saved, Saved::Host(_)));
    allocation.replace(Contents { memory: Some(memory), saved });
}

/// Where to stop mapping for a moment, make accessible what was mapped, and have it filled: neighbours on a device are
/// made accessible in one call, so a call for each would be a waste; so would it be to keep the copies waiting.
fn batches(allocations: &[Arc<Allocation>]) -> Vec<usize> {
    /// As many bytes as take longer to copy than the next ones take to map.
    const BATCH: usize = 256 << 20;
    let mut ends = Vec::new();
    let mut bytes = 0;
    for (at, allocation) in allocations.iter().enumerate() {
        // Where there is nothing to copy, nothing is kept waiting.
        bytes += if allocation.contents().saved.is_some() { allocation.bytes() } else { 0 };
        let last = allocations.get(at + 1).is_none_or(|next| next.device != allocation.device);
        if bytes >= BATCH || last {
            ends.push(at + 1);
            bytes = 0;
        }
    }
    ends
}

/// The bytes needed on each device, if they are free.
fn check_free(paused: &[Arc<Allocation>]) -> Result<BTreeMap<CUdevice, u64>, Error> {
    let all_needed = bytes_of_devices(paused.iter().map(|allocation| &**allocation));
    for (&device, &needed) in &all_needed {
        let on_device = paused.iter().find(|allocation| allocation.device == device);
        let Some(allocation) = on_device else { continue };
        let _current = Current::push(allocation.context())?;
        if needed > driver::memory_info()?.0 {
            return Err(shortage(allocation, needed));
        }
    }
    Ok(all_needed)
}

/// How much is missing now. Between the look and the taking, somebody may have been faster.
fn shortage(allocation: &Allocation, needed: u64) -> Error {
    let free = Current::push(allocation.context()).and_then(|_current| driver::memory_info()).map_or(0, |(free, _)| free);
    Error::DeviceMemory(Shortage { device: allocation.device, uuid: None, needed, free, holders: Vec::new() })
}

fn with_holders(error: Error) -> Error {
    match error {
        Error::DeviceMemory(shortage) => {
            let (uuid, holders) = (driver::uuid(shortage.device), driver::holders(shortage.device));
            Error::DeviceMemory(Shortage { uuid, holders, ..shortage })
        }
        other => other,
    }
}
