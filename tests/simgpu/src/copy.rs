//! Stream operations: copies, memsets, kernels and host functions. Device memory that is not mapped and accessible when a
//! call is made is an invalid value, and the call has no effect. If it disappears before the operation runs, the context
//! gets a sticky error.

use crate::abi::{Address, Handle, HostFunction, StreamCallback};
use crate::codes::{Code, ILLEGAL_ADDRESS, INVALID_VALUE, LAUNCH_FAILED, Outcome, SUCCESS};
use crate::context::{self, Context};
use crate::driver::{State, machine, state};
use crate::faults;
use crate::host::{Direction, transfer};
use crate::kernel;
use crate::stream;
use crate::vmm::{self, Piece, READ, READ_WRITE};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An operation on a stream, or a graph node.
#[derive(Clone, Debug)]
pub enum Work {
    /// Does nothing; something to wait for.
    Marker,
    /// Copies bytes; each side is on a device or on the host.
    Copy {
        /// Destination.
        to: Address,
        /// Source.
        from: Address,
        /// Number of bytes.
        bytes: usize,
        /// The devices that write and read, if it is not the stream's for both.
        by: Option<(usize, usize)>,
    },
    /// Does several things in order: the rows of one copy or memset, or the copies of a batch.
    Several(Arc<[Work]>),
    /// A graph node of another context than the graph's.
    Within {
        /// The context.
        context: Arc<Context>,
        /// The node.
        work: Arc<Work>,
    },
    /// Copies bytes that were read from pageable host memory when the call was made.
    Upload {
        /// Destination.
        to: Address,
        /// As above.
        by: Option<(usize, usize)>,
        /// The bytes.
        bytes: Arc<[u8]>,
    },
    /// Repeats a value.
    Fill {
        /// Destination.
        to: Address,
        /// The value, in the lowest `width` bytes.
        value: u32,
        /// Bytes per value: 1, 2 or 4.
        width: usize,
        /// Number of values.
        count: usize,
    },
    /// Calls a host function.
    Call {
        /// The function.
        function: HostFunction,
        /// Its argument, a pointer owned by the program.
        data: usize,
    },
    /// Calls a stream's callback, even after an error.
    Callback {
        /// The function.
        function: StreamCallback,
        /// The stream's handle, its first argument.
        stream: Handle,
        /// Its last argument, a pointer owned by the program.
        data: usize,
    },
    /// Waits until memory has a value.
    Wait {
        /// Address of the value.
        address: Address,
        /// Bytes of the value: 4 or 8.
        width: usize,
        /// The condition that ends the wait.
        until: Until,
    },
    /// Launches a known kernel.
    Kernel(kernel::Launch),
    /// Frees an allocation.
    Free {
        /// Its address.
        address: Address,
        /// Its id.
        id: u64,
    },
    /// Runs the nodes of a graph in order.
    Graph {
        /// The nodes.
        nodes: Arc<[Work]>,
    },
}

/// `CUstreamWaitValue_flags`: the condition that ends a wait.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// The value or greater, in cyclic order.
    AtLeast(u64),
    /// Exactly the value.
    Equal(u64),
    /// Any of the value's bits is set.
    AnyOf(u64),
    /// Some bit is set in neither.
    Nor(u64),
}

impl Until {
    /// Decodes the flags; `None` if they are invalid.
    pub fn of(condition: u32, value: u64) -> Option<Self> {
        Some(match condition {
            0 => Self::AtLeast(value),
            1 => Self::Equal(value),
            2 => Self::AnyOf(value),
            3 => Self::Nor(value),
            _ => return None,
        })
    }

    fn holds(self, now: u64, width: usize) -> bool {
        match self {
            Self::AtLeast(value) if width == 4 => (now as u32).wrapping_sub(value as u32).cast_signed() >= 0,
            Self::AtLeast(value) => now.wrapping_sub(value).cast_signed() >= 0,
            Self::Equal(value) => now == value,
            Self::AnyOf(value) => now & value != 0,
            Self::Nor(value) => !(now | value) << (64 - 8 * width) != 0,
        }
    }
}

