//! What memory for `cudaMalloc` has beyond plain virtual memory. A driver may refuse what it reports as supported.
//!
//! Whether memory can be shared must be chosen when it is created, before anybody knows who will share it; it costs no time. A refused
//! request is tried once more, then without what not every driver grants. What a device has refused twice in a row and done without is left
//! out from then on.

use super::{CUdevice, attribute, gpu_in_words};
use cudarc::driver::sys::CUdevice_attribute;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use vramctl_host::{PerProcess, Unpoison};
use vramctl_model::Failure;

/// What a program must be able to do with managed memory, as it can with memory from the real `cudaMalloc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extras {
    /// Have it decompressed by the device's own engine (Blackwell).
    pub(super) decompression: bool,
    /// Register it with a network card (`GPUDirect` RDMA).
    pub(super) rdma: bool,
    /// Share it with other processes.
    pub(super) shareable: bool,
}

/// `CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK` (CUDA 12.8): 0 if the device has no such engine.
const DECOMPRESSION_ALGORITHMS: u32 = 136;

/// The extras that the drivers of these devices have accepted, after refusing more.
static ACCEPTED: PerProcess<Mutex<BTreeMap<CUdevice, Extras>>> = PerProcess::new(Mutex::default);

fn accepted() -> MutexGuard<'static, BTreeMap<CUdevice, Extras>> {
    ACCEPTED.get().lock().unpoisoned()
}

impl Extras {
    /// None of them.
    pub const NONE: Self = Self { decompression: false, rdma: false, shareable: false };

    /// Those of memory from a device's default pool: neither can a network card register it (<https://github.com/NVIDIA/cudf-spark/issues/3603>)
    /// nor another process open it. Without them, the driver maps it in less time.
    pub const OF_POOLS: Self = Self::NONE;

    /// Those of new memory on a device: what the driver supports and has not refused.
    pub fn of(device: CUdevice) -> Self {
        let known = accepted().get(&device).copied();
        known.unwrap_or_else(|| {
            use CUdevice_attribute as Asked;
            let is_reported = |asked: Asked| attribute(device, asked as u32) != 0;
            Self {
                decompression: attribute(device, DECOMPRESSION_ALGORITHMS) != 0,
                rdma: is_reported(Asked::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
                shareable: is_reported(Asked::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            }
        })
    }

    /// The most that is left without what these have most.
    fn fewer(self) -> Option<Self> {
        if self.decompression {
            return Some(Self { decompression: false, ..self });
        }
        if self.rdma { Some(Self { rdma: false, ..self }) } else { self.shareable.then_some(Self::NONE) }
    }

    /// What is not there, in words; empty if nothing.
    pub fn missing_from(self, wanted: Self) -> Vec<&'static str> {
        let decompression =
            (wanted.decompression && !self.decompression).then_some("the device's engine cannot decompress it (cuMemBatchDecompressAsync)");
        let rdma = (wanted.rdma && !self.rdma).then_some("network cards cannot register it (GPUDirect RDMA)");
        let shareable = (wanted.shareable && !self.shareable).then_some("other processes cannot open it (CUDA IPC)");
        decompression.into_iter().chain(rdma).chain(shareable).collect()
    }
}

/// Memory that was made, and what the driver has refused on the way.
#[derive(Debug)]
pub struct WithExtras<T> {
    /// The memory.
    pub memory: T,
    /// Its extras.
    pub extras: Extras,
    /// The last refusal of more extras.
    pub refused: Option<Failure>,
}

/// Makes memory with as many extras as the driver accepts. Each refusal is tried again, because drivers refuse now and then what they
/// accept a moment later (microsoft/WSL#41176). The error is the last refusal, or "out of memory".
pub fn make<T>(wanted: Extras, make: impl Fn(Extras) -> Result<T, Failure>) -> Result<WithExtras<T>, Failure> {
    let (mut extras, mut refused) = (wanted, None);
    loop {
        match make(extras).or_else(|failure| if failure.is_refusal() { make(extras) } else { Err(failure) }) {
            Ok(memory) => return Ok(WithExtras { memory, extras, refused }),
            Err(failure) if failure.is_refusal() => {
                extras = extras.fewer().ok_or(failure)?;
                refused = Some(failure);
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// Makes memory on a device, as `make` does. What the driver refuses for good, later memory goes without; a warning says so once.
pub fn make_on<T>(device: CUdevice, with: impl Fn(Extras) -> Result<T, Failure>) -> Result<T, Failure> {
    let wanted = Extras::of(device);
    let WithExtras { memory, extras, refused } = make(wanted, with)?;
    if let Some(failure) = refused
        && accepted().insert(device, extras) != Some(extras)
    {
        let missing = extras.missing_from(wanted).join("; ");
        log::warn!(
            "{}: the driver refuses some kinds of memory ({failure}), so managed memory goes without: {missing}",
            gpu_in_words(device)
        );
    }
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use vramctl_model::code;

    const ALL: Extras = Extras { decompression: false, rdma: true, shareable: true };

    fn refusal(code: u32) -> Failure {
        Failure { call: "cuMemSetAccess", code }
    }

    /// Which extras are tried, and the outcome.
    fn tried(answer: impl Fn(usize, Extras) -> Result<(), Failure>) -> (Vec<(bool, bool)>, Result<Extras, Failure>) {
        let tries = RefCell::new(Vec::new());
        let made = make(ALL, |extras| {
            tries.borrow_mut().push((extras.rdma, extras.shareable));
            answer(tries.borrow().len(), extras)
        });
        (tries.into_inner(), made.map(|made| made.extras))
    }

    #[test]
    fn extras_are_given_up_one_by_one_and_only_for_a_second_refusal() {
        let (full, shareable, none) = ((true, true), (false, true), (false, false));
        let unknown = refusal(code::UNKNOWN);
        assert_eq!(tried(|_, _| Ok(())), (vec![full], Ok(ALL)));
        assert_eq!(tried(|nth, _| if nth == 1 { Err(refusal(code::NOT_READY)) } else { Ok(()) }), (vec![full; 2], Ok(ALL)));
        let without_rdma = Extras { rdma: false, ..ALL };
        assert_eq!(tried(|_, extras| if extras.rdma { Err(unknown) } else { Ok(()) }), (vec![full, full, shareable], Ok(without_rdma)));
        assert_eq!(tried(|_, _| Err(unknown)), (vec![full, full, shareable, shareable, none, none], Err(unknown)));
    }

    #[test]
    fn decompression_is_given_up_first() {
        let wanted = Extras { decompression: true, ..ALL };
        let made = make(wanted, |extras| if extras.decompression { Err(refusal(code::INVALID_VALUE)) } else { Ok(()) }).unwrap();
        assert_eq!((made.extras, made.extras.missing_from(wanted).len()), (ALL, 1));
    }

    #[test]
    fn lack_of_memory_and_failed_work_are_no_refusals() {
        for code in [code::OUT_OF_MEMORY, code::ILLEGAL_ADDRESS] {
            assert_eq!(tried(|_, _| Err(refusal(code))), (vec![(true, true)], Err(refusal(code))));
        }
    }
}
