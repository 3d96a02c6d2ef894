//! The program's calls that may end contexts: which ones.

use super::context::handle_of_primary;
use super::life::Subject;
use super::{CUdevice, ContextHandle, Ending, Green, streams};

impl Ending {
    /// Of the context with a handle.
    pub fn of(handle: ContextHandle) -> Self {
        let mut ending = Self::of_nothing();
        ending.add(Subject::Handle(handle.address()));
        ending
    }

    /// Of a device's primary context.
    pub fn of_primary(device: CUdevice) -> Self {
        let mut ending = Self::of_nothing();
        // First, so that nobody asks about it meanwhile.
        ending.add(Subject::Primary(device));
        if let Some(handle) = handle_of_primary(device) {
            ending.add(Subject::Handle(handle.address()));
        }
        ending
    }

    /// Of a green context, which also releases the primary one.
    pub fn of_green(green: Green) -> Self {
        // While it is there, its streams are. The driver's answer about one of these would be mistaken for one about the primary context.
        streams::green_ends(green);
        let Some((device, contexts)) = green.known() else { return Self::of_nothing() };
        let mut ending = Self::of_primary(device);
        for context in contexts {
            ending.add(Subject::Handle(context.handle().address()));
        }
        green.forget();
        ending
    }
}
