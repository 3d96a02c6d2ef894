//! Tells the system's log who did what to whom, when there is one: a line for each operation of a person, as a datagram to `/dev/log`, where journald
//! and syslog listen. It is told by whoever acts, so it shows what was done, and proves nothing against a user who does not want it told.

use crate::proc;
use crate::text::cut;
use std::fmt::Write;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::{env, fs, process};
use vramctl_host::system::user;

/// Security messages for those who may read them (`authpriv`), as information.
const PRIORITY: u32 = 10 << 3 | 6;
/// The longest text of others in a line.
const LONGEST: usize = 300;

/// What was done.
#[derive(Debug)]
pub struct Deed<'a> {
    /// The verb.
    pub what: &'a str,
    /// The job's name, or the process's.
    pub job: &'a str,
    /// The processes.
    pub pids: &'a [u32],
    /// The user whose they are.
    pub owner: Option<u32>,
    /// Bytes, or why it failed.
    pub result: Result<u64, String>,
    /// How long it took.
    pub ms: f64,
}

impl Deed<'_> {
    /// Tells it, if somebody listens there. Never waits, and never fails.
    pub fn tell(&self) {
        let Some(log) = log() else { return };
        let line = format!("<{PRIORITY}>vramctl[{}]: {}", process::id(), self.in_words());
        if let Ok(socket) = UnixDatagram::unbound()
            && socket.set_nonblocking(true).is_ok()
        {
            let _ = socket.send_to(line.as_bytes(), log);
        }
    }

    /// `KEY=VALUE`, as journald's and other tools' filters read it.
    fn in_words(&self) -> String {
        let pids: Vec<_> = self.pids.iter().map(ToString::to_string).collect();
        let mut line = format!("verb={} job={} pids={}", self.what, quoted(self.job), pids.join(","));
        if let Some(owner) = self.owner {
            let _ = write!(line, " owner={owner}");
        }
        match &self.result {
            Ok(bytes) => _ = write!(line, " result=done bytes={bytes}"),
            Err(why) => _ = write!(line, " result=failed why={}", quoted(why)),
        }
        let parent = parent();
        let login = login().map_or_else(String::new, |login| format!(" login={login}"));
        let of_parent = parent.map_or_else(String::new, |(pid, line)| format!(" parent={pid} parent_command={}", quoted(&line)));
        let _ = write!(line, " ms={:.0} user={}{login} command={}{of_parent}", self.ms, user(), quoted(&proc::command_line(process::id())));
        line
    }
}

/// `VRAMCTL_AUDIT`, else the system's. Empty: none.
fn log() -> Option<PathBuf> {
    let chosen = env::var_os("VRAMCTL_AUDIT").map_or_else(|| "/dev/log".into(), PathBuf::from);
    Some(chosen).filter(|path| !path.as_os_str().is_empty())
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", cut(text, LONGEST).escape_debug())
}

/// Who logged in, whoever has acted since, as with `sudo`. `None` where the kernel does not say.
fn login() -> Option<u32> {
    fs::read_to_string("/proc/self/loginuid").ok()?.trim().parse().ok().filter(|user| *user != u32::MAX)
}

/// Whoever has started this command.
fn parent() -> Option<(u32, String)> {
    let pid = std::os::unix::process::parent_id();
    Some((pid, proc::command_line(pid))).filter(|(_, line)| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_who_did_what_and_nothing_in_it_passes_for_another() {
        let failed =
            Deed { what: "pause", job: "a\nb \"c\"", pids: &[7, 8], owner: Some(1000), result: Err("busy\n<86>x".into()), ms: 1.4 };
        let line = failed.in_words();
        assert!(
            line.starts_with(r#"verb=pause job="a\nb \"c\"" pids=7,8 owner=1000 result=failed why="busy\n<86>x" ms=1 user="#),
            "{line}"
        );
        assert!(!line.contains('\n') && line.contains(" command=\""), "{line}");
        let done = Deed { owner: None, result: Ok(5), ..failed };
        assert!(done.in_words().contains("pids=7,8 result=done bytes=5 ms=1"), "{}", done.in_words());
    }
}
