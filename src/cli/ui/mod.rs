//! How people and scripts hear of an operation: notes and progress while it runs, and its outcome.

pub mod colours;
mod connections;
pub mod dry_run;
pub mod interrupt;
pub mod lines;
pub mod outcome;
pub mod output;
mod progress;
pub mod status;

use connections::Connections;
use progress::{Bar, Bars};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use vramctl_coordinator::processes::Process;
use vramctl_coordinator::queue::Ticket;
use vramctl_coordinator::{Plan, Reporter};
use vramctl_host::Unpoison;
use vramctl_model::Progress;

/// The terminal of one command.
pub struct Ui {
    /// Print JSON, and no notes.
    pub json: bool,
    /// Print errors and warnings only.
    pub quiet: bool,
    bars: Bars,
    /// By process.
    shown: Mutex<BTreeMap<u32, Bar>>,
    connections: Connections,
    /// What has been printed to stderr: nothing is said twice.
    said: Mutex<BTreeSet<String>>,
}

impl Ui {
    pub fn new(json: bool, quiet: bool) -> Self {
        Self {
            json,
            quiet,
            bars: Bars::on_terminal(!quiet && !json),
            shown: Mutex::default(),
            connections: Connections::default(),
            said: Mutex::default(),
        }
    }

    /// Shows a bar for each process that takes part.
    pub fn show(&self, plans: &[&Plan]) {
        let all = plans.iter().flat_map(|plan| plan.taking_part().into_iter().map(|pid| (pid, plan.process(pid))));
        *self.shown.lock().unpoisoned() = all
            .map(|(pid, process): (u32, Option<&Process>)| (pid, self.bars.bar(&process.map_or_else(String::new, ToString::to_string))))
            .collect();
    }

    /// Ends the display of progress.
    pub fn end(&self) {
        self.shown.lock().unpoisoned().clear();
        self.connections.stay_if_closed();
    }

    /// Cancels what only waits, and ends the display. From now on, threads park.
    pub fn interrupt(&self) {
        self.connections.close_all();
        self.bars.wipe();
    }

    fn complain(&self, what: &str, text: &str) {
        if self.said.lock().unpoisoned().insert(text.to_owned()) {
            self.bars.above(|| output::complain(what, text));
        }
    }
}

impl Reporter for Ui {
    fn note(&self, text: &str) {
        if !self.json && !self.quiet {
            self.complain("note", text);
        }
    }

    fn warn(&self, text: &str) {
        self.complain("warning", text);
    }

    fn fail(&self, text: &str) {
        self.complain("error", text);
    }

    fn done(&self, text: &str) {
        if !self.json && !self.quiet {
            // The outcome reports what is wrong with stdout.
            self.bars.above(|| _ = output::say(text));
        }
    }

    fn queued(&self, ahead: &[Ticket]) {
        let first: Vec<_> = ahead.iter().map(|ticket| ticket.who.as_str()).collect();
        self.note(&format!("number {} in the queue for GPU memory, behind {}", ahead.len() + 1, first.join(", ")));
    }

    fn follows_progress(&self) -> bool {
        self.bars.shown()
    }

    fn progress(&self, pid: u32, now: Progress) {
        if let Some(bar) = self.shown.lock().unpoisoned().get_mut(&pid) {
            bar.show(now);
        }
    }

    fn connected(&self, pid: u32, stream: UnixStream) {
        self.connections.add(pid, stream);
    }

    fn disconnected(&self, pid: u32) {
        self.connections.remove(pid);
    }
}
