//! Calls that register memory by its physical pages: with a network card, a disk, another device or process.

use crate::call::Call;
use crate::driver_memory;
use crate::paused::once_there;
use crate::vmm::note_multicast;
use std::ffi::{c_uint, c_void};
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Binding, Memory, RegisteredUntil, unmanaged};
use vramctl_driver::CUdeviceptr;
use vramctl_model::{ObstacleKind, Span, StatusCode, code};

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: set by programs before they give a network card access to the memory. Whether the card still has it
/// when a program unsets the attribute, CUDA does not say, so that is no end.
const SYNC_MEMOPS: c_uint = 6;

pub unsafe fn pointer_set_attribute(call: &mut Call, value: *const c_void, attribute: c_uint, pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: for this attribute, the program promises that a non-null pointer points to an `unsigned int`.
    if attribute == SYNC_MEMOPS && !value.is_null() && unsafe { value.cast::<c_uint>().read_unaligned() } != 0 {
        let span = Span { address: pointer, bytes: 1 };
        register(call, span, "cuPointerSetAttribute(SYNC_MEMOPS)", RegisteredUntil::ItsEnd)
    } else {
        call.real()
    }
}

pub fn handle_for_range(call: &mut Call, pointer: CUdeviceptr, bytes: usize) -> StatusCode {
    register(call, Span { address: pointer, bytes }, "cuMemGetHandleForAddressRange", RegisteredUntil::ItsEnd)
}

pub fn bind_multicast_address(call: &mut Call, binding: Binding, pointer: CUdeviceptr) -> StatusCode {
    const CALL: &str = "cuMulticastBindAddr";
    let (span, until) = (Span { address: pointer, bytes: binding.bytes }, RegisteredUntil::Unbound(binding));
    once_there(|| is_paused(span), || note_multicast(binding.object, CALL, || register_now(call, span, CALL, until)))
}

pub fn bind_endpoint_address(call: &mut Call, part: Binding, pointer: CUdeviceptr) -> StatusCode {
    register(call, Span { address: pointer, bytes: part.bytes }, "cuLogicalEndpointBindAddr", RegisteredUntil::Unbound(part))
}

fn register(call: &mut Call, span: Span, name: &'static str, until: RegisteredUntil) -> StatusCode {
    once_there(|| is_paused(span), || register_now(call, span, name, until))
}

fn is_paused(span: Span) -> bool {
    Memory::existing().is_some_and(|memory| memory.is_paused_in(span))
}

fn register_now(call: &mut Call, span: Span, name: &'static str, until: RegisteredUntil) -> StatusCode {
    sightings::making(ObstacleKind::Registered, || {
        let answer = match Memory::existing() {
            Some(memory) => memory.register(span, name, until, || call.real()),
            None => call.real(),
        };
        // What is bound to a multicast object is an obstacle for that; what is bound to a logical endpoint is registered if managed.
        if answer == code::SUCCESS && matches!(until, RegisteredUntil::ItsEnd) {
            note_unmanaged(span, name);
        }
        answer
    })
}

/// Records the registered memory that is left to CUDA.
fn note_unmanaged(span: Span, name: &'static str) {
    let note = |key| sightings::note(ObstacleKind::Registered, name, key);
    let found = driver_memory::touched_by(span);
    if found.is_empty() && driver_memory::end_of_managed(span.address).is_none() {
        // Registered, so the driver does know it.
        note(ObstacleKey::Address(span.address));
    }
    for (at, known) in found {
        let start = match known {
            Ok(known) if known.device.is_none() => continue, // host memory
            Ok(known) => known.start,
            Err(_) => at,
        };
        // Virtual memory lasts beyond its mappings. If it is not recorded, its end is not seen.
        note(unmanaged::key_of_mapped(at).unwrap_or(ObstacleKey::Address(start)));
    }
}
