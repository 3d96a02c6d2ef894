//! Memory that the program manages itself: it creates physical memory (`cuMemCreate`), maps it at addresses that it has reserved, and sets
//! which devices may access it.
//!
//! The program gets the library's handles, which stay the same while the driver's change with each pause and resume. Its other calls are
//! passed to the driver at once if the memory is active, and recorded; a resume repeats them. While the memory is paused, they are only
//! recorded.
//!
//! Each function returns `None` if the memory is not managed; then the caller uses the real function. `real` calls that function.

use super::obstacles::RegisteredUntil;
use super::registry::{Contents, MappedPiece, Mapping, Registry, end_of, next_handle};
use super::{Allocation, Memory, Origin, Placement, borrow, is_ours, limited, reserved};
use crate::contexts;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use vramctl_driver::{self as driver, Access, Account, CUdevice, CUdeviceptr, Current, Physical, Place, Properties, RelaxedCapture};
use vramctl_host::Held;
use vramctl_model::{Bytes, Error, Failure, Span, StatusCode, code};

impl Memory {
    /// Creates physical memory on a device, or the host's for it, and returns the handle. Leaves nothing behind on error.
    pub fn create(&self, placement: &Placement, wanted: &Properties, bytes: usize, current: &Current) -> Result<u64, Error> {
        let on_host = wanted.is_on_host();
        let Some(device) = wanted.device().or(on_host.then_some(current.device())) else { return Err(Error::Unsupported) };
        contexts::note(current);
        let _relaxed = RelaxedCapture::enter();
        let create = || {
            let _shared = self.share();
            if !on_host {
                self.check_margin(device, bytes)?;
            }
            let charge = if on_host { None } else { limited::charge(device, bytes)? };
            let memory = self.physical(|| Physical::create_as(wanted, Account::of(device, &placement.tag), bytes))?;
            let handle = next_handle();
            let origin = Origin::Created { handle, properties: *wanted };
            let made = Allocation::new(placement.clone(), device, current.owner(), memory, BTreeMap::new(), origin);
            made.contents().charge = charge;
            self.registry.insert(Arc::new(made));
            Ok(handle)
        };
        let released = self.registry.released();
        create().or_else(|error: Error| {
            let is_short = error.cuda_code() == code::OUT_OF_MEMORY && !on_host;
            if is_short && self.registry.free_up(device, bytes, released) { create() } else { Err(error) }
        })
    }

    /// Makes a call about addresses at which the program may have mapped managed memory, while none of that is paused or resumed: what the
    /// registry knows of the call's memory is still so when the driver answers.
    pub fn while_none_moves<R>(&self, call: impl FnOnce(&Registry) -> R) -> R {
        let _shared = (!self.registry.mapped.is_empty()).then(|| self.share());
        call(&self.registry)
    }

    /// `cuMemMap`. `real` maps the driver's handle.
    pub fn map(&self, span: Span, offset: usize, handle: u64, flags: u64, real: impl FnOnce(u64) -> StatusCode) -> Option<StatusCode> {
        if !is_ours(handle) {
            return None;
        }
        let _shared = self.share();
        let allocation = match self.registry.of_handle(handle) {
            Ok(allocation) => allocation,
            Err(code) => return Some(code),
        };
        if self.registry.has_hole_in(span) {
            return Some(code::INVALID_VALUE);
        }
        let place = Place::of_program(span);
        let mut contents = allocation.contents();
        if let Some(memory) = contents.state.memory_mut() {
            let answer = memory.handle().map_or(code::INVALID_VALUE, real);
            if answer != code::SUCCESS {
                return Some(answer);
            }
            memory.note_mapped(place.clone());
        } else if flags != 0 {
            return Some(code::INVALID_VALUE);
        } else if offset != 0 || span.bytes != allocation.bytes() {
            // As driver 580 answers for a part of a handle.
            return Some(code::NOT_SUPPORTED);
        } else if !is_aligned(span.address, allocation.device)
            || !self.registry.mapped.touched_by(span).is_empty()
            || !reserved::is_free(span, allocation.device)
        {
            return Some(code::INVALID_VALUE);
        }
        // Nobody has access to a new mapping.
        let is_tried = contents.state.memory().is_some();
        contents.add(Mapping { place, access: Some(Arc::default()), is_tried });
        drop(contents);
        self.registry.mapped.insert(span.address, allocation);
        Some(code::SUCCESS)
    }

