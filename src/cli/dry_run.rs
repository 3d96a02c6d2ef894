//! Dry runs: print what a pause or a suspend would do to processes, and why it would fail.

use crate::failure::{CommandError, Exit};
use crate::nccl;
use crate::output;
use crate::processes::Process;
use serde_json::json;
use vramctl_control::protocol;
use vramctl_model::{Backup, Bytes, Error, Plan, TagPlan};

/// What would be done to one process.
pub struct Foretold<'a> {
    pub process: &'a Process,
    /// `None` for a borrower, or if the process refuses to say.
    pub plan: Option<Plan>,
    pub failure: Option<CommandError>,
    /// For a borrower: the bytes that it would set aside.
    pub aside_bytes: Option<u64>,
}

impl<'a> Foretold<'a> {
    /// From its answer. `may_lose`: contents that a prefix cache describes may be discarded.
    pub fn new(process: &'a Process, foretold: protocol::DryRun, may_lose: bool) -> Self {
        let protocol::DryRun { plan, refused } = foretold;
        let prefix_cache = plan.prefix_cache.clone().filter(|_| !may_lose).map(|engine| CommandError::from(&Error::PrefixCache(engine)));
        Self { process, plan: Some(plan), failure: prefix_cache.or(refused.map(CommandError::Refused)), aside_bytes: None }
    }

    /// A borrower, which pauses nothing of its own and would set aside open memory of others.
    pub fn along(process: &'a Process, bytes: u64) -> Self {
        Self { process, plan: None, failure: None, aside_bytes: Some(bytes) }
    }

    /// A process that would refuse.
    pub fn refused(process: &'a Process, failure: CommandError) -> Self {
        Self { process, plan: None, failure: Some(failure), aside_bytes: None }
    }

    /// Adds the memory that NCCL would give back.
    pub fn with_communicators(mut self, chosen: &nccl::ChosenCommunicators) -> Self {
        if let Some(plan) = &mut self.plan {
            plan.communicators = chosen.of(self.process.pid).to_vec();
        }
        self
    }

    /// Nothing for a process that would refuse.
    fn text(&self) -> Option<String> {
        let aside = |bytes| format!("{}: would be held, too, until {} that it has open is resumed", self.process, Bytes(bytes));
        let Some(plan) = &self.plan else { return self.aside_bytes.map(aside) };
        let nccl = nccl::foretold(&plan.communicators).map_or_else(String::new, |text| format!("\n{text}"));
        Some(self.tags_text(plan) + &nccl)
    }

    fn tags_text(&self, plan: &Plan) -> String {
        let process = self.process;
        if plan.tags.is_empty() {
            return format!("{process}: nothing to pause");
        }
        let contents = |(policy, bytes): (&Backup, &u64)| format!("{} {policy}", Bytes(*bytes));
        let row = |tag: &TagPlan| {
            let contents: Vec<_> = tag.backup.iter().map(contents).collect();
            vec![tag.tag.clone(), Bytes(tag.bytes).to_string(), tag.allocations.to_string(), contents.join(", ")]
        };
        let bytes = plan.tags.iter().map(|tag| tag.bytes).sum();
        let (needed, available) = (Bytes(plan.host.needed_bytes), Bytes(plan.host.available_bytes));
        format!(
            "{process}: a pause would free {}\n{}\nHost memory for the contents: {needed} needed, {available} available.",
            Bytes(bytes),
            output::table(&["TAG", "BYTES", "ALLOCATIONS", "CONTENTS"], plan.tags.iter().map(row))
        )
    }
}

/// Prints them, and returns the exit code that the command would have, as far as it can be predicted.
pub fn tell(all: &[Foretold], as_json: bool) -> Result<Exit, CommandError> {
    if as_json {
        let answer = |Foretold { process, plan, failure, aside_bytes }: &Foretold| {
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
        output::json(&all.iter().map(answer).collect::<Vec<_>>())?;
    } else {
        for one in all {
            one.text().map_or(Ok(()), |text| output::say(&text))?;
            if let Some(failure) = &one.failure {
                output::complain("error", &format!("{}: {failure}", one.process));
            }
        }
    }
    Ok(all.iter().find_map(|one| one.failure.as_ref()).map_or(Exit::Done, CommandError::exit))
}
