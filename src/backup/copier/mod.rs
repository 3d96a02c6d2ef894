//! Copying host memory to the device by its processors, for as long as the copy engines are slow.
//!
//! The driver cleans the memory that is given back to it with the copy engines: 96 GiB in 0.25 s, and longer beside copies. What
//! is resumed meanwhile shares them: 37 GB/s of a link of 55 (`docs/performance.md`). A kernel that reads the host's memory
//! over the same link is not held up, and reaches 50; when the engines are free it is the slower one. So both are measured,
//! by the device's clock, and the faster one goes on. Two processes of 84 GiB swapped in 691 ms, by the engines alone in 799
//! (their resumes in 337 and 457; medians of five on an H200).
//!
//! A kernel also waits for processors while the program's own kernels have them all, and the engines do not. So it is tried
//! only in contexts whose managed memory was nearly all paused when the resume began, where the program has nothing to run on
//! (unless `VRAMCTL_COPY=kernel` asks for it).
//!
//! Nobody needs it: where it cannot be had, or not yet, the engines copy.

use super::loading::{Availability, Kernels};
use super::settings;
use super::transfer::Part;
use std::ffi::{CStr, c_void};
use vramctl_config::CopyBy;
use vramctl_driver::{self as driver, CUdeviceptr, Context, Current, Lane, Parts, Resident, Stream, device_address};
use vramctl_host::PerProcess;
use vramctl_model::Failure;

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

/// Copies of fewer bytes are not worth a kernel of which the driver takes 80 ms to compile it, once for a context.
pub const WORTH_IT: usize = 4 << 30;

static COPIERS: PerProcess<Kernels<Resident>> = PerProcess::new(Kernels::default);

/// So many bytes are about to be copied from a context, and later back: loads the kernel if it may be wanted then. Beside the
/// copies, in a thread that nobody waits for, because the driver may wait for the program's work before it loads code; only
/// where the environment asks for the kernel does the pause wait.
pub fn get_ready(context: Context, bytes: usize) {
    let wait = match settings::copy_by() {
        CopyBy::Engines => return,
        CopyBy::Auto if bytes < settings::kernel_from() => return,
        CopyBy::Auto => false,
        CopyBy::Kernel => true,
    };
    let copiers = COPIERS.get();
    if copiers.knows(context) || !driver::has_to_spare(context) {
        return;
    }
    copiers.begin(context, load, |failure| log::debug!("{failure}: the copy engines copy alone"));
    if wait {
        drop(copiers.wait(Some(context)));
    }
}

/// Waits until no kernel is being loaded. For tests and measurements.
pub fn settle() {
    drop(COPIERS.get().wait(None));
}

/// The context is about to go, or gone, and its kernel with it.
pub fn forget_context(context: Context) {
    if let Some(copiers) = COPIERS.existing() {
        copiers.forget(context);
    }
}

fn load(current: &Current) -> Result<Resident, Failure> {
    /// It needs none; but its being there tells that the context is.
    const BUFFER: usize = VECTOR;
    // SAFETY: no bytes are read or written.
    Resident::new(current, PTX, c"vramctl_copy", BUFFER, |parts| unsafe { launch(parts, &parts.stream, 0, 0, 0) })
}

/// Queues a copy of host memory to a part of device memory by the kernel. `false`: it cannot be done so now, and nothing was
/// queued.
///
/// # Safety
/// As for [`Lane::queue`].
pub unsafe fn queue(lane: &mut Lane, part: &Part, host: *const u8) -> Result<bool, Failure> {
    let current = Current::push(part.context)?;
    // The driver's word that kernels reach the memory: what was registered in a context that is gone is registered no more,
    // and a kernel that reads it all the same would end the program's context.
    let Ok(from) = device_address(host) else { return Ok(false) };
    if !(from as usize | part.device as usize | part.bytes).is_multiple_of(VECTOR) {
        return Ok(false);
    }
    let mut copiers = COPIERS.get().lock();
    let copier = copiers.get_mut(&part.context).and_then(Availability::loaded);
    let Some(parts) = copier.and_then(|copier| copier.parts(&current)) else { return Ok(false) };
    // SAFETY: the caller's promise, and the driver's about `from`.
    match lane.queue_kernel(&current, |stream| unsafe { launch(parts, stream, from, part.device, part.bytes) }) {
        // The engines can do without the kernel, but nobody can in a context that failed work has spoilt.
        Err(failure) if !failure.is_of_earlier_work() => {
            log::debug!("{failure}: the copy engines copy instead");
            Ok(false)
        }
        queued => queued.map(|()| true),
    }
}

