//! Who has registered memory, as an allocation remembers it.

use std::sync::Arc;

/// Who has registered memory.
#[derive(Debug)]
pub struct Registrant {
    /// The call.
    pub call: &'static str,
    /// Whether it remembers the addresses, too: then the memory at them is registered whatever its pages.
    pub knows_addresses: bool,
}

/// Allocations hold weak references to it: they are registered as long as it exists.
pub type RegistrantMark = Arc<Registrant>;
