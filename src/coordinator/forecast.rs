//! Dry runs: what an operation would do to each process, and why it would fail.

use crate::failure::CommandError;
use crate::processes::Process;
use vramctl_control::protocol;
use vramctl_model::{Error, Plan};

/// What would be done to one process.
#[derive(Debug)]
pub struct Forecast {
    /// The process.
    pub process: Process,
    /// `None` for a borrower, or if the process refuses to say.
    pub plan: Option<Plan>,
    /// Why it would refuse.
    pub failure: Option<CommandError>,
    /// For a borrower: the bytes that it would set aside.
    pub aside_bytes: Option<u64>,
}

impl Forecast {
    /// From its answer. `may_lose`: contents that a prefix cache describes may be discarded.
    pub fn new(process: &Process, answer: protocol::DryRun, may_lose: bool) -> Self {
        let protocol::DryRun { plan, refused } = answer;
        let prefix_cache = plan.prefix_cache.clone().filter(|_| !may_lose).map(|engine| CommandError::from(&Error::PrefixCache(engine)));
        let failure = prefix_cache.or(refused.map(CommandError::Refused));
        Self { process: process.clone(), plan: Some(plan), failure, aside_bytes: None }
    }

    /// A borrower, which pauses nothing of its own and would set aside open memory of others.
    pub fn borrower(process: &Process, bytes: u64) -> Self {
        Self { process: process.clone(), plan: None, failure: None, aside_bytes: Some(bytes) }
    }

    /// A process that would refuse.
    pub fn refused(process: &Process, failure: CommandError) -> Self {
        Self { process: process.clone(), plan: None, failure: Some(failure), aside_bytes: None }
    }
}