/// -1 if only the environment sets the delay.
static DELAY: AtomicU64 = AtomicU64::new(u64::MAX);

/// Number of operations being delayed now.
static DELAYED: AtomicUsize = AtomicUsize::new(0);

/// Sets the minimum duration of every operation, including those being delayed now.
pub fn set_delay(milliseconds: u64) {
    DELAY.store(milliseconds, Ordering::Relaxed);
}

/// Number of operations that have begun and are being delayed.
pub fn delayed() -> usize {
    DELAYED.load(Ordering::SeqCst)
}

/// Sleeps in the middle of an operation.
pub fn delay() {
    DELAYED.fetch_add(1, Ordering::SeqCst);
    faults::sleep_for(|| match DELAY.load(Ordering::Relaxed) {
        u64::MAX => crate::settings::get().delay_ms,
        milliseconds => milliseconds,
    });
    DELAYED.fetch_sub(1, Ordering::SeqCst);
}

/// Simulates the link's speed: called when a copy between host and device begins, returns when it ends. Copies in one direction share the
/// link, one after another.
pub fn take_link(direction: Direction, bytes: usize) -> Instant {
    static FREE_AT: [Mutex<Option<Instant>>; 2] = [const { Mutex::new(None) }; 2];
    let now = Instant::now();
    let Some(rate) = crate::settings::get().link else { return now };
    let mut free_at = FREE_AT[direction as usize].lock().unwrap_or_else(PoisonError::into_inner);
    let end = free_at.map_or(now, |free| free.max(now)) + Duration::from_secs_f64(bytes as f64 / rate as f64);
    *free_at = Some(end);
    end
}

/// Waits for the end of a copy, without using the processor.
pub fn arrive(end: Instant) {
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
}

/// One side of an operation, looked up when it runs.
#[derive(Debug)]
enum Side {
    Device(Vec<Piece>),
    Host(Address),
}

impl Side {
    fn find(state: &State, device: usize, address: Address, bytes: usize, access: u32, copies: bool) -> Outcome<Self> {
        if state.space.is_device(address) {
            let touch = if copies { vmm::Space::touch_in_copy } else { vmm::Space::touch };
            touch(&state.space, address, bytes, device, access).map(Self::Device)
        } else {
            Ok(Self::Host(address))
        }
    }

    /// The mappings that the operation goes through. A later mapping at the same address is a different one.
    fn mappings(&self) -> Vec<u64> {
        match self {
            Self::Device(pieces) => pieces.iter().map(|piece| piece.mapping).collect(),
            Self::Host(_) => Vec::new(),
        }
    }
}

/// The memory that an operation reads and writes.
struct Touched {
    read: Option<(Address, usize)>,
    written: Option<(Address, usize)>,
    by: Option<(usize, usize)>,
    copies: bool,
}

impl Work {
    /// The code for an illegal address in a graph node.
    fn fault_in_graph(&self, code: Code) -> Code {
        let between_devices = match *self {
            Self::Within { ref work, .. } => return work.fault_in_graph(code),
            Self::Copy { to, from, .. } => {
                let state = state();
                state.space.is_device(to) && state.space.is_device(from)
            }
            _ => false,
        };
        if code == ILLEGAL_ADDRESS && !between_devices { LAUNCH_FAILED } else { code }
    }

    /// Whether a memset's target is accessible now; always true for other work.
    pub fn finds_its_target(&self, state: &State, device: usize) -> bool {
        match *self {
            Self::Fill { to, width, count, .. } => is_reachable(state, to, width * count, device, READ_WRITE),
            Self::Several(ref all) => all.iter().all(|work| work.finds_its_target(state, device)),
            Self::Within { ref context, ref work } => work.finds_its_target(state, context.device),
            _ => true,
        }
    }

