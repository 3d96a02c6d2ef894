//! Sums over the pauses and resumes of this process, for monitoring. Counted where they are requested: in the C ABI and single requests
//! (`Memory::pause`, `Memory::resume`), and in pauses in steps (`lease::hold`).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::{Error, Report, Totals, Verb};

static TOTALS: PerProcess<Mutex<BTreeMap<Verb, Totals>>> = PerProcess::new(Mutex::default);

fn totals() -> MutexGuard<'static, BTreeMap<Verb, Totals>> {
    TOTALS.get().lock().unpoisoned()
}

/// Counts one, and returns its outcome.
pub(crate) fn tallied(verb: Verb, outcome: Result<Report, Error>) -> Result<Report, Error> {
    let mut totals = totals();
    let totals = totals.entry(verb).or_default();
    match &outcome {
        Ok(report) => totals.add(report),
        Err(error) => *totals.failed.entry(error.kind()).or_default() += 1,
    }
    outcome
}

/// The totals so far.
pub(crate) fn so_far() -> BTreeMap<Verb, Totals> {
    totals().clone()
}
