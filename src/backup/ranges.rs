//! Free parts of a range of addresses.

use std::collections::BTreeMap;

/// The free parts of a range, by offset; neighbours are joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreeRanges(BTreeMap<usize, usize>);

impl FreeRanges {
    /// All of `bytes` are free.
    pub fn new(bytes: usize) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    /// Takes the first place that is large enough, and says where it begins. Low addresses first.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&offset, &length) = self.0.iter().find(|(_, length)| **length >= bytes)?;
        self.0.remove(&offset);
        if length > bytes {
            self.0.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives back what was taken.
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

    /// Bytes that are free.
    pub fn bytes(&self) -> usize {
        self.0.values().sum()
    }
}
