//! `vramctl events`.

use crate::arguments::ProcessesOrAll;
use crate::execute::Execute;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::processes::{Found, Process};
use vramctl_coordinator::text::one_line;
use vramctl_model::{Bytes, Caller, Totals, Verb};

#[derive(clap::Args)]
#[command(after_long_help = "\
Prints a line for whatever happens to the processes from now on, until ^C: started (it has GPU memory), paused, resumed, suspended, restored, \
changed (its tags are in another state), silent (it does not answer) and ended. It looks twice a second; pauses and resumes are counted by the \
process, so that none is missed that is over sooner. Times are UTC. `vramctl trace` shows each allocation.

Examples:
  vramctl events
  vramctl events engine --json | jq -r .event")]
pub struct Args {
    #[command(flatten)]
    processes: ProcessesOrAll,
    /// Print a line of JSON for each: {"time" (seconds since 1970), "event", "pid", "name", "job", "state", "bytes", "times", "by"}
    #[arg(long)]
    json: bool,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum What {
    Started,
    Paused,
    Resumed,
    Suspended,
    Restored,
    Changed,
    Silent,
    Ended,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Event {
    #[serde(rename = "event")]
    what: What,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    /// Its state afterwards; why it is silent.
    #[serde(skip_serializing_if = "String::is_empty")]
    state: String,
    /// Of a start, a pause and a resume.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Pauses, or resumes, since the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<u64>,
    /// Of a pause that lasts: who asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    by: Option<Caller>,
}

/// An event with its time.
#[derive(Serialize)]
struct Timed {
    time: f64,
    #[serde(flatten)]
    event: Event,
}

impl Execute for Args {
    fn execute(&self) -> Result<Exit, CommandError> {
        const LOOK_EVERY: Duration = Duration::from_millis(500);
        let target = self.processes.target();
        let mut known: Option<BTreeMap<u32, Process>> = None;
        loop {
            let found = Found::look(&target)?;
            // A process that is named may start later.
            let now: BTreeMap<_, _> = found.choose(&target).unwrap_or_default().into_iter().map(|process| (process.pid, process)).collect();
            let events = known.as_ref().map_or_else(Vec::new, |known| changes(known, &now));
            if !self.print(events)? {
                return Ok(Exit::Done);
            }
            let silent = known.into_iter().flatten().filter(|(pid, _)| now.get(pid).is_some_and(|now| now.status.is_err()));
            // What is compared with is what a process has said last.
            known = Some(silent.chain(now.iter().filter(|(_, now)| now.status.is_ok()).map(|(pid, now)| (*pid, now.clone()))).collect());
            thread::sleep(LOOK_EVERY);
        }
    }

    fn wants_json(&self) -> bool {
        self.json
    }
}

impl Args {
    /// Returns whether anybody still reads.
    fn print(&self, events: Vec<Event>) -> Result<bool, CommandError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = (since.as_secs_f64() * 1e3).round() / 1e3;
        let mut out = io::stdout().lock();
        for event in events {
            let line = if self.json {
                serde_json::to_string(&Timed { time, event }).map_err(|error| CommandError::new(Exit::Failed, error.to_string()))?
            } else {
                format!("{}  {}", utc(since.as_secs()), event.in_words())
            };
            match writeln!(out, "{line}").and_then(|()| out.flush()) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
                Err(error) => return Err(CommandError::new(Exit::Failed, format!("stdout: {error}"))),
                Ok(()) => (),
            }
        }
        Ok(true)
    }
}

/// What has happened between two looks.
fn changes(before: &BTreeMap<u32, Process>, now: &BTreeMap<u32, Process>) -> Vec<Event> {
    let ended = before.values().filter(|process| !now.contains_key(&process.pid)).map(|process| Event::of(What::Ended, process));
    let others = now.values().flat_map(|process| match before.get(&process.pid) {
        None => vec![Event { bytes: Some(process.active_bytes()), ..Event::of(What::Started, process) }],
        Some(before) => between(before, process),
    });
    ended.chain(others).collect()
}

fn between(before: &Process, now: &Process) -> Vec<Event> {
    if now.status.is_err() {
        let is_new = before.status.is_ok();
        return is_new.then(|| Event::of(What::Silent, now)).into_iter().collect();
    }
    let of_verb = |verb, what| {
        let (then, now_) = (totals(before, verb), totals(now, verb));
        let times = now_.done.saturating_sub(then.done);
        let bytes = Some(now_.bytes.saturating_sub(then.bytes));
        (times > 0).then(|| Event { bytes, times: Some(times), ..Event::of(what, now) })
    };
    let standing = now.status.as_ref().ok().and_then(|status| status.memory.standing.as_ref());
    let paused = of_verb(Verb::Pause, What::Paused).map(|event| Event { by: standing.and_then(|standing| standing.by.clone()), ..event });
    let resumed = of_verb(Verb::Resume, What::Resumed);
    let (was_away, is_away) = (before.suspended().is_some(), now.suspended().is_some());
    let suspended = (!was_away && is_away).then(|| Event::of(What::Suspended, now));
    let restored = (was_away && !is_away).then(|| Event::of(What::Restored, now));
    let is_paused_last = now.active_bytes() == 0 || now.is_held();
    let [first, last] = if is_paused_last { [resumed, paused] } else { [paused, resumed] };
    let events: Vec<_> = restored.into_iter().chain(first).chain(last).chain(suspended).collect();
    if events.is_empty() && before.standing() != now.standing() { vec![Event::of(What::Changed, now)] } else { events }
}

