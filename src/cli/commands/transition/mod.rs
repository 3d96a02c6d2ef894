//! `vramctl pause` and `vramctl resume`. [`options`] has the options, and [`answers`] prints the outcome.

pub mod answers;
mod options;

use crate::commands::status::come_so_far;
use crate::ui::Ui;
use crate::ui::dry_run;
use crate::ui::interrupt;
use crate::ui::output;
pub use options::{EngineArgs, PauseArgs, ResumeArgs, engine_key};
use std::sync::Arc;
use vramctl_coordinator::Plan;
use vramctl_coordinator::deadline::Deadline;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::plan::{Consent, Left};

pub fn pause(args: &PauseArgs) -> Result<Exit, CommandError> {
    let (json, options::Args { quiet, timeout, .. }) = (args.json, &args.transition);
    let ui = Ui::new(json, *quiet);
    let plan = Plan::make(args.operation(Deadline::new(*timeout)), &ui)?;
    if args.dry_run {
        return dry_run::print(&plan.forecast(), json);
    }
    let consent = plan.consent(&ui)?;
    run(plan, &consent, ui)
}

pub fn resume(args: &ResumeArgs) -> Result<Exit, CommandError> {
    let ui = Ui::new(args.json, args.transition.quiet);
    let plan = Plan::make(args.operation(), &ui)?.restore_suspended(&ui)?;
    run(plan, &Consent::default(), ui)
}

/// Runs the plan and prints its outcome. ^C undoes what is not complete.
fn run(plan: Plan, consent: &Consent, ui: Ui) -> Result<Exit, CommandError> {
    let (plan, ui) = (Arc::new(plan), Arc::new(ui));
    interrupt::hold();
    let interrupted = (Arc::clone(&plan), Arc::clone(&ui));
    interrupt::watch(move || give_up(&[&interrupted.0], &interrupted.1));
    ui.show(&[&plan]);
    let outcome = plan.run(consent, &*ui);
    ui.end();
    answers::print(&plan, &outcome, &ui)
}

/// Cancels the requests, and prints how each process is left.
pub fn give_up(plans: &[&Plan], ui: &Ui) {
    ui.interrupt();
    for (plan, process, left) in
        plans.iter().flat_map(|plan| plan.left_behind().into_iter().map(move |(process, left)| (plan, process, left)))
    {
        let how = match left {
            Left::Undoing(tag) => format!("is being undone{}; `vramctl status` shows when that is done", come_so_far(&tag)),
            Left::Done => "is complete".into(),
            Left::AsItWas => "was cancelled; nothing has changed".into(),
            Left::Unknown(why) => format!("has an unknown outcome: {why}"),
        };
        output::complain("interrupted", &format!("{process}: the {} {how}", plan.operation().verb.name()));
    }
}
