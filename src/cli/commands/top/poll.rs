//! Polls the processes and NVML, each in its own thread, so that one that does not answer delays nobody.

use super::model::{Gpus, Sample, is_under_way};
use crate::ledger;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use vramctl_control::client::Client;
use vramctl_control::discovery::Directory;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::parallel;
use vramctl_coordinator::processes::{Process, silent};
use vramctl_driver::{cards, climate, holders_of, keep_nvml};
use vramctl_host::{Unpoison, limits};

/// What they answer.
pub enum News {
    Process(Box<Sample>),
    Gone(u32),
    Gpus(Gpus),
    /// What the scheduler of programs that share GPUs says: who waits and why, who is away, and the last change; `None`: there is none.
    Sharing(Option<Vec<String>>),
    /// Discovery has found this many processes; each will answer or not.
    Found(usize),
    /// Why none can be found.
    Trouble(String),
}

/// The shortest time between searches for new processes: a search connects to all.
const FIND_EVERY: Duration = Duration::from_secs(2);
/// The interval during a copy, to show its progress.
const WHILE_UNDER_WAY: Duration = Duration::from_millis(250);
/// The interval for a silent process: each attempt occupies its queue.
const WHILE_SILENT: Duration = Duration::from_secs(5);

/// The polling interval, which may be changed.
#[derive(Clone)]
pub struct Interval(Arc<AtomicU64>);

impl Interval {
    pub fn new(interval: Duration) -> Self {
        Self(Arc::new(AtomicU64::new(interval.as_millis() as u64)))
    }

    pub fn set(&self, interval: Duration) {
        self.0.store(interval.as_millis() as u64, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    /// Waits for the interval, and reacts if it is shortened meanwhile.
    fn wait(&self, most: Duration) {
        const STEP: Duration = Duration::from_millis(100);
        let mut waited = Duration::ZERO;
        while waited < self.get().min(most) {
            let step = STEP.min(self.get().min(most).saturating_sub(waited));
            thread::sleep(step);
            waited += step;
        }
    }
}

/// Receives the results. Polling ends when nobody listens any more.
pub trait Listener: Clone + Send + 'static {
    fn send_news(&self, news: News) -> bool;
}

/// Starts asking.
pub fn start<L: Listener>(listener: &L, interval: &Interval) {
    let (one, pace) = (listener.clone(), interval.clone());
    spawn(listener, move || ask_nvml(&one, &pace));
    let (one, pace) = (listener.clone(), interval.clone());
    spawn(listener, move || ask_scheduler(&one, &pace));
    let (one, pace) = (listener.clone(), interval.clone());
    spawn(listener, move || find(&one, &pace));
}

/// Returns whether there is a thread for it. Otherwise, this part of the display is not updated, and the display says so.
fn spawn(listener: &impl Listener, work: impl FnOnce() + Send + 'static) -> bool {
    let started = parallel::spawn(work);
    started.inspect_err(|error| _ = listener.send_news(News::Trouble(error.to_string()))).is_ok()
}

fn ask_nvml(listener: &impl Listener, interval: &Interval) {
    keep_nvml([]);
    loop {
        let cards = cards();
        let climates = cards.iter().flatten().map(|card| (card.uuid.clone(), climate(&card.uuid))).collect();
        let cards = cards.map(|cards| cards.into_iter().map(|card| (card.clone(), holders_of(&card.uuid))).collect());
        if !listener.send_news(News::Gpus(Gpus { cards, climates, available: limits::available_bytes() })) {
            return;
        }
        interval.wait(Duration::MAX);
    }
}

fn ask_scheduler(listener: &impl Listener, interval: &Interval) {
    loop {
        let news = match vramctl_keeper::ask() {
            Ok(view) => view.map(|view| view.news()),
            Err(error) => Some(vec![format!("the scheduler does not answer: {error}")]),
        };
        if !listener.send_news(News::Sharing(news)) {
            return;
        }
        interval.wait(Duration::MAX);
    }
}

/// Finds processes, and starts polling each.
fn find<L: Listener>(listener: &L, interval: &Interval) {
    let watched = Arc::new(Mutex::new(BTreeSet::new()));
    loop {
        let found = Directory::open().and_then(|directory| directory.map_or_else(|| Ok(Vec::new()), |directory| directory.processes()));
        let news = match found {
            Ok(pids) => {
                for &pid in &pids {
                    if watched.lock().unpoisoned().insert(pid) {
                        let (its, interval, its_watched) = (listener.clone(), interval.clone(), Arc::clone(&watched));
                        let is_started = spawn(listener, move || {
                            watch(pid, &its, &interval);
                            its_watched.lock().unpoisoned().remove(&pid);
                        });
                        if !is_started {
                            watched.lock().unpoisoned().remove(&pid);
                        }
                    }
                }
                News::Found(pids.len())
            }
            Err(error) => News::Trouble(format!("the directory of the control sockets cannot be used: {error}")),
        };
        if !listener.send_news(news) {
            return;
        }
        thread::sleep(FIND_EVERY);
    }
}

/// Polls a process until it has ended.
fn watch(pid: u32, listener: &impl Listener, interval: &Interval) {
    let mut connection = None;
    loop {
        let Ok(Some(directory)) = Directory::open() else {
            listener.send_news(News::Gone(pid));
            return;
        };
        let answer = match connection.take().map_or_else(|| Client::connect(&directory, pid), Ok) {
            Ok(mut client) => client.status().inspect(|_| connection = Some(client)),
            Err(error) => Err(error),
        };
        let process = match answer {
            Ok(status) => Process { pid, name: Some(status.process.name.clone()), status: Ok(status) },
            Err(error) => {
                let Some(process) = silent(&directory, pid, Err(CommandError::from(error))) else {
                    listener.send_news(News::Gone(pid));
                    return;
                };
                process
            }
        };
        let pause = match &process.status {
            Ok(_) if is_under_way(&process) => WHILE_UNDER_WAY,
            Ok(_) => Duration::MAX,
            // A busy process just had too many clients.
            Err(failure) if failure.exit() != Exit::Busy => Duration::MAX,
            Err(_) => WHILE_SILENT,
        };
        let sample = Sample { resident: ledger::resident(pid).0, room: limits::limit_of(pid), process };
        if !listener.send_news(News::Process(Box::new(sample))) {
            return;
        }
        if pause == WHILE_SILENT { thread::sleep(pause) } else { interval.wait(pause) }
    }
}
