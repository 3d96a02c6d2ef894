//! What the driver knows of memory that is not managed.

use vramctl_core::memory::Memory;
use vramctl_driver::{self as driver, CUdeviceptr, KnownMemory};
use vramctl_model::{Failure, Span};

/// What a range touches and is not managed, up to the first hole: where each piece begins in the range, and what the driver knows of it. An
/// error of the driver ends the list.
pub fn touched_by(span: Span) -> Vec<(CUdeviceptr, Result<KnownMemory, Failure>)> {
    let (mut at, end) = (span.address, span.address.saturating_add(span.bytes as u64));
    let mut found = Vec::new();
    while at < end {
        let next = match end_of_managed(at) {
            Some(next) => next,
            None => match driver::memory_at(at) {
                Ok(None) => break,
                Ok(Some(known)) => {
                    found.push((at, Ok(known)));
                    known.mapping.address.saturating_add(known.mapping.bytes as u64)
                }
                Err(failure) => {
                    found.push((at, Err(failure)));
                    break;
                }
            },
        };
        if next <= at {
            break;
        }
        at = next;
    }
    found
}

/// Where the managed memory at an address ends; `None` if it is not managed.
pub fn end_of_managed(address: CUdeviceptr) -> Option<CUdeviceptr> {
    let allocation = Memory::existing()?.registry.find(address)?;
    Some(address - allocation.offset_of(address)? as u64 + allocation.bytes() as u64)
}

/// The first address of the allocation that contains an address; if the driver does not say, the address itself.
pub fn start_of(address: CUdeviceptr) -> CUdeviceptr {
    driver::memory_at(address).ok().flatten().map_or(address, |known| known.start)
}
