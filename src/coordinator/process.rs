//! A managed process, as it was found.

use crate::failure::{Choice, CommandError};
use crate::text;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt;
use vramctl_control::address::hidden;
use vramctl_control::protocol::ProcessStatus;
use vramctl_model::{Borrowed, Bytes, GpuUse, TagState, TagStatus};

/// A managed process, with its status or the reason why there is none.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its id, as seen from here.
    pub pid: u32,
    /// `None` if it does not answer, and neither its socket nor its environment has a name.
    pub name: Option<String>,
    /// Its answer.
    pub status: Result<ProcessStatus, CommandError>,
}

impl Process {
    /// Its name, if it is known.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The job that it belongs to.
    pub fn job(&self) -> Option<&str> {
        self.status.as_ref().ok()?.process.job.as_deref()
    }

    /// The `vramctl run` that started it.
    pub fn run(&self) -> Option<&str> {
        self.status.as_ref().ok()?.process.run.as_deref()
    }

    /// Which process it is, for a user who must distinguish it from others of its name.
    pub fn in_words(&self) -> String {
        let Ok(status) = &self.status else { return format!("pid {}, which does not answer", self.pid) };
        let since = status.process.age_s.map_or_else(String::new, |age| format!(", running for {}", text::age(age)));
        let state = self.standing();
        format!("pid {}{since}, {state}: {}", self.pid, text::one_line(&status.process.program))
    }

    /// Its job in words, or the process itself if it has none.
    pub fn job_or_itself(&self) -> String {
        self.job().map_or_else(|| self.to_string(), |job| format!("job {job}"))
    }

    /// The processes that its job had when it was last paused or resumed.
    pub fn ranks(&self) -> &[u32] {
        self.status.as_ref().map_or(&[], |status| &status.process.ranks)
    }

    /// Whether it is held until everything is resumed.
    pub fn is_held(&self) -> bool {
        self.status.as_ref().is_ok_and(|status| status.memory.held)
    }

    /// Whether it shares its GPUs with others by itself.
    pub fn shares(&self) -> bool {
        self.status.as_ref().is_ok_and(|status| status.process.shares)
    }

    /// Managed bytes that are not paused.
    pub fn active_bytes(&self) -> u64 {
        self.tags().iter().map(|tag| tag.bytes.saturating_sub(tag.paused_bytes)).sum()
    }

    /// Whether it has managed memory.
    pub fn has_memory(&self) -> bool {
        !self.tags().is_empty()
    }

    /// The UUIDs of the GPUs on which it has memory.
    pub fn gpus(&self) -> impl Iterator<Item = &str> {
        let devices = self.status.as_ref().map_or(&[][..], |status| &status.memory.devices);
        devices.iter().filter_map(|device| device.uuid.as_deref())
    }

    /// Whether it has memory on the GPU, or has memory of others open there.
    pub(crate) fn uses(&self, gpu: &str) -> bool {
        let borrowed = self.status.as_ref().map_or(&[][..], |status| &status.memory.borrowed);
        self.gpus().any(|its| its == gpu) || borrowed.iter().any(|its| its.gpu.as_deref() == Some(gpu))
    }

    /// While it is suspended: the GPUs that it sees, and what a restore needs there.
    pub fn suspended(&self) -> Option<&[GpuUse]> {
        self.status.as_ref().ok()?.memory.suspended.as_deref()
    }

    /// Why it stays held after its resume, and what to do about it.
    pub fn stays_held(&self, Borrowed { owner, paused_bytes, .. }: &Borrowed) -> String {
        format!(
            "{self} stays held: {} that it has opened from process {owner} is still paused. `vramctl resume --pid {owner}` brings it back \
             (if that is stopped: kill -CONT {owner}), and this one continues by itself",
            Bytes(*paused_bytes)
        )
    }

    /// What it has lost, and what to do about it.
    pub fn has_lost(&self, Borrowed { owner, bytes, .. }: &Borrowed) -> String {
        format!(
            "{self} has lost {} that it had opened from process {owner}, which has ended, or has freed it while it was paused: {self} runs on \
             without it, and fails when it uses it. End it and start it again",
            Bytes(*bytes)
        )
    }

    /// As a row of a list to choose from.
    pub(crate) fn as_choice(&self) -> Choice {
        let bytes = || Bytes(self.tags().iter().map(|tag| tag.bytes).sum()).to_string();
        let (state, bytes) = if self.status.is_ok() { (self.state(), bytes()) } else { ("?".into(), "?".into()) };
        let command = self.status.as_ref().map_or_else(|_| String::new(), |status| status.process.program.clone());
        Choice { pid: self.pid, name: self.name().unwrap_or("?").to_owned(), state, bytes, command }
    }

    /// The states of its tags.
    pub fn tags(&self) -> &[TagStatus] {
        self.status.as_ref().map_or(&[], |status| &status.memory.tags)
    }

    /// The processes whose paused memory it has open: it is held until they are resumed.
    pub fn waits_for(&self) -> BTreeSet<u32> {
        let borrowed = self.status.as_ref().map_or(&[][..], |status| &status.memory.borrowed);
        borrowed.iter().filter(|its| its.paused_bytes > 0).map(|its| its.owner).collect()
    }

    /// The state over all tags, as text, and whether the driver refuses memory that could be paused.
    pub fn state(&self) -> String {
        let is_refused = self.status.as_ref().is_ok_and(|status| !status.memory.refusals.is_empty());
        self.state_of_tags() + if is_refused { ", refused by the driver" } else { "" }
    }

    /// The same, and whether the program stands still because of others.
    pub fn standing(&self) -> String {
        let state = self.state();
        let says_so = ["suspended", "away", "waits for"].iter().any(|word| state.starts_with(word));
        if self.is_held() && !says_so { format!("held, {state}") } else { state }
    }

