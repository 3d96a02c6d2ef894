//! Warnings of failed NCCL calls: NCCL itself rarely says that memory ran out.

use crate::allowance::Allowance;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use vramctl_core::contexts;
use vramctl_driver as driver;
use vramctl_driver::nccl::NcclResult;
use vramctl_driver::nccl::answer::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};
use vramctl_host::{PerProcess, Unpoison, exit, worker};
use vramctl_model::Bytes;

thread_local! {
    /// The last failure of an NCCL call on this thread that is logged under the call's name.
    static NAMED: Cell<NcclResult> = const { Cell::new(SUCCESS) };
}

/// Warns of a call of NCCL's that has failed. Arguments that NCCL rejects have nothing to do with memory. Without a function, the program has
/// asked NCCL to explain the error, which may have been logged under the call's name just before.
pub fn failed(function: Option<&'static CStr>, error: NcclResult) {
    match function {
        Some(_) if matches!(error, INVALID_ARGUMENT | INVALID_USAGE) => (),
        Some(function) => {
            NAMED.set(error);
            warn(function.to_str().unwrap_or_default(), error);
        }
        None if NAMED.replace(SUCCESS) != error => warn("a call of NCCL", error),
        None => (),
    }
}

/// Warns with what is free on each device: NCCL itself rarely says that it ran out of memory.
fn warn(what: &'static str, error: NcclResult) {
    /// How long the thread whose call has failed waits for the warning.
    const WAIT: Duration = Duration::from_millis(200);
    static WARNINGS: PerProcess<Mutex<Option<Allowance>>> = PerProcess::new(Mutex::default);
    let now = Instant::now();
    let may_warn = || {
        let mut allowance = WARNINGS.get().lock().unpoisoned();
        allowance.get_or_insert_with(|| Allowance::full(now)).take(now)
    };
    // Without CUDA, nothing can have failed because memory was short, and no worker may start: its exit handler must run before the driver's.
    if exit::is_ending() || contexts::devices().is_empty() || !may_warn() {
        return;
    }
    let (asked, done) = mpsc::channel::<()>();
    let warn = move || {
        let _asked = asked;
        log::warn!(
            "{what} failed (code {error}); free now: {}. `vramctl gpus` shows who uses the rest; NCCL_DEBUG=WARN has NCCL say why",
            // The collective may never end, and the program's exit must not wait for it.
            exit::while_waiting(free_by_device)
        );
    };
    // In its own thread: the driver may be waiting for the very collective that the calling thread is about to abort.
    match worker::spawn("vramctl-nccl", warn) {
        Ok(()) => _ = done.recv_timeout(WAIT),
        Err(error) => log::debug!("could not start a thread: {error}"),
    }
}

fn free_by_device() -> String {
    let free = |device| {
        let (free, total) = contexts::memory_info(device)?;
        Some(format!("{} of {} on {}", Bytes(free), Bytes(total), driver::gpu_with_index(device)))
    };
    let free: Vec<_> = contexts::devices().into_iter().filter_map(free).collect();
    if free.is_empty() { "unknown".into() } else { free.join(", ") }
}
