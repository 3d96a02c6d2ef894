//! Copies that the driver refuses because of how the library keeps memory.
//!
//! **Managed memory is virtual memory.**
//! In CUDA, a copy finds its way to memory of `cuMemAlloc` whichever context is current. Virtual memory must be open to the current context's
//! device, and for batches to the stream's; otherwise the call answers "invalid value", queues nothing and leaves a capture valid (observed
//! with driver 580 on two H100). Managed memory is open to its own device and to peers. So a refused call is made again:
//!
//! - as a copy that names a context for each side (`cuMemcpy3DPeerAsync`), in the same stream. It keeps the order, needs no access and no
//!   path between the devices, and is as fast as the copy of plain memory (37 GB/s between two devices, 55 from a device to the host);
//! - if a capture would be invalidated by that, and all memory is of one device: with its context current, in the same stream;
//! - if there is no such form (batches of volumes, arrays and graph nodes, captured copies between devices) by opening all memory of the
//!   device, as enabled peer access does, and repeating the call. This needs a path between the devices. Opening all memory at its allocation
//!   instead would cost every program with several devices 40 µs an allocation, and would not help where there is no path.
//!
//! **Backups are registered with the driver piece by piece**, and a program may read them (`tms_get_cpu_backup_pointer`). The driver refuses a copy
//! that leaves a registration in which it begins (observed with driver 580). Such a copy is made again in parts, one for each piece.
//!
//! Nothing is looked up before a call, so a call that is accepted costs one comparison. Memsets and stream memory operations are not here:
//! CUDA refuses them for plain memory, too, and so it does copies of memory from pools and of the program's own virtual memory.

use crate::copies;
use std::collections::BTreeSet;
use std::ptr;
use vramctl_backup as backup;
use vramctl_core::contexts;
use vramctl_core::gate::{self, Gated};
use vramctl_core::memory::{Memory, borrow, note_crossing};
use vramctl_driver::{CUdevice, CUdeviceptr, Context, CopyBetween, CopySide, Current, NodeParameters, Plane, RelaxedCapture, StreamHandle};
use vramctl_host::{exit, guarded};
use vramctl_model::{Failure, StatusCode, code};

/// Makes a refused call again in another form, if managed memory may be the reason. Returns the driver's answer.
///
/// # Safety
/// `arguments` are those of the driver's function `symbol`. Their pointers to structures and arrays are null, or readable by the program's
/// promise.
pub unsafe fn again(symbol: &str, gated: &'static Gated, arguments: &[usize], repeat: &dyn Fn() -> StatusCode) -> StatusCode {
    // SAFETY: the caller's promise.
    let answer = guarded(|| unsafe { try_again(symbol, gated, arguments, repeat) });
    answer.flatten().unwrap_or(code::INVALID_VALUE)
}

unsafe fn try_again(symbol: &str, gated: &'static Gated, arguments: &[usize], repeat: &dyn Fn() -> StatusCode) -> Option<StatusCode> {
    let memory = Memory::existing().filter(|_| copies::activate() && !exit::is_ending())?;
    // SAFETY: the caller's promise.
    let call = unsafe { CopyCall::of(symbol, arguments)? };
    // The program may have been held since the driver's answer. Inside, what is seen of the memory holds until the copy is queued.
    // SAFETY: the program's copies.
    match gate::pass(gated, || unsafe { call.make(memory, repeat) }) {
        Ok(Again::Answered(answer)) => Some(answer),
        Ok(Again::Closed(owners)) => {
            open(memory, &owners);
            // Another thread may have opened it since the driver's answer.
            Some(repeat())
        }
        Ok(Again::Refused) => None,
        // The memory ends with its context.
        Err(failure) if failure.is_of_gone_context() || failure.is_of_ending_context() => None,
        Err(failure) => Some(failure.code),
    }
}

/// What has become of a refused call.
enum Again {
    /// The driver's answer to it in another form.
    Answered(StatusCode),
    /// There is no other form. The memory of these devices may be closed to others.
    Closed(BTreeSet<CUdevice>),
    /// The library is not the reason.
    Refused,
}

/// Opens memory of these devices to the process's other devices.
fn open(memory: &Memory, owners: &BTreeSet<CUdevice>) {
    let _relaxed = RelaxedCapture::enter();
    if let Err(error) = memory.open_to_copies(owners) {
        log::warn!("cannot open managed memory for a copy of another device: {error}");
    }
}

