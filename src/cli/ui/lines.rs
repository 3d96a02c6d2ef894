//! An operation for a program: one line of JSON for each thing that it should hear, and a last one with the outcome. `docs/protocol.md`
//! describes them.

use crate::ui::connections::Connections;
use crate::ui::output;
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::thread;
use vramctl_coordinator::Reporter;
use vramctl_coordinator::barrier::Step;
use vramctl_coordinator::failure::CommandError;
use vramctl_coordinator::processes::Process;
use vramctl_coordinator::queue::Ticket;
use vramctl_host::Unpoison;
use vramctl_model::Progress;

/// What a cancelled operation has come to.
type LeftBehind = Box<dyn FnOnce() -> Value + Send>;

/// The lines of one operation.
pub struct Lines {
    connections: Connections,
    /// The program wants to hear of progress.
    progress: bool,
    /// What a cancellation answers at present. `None` once the outcome has been printed.
    left_behind: Mutex<Option<LeftBehind>>,
}

impl Lines {
    /// `progress`: whether to print it.
    pub fn new(progress: bool, left_behind: LeftBehind) -> Self {
        Self { connections: Connections::default(), progress, left_behind: Mutex::new(Some(left_behind)) }
    }

    /// The ranks of this node have got this far, and wait for those of others.
    pub fn reached(step: Step) {
        print(&json!({ "reply": "reached", "step": step }));
    }

    /// The ranks of this node that take part.
    pub fn found<'a>(processes: impl Iterator<Item = &'a Process>) {
        print(&json!({ "reply": "found", "processes": processes.map(|one: &Process| {
            let tags: Vec<_> = one.tags().iter().map(|tag| &tag.tag).collect();
            json!({ "pid": one.pid, "name": one.name(), "tags": tags })
        }).collect::<Vec<_>>() }));
    }

    /// From now on, a cancellation answers this.
    pub fn leaves(&self, left_behind: impl FnOnce() -> Value + Send + 'static) {
        if let Some(now) = &mut *self.left_behind.lock().unpoisoned() {
            *now = Box::new(left_behind);
        }
    }

    /// Cancels what only waits, and prints how everything is left. If the outcome has been printed, nothing.
    pub fn cancel(&self) {
        self.connections.close_all();
        if let Some(left_behind) = self.left_behind.lock().unpoisoned().take() {
            print(&left_behind());
        }
    }

    /// Prints the outcome. After a cancellation, parks: its thread ends the process.
    pub fn end(&self, outcome: &Value) -> Result<(), CommandError> {
        self.connections.stay_if_closed();
        if self.left_behind.lock().unpoisoned().take().is_some() {
            return write(outcome);
        }
        loop {
            thread::park();
        }
    }
}

impl Reporter for Lines {
    fn note(&self, text: &str) {
        print(&json!({ "reply": "note", "text": text }));
    }

    fn warn(&self, text: &str) {
        print(&json!({ "reply": "warning", "text": text }));
    }

    fn fail(&self, text: &str) {
        print(&json!({ "reply": "failure", "text": text }));
    }

    fn done(&self, text: &str) {
        print(&json!({ "reply": "step", "text": text }));
    }

    fn queued(&self, ahead: &[Ticket]) {
        let ahead: Vec<_> = ahead.iter().map(|ticket| &ticket.who).collect();
        print(&json!({ "reply": "queued", "ahead": ahead }));
    }

    fn follows_progress(&self) -> bool {
        self.progress
    }

    fn progress(&self, pid: u32, Progress { stage, done, total }: Progress) {
        print(&json!({ "reply": "progress", "pid": pid, "stage": stage, "done": done, "total": total }));
    }

    fn connected(&self, pid: u32, stream: UnixStream) {
        self.connections.add(pid, stream);
    }

    fn disconnected(&self, pid: u32) {
        self.connections.remove(pid);
    }
}

/// If nobody reads, the end of stdin says so.
fn print(line: &Value) {
    let _ = write(line);
}

/// A line at a time, in which each GPU has its index in `nvidia-smi` beside its UUID.
fn write(line: &Value) -> Result<(), CommandError> {
    output::answer(line.clone())
}
