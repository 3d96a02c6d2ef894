//! The report when device memory runs out: a page in the log and, with `VRAMCTL_REPORT_DIR`, a file.
//!
//! Until a request fails, this costs each allocation and each free one load. The failed call records what only its thread knows (`scene`);
//! a worker asks the other processes on the GPU (`others`) and writes the page (`page`) and the file (`files`). The call waits briefly for
//! the worker, so that the page is written even if the program now ends.
//!
//! **One page per episode.** If a thread requests the same size again within a second of the last failure, that is the same episode.
//! torch's allocator always does this: it empties its cache and tries once more. So its first failure is held back. If the second attempt
//! fails, the page describes the state then; if it succeeds, one line says so. All other failures are reported at once.
//!
//! Before torch frees anything, it waits for the GPU's work. That can take seconds, and so can the frees. So its first failure is held back
//! for five seconds, and longer while its thread keeps freeing memory, up to half a minute. In a program that shares its GPUs, the second attempt
//! waits until others have made room. Then the first failure was only a part of that wait, and no warning.
//!
//! **Rate limit.** Each requesting library gets three pages at once and then one every ten seconds. The rest is only counted. The lines
//! about successful retries have a limit of their own: near the limit of memory torch may retry all day, and the page of the failure that
//! ends the program must not be the one that is left out.

mod files;
mod others;
mod page;
mod scene;

use crate::allowance::Allowance;
use page::ReportPage;
use scene::Scene;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_config as config;
use vramctl_core::events::{self, FailedRequest};
use vramctl_host::{PerProcess, Unpoison, allocator, exit, stack, worker};
use vramctl_model::Bytes;

/// How long after a failure the same request counts as the same episode, in milliseconds.
static SAME_MS: AtomicU64 = AtomicU64::new(1000);

fn same() -> Duration {
    Duration::from_millis(SAME_MS.load(Ordering::Relaxed))
}

/// Sets how long after a failure the same request counts as the same episode. For tests, which may run on a slow machine.
pub fn set_same(time: Duration) {
    SAME_MS.store(time.as_millis() as u64, Ordering::Relaxed);
}

/// A failure that is certain to be tried again is held back this many times as long as others.
const CERTAIN: u32 = 5;

/// The longest that it is held back because the thread frees memory.
const LONGEST: Duration = Duration::from_secs(30);

/// The longest that a failed call waits for its page to be written.
const PATIENCE: Duration = Duration::from_millis(250);

/// The most open episodes: each has a worker. Those that are over do not count, as their workers end.
const MOST_OPEN: usize = 8;

static REPORTS: PerProcess<Reports> = PerProcess::new(Reports::default);

/// While an episode is open, the thread's retry is expected ([`events::expect_retry`]).
#[derive(Default)]
struct Reports {
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    open: Vec<Arc<Episode>>,
    /// The rate limits of each library, for pages and for lines.
    allowances: BTreeMap<(&'static str, Form), Allowance>,
    /// Failures since the last page that got no page.
    unreported: u64,
}

/// What the log gets of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    Page,
    /// That a retry has succeeded.
    Line,
}

/// A request that has failed.
struct Episode {
    thread: u32,
    library: &'static str,
    bytes: u64,
    is_resume: bool,
    is_tried_again: bool,
    course: Mutex<Course>,
    changed: Condvar,
    /// The episode is complete.
    is_due: AtomicBool,
    is_reported: AtomicBool,
}

struct Course {
    /// The state at the last failure, until the worker takes it.
    scene: Option<Scene>,
    attempts: u32,
    last_failed: Instant,
    /// What the thread has done since the last failure so that a retry may succeed.
    does: Does,
    /// A later attempt has succeeded.
    got_it: bool,
    /// It ends at once: it is complete, others need its place, or a test does not wait.
    is_over: bool,
}

enum Does {
    Nothing,
    /// It frees memory.
    Frees,
    /// It has freed memory, until then.
    FreedUntil(Instant),
    /// It waits for others to make room.
    Waits,
    /// It has waited for that, until then.
    WaitedUntil(Instant),
}

