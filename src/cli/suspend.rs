//! `vramctl suspend`, and the way back in `vramctl resume`.

use crate::checkpoint::{self, Done, Patience};
use crate::completions;
use crate::dry_run::{self, Foretold};
use crate::failure::{CommandError, Exit};
use crate::interrupt;
use crate::nccl;
use crate::output;
use crate::processes::{Found, Process, Target, check_whole};
use crate::shared;
use crate::target::{BackupArgs, TargetArgs, WaitingArgs, count, milliseconds, registered, seconds};
use clap_complete::ArgValueCandidates;
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::protocol::Transition;
use vramctl_control::queue::InQueue;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_model::{Bytes, Kind, Registered, TagState};

#[derive(clap::Args)]
#[command(after_help = "\
Holds and pauses the processes as `vramctl pause` does, then has the driver checkpoint the rest: CUDA contexts and loaded \
code. Afterwards they use no GPU memory, and nvidia-smi does not list them. `vramctl resume` brings them back, and their work \
continues.

Processes that the driver cannot restore are only paused by tag, with exit code 7: those with NCCL or NVSHMEM communicators, \
peer access between GPUs, multicast objects, unified memory, or unmanaged memory that processes share or that is registered with a \
network card; and any process under MPS, in MIG mode, or with a driver older than 570. --dry-run lists what is in the way.

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
    /// The processes with this name, or the one with this id [default: the only managed process]
    #[arg(value_name = "NAME", conflicts_with = "target", add = ArgValueCandidates::new(completions::names))]
    process: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
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
    /// As `vramctl pause --nccl`, for a job that can only be paused by tag because of NCCL
    #[arg(long)]
    nccl: bool,
    /// Discard a KV cache although the prefix cache of an engine still describes it
    #[arg(long)]
    force: bool,
    /// How many seconds to wait for GPU work in flight; after that, nothing has changed and the program continues
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    hold_timeout: Duration,
    #[command(flatten)]
    waiting: WaitingArgs,
    /// Print JSON: {"processes": [{"pid", "name", "report" or "error"}]}
    #[arg(long)]
    pub json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

pub fn suspend(args: Args) -> Result<Exit, CommandError> {
    checkpoint::see_all_gpus();
    let target = args.process.map_or_else(|| Target::from(args.target), Target::parse);
    let found = Found::look(&target)?;
    let mut members = checkpoint::join(&found, &target)?;
    if !matches!(target, Target::Pid(_)) || args.ranks.is_some() {
        check_whole(members.iter().map(|member| &member.process), true, args.ranks)?;
    }
    let request = Transition {
        backup: args.backup.policy(),
        registered: args.registered,
        force: args.force,
        hold_ms: Some(milliseconds(args.hold_timeout)),
        ..Transition::default()
    };

    let chosen = if args.nccl { checkpoint::choose_communicators(&found, &members)? } else { nccl::ChosenCommunicators::default() };
    let pids: Vec<_> = members.iter().map(|member| member.process.pid).collect();
    let along = if args.shared { Some(shared::find(&found, shared::lent_by(&found, &pids, &request))?) } else { None };
    args.waiting.check_not_held(pids.into_iter().chain(along.iter().flatten().map(|along| along.process.pid)))?;
    let advise = |failure: CommandError| {
        let might_help = failure.is(Kind::Shared) && !args.shared;
        failure.adding(if might_help { ". To suspend only this, and hold those that have it open, add --shared" } else { "" })
    };
    if args.dry_run {
        chosen.tell_what_is_left();
        let along = along.unwrap_or_default();
        let request = Transition { borrowers: along.iter().map(|along| along.process.pid).collect(), ..request };
        let foretold = checkpoint::foretell(&mut members, &request).map_err(advise)?;
        let own = foretold.into_iter().map(|one| one.with_communicators(&chosen));
        let along = along.iter().map(|along| Foretold::along(&along.process, along.bytes));
        return dry_run::tell(&own.chain(along).collect::<Vec<_>>(), args.json);
    }
    interrupt::hold();
    let again = ["suspend", "resume"].map(|command| target.command(command));
    interrupt::watch(move || {
        let [suspend, resume] = again;
        let next = format!("`vramctl status` shows how far it has come, `{suspend}` continues it, and `{resume}` undoes it");
        output::complain("interrupted", &format!("the suspend is not complete; {next}"));
    });
    // Loading the driver takes a while, so do it during the pause.
    let loading = thread::spawn(checkpoint::load);
    let patience = Patience::new(args.hold_timeout);
    let held = checkpoint::pause(&found, &mut members, &request, &chosen, along, &patience).map_err(advise)?;
    found.tell_what_nvml_counts(members.iter().filter(|member| member.done.bytes() > 0).map(|member| &member.process));
    if !args.json && !args.quiet {
        held.iter().try_for_each(|(process, report)| output::say(&shared::text(process, report)))?;
    }
    chosen.tell_what_is_left();
    members.iter().flat_map(checkpoint::Member::failures_of_nccl).for_each(|why| output::complain("error", &why));
    let loaded = loading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let able = checkpoint::can_be_taken(&members).and(loaded);
    match able.and_then(|()| checkpoint::take(&mut members, &patience)) {
        Ok(()) => {
            let line = |member: &checkpoint::Member| match member.process.suspended() {
                Some(_) if member.done.bytes() == 0 => format!("nothing to do: {} is already suspended", member.process),
                _ => format!("suspended {}: {} freed {}", member.process, member.bytes(), member.done.took()),
            };
            checkpoint::tell(&members, held, args.json, args.quiet, line)
        }
        Err(failure) if failure.is(Kind::Leased) => Err(failure.adding(". What is paused stays paused until `vramctl resume`")),
        Err(failure) => {
            let left: u64 = members.iter().map(checkpoint::Member::left_alone).sum();
            let given: u64 = members.iter().map(checkpoint::Member::given_back).sum();
            let given = if given > 0 { format!("; NCCL has given back {}", Bytes(given)) } else { String::new() };
            let libraries = if left > 0 { format!(" and {} of libraries", Bytes(left)) } else { String::new() };
            let resumed = resumed_meanwhile(&found, &members);
            let paused = match resumed.len() {
                0 => "All tags are paused".into(),
                all if all == members.len() => format!("Resumed meanwhile: {}", resumed.join(", ")),
                _ => format!("Resumed meanwhile: {}. All other tags are paused", resumed.join(", ")),
            };
            Err(failure.adding(&format!(
                ". {paused}{given}; the CUDA context{libraries} may still be on the GPU. `vramctl resume` brings back what was taken"
            )))
        }
    }
}

