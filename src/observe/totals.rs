//! Sums over the pauses and resumes of this process, for monitoring.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Error, Report, Totals, Verb};

static TOTALS: PerProcess<Mutex<BTreeMap<Verb, Totals>>> = PerProcess::new(Mutex::default);

fn totals() -> MutexGuard<'static, BTreeMap<Verb, Totals>> {
    TOTALS.get().lock().unpoisoned()
}

/// Counts one.
pub(crate) fn ended(verb: Verb, outcome: &Result<Report, Error>) {
    let mut totals = totals();
    let totals = totals.entry(verb).or_default();
    match outcome {
        Ok(report) => totals.add(report),
        Err(error) => *totals.failed.entry(error.kind()).or_default() += 1,
    }
}

/// The totals so far.
pub(crate) fn so_far() -> BTreeMap<Verb, Totals> {
    totals().clone()
}
