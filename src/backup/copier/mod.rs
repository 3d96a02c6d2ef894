//! Copying host memory to the device by its processors, for as long as the copy engines are slow.
//!
//! The driver cleans the memory that is given back to it with the copy engines, for half a second after 100 GiB. What is
//! resumed meanwhile shares them: 37 GB/s of a link of 55 (`docs/performance.md`). A kernel that reads the host's memory
//! over the same link is not held up, and reaches 50; when the engines are free it is the slower one. So both are measured,
//! by the device's clock, and the faster one goes on.
//!
//! A kernel also waits for processors while the program's own kernels have them all. So it is tried only soon after this
//! process has given memory back, which a pause does once the device's work is done.

use super::settings;
use super::transfer::Part;
use crate::config::CopyBy;
use crate::driver::{self, Context, Current, Failure, Lane, Parts, RelaxedCapture, Resident, Stream, code};
use crate::process::{self, PerProcess};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("a NUL in the kernel"),
};

/// Threads of a block; the kernel's.
const THREADS: u32 = 512;
/// Eight blocks keep the link busy, and more make no difference (8 to 132: 49.7 to 51.1 GB/s on an H200).
const BLOCKS: u32 = 16;
/// What the kernel copies at a time, in bytes; addresses are multiples of it.
const VECTOR: usize = 16;

/// The kernel of each context in which it was wanted.
type Copiers = BTreeMap<Context, Resident>;
static COPIERS: PerProcess<Mutex<Copiers>> = PerProcess::new(Mutex::default);

fn copiers() -> MutexGuard<'static, Copiers> {
    COPIERS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context is gone, and its kernel with it.
pub fn forget_context(context: Context) {
    if COPIERS.existing().is_some() {
        drop(copiers().remove(&context));
    }
}

/// Does some copying of so many bytes in these contexts, while the kernel is being loaded where it may be wanted.
///
/// To load it for the first time takes 80 ms, for the driver compiles it: worth it only for copies that take longer.
pub fn beside<R>(contexts: BTreeSet<Context>, bytes: usize, copy: impl FnOnce() -> R) -> R {
    const WORTH_IT: usize = 4 << 30;
    let load = move || contexts.into_iter().for_each(prepare);
    match copy_by_now() {
        CopyBy::Kernel => {
            load();
            copy()
        }
        CopyBy::Auto if bytes >= WORTH_IT => thread::scope(|scope| {
            // Without the thread, and until it is done, the engines copy alone.
            let _ = process::spawn_scoped(scope, "vramctl-kernel", load);
            copy()
        }),
        _ => copy(),
    }
}

/// Whether the kernel comes into question at all: at other times than soon after a release it does not.
fn copy_by_now() -> CopyBy {
    let released_lately = || driver::time_since_release().is_some_and(|time| time < CLEANING);
    match settings::copy_by() {
        CopyBy::Auto if !released_lately() => CopyBy::Engines,
        copy_by => copy_by,
    }
}

/// Loads the kernel into a context, if it is not there.
fn prepare(context: Context) {
    let _relaxed = RelaxedCapture::enter();
    let mut copiers = copiers();
    if copiers.contains_key(&context) {
        return;
    }
    match Current::push(context).and_then(|current| load(&current)) {
        Ok(copier) => drop(copiers.insert(context, copier)),
        Err(failure) => log::debug!("{failure}: the copy engines copy alone"),
    }
}

fn load(current: &Current) -> Result<Resident, Failure> {
    /// It needs none; but its being there tells that the context is.
    const BUFFER: usize = VECTOR;
    if !current.reaches_registered_memory() {
        return Err(Failure { call: "vramctl_copy", code: code::NOT_SUPPORTED });
    }
    Resident::new(current, PTX, c"vramctl_copy", BUFFER, |parts| launch(parts, &parts.stream, std::ptr::null(), 0, 0))
}

/// Queues a copy of host memory to a part of device memory by the kernel. `false`: it cannot be done so now, and nothing was
/// queued.
///
/// # Safety
/// As for [`Lane::queue`]; and the host memory is registered with the driver.
pub unsafe fn queue(lane: &mut Lane, part: &Part, host: *const u8) -> Result<bool, Failure> {
    if !(host as usize | part.device as usize | part.bytes).is_multiple_of(VECTOR) {
        return Ok(false);
    }
    // While it is being loaded, nobody waits for it.
    let Ok(copiers) = COPIERS.get().try_lock() else { return Ok(false) };
    let current = Current::push(part.context)?;
    let Some(parts) = copiers.get(&part.context).and_then(|copier| copier.parts(&current)) else { return Ok(false) };
    match lane.queue_kernel(&current, |stream| launch(parts, stream, host, part.device, part.bytes)) {
        // The engines can do without the kernel, but nobody can in a context that failed work has spoilt.
        Err(failure) if !failure.is_of_earlier_work() => {
            log::debug!("{failure}: the copy engines copy instead");
            Ok(false)
        }
        queued => queued.map(|()| true),
    }
}

