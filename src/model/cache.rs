//! Memory that the program's own allocator, such as torch's, has cached.

use crate::units::is_zero;
use serde::{Deserialize, Serialize};

/// The memory of an allocator under one tag on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cached {
    /// The UUID of the GPU; absent if the memory is not managed, or the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The tag; absent for memory that is left to CUDA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Bytes in use.
    pub live_bytes: u64,
    /// Bytes that can be returned: whole segments of them are free.
    pub cached_bytes: u64,
    /// Free bytes that cannot be returned, because part of the same segment is in use.
    pub fragmented_bytes: u64,
    /// After a trim: bytes returned.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub returned_bytes: u64,
}

/// What a trim did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trimmed {
    /// Bytes returned to the driver.
    pub returned_bytes: u64,
    /// The allocator's memory afterwards.
    pub cache: Vec<Cached>,
    /// Milliseconds in total.
    pub ms: f64,
}