/// # Safety
/// The device reads and writes so many bytes at addresses of its own, both multiples of [`VECTOR`], until the stream is done.
unsafe fn launch(parts: &Parts, stream: &Stream, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) -> Result<(), Failure> {
    let vectors = (bytes / VECTOR) as u64;
    let arguments: [*const c_void; 3] = [(&raw const from).cast(), (&raw const to).cast(), (&raw const vectors).cast()];
    // SAFETY: the parameters in kernel.cu are two addresses and a number of 64 bits; the rest is the caller's promise.
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

/// Smaller copies say little of the speed, in bytes.
const TELLING: usize = 16 << 20;
/// Copies between the first trials; of 64 MiB each they take some 10 ms.
const INTERVAL: u32 = 8;
/// The most of them while the kernel is faster. A trial by slow engines loses 0.5 ms, to notice 32 copies late that they are
/// fast again 3 ms: both together least with about so many.
const LONG_INTERVAL: u32 = 4 * INTERVAL;

impl Choice {
    /// For copies into a context that begin now. `idle`: nothing runs there that could hold up a kernel.
    pub fn now(idle: bool) -> Self {
        Self::new(match settings::copy_by() {
            CopyBy::Auto if !idle => CopyBy::Engines,
            copy_by => copy_by,
        })
    }

    fn new(copy_by: CopyBy) -> Self {
        // The kernel first: whether another process has just released memory is not known, and the wrong guess costs 0.1 ms a
        // piece with it, 0.5 with slow engines. The second piece goes the other way.
        Self { copy_by, took: [None; 2], faster: By::Kernel, until_trial: 1, interval: INTERVAL }
    }

    /// Who copies the next so many bytes, and whether [`Choice::took`] wants to know how long that took.
    pub fn next(&mut self, bytes: usize) -> (By, bool) {
        match self.copy_by {
            CopyBy::Kernel => return (By::Kernel, false),
            CopyBy::Engines => return (By::Engines, false),
            // One by slow engines holds up those behind it.
            CopyBy::Auto if bytes < TELLING => return (if self.is_known() { self.faster } else { By::Engines }, false),
            CopyBy::Auto => (),
        }
        if self.until_trial > 0 {
            self.until_trial -= 1;
            return (self.faster, true);
        }
        self.until_trial = self.interval;
        (self.faster.other(), true)
    }

    /// Whether both have copied enough to tell.
    fn is_known(&self) -> bool {
        self.took.iter().all(Option::is_some)
    }

    /// The kernel was to copy and could not: it is tried again with one of the next copies.
    pub fn refused(&mut self) {
        self.until_trial = 1;
        self.faster = By::Engines;
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
            // The engines will be free soon; once they are, they stay so.
            let most = if faster == By::Kernel { LONG_INTERVAL } else { u32::MAX };
            self.interval = self.interval.saturating_mul(2).min(most);
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
        assert!(kernel <= 48, "{engines} by the engines, {kernel} by the kernel");
    }

    #[test]
    fn small_copies_go_by_what_large_ones_have_shown() {
        let mut choice = Choice::new(CopyBy::Auto);
        assert_eq!(choice.next(TELLING - 1), (By::Engines, false), "nothing is known");
        copy(&mut choice, 20, [1.8, 1.3]);
        assert_eq!(choice.next(TELLING - 1), (By::Kernel, false));
        copy(&mut choice, 60, [1.2, 1.3]);
        assert_eq!(choice.next(TELLING - 1), (By::Engines, false));
    }

    #[test]
    fn without_a_choice_nothing_is_measured() {
        for (copy_by, by) in [(CopyBy::Engines, By::Engines), (CopyBy::Kernel, By::Kernel)] {
            assert_eq!(Choice::new(copy_by).next(PIECE), (by, false));
        }
        assert_eq!(Choice::new(CopyBy::Auto).next(TELLING - 1), (By::Engines, false));
    }
}
