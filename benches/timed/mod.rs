//! How long a call takes.

use std::time::{Duration, Instant};

/// Prints the median of a hundred rounds of calls, each of some milliseconds.
pub fn timed(name: &str, mut call: impl FnMut()) {
    let mut round = |calls: u32| {
        let begun = Instant::now();
        (0..calls).for_each(|_| call());
        begun.elapsed()
    };
    let mut calls = 1;
    while round(calls) < Duration::from_millis(5) {
        calls *= 2;
    }
    let mut rounds: Vec<_> = (0..100).map(|_| round(calls)).collect();
    rounds.sort_unstable();
    println!("{name}: {:.1} ns", rounds[rounds.len() / 2].as_secs_f64() * 1e9 / f64::from(calls));
}
