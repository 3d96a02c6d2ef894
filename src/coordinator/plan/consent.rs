//! Whoever has a say in a pause is asked before it: processes that have the memory open, and inference engines.

use crate::Reporter;
use crate::engine::Engines;
use crate::failure::CommandError;
use crate::patience::LOOK_FOR_BORROWERS_EVERY;
use crate::plan::Plan;
use std::thread;
use vramctl_control::protocol::Refusal;
use vramctl_model::{Error, Kind};

/// Who has agreed to a pause.
#[derive(Default)]
pub struct Consent {
    /// The engines that must still have no requests when the memory is released.
    pub(super) engines: Option<Engines>,
    /// A KV cache that a prefix cache describes may be discarded.
    pub(super) may_lose: bool,
}

impl Plan {
    /// Waits until no other process has the memory to pause open, and asks the inference engines, which may reset their prefix caches. Nothing
    /// else changes, and the programs keep running meanwhile.
    pub fn consent(&self, reporter: &dyn Reporter) -> Result<Consent, CommandError> {
        self.wait_for_borrowers(reporter);
        let force = self.operation.pause.options.force;
        // If everything is paused already, there is nothing to ask.
        if force || self.due().next().is_none() {
            return Ok(Consent { engines: None, may_lose: force });
        }
        let engines = &self.operation.pause.engines;
        let mut losing = Vec::new();
        for member in self.due() {
            if let Some(name) = self.ask_plan(member)?.plan.prefix_cache {
                if !engines.any() {
                    let refusal = Refusal::from(&Error::PrefixCache(name));
                    let message = format!("{}: {}", member.process, refusal.message);
                    return Err(CommandError::Refused(Box::new(Refusal { message, ..refusal })));
                }
                losing.push(&member.process);
            }
        }
        let may_lose = !losing.is_empty();
        // The requests of a held engine lose nothing if all contents are kept.
        if !engines.any() || (!may_lose && self.request.holds() && !engines.always) {
            return Ok(Consent { engines: None, may_lose });
        }
        let engines = engines.find(&losing)?;
        engines.prepare(self.operation.deadline.at())?;
        Ok(Consent { engines: Some(engines), may_lose })
    }

    /// If that takes too long, the pause is refused.
    fn wait_for_borrowers(&self, reporter: &dyn Reporter) {
        for member in self.due() {
            let mut is_known = false;
            while let Err(CommandError::Refused(refusal)) = self.ask_plan(member) {
                if refusal.code != Kind::Shared || self.operation.deadline.is_over() {
                    break;
                }
                if !std::mem::replace(&mut is_known, true) {
                    let lent: Vec<_> = refusal.lent.iter().flatten().map(ToString::to_string).collect();
                    reporter.note(&format!("{}: waiting until this is closed: {}", member.process, lent.join(", ")));
                }
                thread::sleep(LOOK_FOR_BORROWERS_EVERY);
            }
        }
    }
}
