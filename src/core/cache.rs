//! The program's own allocator, such as torch's: asks what it caches, and has it return that.
//!
//! Only the program can call its allocator. So one of its own threads serves requests ([`wait`], [`report`], [`answer`]); the library's
//! threads never run program code. A library thread that took Python's interpreter lock could wait for it forever, and would be killed in
//! mid-stack when the interpreter exits. Callers wait with a timeout, whatever the serving thread waits for.

use crate::events::{self, Event};
use crate::gate;
use crate::memory::Memory;
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use vramctl_driver::{self as driver, CUdeviceptr, RelaxedCapture};
use vramctl_host::{PerProcess, Unpoison, exit};
use vramctl_model::{Bytes, Cached, Error, Trimmed};

/// What the serving thread is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errand {
    /// Report what there is.
    Report,
    /// Report, return what can be returned, and report again.
    Trim,
}

/// A piece of memory that the allocator got from CUDA.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Where it begins.
    pub address: CUdeviceptr,
    /// Its length.
    pub bytes: u64,
    /// Of that, bytes in use.
    pub live_bytes: u64,
}

/// The allocator's memory, by GPU and tag.
type ByTag = BTreeMap<(Option<String>, Option<Arc<str>>), Cached>;

static WICKET: PerProcess<Rendezvous> = PerProcess::new(Rendezvous::default);

/// Where a caller and the serving thread meet.
#[derive(Default)]
struct Rendezvous {
    state: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    is_served: bool,
    deal: Deal,
    /// The first and the last report of this deal.
    reports: Option<(ByTag, ByTag)>,
}

/// State of the one errand that can be in progress.
#[derive(Default)]
enum Deal {
    #[default]
    Free,
    Asked(Errand),
    Working,
    /// The thread is working, but its caller has given up.
    Unwanted,
    Answered(Result<(), String>),
}

impl Rendezvous {
    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.state.lock().unpoisoned()
    }

    /// Waits until `is_so`. `None` at the deadline, or when the program ends.
    fn until(&self, deadline: Instant, is_so: fn(&Deal) -> bool) -> Option<MutexGuard<'_, Meeting>> {
        /// How soon the program's end is noticed.
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        let mut state = self.lock();
        while !is_so(&state.deal) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || exit::is_ending() {
                return None;
            }
            state = self.changed.wait_timeout(state, left.min(LOOK_EVERY)).unpoisoned().0;
        }
        Some(state)
    }
}

/// Whether a thread of the program serves.
pub fn is_served() -> bool {
    WICKET.existing().is_some_and(|wicket| wicket.lock().is_served)
}

/// For the serving thread: waits for the next errand. From then on, its calls do not invalidate stream captures of other threads.
pub fn wait() -> Errand {
    let wicket = WICKET.get();
    let mut state = wicket.lock();
    state.is_served = true;
    // A thread that comes back without having answered has failed.
    finish(&mut state, Err("the program's allocator has not answered".into()));
    wicket.changed.notify_all();
    loop {
        if let Deal::Asked(errand) = state.deal {
            state.deal = Deal::Working;
            state.reports = None;
            drop(state);
            // For good: the thread does nothing else.
            mem::forget(RelaxedCapture::enter());
            return errand;
        }
        state = wicket.changed.wait(state).unpoisoned();
    }
}

/// For the serving thread: reports the allocator's memory. The first report of an errand fails if its caller has given up.
pub fn report(segments: &[Segment]) -> Result<(), Error> {
    let parts = parts_of(segments);
    let mut state = WICKET.get().lock();
    let first = state.reports.take().map(|(first, _)| first);
    match (&state.deal, first) {
        (Deal::Working, None) => state.reports = Some((parts.clone(), parts)),
        (Deal::Working | Deal::Unwanted, Some(first)) => state.reports = Some((first, parts)),
        (Deal::Unwanted, None) => return Err(Error::Aborted("the caller has given up".into())),
        _ => return Err(Error::Invalid("nobody has asked for it: call vramctl_cache_wait first".into())),
    }
    Ok(())
}

/// For the serving thread: finishes the errand, with an error text if it failed. Called before the first errand, it announces that the
/// thread exists.
pub fn answer(problem: Option<&str>) {
    let wicket = WICKET.get();
    let mut state = wicket.lock();
    state.is_served = true;
    finish(&mut state, problem.map_or(Ok(()), |problem| Err(problem.to_owned())));
    drop(state);
    wicket.changed.notify_all();
}

fn finish(state: &mut Meeting, answer: Result<(), String>) {
    match state.deal {
        Deal::Working => state.deal = Deal::Answered(answer),
        Deal::Unwanted => state.deal = Deal::Free,
        Deal::Free | Deal::Asked(_) | Deal::Answered(_) => (),
    }
}

