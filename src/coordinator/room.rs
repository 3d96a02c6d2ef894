//! Room for the resume of programs that share their GPUs. They queue for it at the node's scheduler, behind all that have been waiting there: what is
//! promised to others stays theirs, and others give way to these as to any.

use crate::Reporter;
use crate::processes::Found;
use std::time::Instant;
use vramctl_control::client::{Client, ClientError};
use vramctl_control::protocol::Refusal;
use vramctl_model::{Error, ResumeRequest};

/// Room that is kept for a process until this is dropped.
#[derive(Debug)]
pub struct Room {
    _kept_by: Client,
}

impl Room {
    /// Waits for it. `None`: there is none to wait for, and the resume finds out itself. `waits` hears that it still waits.
    pub fn wait(
        found: &Found,
        pid: u32,
        resume: ResumeRequest,
        until: Option<Instant>,
        reporter: &dyn Reporter,
        waits: &(dyn Fn() + Sync),
    ) -> Result<Option<Self>, Box<Refusal>> {
        let begun = Instant::now();
        let Ok(mut client) = found.connect(pid) else { return Ok(None) };
        if let Ok(connection) = client.connection() {
            reporter.connected(pid, connection);
        }
        let who = found.processes.iter().find(|process| process.pid == pid).map_or_else(|| format!("process {pid}"), ToString::to_string);
        let why = std::cell::RefCell::new(None);
        let said = |now: &str| {
            if why.replace(Some(now.to_owned())).is_none() {
                waits();
                reporter.note(&format!("{who} waits for room among those that share its GPUs: {now}. ^C gives up, and it stays paused"));
            }
        };
        let answer: Result<_, ClientError> = client.room(resume, until, &said);
        reporter.disconnected(pid);
        match answer {
            Ok(Some(true)) => Ok(Some(Self { _kept_by: client })),
            Ok(None) => {
                let why = why.into_inner().map_or_else(String::new, |why| format!(": {why}"));
                let message = format!(
                    "there was no room yet for {who} among those that share its GPUs{why}. Without --timeout, it waits as long as they have to"
                );
                Err(Box::new(Refusal { message, ..Refusal::from(&Error::Busy(begun.elapsed())) }))
            }
            Ok(Some(false)) | Err(_) => Ok(None),
        }
    }
}