/// What virtual memory in place of CUDA's own belongs to.
struct Home {
    /// A context of the device, for copies.
    context: Context,
    device: CUdevice,
    is_paused: bool,
    /// Whether it is managed here, not another process's.
    is_ours: bool,
}

impl Home {
    /// `None` for memory that CUDA would not copy from everywhere, and for what is not the library's.
    fn of(memory: &Memory, address: CUdeviceptr) -> Option<Self> {
        if let Some(found) = memory.registry.find(address) {
            let (context, device, is_paused) = (found.context_for_copies(), found.device, found.is_unmapped());
            return found.origin().malloc().is_some_and(|malloc| !malloc.from_pool).then_some(Self {
                context,
                device,
                is_paused,
                is_ours: true,
            });
        }
        let opened = borrow::at(address)?;
        let context = contexts::for_copies(opened.device, opened.context?);
        Some(Self { context, device: opened.device, is_paused: opened.is_paused, is_ours: false })
    }
}

/// A call for copies.
struct CopyCall {
    /// The addresses, of whichever memory.
    addresses: Vec<CUdeviceptr>,
    /// The copies, if contexts can be named for them.
    copies: Vec<CopyBetween>,
    stream: StreamHandle,
    /// Whether the call returns only when a copy from or to the host is over.
    waits: bool,
}

impl CopyCall {
    /// `None` for other functions.
    ///
    /// # Safety
    /// As for [`again`].
    unsafe fn of(symbol: &str, arguments: &[usize]) -> Option<Self> {
        let of_thread = symbol.strip_suffix("_ptsz").or_else(|| symbol.strip_suffix("_ptds"));
        let argument = |index: usize| arguments.get(index).copied().unwrap_or(0);
        let address = |index| argument(index) as u64;
        let any = |index| CopySide::of_any(address(index));
        let device = |index| CopySide::of_device(address(index));
        let host = |index| CopySide::of_host(address(index));
        // SAFETY: the caller's promise.
        let plane = || unsafe { structure::<Plane>(argument(0)) }.map(CopyBetween::from);
        // SAFETY: as above.
        let volume = || unsafe { structure::<CopyBetween>(argument(0)) };
        let linear = |to, from, bytes| CopyBetween::linear(to, from, argument(bytes));
        // Those before `_v2` take 32-bit addresses.
        let (copy, stream) = match of_thread.unwrap_or(symbol) {
            "cuMemcpy" => (linear(any(0), any(1), 2), None),
            "cuMemcpyDtoD_v2" => (linear(device(0), device(1), 2), None),
            "cuMemcpyHtoD_v2" => (linear(device(0), host(1), 2), None),
            "cuMemcpyDtoH_v2" => (linear(host(0), device(1), 2), None),
            "cuMemcpyAsync" => (linear(any(0), any(1), 2), Some(3)),
            "cuMemcpyDtoDAsync_v2" => (linear(device(0), device(1), 2), Some(3)),
            "cuMemcpyHtoDAsync_v2" => (linear(device(0), host(1), 2), Some(3)),
            "cuMemcpyDtoHAsync_v2" => (linear(host(0), device(1), 2), Some(3)),
            // A context that is not the memory's does not matter to plain memory.
            "cuMemcpyPeer" => (linear(device(0), device(2), 4), None),
            "cuMemcpyPeerAsync" => (linear(device(0), device(2), 4), Some(5)),
            "cuMemcpy2D_v2" | "cuMemcpy2DUnaligned_v2" => (plane()?, None),
            "cuMemcpy2DAsync_v2" => (plane()?, Some(1)),
            "cuMemcpy3D_v2" | "cuMemcpy3DPeer" => (volume()?, None),
            "cuMemcpy3DAsync_v2" | "cuMemcpy3DPeerAsync" => (volume()?, Some(1)),
            // SAFETY: the caller's promise.
            "cuMemcpyBatchAsync" => return unsafe { Self::batch(arguments, argument(8), of_thread.is_some()) },
            // SAFETY: as above.
            "cuMemcpyBatchAsync_v2" => return unsafe { Self::batch(arguments, argument(7), of_thread.is_some()) },
            // SAFETY: as above.
            other => return unsafe { Self::without_contexts(other, arguments) },
        };
        let stream_handle = StreamHandle::of_argument(stream.map_or(0, argument));
        Some(Self {
            addresses: copy.addresses().collect(),
            copies: if copy.from.is_array() || copy.to.is_array() { Vec::new() } else { vec![copy] },
            stream: if of_thread.is_some() { stream_handle.of_per_thread_program() } else { stream_handle },
            waits: stream.is_none(),
        })
    }

