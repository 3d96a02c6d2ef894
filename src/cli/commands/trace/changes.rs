//! Changes of places among programs that share their GPUs, as the scheduler tells them: who gave way to whom, and why.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use vramctl_keeper::{ChangeView, View};

/// A change of places.
#[derive(Debug, Clone, PartialEq)]
pub struct ChangeOfPlaces {
    /// When it began, in nanoseconds since 1970.
    began: u64,
    /// How many nanoseconds it took. `None`: it is under way.
    took: Option<u64>,
    told: ChangeView,
}

/// What one of the programs did in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Part<'a> {
    /// From when to when, in nanoseconds since 1970.
    pub from: u64,
    pub to: Option<u64>,
    /// `gives way`, `comes`, or `gets room` for more.
    pub what: &'static str,
    /// To whom it gives way, or who makes way for it.
    pub others: Vec<&'a str>,
    /// Why it gives way.
    pub why: Option<&'a str>,
    /// What all that leave give.
    pub bytes: u64,
    /// `changed`, `refused` or `failed`, and why.
    pub outcome: &'a str,
    pub failure: Option<&'a str>,
}

/// The last ones, as far as a scheduler tells.
pub fn last() -> Vec<ChangeOfPlaces> {
    vramctl_keeper::ask().ok().flatten().map_or_else(Vec::new, |view| told(view, SystemTime::now()))
}

fn told(view: View, now: SystemTime) -> Vec<ChangeOfPlaces> {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let change = |told: ChangeView| ChangeOfPlaces {
        began: nanoseconds(now.saturating_sub(Duration::from_millis(told.ago_ms))),
        took: told.took_ms.map(|took| nanoseconds(Duration::from_millis(took))),
        told,
    };
    view.changes.into_iter().map(change).collect()
}

impl ChangeOfPlaces {
    /// What a program of this name did in it.
    pub fn part(&self, name: &str) -> Option<Part<'_>> {
        let ChangeView { left, came, asked, bytes, outcome, why, .. } = &self.told;
        let part = Part {
            from: self.began,
            to: self.took.map(|took| self.began + took),
            what: "gives way",
            others: asked.iter().map(String::as_str).collect(),
            why: None,
            bytes: *bytes,
            outcome,
            failure: why.as_deref(),
        };
        if let Some((_, why)) = left.iter().find(|(one, _)| one == name) {
            return Some(Part { why: Some(why), ..part });
        }
        let what = if came.iter().any(|one| one == name) { "comes" } else { "gets room" };
        let is_for_it = asked.iter().any(|one| one == name);
        is_for_it.then(|| Part { what, others: left.iter().map(|(one, _)| one.as_str()).collect(), ..part })
    }
}
