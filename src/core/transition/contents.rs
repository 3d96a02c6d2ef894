//! Which contents a pause keeps, and where.

use super::Pause;
use crate::memory::Allocation;
use crate::prefix_cache::KV_CACHE;
use crate::{engine, prefix_cache};
use std::ops::Range;
use vramctl_backup as backup;
use vramctl_config::CpuBackupBackend;
use vramctl_model::{PauseRequest, Policy, Span};

/// The policy of a pause for an allocation: the caller's, or the allocation's own.
pub(super) fn policy_for(pause: &Pause, allocation: &Allocation) -> Policy {
    let options = &pause.request.options;
    let policy = options.backups.get(&*allocation.tag).copied().unwrap_or(options.backup).unwrap_or(allocation.backup);
    if is_forgotten(pause, allocation) {
        return Policy::Discard;
    }
    let is_described = policy == Policy::Discard && pause.request.amounts.is_some() && pause.engine.is_some();
    if is_described && may_hold_cache(&allocation.tag) { Policy::Host } else { policy }
}

/// Whether the engine has reset the prefix cache that described this, and the pause relies on it. A pause that has closed the gate knows that for
/// sure.
pub(super) fn is_forgotten(pause: &Pause, allocation: &Allocation) -> bool {
    is_kv_cache(pause, allocation) && prefix_cache::is_reset()
}

/// Whether it would probably be so if the engine were asked.
pub(super) fn may_be_forgotten(pause: &Pause, allocation: &Allocation) -> bool {
    is_kv_cache(pause, allocation) && prefix_cache::may_be_reset()
}

fn is_kv_cache(pause: &Pause, allocation: &Allocation) -> bool {
    let PauseRequest { options, amounts, .. } = &pause.request;
    (options.forgets_cache || amounts.is_some()) && pause.engine.is_some() && &*allocation.tag == KV_CACHE
}

/// Whether the KV cache of this process's engine may be in the memory of a tag.
pub(super) fn may_hold_cache(tag: &str) -> bool {
    // Unless the engine's adapter has said that it tags all of it (not in an unknown version), the cache may be in everything else.
    if engine::tags_cache() { tag == KV_CACHE } else { !["weights", "cuda_graph"].contains(&tag) }
}

/// Which contents of an allocation to keep, and where.
pub(super) fn wanted_of(pause: &Pause, allocation: &Allocation) -> backup::Wanted {
    let policy = policy_for(pause, allocation);
    let retain = backup::retains(&allocation.tag) || pause.request.scheduler.is_some() && backup::retains_unchanged(&allocation.tag);
    let all = Range { start: 0, end: allocation.bytes() };
    let live = match policy {
        Policy::Discard => Vec::new(),
        // Contents that are not kept could not be compared next time.
        _ if retain => vec![all],
        _ => without(all, pause.unused.iter().filter_map(|span| pages_inside(*span, allocation))),
    };
    let at_once = allocation.backend == CpuBackupBackend::Mmap;
    backup::Wanted { extent: allocation.extent(), policy, retain, at_once, before: allocation.contents().state.backup().cloned(), live }
}

/// The whole pages of an allocation inside a span, as offsets into the allocation. Less than a page is not worth its own
/// copy.
fn pages_inside(span: Span, allocation: &Allocation) -> Option<Range<usize>> {
    const PAGE: usize = 2 << 20;
    let base = allocation.address()?;
    let offset = |address: u64| address.saturating_sub(base).min(allocation.bytes() as u64) as usize;
    let start = offset(span.address).next_multiple_of(PAGE);
    let end = offset(span.address.saturating_add(span.bytes as u64)) / PAGE * PAGE;
    (start < end).then_some(start..end)
}

/// A range minus some parts, in order.
fn without(all: Range<usize>, parts: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut parts: Vec<_> = parts.collect();
    parts.sort_unstable_by_key(|part| part.start);
    let (mut left, mut from) = (Vec::new(), all.start);
    for part in parts {
        if part.start > from {
            left.push(from..part.start);
        }
        from = from.max(part.end);
    }
    if from < all.end {
        left.push(from..all.end);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::without;
    use std::ops::Range;

    /// An empty part counts as contents to keep.
    #[test]
    fn the_gaps_between_unused_ranges_are_kept() {
        let kept = |parts: &[Range<usize>]| {
            without(0..10, parts.iter().cloned()).into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(kept(&[]), [(0, 10)]);
        assert_eq!(kept(&[0..3, 7..10]), [(3, 7)]);
        assert_eq!(kept(&[7..8, 2..4]), [(0, 2), (4, 7), (8, 10)]);
        assert_eq!(kept(&[2..8, 3..4, 8..9]), [(0, 2), (9, 10)]);
        assert!(without(0..10, std::iter::once(0..10)).is_empty());
        assert!(without(0..10, [0..5, 5..10].into_iter()).is_empty());
    }
}
