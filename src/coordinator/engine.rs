//! Asks an inference engine for permission, over its own HTTP API, before a pause takes its memory.

use crate::failure::{CommandError, Exit};
use crate::patience::{ASK_ENGINE_EVERY, CONFIRM_WITHIN, ENGINE_ANSWERS_WITHIN};
use crate::processes::Process;
use serde_json::Value;
use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

/// The engines to ask before a pause.
#[derive(Debug, Clone, Default)]
pub struct Addresses {
    /// Each a checked address ([`checked_address`]).
    pub addresses: Vec<String>,
    /// Their API key, if they require one.
    pub key: Option<String>,
    /// Whether to ask them even if nothing of them would be lost: somebody has named them for this pause.
    pub always: bool,
}

impl Addresses {
    /// Whether there is an engine to ask.
    pub fn any(&self) -> bool {
        !self.addresses.is_empty()
    }

    /// The engines to ask before a pause in which the processes `losing` lose their KV caches.
    pub fn find(&self, losing: &[&Process]) -> Result<Engines, CommandError> {
        // The processes of one engine share its name.
        let names: BTreeSet<_> = losing.iter().filter_map(|process| process.name()).collect();
        if names.len() > self.addresses.len() {
            let names: Vec<_> = names.into_iter().collect();
            let text = format!(
                "the KV caches of {} would be discarded, and each engine must reset its prefix cache first: give --engine for each, or \
                 pause them one at a time",
                names.join(", ")
            );
            return Err(CommandError::new(Exit::Failed, text));
        }
        let engines = self.addresses.iter().map(|address| Engine::find(address, self.key.as_deref())).collect::<Result<_, _>>()?;
        Ok(Engines { engines, lose: !losing.is_empty() })
    }
}

/// The engines that a pause asks.
pub struct Engines {
    engines: Vec<Engine>,
    /// Whether KV caches are discarded, which prefix caches describe.
    lose: bool,
}

impl Engines {
    /// Before the pause: waits until none has requests, then has them reset their prefix caches if they lose their KV caches. An error says
    /// what to do.
    pub fn prepare(&self, until: Option<Instant>) -> Result<(), CommandError> {
        // All must be idle before any prefix cache is reset.
        self.engines.iter().try_for_each(|engine| engine.wait_for_requests(until))?;
        if self.lose { self.engines.iter().try_for_each(|engine| engine.forget(ENGINE_ANSWERS_WITHIN)) } else { Ok(()) }
    }

    /// In the pause, before anything is released: fails if a request has come since. A held engine that does not answer has one: it waits for
    /// the GPU.
    pub fn confirm(&self) -> Result<(), CommandError> {
        let deadline = Instant::now() + CONFIRM_WITHIN;
        let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.engines.iter().try_for_each(|engine| engine.confirm(self.lose, left))
    }
}

/// The supported engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineKind {
    Vllm,
    Sglang,
}

/// An engine that has answered.
struct Engine {
    address: String,
    key: Option<String>,
    agent: ureq::Agent,
    kind: EngineKind,
}

impl Engine {
    /// Detects the engine by the path at which it reports its requests.
    fn find(address: &str, key: Option<&str>) -> Result<Self, CommandError> {
        // Never through a proxy.
        let settings = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build();
        let (address, key) = (address.to_owned(), key.map(str::to_owned));
        let mut engine = Self { address, key, agent: settings.into(), kind: EngineKind::Vllm };
        if engine.running(ENGINE_ANSWERS_WITHIN)?.is_none() {
            engine.kind = EngineKind::Sglang;
            if engine.running(ENGINE_ANSWERS_WITHIN)?.is_none() {
                return Err(engine.failure(
                    Exit::Failed,
                    "it reports no request count (vLLM: /metrics, SGLang: /v1/loads); check the address, or pause with --force while it is \
                     idle",
                ));
            }
        }
        Ok(engine)
    }

