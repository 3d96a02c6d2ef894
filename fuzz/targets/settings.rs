//! The environment, a line for each variable: what is read is within its limits, and what is not understood is complained about.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use vramctl_config::{Config, is_unknown};
use vramctl_model::checked_tag;

fuzz_target!(|text: &[u8]| {
    let pairs: Vec<_> = text
        .split(|byte| *byte == b'\n' || *byte == 0)
        .filter_map(|line| {
            let at = line.iter().position(|byte| *byte == b'=')?;
            Some((String::from_utf8(line[..at].to_vec()).ok()?, OsString::from_vec(line[at + 1..].to_vec())))
        })
        .collect();
    for (name, _) in &pairs {
        let _ = is_unknown(name);
    }
    let config = Config::from_variables(|name| pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()));
    assert!(config.trace == 0 || (64 << 10..=16 << 20).contains(&config.trace), "{}", config.trace);
    for tag in config.tag.iter().chain(config.backup.iter().map(|(tag, _)| tag)) {
        assert!(checked_tag(tag).is_ok(), "{tag:?}");
    }
    for complaint in &config.complaints {
        assert!(!complaint.contains('\n'), "{complaint:?}");
    }
});