/// The allocator's memory. Waits at most `limit`.
pub fn ask(limit: Duration) -> Result<Vec<Cached>, Error> {
    request_errand(Errand::Report, limit).map(|(_, now)| now.into_values().collect())
}

/// Has the allocator return what it can. Waits at most `limit`; an errand that has begun continues after that.
pub fn trim(limit: Duration) -> Result<Trimmed, Error> {
    if gate::is_held() {
        let why = "the program is held, so its allocator might wait forever. Resume it first, or trim before the pause";
        return Err(Error::Invalid(why.into()));
    }
    let begun = Instant::now();
    let (before, now) = request_errand(Errand::Trim, limit)?;
    let mut all = now;
    for (of, before) in before {
        let now = all.entry(of).or_insert_with(|| Cached { gpu: before.gpu.clone(), tag: before.tag.clone(), ..Cached::default() });
        now.returned_bytes = in_all(&before).saturating_sub(in_all(now));
    }
    let cache: Vec<_> = all.into_values().collect();
    let returned_bytes = cache.iter().map(|part| part.returned_bytes).sum();
    events::publish(Event::Trimmed(returned_bytes, begun.elapsed()));
    let ms = begun.elapsed().as_secs_f64() * 1e3;
    log::info!("the program's allocator has returned {} in {ms:.0} ms", Bytes(returned_bytes));
    Ok(Trimmed { returned_bytes, cache, ms })
}

fn in_all(part: &Cached) -> u64 {
    part.live_bytes + part.cached_bytes + part.fragmented_bytes
}

fn request_errand(errand: Errand, limit: Duration) -> Result<(ByTag, ByTag), Error> {
    /// Small enough to add to an `Instant`.
    const LONGEST: Duration = Duration::from_secs(3600);
    if !is_served() {
        let why = "no allocator of this program returns cached memory: it has not used torch with CUDA yet, its Python does not find \
                   vramctl (start it with `vramctl run`), or it is another kind of program (vramctl_cache_wait in vramctl.h)";
        return Err(Error::Invalid(why.into()));
    }
    let (wicket, deadline) = (WICKET.get(), Instant::now() + limit.min(LONGEST));
    let late = |why: &str| {
        if exit::is_ending() { Error::Ending } else { Error::Late(format!("not within {} ms: {why}", limit.as_millis())) }
    };
    let mut state =
        wicket.until(deadline, |deal| matches!(deal, Deal::Free)).ok_or_else(|| late("its allocator is busy with an earlier request"))?;
    state.deal = Deal::Asked(errand);
    drop(state);
    wicket.changed.notify_all();
    if let Some(mut state) = wicket.until(deadline, |deal| matches!(deal, Deal::Answered(_))) {
        let (deal, reports) = (mem::take(&mut state.deal), state.reports.take());
        drop(state);
        wicket.changed.notify_all();
        return match (deal, reports) {
            (Deal::Answered(Err(problem)), _) => Err(Error::Invalid(format!("the program's allocator: {problem}"))),
            (_, reports) => Ok(reports.unwrap_or_default()),
        };
    }
    let mut state = wicket.lock();
    let has_begun = state.reports.is_some();
    // The thread may have answered just now, or may not have seen the errand yet.
    state.deal = if matches!(state.deal, Deal::Working) { Deal::Unwanted } else { Deal::Free };
    drop(state);
    wicket.changed.notify_all();
    Err(late(if has_begun {
        "it has begun and will finish later"
    } else {
        "it has not begun, and will not: the program's Python does not run other threads now, because one of them keeps the \
         interpreter lock, in a long call or while the program is held. Try again"
    }))
}

fn parts_of(segments: &[Segment]) -> ByTag {
    let (mut parts, mut uuids) = (ByTag::new(), BTreeMap::new());
    for Segment { address, bytes, live_bytes } in segments {
        let found = Memory::existing().and_then(|memory| memory.registry.find(*address));
        let gpu = found.as_ref().and_then(|found| uuids.entry(found.device).or_insert_with(|| driver::uuid(found.device)).clone());
        let tag = found.map(|found| Arc::clone(&found.tag));
        let part = parts.entry((gpu.clone(), tag.clone())).or_insert_with(|| Cached {
            gpu,
            tag: tag.map(|tag| tag.to_string()),
            ..Cached::default()
        });
        let live = (*live_bytes).min(*bytes);
        part.live_bytes += live;
        *(if live == 0 { &mut part.cached_bytes } else { &mut part.fragmented_bytes }) += bytes - live;
    }
    parts
}
