//! `vramctl share`.

use crate::execute::Execute;
use crate::ui::output;
use serde_json::json;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_keeper::{MemberView, View};
use vramctl_model::Bytes;

#[derive(clap::Args)]
#[command(after_long_help = "\
Shows the programs that were started with `vramctl run --share`: where their memory is, who waits for how long and why, and the last changes of \
places with their reasons.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        let view = vramctl_keeper::ask()
            .map_err(|error| CommandError::new(Exit::Busy, format!("the scheduler does not answer: {error}; is it stopped?")))?;
        if self.json {
            return output::answer(view.map_or_else(|| json!(null), |view| json!(view))).map(|()| Exit::Done);
        }
        let Some(view) = view else {
            return output::say("nobody shares a GPU here; `vramctl run --share -- COMMAND` starts a program that does")
                .map(|()| Exit::Done);
        };
        print(&view).map(|()| Exit::Done)
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

fn print(view: &View) -> Result<(), CommandError> {
    output::say(&format!("scheduler: process {}", view.scheduler))?;
    view.members.iter().try_for_each(|member| output::say(&member_line(member)))?;
    view.changes.iter().try_for_each(|change| output::say(&change.to_string()))
}

fn member_line(member: &MemberView) -> String {
    let MemberView { pid, name, priority, place, resident_bytes, away_bytes, .. } = member;
    let waits = member.waits_ms.map_or_else(String::new, |ms| {
        let because = member.because.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        format!("; waits for {ms} ms{because}")
    });
    let idle = member.idle_ms.map_or_else(String::new, |ms| format!("; idle for {ms} ms"));
    format!("{name} (pid {pid}), {priority}, {place}: {} there, {} away{idle}{waits}", Bytes(*resident_bytes), Bytes(*away_bytes))
}
