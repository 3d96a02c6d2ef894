//! `vramctl resume`.

use crate::arguments::TransitionArgs;
use crate::execute::Execute;
use crate::interruptible;
use crate::ui::Ui;
use vramctl_coordinator::Consent;
use vramctl_coordinator::Plan;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::HowToPause;
use vramctl_model::Verb;

#[derive(clap::Args)]
#[command(after_long_help = "\
Without tags, resumes all that others than the program itself have paused; what the program has paused itself, it resumes itself, \
or you by naming the tag. All or nothing: if GPU memory is short, everything stays paused, and the message says how \
much is missing and who holds it. With --timeout, the resume waits that long for others to free memory. \
If several jobs wait for memory, they queue, and the first to ask gets it first. A program of `vramctl run --share` waits for its turn \
among those that share its GPUs, with --timeout no longer than that; ^C gives up, and it stays paused.

A suspended process is brought back to its GPUs first. With tags or --gpu, the rest of its memory stays paused.

Examples:
  vramctl resume               # what was paused of the only managed process
  vramctl resume engine        # what was paused of processes with this name
  vramctl resume weights --name engine
  vramctl resume --gpu 0       # on this GPU, and on no other
  vramctl resume --name engine --timeout 30")]
pub struct Args {
    #[command(flatten)]
    transition: TransitionArgs,
    /// Print JSON: {"processes": […], "jobs": […]}
    ///
    /// A process is {"pid", "name", "tags", "report" or "error"}, one that was suspended also "restored", with the times of the driver's
    /// part; a job is {"job", "pids", "committed", "attempts", "ms"}.
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.transition.quiet);
        let plan = Plan::make(self.transition.operation(Verb::Resume, HowToPause::default()), &ui)?.restore_suspended(&ui)?;
        interruptible::run(plan, &Consent::default(), ui)
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}