/// Reports that a request for device memory has failed.
pub(crate) fn failed(asked: FailedRequest) {
    if exit::is_ending() || !is_wanted() {
        return;
    }
    // A bug of the library must not become the program's.
    let _ = panic::catch_unwind(AssertUnwindSafe(|| take_up(asked)));
}

fn take_up(asked: FailedRequest) {
    let reports = REPORTS.get();
    let episode = {
        let mut books = reports.books();
        match books.same(stack::thread_id(), &asked) {
            Some(episode) => Some(episode),
            None if books.allow(&asked) => None,
            None => {
                books.unreported += 1;
                drop(books);
                return log::debug!("out of memory: {} asked for {}", asked.library, Bytes(asked.bytes));
            }
        }
    };
    match episode {
        Some(episode) => episode.again(|| Scene::now(asked)),
        None => reports.begin(Episode::new(Scene::now(asked))),
    }
}

/// A request of the calling thread has succeeded. `is_piece`: the memory may be one of several pieces for one larger request.
pub(crate) fn succeeded(bytes: u64, is_piece: bool) {
    let thread = stack::thread_id();
    let books = REPORTS.get().books();
    for episode in books.open.iter().filter(|episode| episode.thread == thread && episode.bytes <= bytes) {
        let mut course = episode.course();
        course.got_it = true;
        // The retry has got all that it wanted, so the same request's next failure is another episode.
        if episode.is_tried_again && !is_piece {
            course.is_over = true;
            episode.changed.notify_all();
        }
    }
}

/// The calling thread frees memory, which may have to wait for the GPU. Its retry may follow.
pub(crate) fn free_begun() {
    REPORTS.get().books().of_thread().inspect(|episode| episode.course().does.begin_to_free());
}

/// The calling thread has freed memory.
pub(crate) fn free_ended() {
    REPORTS.get().books().of_thread().inspect(|episode| episode.course().does.end_freeing());
}

/// The calling thread waits for others to make room, for as long as that takes. Its retry may follow.
pub(crate) fn wait_begun() {
    REPORTS.get().books().of_thread().inspect(|episode| episode.course().does = Does::Waits);
}

/// The calling thread has waited for room.
pub(crate) fn wait_ended() {
    REPORTS.get().books().of_thread().inspect(|episode| episode.course().does.end_waiting());
}

