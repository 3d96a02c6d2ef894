//! The inference engine in this process, as it announced itself.

use std::sync::{Mutex, PoisonError};
use vramctl_host::PerProcess;

static ENGINE: PerProcess<Mutex<Option<String>>> = PerProcess::new(Mutex::default);

/// Announces the inference engine in this process; `None` withdraws it.
pub fn set(name: Option<&str>) {
    *ENGINE.get().lock().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_owned);
}

/// The announced inference engine.
pub fn name() -> Option<String> {
    ENGINE.existing()?.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
