//! Copies host memory to the device with a kernel while the copy engines are slow.
//!
//! The driver uses the copy engines to zero memory that is returned to it: 96 GiB in 0.25 s, longer beside copies. A resume meanwhile
//! shares the engines and gets 37 GB/s of a 55 GB/s link. A kernel that reads host memory over the same link is not
//! affected and reaches 50 GB/s; when the engines are idle, it is the slower of the two. So the resume times both with the device's clock,
//! and continues with the faster one. Swapping two processes of 84 GiB took 691 ms, versus 799 with the engines alone (the resume: 337
//! versus 457; medians of five on an H200).
//!
//! Unlike the engines, a kernel also has to wait while the program's own kernels occupy every multiprocessor. So it is tried
//! only in contexts whose managed memory was nearly all paused when the resume began, where the program has nothing to run
//! on (unless a test forces it).
//!
//! The kernel is optional: until it is loaded, or if it cannot be, the engines copy.

use super::loading::{Availability, Kernels};
use super::quiet;
use super::settings::{self, CopyBy};
use std::ffi::{CStr, c_void};
use vramctl_driver::{self as driver, CUdeviceptr, Context, Current, Image, Lane, Parts, Resident, Stream, device_address};
use vramctl_host::PerProcess;
use vramctl_model::Failure;

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("a NUL in the kernel"),
};

/// Threads per block, as in the kernel.
const THREADS: u32 = 512;
/// Eight blocks keep the link busy, and more make no difference (8 to 132: 49.7 to 51.1 GB/s on an H200).
const BLOCKS: u32 = 16;
/// The kernel's unit of copying in bytes, and the required alignment.
const VECTOR: usize = 16;

/// Copying fewer bytes does not justify loading the kernel, which the driver takes 80 ms to compile, once per context.
const WORTH_IT: usize = 4 << 30;

static COPIERS: PerProcess<Kernels<Resident>> = PerProcess::new(Kernels::default);

/// Announces that `bytes` will be copied out of a context and later back, and loads the kernel in the background if it may pay off. Only if
/// the environment forces the kernel does the pause wait for it.
pub fn get_ready(context: Context, bytes: usize) {
    let wait = match settings::copy_by() {
        CopyBy::Engines => return,
        CopyBy::Auto if bytes < settings::kernel_from().unwrap_or(WORTH_IT) => return,
        CopyBy::Auto => false,
        CopyBy::Kernel => true,
    };
    let copiers = COPIERS.get();
    if copiers.knows(context) || !driver::has_to_spare(context) {
        return;
    }
    copiers.begin(context, PTX, load, |failure| log::debug!("{failure}: only the copy engines will copy"));
    if wait {
        drop(copiers.wait(quiet::PATIENCE));
    }
}

/// Waits until no kernel is being loaded. For tests and measurements.
pub fn settle() {
    COPIERS.get().settle();
}

/// Drops the kernel of a destroyed context.
pub fn forget_context(context: Context) {
    if let Some(copiers) = COPIERS.existing() {
        copiers.forget(context);
    }
}

fn load(current: &Current, image: &Image) -> Result<Resident, Failure> {
    /// The kernel needs no buffer; this one shows whether the context still exists.
    const BUFFER: usize = VECTOR;
    // SAFETY: no bytes are read or written.
    Resident::new(current, image, c"vramctl_copy", BUFFER, |parts| unsafe { launch(parts, &parts.stream, 0, 0, 0) })
}

/// Queues a kernel copy from host to device memory. `false` if that is not possible now; then nothing was queued.
///
/// # Safety
/// As for [`Lane::queue`].
pub unsafe fn queue(lane: &mut Lane, context: Context, device: CUdeviceptr, host: *const u8, bytes: usize) -> Result<bool, Failure> {
    let current = Current::push(context)?;
    // Ask the driver whether kernels can reach the memory: a registration ends with its context, and a kernel that read the
    // memory anyway would destroy the program's context.
    let Ok(from) = device_address(host) else { return Ok(false) };
    if !(from as usize | device as usize | bytes).is_multiple_of(VECTOR) {
        return Ok(false);
    }
    let mut copiers = COPIERS.get().lock();
    let copier = copiers.get_mut(&context).and_then(Availability::loaded);
    let Some(parts) = copier.and_then(|copier| copier.parts(&current)) else { return Ok(false) };
    // SAFETY: the caller's promise, and the driver's answer for `from`.
    match lane.queue_kernel(&current, |stream| unsafe { launch(parts, stream, from, device, bytes) }) {
        // The engines can take over unless failed work has corrupted the context.
        Err(failure) if !failure.is_of_earlier_work() => {
            log::debug!("{failure}: the copy engines copy instead");
            Ok(false)
        }
        queued => queued.map(|()| true),
    }
}

/// # Safety
/// The device may read and write `bytes` at these device addresses, all multiples of [`VECTOR`], until the stream is done.
unsafe fn launch(parts: &Parts, stream: &Stream, from: CUdeviceptr, to: CUdeviceptr, bytes: usize) -> Result<(), Failure> {
    let vectors = (bytes / VECTOR) as u64;
    let arguments: [*const c_void; 3] = [(&raw const from).cast(), (&raw const to).cast(), (&raw const vectors).cast()];
    // SAFETY: the kernel in kernel.cu takes two addresses and a 64-bit count; the rest is the caller's promise.
    unsafe { parts.kernel.launch(stream, BLOCKS, THREADS, arguments.map(<*const c_void>::cast_mut)) }
}

/// What copies.
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

