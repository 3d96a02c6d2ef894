//! What `vramctl share` shows: asked over a socket beside those of the programs.

use crate::totals::Totals;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use vramctl_control::discovery::Directory;
use vramctl_model::Bytes;

const SOCKET: &str = "share.scheduler";

/// The state of a host's sharing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// The scheduler's process.
    pub scheduler: u32,
    /// Its epoch.
    pub epoch: u64,
    /// How it decides.
    #[serde(default)]
    pub policy: PolicyView,
    /// The members.
    pub members: Vec<MemberView>,
    /// Bytes of contents that host memory may have in all, and of those that are there.
    #[serde(default)]
    pub host: (u64, u64),
    /// The last changes of places, the newest last.
    pub changes: Vec<ChangeView>,
    /// What has happened since the scheduler took over.
    #[serde(default)]
    pub totals: Totals,
}

/// How the scheduler decides.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyView {
    /// Bytes of each GPU that nobody is given.
    pub reserve_bytes: u64,
    /// The shortest turn.
    pub turn_ms: u64,
    /// A turn is at least so many times as long as the change of places took.
    pub changes_per_turn: u32,
    /// How long a request waits while nobody can give way, unless the program says so.
    pub wait_ms: u64,
    /// Percent of the time for programs of a lower priority.
    pub low_percent: u32,
}

impl fmt::Display for PolicyView {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reserve_bytes, turn_ms, changes_per_turn, wait_ms, low_percent } = self;
        let [turn, wait] = [*turn_ms, *wait_ms].map(seconds);
        write!(
            out,
            "turns of {turn} and {changes_per_turn} times the change; {wait} until what nobody can give way to fails; {low_percent}% for lower \
             priorities; {} of each GPU kept free",
            Bytes(*reserve_bytes)
        )
    }
}

/// A member.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MemberView {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// `low`, `normal` or `high`.
    pub priority: String,
    /// `in place`, `partly away` or `away`.
    pub place: String,
    /// Bytes on the GPUs.
    pub resident_bytes: u64,
    /// Bytes that the scheduler has taken.
    pub away_bytes: u64,
    /// How long its oldest waiting call or request has waited, in milliseconds; absent: none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_ms: Option<u64>,
    /// Why it still waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
    /// For how long it has made no call, if somebody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
}

/// A change of places.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChangeView {
    /// How long ago it began, in milliseconds.
    pub ago_ms: u64,
    /// How long it took; absent: it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// Who left, with the reason.
    pub left: Vec<(String, String)>,
    /// Who came.
    pub came: Vec<String>,
    /// Bytes that leave.
    #[serde(default)]
    pub bytes: u64,
    /// `changed`, `refused` or `failed`; empty while it is under way.
    pub outcome: String,
    /// Why it was refused or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl View {
    /// Where a member stands, in words: in place, away since when and why, or what it waits for. `None`: no member.
    pub fn standing(&self, pid: u32) -> Option<String> {
        let member = self.members.iter().find(|member| member.pid == pid)?;
        if let Some(waits) = member.waits_ms {
            let why = member.because.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            return Some(format!("waits {}{why}", seconds(waits)));
        }
        let left = self.changes.iter().rev().filter(|_| member.away_bytes > 0).find_map(|change| {
            let (_, why) = change.left.iter().find(|(name, _)| *name == member.name)?;
            let to = if change.came.is_empty() { String::new() } else { format!(" to {}", change.came.join(", ")) };
            Some(format!("gave way{to} {} ago: {why}", seconds(change.ago_ms)))
        });
        Some(left.unwrap_or_else(|| member.place.clone()))
    }

    /// The members that wait, with the reason of each, and the last change of places.
    pub fn news(&self) -> Vec<String> {
        let waiting = self.members.iter().filter(|member| member.waits_ms.is_some());
        let waiting = waiting.filter_map(|member| Some(format!("{} {}", member.name, self.standing(member.pid)?)));
        waiting.chain(self.changes.last().map(ToString::to_string)).collect()
    }
}

impl fmt::Display for ChangeView {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = if self.bytes > 0 { format!(", {}", Bytes(self.bytes)) } else { String::new() };
        let left: Vec<_> = self.left.iter().map(|(name, why)| format!("{name} gave way ({why})")).collect();
        let came = if self.came.is_empty() { "room was made".to_owned() } else { format!("{} came", self.came.join(", ")) };
        let took = self.took_ms.map_or_else(|| "under way".to_owned(), |ms| format!("{} in {ms} ms", self.outcome));
        let why = self.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        write!(out, "{} ago: {}{bytes}; {came}: {took}{why}", seconds(self.ago_ms), left.join(", "))
    }
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

/// Asks the scheduler. `None`: there is none.
pub fn ask() -> io::Result<Option<View>> {
    let Some(directory) = Directory::open()? else { return Ok(None) };
    let mut stream = match UnixStream::connect(directory.within_process().join(SOCKET)) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        stream => stream?,
    };
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    serde_json::from_str(&text).map(Some).map_err(io::Error::other)
}

/// Listens for those who ask.
pub fn listen(directory: &Directory) -> io::Result<UnixListener> {
    let path = directory.within_process().join(SOCKET);
    let _ = fs::remove_file(&path);
    UnixListener::bind(path)
}

/// Answers one.
pub fn answer(mut stream: &UnixStream, view: &View) {
    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
    let _ = serde_json::to_vec(view).map_err(io::Error::other).and_then(|text| stream.write_all(&text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_member_stands_somewhere_for_a_reason() {
        let member = |pid, name: &str| MemberView { pid, name: name.into(), place: "in place".into(), ..MemberView::default() };
        let waits = MemberView { waits_ms: Some(2100), because: Some("nobody can give way".into()), away_bytes: 1, ..member(3, "c") };
        let change = |left: &str, came: &str, ago_ms| ChangeView {
            ago_ms,
            left: vec![(left.into(), "it was idle".into())],
            came: vec![came.into()],
            bytes: 24 << 20,
            took_ms: Some(210),
            outcome: "changed".into(),
            why: None,
        };
        let away = MemberView { away_bytes: 1, ..member(2, "b") };
        let changes = vec![change("b", "c", 30_000), change("c", "b", 20_000), change("b", "a", 9_000)];
        let view = View { members: vec![member(1, "a"), away, waits], changes, ..View::default() };
        let standing = |pid| view.standing(pid).unwrap_or_default();
        assert_eq!(standing(1), "in place");
        assert_eq!(standing(2), "gave way to a 9.0 s ago: it was idle");
        assert_eq!(standing(3), "waits 2.1 s: nobody can give way");
        assert_eq!(view.standing(4), None);
        let news = ["c waits 2.1 s: nobody can give way", "9.0 s ago: b gave way (it was idle), 24.00 MiB; a came: changed in 210 ms"];
        assert_eq!(view.news(), news);
    }
}