    /// Makes the call in another form. `repeat` makes it as the program has.
    ///
    /// # Safety
    /// As for the driver's copies.
    unsafe fn make(&self, memory: &Memory, repeat: &dyn Fn() -> StatusCode) -> Result<Again, Failure> {
        let touched: Vec<_> = self.addresses.iter().filter_map(|address| Home::of(memory, *address)).collect();
        let named: Vec<_> = self.copies.iter().flat_map(|copy| copy.within(&backup::piece_end)).collect();
        let leaves_a_piece = named.len() > self.copies.len();
        // The program has paused it itself: otherwise, no call is inside.
        let is_paused = touched.iter().any(|home| home.is_paused);
        if (touched.is_empty() && !leaves_a_piece) || is_paused {
            return Ok(Again::Refused);
        }
        if !self.copies.is_empty() && !self.stream.is_capturing() {
            let Some(current) = Current::of_thread()? else { return Ok(Again::Refused) };
            if !leaves_a_piece && !self.is_away_from(&touched, current.context()) {
                return Ok(Again::Refused);
            }
            note_crossing();
            // SAFETY: the caller's promise.
            return unsafe { self.start(memory, named, current.context(), leaves_a_piece) };
        }
        // In a capture, which keeps the memory's context with the copy. Default streams are others in another context.
        if let [home, others @ ..] = &touched[..]
            && others.iter().all(|other| other.device == home.device)
            && !self.copies.is_empty()
            && !self.stream.is_default()
            && let Ok(_there) = Current::push(home.context)
            && let answer = repeat()
            && answer != code::INVALID_VALUE
        {
            return Ok(Again::Answered(answer));
        }
        Ok(Again::Closed(touched.iter().filter(|home| home.is_ours).map(|home| home.device).collect()))
    }

    /// Whether the memory may be closed to the context in which the copy is made. Otherwise, the driver has refused it for another reason.
    fn is_away_from(&self, touched: &[Home], current: Context) -> bool {
        let is_away_from = |context| touched.iter().any(|home| home.context != context);
        // Without an answer, the copy itself shows it.
        let of_stream = || Current::push_of_stream(self.stream).map_or(true, |current| is_away_from(current.owner()));
        is_away_from(current) || (!self.stream.is_default() && of_stream())
    }

    /// A batch, as single copies. What it has copied before it was refused is copied again. `None` in the legacy stream, which CUDA refuses.
    ///
    /// # Safety
    /// As for [`again`].
    unsafe fn batch(arguments: &[usize], stream: usize, is_of_thread: bool) -> Option<Self> {
        /// `CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL`, in the first field of `CUmemcpyAttributes`, which are three words long.
        const DURING_THE_CALL: u64 = 2;
        let stream = StreamHandle::of_argument(stream);
        let stream = if is_of_thread { stream.of_per_thread_program() } else { stream };
        if stream.is_legacy() {
            return None;
        }
        let &[to, from, bytes, count, attributes, _, kinds, ..] = arguments else { return None };
        // The driver refuses these before it reads the arrays.
        if [to, from, bytes].contains(&0) || kinds > count {
            return None;
        }
        // SAFETY: the caller's promise.
        let (to, from, bytes, attributes) =
            unsafe { (words(to, count), words(from, count), words(bytes, count), words(attributes, 3 * kinds)) };
        let both = to.iter().zip(&from).zip(&bytes);
        Some(Self {
            copies: both
                .map(|((to, from), bytes)| CopyBetween::linear(CopySide::of_any(*to), CopySide::of_any(*from), *bytes as usize))
                .collect(),
            addresses: [to, from].concat(),
            stream,
            waits: attributes.chunks(3).any(|one| one[0] & u64::from(u32::MAX) == DURING_THE_CALL),
        })
    }