    /// `cuMemUnmap`. `real` unmaps the range.
    pub fn unmap(&self, span: Span, real: impl FnOnce() -> StatusCode) -> Option<StatusCode> {
        if self.registry.mapped.is_empty() {
            return None;
        }
        let _shared = self.share();
        let found = self.registry.mapped.touched_by(span);
        if found.is_empty() {
            return None;
        }
        let end = span.address.saturating_add(span.bytes as u64);
        if found.iter().any(|(base, one)| *base < span.address || base + one.bytes() as u64 > end) {
            return Some(code::INVALID_VALUE);
        }
        let covered: usize = found.iter().map(|(_, one)| one.bytes()).sum();
        // The driver ignores the holes that paused memory leaves.
        if covered < span.bytes || found.iter().any(|(base, one)| is_backed_at(*base, one)) {
            let answer = real();
            if answer != code::SUCCESS {
                return Some(answer);
            }
        }
        self.registry.mapped.remove(found.iter().map(|(base, _)| *base));
        for (base, allocation) in found {
            {
                let mut contents = allocation.contents();
                contents.mappings.remove(&base);
                if let Some(memory) = contents.state.backing_mut() {
                    memory.note_unmapped(base);
                }
            }
            self.end_if_unused(&allocation);
        }
        Some(code::SUCCESS)
    }

    /// `cuMemSetAccess`. `real` sets it for a range.
    pub fn set_access(&self, span: Span, access: &[Access], mut real: impl FnMut(Span) -> StatusCode) -> Option<StatusCode> {
        if self.registry.mapped.is_empty() {
            return None;
        }
        let _shared = self.share();
        if !self.registry.mapped.touched_by(span).iter().any(|(_, one)| one.is_unmapped()) {
            let answer = real(span);
            if answer == code::SUCCESS {
                note_access(&self.registry.leading_mappings(span), access);
            }
            return Some(answer);
        }
        Some(self.set_access_around_paused(span, access, real).err().unwrap_or(code::SUCCESS))
    }

    /// The same for a range with paused memory in it: the driver gets the ranges between, which may belong to somebody else.
    fn set_access_around_paused(&self, span: Span, access: &[Access], mut real: impl FnMut(Span) -> StatusCode) -> Result<(), StatusCode> {
        let leading = self.registry.leading_mappings(span);
        let is_whole = self.registry.mapping_at(end_of(span) - 1).is_some_and(|last| end_of(last.span) == end_of(span));
        if leading.is_empty() || !is_whole {
            return Err(code::INVALID_VALUE);
        }
        let paused = leading.iter().filter_map(MappedPiece::unmapped);
        paused.flat_map(|one| access.iter().map(|access| one.check(*access))).collect::<Result<(), _>>()?;
        for mappings in leading.chunk_by(|one, next| one.unmapped().is_some() == next.unmapped().is_some()) {
            if mappings.iter().all(|mapping| mapping.unmapped().is_none()) {
                let active = Span::contiguous(mappings.iter().map(|mapping| mapping.span));
                active.map(&mut real).find(|answer| *answer != code::SUCCESS).map_or(Ok(()), Err)?;
            }
            note_access(mappings, access);
        }
        Ok(())
    }

    /// Before a resume: tries the mappings that the program has made, and the access that it has given, while the memory was paused. What the
    /// driver refuses now, it would have refused then: the memory comes back without that. Returns what it is, in words. Under the exclusive
    /// transition lock.
    pub(crate) fn try_mappings(&self, paused: &[Arc<Allocation>]) -> Vec<String> {
        let mut refused = Vec::new();
        for allocation in paused.iter().filter(|one| one.contents().mappings.values().any(|mapping| !mapping.is_tried)) {
            let Some(wanted) = allocation.origin().properties() else { continue };
            let account = Account { device: allocation.device, label: None };
            // Without memory for it, the resume says so.
            let Ok(mut memory) = Physical::create_as(wanted, account, allocation.bytes()) else { continue };
            let untried: Vec<_> = allocation.contents().mappings.values().filter(|mapping| !mapping.is_tried).cloned().collect();
            for mapping in untried {
                let Some(tried) = Tried::of(&mapping, &mut memory) else { continue };
                self.keep_of_mapping(allocation, mapping.address(), tried.access);
                let Some(failure) = tried.refused else { continue };
                let what = Bytes(allocation.bytes() as u64);
                let text =
                    format!("{what} of tag {} at {:#x}, mapped or opened while paused: {failure}", allocation.tag, mapping.address());
                log::warn!("the memory comes back without what the driver refuses: {text}");
                refused.push(text);
            }
        }
        refused
    }

