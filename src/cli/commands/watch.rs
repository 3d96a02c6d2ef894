//! `vramctl watch`.

use crate::arguments::{self, ProcessesOrOnly};
use crate::ask;
use crate::execute::Execute;
use serde::Serialize;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::Found;
use vramctl_model::Bytes;

#[derive(clap::Args)]
#[command(after_long_help = "\
Has processes watch how much memory is free on their GPUs. When less than SIZE is free, each logs once, to its stderr, who uses \
the memory. It logs again only after free memory has recovered to a tenth above SIZE, or 64 MiB above it if that is more. \
VRAMCTL_WATCH=SIZE or SIZE,trim in a program's environment does the same from its start. Without --below and --off, prints the \
current setting.

Examples:
  vramctl watch trainer --below 5G
  vramctl watch trainer --below 5G --trim # then return what torch has cached
  vramctl watch trainer --off")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// Log when less than this is free: bytes, or a size such as 5G or 5GB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    below: Option<u64>,
    /// Also have torch return what it has cached, as `vramctl trim` does
    #[arg(long, requires = "below")]
    trim: bool,
    /// Stop watching
    #[arg(long, conflicts_with = "below")]
    off: bool,
    /// Print JSON: {"processes": [{"pid", "name", "watch" or "error"}]}, with the fields of a `watch` reply (docs/protocol.md)
    #[arg(long)]
    json: bool,
}

/// A level below this is a number whose unit is missing.
const LEAST: usize = 1 << 20;

fn size(text: &str) -> Result<u64, String> {
    match arguments::size(text)? {
        0 => Err("the size must be more than 0; to stop watching, use --off".into()),
        1..LEAST => Err(format!("less than 1 MiB; give the unit with the number, as {text}G")),
        bytes => Ok(bytes as u64),
    }
}

/// The setting of a process, as a `watch` reply has it.
#[derive(Serialize)]
struct Watching {
    below_bytes: u64,
    trim: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        let found = Found::look(&target)?;
        let chosen = found.choose_answering(&target)?;
        for process in &chosen {
            let largest =
                process.status.as_ref().ok().and_then(|status| status.memory.devices.iter().filter_map(|device| device.total_bytes).max());
            if let (Some(below), Some(all)) = (self.below, largest)
                && below >= all
            {
                let text = format!("{process} has no GPU of more than {}; --below {} would always be reached", Bytes(all), Bytes(below));
                return Err(CommandError::new(Exit::Usage, text));
            }
        }
        let below = if self.off { Some(0) } else { self.below };
        let answers =
            ask::each(&found, chosen, |client| client.watch(below, self.trim).map(|(below_bytes, trim)| Watching { below_bytes, trim }));
        ask::print(answers, self.json, "watch", |process, watching| match watching {
            Watching { below_bytes: 0, .. } => format!("{process}: does not watch"),
            Watching { below_bytes, trim } => {
                let trims = if *trim { ", and has its allocator return what it has cached" } else { "" };
                format!("{process}: logs when less than {} is free{trims}", Bytes(*below_bytes))
            }
        })
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}
