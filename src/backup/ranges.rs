//! Free parts of an address range.

use std::collections::BTreeMap;

/// Free parts by offset, adjacent ones merged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreeRanges(BTreeMap<usize, usize>);

impl FreeRanges {
    /// All of `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    /// Takes the first part that is large enough (first fit) and returns its offset.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&offset, &length) = self.0.iter().find(|(_, length)| **length >= bytes)?;
        self.0.remove(&offset);
        if length > bytes {
            self.0.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Returns a part.
    pub fn give_back(&mut self, mut offset: usize, mut bytes: usize) {
        if let Some(next) = self.0.remove(&(offset + bytes)) {
            bytes += next;
        }
        if let Some((&before, &length)) = self.0.range(..offset).next_back()
            && before + length == offset
        {
            offset = before;
            bytes += length;
        }
        self.0.insert(offset, bytes);
    }

    /// Whether some of these bytes are free.
    pub fn overlaps(&self, offset: usize, bytes: usize) -> bool {
        self.0.range(..offset + bytes).next_back().is_some_and(|(free, length)| free + length > offset)
    }

    /// Free bytes.
    pub fn bytes(&self) -> usize {
        self.0.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_place_that_is_large_enough_is_taken_and_neighbours_are_joined() {
        let mut free = FreeRanges::new(100);
        assert_eq!([10, 20, 30].map(|bytes| free.take(bytes)), [Some(0), Some(10), Some(30)]);
        assert_eq!((free.bytes(), free.take(41)), (40, None));
        free.give_back(10, 20);
        assert_eq!(
            [(0, 10), (5, 10), (15, 1), (25, 10), (30, 30), (59, 2)].map(|(offset, bytes)| free.overlaps(offset, bytes)),
            [false, true, true, true, false, true]
        );
        assert_eq!([25, 20, 15].map(|bytes| free.take(bytes)), [Some(60), Some(10), Some(85)]);
        assert_eq!((free.bytes(), free.take(1)), (0, None));
        assert_eq!(free, FreeRanges::default(), "and no empty part is left");
        for (offset, bytes) in [(0, 10), (30, 30), (10, 20), (85, 15), (60, 25)] {
            free.give_back(offset, bytes);
        }
        assert_eq!(free, FreeRanges::new(100));
    }
}
