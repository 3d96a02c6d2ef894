//! Asks the other processes with the library on a GPU, over their sockets. Processes that do not answer soon are left out.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vramctl_control::discovery::Directory;
use vramctl_control::protocol::{self, ProcessStatus, Reply, Request};
use vramctl_host::Held;

/// The time limit for all of them together.
const WITHIN: Duration = Duration::from_millis(150);

/// The longest answer.
const LONGEST: u64 = 4 << 20;

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
        let Reply::Status(status) = answer(&mut answers, deadline)? else { return None };
        let cache = if status.process.trims { answer(&mut answers, deadline) } else { None };
        let one = of_status(&status, uuid);
        match cache {
            Some(Reply::Cache { cache }) => {
                let on_it = cache.iter().filter(|part| part.gpu.as_deref() == Some(uuid));
                Some(Neighbour { cached: on_it.map(|part| part.cached_bytes).sum(), ..one })
            }
            _ => Some(one),
        }
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

fn answer(answers: &mut BufReader<&UnixStream>, deadline: Instant) -> Option<Reply> {
    // At least a moment: zero would mean without limit.
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    answers.get_ref().set_read_timeout(Some(left)).ok()?;
    let mut line = Vec::new();
    answers.take(LONGEST).read_until(b'\n', &mut line).ok()?;
    serde_json::from_slice(&line).ok()
}

fn of_status(status: &ProcessStatus, uuid: &str) -> Neighbour {
    let on_it = status.memory.devices.iter().filter(|device| device.uuid.as_deref() == Some(uuid));
    let mut tags = BTreeMap::new();
    // A suspended process has nothing on any GPU.
    if status.memory.suspended.is_none() {
        for (tag, bytes) in on_it.flat_map(|device| &device.tags) {
            *tags.entry(tag.clone()).or_default() += bytes;
        }
    }
    let unmanaged =
        if status.memory.suspended.is_none() { status.memory.unmanaged.iter().filter_map(|left| left.gpus.get(uuid)).sum() } else { 0 };
    Neighbour { pid: status.process.pid, name: status.process.name.clone(), tags, unmanaged, cached: 0 }
}
