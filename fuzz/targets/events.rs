//! The event log: the records of the ring, as the library reads them, and the events of an answer, as the command line does.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramctl_model::Events;
use vramctl_observe::trace::record::{WORDS, read, written};

fuzz_target!(|text: &[u8]| {
    let words: Vec<_> = text.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect();
    for record in words.as_chunks::<WORDS>().0 {
        if let Some(event) = read(7, *record) {
            assert_eq!(read(7, written(event.at_ns, &event.what)), Some(event));
        }
    }
    if let Ok(events) = serde_json::from_slice::<Events>(text) {
        let written = serde_json::to_vec(&events).expect("events can be written");
        assert_eq!(serde_json::from_slice::<Events>(&written).expect("events that were written are read"), events);
    }
});
