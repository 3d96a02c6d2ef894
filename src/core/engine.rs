//! The inference engine in this process, as it has said itself.

use std::sync::{Mutex, PoisonError};
use vramctl_host::PerProcess;

static ENGINE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Says which inference engine lives in this process; `None`: none does any more.
pub fn set(name: Option<&str>) {
    *ENGINE.get().lock().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_owned);
}

/// The inference engine in this process, if it has said so.
pub fn name() -> Option<String> {
    ENGINE.existing()?.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
