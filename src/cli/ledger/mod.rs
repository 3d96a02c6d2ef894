//! Who uses GPU memory, and host memory.

mod gpu;
mod host;
mod share;

use crate::everybody::Others;
pub use gpu::{Ledger, account, describe, take};
pub use host::{Host, describe_host, host, resident};
pub use share::{Share, What};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process, Target};

/// Who uses the memory of some GPUs.
pub struct Usage {
    pub found: Found,
    /// The processes that are meant.
    pub chosen: Vec<Process>,
    pub ledgers: Vec<Ledger>,
    pub host: Host,
    /// Why there is no ledger.
    pub failure: Option<CommandError>,
}

impl Usage {
    /// Those of the GPUs on which the target has memory, or of all.
    /// `others`: of other users.
    pub fn take(target: &Target, gpus: &[String], others: Option<Others>) -> Result<Self, CommandError> {
        // All processes: one that is left out would look like a process without the library.
        let mut found = Found::look(&Target::All)?;
        found.ask_allocators();
        found.processes.extend(others.into_iter().flat_map(|others| others.processes));
        let mut gpus = found.uuids(gpus)?;
        // Even if nothing is managed, other programs may have memory.
        let chosen = if *target == Target::All { found.processes.clone() } else { found.choose(target)? };
        if gpus.is_empty() && *target != Target::All {
            gpus = chosen.iter().flat_map(Process::gpus).map(str::to_owned).collect();
        }
        let host = host(&chosen, &found.processes);
        let (ledgers, why) = match take(&found.processes, &gpus) {
            Ok(ledgers) if ledgers.is_empty() => {
                let gpus = gpus.join(", ");
                (ledgers, Some(format!("NVML does not report {gpus} here; `nvidia-smi -L` lists the GPUs that it reports")))
            }
            Ok(ledgers) => (ledgers, None),
            Err(none) => (Vec::new(), Some(none.to_string())),
        };
        let failure = why.map(|why| CommandError::new(Exit::Failed, why));
        Ok(Self { found, chosen, ledgers, host, failure })
    }
}
