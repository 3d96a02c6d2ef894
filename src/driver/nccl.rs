//! What NCCL's functions answer.

use std::ffi::c_int;

/// `ncclResult_t`.
pub type NcclResult = c_int;

/// What NCCL answers.
pub mod answer {
    use super::NcclResult;

    /// Done.
    pub const SUCCESS: NcclResult = 0;
    /// A call of CUDA has failed.
    pub const CUDA_ERROR: NcclResult = 1;
    /// A system call has failed.
    pub const SYSTEM_ERROR: NcclResult = 2;
    /// A bug.
    pub const INTERNAL_ERROR: NcclResult = 3;
    /// An argument is wrong. Nothing has been done.
    pub const INVALID_ARGUMENT: NcclResult = 4;
    /// The call is not possible now. Nothing has been done.
    pub const INVALID_USAGE: NcclResult = 5;
    /// For a non-blocking communicator: the operation continues in the background.
    pub const IN_PROGRESS: NcclResult = 7;
}