    /// Keeps these of the devices with access to a mapping or, for `None`, does without the mapping.
    fn keep_of_mapping(&self, allocation: &Allocation, base: CUdeviceptr, access: Option<Arc<[Access]>>) {
        let mut contents = allocation.contents();
        if let Some(access) = access {
            if let Some(mapping) = contents.mappings.get_mut(&base) {
                (mapping.access, mapping.is_tried) = (Some(access), true);
            }
        } else {
            contents.mappings.remove(&base);
            drop(contents);
            self.registry.mapped.remove([base]);
        }
    }

    /// `cuMemRelease`.
    pub fn release_handle(&self, handle: u64) -> Option<StatusCode> {
        if !is_ours(handle) {
            return None;
        }
        let _shared = self.share();
        let allocation = match self.registry.of_handle(handle) {
            Ok(allocation) => allocation,
            Err(code) => return Some(code),
        };
        {
            let mut contents = allocation.contents();
            // Another thread may have released it since.
            let Some(left) = contents.references.checked_sub(1) else { return Some(code::INVALID_VALUE) };
            contents.references = left;
        }
        self.end_if_unused(&allocation);
        Some(code::SUCCESS)
    }

    /// `cuMemRetainAllocationHandle`: the handle of what is mapped at an address.
    pub fn retain_handle(&self, address: CUdeviceptr) -> Option<Result<u64, StatusCode>> {
        let _shared = self.share();
        let Some((_, allocation)) = self.registry.mapped.at(address) else {
            // Memory of `cudaMalloc` has no handle, nor has that of CUDA IPC; programs recognise it by this error.
            let is_known = self.registry.find(address).is_some() || borrow::at(address).is_some();
            return is_known.then_some(Err(code::INVALID_VALUE));
        };
        allocation.contents().references += 1;
        Some(Ok(allocation.key()))
    }

    /// `cuMemGetAllocationPropertiesFromHandle`.
    pub fn properties_of(&self, handle: u64) -> Option<Result<Properties, StatusCode>> {
        if !is_ours(handle) {
            return None;
        }
        Some(self.registry.of_handle(handle).and_then(|allocation| allocation.origin().properties().copied().ok_or(code::INVALID_VALUE)))
    }

    /// Whether the memory behind a handle of the library's is paused.
    pub fn is_handle_paused(&self, handle: u64) -> bool {
        is_ours(handle) && self.registry.of_handle(handle).is_ok_and(|allocation| allocation.is_unmapped())
    }

    /// Passes the driver's handle to a call that shares it: with another process, a multicast object, a sparse array. From then on the
    /// memory cannot be replaced. For paused memory, the answer is an invalid value.
    pub fn share_handle(
        &self,
        handle: u64,
        call: &'static str,
        until: RegisteredUntil,
        real: impl FnOnce(u64) -> StatusCode,
    ) -> Option<StatusCode> {
        self.with_driver_handle(handle, real, |allocation, contents| self.registrations.record(allocation, contents, call, until))
    }

    /// `cuMemExportToShareableHandle`, to a descriptor. `copied`: another descriptor of it, and the program's number for it. The memory counts as
    /// registered until a process under the library has claimed it and the program has closed it, and for good if there is no copy, or if it is
    /// another process's.
    pub fn export_handle(
        &self,
        handle: u64,
        real: impl FnOnce(u64) -> StatusCode,
        copied: impl FnOnce() -> Option<(Held, RawFd)>,
    ) -> Option<StatusCode> {
        self.with_driver_handle(handle, real, |allocation, contents| match copied().filter(|_| allocation.origin().token().is_none()) {
            Some((file, number)) => {
                let mark = contents.lending.exported(file, number);
                contents.mark(&mark);
            }
            None => self.registrations.record(allocation, contents, "cuMemExportToShareableHandle", RegisteredUntil::ItsEnd),
        })
    }

    /// Passes the driver's handle to a call, whose success `note` records.
    fn with_driver_handle(
        &self,
        handle: u64,
        real: impl FnOnce(u64) -> StatusCode,
        note: impl FnOnce(&Arc<Allocation>, &mut Contents),
    ) -> Option<StatusCode> {
        if !is_ours(handle) {
            return None;
        }
        let _shared = self.share();
        let allocation = match self.registry.of_handle(handle) {
            Ok(allocation) => allocation,
            Err(code) => return Some(code),
        };
        let mut contents = allocation.contents();
        let Some(driver_handle) = contents.state.memory().and_then(Physical::handle) else { return Some(code::INVALID_VALUE) };
        let answer = real(driver_handle);
        if answer == code::SUCCESS {
            note(&allocation, &mut contents);
        }
        Some(answer)
    }

