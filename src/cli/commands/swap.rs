//! `vramctl swap`.

use crate::arguments::{BackupArgs, EngineArgs, checked_tag, registered, seconds};
use crate::candidates;
use crate::execute::Execute;
use crate::interruptible::give_up;
use crate::ui::{Ui, dry_run, interrupt, outcome, output};
use clap_complete::ArgValueCandidates;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::operation::{Hold, HowToPause};
use vramctl_coordinator::processes::Target;
use vramctl_coordinator::{Operation, Passing, Room, Scope, Swap, Swapped};
use vramctl_model::{Bytes, PauseOptions, Registered, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
OUT is held and paused while IN is resumed: as contents of OUT are saved, its memory moves to IN, piece by piece, so both \
directions of the link are busy at once. All or nothing, for both: if anything fails or dies before the end, OUT takes its memory \
back and runs on, and IN stays paused; the message says which runs. What was to be discarded of OUT is then gone, as after a \
pause. If one of the two has ended as a whole, the other one is resumed.

If the host has no room for the contents of both at once, host memory that IN has read passes to OUT, piece by piece. That takes longer, \
and IN has to be saved again if the swap is undone. Some host memory must be free for it: about the largest allocation of each. --dry-run \
shows how much, and whether IN fits on the GPUs. Memory of OUT that another process has open (CUDA IPC) moves at the very end, so IN \
must fit without it.

Examples:
  vramctl swap trainer engine                      # all tags of both
  vramctl swap trainer engine --dry-run
  vramctl swap trainer engine --in-tags kv_cache   # only this tag comes
  vramctl swap a b --out-tags optimizer,gradients --in-tags kv_cache")]
pub struct Args {
    /// The processes to pause, by name, pattern ('eng*') or id
    #[arg(value_name = "OUT", add = ArgValueCandidates::new(candidates::targets))]
    leaving: String,
    /// The processes to resume, by name, pattern or id
    #[arg(value_name = "IN", add = ArgValueCandidates::new(candidates::targets))]
    coming: String,
    /// The tags of OUT [default: all]
    #[arg(long, value_name = "TAG,…", value_delimiter = ',', value_parser = checked_tag, add = ArgValueCandidates::new(candidates::tags))]
    out_tags: Vec<String>,
    /// The tags of IN [default: all]
    #[arg(long, value_name = "TAG,…", value_delimiter = ',', value_parser = checked_tag, add = ArgValueCandidates::new(candidates::tags))]
    in_tags: Vec<String>,
    /// Only show what would leave and come, and whether there is room
    #[arg(long, conflicts_with = "quiet")]
    dry_run: bool,
    #[command(flatten)]
    backup: BackupArgs,
    /// What to do with registered memory of OUT: refuse, keep or take, as for a pause
    #[arg(long, value_name = "HOW", default_value = "refuse", hide_default_value = true, hide_possible_values = true,
        value_parser = registered([Registered::Refuse, Registered::Keep, Registered::Take]))]
    registered: Registered,
    /// How long to wait for GPU work of OUT in flight [default: --timeout, or 10]
    ///
    /// After that, nothing has changed and OUT continues.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    hold_timeout: Option<Duration>,
    /// Wait at most this many seconds, all in all, for what is in the way (for another command, at least 10); fractions are allowed
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    #[command(flatten)]
    engine: EngineArgs,
    /// Print JSON: {"committed", "processes": […], "jobs": […]}
    ///
    /// A process and a job are as those of `vramctl pause`, and have a "verb": pause or resume. If the swap has failed, "whereabouts" says
    /// which of the two runs. If host memory has passed from IN to OUT, it says how much was in use for both at most. With --dry-run:
    /// {"out": […], "in": […], "gpus": […]}, and "host" if it would pass.
    #[arg(long)]
    json: bool,
    /// Print errors and warnings only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let ui = Ui::new(self.json, self.quiet);
        let [leaving, coming] = self.operations();
        let plan = Swap::plan(leaving, coming, &ui);
        if self.dry_run {
            return print_forecast(&plan?, self.json);
        }
        let (plan, consent) = match plan.and_then(|plan| plan.consent(&ui).map(|consent| (plan, consent))) {
            Err(failure) if self.json => {
                let nothing = json!({ "committed": false, "processes": [], "jobs": [], "error": failure });
                return output::told(output::answer(nothing), failure.exit());
            }
            planned => planned?,
        };
        let (plan, ui) = (Arc::new(plan), Arc::new(ui));
        interrupt::hold();
        let interrupted = (Arc::clone(&plan), Arc::clone(&ui));
        interrupt::watch(move || give_up(&interrupted.0.plans(), &interrupted.1));
        ui.show(&plan.plans());
        let swapped = plan.run(&consent, &*ui);
        ui.end();
        print(&plan, swapped, &ui)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

