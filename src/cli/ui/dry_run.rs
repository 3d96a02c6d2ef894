//! Prints dry runs.

use crate::ui::output;
use serde_json::{Value, json};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::forecast::Forecast;
use vramctl_model::{Bytes, Plan, Policy, TagPlan};

/// What would be done to a process, in words. Nothing for one that would refuse.
fn text(one: &Forecast, verb: &str) -> Option<String> {
    let Some(plan) = &one.plan else {
        return one
            .aside_bytes
            .map(|bytes| format!("{}: would be held, too, until {} that it has open is resumed", one.process, Bytes(bytes)));
    };
    Some(tags_text(one, plan, verb))
}

fn tags_text(one: &Forecast, plan: &Plan, verb: &str) -> String {
    let process = &one.process;
    let takes_the_rest = verb == "suspend";
    if plan.tags.is_empty() {
        return match process.suspended() {
            Some(_) => format!("{process}: is suspended already"),
            None if takes_the_rest => {
                format!("{process}: its tags are paused already; a suspend would take its CUDA context off the GPU, too")
            }
            None => format!("{process}: nothing to pause"),
        };
    }
    let contents = |(policy, bytes): (&Policy, &u64)| format!("{} {policy}", Bytes(*bytes));
    let row = |tag: &TagPlan| {
        let contents: Vec<_> = tag.backup.iter().map(contents).collect();
        vec![tag.tag.clone(), Bytes(tag.bytes).to_string(), tag.allocations.to_string(), contents.join(", ")]
    };
    let bytes = plan.tags.iter().map(|tag| tag.bytes).sum();
    let (needed, available) = (Bytes(plan.host.needed_bytes), Bytes(plan.host.available_bytes));
    format!(
        "{process}: a {verb} would free {}{}\n{}\nHost memory for the contents: {needed} needed, {available} available.",
        Bytes(bytes),
        if takes_the_rest { ", and its CUDA context" } else { "" },
        output::table(&["TAG", "BYTES", "ALLOCATIONS", "CONTENTS"], plan.tags.iter().map(row))
    )
}

/// Prints what this verb would do, and returns the exit code that the command would have, as far as it can be predicted.
pub fn print(all: &[Forecast], verb: &str, as_json: bool) -> Result<Exit, CommandError> {
    if as_json {
        output::json(&json_of(all))?;
    } else {
        for one in all {
            text(one, verb).map_or(Ok(()), |text| output::say(&text))?;
            if let Some(failure) = &one.failure {
                output::complain("error", &format!("{}: {failure}", one.process));
            }
        }
    }
    Ok(exit_of(all))
}

/// The exit code that the command would have.
pub fn exit_of(all: &[Forecast]) -> Exit {
    all.iter().find_map(|one| one.failure.as_ref()).map_or(Exit::Done, CommandError::exit)
}

/// As JSON.
pub fn json_of(all: &[Forecast]) -> Vec<Value> {
    let answer = |Forecast { process, plan, failure, aside_bytes }: &Forecast| {
        let mut answer = json!({ "pid": process.pid, "name": process.name() });
        if let Some(bytes) = aside_bytes {
            answer["aside_bytes"] = json!(bytes);
        }
        if let Some(plan) = plan {
            answer["plan"] = json!(plan);
        }
        if let Some(failure) = failure {
            answer["error"] = json!(failure);
        }
        answer
    };
    all.iter().map(answer).collect()
}
