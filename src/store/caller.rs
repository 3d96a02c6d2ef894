//! Whether somebody may run what is in an image.

use crate::manifest::{Manifest, Process};
use crate::{Error, Result};
use std::fs;
use std::path::Path;

const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;

/// Somebody who loads an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caller {
    /// Users: real, effective, saved.
    pub uids: Vec<u32>,
    /// Groups: real, effective, saved, supplementary.
    pub gids: Vec<u32>,
    /// Capabilities (`CapPrm`).
    pub capabilities: u64,
}

impl Caller {
    /// This process.
    pub fn current() -> Result<Self> {
        let path = Path::new("/proc/self/status");
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        let words = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let numbers = |name: &str| words(name).iter().filter_map(|word| word.parse().ok()).collect::<Vec<u32>>();
        let capabilities = words("CapPrm:").first().and_then(|word| u64::from_str_radix(word, 16).ok()).unwrap_or(0);
        Ok(Self { uids: numbers("Uid:"), gids: [numbers("Gid:"), numbers("Groups:")].concat(), capabilities })
    }

    fn may(&self, capability: u32) -> bool {
        self.capabilities & 1 << capability != 0
    }

    /// Refuses an image of which a process has a user, a group or a capability that the caller does not have and could not take.
    pub fn check(&self, manifest: &Manifest) -> Result<()> {
        manifest.processes.iter().try_for_each(|process| self.check_process(process))
    }

    fn check_process(&self, process: &Process) -> Result<()> {
        let pid = process.pid;
        if process.uids.is_empty() || process.gids.is_empty() {
            return Err(Error::NotTheCallers(format!("the image does not say whose process {pid} is")));
        }
        if let Some(uid) = process.uids.iter().find(|uid| !self.uids.contains(uid) && !self.may(CAP_SETUID)) {
            return Err(Error::NotTheCallers(format!("process {pid} of the image runs as user {uid}, whom you cannot become")));
        }
        if let Some(gid) = process.gids.iter().find(|gid| !self.gids.contains(gid) && !self.may(CAP_SETGID)) {
            return Err(Error::NotTheCallers(format!("process {pid} of the image has group {gid}, which you do not have")));
        }
        let more = process.capabilities & !self.capabilities;
        if more != 0 {
            return Err(Error::NotTheCallers(format!("process {pid} of the image has capabilities that you do not have ({more:#x})")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_more_than_they_have() {
        let caller = Caller { uids: vec![1000, 1000, 1000], gids: vec![100, 100, 100, 44], capabilities: 0b101 };
        let process =
            |uids: &[u32], gids: &[u32], capabilities| Process { uids: uids.into(), gids: gids.into(), capabilities, ..Process::default() };
        let check = |caller: &Caller, process| caller.check(&Manifest { processes: vec![process], ..Manifest::default() });
        check(&caller, process(&[1000; 4], &[100, 44], 0b100)).unwrap();
        for refused in [
            process(&[1000, 0, 1000, 1000], &[100], 0),
            process(&[1000; 4], &[100, 0], 0),
            process(&[1000; 4], &[100], 0b10),
            process(&[], &[100], 0),
            process(&[1000; 4], &[], 0),
        ] {
            assert!(matches!(check(&caller, refused.clone()), Err(Error::NotTheCallers(_))), "{refused:?}");
        }
        let root = Caller { uids: vec![0], gids: vec![0], capabilities: 1 << CAP_SETUID | 1 << CAP_SETGID };
        check(&root, process(&[1000; 4], &[100, 44], 0)).unwrap();
    }

    #[test]
    fn this_process_is_known() {
        let caller = Caller::current().unwrap();
        assert_eq!(caller.uids.len(), 4);
        assert!(caller.uids.contains(&vramctl_host::system::user()) && caller.gids.len() >= 4);
    }
}
