//! Arguments that choose processes, GPUs and tags.

use crate::completions;
use crate::processes::Target;
use clap_complete::ArgValueCandidates;
use std::time::Duration;
use vramctl_model as model;

/// The options that choose processes.
#[derive(clap::Args, Clone)]
#[group(id = "target", multiple = false)]
pub struct TargetArgs {
    /// The process with this id
    #[arg(long, value_name = "PID", add = ArgValueCandidates::new(completions::pids))]
    pid: Option<u32>,
    /// All processes with this name (`vramctl run --name`, else the program's name)
    #[arg(long, add = ArgValueCandidates::new(completions::names))]
    name: Option<String>,
    /// All managed processes
    #[arg(long)]
    all: bool,
}

/// The option that chooses GPUs.
#[derive(clap::Args)]
pub struct GpuArgs {
    /// Only memory on this GPU: its index in `nvidia-smi`, its UUID or a prefix of it; may be repeated
    #[arg(long, value_name = "GPU", add = ArgValueCandidates::new(completions::gpus))]
    pub gpu: Vec<String>,
}

impl From<TargetArgs> for Target {
    fn from(args: TargetArgs) -> Self {
        match args {
            TargetArgs { pid: Some(pid), .. } => Self::Pid(pid),
            TargetArgs { name: Some(name), .. } => Self::Name(name),
            TargetArgs { all: true, .. } => Self::All,
            TargetArgs { all: false, .. } => Self::Only,
        }
    }
}

/// A tag as an argument.
pub fn checked_tag(text: &str) -> Result<String, String> {
    model::checked_tag(text).map(|tag| tag.to_string()).map_err(|error| error.to_string())
}

/// A duration as an argument.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

/// Such a duration as requests have it.
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_may_have_fractions() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for wrong in ["", "x", "-1", "nan", "inf", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
