//! The state when a request has failed, as far as its thread can find out at once, without waiting.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};
use vramctl_core::events::{Cause, FailedRequest};
use vramctl_core::memory::{Memory, Requester, unmanaged};
use vramctl_driver::{self as driver, CUdevice, Current, RelaxedCapture};
use vramctl_host::stack::{self, Stack};
use vramctl_host::{exit, worker};
use vramctl_model::{Bytes, OverLimit, gpu_in_words};

/// Whether the same thread is certain to retry: torch's allocator does, after emptying its cache.
pub fn is_tried_again(request: &FailedRequest) -> bool {
    !request.cause.is_resume() && (request.caller == 0 || request.library.starts_with("libc10_cuda"))
}

/// A device.
#[derive(Debug, Clone)]
pub struct DeviceRoom {
    pub device: CUdevice,
    pub uuid: Option<String>,
    /// In `nvidia-smi`; `None` if NVML was not asked or has not answered in time.
    pub index: Option<u32>,
    pub free: u64,
    pub total: u64,
}

/// Memory of one tag on the device.
#[derive(Debug, Clone, Copy, Default)]
pub struct TagShare {
    pub active: u64,
    pub paused: u64,
}

/// A block of memory on the device.
#[derive(Debug)]
pub struct Placed {
    pub bytes: u64,
    /// Its tag; `None` if it is left to CUDA.
    pub tag: Option<Arc<str>>,
    pub requester: Option<Requester>,
}

pub struct Scene {
    pub asked: FailedRequest,
    pub when: SystemTime,
    pub thread: u32,
    pub thread_name: String,
    pub stack: Stack,
    /// Unknown if the thread has no context.
    pub room: Option<DeviceRoom>,
    pub margin: u64,
    pub tags: BTreeMap<Arc<str>, TagShare>,
    pub unmanaged: BTreeMap<&'static str, u64>,
    /// All that is active.
    pub blocks: Vec<Placed>,
    /// Bytes that became free since the first attempt.
    pub freed_since: Option<u64>,
}

impl Scene {
    /// Records the current state. Makes no call that would invalidate a capture.
    pub fn now(asked: FailedRequest) -> Self {
        const FRAMES: usize = 48;
        let (thread, thread_name, stack) = (stack::thread_id(), stack::thread_name(), Stack::here(FRAMES, asked.caller));
        let room = room_on(asked.device);
        let device = room.as_ref().map(|room| room.device).or(asked.device);
        let is_there = |other: Option<CUdevice>| device.is_none() || other.is_none() || other == device;
        let (mut tags, mut unmanaged, mut blocks) = (BTreeMap::<_, TagShare>::new(), BTreeMap::new(), Vec::new());
        let memory = Memory::existing();
        for allocation in memory.map(|memory| memory.registry.all()).unwrap_or_default() {
            if allocation.is_on_host() || !is_there(Some(allocation.device)) {
                continue;
            }
            let bytes = allocation.bytes() as u64;
            // If the lock is taken, it is being mapped or unmapped, so it still exists.
            let is_active = allocation.try_contents().is_none_or(|contents| contents.state.is_active());
            let share = tags.entry(Arc::clone(&allocation.tag)).or_default();
            if is_active {
                share.active += bytes;
                blocks.push(Placed { bytes, tag: Some(Arc::clone(&allocation.tag)), requester: allocation.requester.get().cloned() });
            } else {
                share.paused += bytes;
            }
        }
        for block in unmanaged::blocks().into_iter().filter(|block| is_there(block.device)) {
            *unmanaged.entry(block.requester.library).or_default() += block.bytes;
            blocks.push(Placed { bytes: block.bytes, tag: None, requester: Some(block.requester) });
        }
        let margin = memory.map_or(0, Memory::margin);
        Self { asked, when: SystemTime::now(), thread, thread_name, stack, room, margin, tags, unmanaged, blocks, freed_since: None }
    }

    /// The same, seen from an earlier attempt.
    pub fn after(self, first: &Self) -> Self {
        let has = |scene: &Self| scene.blocks.iter().map(|block| block.bytes).sum::<u64>();
        Self { freed_since: Some(has(first).saturating_sub(has(&self))), ..self }
    }

    /// Has NVML asked for the GPU's index. Returns a function that waits for the answer for so long, and notes it. In a thread of its own:
    /// to start NVML may take longer than the failed call waits.
    pub fn ask_for_index(&self) -> impl FnOnce(&mut Self, Duration) + use<> {
        let (tell, told) = mpsc::channel();
        if let Some(uuid) = self.room.as_ref().and_then(|room| room.uuid.clone())
            && let Err(error) = worker::spawn("vramctl-gpu", move || _ = tell.send(exit::while_waiting(|| driver::index_of(&uuid))))
        {
            log::debug!("could not start a thread: {error}");
        }
        move |scene, within| {
            if let Some(room) = &mut scene.room {
                room.index = told.recv_timeout(within).ok().flatten();
            }
        }
    }

    /// The failure in one sentence.
    pub fn headline(&self) -> String {
        let FailedRequest { bytes, tag, library, cause, device, .. } = &self.asked;
        let tag = tag.as_ref().map_or_else(String::new, |tag| format!(" (tag {tag})"));
        let who = if cause.is_resume() { format!("a resume{tag} needs") } else { format!("{library} asked for") };
        let tag = if cause.is_resume() { String::new() } else { tag };
        let Some(DeviceRoom { device, uuid, index, free, total }) = &self.room else {
            let gpu = device.map_or_else(String::new, |device| format!(" on {}", driver::gpu_in_words(device)));
            return format!("out of memory: {who} {}{tag}{gpu}", Bytes(*bytes));
        };
        let gpu = gpu_in_words(*device, uuid.as_deref(), *index);
        if let Cause::Limit(OverLimit { limit, counted, .. }) = cause {
            let (limit, taken) = (Bytes(*limit), Bytes(*counted));
            return format!(
                "out of memory: {who} {}{tag} on {gpu}; this process's limit of {limit} refuses it: {taken} is taken",
                Bytes(*bytes)
            );
        }
        let short = match (bytes + if matches!(cause, Cause::Margin) { self.margin } else { 0 }).saturating_sub(*free) {
            0 => String::new(),
            short => format!(", {} short", Bytes(short)),
        };
        format!("out of memory: {who} {}{tag} on {gpu}; {} of {} is free{short}", Bytes(*bytes), Bytes(*free), Bytes(*total))
    }
}

/// How much is free on a device, or on the calling thread's.
fn room_on(device: Option<CUdevice>) -> Option<DeviceRoom> {
    let _relaxed = RelaxedCapture::enter();
    let own = Current::of_thread().ok().flatten();
    let current = match (own, device) {
        (Some(own), Some(device)) if own.device() == device => own,
        (Some(own), None) => own,
        (_, Some(device)) => Current::push(Current::primary_of(device).ok()??).ok()?,
        (None, None) => return None,
    };
    let (free, total) = driver::memory_info().ok()?;
    let device = current.device();
    Some(DeviceRoom { device, uuid: driver::uuid(device), index: None, free, total })
}
