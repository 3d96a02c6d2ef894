//! The calls that have registered memory, as an allocation remembers them.

use std::sync::Arc;

/// A call that has registered memory.
#[derive(Debug)]
pub struct Registrant {
    /// The name of the function.
    pub call: &'static str,
    /// Whether the registration is of the addresses, too: then memory at these addresses stays registered when its pages are replaced.
    pub knows_addresses: bool,
}

/// An allocation has a weak reference to the mark: the allocation is registered as long as the mark exists.
pub type RegistrantMark = Arc<Registrant>;
