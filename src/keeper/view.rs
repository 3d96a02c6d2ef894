//! What `vramctl share` shows: asked over a socket beside those of the programs.

use crate::totals::Totals;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::process::Process;
use vramctl_coordinator::text::one_line;
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
    /// Where its memory is.
    pub place: Place,
    /// Bytes on the GPUs; 0 if it does not answer.
    pub resident_bytes: u64,
    /// Bytes that the scheduler has taken; 0 if it does not answer.
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

/// Where a member's memory is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// On its GPUs.
    #[default]
    #[serde(rename = "in place")]
    InPlace,
    /// Some of it has been taken.
    #[serde(rename = "partly away")]
    PartlyAway,
    /// All of it has been taken.
    #[serde(rename = "away")]
    Away,
    /// Somebody else than the scheduler holds the member, so that its calls bring nothing back.
    #[serde(rename = "held by somebody else")]
    Held,
    /// Nobody knows: the member has not answered when it was asked last.
    #[serde(rename = "does not answer")]
    Unknown,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::InPlace => "in place",
            Self::PartlyAway => "partly away",
            Self::Away => "away",
            Self::Held => "held by somebody else",
            Self::Unknown => "does not answer",
        })
    }
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
    /// For whom it is: those who came, or who are in place and asked for more; nobody if whoever left had been idle for longer than its `--idle`.
    #[serde(default)]
    pub asked: Vec<String>,
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
        let is_away = matches!(member.place, Place::PartlyAway | Place::Away);
        Some(is_away.then(|| self.gave_way(&member.name)).flatten().unwrap_or_else(|| member.place.to_string()))
    }

    /// To whom it gave way since it has last been there, since when, and why it went first.
    fn gave_way(&self, name: &String) -> Option<String> {
        let since = self.changes.iter().rev().take_while(|change| !(change.has_happened() && change.came.contains(name)));
        let left = |change: &&ChangeView| change.left.iter().any(|(left, _)| left == name) && !change.has_failed();
        let changes: Vec<_> = since.filter(left).collect();
        let first = changes.last()?;
        let (_, why) = first.left.iter().find(|(left, _)| left == name)?;
        let to = each_once(changes.iter().rev().flat_map(|change| &change.asked));
        let to = if to.is_empty() { to } else { format!(" to {to}") };
        Some(format!("gave way{to} {} ago: {why}", seconds(first.ago_ms)))
    }

    /// What is worth a line: the members that wait, each with the reason, those that are away, and the last change of places.
    pub fn news(&self) -> Vec<String> {
        /// So many of those that are away. There may be hundreds, and nobody waits for them.
        const AWAY: usize = 4;
        let line = |member: &MemberView| {
            let is = if member.place == Place::Held && member.waits_ms.is_none() { " is" } else { "" };
            Some(format!("{}{is} {}", member.name, self.standing(member.pid)?))
        };
        let (waiting, others): (Vec<_>, Vec<_>) = self.members.iter().partition(|member| member.waits_ms.is_some());
        let away: Vec<_> = others.into_iter().filter(|member| member.place != Place::InPlace).collect();
        let more = (away.len() > AWAY).then(|| format!("{} more are away: vramctl share", away.len() - AWAY));
        let shown = waiting.into_iter().chain(away.into_iter().take(AWAY)).filter_map(line);
        shown.chain(more).chain(self.changes.last().map(ToString::to_string)).collect()
    }
}

impl ChangeView {
    fn has_happened(&self) -> bool {
        self.outcome == "changed"
    }

    fn has_failed(&self) -> bool {
        !self.outcome.is_empty() && !self.has_happened()
    }
}

impl fmt::Display for ChangeView {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = if self.bytes > 0 { format!(", {}", Bytes(self.bytes)) } else { String::new() };
        let left: Vec<_> = self.left.iter().map(|(name, why)| format!("{name} gave way ({why})")).collect();
        let left = each_once(&left);
        let for_whom = match (&self.came[..], &self.asked[..]) {
            ([], []) => "nobody asked".to_owned(),
            ([], asked) => format!("room for {}", each_once(asked)),
            (came, _) => format!("{} came", each_once(came)),
        };
        let took = self.took_ms.map_or_else(|| "under way".to_owned(), |ms| format!("{} in {ms} ms", self.outcome));
        let why = self.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        write!(out, "{} ago: {left}{bytes}; {for_whom}: {took}{why}", seconds(self.ago_ms))
    }
}

