//! Memory that the program manages itself: `cuMemCreate`, `cuMemMap` and related functions. Calls about other memory go to the real
//! function.

use crate::alloc::{admit, announce_memory, finish, forward_unmanaged, placement};
use crate::call::{Call, forward};
use crate::limited::{self, Admitted};
use crate::paused::once_there;
use crate::share::BY_DESCRIPTOR;
use crate::{driver_memory, driver_originals, room};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::BorrowedFd;
use std::{ptr, slice};
use vramctl_core::contexts;
use vramctl_core::events;
use vramctl_core::gate::{self, Gated};
use vramctl_core::memory::sightings::{self, ObstacleKey};
use vramctl_core::memory::{Binding, Memory, RegisteredUntil, is_ours, reserved, unmanaged};
use vramctl_driver::{
    Access, CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation,
    Current, Location, Properties,
};
use vramctl_host::Held;
use vramctl_model::{Error, Failure, ObstacleKind, Span, StatusCode, code};

type Handle = CUmemGenericAllocationHandle;

pub unsafe fn create(
    call: &mut Call,
    handle: *mut Handle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> StatusCode {
    // SAFETY: the program promises that a non-null pointer points to CUDA's structure, which `Properties` has the layout of.
    let wanted = unsafe { properties.cast::<Properties>().as_ref() };
    let (Some(wanted), false, 0) = (wanted, handle.is_null(), flags) else { return call.real() };
    let Some(device) = wanted.device() else {
        let made = create_on_host(wanted, bytes, call.caller());
        // SAFETY: not null, and writable by the program's promise.
        return unsafe { answer_with(handle, made.map(Ok)) }.unwrap_or_else(|| call.real());
    };
    if room::is_for_others(Some(device), bytes) {
        return code::OUT_OF_MEMORY;
    }
    if let Some(policy) = placement(bytes, call.caller())
        && let Some(current) = context_on(device)
    {
        let made = Memory::get().create(&policy, wanted, bytes, &current);
        // The program has asked for virtual memory itself, and with these properties: the driver's answer is what it gets.
        if let Err(Error::Driver(Failure { call: "cuMemCreate", code })) = made
            && code != code::OUT_OF_MEMORY
        {
            return code;
        }
        let made = finish(&current, &policy.tag, made, bytes, device, call.caller());
        // SAFETY: as above.
        if let Some(answer) = unsafe { answer_with(handle, made) } {
            return answer;
        }
    }
    match admit(call, device, bytes, || limited::on(device, bytes)) {
        Ok(Admitted { charge, .. }) => forward_unmanaged(call, bytes, Some(device), forward, |requester| {
            // SAFETY: not null, and the real function has succeeded.
            unmanaged::note_handle(unsafe { handle.read() }, bytes, device, requester, charge);
        }),
        Err(error) => error,
    }
}

/// The handle for memory of the host that other processes can import, for which they are asked to give it up. `None` if the real function is to answer: it
/// takes nothing of a device, and the driver's checkpoint restores what nobody else has.
fn create_on_host(wanted: &Properties, bytes: usize, caller: *const c_void) -> Option<Handle> {
    if !wanted.is_on_host() || !wanted.is_by_descriptor() {
        return None;
    }
    let policy = placement(bytes, caller)?;
    let current = Current::of_thread().ok()??;
    let made = Memory::get().create(&policy, wanted, bytes, &current);
    made.inspect(|_| announce_memory()).inspect_err(|error| log::debug!("cannot manage {bytes} bytes of the host's memory: {error}")).ok()
}

/// A context of a device, for copies: the thread's current one, the primary one, or another. Creating memory needs no context, so there may
/// be none yet.
fn context_on(device: CUdevice) -> Option<Current> {
    let current = Current::of_thread().ok().flatten().filter(|current| current.device() == device);
    current.or_else(|| Current::push(Current::primary_of(device).ok()??).ok()).or_else(|| contexts::enter_any(device))
}

pub fn release(call: &mut Call, handle: Handle) -> StatusCode {
    let _freeing = events::freeing();
    existing(|memory| {
        memory.registrations.releasing_object(handle);
        memory.release_handle(handle)
    })
    .unwrap_or_else(|| unmanaged::release(handle, || call.real()))
}

pub unsafe fn map(address: CUdeviceptr, bytes: usize, offset: usize, handle: Handle, flags: c_ulonglong) -> StatusCode {
    let real = |handle| {
        // SAFETY: the program's arguments, except the handle, for which the driver gets its own.
        unsafe { driver_originals::cuMemMap(address, bytes, offset, handle, flags) }
    };
    let span = Span { address, bytes };
    existing(|memory| memory.map(span, offset, handle, flags, real)).unwrap_or_else(|| {
        let answer = outside_holes(span, || real(handle));
        if answer == code::SUCCESS {
            unmanaged::note_mapped(address, handle);
        }
        answer
    })
}

/// Makes a call that the driver refuses where memory is mapped. It would not do so in the hole that paused memory leaves.
fn outside_holes(span: Span, call: impl FnOnce() -> StatusCode) -> StatusCode {
    let Some(memory) = Memory::existing() else { return call() };
    memory.while_none_moves(|registry| if registry.has_hole_in(span) { code::INVALID_VALUE } else { call() })
}

pub fn unmap(call: &mut Call, address: CUdeviceptr, bytes: usize) -> StatusCode {
    let _freeing = events::freeing();
    let span = Span { address, bytes };
    let mut real = || unmanaged::unmap(span, || call.real());
    existing(|memory| memory.unmap(span, &mut real)).unwrap_or_else(real)
}

pub unsafe fn set_access(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize) -> StatusCode {
    let real = |span: Span| {
        // SAFETY: as above; a part of a range is a range.
        unsafe { driver_originals::cuMemSetAccess(span.address, span.bytes, access, count) }
    };
    let all = Span { address, bytes };
    if access.is_null() || count == 0 || count > MOST_LOCATIONS {
        return real(all);
    }
    // SAFETY: the program promises `count` of CUDA's structures, which `Access` has the layout of.
    let listed = unsafe { slice::from_raw_parts(access.cast::<Access>(), count) };
    let opened = opened_to_others(all, listed);
    let noted = || {
        let answer = existing(|memory| memory.set_access(all, listed, real)).unwrap_or_else(|| real(all));
        if answer == code::SUCCESS {
            for (mapping, guest) in &opened {
                sightings::note_access("cuMemSetAccess", *mapping, *guest);
            }
            let closed = listed.iter().filter(|access| !access.is_any()).filter_map(|access| access.location.device());
            closed.for_each(|device| sightings::note_no_access_in(all, device));
        }
        answer
    };
    if opened.is_empty() { noted() } else { sightings::making(ObstacleKind::Peers, noted) }
}

/// The mappings in a range that are not managed, and to which devices get access that are not their own.
fn opened_to_others(span: Span, listed: &[Access]) -> Vec<(ObstacleKey, CUdevice)> {
    let guests: Vec<_> = listed.iter().filter(|access| access.is_any()).filter_map(|access| access.location.device()).collect();
    if guests.is_empty() {
        return Vec::new();
    }
    let mut opened = Vec::new();
    for (at, known) in driver_memory::touched_by(span) {
        let (mapping, own) = match known {
            Ok(known) => match known.device {
                None => continue, // host memory
                own => (known.mapping.address, own),
            },
            Err(_) => (at, None),
        };
        opened.extend(guests.iter().filter(|guest| own != Some(**guest)).map(|guest| (ObstacleKey::Mapping(mapping), *guest)));
    }
    opened
}

/// More than there are locations. The real function rejects such a count.
const MOST_LOCATIONS: usize = 4096;

pub unsafe fn get_access(call: &mut Call, flags: *mut c_ulonglong, location: *const CUmemLocation, address: CUdeviceptr) -> StatusCode {
    // SAFETY: the program promises that a non-null pointer points to CUDA's structure, which `Location` has the layout of.
    let asked = unsafe { location.cast::<Location>().as_ref() };
    let (Some(asked), false, Some(memory)) = (asked, flags.is_null(), Memory::existing()) else { return call.real() };
    memory.while_none_moves(|registry| {
        // SAFETY: not null, and writable by the program's promise.
        unsafe { answer_with(flags, registry.access_of_paused(address, *asked).map(Ok)) }.unwrap_or_else(|| call.real())
    })
}

pub unsafe fn address_reserve(call: &mut Call, pointer: *mut CUdeviceptr, bytes: usize) -> StatusCode {
    let answer = call.real();
    if answer == code::SUCCESS && !pointer.is_null() {
        // SAFETY: not null, and written by the real function.
        reserved::note(Span { address: unsafe { pointer.read() }, bytes });
    }
    answer
}

pub fn address_free(call: &mut Call, address: CUdeviceptr, bytes: usize) -> StatusCode {
    let span = Span { address, bytes };
    outside_holes(span, || reserved::freeing(span, || call.real()))
}

pub unsafe fn retain_handle(call: &mut Call, handle: *mut Handle, address: *mut c_void) -> StatusCode {
    let found = if handle.is_null() { None } else { existing(|memory| memory.retain_handle(address as CUdeviceptr)) };
    // SAFETY: not null, and writable by the program's promise.
    if let Some(answer) = unsafe { answer_with(handle, found) } {
        return answer;
    }
    let answer = call.real();
    if answer == code::SUCCESS && !handle.is_null() {
        // SAFETY: not null, and written by the real function.
        unmanaged::note_retained(unsafe { handle.read() }, address as CUdeviceptr);
    }
    answer
}

pub unsafe fn properties_of(call: &mut Call, properties: *mut CUmemAllocationProp, handle: Handle) -> StatusCode {
    let found = if properties.is_null() { None } else { existing(|memory| memory.properties_of(handle)) };
    // SAFETY: not null, and writable by the program's promise.
    unsafe { answer_with(properties.cast::<Properties>(), found) }.unwrap_or_else(|| call.real())
}

/// Writes a value for the program, if there is an answer.
///
/// # Safety
/// `to` must be writable.
unsafe fn answer_with<T>(to: *mut T, found: Option<Result<T, StatusCode>>) -> Option<StatusCode> {
    found.map(|found| match found {
        Ok(value) => {
            // SAFETY: the caller's promise.
            unsafe { to.write(value) };
            code::SUCCESS
        }
        Err(error) => error,
    })
}

pub unsafe fn export(shared: *mut c_void, handle: Handle, kind: c_uint, flags: c_ulonglong) -> StatusCode {
    let real = |handle| {
        // SAFETY: as in `map`.
        unsafe { driver_originals::cuMemExportToShareableHandle(shared, handle, kind, flags) }
    };
    once_there(
        || is_paused(handle),
        || {
            if kind == BY_DESCRIPTOR && is_ours(handle) && !shared.is_null() {
                // SAFETY: not null, and writable for a descriptor by the program's promise.
                unsafe { export_descriptor(shared.cast(), handle, real) }
            } else {
                export_otherwise(handle, real)
            }
        },
    )
}

fn export_otherwise(handle: Handle, real: impl Fn(Handle) -> StatusCode) -> StatusCode {
    const CALL: &str = "cuMemExportToShareableHandle";
    sightings::making(ObstacleKind::Shared, || {
        existing(|memory| memory.share_handle(handle, CALL, RegisteredUntil::ItsEnd, &real)).unwrap_or_else(|| {
            let answer = real(handle);
            if answer == code::SUCCESS {
                sightings::note(ObstacleKind::Shared, CALL, ObstacleKey::Handle(handle));
            }
            answer
        })
    })
}

/// Whether the memory behind a handle is paused.
fn is_paused(handle: Handle) -> bool {
    Memory::existing().is_some_and(|memory| memory.is_handle_paused(handle))
}

/// # Safety
/// `shared` must be writable.
unsafe fn export_descriptor(shared: *mut c_int, handle: Handle, real: impl FnOnce(u64) -> StatusCode) -> StatusCode {
    existing(|memory| {
        memory.export_handle(handle, real, || {
            // SAFETY: the real function has written a descriptor.
            let (number, file) = unsafe { (shared.read(), BorrowedFd::borrow_raw(shared.read())) };
            Some((Held::new(file.try_clone_to_owned().ok()?).ok()?, number))
        })
    })
    .unwrap_or(code::INVALID_VALUE)
}

/// Makes a call that uses a multicast object, and records that. `call`: its name.
pub fn note_multicast(multicast: Handle, call: &'static str, make: impl FnOnce() -> StatusCode) -> StatusCode {
    sightings::noting(ObstacleKind::Multicast, make, || sightings::note(ObstacleKind::Multicast, call, ObstacleKey::Handle(multicast)))
}

pub unsafe fn bind_multicast(
    multicast: Handle,
    multicast_offset: usize,
    handle: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> StatusCode {
    bind(Binding { object: multicast, offset: multicast_offset, bytes, device: None }, handle, |handle| {
        // SAFETY: as in `export`.
        unsafe { driver_originals::cuMulticastBindMem(multicast, multicast_offset, handle, offset, bytes, flags) }
    })
}

pub unsafe fn bind_multicast_v2(
    multicast: Handle,
    device: CUdevice,
    multicast_offset: usize,
    handle: Handle,
    offset: usize,
    bytes: usize,
    flags: c_ulonglong,
) -> StatusCode {
    bind(Binding { object: multicast, offset: multicast_offset, bytes, device: Some(device) }, handle, |handle| {
        // SAFETY: as in `export`.
        unsafe { driver_originals::cuMulticastBindMem_v2(multicast, device, multicast_offset, handle, offset, bytes, flags) }
    })
}

/// Binds memory to a multicast object. `real` gets the driver's handle.
fn bind(binding: Binding, handle: Handle, real: impl Fn(Handle) -> StatusCode) -> StatusCode {
    const CALL: &str = "cuMulticastBindMem";
    let until = RegisteredUntil::Unbound(binding);
    let make = || existing(|memory| memory.share_handle(handle, CALL, until, &real)).unwrap_or_else(|| real(handle));
    once_there(|| is_paused(handle), || note_multicast(binding.object, CALL, make))
}

/// Unbinds memory from a multicast object or a logical endpoint.
pub fn unbind(call: &mut Call, binding: Binding) -> StatusCode {
    match Memory::existing() {
        Some(memory) => memory.registrations.unbinding(binding, || call.real()),
        None => call.real(),
    }
}

pub unsafe fn bind_endpoint(
    endpoint: c_uint,
    device: CUdevice,
    endpoint_offset: c_ulonglong,
    handle: Handle,
    offset: c_ulonglong,
    bytes: c_ulonglong,
    flags: c_ulonglong,
) -> StatusCode {
    let real = |handle| {
        // SAFETY: as in `export`.
        unsafe { driver_originals::cuLogicalEndpointBindMem(endpoint, device, endpoint_offset, handle, offset, bytes, flags) }
    };
    let until = RegisteredUntil::Unbound(part_of_endpoint(endpoint, device, endpoint_offset, bytes));
    once_there(
        || is_paused(handle),
        || existing(|memory| memory.share_handle(handle, "cuLogicalEndpointBindMem", until, real)).unwrap_or_else(|| real(handle)),
    )
}

/// The part of a logical endpoint to which memory is bound. Its id has 32 bits, so it is no multicast object's handle.
pub fn part_of_endpoint(endpoint: c_uint, device: CUdevice, offset: c_ulonglong, bytes: c_ulonglong) -> Binding {
    Binding { object: endpoint.into(), offset: offset as usize, bytes: bytes as usize, device: Some(device) }
}

pub fn destroy_endpoint(call: &mut Call, endpoint: c_uint) -> StatusCode {
    if let Some(memory) = Memory::existing() {
        memory.registrations.releasing_object(endpoint.into());
    }
    call.real()
}

/// Work of its stream, like a launch: it waits while the program is held. The real function gets the list, with the driver's handles in it.
pub unsafe fn map_array(call: &mut Call, list: *mut CUarrayMapInfo, count: c_uint) -> StatusCode {
    static GATED: Gated = Gated("cuMemMapArrayAsync");
    // SAFETY: the program's promise.
    gate::pass(&GATED, || unsafe { with_real_handles(list, count, || call.real()) })
}

/// Puts the driver's handles into a list of the program's for the duration of a call.
///
/// # Safety
/// `list` must be null or point to `count` elements.
unsafe fn with_real_handles(list: *mut CUarrayMapInfo, count: c_uint, real: impl FnOnce() -> StatusCode) -> StatusCode {
    if list.is_null() {
        return real();
    }
    let mut before = Vec::new();
    for at in 0..count as usize {
        // SAFETY: the caller's promise. The handle is eight bytes whatever the union holds; the element stays untyped, because
        // the program may use values that are newer than this library.
        let place = unsafe { ptr::addr_of_mut!((*list.add(at)).memHandle).cast::<Handle>() };
        // SAFETY: as above.
        let handle = unsafe { place.read_unaligned() };
        if !is_ours(handle) {
            continue;
        }
        let answer = existing(|memory| {
            memory.share_handle(handle, "cuMemMapArrayAsync", RegisteredUntil::ItsEnd, |own| {
                // SAFETY: as above.
                unsafe { place.write_unaligned(own) };
                code::SUCCESS
            })
        })
        .unwrap_or(code::INVALID_VALUE);
        if answer != code::SUCCESS {
            restore(&before);
            return answer;
        }
        before.push((place, handle));
    }
    let answer = real();
    restore(&before);
    answer
}

fn restore(before: &[(*mut Handle, Handle)]) {
    for (place, handle) in before {
        // SAFETY: elements of the program's list, as in `with_real_handles`.
        unsafe { place.write_unaligned(*handle) };
    }
}

/// Asks the registry, if there is one yet.
fn existing<T>(ask: impl FnOnce(&'static Memory) -> Option<T>) -> Option<T> {
    Memory::existing().and_then(ask)
}