/// Decides what copies next in a context: whichever was faster last, with occasional trials of the other.
#[derive(Debug)]
pub struct Choice {
    copy_by: CopyBy,
    /// Latest time per byte, in milliseconds, of the engines and the kernel.
    took: [Option<f64>; 2],
    /// The faster one, as far as known.
    faster: By,
    /// Copies left until the next trial.
    until_trial: u32,
    /// Copies between trials. Doubled after each trial that confirms the choice.
    interval: u32,
}

/// Smaller copies, in bytes, say little about speed.
const MEASURABLE: usize = 16 << 20;
/// Copies between the first trials; at 64 MiB each, about 10 ms.
const INTERVAL: u32 = 8;
/// Maximum interval while the kernel is faster. A trial of slow engines costs 0.5 ms; noticing 32 copies late that they are
/// fast again costs 3 ms. This interval roughly minimizes the sum.
const LONG_INTERVAL: u32 = 4 * INTERVAL;

impl Choice {
    /// For copies into a context that start now. `idle`: nothing runs there that could delay a kernel.
    pub fn now(idle: bool) -> Self {
        Self::new(match settings::copy_by() {
            CopyBy::Auto if !idle => CopyBy::Engines,
            copy_by => copy_by,
        })
    }

    fn new(copy_by: CopyBy) -> Self {
        // Start with the kernel: whether another process has just released memory is unknown, and a wrong guess costs 0.1 ms
        // per piece with the kernel but 0.5 with slow engines. The second piece tries the engines.
        Self { copy_by, took: [None; 2], faster: By::Kernel, until_trial: 1, interval: INTERVAL }
    }

    /// What copies the next `bytes`, and whether to report the duration to [`Choice::took`].
    pub fn next(&mut self, bytes: usize) -> (By, bool) {
        match self.copy_by {
            CopyBy::Kernel => return (By::Kernel, false),
            CopyBy::Engines => return (By::Engines, false),
            // A small copy by slow engines delays those queued behind it.
            CopyBy::Auto if bytes < MEASURABLE => return (if self.is_known() { self.faster } else { By::Engines }, false),
            CopyBy::Auto => (),
        }
        if self.until_trial > 0 {
            self.until_trial -= 1;
            return (self.faster, true);
        }
        self.until_trial = self.interval;
        (self.faster.other(), true)
    }

    /// Whether both have been measured.
    fn is_known(&self) -> bool {
        self.took.iter().all(Option::is_some)
    }

    /// The kernel could not copy. It is tried again soon.
    pub fn refused(&mut self) {
        self.until_trial = 1;
        self.faster = By::Engines;
    }

    /// Records how long a copy took.
    pub fn took(&mut self, by: By, bytes: usize, milliseconds: f32) {
        self.took[by as usize] = Some(f64::from(milliseconds) / bytes as f64);
        let [Some(engines), Some(kernel)] = self.took else { return };
        let faster = if kernel < engines { By::Kernel } else { By::Engines };
        if faster != self.faster {
            self.faster = faster;
            self.interval = INTERVAL;
            self.until_trial = INTERVAL;
        } else if by != faster {
            // The engines will be free soon, and then stay free.
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

    /// Copies `pieces` pieces one after another, at these speeds (milliseconds per piece for engines and kernel), with each
    /// result known once three more are in flight. Returns how many each copied.
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
    fn free_engines_are_noticed_soon() {
        let mut choice = Choice::new(CopyBy::Auto);
        copy(&mut choice, 60, [1.8, 1.3]);
        let [engines, kernel] = copy(&mut choice, 200, [1.2, 1.3]);
        assert!(kernel <= 48, "{engines} by the engines, {kernel} by the kernel");
    }

    #[test]
    fn small_copies_use_what_large_ones_have_shown() {
        let mut choice = Choice::new(CopyBy::Auto);
        assert_eq!(choice.next(MEASURABLE - 1), (By::Engines, false), "nothing is known");
        copy(&mut choice, 20, [1.8, 1.3]);
        assert_eq!(choice.next(MEASURABLE - 1), (By::Kernel, false));
        copy(&mut choice, 60, [1.2, 1.3]);
        assert_eq!(choice.next(MEASURABLE - 1), (By::Engines, false));
    }

    #[test]
    fn large_and_small_copies_are_compared_by_the_byte() {
        let mut choice = Choice::new(CopyBy::Auto);
        choice.took(By::Kernel, 2 * MEASURABLE, 2.0);
        choice.took(By::Engines, MEASURABLE, 1.5);
        assert_eq!(choice.next(MEASURABLE), (By::Kernel, true), "1.5 ms for half as much is slower");
        choice.took(By::Engines, 4 * MEASURABLE, 2.0);
        assert_eq!(choice.next(MEASURABLE), (By::Engines, true));
    }

    #[test]
    fn a_kernel_that_could_not_copy_is_tried_again_after_one_copy_by_the_engines() {
        let mut choice = Choice::new(CopyBy::Auto);
        choice.refused();
        assert_eq!([choice.next(MEASURABLE), choice.next(MEASURABLE)], [(By::Engines, true), (By::Kernel, true)]);
    }

    #[test]
    fn without_a_choice_nothing_is_measured() {
        for (copy_by, by) in [(CopyBy::Engines, By::Engines), (CopyBy::Kernel, By::Kernel)] {
            assert_eq!(Choice::new(copy_by).next(PIECE), (by, false));
        }
        assert_eq!(Choice::new(CopyBy::Auto).next(MEASURABLE - 1), (By::Engines, false));
    }
}
