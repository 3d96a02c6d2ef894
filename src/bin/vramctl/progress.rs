//! Progress bars on a terminal: one for each process, in bytes, with the rate.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{IsTerminal, stderr};
use vramctl::memory::{Progress, Stage};

/// The bars of one command; none where nobody would see them.
pub struct Bars(Option<MultiProgress>);

impl Bars {
    /// On stderr, if that is a terminal.
    pub fn on_terminal(wanted: bool) -> Self {
        Self((wanted && stderr().is_terminal()).then(MultiProgress::new))
    }

    /// Whether there is anything to tell progress for.
    pub fn shown(&self) -> bool {
        self.0.is_some()
    }

    /// The bar of one process.
    pub fn bar(&self, process: &str) -> Bar {
        let bar = self.0.as_ref().map_or_else(ProgressBar::hidden, |bars| bars.add(ProgressBar::new(0)));
        let style = "{prefix} {msg:7} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        bar.set_prefix(process.to_owned());
        bar.set_message(Stage::Wait.name());
        bar.tick();
        Bar { bar, stage: None }
    }
}

/// The bar of one process, gone when dropped.
pub struct Bar {
    bar: ProgressBar,
    stage: Option<Stage>,
}

impl Bar {
    pub fn show(&mut self, now: Progress) {
        if self.stage != Some(now.stage) {
            self.stage = Some(now.stage);
            // The rate is the stage's own.
            self.bar.reset();
            self.bar.set_message(now.stage.name());
        }
        self.bar.set_length(now.total);
        self.bar.set_position(now.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