fn totals(process: &Process, verb: Verb) -> Totals {
    process.status.as_ref().ok().and_then(|status| status.memory.totals.get(&verb).cloned()).unwrap_or_default()
}

impl Event {
    fn of(what: What, process: &Process) -> Self {
        let state = match (&process.status, what) {
            (_, What::Ended) => String::new(),
            (Err(failure), _) => failure.to_string(),
            (Ok(_), _) => process.standing(),
        };
        let (name, job) = (process.name().map(str::to_owned), process.job().map(str::to_owned));
        Self { what, pid: process.pid, name, job, state, bytes: None, times: None, by: None }
    }

    fn in_words(&self) -> String {
        let name = self.name.as_deref().map_or_else(|| "process".into(), one_line);
        let what = format!("{:?}", self.what).to_lowercase();
        let bytes = self.bytes.map_or_else(String::new, |bytes| format!(" {}", Bytes(bytes)));
        let times = self.times.filter(|times| *times > 1).map_or_else(String::new, |times| format!(" in {times} operations"));
        let by = self.by.as_ref().map_or_else(String::new, |by| format!(" by {by}"));
        let state = if self.state.is_empty() { String::new() } else { format!(": {}", one_line(&self.state)) };
        format!("{name} (pid {}) {what}{bytes}{times}{by}{state}", self.pid)
    }
}

/// A time since 1970 as `2026-11-30T19:02:03Z`.
fn utc(seconds: u64) -> String {
    let (days, time) = (seconds / 86400, seconds % 86400);
    // Years that begin in March: the day that some of them lack is their last.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_coordinator::process::made_up::process;
    use vramctl_model::{Standing, TagState};

    #[test]
    fn a_time_is_that_of_a_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    fn seen(processes: Vec<Process>) -> BTreeMap<u32, Process> {
        processes.into_iter().map(|process| (process.pid, process)).collect()
    }

    fn counted(mut process: Process, pauses: u64, resumes: u64) -> Process {
        let memory = &mut process.status.as_mut().unwrap().memory;
        for (verb, done) in [(Verb::Pause, pauses), (Verb::Resume, resumes)] {
            memory.totals.insert(verb, Totals { done, bytes: done << 30, ..Totals::default() });
        }
        process
    }

    fn told<'a>(before: impl Into<Option<&'a Process>>, now: impl Into<Option<&'a Process>>) -> Vec<String> {
        let these = |one: Option<&Process>| seen(one.into_iter().cloned().collect());
        changes(&these(before.into()), &these(now.into())).iter().map(Event::in_words).collect()
    }

    #[test]
    fn programs_come_and_go() {
        let engine = process(7, "engine", &[("weights", TagState::Active)]);
        assert_eq!(told(None, &engine), ["engine (pid 7) started 1.00 GiB: active"]);
        assert_eq!(told(&engine, None), ["engine (pid 7) ended"]);
        let silent = Process { status: Err(CommandError::new(Exit::Busy, "no answer")), ..engine.clone() };
        assert_eq!(told(&engine, &silent), ["engine (pid 7) silent: no answer"]);
        assert_eq!(told(&silent, &silent), [""; 0]);
        assert_eq!(told(&engine, &engine), [""; 0]);
    }

    /// A pause and its resume may be over before the next look.
    #[test]
    fn no_pause_is_missed() {
        let active = || process(7, "engine", &[("weights", TagState::Active)]);
        let paused = || process(7, "engine", &[("weights", TagState::Paused)]);
        assert_eq!(
            told(&counted(active(), 1, 1), &counted(active(), 3, 3)),
            ["engine (pid 7) paused 2.00 GiB in 2 operations: active", "engine (pid 7) resumed 2.00 GiB in 2 operations: active"]
        );
        let mut held = counted(paused(), 1, 0);
        let memory = &mut held.status.as_mut().unwrap().memory;
        memory.held = true;
        memory.standing = Some(Standing { seconds: 0, by: Some(Caller { pid: 9, program: "vramctl".into(), user: Some(0) }) });
        assert_eq!(told(&active(), &held), ["engine (pid 7) paused 1.00 GiB by process 9 (vramctl, user 0): held, paused"]);
        let mut away = held.clone();
        away.status.as_mut().unwrap().memory.suspended = Some(Vec::new());
        assert_eq!(told(&held, &away), ["engine (pid 7) suspended: suspended"]);
        assert_eq!(told(&away, &counted(active(), 1, 1)), ["engine (pid 7) restored: active", "engine (pid 7) resumed 1.00 GiB: active"]);
        assert_eq!(told(&active(), &process(7, "engine", &[("weights", TagState::Pausing)])), ["engine (pid 7) changed: pausing"]);
    }
}