    /// Where the contents of its paused memory are, and what a suspend has taken off the GPUs.
    pub fn away(&self) -> Away {
        let taken = self.suspended().into_iter().flatten().map(|gpu| gpu.bytes).sum();
        self.tags().iter().filter(|tag| tag.paused_bytes > 0).fold(Away { host: taken, ..Away::default() }, |away, tag| {
            let disk = tag.disk_bytes.min(tag.paused_bytes);
            let host = tag.host_bytes.min(tag.paused_bytes - disk);
            Away { host: away.host + host, disk: away.disk + disk, dropped: away.dropped + tag.paused_bytes - disk - host }
        })
    }

    /// If the tags differ, lists those that are not active.
    fn state_of_tags(&self) -> String {
        if self.suspended().is_some() {
            return "suspended".into();
        }
        let tags = self.tags();
        let owners = self.waits_for();
        if !owners.is_empty() && tags.iter().all(|tag| tag.paused_bytes == tag.self_paused_bytes) {
            let owners: Vec<_> = owners.iter().map(ToString::to_string).collect();
            return format!("waits for {}", owners.join(", "));
        }
        match tags {
            [] => "empty".into(),
            [first, rest @ ..]
                if first.state != TagState::Mixed && rest.iter().all(|tag| tag.state_in_words() == first.state_in_words()) =>
            {
                first.state_in_words().into()
            }
            _ => {
                let states = ["pausing", "resuming", "undoing", "paused", "paused by itself", "partly paused", "away", "partly away"];
                let part = |state| {
                    let names: Vec<_> = tags.iter().filter(|tag| tag.state_in_words() == state).map(|tag| tag.tag.as_str()).collect();
                    (!names.is_empty()).then(|| format!("{} {state}", names.join(", ")))
                };
                states.into_iter().filter_map(part).collect::<Vec<_>>().join("; ")
            }
        }
    }
}

/// Bytes that are not on the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Away {
    /// In host memory.
    pub host: u64,
    /// In files.
    pub disk: u64,
    /// Nowhere: zero after a resume.
    pub dropped: u64,
}

impl fmt::Display for Away {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [(self.host, "host"), (self.disk, "files"), (self.dropped, "dropped")];
        let parts: Vec<_> =
            parts.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, place)| format!("{} {place}", Bytes(*bytes))).collect();
        write!(out, "{}", parts.join(", "))
    }
}

/// For messages: `engine (pid 4711)`.
impl fmt::Display for Process {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let out_of_sight = hidden(self.pid).map_or_else(String::new, |pid| format!(": pid {pid} in a container out of sight"));
        match self.name() {
            Some(name) => write!(out, "{} (pid {}{out_of_sight})", text::one_line(name), self.pid),
            None => write!(out, "process {}{out_of_sight}", self.pid),
        }
    }
}

impl Serialize for Process {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.status {
            Ok(status) => status.serialize(serializer),
            Err(failure) => json!({ "pid": self.pid, "name": self.name, "error": failure }).serialize(serializer),
        }
    }
}

/// Made up, for tests.
#[cfg(any(test, feature = "test-support"))]
pub mod made_up {
    use super::{Process, ProcessStatus, TagState, TagStatus};
    use std::collections::{BTreeMap, BTreeSet};
    use vramctl_control::protocol::Hello;
    use vramctl_model::Status;

    /// A process with tags of one GiB each, in these states.
    pub fn process(pid: u32, name: &str, tags: &[(&str, TagState)]) -> Process {
        let hello = Hello {
            protocol: 1,
            library: "0".into(),
            pid,
            name: name.into(),
            program: name.into(),
            engine: None,
            job: None,
            run: None,
            age_s: None,
            ranks: Vec::new(),
            shares: false,
            trims: false,
            on_pause: None,
            on_resume: None,
        };
        let tag = |&(tag, state): &(&str, TagState)| {
            let paused_bytes = if state == TagState::Paused { 1 << 30 } else { 0 };
            TagStatus { tag: tag.into(), state, allocations: 1, bytes: 1 << 30, paused_bytes, ..TagStatus::default() }
        };
        let memory = Status {
            held: false,
            standing: None,
            waiting_threads: 0,
            idle_ms: None,
            suspended: None,
            obstacles: Vec::new(),
            communicators: BTreeSet::new(),
            process_tag: None,
            tags: tags.iter().map(tag).collect(),
            devices: Vec::new(),
            borrowed: Vec::new(),
            host: vramctl_model::HostStatus::default(),
            late_bytes: 0,
            refusals: Vec::new(),
            passing_by: Vec::new(),
            unmanaged: Vec::new(),
            cycles: Vec::new(),
            growing: Vec::new(),
            totals: BTreeMap::new(),
            cache: Vec::new(),
        };
        Process { pid, name: Some(name.into()), status: Ok(ProcessStatus { process: hello, memory }) }
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::process;
    use super::*;

    #[test]
    fn the_state_of_a_process_is_that_of_its_tags() {
        use TagState::{Active, Mixed, Paused, Pausing};
        assert_eq!(process(1, "a", &[]).state(), "empty");
        assert_eq!(process(1, "a", &[("x", Paused), ("y", Paused)]).state(), "paused");
        assert_eq!(process(1, "a", &[("x", Paused), ("y", Active)]).state(), "x paused");
        assert_eq!(process(1, "a", &[("w", Pausing), ("x", Paused), ("y", Mixed)]).state(), "w pausing; x paused; y partly paused");
        assert_eq!(process(1, "a", &[("x", Mixed)]).state(), "x partly paused");
    }
}
