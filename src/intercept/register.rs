//! Calls that register memory by its physical pages: with a network card, a disk, another device or process.

use crate::driver_memory;
use crate::driver_originals;
use crate::paused::once_there;
use crate::vmm::{noting_multicast, part_of_endpoint};
use std::ffi::{c_uint, c_ulonglong, c_void};
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Binding, Memory, RegisteredUntil, unmanaged};
use vramctl_driver::{CUdevice, CUdeviceptr, CUmemGenericAllocationHandle};
use vramctl_model::{ObstacleKind, Span, StatusCode, code};

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: set by programs before they give a network card access to the memory. Whether the card still has it
/// when a program unsets the attribute, CUDA does not say, so that is no end.
const SYNC_MEMOPS: c_uint = 6;

pub unsafe fn pointer_set_attribute(value: *const c_void, attribute: c_uint, pointer: CUdeviceptr) -> StatusCode {
    // SAFETY: here and below, the real function gets the arguments unchanged.
    let real = || unsafe { driver_originals::cuPointerSetAttribute(value, attribute, pointer) };
    // SAFETY: for this attribute, the program promises that a non-null pointer points to an `unsigned int`.
    if attribute == SYNC_MEMOPS && !value.is_null() && unsafe { value.cast::<c_uint>().read_unaligned() } != 0 {
        let span = Span { address: pointer, bytes: 1 };
        register(span, "cuPointerSetAttribute(SYNC_MEMOPS)", RegisteredUntil::ItsEnd, real)
    } else {
        real()
    }
}

pub unsafe fn handle_for_range(shared: *mut c_void, pointer: CUdeviceptr, bytes: usize, kind: c_uint, flags: c_ulonglong) -> StatusCode {
    // SAFETY: as above.
    register(Span { address: pointer, bytes }, "cuMemGetHandleForAddressRange", RegisteredUntil::ItsEnd, || unsafe {
        driver_originals::cuMemGetHandleForAddressRange(shared, pointer, bytes, kind, flags)
    })
}

pub unsafe fn bind_multicast_address(
    multicast: CUmemGenericAllocationHandle,
    offset: usize,
    pointer: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> StatusCode {
    // SAFETY: as above.
    let real = || unsafe { driver_originals::cuMulticastBindAddr(multicast, offset, pointer, bytes, flags) };
    let until = RegisteredUntil::Unbound(Binding { object: multicast, offset, bytes, device: None });
    let call = "cuMulticastBindAddr";
    register_in(multicast, Span { address: pointer, bytes }, call, until, real)
}

pub unsafe fn bind_multicast_address_v2(
    multicast: CUmemGenericAllocationHandle,
    device: CUdevice,
    offset: usize,
    pointer: CUdeviceptr,
    bytes: usize,
    flags: c_ulonglong,
) -> StatusCode {
    // SAFETY: as above.
    let real = || unsafe { driver_originals::cuMulticastBindAddr_v2(multicast, device, offset, pointer, bytes, flags) };
    let until = RegisteredUntil::Unbound(Binding { object: multicast, offset, bytes, device: Some(device) });
    let call = "cuMulticastBindAddr";
    register_in(multicast, Span { address: pointer, bytes }, call, until, real)
}

pub unsafe fn bind_endpoint_address(
    endpoint: c_uint,
    device: CUdevice,
    offset: c_ulonglong,
    pointer: *mut c_void,
    bytes: c_ulonglong,
    flags: c_ulonglong,
) -> StatusCode {
    // SAFETY: as above.
    let real = || unsafe { driver_originals::cuLogicalEndpointBindAddr(endpoint, device, offset, pointer, bytes, flags) };
    let until = RegisteredUntil::Unbound(part_of_endpoint(endpoint, device, offset, bytes));
    register(Span { address: pointer as CUdeviceptr, bytes: bytes as usize }, "cuLogicalEndpointBindAddr", until, real)
}

fn register(span: Span, call: &'static str, until: RegisteredUntil, real: impl Fn() -> StatusCode) -> StatusCode {
    once_there(|| is_paused(span), || register_now(span, call, until, &real))
}

/// The same with a multicast object.
fn register_in(
    multicast: CUmemGenericAllocationHandle,
    span: Span,
    call: &'static str,
    until: RegisteredUntil,
    real: impl Fn() -> StatusCode,
) -> StatusCode {
    once_there(|| is_paused(span), || noting_multicast(multicast, call, || register_now(span, call, until, &real)))
}

fn is_paused(span: Span) -> bool {
    Memory::existing().is_some_and(|memory| memory.is_paused_in(span))
}

fn register_now(span: Span, call: &'static str, until: RegisteredUntil, real: impl FnOnce() -> StatusCode) -> StatusCode {
    sightings::making(ObstacleKind::Registered, || {
        let answer = match Memory::existing() {
            Some(memory) => memory.register(span, call, until, real),
            None => real(),
        };
        // What is bound to a multicast object is an obstacle for that; what is bound to a logical endpoint is registered if managed.
        if answer == code::SUCCESS && matches!(until, RegisteredUntil::ItsEnd) {
            note_unmanaged(span, call);
        }
        answer
    })
}

/// Records the registered memory that is left to CUDA.
fn note_unmanaged(span: Span, call: &'static str) {
    let note = |key| sightings::note(ObstacleKind::Registered, call, key);
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
