//! Host memory known to the driver: memory that it allocated, and memory that the program registered. Also accesses to
//! program memory that must not crash the process.

use crate::abi::{Address, Handle, Out};
use crate::codes::{HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::context;
use crate::driver::state;
use crate::vmm::Purpose;
use std::collections::BTreeMap;
use std::io;
use vramctl_host::stack;

const PAGE: usize = 4096;

#[derive(Debug)]
struct Range {
    bytes: usize,
    flags: u32,
    context: Handle,
    /// Bytes of address space if the driver allocated it; 0 if registered.
    allocated: usize,
}

/// The pinned ranges of host memory.
#[derive(Debug, Default)]
pub struct HostMemory {
    ranges: BTreeMap<Address, Range>,
}

impl HostMemory {
    fn containing(&self, address: Address) -> Option<(Address, &Range)> {
        let (&base, range) = self.ranges.range(..=address).next_back()?;
        (address - base < range.bytes as u64).then_some((base, range))
    }

    /// Start and size of the pinned range that contains an address.
    pub fn find(&self, address: Address) -> Option<(Address, usize)> {
        self.containing(address).map(|(base, range)| (base, range.bytes))
    }

    /// Whether bytes begin in a pinned range and end behind it, be it in another one. Copies of such are refused, whatever they do there;
    /// those that begin in front of a pinned range are not (observed with driver 580).
    pub fn is_left_by(&self, address: Address, bytes: usize) -> bool {
        self.find(address).is_some_and(|(base, pinned)| address + bytes as u64 > base + pinned as u64)
    }

    fn overlaps(&self, address: Address, bytes: usize) -> bool {
        self.ranges.range(..address + bytes as u64).next_back().is_some_and(|(&base, range)| base + range.bytes as u64 > address)
    }

    /// Number of registered ranges.
    pub fn registered(&self) -> usize {
        self.ranges.values().filter(|range| range.allocated == 0).count()
    }

    /// Frees and unregisters what belongs to a destroyed context.
    pub fn forget_context(&mut self, context: Handle) {
        self.ranges.retain(|&base, range| {
            if range.context == context {
                if range.allocated > 0 {
                    unmap(base, range.allocated);
                }
                return false;
            }
            true
        });
    }
}

/// `cuMemHostAlloc`: zeroed pinned memory, at the same address for host and device.
pub fn allocate(pointer: Out<Address>, bytes: usize, flags: u32) -> Outcome {
    pointer.required()?;
    if bytes == 0 || flags & !7 != 0 {
        return Err(INVALID_VALUE);
    }
    let context = context::current()?.handle;
    let space = bytes.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address chosen by the kernel.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), space, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    let address = address as Address;
    state().host.ranges.insert(address, Range { bytes, flags, context, allocated: space });
    pointer.put(address)
}

/// `cuMemFreeHost`: waits for the context's work, and holds up its other calls meanwhile.
pub fn free(address: Address) -> Outcome {
    let context = context::current()?;
    let owned = |state: &crate::driver::State| state.host.ranges.get(&address).is_some_and(|range| range.allocated > 0);
    let pending = {
        let state = state();
        if !owned(&state) {
            return Err(INVALID_VALUE);
        }
        state.streams.pending(context.handle)
    };
    context.wait_alone(&pending);
    context.check()?;
    let mut state = state();
    if !owned(&state) {
        return Err(INVALID_VALUE);
    }
    if let Some(range) = state.host.ranges.remove(&address) {
        unmap(address, range.allocated);
    }
    Ok(())
}

/// `cuMemHostRegister`.
pub fn register(address: Address, bytes: usize, flags: u32) -> Outcome {
    let context = context::current()?.handle;
    if address == 0 || bytes == 0 || address.checked_add(bytes as u64).is_none() {
        return Err(INVALID_VALUE);
    }
    let mut state = state();
    // Memory that the driver allocated does not count as registered and cannot be registered.
    if state.host.containing(address).is_some_and(|(_, range)| range.allocated > 0) {
        return Err(INVALID_VALUE);
    }
    if state.host.overlaps(address, bytes) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    if state.space.is_device(address) || !is_mapped(address, bytes) {
        return Err(INVALID_VALUE);
    }
    state.host.ranges.insert(address, Range { bytes, flags, context, allocated: 0 });
    Ok(())
}

