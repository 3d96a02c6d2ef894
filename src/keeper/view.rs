//! What `vramctl share` shows: asked over a socket beside those of the programs.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use vramctl_control::discovery::Directory;

const SOCKET: &str = "share.scheduler";

/// The state of a host's sharing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// The scheduler's process.
    pub scheduler: u32,
    /// Its epoch.
    pub epoch: u64,
    /// The members.
    pub members: Vec<MemberView>,
    /// The last changes of places, the newest last.
    pub changes: Vec<ChangeView>,
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
    /// `changed`, `refused` or `failed`; empty while it is under way.
    pub outcome: String,
}

/// Asks the scheduler. `None`: there is none.
pub fn ask() -> io::Result<Option<View>> {
    let Some(directory) = Directory::open()? else { return Ok(None) };
    let mut stream = match UnixStream::connect(directory.within_process().join(SOCKET)) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        stream => stream?,
    };
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
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
