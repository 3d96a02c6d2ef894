//! `vramctl share`.

use crate::arguments::{ProcessesOrOnly, checked_limit};
use crate::ask;
use crate::execute::Execute;
use crate::ui::output;
use serde_json::json;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Target};
use vramctl_keeper::{MemberView, Place, View};
use vramctl_model::{Bytes, SharePriority, Sharing};

#[derive(clap::Args)]
#[command(after_long_help = "\
Shows the programs that were started with `vramctl run --share`: where their memory is, who waits for how long and why, the last changes of \
places with their reasons, and the policy. With an option, changes how programs share from now on.

Examples:
  vramctl share
  vramctl share train --priority low
  vramctl share notebook --idle 600 # gives its memory back after ten minutes
  vramctl share notebook --idle 0   # no longer")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrOnly,
    /// From now on: low, normal or high. Low takes what is left, and gives way first
    #[arg(long, value_name = "PRIORITY", value_parser = ["low", "normal", "high"], hide_possible_values = true)]
    priority: Option<String>,
    /// From now on: idle for so many seconds, give the memory back even if nobody asks; 0: never
    #[arg(long, value_name = "SECONDS")]
    idle: Option<u32>,
    /// From now on: the most memory of each GPU, such as 20G or 25%
    #[arg(long, value_name = "SIZE|PERCENT", value_parser = checked_limit)]
    limit: Option<String>,
    /// Print JSON; with a setting: {"processes": [{"pid", "name", "sharing" or "error"}]}
    #[arg(long)]
    json: bool,
}

impl Args {
    /// What is to change.
    fn sharing(&self) -> Sharing {
        let priority = self.priority.as_deref().map(|priority| match priority {
            "low" => SharePriority::Low,
            "high" => SharePriority::High,
            _ => SharePriority::Normal,
        });
        Sharing { priority, gives_back_after_ms: self.idle.map(|seconds| u64::from(seconds) * 1000), limit: self.limit.clone() }
    }

    fn set(&self, sharing: &Sharing) -> Result<Exit, CommandError> {
        let target = self.processes.target();
        let found = Found::look(&target)?;
        let answers = ask::each(&found, found.choose_answering(&target)?, |client| client.share(sharing.clone()));
        ask::print(answers, self.json, "sharing", |process, now| format!("{process}: {}", so(now)))
    }
}

/// How a program shares, in words.
fn so(sharing: &Sharing) -> String {
    let Sharing { priority, gives_back_after_ms, limit } = sharing;
    let priority = format!("{} priority", priority.unwrap_or_default());
    let idle = gives_back_after_ms.map(|after| format!("gives its memory back after {:.0} s", after as f64 / 1000.0));
    let limit = limit.as_ref().map(|limit| format!("at most {limit} of each GPU"));
    [Some(priority), idle, limit].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let sharing = self.sharing();
        if sharing != Sharing::default() {
            return self.set(&sharing);
        }
        if self.processes.are_named() {
            return Err(CommandError::new(Exit::Usage, "what is to change? Give --priority, --idle or --limit".to_owned()));
        }
        let view =
            vramctl_keeper::ask().map_err(|error| CommandError::new(Exit::Busy, format!("the scheduler does not answer: {error}")))?;
        if self.json {
            return output::answer(view.map_or_else(|| json!(null), |view| json!(view))).map(|()| Exit::Done);
        }
        let Some(view) = view else {
            let stranded = vramctl_keeper::stranded(&Found::look(&Target::All)?.processes);
            let nobody = || "nobody shares a GPU here; `vramctl run --share -- COMMAND` starts a program that does".into();
            return output::say(&stranded.unwrap_or_else(nobody)).map(|()| Exit::Done);
        };
        print(&view).map(|()| Exit::Done)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

fn print(view: &View) -> Result<(), CommandError> {
    /// So many of the last changes.
    const SHOWN: usize = 20;
    output::say(&format!("scheduler: process {}; {}", view.scheduler, view.policy))?;
    view.members.iter().try_for_each(|member| output::say(&member_line(member)))?;
    view.changes[view.changes.len().saturating_sub(SHOWN)..].iter().try_for_each(|change| output::say(&change.to_string()))
}

fn member_line(member: &MemberView) -> String {
    let MemberView { pid, name, priority, place, resident_bytes, away_bytes, .. } = member;
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1000.0);
    let memory = match place {
        Place::Unknown => String::new(),
        _ => format!(": {} there, {} away", Bytes(*resident_bytes), Bytes(*away_bytes)),
    };
    let waits = member.waits_ms.map_or_else(String::new, |ms| {
        let because = member.because.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        format!("; waits for {}{because}", seconds(ms))
    });
    let idle = match member.idle_ms {
        Some(0) => "; busy".to_owned(),
        Some(ms) => format!("; idle for {}", seconds(ms)),
        None => String::new(),
    };
    format!("{name} (pid {pid}), {priority} priority, {place}{memory}{idle}{waits}")
}