/// `cuMemHostUnregister`: takes only the registered address; waits for the context's work, and holds up its other calls meanwhile.
pub fn unregister(address: Address) -> Outcome {
    let (context, pending) = {
        let state = state();
        match state.host.containing(address) {
            Some((base, range)) if base == address && range.allocated == 0 => {
                let context = state.contexts.get(range.context)?;
                context.check()?;
                (context, state.streams.pending(range.context))
            }
            Some((_, range)) if range.allocated == 0 => return Err(INVALID_VALUE),
            _ => return Err(HOST_MEMORY_NOT_REGISTERED),
        }
    };
    context.wait_alone(&pending);
    context.check()?;
    match state().host.ranges.remove(&address) {
        Some(_) => Ok(()),
        None => Err(HOST_MEMORY_NOT_REGISTERED),
    }
}

/// `cuMemHostGetDevicePointer`: the same address.
pub fn device_pointer(pointer: Out<Address>, address: Address, flags: u32) -> Outcome {
    let state = state();
    let is_virtual = || state.space.find(address).is_some_and(|range| range.purpose == Purpose::Virtual);
    if flags != 0 || !(state.host.find(address).is_some() || is_virtual()) {
        return Err(INVALID_VALUE);
    }
    pointer.put(address)
}

/// `cuMemHostGetFlags`.
pub fn get_flags(flags: Out<u32>, address: Address) -> Outcome {
    let state = state();
    let (_, range) = state.host.containing(address).ok_or(INVALID_VALUE)?;
    flags.put(range.flags)
}

fn unmap(address: Address, bytes: usize) {
    // SAFETY: a mapping of this module that the caller has removed from its list.
    unsafe { libc::munmap(address as *mut _, bytes) };
}

/// Whether the whole range is mapped in the program.
fn is_mapped(address: Address, bytes: usize) -> bool {
    // In chunks, so that a large range needs no large vector.
    const PIECE: usize = 64 << 20;
    let start = address as usize & !(PAGE - 1);
    let end = (address as usize + bytes).next_multiple_of(PAGE);
    let mut resident = vec![0u8; PIECE / PAGE];
    (start..end).step_by(PIECE).all(|piece| {
        let bytes = PIECE.min(end - piece);
        // SAFETY: mincore only fills the vector, and returns ENOMEM for unmapped memory.
        unsafe { libc::mincore(piece as *mut _, bytes, resident.as_mut_ptr()) == 0 }
    })
}

/// The direction of [`transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the program's memory.
    FromHost,
    /// To the program's memory.
    ToHost,
}

/// Copies between this library's memory and the program's, whose address may be invalid.
///
/// The kernel does the copy and returns an error where a plain access would crash the process: a real device does not crash
/// it either.
pub fn transfer(direction: Direction, ours: *mut u8, theirs: Address, bytes: usize) -> Outcome {
    let mut done = 0;
    while done < bytes {
        let local = libc::iovec { iov_base: ours.wrapping_add(done).cast(), iov_len: bytes - done };
        let remote = libc::iovec { iov_base: (theirs as usize + done) as *mut _, iov_len: bytes - done };
        // SAFETY: our side is owned by the caller; the kernel checks the other.
        let moved = unsafe {
            // The main thread may have ended.
            let process = stack::thread_id().cast_signed();
            match direction {
                Direction::FromHost => libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0),
                Direction::ToHost => libc::process_vm_writev(process, &raw const local, 1, &raw const remote, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(ILLEGAL_ADDRESS),
            Ok(moved) => done += moved,
            Err(_) => {
                let reason = io::Error::last_os_error().raw_os_error();
                if !matches!(reason, Some(libc::EPERM | libc::ENOSYS)) {
                    return Err(ILLEGAL_ADDRESS);
                }
                // Some sandboxes forbid this call even on oneself. Fall back to an unchecked copy.
                let theirs = (theirs as usize + done) as *mut u8;
                let ours = ours.wrapping_add(done);
                // SAFETY: as safe as the program's own access to these bytes.
                unsafe {
                    match direction {
                        Direction::FromHost => std::ptr::copy(theirs, ours, bytes - done),
                        Direction::ToHost => std::ptr::copy(ours, theirs, bytes - done),
                    }
                }
                return Ok(());
            }
        }
    }
    Ok(())
}
