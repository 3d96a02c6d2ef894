//! Asks the other processes with the library on a GPU, over their sockets. Processes that do not answer soon are left out.

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, Request};
use vramctl_host::Held;

/// The time limit for all of them together.
const WITHIN: Duration = Duration::from_millis(150);

/// The longest answer.
const LONGEST: u64 = 4 << 20;

/// What is read of a process's status. Only that: the code to read all of it is large, and this library is in every process of a job.
#[derive(Deserialize)]
struct PeerStatus {
    pid: u32,
    name: String,
    #[serde(default)]
    trims: bool,
    suspended: Option<IgnoredAny>,
    devices: Vec<PeerDevice>,
    #[serde(default)]
    unmanaged: Vec<PeerUnmanaged>,
}

#[derive(Deserialize)]
struct PeerDevice {
    uuid: Option<String>,
    #[serde(default)]
    tags: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct PeerUnmanaged {
    #[serde(default)]
    gpus: BTreeMap<String, u64>,
}

/// The same of what its allocator has cached.
#[derive(Deserialize)]
struct PeerCache {
    cache: Vec<PeerCached>,
}

#[derive(Deserialize)]
struct PeerCached {
    gpu: Option<String>,
    cached_bytes: u64,
}

/// What another process has on a GPU.
#[derive(Debug)]
pub struct Neighbour {
    pub pid: u32,
    pub name: String,
    /// Active memory, by tag.
    pub tags: BTreeMap<String, u64>,
    /// Unmanaged memory.
    pub unmanaged: u64,
    /// What its own allocator, such as torch's, could return.
    pub cached: u64,
}

impl Neighbour {
    pub fn active(&self) -> u64 {
        self.tags.values().sum()
    }
}

/// The processes with memory on this GPU.
pub fn on_gpu(uuid: &str) -> Vec<Neighbour> {
    let deadline = Instant::now() + WITHIN;
    let Ok(Some(directory)) = Directory::open() else { return Vec::new() };
    let pids = directory.processes().unwrap_or_default().into_iter().filter(|pid| *pid != std::process::id());
    // All are asked before the first answer is read.
    let asked: Vec<_> = pids.filter_map(|pid| ask(&directory, pid)).collect();
    let answers = asked.into_iter().filter_map(|stream| {
        let stream = stream.as_type::<UnixStream>().ok()?;
        let mut answers = BufReader::new(&*stream);
        let status: PeerStatus = answer(&mut answers, deadline)?;
        let cache: Option<PeerCache> = if status.trims { answer(&mut answers, deadline) } else { None };
        let on_it = cache.into_iter().flat_map(|known| known.cache).filter(|part| part.gpu.as_deref() == Some(uuid));
        Some(Neighbour { cached: on_it.map(|part| part.cached_bytes).sum(), ..of_status(status, uuid) })
    });
    answers.filter(|one| one.active() + one.unmanaged > 0).collect()
}

/// Returns a [`Held`] because another thread may fork meanwhile: a child that kept the connection would keep the other process waiting.
fn ask(directory: &Directory, pid: u32) -> Option<Held> {
    let held = Held::new(directory.connect(pid).ok()?).ok()?;
    let mut stream = held.as_type::<UnixStream>().ok()?;
    stream.set_write_timeout(Some(Duration::from_millis(10))).ok()?;
    for request in [Request::Status, Request::Cache] {
        stream.write_all(&protocol::request_line(request)).ok()?;
    }
    Some(held)
}

fn answer<T: DeserializeOwned>(answers: &mut BufReader<&UnixStream>, deadline: Instant) -> Option<T> {
    // At least a moment: zero would mean without limit.
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    answers.get_ref().set_read_timeout(Some(left)).ok()?;
    let mut line = Vec::new();
    answers.take(LONGEST).read_until(b'\n', &mut line).ok()?;
    serde_json::from_slice(&line).ok()
}

fn of_status(status: PeerStatus, uuid: &str) -> Neighbour {
    let (mut tags, mut unmanaged) = (BTreeMap::new(), 0);
    // A suspended process has nothing on any GPU.
    if status.suspended.is_none() {
        let on_it = status.devices.into_iter().filter(|device| device.uuid.as_deref() == Some(uuid));
        for (tag, bytes) in on_it.flat_map(|device| device.tags) {
            *tags.entry(tag).or_default() += bytes;
        }
        unmanaged = status.unmanaged.iter().filter_map(|left| left.gpus.get(uuid)).sum();
    }
    Neighbour { pid: status.pid, name: status.name, tags, unmanaged, cached: 0 }
}
