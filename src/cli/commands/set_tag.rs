//! `vramctl set-tag`.

use crate::arguments::{TargetArgs, checked_tag};
use crate::ask;
use crate::candidates;
use crate::execute::Execute;
use clap_complete::ArgValueCandidates;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};

#[derive(clap::Args)]
#[command(
    override_usage = "vramctl set-tag <TAG> [OPTIONS]\n       vramctl set-tag --none [OPTIONS]",
    after_long_help = "\
Sets the tag for future allocations outside regions; existing allocations keep theirs. A process listens once it has made its \
first allocation, so set the initial tag with `vramctl run --tag`.

Examples:
  vramctl run --name engine --tag weights -- ./engine # the initial tag
  vramctl set-tag kv_cache --name engine              # after the weights
  vramctl set-tag --none --name engine                # leave the rest to CUDA"
)]
pub struct Args {
    /// The tag
    #[arg(value_parser = checked_tag, add = ArgValueCandidates::new(candidates::tags), required_unless_present = "none")]
    tag: Option<String>,
    /// No tag: leave future allocations outside regions to CUDA
    #[arg(long, conflicts_with = "tag")]
    none: bool,
    #[command(flatten)]
    target: TargetArgs,
    /// Print JSON: {"processes": [{"pid", "name", "tag" or "error"}]}
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let target = Target::from(self.target.clone());
        let found = Found::look(&target)?;
        let answers = ask::each(&found, found.choose_answering(&target)?, |client| client.set_tag(self.tag.clone()));
        ask::print(answers, self.json, "tag", |process, tag| match tag {
            Some(tag) => format!("{process}: allocations outside regions get the tag {tag} from now on"),
            None => format!("{process}: allocations outside regions are left to CUDA from now on"),
        })
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}
