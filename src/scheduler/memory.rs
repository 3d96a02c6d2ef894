//! What a program has on a GPU, and which of it goes first.

use crate::ids::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes by GPU.
pub type PerGpu<T = u64> = BTreeMap<GpuId, T>;

/// What it costs to take an allocation away. The cheapest comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Class {
    /// Free blocks of the program's own allocator: no copy either way.
    FreeCache,
    /// Contents that nobody needs: no copy either way.
    Discardable,
    /// The host still has a copy of the contents: only the way back is a copy.
    Unchanged,
    /// The contents are copied both ways.
    Kept,
}

impl Class {
    const ALL: [Self; 4] = [Self::FreeCache, Self::Discardable, Self::Unchanged, Self::Kept];

    /// Whether the contents are somewhere else while the allocation is away.
    pub fn has_contents(self) -> bool {
        matches!(self, Self::Unchanged | Self::Kept)
    }
}

/// Allocations, as counts by class and size.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    counts: BTreeMap<(Class, u64), u64>,
    bytes: u64,
}

impl Holdings {
    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of those whose contents have to be somewhere while they are away.
    pub fn contents(&self) -> u64 {
        self.iter().filter(|(class, ..)| class.has_contents()).map(|(_, size, count)| size * count).sum()
    }

    /// Bytes that are copied when all of it leaves.
    pub fn copied_out(&self) -> u64 {
        self.iter().filter(|(class, ..)| *class == Class::Kept).map(|(_, size, count)| size * count).sum()
    }

    /// Class, size and number, the cheapest class and the smallest size first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Class, u64, u64)> {
        self.counts.iter().map(|(&(class, size), &count)| (class, size, count))
    }

    /// How many there are of a class and size.
    pub fn count(&self, class: Class, size: u64) -> u64 {
        self.counts.get(&(class, size)).copied().unwrap_or(0)
    }

    /// The size of the largest.
    pub fn largest(&self) -> u64 {
        self.iter().map(|(_, size, _)| size).max().unwrap_or(0)
    }

    /// Adds allocations of one class and size.
    pub fn add(&mut self, class: Class, size: u64, count: u64) {
        if size > 0 && count > 0 {
            *self.counts.entry((class, size)).or_default() += count;
            self.bytes += size * count;
        }
    }

    /// Adds others.
    pub fn add_all(&mut self, others: &Self) {
        others.iter().for_each(|(class, size, count)| self.add(class, size, count));
    }

    /// Removes those of the others that are here.
    pub fn remove_all(&mut self, others: &Self) {
        for (class, size, count) in others.iter() {
            let Some(have) = self.counts.get_mut(&(class, size)) else { continue };
            let gone = count.min(*have);
            *have -= gone;
            self.bytes -= size * gone;
            if *have == 0 {
                self.counts.remove(&(class, size));
            }
        }
    }

    /// The cheapest whole allocations of at least `missing` bytes in total, or as near as there are, with at most `contents` bytes of
    /// contents. The total exceeds `missing` by less than one allocation.
    #[must_use]
    pub fn cheapest(&self, missing: u64, contents: u64) -> Self {
        let (mut taken, mut missing, mut contents) = (Self::default(), missing, contents);
        for class in Class::ALL {
            let mut smallest_left = None;
            for (&(_, size), &count) in self.counts.range((class, 0)..=(class, u64::MAX)).rev() {
                let fit = if class.has_contents() { contents / size } else { u64::MAX };
                let number = count.min(missing / size).min(fit);
                taken.add(class, size, number);
                missing -= size * number;
                contents -= if class.has_contents() { size * number } else { 0 };
                if number < count {
                    smallest_left = Some(size);
                }
            }
            // What is left of this class is larger than what is missing, unless its contents have no place.
            if let Some(size) = smallest_left.filter(|size| missing > 0 && (!class.has_contents() || *size <= contents)) {
                taken.add(class, size, 1);
                missing = missing.saturating_sub(size);
                contents -= if class.has_contents() { size } else { 0 };
            }
            if missing == 0 {
                break;
            }
        }
        taken
    }
}

impl FromIterator<(Class, u64, u64)> for Holdings {
    fn from_iter<T: IntoIterator<Item = (Class, u64, u64)>>(all: T) -> Self {
        let mut holdings = Self::default();
        all.into_iter().for_each(|(class, size, count)| holdings.add(class, size, count));
        holdings
    }
}

/// What a program has on one GPU. What somebody else paused, or the program itself, is not part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Managed allocations on the GPU.
    pub resident: Holdings,
    /// Managed allocations that the scheduler has taken away.
    pub away: Holdings,
    /// Bytes that stay: the context, and memory of the program that is left to CUDA.
    pub fixed: u64,
    /// The most bytes so far.
    pub peak: u64,
}

impl Memory {
    /// Bytes of the program, wherever they are.
    pub fn own(&self) -> u64 {
        self.resident.bytes() + self.away.bytes() + self.fixed
    }

    /// Bytes that it takes of the GPU now.
    pub fn on_gpu(&self) -> u64 {
        self.resident.bytes() + self.fixed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(missing: u64, contents: u64) -> Vec<(Class, u64, u64)> {
        let all =
            [(Class::FreeCache, 4, 2), (Class::Discardable, 6, 1), (Class::Unchanged, 10, 2), (Class::Kept, 5, 3), (Class::Kept, 20, 1)];
        Holdings::from_iter(all).cheapest(missing, contents).iter().collect()
    }

    #[test]
    fn the_cheapest_goes_first_and_no_more_than_is_missing() {
        let (free, discardable) = ((Class::FreeCache, 4, 2), (Class::Discardable, 6, 1));
        assert_eq!(taken(0, 99), []);
        assert_eq!(taken(5, 99), [(Class::FreeCache, 4, 2)]);
        assert_eq!(taken(3, 99), [(Class::FreeCache, 4, 1)]);
        assert_eq!(taken(15, 99), [free, discardable, (Class::Unchanged, 10, 1)]);
        assert_eq!(taken(34 + 22, 99), [free, discardable, (Class::Unchanged, 10, 2), (Class::Kept, 5, 1), (Class::Kept, 20, 1)]);
        assert_eq!(taken(1000, 1000).len(), 5);
    }

    /// Contents are no more than there is room for.
    #[test]
    fn what_has_no_place_stays() {
        assert_eq!(taken(1000, 12), [(Class::FreeCache, 4, 2), (Class::Discardable, 6, 1), (Class::Unchanged, 10, 1)]);
        assert_eq!(taken(1000, 7), [(Class::FreeCache, 4, 2), (Class::Discardable, 6, 1), (Class::Kept, 5, 1)]);
    }
}
