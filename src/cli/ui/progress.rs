//! Progress on a terminal: one line per process, with a bar, bytes and rate.

use crossterm::terminal;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write, stderr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vramctl_coordinator::text::plain;
use vramctl_host::Unpoison;
use vramctl_model::{Bytes, Progress, Stage};

/// The bars of one command. Empty without a terminal.
#[derive(Clone)]
pub struct Bars(Option<Arc<Mutex<Lines>>>);

impl Bars {
    /// On stderr, if that is a terminal.
    pub fn on_terminal(wanted: bool) -> Self {
        Self((wanted && stderr().is_terminal()).then(Arc::default))
    }

    /// Whether progress is shown.
    pub fn shown(&self) -> bool {
        self.0.is_some()
    }

    /// Removes the bars for good, and the terminal's `^C`.
    pub fn wipe(&self) {
        if let Some(lines) = &self.0 {
            let mut lines = lines.lock().unpoisoned();
            lines.by_bar.clear();
            lines.draw();
            lines.is_over = true;
        }
        if stderr().is_terminal() {
            let _ = write!(stderr(), "\r\x1b[2K");
        }
    }

    /// Prints something to stderr above the bars.
    pub fn above(&self, print: impl FnOnce()) {
        let Some(lines) = &self.0 else { return print() };
        let mut lines = lines.lock().unpoisoned();
        let bars = std::mem::take(&mut lines.by_bar);
        lines.draw();
        print();
        lines.by_bar = bars;
        lines.draw();
    }

    /// The bar of one process.
    pub fn bar(&self, process: &str) -> Bar {
        let number = self.0.as_ref().map_or(0, |lines| lines.lock().unpoisoned().next_number());
        let bar = Bar { lines: self.0.clone(), number, process: plain(process), stage: None };
        bar.draw(&format!("{}…", Stage::Wait.name()), true);
        bar
    }
}

/// What is on the terminal.
#[derive(Default)]
struct Lines {
    /// In the order in which the bars were made.
    by_bar: BTreeMap<usize, String>,
    /// How many the terminal shows. The cursor is below them.
    shown: usize,
    drawn: Option<Instant>,
    is_over: bool,
}

impl Lines {
    fn next_number(&self) -> usize {
        self.by_bar.last_key_value().map_or(0, |(last, _)| last + 1)
    }

    /// Draws all of them that have room, in place of those that are there.
    fn draw(&mut self) {
        if self.is_over || (self.shown == 0 && self.by_bar.is_empty()) {
            return;
        }
        // Some terminals do not know theirs, and say 0.
        let size = terminal::size().ok().filter(|(columns, rows)| *columns > 0 && *rows > 0);
        let (columns, rows) = size.map_or((80, 24), |(columns, rows)| (usize::from(columns), usize::from(rows)));
        let mut text = if self.shown > 0 { format!("\r\x1b[{}A\x1b[J", self.shown) } else { String::new() };
        self.shown = 0;
        for line in self.by_bar.values().take(rows.saturating_sub(1)) {
            text.extend(line.chars().take(columns.saturating_sub(1)).chain(['\n']));
            self.shown += 1;
        }
        self.drawn = Some(Instant::now());
        let _ = stderr().write_all(text.as_bytes());
    }
}

/// The bar of one process, removed on drop.
pub struct Bar {
    lines: Option<Arc<Mutex<Lines>>>,
    number: usize,
    process: String,
    /// And since when: each stage has its own rate.
    stage: Option<(Stage, Instant)>,
}

impl Bar {
    const WIDTH: u64 = 30;

    pub fn show(&mut self, now: Progress) {
        let is_new = self.stage.is_none_or(|(stage, _)| stage != now.stage);
        if is_new {
            self.stage = Some((now.stage, Instant::now()));
        }
        let seconds = self.stage.map_or(0.0, |(_, since)| since.elapsed().as_secs_f64());
        let filled = (now.done.min(now.total) * Self::WIDTH).checked_div(now.total).unwrap_or_default() as usize;
        let bar = format!("{}{}", "=".repeat(filled), if filled < Self::WIDTH as usize { ">" } else { "" });
        let mut text = format!("{:7} [{bar:30}] {}/{}", now.stage.name(), Bytes(now.done), Bytes(now.total));
        if seconds > 0.0 {
            let _ = write!(text, " {}/s", Bytes((now.done as f64 / seconds) as u64));
        }
        self.draw(&text, is_new || now.done == now.total);
    }

    fn draw(&self, text: &str, at_once: bool) {
        const EVERY: Duration = Duration::from_millis(50);
        let Some(lines) = &self.lines else { return };
        let mut lines = lines.lock().unpoisoned();
        lines.by_bar.insert(self.number, format!("{} {text}", self.process));
        if at_once || lines.drawn.is_none_or(|drawn| drawn.elapsed() >= EVERY) {
            lines.draw();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(lines) = &self.lines {
            let mut lines = lines.lock().unpoisoned();
            lines.by_bar.remove(&self.number);
            lines.draw();
        }
    }
}