    fn touched(&self) -> Touched {
        let (read, written) = match *self {
            Self::Copy { to, from, bytes, .. } => (Some((from, bytes)), Some((to, bytes))),
            Self::Upload { to, ref bytes, .. } => (None, Some((to, bytes.len()))),
            Self::Fill { to, width, count, .. } => (None, Some((to, width * count))),
            Self::Marker
            | Self::Call { .. }
            | Self::Callback { .. }
            | Self::Wait { .. }
            | Self::Kernel(_)
            | Self::Free { .. }
            | Self::Several(_)
            | Self::Within { .. }
            | Self::Graph { .. } => (None, None),
        };
        Touched {
            read,
            written,
            by: if let Self::Copy { by, .. } | Self::Upload { by, .. } = *self { by } else { None },
            copies: !matches!(self, Self::Fill { .. }),
        }
    }
}

impl Touched {
    fn sides(&self, context: &Context) -> Outcome<(Option<Side>, Option<Side>)> {
        let state = state();
        let (writer, reader) = self.by.unwrap_or((context.device, context.device));
        let find = |range: Option<(Address, usize)>, device, access| {
            range.map(|(address, bytes)| Side::find(&state, device, address, bytes, access, self.copies)).transpose()
        };
        Ok((find(self.read, reader, READ)?, find(self.written, writer, READ_WRITE)?))
    }

    fn mappings(&self, context: &Context) -> Outcome<(Vec<u64>, Vec<u64>)> {
        let (read, written) = self.sides(context)?;
        let mappings = |side: Option<Side>| side.as_ref().map(Side::mappings).unwrap_or_default();
        Ok((mappings(read), mappings(written)))
    }
}

/// Runs an operation. In a context with a sticky error, nothing runs.
pub fn execute(context: &Context, work: Work) {
    if let Err(code) = context.check() {
        match work {
            // The memory must still be freed.
            Work::Free { address, id } => state().space.free_is_over(address, id),
            // SAFETY: the program passed this function and argument to cuStreamAddCallback.
            Work::Callback { function, stream, data } => unsafe { stream::call_back(function, stream, code, data as *mut c_void) },
            _ => (),
        }
        return;
    }
    let (nodes, in_graph) = match work {
        Work::Marker => return,
        Work::Graph { nodes } => (nodes, true),
        single => (Arc::from([single]), false),
    };
    for work in nodes.iter() {
        if let Err(code) = execute_one(context, work) {
            context.poison(if in_graph { work.fault_in_graph(code) } else { code });
            return;
        }
    }
}