    /// Releases memory that the program neither owns nor has mapped, and that no other process has open.
    pub(super) fn end_if_unused(&self, allocation: &Arc<Allocation>) {
        if !allocation.is_unused() {
            return;
        }
        // Exactly one of two threads removes it.
        if let Some(token) = allocation.origin().token() {
            if self.registry.remove_import(allocation) {
                allocation.end();
                borrow::released(token);
            }
        } else if self.registry.remove(allocation.key()).is_some() {
            allocation.end();
        }
        self.let_go();
    }

    /// Ends what other processes have closed since the program has given it up, and could not be ended then. Under the exclusive transition lock.
    pub(crate) fn end_unused(&self) {
        let unused = self.registry.snapshot().into_iter().filter(|allocation| allocation.is_unused());
        unused.filter_map(|allocation| self.registry.remove(allocation.key())).for_each(|allocation| allocation.end());
    }

    /// Gives paused or active memory addresses for copies, if the program has mapped it nowhere with full access.
    pub(crate) fn make_reachable(&self, allocations: &[Arc<Allocation>]) -> Result<(), Failure> {
        for allocation in allocations {
            let added = allocation.make_reachable()?;
            if added && let Err(failure) = self.open([&**allocation]) {
                allocation.make_unreachable();
                return Err(failure);
            }
        }
        Ok(())
    }
}

/// What the driver says to a mapping.
struct Tried {
    refused: Option<Failure>,
    /// The access that it grants; `None` if it refuses the mapping.
    access: Option<Arc<[Access]>>,
}

impl Tried {
    /// `None` if the driver fails for another reason than the mapping.
    fn of(mapping: &Mapping, memory: &mut Physical) -> Option<Self> {
        fn is_refusal(failure: &Failure) -> bool {
            matches!(failure.code, code::INVALID_VALUE | code::INVALID_DEVICE | code::NOT_SUPPORTED)
        }
        let place = &mapping.place;
        // What a driver refuses once, it may grant a moment later.
        if let Err(failure) = memory.map(place).or_else(|_| memory.map(place)) {
            return is_refusal(&failure).then_some(Self { refused: Some(failure), access: None });
        }
        let mut refused = None;
        let is_granted = |access: &Access| {
            let open = || driver::open([(place.span(), [*access].into())]);
            let failure = open().or_else(|_| open()).err().filter(is_refusal);
            let is_granted = failure.is_none();
            refused = refused.take().or(failure);
            is_granted
        };
        let access = mapping.access.iter().flat_map(|all| all.iter()).copied().filter(is_granted).collect();
        memory.unmap_from(mapping.address());
        Some(Self { refused, access: Some(access) })
    }
}

/// Whether the driver has anything of an allocation at an address: its memory, or a guard.
fn is_backed_at(base: CUdeviceptr, allocation: &Allocation) -> bool {
    allocation.contents().state.backing().is_some_and(|memory| memory.spans().any(|span| span.address == base))
}

/// Whether memory of a device can be mapped at an address.
fn is_aligned(address: CUdeviceptr, device: CUdevice) -> bool {
    driver::granularity(device).is_ok_and(|granularity| address.is_multiple_of(granularity as u64))
}

/// Records access to managed mappings.
fn note_access(mappings: &[MappedPiece], access: &[Access]) {
    for MappedPiece { span, allocation } in mappings {
        if let Some(allocation) = allocation {
            note_access_at(span.address, allocation, access);
        }
    }
}

/// Records access, by location.
fn note_access_at(base: CUdeviceptr, allocation: &Allocation, access: &[Access]) {
    let mut contents = allocation.contents();
    let is_there = contents.state.memory().is_some();
    let Some(mapping) = contents.mappings.get_mut(&base) else { return };
    mapping.is_tried &= is_there;
    let mut all: Vec<_> = mapping.access.iter().flat_map(|access| access.iter().copied()).collect();
    for new in access {
        match all.iter_mut().find(|old| old.location == new.location) {
            Some(old) => *old = *new,
            None => all.push(*new),
        }
    }
    // Sorted, so that adjacent mappings with the same access can be opened in one call.
    all.sort_unstable_by_key(|access| access.location.device());
    mapping.access = Some(all.into());
}
