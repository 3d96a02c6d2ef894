//! `vramctl pause`.

use crate::arguments::{BackupArgs, EngineArgs, TransitionArgs, registered, seconds};
use crate::execute::Execute;
use crate::interruptible;
use crate::ui::{Ui, dry_run, output};
use std::collections::BTreeSet;
use std::time::Duration;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::{Operation, Plan, Reporter};
use vramctl_model::{Bytes, PauseOptions, Registered, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
Without tags, pauses all of them. A pause may come at any moment. The program is held until everything is resumed: its calls that \
start GPU work wait; all other code keeps running. A pause first waits for GPU work in flight, at most --hold-timeout seconds. It \
keeps contents in host memory, unless the tag's policy, --backup or --discard says otherwise. All or nothing: a pause that fails \
changes nothing in any process of the job, and the program continues. ^C undoes a pause that is not complete.

If another process has some of the memory open (CUDA IPC), the pause fails and names it. With --timeout, it first waits that long \
for the memory to be closed, while the program keeps running. With --shared, the other process is held as well, and gives the \
memory up, all or nothing. Its own memory stays. Once the memory is resumed, the other process gets it back at the same addresses \
and continues by itself.

With --no-hold, the program keeps running while it is paused. It must not use its paused memory: GPU work that does so fails and \
destroys its CUDA context. With --guard as well, such work hits a small block of memory instead, and the resume reports writes to it.

An inference engine must have no requests if its KV cache is discarded, or with --no-hold. With --engine, the command asks it first, \
refuses to pause while it has any (with --timeout, waits for them to finish), and has it reset its prefix cache before \
the KV cache is discarded. If it requires an API key, set VRAMCTL_ENGINE_KEY.

Examples:
  vramctl pause                          # all tags of the only managed process
  vramctl pause kv_cache --discard --all # drop this tag's contents, everywhere
  vramctl pause weights --backup disk    # keep the contents in a file
  vramctl pause engine                   # all tags of processes with this name
  vramctl pause --name engine --timeout 2.5
  vramctl pause cache --no-hold          # the program keeps using the rest
  vramctl pause engine 'other-*'         # all of several processes
  vramctl pause --gpu 0                  # all memory on this GPU, and no other
  vramctl pause --name trainer --shared  # even if an engine has it open
  vramctl pause --dry-run                # show what it would do
  vramctl pause kv_cache --discard --engine http://127.0.0.1:8000")]
#[allow(clippy::struct_excessive_bools)] // options
pub struct Args {
    #[command(flatten)]
    transition: TransitionArgs,
    /// Only show what would be paused
    ///
    /// Also where the contents would go, and how much host memory they need; with --json each process has a "plan" (docs/protocol.md) in
    /// place of its "report".
    #[arg(long, conflicts_with = "quiet")]
    dry_run: bool,
    #[command(flatten)]
    backup: BackupArgs,
    /// With --discard and without TAGs: do not ask
    #[arg(long, short)]
    yes: bool,
    /// What to do with registered memory: refuse, keep or take
    ///
    /// For memory that another process, a network card or NCCL has registered: refuse (pause nothing), keep (pause the rest, and leave out
    /// memory that another process has open) or take (pause it too: nobody may use the registration any more).
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true, hide_possible_values = true,
        value_parser = registered([Registered::Refuse, Registered::Keep, Registered::Take]))]
    registered: Registered,
    /// Also hold other processes that have the memory open (CUDA IPC); they continue by themselves when it is resumed
    #[arg(long, conflicts_with = "no_hold")]
    shared: bool,
    /// Map a small block of GPU memory under the paused addresses
    ///
    /// It takes 62 MiB per GPU. GPU work that wrongly uses the addresses then reads and writes garbage instead of destroying the program's
    /// context.
    #[arg(long)]
    guard: bool,
    /// Without TAGs: also NCCL's own memory
    ///
    /// Otherwise it has to be named (tag nccl), because all ranks of the job give it up together.
    #[arg(long, conflicts_with_all = ["no_hold", "words"])]
    nccl: bool,
    /// Do not hold the program while it is paused. It must be idle, or not use the paused memory
    #[arg(long)]
    no_hold: bool,
    /// How long to wait for GPU work in flight [default: --timeout, or 10]
    ///
    /// After that, nothing is paused and the program continues.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_hold")]
    hold_timeout: Option<Duration>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print JSON: {"processes": […], "jobs": […]}
    ///
    /// A process is {"pid", "name", "tags", "report" or "error"}; a job is {"job", "pids", "committed",
    /// "attempts", "ms"}.
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.transition.quiet);
        let plan = Plan::make(self.operation(), &ui)?;
        if self.dry_run {
            return dry_run::print(&plan.forecast(), "pause", self.json);
        }
        if !self.yes {
            confirm(&plan, &ui)?;
        }
        let consent = plan.consent(&ui)?;
        interruptible::run(plan, &consent, ui)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

/// Says what would be lost of tags that nobody has named, and asks, if somebody is there to answer.
fn confirm(plan: &Plan, ui: &Ui) -> Result<(), CommandError> {
    let dropped: Vec<_> = plan.drops_unnamed().into_iter().map(|(tag, bytes)| format!("{tag} ({})", Bytes(bytes))).collect();
    if dropped.is_empty() || ui.json {
        return Ok(());
    }
    let text = format!("--discard drops the contents of {}", dropped.join(", "));
    if !output::is_answered() {
        ui.warn(&format!("{text}; name the tags to choose some, or add --yes"));
        return Ok(());
    }
    if output::ask(&format!("{text}. Go on?")) { Ok(()) } else { Err(CommandError::new(Exit::Failed, "nothing was paused")) }
}

impl Args {
    /// The operation that they ask for.
    fn operation(&self) -> Operation {
        let pause = HowToPause {
            options: PauseOptions {
                backup: self.backup.policy(),
                registered: self.registered,
                guard: self.guard,
                force: self.engine.force,
                ..PauseOptions::default()
            },
            engines: self.engine.addresses(),
            hold: match self.hold_timeout {
                _ if self.no_hold => Hold::No,
                None => Hold::Yes,
                Some(limit) => Hold::Within(limit),
            },
            shared: self.shared,
            nccl: self.nccl,
            everywhere: BTreeSet::new(),
            waiting: None,
        };
        self.transition.operation(Verb::Pause, pause)
    }
}
