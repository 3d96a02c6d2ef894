//! What the gate costs a call of the program: while it is open, alone and beside other threads, and to close and open it.
//!
//! `cargo bench --bench gate`
#![allow(missing_docs)]

mod timed;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use timed::timed;
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

/// Closing makes every thread of the process execute a fence, and waits for those inside.
fn close() {
    let soon = Instant::now() + Duration::from_secs(100);
    let closed = gate::close(soon).expect("nobody else closes it");
    closed.wait_until_empty(soon, &mut || true).expect("no call is long");
}

fn main() {
    timed("a call through the open gate", call);
    gate::pass(&CALL, || timed("a call within a call", call));
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
            timed(&format!("close and open beside {threads} threads that call"), close);
            ends.store(true, Ordering::Relaxed);
        });
    }
}
