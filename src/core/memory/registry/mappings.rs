//! The program's own mappings (`cuMemMap`) of managed memory.

use super::{Allocation, Registry};
use std::sync::Arc;
use vramctl_driver::{self as driver, Access, CUdeviceptr, Location};
use vramctl_model::Span;

/// A mapping of the program's, and its allocation if it is managed.
pub struct MappedPiece {
    pub span: Span,
    pub allocation: Option<Arc<Allocation>>,
}

impl MappedPiece {
    /// Its allocation, if that is not mapped now.
    pub fn unmapped(&self) -> Option<&Allocation> {
        self.allocation.as_deref().filter(|allocation| allocation.is_unmapped())
    }
}

pub fn end_of(span: Span) -> CUdeviceptr {
    span.address.saturating_add(span.bytes as u64)
}

impl Registry {
    /// Whether the program has mapped memory in a range that is not mapped now: the driver sees a hole there.
    pub fn has_hole_in(&self, span: Span) -> bool {
        self.mapped.touched_by(span).iter().any(|(_, allocation)| allocation.is_unmapped())
    }

    /// The mapping at an address, whether or not it is mapped now.
    pub fn mapping_at(&self, address: CUdeviceptr) -> Option<MappedPiece> {
        if let Some((base, allocation)) = self.mapped.at(address) {
            return Some(MappedPiece { span: Span { address: base, bytes: allocation.bytes() }, allocation: Some(allocation) });
        }
        let known = driver::memory_at(address).ok()??;
        Some(MappedPiece { span: known.mapping, allocation: None })
    }

    /// The mappings from the start of a range to its first hole: there, `cuMemSetAccess` stops, and succeeds (driver 580).
    pub fn leading_mappings(&self, span: Span) -> Vec<MappedPiece> {
        let (mut leading, mut at) = (Vec::new(), span.address);
        while at < end_of(span)
            && let Some(next) = self.mapping_at(at).filter(|next| next.span.address == at && at < end_of(next.span))
            && end_of(next.span) <= end_of(span)
        {
            at = end_of(next.span);
            leading.push(next);
        }
        leading
    }

    /// `cuMemGetAccess`, of memory that is not mapped now: the driver has no mapping to ask. `None` for other memory.
    pub fn access_of_paused(&self, address: CUdeviceptr, location: Location) -> Option<u64> {
        let (base, allocation) = self.mapped.at(address).filter(|(_, allocation)| allocation.is_unmapped())?;
        let contents = allocation.contents();
        let mapping = contents.mappings.get(&base)?;
        let listed = mapping.access.as_ref()?.iter().find(|access| access.location == location).copied();
        Some(listed.map_or(0, Access::flags))
    }
}
