//! What the gate costs a call of the program: while it is open, alone and beside other threads, and to close and open it.
//!
//! `cargo bench --bench gate`
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_core::gate::{self, Gated};

static CALL: Gated = Gated("call");

fn call() {
    match gate::enter(&CALL) {
        Some(inside) => {
            black_box(&inside);
        }
        None => gate::pass(&CALL, || {
            black_box(());
        }),
    }
}

fn open(criterion: &mut Criterion) {
    criterion.bench_function("a call through the open gate", |bencher| bencher.iter(call));
    criterion.bench_function("a call within a call", |bencher| gate::pass(&CALL, || bencher.iter(call)));
}

/// Closing makes every thread of the process execute a fence, and waits for those inside.
fn close(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("close and open beside threads that call");
    for threads in [0, 1, 4] {
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        call();
                    }
                });
            }
            group.bench_function(BenchmarkId::from_parameter(threads), |bencher| {
                bencher.iter(|| {
                    let soon = Instant::now() + Duration::from_secs(100);
                    let closed = gate::close(soon).expect("nobody else closes it");
                    closed.wait_until_empty(soon, &mut || true).expect("no call is long");
                });
            });
            ends.store(true, Ordering::Relaxed);
        });
    }
    group.finish();
}

criterion_group!(benches, open, close);
criterion_main!(benches);