    /// The number of its requests. `None` if it does not report them in this engine's way.
    fn running(&self, within: Duration) -> Result<Option<u64>, CommandError> {
        let path = match self.kind {
            EngineKind::Vllm => "/metrics",
            EngineKind::Sglang => "/v1/loads?include=core",
        };
        let (status, body) = self.ask(path, false, within)?;
        Ok(match (status, self.kind) {
            (200, EngineKind::Vllm) => gauges(&body),
            (200, EngineKind::Sglang) => loads(&body),
            (401 | 403, EngineKind::Sglang) => return Err(self.unauthorized()),
            _ => None,
        })
    }

    fn wait_for_requests(&self, until: Option<Instant>) -> Result<(), CommandError> {
        loop {
            let running = self.count(ENGINE_ANSWERS_WITHIN)?;
            if running == 0 {
                return Ok(());
            }
            if until.is_none_or(|until| Instant::now() >= until) {
                let text = format!(
                    "it has requests ({running}); stop them, wait for them with --timeout, or pause with --force in place of --engine"
                );
                return Err(self.failure(Exit::Busy, &text));
            }
            thread::sleep(ASK_ENGINE_EVERY);
        }
    }

    /// The number of its requests, from an engine that has reported it before.
    fn count(&self, within: Duration) -> Result<u64, CommandError> {
        self.running(within)?.ok_or_else(|| self.failure(Exit::Failed, "it no longer reports its request count; try again, or use --force"))
    }

    fn confirm(&self, loses: bool, left: impl Fn() -> Duration) -> Result<(), CommandError> {
        let too_late = |why: &str| self.failure(Exit::Busy, &format!("{why}, and would lose its memory; nothing was paused. Try again"));
        match self.count(left()) {
            Ok(0) => (),
            Ok(running) => return Err(too_late(&format!("a request has come meanwhile ({running})"))),
            Err(_) => return Err(too_late("it does not answer while it is held, so a request may have come meanwhile")),
        }
        // vLLM's count is that of its last step, and a request that has ended since the reset is in the prefix cache again. Its scheduler resets
        // that without the GPU, unless it has requests. SGLang's scheduler counts itself, and would need the GPU for a reset.
        match self.kind {
            EngineKind::Vllm if loses => self.forget(left()).map_err(|_| too_late("a request has come meanwhile")),
            EngineKind::Vllm | EngineKind::Sglang => Ok(()),
        }
    }

    /// Has it reset its prefix cache.
    fn forget(&self, within: Duration) -> Result<(), CommandError> {
        let path = match self.kind {
            EngineKind::Vllm => "/reset_prefix_cache",
            EngineKind::Sglang => "/flush_cache",
        };
        let (status, body) = self.ask(path, true, within)?;
        match status {
            // vLLM reports success in the body; older versions have no body.
            200 if serde_json::from_str::<Value>(&body).is_ok_and(|body| body["success"] == false) => Err(self.failure(
                Exit::Busy,
                "it did not reset its prefix cache, part of which is still in use; try again when its requests have finished",
            )),
            200 => Ok(()),
            401 | 403 => Err(self.unauthorized()),
            404 if self.kind == EngineKind::Vllm => Err(self.failure(
                Exit::Failed,
                "it has no /reset_prefix_cache, so it would keep using the discarded contents; start vLLM with VLLM_SERVER_DEV_MODE=1, or \
                 keep the contents",
            )),
            400 => Err(self.failure(Exit::Busy, &format!("it did not reset its prefix cache: {}", first_line(&body)))),
            status => Err(self.failure(Exit::Failed, &format!("{path} answers {status}: {}", first_line(&body)))),
        }
    }

