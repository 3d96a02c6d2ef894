//! Progress bars on a terminal: one per process, with bytes and rate.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write, stderr};
use vramctl_model::{Progress, Stage};

/// The bars of one command. Empty without a terminal.
#[derive(Clone)]
pub struct Bars(Option<MultiProgress>);

impl Bars {
    /// On stderr, if that is a terminal.
    pub fn on_terminal(wanted: bool) -> Self {
        Self((wanted && stderr().is_terminal()).then(MultiProgress::new))
    }

    /// Whether progress is shown.
    pub fn shown(&self) -> bool {
        self.0.is_some()
    }

    /// Removes the bars and the terminal's `^C`.
    pub fn wipe(&self) {
        if let Some(bars) = &self.0 {
            let _ = bars.clear();
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        if stderr().is_terminal() {
            let _ = write!(stderr(), "\r\x1b[2K");
        }
    }

    /// The bar of one process.
    pub fn bar(&self, process: &str) -> Bar {
        let Some(bars) = &self.0 else { return Bar { bar: ProgressBar::hidden(), stage: None } };
        let bar = ProgressBar::new(0).with_style(style("{prefix} {msg}")).with_prefix(process.to_owned());
        let bar = bars.add(bar.with_message(format!("{}…", Stage::Wait.name())));
        bar.tick();
        Bar { bar, stage: None }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

/// The bar of one process, removed on drop.
pub struct Bar {
    bar: ProgressBar,
    stage: Option<Stage>,
}

impl Bar {
    pub fn show(&mut self, now: Progress) {
        let new_stage = self.stage.replace(now.stage) != Some(now.stage);
        if new_stage {
            // Each stage has its own rate.
            self.bar.reset();
        }
        self.bar.set_length(now.total);
        self.bar.set_position(now.done);
        if new_stage {
            self.bar.set_message(now.stage.name());
            self.bar.set_style(style("{prefix} {msg:7} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}"));
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
