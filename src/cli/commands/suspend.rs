//! `vramctl suspend`.

use crate::arguments::{BackupArgs, HoldTimeoutArgs, ProcessesOrOnly, count, registered};
use crate::execute::Execute;
use crate::ui::Ui;
use crate::ui::dry_run;
use crate::ui::interrupt;
use crate::ui::outcome;
use crate::ui::output;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::{Operation, Scope, Suspend};
use vramctl_model::{Bytes, PauseOptions, Registered, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
Holds and pauses the processes as `vramctl pause` does, then has the driver checkpoint the rest: CUDA contexts and loaded \
code. Afterwards they use no GPU memory, and nvidia-smi does not list them. `vramctl resume` brings them back, and their work \
continues.

Processes that the driver could not restore are refused, with exit code 7, and nothing changes: those with unmanaged memory of NCCL \
or NVSHMEM, multicast objects, unified memory, unmanaged memory that processes share or that is registered with a network card or a \
disk, or single mappings or pools that another GPU may reach; and any process under MPS, in MIG mode, or with a driver older than 570. \
--dry-run lists what is in the way.

If another process has some of the memory open (CUDA IPC), it must be suspended by the same command (--all, or a common name). With \
--shared, it is held instead, as with `vramctl pause --shared`, and stays on its GPU. Otherwise the suspend fails.

If the command is interrupted or fails, run it again, or `vramctl resume`: both continue from the driver's current state.

Examples:
  vramctl suspend engine
  vramctl suspend --dry-run                 # show what would prevent it
  vramctl suspend trainer --shared          # even if an engine has it open
  vramctl resume --name engine --timeout 60 # wait for others to free memory")]
#[allow(clippy::struct_excessive_bools)] // options
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// Only show what would be paused and what prevents a suspend (exit code 7); with --json each process has a
    /// "plan" (docs/protocol.md) in place of its "report"
    #[arg(long, conflicts_with = "quiet")]
    dry_run: bool,
    /// How many processes there must be [default: as many as when the job was last paused or resumed]
    #[arg(long, value_name = "N", value_parser = count)]
    ranks: Option<usize>,
    #[command(flatten)]
    backup: BackupArgs,
    /// What to do with memory that another process, a network card or NCCL has registered: refuse or take
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true, hide_possible_values = true,
        value_parser = registered([Registered::Refuse, Registered::Take]))]
    registered: Registered,
    /// Also hold other processes that have the memory open (CUDA IPC); they keep their own, and continue by themselves when it is resumed
    #[arg(long)]
    shared: bool,
    /// Discard a KV cache although the prefix cache of an engine still describes it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    hold: HoldTimeoutArgs,
    /// Print JSON: {"processes": [{"pid", "name", "report" or "error"}]}
    #[arg(long)]
    json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.quiet);
        let mut plan = Suspend::plan(&self.operation(), &ui)?;
        if self.dry_run {
            return dry_run::print(&plan.forecast(&ui), "suspend", self.json);
        }
        interrupt::hold();
        let [suspend, resume] = ["suspend", "resume"].map(|command| plan.target().command(command));
        interrupt::watch(move || {
            let next = format!("`vramctl status` shows how far it has come, `{suspend}` continues it, and `{resume}` undoes it");
            output::complain("interrupted", &format!("the suspend is not complete; {next}"));
        });
        let outcome = plan.check(&ui)?.run(&ui)?;
        outcome::print_device(&outcome, &ui, |process, done| match process.suspended() {
            Some(_) if done.bytes() == 0 => format!("nothing to do: {process} is already suspended"),
            _ => format!("suspended {process}: {} freed {}", Bytes(done.bytes()), done.took()),
        })
    }

    fn wants_json(&self) -> bool {
        self.json
    }

    fn drives_checkpoints(&self) -> bool {
        true
    }
}

impl Args {
    /// The operation that they ask for.
    fn operation(&self) -> Operation {
        let pause = HowToPause {
            options: PauseOptions {
                backup: self.backup.policy(),
                registered: self.registered,
                force: self.force,
                ..PauseOptions::default()
            },
            hold: Hold::Within(self.hold.hold_timeout),
            shared: self.shared,
            ..HowToPause::default()
        };
        let operation = Operation::new(Verb::Pause, self.processes.target(), Scope::Device, Deadline::new(None), pause);
        Operation { ranks: self.ranks, ..operation }
    }
}