    fn ask(&self, path: &str, post: bool, within: Duration) -> Result<(u16, String), CommandError> {
        let url = format!("{}{path}", self.address);
        let key = self.key.as_ref().map(|key| format!("Bearer {key}"));
        let limit = Some(within);
        let answer = if post {
            let request = self.agent.post(&url).config().timeout_global(limit).build();
            key.into_iter().fold(request, |request, key| request.header("Authorization", key)).send_empty()
        } else {
            let request = self.agent.get(&url).config().timeout_global(limit).build();
            key.into_iter().fold(request, |request, key| request.header("Authorization", key)).call()
        };
        let answer = answer.and_then(|mut answer| Ok((answer.status().as_u16(), answer.body_mut().read_to_string()?)));
        answer.map_err(|error| {
            self.failure(Exit::Failed, &format!("it does not answer: {error}; check the address, or skip the engine with --force"))
        })
    }

    fn unauthorized(&self) -> CommandError {
        self.failure(Exit::Failed, "it requires a key; set VRAMCTL_ENGINE_KEY to its API key (SGLang: the admin key, if it has one)")
    }

    fn failure(&self, exit: Exit, text: &str) -> CommandError {
        CommandError::new(exit, format!("the engine at {}: {text}", self.address))
    }
}

/// Running and waiting requests in vLLM's metrics, summed over its engines.
fn gauges(metrics: &str) -> Option<u64> {
    let value = |line: &str| {
        let rest = line.strip_prefix("vllm:num_requests_running").or_else(|| line.strip_prefix("vllm:num_requests_waiting"))?;
        let number: f64 = rest.starts_with(['{', ' ']).then(|| rest.rsplit(' ').next())??.parse().ok()?;
        Some(number as u64)
    };
    metrics.lines().filter_map(value).reduce(|one, other| one + other)
}

/// Running and waiting requests in `SGLang`'s list of loads, summed over its ranks.
fn loads(body: &str) -> Option<u64> {
    let body: Value = serde_json::from_str(body).ok()?;
    let count = |load: &Value| Some(load["num_running_reqs"].as_u64()? + load["num_waiting_reqs"].as_u64()?);
    body["loads"].as_array()?.iter().map(count).try_fold(0, |sum, count| Some(sum + count?))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}

/// An engine's address, or why it is none. Empty for an empty text, as an empty variable has it.
pub fn checked_address(text: &str) -> Result<String, String> {
    match text.strip_prefix("http://") {
        None if text.is_empty() => Ok(String::new()),
        Some(host) if !host.is_empty() => Ok(text.trim_end_matches('/').to_owned()),
        _ => Err("not an address like http://127.0.0.1:8000; https is not supported".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_over_all_ranks() {
        let metrics = "# HELP vllm:num_requests_running Number\n\
                       vllm:num_requests_running{engine=\"0\",model_name=\"a b\"} 2.0\n\
                       vllm:num_requests_running{engine=\"1\",model_name=\"a b\"} 1.0\n\
                       vllm:num_requests_waiting{engine=\"0\",model_name=\"a b\"} 4.0\n\
                       vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"x\"} 4.0\n";
        assert_eq!(gauges(metrics), Some(7));
        assert_eq!(gauges("sglang:num_running_reqs 1.0\n"), None, "another engine's metrics");
        assert_eq!(
            loads(r#"{"loads":[{"num_running_reqs":1,"num_waiting_reqs":2},{"num_running_reqs":0,"num_waiting_reqs":5}]}"#),
            Some(8)
        );
        assert_eq!(loads(r#"{"loads":[]}"#), Some(0));
        assert_eq!(loads(r#"{"loads":[{"num_reqs":1}]}"#), None, "a list that is not understood says nothing");
        assert_eq!(loads("<html>"), None);
    }

    #[test]
    fn an_address_is_checked_before_anything_is_done() {
        assert_eq!(checked_address("http://127.0.0.1:8000/").unwrap(), "http://127.0.0.1:8000");
        assert_eq!(checked_address("").unwrap(), "", "as an empty variable says it");
        for wrong in ["127.0.0.1:8000", "https://engine", "http://"] {
            assert!(checked_address(wrong).is_err(), "{wrong:?}");
        }
    }
}
