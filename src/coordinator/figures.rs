//! NVML's figures for processes that have just been paused. They do not ask NVML themselves after a pause, so the command sends them.
//!
//! NVML takes a while, and may never answer: one GPU of the machine in trouble is enough. So a thread of its own asks, and nothing else waits long.

use crate::Reporter;
use crate::parallel;
use crate::patience::FIGURES_WITHIN;
use crate::processes::{Found, Process};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use vramctl_driver as driver;

/// The thread that asks.
pub(crate) struct Figures {
    paused: mpsc::Sender<Vec<Process>>,
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

impl Figures {
    /// Has NVML meet the GPUs of these processes, while they are being paused.
    pub fn prepare<'a>(found: &Found, processes: impl Iterator<Item = &'a Process>) -> Self {
        let ((paused, told), (ends, ended)) = (mpsc::channel::<Vec<Process>>(), mpsc::channel());
        let gpus: BTreeSet<_> = processes.flat_map(Process::gpus).map(str::to_owned).collect();
        let found = found.clone();
        let ask = move || {
            let _ends: mpsc::Sender<()> = ends;
            driver::keep_nvml(gpus.iter().map(String::as_str));
            if let Ok(paused) = told.recv() {
                send(&found, &paused);
            }
        };
        // Without a thread, nobody asks: `ended` is disconnected.
        let _ = parallel::spawn(ask);
        Self { paused, ended }
    }

    /// Sends these, which have been paused, their figures. If there are none, this only waits for NVML, in which the command must not be when it
    /// exits.
    pub fn send<'a>(self, paused: impl Iterator<Item = &'a Process>, reporter: &dyn Reporter) {
        let _ = self.paused.send(paused.cloned().collect());
        if self.ended.recv_timeout(FIGURES_WITHIN) == Err(mpsc::RecvTimeoutError::Timeout) {
            let within = FIGURES_WITHIN.as_secs();
            reporter.warn(&format!("NVML has not answered within {within} s, so the status lacks its figures. Does `nvidia-smi` answer?"));
        }
    }
}

fn send(found: &Found, paused: &[Process]) {
    let mut holders = BTreeMap::new();
    for process in paused {
        let own = |uuid: &str| {
            let holders = holders.entry(uuid.to_owned()).or_insert_with(|| driver::holders_of(uuid));
            let bytes = holders.iter().find(|holder| holder.pid == process.pid)?.bytes?;
            Some((uuid.to_owned(), bytes))
        };
        let gpus: BTreeMap<_, _> = process.gpus().filter_map(own).collect();
        if gpus.is_empty() {
            continue;
        }
        // Errors do not matter: the process has ended.
        let _ = found.connect(process.pid).and_then(|mut client| client.counted(gpus));
    }
}
