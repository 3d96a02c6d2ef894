//! Plain device memory: the `cuMemAlloc` family, and pointer attributes.

use crate::abi::{Address, Handle, In, Out};
use crate::codes::{INVALID_VALUE, NOT_FOUND, Outcome};
use crate::context;
use crate::copy::Work;
use crate::driver::{State, state};
use crate::stream;
use crate::vmm::{OF_ALL, Purpose, Range};
use std::ffi::c_void;

/// The pitch of `cuMemAllocPitch` is a multiple of this.
const PITCH: usize = 512;

/// `cuMemAlloc`.
pub fn allocate(pointer: Out<Address>, bytes: usize) -> Outcome {
    pointer.required()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let context = context::current()?;
    let purpose = Purpose::Plain { context: context.owner(), pool: None };
    let address = state().space.allocate(bytes, context.device, purpose, OF_ALL)?;
    pointer.put(address)
}

/// `cuMemAllocPitch`: wrong arguments are refused first, and do not end a capture.
pub fn allocate_pitch(pointer: Out<Address>, pitch: Out<usize>, width: usize, height: usize, element: u32) -> Outcome {
    pointer.required()?;
    pitch.required()?;
    if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
        return Err(INVALID_VALUE);
    }
    state().captures.refuse_unsafe_call()?;
    let row = width.checked_next_multiple_of(PITCH).ok_or(INVALID_VALUE)?;
    allocate(pointer, row.checked_mul(height).ok_or(INVALID_VALUE)?)?;
    pitch.put(row)
}

/// `cuMemAllocManaged`. Page migration is not simulated: all of the memory counts as device memory.
pub fn allocate_managed(pointer: Out<Address>, bytes: usize, flags: u32) -> Outcome {
    pointer.required()?;
    if bytes == 0 || !matches!(flags, 1 | 2) {
        return Err(INVALID_VALUE);
    }
    let context = context::current()?;
    let purpose = Purpose::Managed { context: context.owner() };
    let address = state().space.allocate(bytes, context.device, purpose, OF_ALL)?;
    pointer.put(address)
}

/// `cuMemFree`: first waits for the work of the allocation's context, without disturbing captures, and holds up other calls of that context
/// meanwhile.
pub fn free(address: Address) -> Outcome {
    if address == 0 {
        return context::current().map(drop);
    }
    let (context, pending) = {
        let state = state();
        let owner = state.space.owner(address).ok_or(INVALID_VALUE)?;
        let context = state.contexts.get(owner)?;
        context.check()?;
        (context, state.streams.pending(owner))
    };
    context.wait_alone(&pending);
    context.check()?;
    if state().space.release_plain(address) { Ok(()) } else { Err(INVALID_VALUE) }
}

/// `cuMemAllocAsync`: from the default pool of the stream's device.
pub fn allocate_async(pointer: Out<Address>, bytes: usize, stream: Handle) -> Outcome {
    allocate_in_order(pointer, bytes, None, stream)
}

/// `cuMemAllocFromPoolAsync`: not from an imported pool.
pub fn allocate_from_pool(pointer: Out<Address>, bytes: usize, pool: Handle, stream: Handle) -> Outcome {
    allocate_in_order(pointer, bytes, Some(pool), stream)
}

/// Allocates at once, which a stream cannot distinguish from stream order. Memory that was freed before in the same stream is reused.
fn allocate_in_order(pointer: Out<Address>, bytes: usize, pool: Option<Handle>, stream: Handle) -> Outcome {
    pointer.required()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    let stream = stream::find(&mut state, stream)?;
    // Allocation nodes are not simulated.
    state.captures.refuse(stream.handle)?;
    let pool = pool.unwrap_or_else(|| state.pools.default_of(stream.context.device));
    state.pools.check_own(pool)?;
    let (device, access) = (state.pools.device(pool)?, state.pools.access(pool)?);
    let purpose = Purpose::Plain { context: stream.context.owner(), pool: Some(pool) };
    let address = match state.space.reuse(bytes, purpose, stream.id) {
        Some(address) => address,
        None => state.space.allocate(bytes, device, purpose, access)?,
    };
    let State { pools, space, .. } = &mut *state;
    pools.note_peak(pool, space);
    pointer.put(address)
}

/// `cuMemFreeAsync`: frees in stream order. A graph frees only what it has allocated, which is not simulated.
pub fn free_async(address: Address, stream: Handle) -> Outcome {
    let mut state = state();
    let stream = stream::find(&mut state, stream)?;
    if state.captures.is_capturing(stream.handle) {
        return if address == 0 { Ok(()) } else { Err(INVALID_VALUE) };
    }
    state.captures.refuse_unsafe_call()?;
    if address == 0 {
        return Ok(());
    }
    if state.space.owner(address).is_none() {
        return Err(INVALID_VALUE);
    }
    let id = state.space.free_in_order(address, stream.id);
    stream::submit(&mut state, &stream, Work::Free { address, id })?;
    Ok(())
}

/// `cuMemGetAddressRange`: the allocation or mapping, if any device can access it; otherwise nothing, and an error.
pub fn address_range(base: Out<Address>, bytes: Out<usize>, address: Address) -> Outcome {
    let range = state().space.find(address).filter(|range| range.accessible);
    let (first, length) = match range {
        Some(Range { purpose: Purpose::Virtual, base, bytes, .. }) => (base, bytes),
        Some(range) => range.reservation,
        None => (0, 0),
    };
    base.put_if_given(first);
    bytes.put_if_given(length);
    range.map(drop).ok_or(NOT_FOUND)
}

