//! The allocations of this process, by address and by handle, and what is known of each.
//!
//! Nothing here takes the transition lock. No map is locked during a call of the driver.

mod address_index;
mod allocation;
mod freed;
mod handle;
mod keyed;
pub mod lending;
mod mappings;
mod pools;
mod registrant;
mod requester;
pub mod state;

pub(crate) use allocation::unmap;
pub use allocation::{Allocation, Malloc, Origin, Placement};
pub(super) use allocation::{Contents, FreedAt, Mapping};
pub(super) use freed::Freed;
pub use handle::is_ours;
pub(super) use handle::next_handle;
pub(super) use keyed::{Keyed, Spread};
pub(super) use mappings::{MappedPiece, end_of};
pub use pools::{Level, PoolUse};
pub(super) use registrant::{Registrant, RegistrantMark};
pub use requester::Requester;
pub use state::{PausedBy, Released, State};

use address_index::AddressIndex;
use lending::Token;
use pools::Pools;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use vramctl_driver::CUdeviceptr;
use vramctl_model::{Span, StatusCode, code};

/// The allocations of this process.
#[derive(Default)]
pub struct Registry {
    /// By address, or by handle.
    allocations: Keyed<Arc<Allocation>>,
    /// What the program has imported, by handle. It is its owner's.
    imports: Keyed<Arc<Allocation>>,
    /// Memory of `cudaMalloc`, by address.
    plain: AddressIndex,
    /// The program's own mappings, by address.
    pub(super) mapped: AddressIndex,
    /// Memory freed in stream order and not released yet.
    pub(super) freed: freed::Unreleased,
    /// What stands for memory of default pools.
    pub pools: Pools,
}

impl Registry {
    /// Records an allocation.
    pub(super) fn insert(&self, allocation: Arc<Allocation>) {
        let key = allocation.key();
        if allocation.origin().is_malloc() {
            self.plain.insert(key, Arc::clone(&allocation));
        }
        self.pools.allocated(&allocation);
        self.allocations.insert(key, allocation);
    }

    /// Removes an allocation: exactly one of two threads gets it. Nobody else gets its addresses before it is ended.
    pub(super) fn remove(&self, key: u64) -> Option<Arc<Allocation>> {
        let (_, allocation) = self.allocations.remove(&key)?;
        if allocation.origin().is_malloc() {
            self.plain.remove([key]);
        }
        self.pools.freed(&allocation);
        Some(allocation)
    }

    /// Records an import.
    pub(super) fn insert_import(&self, import: Arc<Allocation>) {
        self.imports.insert(import.key(), import);
    }

    /// Removes an import. Returns whether this thread has.
    pub(super) fn remove_import(&self, import: &Allocation) -> bool {
        self.imports.remove(&import.key()).is_some()
    }

    /// The allocation with this address or handle.
    pub(super) fn get(&self, key: u64) -> Option<Arc<Allocation>> {
        self.allocations.get(&key).map(|entry| Arc::clone(&entry))
    }

    /// Whether an allocation starts at `address`.
    pub fn manages(&self, address: CUdeviceptr) -> bool {
        self.allocations.get(&address).is_some_and(|entry| entry.origin().is_malloc())
    }

    /// Whether an allocation begins at an address, even one that is ending.
    #[inline]
    pub fn knows(&self, address: CUdeviceptr) -> bool {
        self.allocations.contains_key(&address)
    }

    /// The allocation that contains `address`.
    pub fn find(&self, address: CUdeviceptr) -> Option<Arc<Allocation>> {
        self.get(address).or_else(|| self.mapped.at(address).or_else(|| self.plain.at(address)).map(|(_, allocation)| allocation))
    }

    /// The allocations that a range touches.
    pub(super) fn touched_by(&self, span: Span) -> Vec<Arc<Allocation>> {
        [&self.plain, &self.mapped].into_iter().flat_map(|index| index.touched_by(span)).map(|(_, allocation)| allocation).collect()
    }

    /// The allocation or import behind a handle that the program still owns.
    pub(super) fn of_handle(&self, handle: u64) -> Result<Arc<Allocation>, StatusCode> {
        let found = self.get(handle).or_else(|| self.imports.get(&handle).map(|entry| Arc::clone(&entry)));
        found.filter(|allocation| allocation.contents().references > 0).ok_or(code::INVALID_VALUE)
    }

    /// The allocation that other processes know by this token.
    pub(super) fn with_token(&self, token: &Token) -> Option<Arc<Allocation>> {
        self.get(lending::key_of(token)?).filter(|allocation| allocation.contents().lending.is(token))
    }

    /// The allocation behind a descriptor that this process has exported.
    pub(super) fn with_export(&self, file: BorrowedFd<'_>) -> Option<Arc<Allocation>> {
        self.snapshot().into_iter().find(|allocation| allocation.contents().lending.has_exported(file))
    }

    /// The addresses that `cudaMalloc` has returned.
    pub fn addresses(&self) -> Vec<CUdeviceptr> {
        self.snapshot().iter().filter(|allocation| allocation.origin().is_malloc()).map(|allocation| allocation.key()).collect()
    }

    /// Records who asked for the allocation with this address or handle.
    pub fn note_requester(&self, key: u64, requester: Requester) {
        if let Some(allocation) = self.allocations.get(&key) {
            let _ = allocation.requester.set(requester);
        }
    }

    /// All allocations; does not hold the map.
    pub fn all(&self) -> Vec<Arc<Allocation>> {
        self.allocations.iter().map(|entry| Arc::clone(&entry)).collect()
    }

    /// The same in address order; those without an address, whose handles are above all addresses, come last.
    pub fn snapshot(&self) -> Vec<Arc<Allocation>> {
        let mut all = self.all();
        all.sort_by_cached_key(|allocation| allocation.address().unwrap_or(allocation.key()));
        all
    }

    /// Whether an allocation still belongs to the program. A snapshot may contain one that has been freed since.
    pub(crate) fn has(&self, allocation: &Arc<Allocation>) -> bool {
        self.allocations.get(&allocation.key()).is_some_and(|entry| Arc::ptr_eq(&entry, allocation))
    }
}