/// Each name once, in order.
fn each_once<'a>(names: impl IntoIterator<Item = &'a String>) -> String {
    let mut once = Vec::<&str>::new();
    for name in names {
        if !once.contains(&name.as_str()) {
            once.push(name);
        }
    }
    once.join(", ")
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

/// Asks the scheduler. `None`: there is none.
pub fn ask() -> io::Result<Option<View>> {
    /// It asks its members first, some of which may be stopped.
    const WITHIN: Duration = Duration::from_secs(10);
    let Some(directory) = Directory::open()? else { return Ok(None) };
    let mut stream = match UnixStream::connect(directory.within_process().join(SOCKET)) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        stream => stream?,
    };
    stream.set_read_timeout(Some(WITHIN))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other(format!("nothing has come within {} s; is it stopped?", WITHIN.as_secs())),
        _ => error,
    })?;
    serde_json::from_str(&text).map(Some).map_err(io::Error::other)
}

/// Without a scheduler: what nobody brings back by itself, and how it comes back. `None`: nobody's memory is away.
pub fn stranded(processes: &[Process]) -> Option<String> {
    // Nobody else holds a program for no caller.
    let is_away =
        |process: &&Process| process.status.as_ref().is_ok_and(|it| it.memory.standing.as_ref().is_some_and(|it| it.by.is_none()));
    let names: Vec<_> =
        processes.iter().filter(is_away).map(|process| process.name().map_or_else(|| process.pid.to_string(), one_line)).collect();
    let names = each_once(&names);
    (!names.is_empty()).then(|| {
        let words = names.replace(", ", " ");
        format!(
            "nobody schedules: all keepers have ended. The memory of {names} stays away until `vramctl resume {words}`, or until the next \
             `vramctl run --share` starts"
        )
    })
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
        let member = |pid, name: &str, place| MemberView { pid, name: name.into(), place, ..MemberView::default() };
        let because = Some("those in place (a) have their turn for 0.5 s more".to_owned());
        let waits = MemberView { waits_ms: Some(2100), because, ..member(3, "c", Place::Away) };
        let change = |left: &str, why: &str, came: &[&str], asked: &str, ago_ms| ChangeView {
            ago_ms,
            left: vec![(left.into(), why.into())],
            came: came.iter().map(|name| (*name).to_owned()).collect(),
            asked: vec![asked.into()],
            bytes: 24 << 20,
            took_ms: Some(210),
            outcome: "changed".into(),
            why: None,
        };
        let failed = ChangeView { outcome: "failed".into(), ..change("b", "it was idle", &[], "d", 7000) };
        let changes = vec![
            change("b", "its turn was over", &["c"], "c", 30_000),
            change("c", "its turn was over", &["b"], "b", 20_000),
            change("b", "it was idle", &["a"], "a", 9000),
            change("b", "nobody has called it since it gave way", &[], "d", 8000),
            failed,
            change("b", "nobody has called it since it gave way", &[], "a", 6000),
        ];
        let members = vec![
            member(1, "a", Place::InPlace),
            member(2, "b", Place::PartlyAway),
            waits,
            member(4, "d", Place::Unknown),
            member(6, "e", Place::Held),
        ];
        let view = View { members, changes, ..View::default() };
        let standing = |pid| view.standing(pid).unwrap_or_default();
        assert_eq!(standing(1), "in place");
        assert_eq!(standing(2), "gave way to a, d 9.0 s ago: it was idle", "since it came last, and whatever failed");
        assert_eq!(standing(3), "waits 2.1 s: those in place (a) have their turn for 0.5 s more");
        assert_eq!(standing(4), "does not answer");
        assert_eq!(view.standing(5), None);
        let news = [
            "c waits 2.1 s: those in place (a) have their turn for 0.5 s more",
            "b gave way to a, d 9.0 s ago: it was idle",
            "d does not answer",
            "e is held by somebody else",
            "6.0 s ago: b gave way (nobody has called it since it gave way), 24.00 MiB; room for a: changed in 210 ms",
        ];
        assert_eq!(view.news(), news);
    }
}
