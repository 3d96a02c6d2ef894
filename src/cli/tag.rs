//! `vramctl set-tag`.

use crate::completions;
use crate::failure::{CommandError, Exit};
use crate::output;
use crate::processes::{Found, Target};
use crate::target::{TargetArgs, checked_tag};
use clap_complete::ArgValueCandidates;
use serde_json::json;

#[derive(clap::Args)]
#[command(
    override_usage = "vramctl set-tag <TAG> [OPTIONS]\n       vramctl set-tag --none [OPTIONS]",
    after_help = "\
Sets the tag for future allocations outside regions; existing allocations keep theirs. A process listens once it has made its \
first allocation, so set the initial tag with `vramctl run --tag`.

Examples:
  vramctl run --name engine --tag weights -- ./engine # the initial tag
  vramctl set-tag kv_cache --name engine              # after the weights
  vramctl set-tag --none --name engine                # leave the rest to CUDA"
)]
pub struct Args {
    /// The tag
    #[arg(value_parser = checked_tag, add = ArgValueCandidates::new(completions::tags), required_unless_present = "none")]
    tag: Option<String>,
    /// No tag: leave future allocations outside regions to CUDA
    #[arg(long, conflicts_with = "tag")]
    none: bool,
    #[command(flatten)]
    target: TargetArgs,
    /// Print JSON: {"processes": [{"pid", "name", "tag" or "error"}]}
    #[arg(long)]
    pub json: bool,
}

pub fn set_tag(args: Args) -> Result<Exit, CommandError> {
    let target = Target::from(args.target);
    let found = Found::look(&target)?;
    let mut exit = Exit::Done;
    let mut answers = Vec::new();
    for process in found.choose_answering(&target)? {
        let done = found.connect(process.pid).and_then(|mut client| client.set_tag(args.tag.clone())).map_err(CommandError::from);
        if let (Err(failure), Exit::Done) = (&done, exit) {
            exit = failure.exit();
        }
        match done {
            Ok(tag) if args.json => answers.push(json!({ "pid": process.pid, "name": process.name(), "tag": tag })),
            Err(failure) if args.json => answers.push(json!({ "pid": process.pid, "name": process.name(), "error": failure })),
            Ok(Some(tag)) => output::say(&format!("{process}: allocations outside regions get the tag {tag} from now on"))?,
            Ok(None) => output::say(&format!("{process}: allocations outside regions are left to CUDA from now on"))?,
            Err(failure) => output::complain("error", &format!("{process}: {failure}")),
        }
    }
    if args.json {
        output::json(&answers)?;
    }
    Ok(exit)
}
