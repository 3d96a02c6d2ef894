//! Allocations by address, for pointers into the middle. Programs ask about pointers that are not managed, too, perhaps at every
//! call: with 4000 allocations, looking at each took 70 µs.

use super::Allocation;
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock, RwLockWriteGuard};
use vramctl_driver::CUdeviceptr;
use vramctl_host::Unpoison;
use vramctl_model::Span;

/// Allocations by the first address of each place where the program has them. No lock is held during calls of the driver's.
#[derive(Default)]
pub(in crate::memory) struct AddressIndex(RwLock<BTreeMap<CUdeviceptr, Arc<Allocation>>>);

impl AddressIndex {
    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<CUdeviceptr, Arc<Allocation>>> {
        self.0.write().unpoisoned()
    }

    pub fn is_empty(&self) -> bool {
        self.0.read().unpoisoned().is_empty()
    }

    pub fn insert(&self, base: CUdeviceptr, allocation: Arc<Allocation>) {
        self.write().insert(base, allocation);
    }

    pub fn remove(&self, bases: impl IntoIterator<Item = CUdeviceptr>) {
        let mut index = self.write();
        let removed: Vec<_> = bases.into_iter().filter_map(|base| index.remove(&base)).collect();
        // Whoever drops the last reference gives memory back.
        drop(index);
        drop(removed);
    }

    /// What a range touches, in address order.
    pub fn touched_by(&self, span: Span) -> Vec<(CUdeviceptr, Arc<Allocation>)> {
        let index = self.0.read().unpoisoned();
        let end = span.address.saturating_add(span.bytes as u64);
        let backwards = index.range(..end).rev().take_while(|(base, allocation)| **base + allocation.bytes() as u64 > span.address);
        let mut found: Vec<_> = backwards.map(|(base, one)| (*base, Arc::clone(one))).collect();
        found.reverse();
        found
    }

    /// What is at an address, and where it begins.
    pub fn at(&self, address: CUdeviceptr) -> Option<(CUdeviceptr, Arc<Allocation>)> {
        self.touched_by(Span { address, bytes: 1 }).pop()
    }
}
