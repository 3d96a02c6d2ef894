//! The lines of the control socket: requests as the library reads them, answers as the command line does.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramctl_control::protocol::{Reply, line, parse, request_line};

fuzz_target!(|text: &[u8]| {
    if let Ok(request) = parse(text) {
        let again = parse(&request_line(request.clone())).expect("a request that was written is read");
        assert_eq!(request_line(again), request_line(request));
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(text) {
        let written = line(&reply);
        assert!(written.ends_with(b"\n") && written.iter().filter(|byte| **byte == b'\n').count() == 1, "one line");
        let again: Reply = serde_json::from_slice(&written).expect("an answer that was written is read");
        assert_eq!(line(&again), written);
    }
});
