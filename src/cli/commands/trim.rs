//! `vramctl trim`.

use crate::arguments::{ProcessesOrAll, seconds};
use crate::ask;
use crate::execute::Execute;
use std::fmt::Write;
use std::time::Duration;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Found, Process, Target};
use vramctl_model::{Bytes, Cached, Trimmed};

#[derive(clap::Args)]
#[command(after_long_help = "\
PyTorch caches the GPU memory of freed tensors. A trim has it collect garbage and empty its cache, up to three times, until a \
round returns less than 1 GiB. It prints how much was returned and how much is stuck: free memory in segments that still hold a \
tensor. A background thread of the Python package does this in the program, as soon as it gets Python's interpreter lock. If it has \
not begun within --timeout, the trim is cancelled, and the exit code is 5.

Without a target, trims all managed processes that support it. A held program cannot be trimmed: trim before the pause.

Examples:
  vramctl trim engine
  vramctl trim --timeout 60
  vramctl trim engine && vramctl pause engine")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    /// How many seconds to wait for each program's allocator
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    timeout: Duration,
    /// Print JSON: {"processes": [{"pid", "name", "trimmed" or "error"}]}, with the fields of a `trimmed` reply (docs/protocol.md)
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        let found = Found::look(&target)?;
        // Nothing here has to be done for all or for none: one that is stopped keeps no other from it.
        let mut chosen = found.choose(&target)?;
        if target == Target::All && chosen.iter().any(trims) {
            chosen.retain(|process| trims(process) || process.status.is_err());
        }
        let done = all(&found, &chosen, self.timeout);
        ask::print(chosen.into_iter().zip(done), self.json, "trimmed", describe)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

fn trims(process: &Process) -> bool {
    process.status.as_ref().is_ok_and(|status| status.process.trims)
}

/// Trims these at once.
fn all(found: &Found, processes: &[Process], timeout: Duration) -> Vec<Result<Trimmed, CommandError>> {
    let one = |process: &Process| {
        process.status.as_ref().map_err(Clone::clone)?;
        Ok(found.connect(process.pid)?.trim(Some(timeout))?)
    };
    parallel::each(processes, one)
        .into_iter()
        .map(|done| done.unwrap_or_else(|_| Err(CommandError::new(Exit::Failed, "vramctl itself failed here; please report it"))))
        .collect()
}

/// For people.
fn describe(process: &Process, Trimmed { returned_bytes, cache, ms }: &Trimmed) -> String {
    let mut text = format!("trimmed {process}: {} returned in {ms:.0} ms", Bytes(*returned_bytes));
    for part @ Cached { returned_bytes, cached_bytes, fragmented_bytes, .. } in cache {
        if returned_bytes + cached_bytes + fragmented_bytes == 0 {
            continue;
        }
        let tag = part.tag.as_deref().unwrap_or("without a tag");
        let _ = write!(text, "\n  {tag}: {} returned", Bytes(*returned_bytes));
        if *fragmented_bytes > 0 {
            let _ = write!(text, ", {} stuck in partly used segments", Bytes(*fragmented_bytes));
        }
        if *cached_bytes > 0 {
            let _ = write!(text, ", {} kept in pools of its own", Bytes(*cached_bytes));
        }
        if cache.iter().any(|other| other.gpu != part.gpu) {
            let _ = write!(text, " ({})", part.gpu.as_deref().unwrap_or("GPU unknown"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_coordinator::process::made_up::process;

    #[test]
    fn returned_and_stuck_bytes_are_reported_by_tag() {
        let part = |tag: &str, returned: u64, stuck: u64, kept: u64| Cached {
            tag: Some(tag.into()),
            returned_bytes: returned << 20,
            fragmented_bytes: stuck << 20,
            cached_bytes: kept << 20,
            ..Cached::default()
        };
        let cache = vec![part("default", 40, 3, 0), part("kv", 0, 0, 20), part("weights", 0, 0, 0)];
        let text = describe(&process(1, "engine", &[]), &Trimmed { returned_bytes: 40 << 20, cache, ms: 12.3 });
        let wanted = "trimmed engine (pid 1): 40.00 MiB returned in 12 ms\n  default: 40.00 MiB returned, 3.00 MiB stuck in partly used \
                      segments\n  kv: 0 B returned, 20.00 MiB kept in pools of its own";
        assert_eq!(text, wanted);
    }
}