/// Runs one operation. Its addresses must stay mapped, by the same mappings, from start to end: memory that is unmapped or
/// replaced in flight is a fault on a real device, or worse, silent corruption.
fn execute_one(context: &Context, work: &Work) -> Outcome {
    if let Work::Kernel(launch) = work {
        let _running = machine()?.execute(context.device);
        return launch.run(context);
    }
    if let Work::Wait { address, width, until } = *work {
        return wait_for(context, address, width, until);
    }
    match work {
        Work::Several(all) => return all.iter().try_for_each(|work| execute_one(context, work)),
        Work::Within { context, work } => return execute_one(context, work),
        _ => (),
    }
    let touched = work.touched();
    let at_first = touched.mappings(context)?;
    delay();
    let (read, written) = touched.sides(context)?;
    // Copies within a device, and memsets, are kernels of the driver's.
    let is_kernel =
        matches!((&read, &written), (None | Some(Side::Device(_)), Some(Side::Device(_)))) && !matches!(work, Work::Upload { .. });
    let _running = if is_kernel { machine()?.execute(context.device) } else { None };
    match (work, read, written) {
        (Work::Copy { bytes, .. }, Some(from), Some(to)) => copy(&from, &to, *bytes)?,
        (Work::Upload { bytes, .. }, _, Some(to)) => upload(bytes, &to)?,
        (Work::Fill { value, width, count, .. }, _, Some(to)) => {
            fill(&to, *value, *width, *count)?;
        }
        (Work::Call { function, data }, ..) => {
            // SAFETY: the program passed this function and argument to cuLaunchHostFunc.
            unsafe { stream::call_host_function(*function, *data as *mut c_void) };
        }
        (Work::Callback { function, stream, data }, ..) => {
            // SAFETY: the program passed this function and argument to cuStreamAddCallback.
            unsafe { stream::call_back(*function, *stream, SUCCESS, *data as *mut c_void) };
        }
        (Work::Free { address, id }, ..) => state().space.free_is_over(*address, *id),
        _ => {}
    }
    if touched.mappings(context)? == at_first { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
}

/// Polls the memory until the condition holds or the context has a sticky error.
fn wait_for(context: &Context, address: Address, width: usize, until: Until) -> Outcome {
    let mut bytes = [0; 8];
    loop {
        let found = Side::find(&state(), context.device, address, width, READ, false)?;
        match found {
            // SAFETY: part of a backing that the piece keeps alive. The value is aligned, so it does not span pieces.
            Side::Device(pieces) => unsafe {
                let _touching = vmm::touching();
                let from = pieces.first().ok_or(ILLEGAL_ADDRESS)?;
                std::ptr::copy_nonoverlapping(from.physical.backing.at(from.offset), bytes.as_mut_ptr(), width);
            },
            Side::Host(from) => transfer(Direction::FromHost, bytes.as_mut_ptr(), from, width)?,
        }
        if until.holds(u64::from_le_bytes(bytes), width) || context.check().is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The size of the bounce buffer for host-to-host copies, in bytes.
const BOUNCE: usize = 1 << 20;

fn copy(from: &Side, to: &Side, bytes: usize) -> Outcome {
    let touching = vmm::touching();
    let over_the_link = |direction, pieces: &[Piece], mut host: Address| {
        let end = take_link(direction, bytes);
        for piece in pieces {
            transfer(direction, piece.physical.backing.at(piece.offset), host, piece.bytes)?;
            host += piece.bytes as u64;
        }
        drop(touching);
        arrive(end);
        Ok(())
    };
    match (from, to) {
        (Side::Host(from), Side::Device(pieces)) => over_the_link(Direction::FromHost, pieces, *from),
        (Side::Device(pieces), Side::Host(to)) => over_the_link(Direction::ToHost, pieces, *to),
        (Side::Device(from), Side::Device(to)) => {
            copy_pieces(from, to);
            Ok(())
        }
        (Side::Host(from), Side::Host(to)) => {
            let mut buffer = vec![0u8; BOUNCE.min(bytes)];
            let mut done = 0;
            while done < bytes {
                let part = buffer.len().min(bytes - done);
                transfer(Direction::FromHost, buffer.as_mut_ptr(), from + done as u64, part)?;
                transfer(Direction::ToHost, buffer.as_mut_ptr(), to + done as u64, part)?;
                done += part;
            }
            Ok(())
        }
    }
}

/// Copies between two lists of pieces of equal total length.
fn copy_pieces(from: &[Piece], to: &[Piece]) {
    let mut sources = from.iter().map(|piece| (piece.physical.backing.at(piece.offset), piece.bytes));
    let (mut source, mut left) = sources.next().unwrap_or((std::ptr::null_mut(), 0));
    for piece in to {
        let mut done = 0;
        while done < piece.bytes {
            if left == 0 {
                match sources.next() {
                    Some(next) => (source, left) = next,
                    None => return,
                }
            }
            let part = left.min(piece.bytes - done);
            // SAFETY: both are parts of backings that the pieces keep alive; they may overlap.
            unsafe {
                std::ptr::copy(source, piece.physical.backing.at(piece.offset + done), part);
            }
            source = source.wrapping_add(part);
            left -= part;
            done += part;
        }
    }
}

fn upload(bytes: &[u8], to: &Side) -> Outcome {
    let touching = vmm::touching();
    let from = bytes.as_ptr();
    match to {
        Side::Device(pieces) => {
            let end = take_link(Direction::FromHost, bytes.len());
            let mut done = 0;
            for piece in pieces {
                // SAFETY: the source is our own buffer, the destination a backing that the piece keeps alive.
                unsafe {
                    std::ptr::copy_nonoverlapping(from.add(done), piece.physical.backing.at(piece.offset), piece.bytes);
                }
                done += piece.bytes;
            }
            drop(touching);
            arrive(end);
            Ok(())
        }
        Side::Host(to) => transfer(Direction::ToHost, from.cast_mut(), *to, bytes.len()),
    }
}

fn fill(to: &Side, value: u32, width: usize, count: usize) -> Outcome {
    let _touching = vmm::touching();
    let pattern = value.to_le_bytes();
    // Addresses are aligned to the width, so no value spans two pieces.
    let write = |start: *mut u8, bytes: usize| {
        // SAFETY: part of a backing or of our own buffer, and at least this long.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
        if pattern[..width].iter().all(|&byte| byte == pattern[0]) {
            bytes.fill(pattern[0]);
        } else {
            for chunk in bytes.chunks_mut(width) {
                chunk.copy_from_slice(&pattern[..chunk.len()]);
            }
        }
    };
    match to {
        Side::Device(pieces) => {
            for piece in pieces {
                write(piece.physical.backing.at(piece.offset), piece.bytes);
            }
            Ok(())
        }
        Side::Host(to) => {
            let bytes = width * count;
            let mut buffer = vec![0u8; BOUNCE.min(bytes)];
            write(buffer.as_mut_ptr(), buffer.len());
            (0..bytes).step_by(BOUNCE).try_for_each(|done| {
                let part = buffer.len().min(bytes - done);
                transfer(Direction::ToHost, buffer.as_mut_ptr(), to + done as u64, part)
            })
        }
    }
}

/// What a copy function's name implies about its two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    /// Nothing: each address determines its side.
    Any,
    /// From host to device.
    Upload,
    /// From device to host.
    Download,
    /// From device to device.
    Device,
}

/// Whether an address may be passed as a device address.
pub fn is_device_address(state: &State, address: Address) -> bool {
    state.space.is_device(address) || state.host.find(address).is_some()
}

/// Whether a device has access to the whole range now. Host memory is checked when it is used.
pub fn is_reachable(state: &State, address: Address, bytes: usize, device: usize, access: u32) -> bool {
    !state.space.is_device(address) || (state.space.touch(address, bytes, device, access).is_ok() && is_of_peer(state, address, device))
}

/// Whether a device may use plain memory otherwise than by copies: its own, and that of peers.
fn is_of_peer(state: &State, address: Address, device: usize) -> bool {
    let owner = state.space.find(address).filter(|range| matches!(range.purpose, vmm::Purpose::Plain { pool: None, .. }));
    owner.is_none_or(|range| range.device == device || state.contexts.are_peers(device, range.device))
}

/// The checks of a copy call before anything is queued or captured. `by`: the devices that write and read.
pub fn check_sides(state: &State, sides: Sides, to: Address, from: Address, bytes: usize, by: (usize, usize)) -> Outcome {
    let written = matches!(sides, Sides::Upload | Sides::Device);
    let read = matches!(sides, Sides::Download | Sides::Device);
    let wrong = (written && !is_device_address(state, to)) || (read && !is_device_address(state, from)) || to == 0 || from == 0;
    let reaches =
        |address, device, access| !state.space.is_device(address) || state.space.touch_in_copy(address, bytes, device, access).is_ok();
    let reachable = reaches(to, by.0, READ_WRITE) && reaches(from, by.1, READ);
    let wrong = wrong || [to, from].into_iter().any(|address| state.host.is_left_by(address, bytes));
    if wrong || !reachable { Err(INVALID_VALUE) } else { Ok(()) }
}

/// A synchronous copy. Like the driver's, it does not wait if both sides are on devices ("for transfers from device memory
/// to device memory, no host-side synchronization is performed").
pub fn copy_and_wait(sides: Sides, to: Address, from: Address, bytes: usize, stream: Handle) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let both_on_devices = {
        let state = state();
        let device = context::current_in(&state.contexts)?.device;
        check_sides(&state, sides, to, from, bytes, (device, device))?;
        state.space.is_device(to) && state.space.is_device(from)
    };
    let work = Work::Copy { to, from, bytes, by: None };
    if !both_on_devices {
        return stream::run(stream, work);
    }
    let mut state = state();
    let stream = stream::find(&mut state, stream)?;
    state.captures.refuse(stream.handle)?;
    stream::submit(&mut state, &stream, work)?;
    Ok(())
}

/// An asynchronous copy. As CUDA permits, it waits for pageable host memory, which is read or written before the call
/// returns.
pub fn copy_async(sides: Sides, to: Address, from: Address, bytes: usize, stream: Handle) -> Outcome {
    let mut state = state();
    let stream = stream::find(&mut state, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    // The current context reaches the memory, not the stream's.
    let device = context::current_in(&state.contexts)?.device;
    let by = (device != stream.context.device).then_some((device, device));
    check_sides(&state, sides, to, from, bytes, (device, device))?;
    let pageable = |address| !is_device_address(&state, address);
    let (to_pageable, from_pageable) = (pageable(to), pageable(from));
    let mut work = Work::Copy { to, from, bytes, by };
    // A captured copy looks up its memory when the graph runs.
    if from_pageable && !state.captures.is_capturing(stream.handle) {
        // "If pageable memory must first be staged to pinned memory, the driver may synchronize with the stream and stage
        // the copy": the program may change its buffer after the call. Large buffers are not staged but waited for.
        if bytes <= 64 << 10 || to_pageable {
            let mut staged = vec![0u8; bytes];
            transfer(Direction::FromHost, staged.as_mut_ptr(), from, bytes).map_err(|_| INVALID_VALUE)?;
            work = Work::Upload { to, by, bytes: staged.into() };
        }
    }
    let wait = to_pageable || (from_pageable && matches!(work, Work::Copy { .. }));
    let ticket = stream::submit(&mut state, &stream, work)?;
    drop(state);
    if wait && let Some(ticket) = ticket {
        ticket.wait();
        return stream.context.check();
    }
    Ok(())
}

/// A memset. None of them waits ("memset functions are asynchronous with respect to the host except when the target is
/// pinned host memory or a Unified Memory region").
pub fn set(to: Address, value: u32, width: usize, count: usize, stream: Handle) -> Outcome {
    let mut state = state();
    let stream = stream::find(&mut state, stream)?;
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)?;
    if !to.is_multiple_of(width as u64) || to.checked_add(bytes as u64).is_none() {
        return Err(INVALID_VALUE);
    }
    if !is_device_address(&state, to) {
        return Err(INVALID_VALUE);
    }
    let waits = state.host.find(to).is_some();
    let work = Work::Fill { to, value, width, count };
    // A captured memset is checked when its graph is instantiated.
    if !state.captures.is_capturing(stream.handle) && !work.finds_its_target(&state, stream.context.device) {
        return Err(INVALID_VALUE);
    }
    let ticket = stream::submit(&mut state, &stream, work)?;
    drop(state);
    if waits && let Some(ticket) = ticket {
        ticket.wait();
        return stream.context.check();
    }
    Ok(())
}

/// A memset without a stream argument. It cannot be captured.
pub fn set_now(to: Address, value: u32, width: usize, count: usize, stream: Handle) -> Outcome {
    {
        let mut state = state();
        let stream = stream::find(&mut state, stream)?;
        state.captures.refuse(stream.handle)?;
    }
    set(to, value, width, count, stream)
}
