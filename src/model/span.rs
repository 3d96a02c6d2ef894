//! Ranges of device memory.

/// A range of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// Joins each run of adjacent spans into one.
    pub fn contiguous(spans: impl Iterator<Item = Self>) -> impl Iterator<Item = Self> {
        let mut spans = spans.peekable();
        std::iter::from_fn(move || {
            let mut joined = spans.next()?;
            while let Some(next) = spans.next_if(|next| next.address == joined.address + joined.bytes as u64) {
                joined.bytes += next.bytes;
            }
            Some(joined)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_adjacent_spans_are_joined() {
        let spans = |list: &[(u64, usize)]| list.iter().map(|&(address, bytes)| Span { address, bytes }).collect::<Vec<_>>();
        let joined: Vec<_> = Span::contiguous(spans(&[(10, 5), (15, 3), (18, 2), (21, 4), (20, 1)]).into_iter()).collect();
        assert_eq!(joined, spans(&[(10, 10), (21, 4), (20, 1)]));
    }
}