fn launch(parts: &Parts, stream: &Stream, from: *const u8, to: driver::CUdeviceptr, bytes: usize) -> Result<(), Failure> {
    let (from, vectors) = (from as u64, (bytes / VECTOR) as u64);
    let arguments: [*const c_void; 3] = [(&raw const from).cast(), (&raw const to).cast(), (&raw const vectors).cast()];
    // SAFETY: the parameters in kernel.cu are two addresses and a number of 64 bits. That the memory stays is the promise of
    // the caller of `queue`.
    unsafe { parts.kernel.launch(stream, BLOCKS, THREADS, arguments.map(<*const c_void>::cast_mut)) }
}

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The copy engines.
    Engines,
    /// The kernel.
    Kernel,
}

impl By {
    fn other(self) -> Self {
        if self == Self::Engines { Self::Kernel } else { Self::Engines }
    }
}

/// Who is to copy next in a context: whoever was faster last, and now and then the other one, to see.
#[derive(Debug)]
pub struct Choice {
    copy_by: CopyBy,
    /// What a byte took last, in milliseconds, by the engines and by the kernel.
    took: [Option<f64>; 2],
    /// The faster one, as far as is known.
    faster: By,
    /// Copies until the other one is tried.
    until_trial: u32,
    /// How many there are to be in between. Doubled by every trial that shows nothing new.
    interval: u32,
}

/// Long enough for the driver to have cleaned all the memory of a large device (96 GiB: about half a second).
const CLEANING: Duration = Duration::from_secs(2);
/// Smaller copies say little of the speed, in bytes.
const TELLING: usize = 16 << 20;
/// Copies between the first trials; of 64 MiB each they take some 10 ms.
const INTERVAL: u32 = 8;

impl Choice {
    /// For copies that begin now.
    pub fn now() -> Self {
        Self::new(copy_by_now())
    }

    fn new(copy_by: CopyBy) -> Self {
        let faster = if copy_by == CopyBy::Kernel { By::Kernel } else { By::Engines };
        Self { copy_by, took: [None; 2], faster, until_trial: 1, interval: INTERVAL }
    }

    /// Who copies the next so many bytes, and whether [`Choice::took`] wants to know how long that took.
    pub fn next(&mut self, bytes: usize) -> (By, bool) {
        if self.copy_by != CopyBy::Auto || bytes < TELLING {
            return (self.faster, false);
        }
        if self.until_trial > 0 {
            self.until_trial -= 1;
            return (self.faster, true);
        }
        self.until_trial = self.interval;
        (self.faster.other(), true)
    }

    /// The kernel was to copy and could not: it is tried again with one of the next copies.
    pub fn refused(&mut self) {
        self.until_trial = 1;
        if self.copy_by == CopyBy::Auto {
            self.faster = By::Engines;
        }
    }

    /// How long so many bytes took.
    pub fn took(&mut self, by: By, bytes: usize, milliseconds: f32) {
        self.took[by as usize] = Some(f64::from(milliseconds) / bytes as f64);
        let [Some(engines), Some(kernel)] = self.took else { return };
        let faster = if kernel < engines { By::Kernel } else { By::Engines };
        if faster != self.faster {
            self.faster = faster;
            self.interval = INTERVAL;
            self.until_trial = INTERVAL;
        } else if by != faster {
            self.interval = self.interval.saturating_mul(2);
            self.until_trial = self.until_trial.max(self.interval);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 64 << 20;

    /// Copies so many pieces one after another, at these speeds in milliseconds a piece by the engines and by the kernel, of
    /// which a copy is known when three more are under way. Who copied how many.
    fn copy(choice: &mut Choice, pieces: usize, speeds: [f32; 2]) -> [usize; 2] {
        let (mut by_each, mut under_way) = ([0; 2], std::collections::VecDeque::new());
        for _ in 0..pieces {
            let (by, measured) = choice.next(PIECE);
            by_each[by as usize] += 1;
            assert!(measured);
            under_way.push_back(by);
            if under_way.len() > 3 {
                let by = under_way.pop_front().unwrap();
                choice.took(by, PIECE, speeds[by as usize]);
            }
        }
        by_each
    }

    #[test]
    fn engines_that_are_free_do_nearly_all_and_slow_ones_little() {
        let [engines, kernel] = copy(&mut Choice::new(CopyBy::Auto), 400, [1.2, 1.3]);
        assert!(kernel <= 8 && engines >= 392, "{engines} by the engines, {kernel} by the kernel");
        let [engines, kernel] = copy(&mut Choice::new(CopyBy::Auto), 400, [1.8, 1.3]);
        assert!(engines <= 16, "{engines} by the engines, {kernel} by the kernel");
    }

    #[test]
    fn it_notices_soon_when_the_engines_are_free_again() {
        let mut choice = Choice::new(CopyBy::Auto);
        copy(&mut choice, 60, [1.8, 1.3]);
        let [engines, kernel] = copy(&mut choice, 200, [1.2, 1.3]);
        assert!(kernel <= 80, "{engines} by the engines, {kernel} by the kernel");
    }

    #[test]
    fn without_a_choice_nothing_is_measured() {
        for (copy_by, by) in [(CopyBy::Engines, By::Engines), (CopyBy::Kernel, By::Kernel)] {
            assert_eq!(Choice::new(copy_by).next(PIECE), (by, false));
        }
        assert_eq!(Choice::new(CopyBy::Auto).next(TELLING - 1), (By::Engines, false));
    }
}