/// The supported values of `CUpointer_attribute`.
mod attribute {
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const DEVICE_POINTER: i32 = 3;
    pub const HOST_POINTER: i32 = 4;
    pub const SYNC_MEMOPS: i32 = 6;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const IS_LEGACY_IPC_CAPABLE: i32 = 10;
    pub const RANGE_START: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const MAPPED: i32 = 13;
    pub const ALLOWED_HANDLE_TYPES: i32 = 14;
    pub const MEMPOOL_HANDLE: i32 = 17;
    pub const MAPPING_SIZE: i32 = 18;
    pub const MAPPING_BASE_ADDR: i32 = 19;
}

/// An attribute's value in C: 4 bytes or 8.
enum Value {
    Wide(u64),
    Narrow(u32),
}

/// A pointer attribute; `None` if the driver does not know the pointer.
fn look_up(state: &State, which: i32, address: Address) -> Outcome<Option<Value>> {
    use Value::{Narrow, Wide};
    let device = state.space.find(address);
    let host = state.host.find(address);
    let (context, managed, legacy) = match device.map(|range| range.purpose) {
        Some(Purpose::Plain { context, pool: None }) => (context, false, true),
        Some(Purpose::Managed { context }) => (context, true, false),
        Some(Purpose::Opened { context }) => (context, false, false),
        // It belongs to none.
        Some(Purpose::Plain { pool: Some(_), .. } | Purpose::Virtual) | None => (0, false, false),
    };
    let (base, bytes, ordinal, id, (start, size)) = match (device, host) {
        (Some(range), _) => (range.base, range.bytes, range.device, range.id, range.reservation),
        (None, Some((base, bytes))) => (base, bytes, 0, base, (base, bytes)),
        (None, None) => return Ok(None),
    };
    Ok(Some(match which {
        attribute::CONTEXT => Wide(context),
        attribute::MEMORY_TYPE => Narrow(if device.is_some() { 2 } else { 1 }),
        attribute::DEVICE_POINTER if device.is_some_and(|range| !range.accessible) => return Ok(None),
        attribute::DEVICE_POINTER => Wide(address),
        attribute::HOST_POINTER if host.is_some() || managed => Wide(address),
        attribute::HOST_POINTER => return Ok(None),
        attribute::SYNC_MEMOPS => Narrow(0),
        // For virtual memory, the whole reservation.
        attribute::BUFFER_ID => Wide(id),
        attribute::RANGE_START => Wide(start),
        attribute::MAPPING_BASE_ADDR => Wide(base),
        attribute::IS_MANAGED => Narrow(u32::from(managed)),
        attribute::DEVICE_ORDINAL => Narrow(ordinal as u32),
        attribute::IS_LEGACY_IPC_CAPABLE => Narrow(u32::from(legacy)),
        attribute::RANGE_SIZE => Wide(size as u64),
        attribute::MAPPING_SIZE => Wide(bytes as u64),
        attribute::MAPPED => Narrow(1),
        attribute::MEMPOOL_HANDLE => Wide(device.and_then(|range| range.purpose.pool()).unwrap_or(0)),
        attribute::ALLOWED_HANDLE_TYPES => Wide(state.space.physical(address).map_or(0, |physical| physical.handle_types().into())),
        _ => return Err(INVALID_VALUE),
    }))
}

fn store(data: *mut c_void, value: Value) -> Outcome {
    // SAFETY: CUDA's contract: the caller's buffer fits the attribute.
    unsafe {
        match value {
            _ if data.is_null() => return Err(INVALID_VALUE),
            Value::Wide(value) => data.cast::<u64>().write_unaligned(value),
            Value::Narrow(value) => data.cast::<u32>().write_unaligned(value),
        }
    }
    Ok(())
}

/// `cuPointerGetAttribute`: an unknown pointer is an invalid value.
pub fn pointer_attribute(data: *mut c_void, which: i32, address: Address) -> Outcome {
    store(data, look_up(&state(), which, address)?.ok_or(INVALID_VALUE)?)
}

/// `cuPointerSetAttribute`: only whether copies are synchronous, which the simulated device need not know.
pub fn set_pointer_attribute(value: In<u32>, which: i32, address: Address) -> Outcome {
    value.get()?;
    if which != attribute::SYNC_MEMOPS {
        return Err(INVALID_VALUE);
    }
    look_up(&state(), which, address)?.ok_or(INVALID_VALUE).map(drop)
}

/// `cuPointerGetAttributes`: "will not return `CUDA_ERROR_INVALID_VALUE` for an unknown pointer"; the attributes are zero
/// then. The range is that of the reservation even where nothing is mapped; without one, it is left as it was.
pub fn pointer_attributes(count: u32, which: In<i32>, data: In<*mut c_void>, address: Address) -> Outcome {
    let which = which.get_all(count as usize)?;
    let data = data.get_all(count as usize)?;
    let state = state();
    for (which, data) in which.into_iter().zip(data) {
        let value = match look_up(&state, which, address)? {
            Some(value) => value,
            None if which == attribute::DEVICE_ORDINAL => Value::Narrow(-2i32 as u32),
            None => match which {
                attribute::MEMORY_TYPE
                | attribute::SYNC_MEMOPS
                | attribute::IS_MANAGED
                | attribute::IS_LEGACY_IPC_CAPABLE
                | attribute::MAPPED => Value::Narrow(0),
                attribute::RANGE_START | attribute::RANGE_SIZE => match state.space.reserved_at(address) {
                    Some((start, _)) if which == attribute::RANGE_START => Value::Wide(start),
                    Some((_, bytes)) => Value::Wide(bytes as u64),
                    None => continue,
                },
                _ => Value::Wide(0),
            },
        };
        store(data, value)?;
    }
    Ok(())
}