/// Ends the open episodes as if their time were over, and waits until all are reported. For tests.
pub fn settle() {
    while events::is_retry_expected() {
        let open = REPORTS.get().books().open.clone();
        for episode in open {
            episode.course().is_over = true;
            episode.changed.notify_all();
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether anybody would read it, and there is host memory to make it.
fn is_wanted() -> bool {
    /// More than a report needs.
    const NEEDED: usize = 4 << 20;
    (log::log_enabled!(log::Level::Warn) || config::report_directory().is_some()) && allocator::has_beside_reserve(NEEDED)
}

impl Reports {
    fn try_books(&self) -> Option<MutexGuard<'_, Books>> {
        match self.books.try_lock() {
            Ok(books) => Some(books),
            Err(TryLockError::Poisoned(books)) => Some(books.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unpoisoned()
    }

    fn begin(&'static self, episode: Episode) {
        let episode = Arc::new(episode);
        self.books().open.push(Arc::clone(&episode));
        events::expect_retry();
        let own = Arc::clone(&episode);
        if let Err(error) = worker::spawn("vramctl-report", move || {
            let _ = panic::catch_unwind(AssertUnwindSafe(|| own.follow()));
            self.close(&own);
        }) {
            log::warn!("out of memory, and no report: could not start a thread: {error}");
            return self.close(&episode);
        }
        report_at_exit();
        if episode.is_due.load(Ordering::Relaxed) {
            episode.wait_until_reported();
        }
    }

    fn close(&self, episode: &Arc<Episode>) {
        self.books().open.retain(|other| !Arc::ptr_eq(other, episode));
        events::retry_over();
    }
}

impl Books {
    /// The episode that this failure belongs to. A resume may be retried by another thread.
    fn same(&self, thread: u32, asked: &FailedRequest) -> Option<Arc<Episode>> {
        self.open
            .iter()
            .find(|episode: &&Arc<Episode>| {
                (episode.library, episode.bytes) == (asked.library, asked.bytes)
                    && (episode.is_resume || episode.thread == thread)
                    && !episode.course().is_over
            })
            .cloned()
    }

    /// The calling thread's last episode.
    fn of_thread(&self) -> Option<&Arc<Episode>> {
        let thread = stack::thread_id();
        self.open.iter().rfind(|episode| episode.thread == thread)
    }

    /// Allows to follow a failure, if the limits permit it. One that is tried again may not become a page, so it does not use up the limit yet.
    fn allow(&mut self, asked: &FailedRequest) -> bool {
        let going_on = self.open.iter().filter(|episode| !episode.course().is_over).count();
        (going_on < MOST_OPEN || self.make_way()) && (scene::is_tried_again(asked) || self.allow_report(asked.library, Form::Page))
    }

    /// Ends an episode whose retry has got a piece, if there is one. It would go on a little, in case the next piece is refused.
    fn make_way(&self) -> bool {
        self.open.iter().any(|episode| {
            let mut course = episode.course();
            let makes_way = course.got_it && !course.is_over;
            if makes_way {
                course.is_over = true;
                episode.changed.notify_all();
            }
            makes_way
        })
    }

    fn allow_report(&mut self, library: &'static str, form: Form) -> bool {
        let now = Instant::now();
        self.allowances.entry((library, form)).or_insert_with(|| Allowance::full(now)).take(now)
    }
}

impl Does {
    fn begin_to_free(&mut self) {
        if !self.has_waited() {
            *self = Self::Frees;
        }
    }

    fn end_waiting(&mut self) {
        if self.has_waited() {
            *self = Self::WaitedUntil(Instant::now());
        }
    }

    fn has_waited(&self) -> bool {
        matches!(self, Self::Waits | Self::WaitedUntil(_))
    }

    fn end_freeing(&mut self) {
        if matches!(self, Self::Frees | Self::FreedUntil(_)) {
            *self = Self::FreedUntil(Instant::now());
        }
    }
}

impl Course {
    /// How long the episode still goes on if nothing happens.
    fn left(&self, is_tried_again: bool, same: Duration) -> Duration {
        if self.is_over {
            return Duration::ZERO;
        }
        let since = self.last_failed.elapsed();
        let awaits_retry = is_tried_again && self.attempts == 1 && !self.got_it;
        if !awaits_retry {
            return same.saturating_sub(since);
        }
        let freeing = match self.does {
            Does::Nothing => Duration::ZERO,
            Does::Frees => LONGEST,
            Does::FreedUntil(then) => same.saturating_sub(then.elapsed()),
            Does::Waits => return LONGEST,
            Does::WaitedUntil(then) => return (same * CERTAIN).saturating_sub(then.elapsed()),
        };
        (same * CERTAIN).saturating_sub(since).max(freeing.min(LONGEST.saturating_sub(since)))
    }
}

impl Episode {
    fn new(scene: Scene) -> Self {
        let Scene { thread, asked: FailedRequest { bytes, library, .. }, .. } = scene;
        let is_resume = scene.asked.cause.is_resume();
        let is_tried_again = scene::is_tried_again(&scene.asked);
        let (is_due, is_reported) = (AtomicBool::new(!is_tried_again), AtomicBool::new(false));
        let (last_failed, does) = (Instant::now(), Does::Nothing);
        let course = Mutex::new(Course { scene: Some(scene), attempts: 1, last_failed, does, got_it: false, is_over: false });
        Self { thread, library, bytes, is_resume, is_tried_again, course, changed: Condvar::new(), is_due, is_reported }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unpoisoned()
    }

    /// The thread has tried again, in vain.
    fn again(&self, scene: impl FnOnce() -> Scene) {
        let wants_scene = self.course().scene.is_some();
        // Not under the lock: it asks the driver.
        let scene = wants_scene.then(scene);
        {
            let mut course = self.course();
            course.attempts += 1;
            course.last_failed = Instant::now();
            course.does = Does::Nothing;
            course.got_it = false;
            let (Some(first), Some(now)) = (&course.scene, scene) else { return };
            course.scene = Some(now.after(first));
            self.is_due.store(true, Ordering::Relaxed);
        }
        self.changed.notify_all();
        self.wait_until_reported();
    }

    fn wait_until_reported(&self) {
        let course = self.course();
        // A poisoned lock has its message already.
        let _ = self.changed.wait_timeout_while(course, PATIENCE, |_| !self.is_reported.load(Ordering::Relaxed));
    }

    /// The worker: reports the episode once its outcome is known.
    fn follow(&self) {
        let mut course = self.wait(|| self.is_due.load(Ordering::Relaxed));
        let (scene, attempts, got_it) = (course.scene.take(), course.attempts, course.got_it);
        let has_waited = course.does.has_waited();
        drop(course);
        match scene {
            Some(_) if got_it && has_waited => {
                log::info!("{} asked for {}, waited until other programs had made room, and got it", self.library, Bytes(self.bytes));
            }
            Some(mut scene) if got_it && self.allow_report(Form::Line) => {
                scene.ask_for_index()(&mut scene, same() / 10);
                log::warn!("{}; a later attempt succeeded, after other memory was freed", scene.headline());
            }
            Some(scene) if !got_it && (!self.is_tried_again || self.allow_report(Form::Page)) => report(scene, attempts),
            Some(_) if !got_it => {
                REPORTS.get().books().unreported += 1;
                log::debug!("out of memory: {} asked for {}", self.library, Bytes(self.bytes));
            }
            _ => (),
        }
        {
            let _course = self.course();
            self.is_reported.store(true, Ordering::Relaxed);
        }
        self.changed.notify_all();
        let got_it_late = !got_it && self.wait(|| false).got_it;
        if got_it_late && self.allow_report(Form::Line) {
            log::warn!("out of memory: thread {} got {} at a later attempt", self.thread, Bytes(self.bytes));
        }
    }

    fn allow_report(&self, form: Form) -> bool {
        REPORTS.get().books().allow_report(self.library, form)
    }

    /// Waits until that is so, or nothing has happened for a while.
    fn wait(&self, until: impl Fn() -> bool) -> MutexGuard<'_, Course> {
        let mut course = self.course();
        loop {
            let left = course.left(self.is_tried_again, same());
            if until() || left.is_zero() || exit::is_ending() {
                return course;
            }
            course = self.changed.wait_timeout(course, left).unpoisoned().0;
        }
    }
}

fn report(scene: Scene, attempts: u32) {
    let unreported = std::mem::take(&mut REPORTS.get().books().unreported);
    let page = ReportPage::of(scene, attempts, unreported);
    let written = files::write(&page);
    for line in page.to_string().lines() {
        log::warn!("{line}");
    }
    match written {
        Some(Ok(path)) => log::warn!("  The full report is in {}", path.display()),
        Some(Err(error)) => log::warn!("  Could not write it to VRAMCTL_REPORT_DIR: {error}"),
        None => (),
    }
}

/// Reports held-back episodes before the program exits. Registered after a worker was started, so that it runs before the library's own
/// exit handler, after which nothing is logged.
fn report_at_exit() {
    static REGISTERED: PerProcess<Once> = PerProcess::new(Once::new);
    REGISTERED.get().call_once(|| exit::at_exit(report_what_is_held_back));
}

/// The workers write, see [`exit::at_exit`].
fn report_what_is_held_back() {
    fn wait_until(deadline: Instant, mut is_so: impl FnMut() -> bool) {
        while !is_so() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
    let Some(reports) = REPORTS.existing() else { return };
    let deadline = Instant::now() + PATIENCE;
    // Never dropped: that could free memory. Twice the room, because some may be ending; the latest, if there are still more.
    let mut open: [Option<ManuallyDrop<Arc<Episode>>>; 2 * MOST_OPEN] = Default::default();
    wait_until(deadline, || {
        let Some(books) = reports.try_books() else { return false };
        let latest = books.open.iter().skip(books.open.len().saturating_sub(open.len()));
        open.iter_mut().zip(latest).for_each(|(place, episode)| *place = Some(ManuallyDrop::new(Arc::clone(episode))));
        true
    });
    for episode in open.into_iter().flatten() {
        episode.is_due.store(true, Ordering::Relaxed);
        wait_until(deadline, || {
            // Repeatedly: without the lock, the worker may miss a notification.
            episode.changed.notify_all();
            episode.is_reported.load(Ordering::Relaxed)
        });
    }
    let unreported = reports.try_books().map_or(0, |books| books.unreported);
    if unreported > 0 {
        log::warn!("out of memory: more requests that have failed since the last report: {unreported}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_core::events::Cause;

    #[test]
    fn an_episode_goes_on_while_its_thread_frees_memory_but_not_for_ever() {
        const SAME: Duration = Duration::from_secs(1);
        let left = |failed_before: u64, attempts, does, got_it, is_tried_again| {
            let last_failed = Instant::now().checked_sub(Duration::from_secs(failed_before)).unwrap();
            let course = Course { scene: None, attempts, last_failed, does, got_it, is_over: false };
            course.left(is_tried_again, SAME).as_secs_f64().ceil()
        };
        let until_now = || Does::FreedUntil(Instant::now());
        assert_eq!((left(2, 1, Does::Nothing, false, false), left(2, 1, until_now(), false, false)), (0.0, 0.0));
        assert_eq!((left(2, 1, Does::Nothing, false, true), left(6, 1, Does::Nothing, false, true)), (3.0, 0.0), "the certain retry");
        assert_eq!((left(6, 1, until_now(), false, true), left(6, 1, Does::Frees, false, true)), (1.0, 24.0));
        assert_eq!((left(31, 1, until_now(), false, true), left(31, 1, Does::Frees, false, true)), (0.0, 0.0));
        assert_eq!((left(2, 2, until_now(), false, true), left(2, 1, until_now(), true, true)), (0.0, 0.0), "it has been tried again");
        assert_eq!((left(99, 1, Does::Waits, false, true), left(99, 1, Does::WaitedUntil(Instant::now()), false, true)), (30.0, 5.0));
    }

    /// The worker of a retry that has succeeded may be slow to end, and the next failure comes at once.
    #[test]
    fn an_episode_that_is_over_takes_up_no_room() {
        let asked =
            || FailedRequest { bytes: 1 << 30, device: None, tag: None, library: "libc10_cuda.so", caller: 0, cause: Cause::Refused(None) };
        let episodes = |is_over| {
            (0..MOST_OPEN).map(move |_| {
                let episode = Episode::new(Scene::now(asked()));
                episode.course().is_over = is_over;
                Arc::new(episode)
            })
        };
        let mut books = Books { open: episodes(true).collect(), ..Books::default() };
        assert!(books.allow(&asked()), "all have ended");
        books.open.extend(episodes(false));
        assert!(!books.allow(&asked()), "as many as may be open");
    }

    /// The worker of a page that waits for a second attempt has the lock whenever it looks whether the time is over.
    #[test]
    fn a_page_is_reported_at_exit_although_its_worker_has_the_lock() {
        set_same(Duration::from_secs(600));
        let asked =
            FailedRequest { bytes: 1 << 30, device: None, tag: None, library: "libc10_cuda.so", caller: 0, cause: Cause::Refused(None) };
        REPORTS.get().begin(Episode::new(Scene::now(asked)));
        let episode = Arc::clone(&REPORTS.get().books().open[0]);
        let course = episode.course();
        let exit = thread::spawn(report_what_is_held_back);
        thread::sleep(Duration::from_millis(30));
        drop(course);
        exit.join().unwrap();
        // On a slow machine, the exit may not have waited long enough.
        let begun = Instant::now();
        while !episode.is_reported.load(Ordering::Relaxed) {
            assert!(begun.elapsed() < Duration::from_secs(100));
            episode.changed.notify_all();
            thread::sleep(Duration::from_millis(1));
        }
    }
}
