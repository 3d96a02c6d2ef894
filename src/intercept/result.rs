//! The result codes of the C ABI.

use std::ffi::c_int;
use vramctl_model::Kind;

/// What a function returns: 0, or the number of the [`Kind`] of its error. `include/vramctl.h` names them.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VramctlResult(c_int);

impl VramctlResult {
    /// Success.
    pub const OK: Self = Self(0);

    /// As C sees it.
    pub fn number(self) -> c_int {
        self.0
    }
}

impl From<Kind> for VramctlResult {
    fn from(kind: Kind) -> Self {
        Self(kind as c_int)
    }
}

impl PartialEq<Kind> for VramctlResult {
    fn eq(&self, kind: &Kind) -> bool {
        self.0 == *kind as c_int
    }
}