    /// # Safety
    /// As for [`again`].
    unsafe fn without_contexts(name: &str, arguments: &[usize]) -> Option<Self> {
        /// `CUDA_MEMCPY3D_BATCH_OP` in words: each side's type and address, four more words of each, and six of the shape.
        type BatchOperation = [u64; 14];
        let argument = |index: usize| arguments.get(index).copied().unwrap_or(0);
        // SAFETY: the caller's promise, here and below.
        let words = |index, count| unsafe { words(argument(index), count) };
        let operations = |index, count: usize| {
            let all = words(index, count * size_of::<BatchOperation>() / 8);
            all.chunks(size_of::<BatchOperation>() / 8).flat_map(|one| [one[1], one[6]]).collect()
        };
        // SAFETY: as above.
        let copy = |index| unsafe { structure::<CopyBetween>(argument(index)) }.map(|copy| copy.addresses().collect());
        // SAFETY: as above.
        let node = |index| unsafe { structure::<NodeParameters>(argument(index)) }.map(|node| node.addresses());
        let addresses = match name {
            "cuMemcpyAtoD_v2" => vec![argument(0) as u64],
            "cuMemcpyDtoA_v2" => vec![argument(2) as u64],
            "cuMemcpyWithAttributesAsync" => vec![argument(0) as u64, argument(1) as u64],
            "cuMemcpy3DBatchAsync" | "cuMemcpy3DBatchAsync_v2" => operations(1, argument(0)),
            "cuMemcpy3DWithAttributesAsync" => operations(0, 1),
            "cuGraphAddMemcpyNode" => copy(4)?,
            "cuGraphMemcpyNodeSetParams" => copy(1)?,
            "cuGraphExecMemcpyNodeSetParams" => copy(2)?,
            // A memset as a node reaches plain memory of other devices. Its address is the first field of its parameters.
            "cuGraphAddMemsetNode" => words(4, 1),
            "cuGraphMemsetNodeSetParams" => words(1, 1),
            "cuGraphExecMemsetNodeSetParams" => words(2, 1),
            "cuGraphAddNode" => node(4)?,
            "cuGraphAddNode_v2" | "cuGraphAddNode_v3" => node(5)?,
            "cuGraphNodeSetParams" | "cuGraphNodeSetParams_v2" => node(1)?,
            "cuGraphExecNodeSetParams" => node(2)?,
            _ => return None,
        };
        Some(Self { addresses, copies: Vec::new(), stream: StreamHandle::of_argument(0), waits: false })
    }

    /// Starts copies with a context named for each side. The last one first: if the memory is too small for it, the call is refused, and nothing
    /// has changed.
    ///
    /// # Safety
    /// As for the driver's copies.
    unsafe fn start(&self, memory: &Memory, mut copies: Vec<CopyBetween>, current: Context, are_parts: bool) -> Result<Again, Failure> {
        // No context ends before the copies are queued.
        let mut kept = Vec::new();
        for side in copies.iter_mut().flat_map(|copy| [&mut copy.from, &mut copy.to]) {
            match side.address().and_then(|address| Home::of(memory, address)) {
                Some(home) => {
                    kept.push(home.context.keep()?);
                    side.set_context(home.context);
                }
                // Pageable memory in place of a device's: CUDA refuses that whatever the other side is.
                None if !side.set_context_of_driver(current) => return Ok(Again::Refused),
                None => {}
            }
        }
        for copy in copies.iter().rev() {
            // SAFETY: the caller's promise.
            let answer = unsafe { copy.start(self.stream) };
            if answer != code::SUCCESS {
                return Ok(Again::Answered(answer));
            }
        }
        drop(kept);
        let waits = self.waits && (are_parts || copies.iter().any(CopyBetween::touches_the_host));
        let answer = if waits { self.stream.wait().map_or_else(|failure| failure.code, |()| code::SUCCESS) } else { code::SUCCESS };
        Ok(Again::Answered(answer))
    }
}

/// `None` for a null pointer, which the driver refuses.
///
/// # Safety
/// Any other pointer must be readable.
unsafe fn structure<T: Copy>(address: usize) -> Option<T> {
    // SAFETY: the caller's promise.
    (address != 0).then(|| unsafe { ptr::with_exposed_provenance::<T>(address).read_unaligned() })
}

/// None at a null pointer.
///
/// # Safety
/// Any other pointer must be readable.
unsafe fn words(address: usize, count: usize) -> Vec<u64> {
    if address == 0 {
        return Vec::new();
    }
    let first = ptr::with_exposed_provenance::<u64>(address);
    // SAFETY: the caller's promise.
    (0..count).map(|index| unsafe { first.add(index).read_unaligned() }).collect()
}
