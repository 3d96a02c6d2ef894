//! Memory that a process still holds after each pause, and the owners that grow from cycle to cycle.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What [`Growth`] calls the driver's share of a process's memory.
pub const OF_DRIVER: &str = "context, loaded code, small allocations";

/// A pause and all further pauses until something is resumed: the process's memory then, by owner.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cycle {
    /// Bytes of each tag when active, whether paused or not.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, u64>,
    /// Bytes left to CUDA, by the library that has asked for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unmanaged: BTreeMap<String, u64>,
    /// The driver's share of the process's memory, by the UUID of the GPU: the context, loaded code, small allocations. Empty if NVML does
    /// not report it, or the client that paused the process has not sent it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub driver: BTreeMap<String, u64>,
}

/// An owner whose memory grows in each cycle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// A tag, a library, or the driver, for people.
    pub owner: String,
    /// The mean.
    pub bytes_per_cycle: u64,
    /// Over how many cycles.
    pub cycles: u64,
}

impl fmt::Display for Growth {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, bytes_per_cycle, cycles } = self;
        write!(out, "{owner}: {} more in each cycle, over the last {cycles}", Bytes(*bytes_per_cycle))
    }
}

impl Cycle {
    /// Bytes by owner, as [`Growth`] names them.
    pub fn owners(&self) -> BTreeMap<String, u64> {
        let tags = self.tags.iter().map(|(tag, bytes)| (format!("tag {tag}"), *bytes));
        let unmanaged = self.unmanaged.iter().map(|(owner, bytes)| (owner.clone(), *bytes));
        let driver = (!self.driver.is_empty()).then(|| (OF_DRIVER.to_owned(), self.driver.values().sum()));
        tags.chain(unmanaged).chain(driver).collect()
    }

    /// The owners that have grown from each of these cycles to the next, up to the last one. At least two steps are required, because
    /// memory that is loaded or cached at first use grows once.
    pub fn growing<'a>(cycles: impl IntoIterator<Item = &'a Self>) -> Vec<Growth> {
        /// Growth by less is noise: workspaces, caches, fragments.
        const LEAST: u64 = 16 << 20;
        const STEPS: usize = 2;
        let cycles: Vec<_> = cycles.into_iter().map(Self::owners).collect();
        // An owner that is not in the last cycle has no memory any more, or is not known yet.
        let owners = cycles.last().into_iter().flat_map(BTreeMap::keys);
        let growth = |owner: &String| {
            let bytes: Vec<_> = cycles.iter().filter_map(|cycle| cycle.get(owner)).collect();
            let steps = bytes.windows(2).rev().take_while(|step| step[1].saturating_sub(*step[0]) >= LEAST).count();
            let grown = bytes.last()?.saturating_sub(*bytes[bytes.len() - 1 - steps]);
            (steps >= STEPS).then(|| Growth { owner: owner.clone(), bytes_per_cycle: grown / steps as u64, cycles: steps as u64 + 1 })
        };
        owners.filter_map(growth).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn growing(mib: &[u64]) -> Option<(u64, u64)> {
        let cycles: Vec<_> =
            mib.iter().map(|mib: &u64| Cycle { unmanaged: [("libleak.so".into(), mib * MIB)].into(), ..Cycle::default() }).collect();
        let found = Cycle::growing(&cycles);
        assert!(found.iter().all(|growth| growth.owner == "libleak.so"));
        found.first().map(|growth| (growth.bytes_per_cycle / MIB, growth.cycles))
    }

    #[test]
    fn an_owner_growing_over_three_cycles_is_named() {
        assert_eq!(growing(&[100, 300, 500]), Some((200, 3)));
        assert_eq!(growing(&[500, 100, 200, 400, 700]), Some((200, 4)), "since it began");
        assert_eq!(growing(&[100, 300]), None, "too early to tell");
        assert_eq!(growing(&[100, 300, 300]), None);
        assert_eq!(growing(&[100, 300, 500, 400]), None, "it has ended");
        assert_eq!(growing(&[100, 101, 102, 103]), None, "noise");
        assert_eq!(growing(&[]), None);
        let leak = |mib: u64| Cycle { unmanaged: [("libleak.so".into(), mib * MIB)].into(), ..Cycle::default() };
        assert_eq!(Cycle::growing(&[leak(100), leak(300), leak(500), Cycle::default()]), [], "all of it is freed");
    }

    /// NVML may not have answered in one of them.
    #[test]
    fn a_cycle_without_an_answer_is_passed_over() {
        let driver = |mib: u64| Cycle { driver: [("GPU-0".into(), mib * MIB), ("GPU-1".into(), MIB)].into(), ..Cycle::default() };
        let found = Cycle::growing(&[driver(100), driver(120), Cycle::default(), driver(140)]);
        assert_eq!(found[0].to_string(), "context, loaded code, small allocations: 20.00 MiB more in each cycle, over the last 3");
    }
}
