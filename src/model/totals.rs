//! Sums over the pauses, or the resumes, of a process.

use crate::{Durations, Kind, Report, Stage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Since the process started; only ever grows. Operations counted as failed have changed nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// How many changed anything.
    pub done: u64,
    /// Bytes of device memory that they released or allocated again.
    pub bytes: u64,
    /// Of those, bytes whose contents were saved or restored.
    pub kept_bytes: u64,
    /// Of the bytes saved, those that were unchanged and not copied again.
    pub unchanged_bytes: u64,
    /// Of `bytes`, those whose contents were discarded.
    pub discarded_bytes: u64,
    /// Milliseconds in each stage. Those of a resume overlap.
    pub stages: BTreeMap<Stage, f64>,
    /// Milliseconds in all.
    pub ms: f64,
    /// How long each took.
    #[serde(default)]
    pub durations: Durations,
    /// How many failed, by error. Each attempt of a job counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed: BTreeMap<Kind, u64>,
}

impl Totals {
    /// Adds one that was done.
    pub fn add(&mut self, report: &Report) {
        // There was nothing to do.
        if report.allocations == 0 {
            return;
        }
        self.done += 1;
        self.bytes += report.bytes;
        self.kept_bytes += report.kept_bytes;
        self.unchanged_bytes += report.unchanged_bytes;
        self.discarded_bytes += report.discarded_bytes;
        self.ms += report.ms;
        self.durations.add(Duration::from_secs_f64(report.ms / 1e3));
        for (stage, ms) in &report.stages {
            *self.stages.entry(*stage).or_default() += ms;
        }
    }

    /// Bytes that were copied.
    pub fn copied_bytes(&self) -> u64 {
        self.kept_bytes.saturating_sub(self.unchanged_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completed_operations_add_up_and_no_ops_do_not_count() {
        let pause = Report {
            allocations: 2,
            bytes: 100,
            kept_bytes: 60,
            unchanged_bytes: 20,
            discarded_bytes: 40,
            stages: [(Stage::Wait, 1.0), (Stage::Save, 2.5)].into(),
            ms: 4.0,
            ..Report::default()
        };
        let mut totals = Totals::default();
        totals.add(&pause);
        totals.add(&Report { stages: [(Stage::Wait, 9.0)].into(), ms: 9.0, ..Report::default() });
        totals.add(&pause);
        let wanted = Totals {
            done: 2,
            bytes: 200,
            kept_bytes: 120,
            unchanged_bytes: 40,
            discarded_bytes: 80,
            stages: [(Stage::Wait, 2.0), (Stage::Save, 5.0)].into(),
            ms: 8.0,
            durations: Durations { counts: vec![2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], seconds: 0.008 },
            failed: BTreeMap::new(),
        };
        assert_eq!((&totals, totals.copied_bytes()), (&wanted, 80));
    }
}