/// Those whose memory another command has brought back since it was paused.
fn resumed_meanwhile(found: &Found, members: &[checkpoint::Member]) -> Vec<String> {
    let now = found.look_again(&members.iter().map(|member| member.process.pid).collect::<Vec<_>>());
    // A held program may allocate, so a tag that is not paused is not enough.
    let runs = |process: &&Process| !process.is_held() && process.tags().iter().any(|tag| tag.state != TagState::Paused);
    now.iter().filter(runs).map(ToString::to_string).collect()
}

/// Restores those of these processes that do not answer because the driver has locked or checkpointed them without their libraries' knowledge.
/// Returns whether there were any.
pub fn free_stuck(found: &Found, target: &Target, until: Option<Instant>) -> Result<bool, CommandError> {
    let mut stuck = found.choose(target).map_or_else(|_| Vec::new(), |chosen| checkpoint::stuck(found, &chosen));
    if stuck.is_empty() {
        return Ok(false);
    }
    checkpoint::restore(&mut stuck, &GpuMap::new(), until).map_err(|failure| {
        let is_short = failure.exit() == Exit::NoMemory;
        let why = if is_short { ". A process that does not answer may need as much as it has in host memory, on any GPU" } else { "" };
        failure.adding(&format!("{why}. Processes that are not back stay suspended; `vramctl resume` tries again"))
    })?;
    for member in &stuck {
        let why = "did not answer because the driver had locked or checkpointed it; it is restored";
        output::complain("note", &format!("{} {why}", member.process));
    }
    Ok(true)
}

/// Before a resume: brings the suspended ones among these processes back to the GPU. Returns what was done, by process. `wanted`: what is to be
/// resumed then. `place`: this command's, in the queue for memory.
pub fn bring_back(
    found: &Found,
    target: &Target,
    wanted: &Transition,
    until: Option<Instant>,
    place: Option<&mut InQueue>,
    quiet: bool,
) -> Result<BTreeMap<u32, Done>, CommandError> {
    if found.choose(target)?.iter().all(|process| process.suspended().is_none()) {
        return Ok(BTreeMap::new());
    }
    let mut members = checkpoint::join(found, target)?;
    members.retain(|member| member.process.suspended().is_some());
    checkpoint::can_be_seen(&members)?;
    checkpoint::load()?;
    // The memory on other GPUs stays paused, so it needs no room.
    let tags_on = wanted.tags.is_empty().then_some(&*wanted.gpus);
    checkpoint::restore_with_room(&mut members, &GpuMap::new(), tags_on, until, place).map_err(|failure| {
        let lost = members.iter().filter(|member| member.is_lost).count();
        failure.adding(match members.len() - lost {
            0 => "",
            _ if lost > 0 => ". Any others that are not back stay suspended; `vramctl resume` tries again",
            _ => ". Processes that are not back stay suspended, and nothing is lost; `vramctl resume` tries again",
        })
    })?;
    let line = |member: &checkpoint::Member| format!("restored {} {}", member.process, member.done.took());
    members.iter().filter(|_| !quiet).try_for_each(|member| output::say(&line(member)))?;
    Ok(members.into_iter().map(|member| (member.process.pid, member.done)).collect())
}