fn print(plan: &Swap, mut swapped: Swapped, ui: &Ui) -> Result<Exit, CommandError> {
    let exit = swapped.exit();
    let written = if ui.json {
        output::answer(outcome::swap_json(&swapped))
    } else {
        if swapped.whereabouts.is_some() {
            // That says how each job is.
            for outcome in [&mut swapped.left, &mut swapped.came] {
                outcome.jobs.retain(|job| job.committed);
            }
        }
        let of_both = plan.plans().into_iter().zip([&swapped.left, &swapped.came]);
        let written = of_both.map(|(plan, outcome)| outcome::write(plan, outcome, ui)).fold(Ok(()), Result::and);
        if let Some(whereabouts) = &swapped.whereabouts {
            output::complain("note", whereabouts);
            written
        } else if !ui.quiet
            && let Some(job) = swapped.left.jobs.first()
        {
            let passed = swapped.host_peak.map_or_else(String::new, |peak| {
                format!("; host memory passed from one to the other, and at most {} were in use for both", Bytes(peak))
            });
            written.and_then(|()| output::say(&format!("swapped in {:.0} ms{passed}", job.ms)))
        } else {
            written
        }
    };
    output::told(written, exit)
}

/// Prints what the swap would do.
fn print_forecast(plan: &Swap, as_json: bool) -> Result<Exit, CommandError> {
    let (mut leaving, coming, gpus) = plan.forecast();
    if plan.passing().is_some() {
        // There need not be room for all of it.
        for one in &mut leaving {
            one.failure = None;
        }
    }
    if as_json {
        let gpu = |room: &Room| {
            let Room { uuid, free, leaving, late, coming, .. } = room;
            json!({
                "index": room.index(), "uuid": uuid, "free_bytes": free, "out_bytes": leaving, "out_late_bytes": late, "in_bytes": coming
            })
        };
        let coming = coming.iter().map(|(process, bytes)| json!({ "pid": process.pid, "name": process.name(), "bytes": bytes }));
        let coming: Vec<_> = coming.collect();
        let gpus: Vec<_> = gpus.iter().map(gpu).collect();
        let mut answer = json!({ "out": dry_run::json_of(&leaving), "in": coming, "gpus": gpus });
        if let Some(passing) = plan.passing() {
            let Passing { needed, available, least, given } = passing;
            answer["host"] = json!({
                "needed_bytes": needed, "available_bytes": available, "least_bytes": least, "in_bytes": given, "peak_bytes": passing.most()
            });
        }
        output::answer(answer)?;
        return Ok(dry_run::exit_of(&leaving));
    }
    let exit = dry_run::print(&leaving, "pause", false)?;
    for (process, bytes) in coming {
        output::say(&format!("{process}: a resume would bring {}", Bytes(bytes)))?;
    }
    gpus.iter().try_for_each(|room| output::say(&room.to_string()))?;
    plan.passing().map_or(Ok(()), |passing| output::say(&passing.to_string()))?;
    Ok(exit)
}

impl Args {
    /// The pause and the resume that they ask for, with one deadline.
    fn operations(&self) -> [Operation; 2] {
        let deadline = Deadline::new(self.timeout);
        let operation = |verb, target: &str, tags: &[String], pause| {
            let scope = Scope::Tags { words: tags.to_vec(), may_name: false, gpus: Vec::new() };
            Operation::new(verb, Target::parse(target.to_owned()), scope, deadline, pause)
        };
        let pause = HowToPause {
            options: PauseOptions {
                backup: self.backup.policy(),
                registered: self.registered,
                force: self.engine.force,
                ..PauseOptions::default()
            },
            engines: self.engine.addresses(),
            hold: self.hold_timeout.map_or(Hold::Yes, Hold::Within),
            ..HowToPause::default()
        };
        let leaving = operation(Verb::Pause, &self.leaving, &self.out_tags, pause);
        [leaving, operation(Verb::Resume, &self.coming, &self.in_tags, HowToPause::default())]
    }
}
