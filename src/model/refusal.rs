//! A driver that refuses virtual memory.

use crate::gpu_in_words;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A device on which the driver refuses virtual memory: the program's memory there is left to CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusingDevice {
    /// Its ordinal in the process.
    pub device: i32,
    /// The UUID of the GPU; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The driver's answer, for people.
    pub what: String,
}

impl fmt::Display for RefusingDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "The driver refuses virtual memory on {} ({}), so the program's memory there is left to CUDA and cannot be paused.",
            gpu_in_words(self.device, self.gpu.as_deref(), None),
            self.what
        )
    }
}
