//! What pauses, resumes and swaps share: a plan is run, ^C undoes what is not complete, and the outcome is printed.

use crate::ui::Ui;
use crate::ui::interrupt;
use crate::ui::outcome;
use crate::ui::output;
use crate::ui::status::come_so_far;
use std::sync::Arc;
use vramctl_coordinator::Plan;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::{Consent, Left};

/// Runs the plan and prints its outcome. ^C undoes what is not complete.
pub fn run(plan: Plan, consent: &Consent, ui: Ui) -> Result<Exit, CommandError> {
    let (plan, ui) = (Arc::new(plan), Arc::new(ui));
    interrupt::hold();
    let interrupted = (Arc::clone(&plan), Arc::clone(&ui));
    interrupt::watch(move || give_up(&[&interrupted.0], &interrupted.1));
    ui.show(&[&plan]);
    let outcome = plan.run(consent, &*ui);
    ui.end();
    outcome::print(&plan, &outcome, &ui)
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
