//! The options of `vramctl pause` and `vramctl resume`.

use crate::arguments::{BackupArgs, GpuArgs, TargetArgs, checked_tag, count, registered, seconds};
use crate::completions;
use clap_complete::ArgValueCandidates;
use std::collections::BTreeSet;
use std::env;
use std::time::Duration;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::engine::{self, checked_address};
use vramctl_coordinator::operation::{Hold, PauseOptions};
use vramctl_coordinator::{Operation, Scope};
use vramctl_model::{Registered, Verb};

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
pub struct PauseArgs {
    #[command(flatten)]
    pub transition: Args,
    /// Only show what would be paused
    ///
    /// Also where the contents would go, and how much host memory they need; with --json each process has a "plan" (docs/protocol.md) in
    /// place of its "report".
    #[arg(long, conflicts_with = "quiet")]
    pub dry_run: bool,
    #[command(flatten)]
    pub backup: BackupArgs,
    /// What to do with registered memory: refuse, keep or take
    ///
    /// For memory that another process, a network card or NCCL has registered: refuse (pause nothing), keep (pause the rest, and leave out
    /// memory that another process has open) or take (pause it too: nobody may use the registration any more).
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true, hide_possible_values = true,
        value_parser = registered([Registered::Refuse, Registered::Keep, Registered::Take]))]
    pub registered: Registered,
    /// Also hold other processes that have the memory open (CUDA IPC); they continue by themselves when it is resumed
    #[arg(long, conflicts_with = "no_hold")]
    pub shared: bool,
    /// Map a small block of GPU memory under the paused addresses
    ///
    /// It takes 62 MiB per GPU. GPU work that wrongly uses the addresses then reads and writes garbage instead of destroying the program's
    /// context.
    #[arg(long)]
    pub guard: bool,
    /// Without TAGs: also NCCL's own memory
    ///
    /// Otherwise it has to be named (tag nccl), because all ranks of the job give it up together.
    #[arg(long, conflicts_with_all = ["no_hold", "words"])]
    pub nccl: bool,
    #[command(flatten)]
    pub hold: HoldArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print JSON: {"processes": […], "jobs": […]}
    ///
    /// A process is {"pid", "name", "tags", "report" or "error"}; a job is {"job", "pids", "committed",
    /// "attempts", "ms"}.
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
#[command(after_long_help = "\
Without tags, resumes all that others than the program itself have paused; what the program has paused itself, it resumes itself, \
or you by naming the tag. All or nothing: if GPU memory is short, everything stays paused, and the message says how \
much is missing and who holds it. With --timeout, the resume waits that long for others to free memory. \
If several jobs wait for memory, they queue, and the first to ask gets it first.

A suspended process is brought back to its GPUs first. With tags or --gpu, the rest of its memory stays paused.

Examples:
  vramctl resume               # what was paused of the only managed process
  vramctl resume engine        # what was paused of processes with this name
  vramctl resume weights --name engine
  vramctl resume --gpu 0       # on this GPU, and on no other
  vramctl resume --name engine --timeout 30")]
pub struct ResumeArgs {
    #[command(flatten)]
    pub transition: Args,
    /// Print JSON: {"processes": […], "jobs": […]}
    ///
    /// A process is {"pid", "name", "tags", "report" or "error"}, one that was suspended also "restored", with the times of the driver's
    /// part; a job is {"job", "pids", "committed", "attempts", "ms"}.
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
pub struct Args {
    /// Tags [default: all]. Without --name, --pid or --all, words that are no tags are processes, by name, pattern ('eng*') or id
    #[arg(value_name = "TAG", value_parser = checked_tag, add = ArgValueCandidates::new(completions::tags_and_names))]
    pub words: Vec<String>,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// How many processes there must be [default: as many as when the job was last paused or resumed]
    #[arg(long, value_name = "N", value_parser = count)]
    pub ranks: Option<usize>,
    /// Wait at most this many seconds, all in all, for what is in the way (for another command, at least 10); fractions are allowed
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
}

#[derive(clap::Args)]
pub struct HoldArgs {
    /// Do not hold the program while it is paused. It must be idle, or not use the paused memory
    #[arg(long)]
    no_hold: bool,
    /// How long to wait for GPU work in flight [default: --timeout, or 10]
    ///
    /// After that, nothing is paused and the program continues.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_hold")]
    hold_timeout: Option<Duration>,
}

impl HoldArgs {
    fn hold(&self) -> Hold {
        match (self.no_hold, self.hold_timeout) {
            (true, _) => Hold::No,
            (false, None) => Hold::Yes,
            (false, Some(limit)) => Hold::Within(limit),
        }
    }
}

/// The options of a pause that concern engines.
#[derive(clap::Args)]
pub struct EngineArgs {
    /// Ask the inference engine at this address first (docs/engines.md); may be repeated
    #[arg(long, value_name = "URL", env = "VRAMCTL_ENGINE", hide_env_values = true, value_delimiter = ',', value_parser = checked_address)]
    engine: Vec<String>,
    /// Ask no engine, and discard a KV cache even if its engine's prefix cache still describes it
    #[arg(long)]
    pub force: bool,
}

impl EngineArgs {
    pub fn addresses(&self) -> engine::Addresses {
        // An empty variable counts as unset.
        let addresses = self.engine.iter().filter(|address| !address.is_empty()).cloned().collect();
        engine::Addresses { addresses, key: engine_key() }
    }
}

/// The API key of the engines. It is no option: every user of the machine can read command lines.
pub fn engine_key() -> Option<String> {
    env::var("VRAMCTL_ENGINE_KEY").ok().filter(|key| !key.is_empty())
}

impl Args {
    /// The operation that they ask for.
    fn operation(&self, verb: Verb, deadline: Deadline, pause: PauseOptions) -> Operation {
        let scope = Scope::Tags { words: self.words.clone(), may_name: true, gpus: self.gpu.gpu.clone() };
        Operation { ranks: self.ranks, ..Operation::new(verb, self.target.clone().into(), scope, deadline, pause) }
    }
}

impl PauseArgs {
    /// The operation that they ask for.
    pub fn operation(&self, deadline: Deadline) -> Operation {
        let pause = PauseOptions {
            backup: self.backup.policy(),
            registered: self.registered,
            guard: self.guard,
            force: self.engine.force,
            engines: self.engine.addresses(),
            hold: self.hold.hold(),
            shared: self.shared,
            nccl: self.nccl,
            everywhere: BTreeSet::new(),
            waiting: None,
        };
        self.transition.operation(Verb::Pause, deadline, pause)
    }
}

impl ResumeArgs {
    /// The operation that they ask for.
    pub fn operation(&self) -> Operation {
        self.transition.operation(Verb::Resume, Deadline::new(self.transition.timeout), PauseOptions::default())
    }
}
