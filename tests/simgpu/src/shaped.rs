//! Copies of several rows, between two contexts, and in batches; memsets of several rows; graph nodes of these. Copies of arrays are not simulated.

use crate::abi::{Address, Handle, In, Out};
use crate::codes::{CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::context;
use crate::copy::{self, Sides, Work};
use crate::driver::{State, state};
use crate::stream;
use std::sync::Arc;

/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: u32 = 4;

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Plane {
    x: usize,
    y: usize,
    kind: u32,
    host: Address,
    device: Address,
    array: Handle,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy2D {
    from: Plane,
    to: Plane,
    width: usize,
    height: usize,
}

/// One side of `CUDA_MEMCPY3D`, and of `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Volume {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: Address,
    device: Address,
    array: Handle,
    /// Only between contexts.
    context: Handle,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`, and `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy3D {
    from: Volume,
    to: Volume,
    width: usize,
    height: usize,
    depth: usize,
}

const _: () = {
    assert!(size_of::<Copy2D>() == 128);
    assert!(size_of::<Copy3D>() == 200);
};

impl From<Plane> for Volume {
    fn from(plane: Plane) -> Self {
        let Plane { x, y, kind, host, device, array, pitch } = plane;
        Self { x, y, z: 0, level: 0, kind, host, device, array, context: 0, pitch, height: 0 }
    }
}

impl From<Copy2D> for Copy3D {
    fn from(copy: Copy2D) -> Self {
        Self { from: copy.from.into(), to: copy.to.into(), width: copy.width, height: copy.height, depth: 1 }
    }
}

impl Volume {
    /// Bytes in a row.
    fn linear(address: Address, context: Handle) -> Self {
        Self { x: 0, y: 0, z: 0, level: 0, kind: UNIFIED, host: 0, device: address, array: 0, context, pitch: 0, height: 0 }
    }

    /// The address of a row.
    fn row(&self, y: usize, z: usize) -> Outcome<Address> {
        let base = match self.kind {
            HOST => self.host,
            DEVICE | UNIFIED => self.device,
            _ => return Err(NOT_SUPPORTED),
        };
        Ok(base + (((self.z + z) * self.height + self.y + y) * self.pitch + self.x) as u64)
    }
}

/// Which contexts reach the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The current one reaches both.
    Current,
    /// The stream's reaches both.
    Stream,
    /// Each side's own.
    Contexts,
}

/// Whether the call returns before the copy is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// As soon as it is queued, unless the host's memory is pageable.
    Queued,
    /// When it is over, if one side is the host's.
    Done,
}

/// A copy as a stream's work: its rows.
fn rows(state: &State, copy: &Copy3D, reach: Reach, device: usize) -> Outcome<Vec<Work>> {
    let device_of = |side: &Volume| -> Outcome<usize> {
        if reach != Reach::Contexts || side.kind == HOST { Ok(device) } else { Ok(state.contexts.get(side.context)?.device) }
    };
    let by = (device_of(&copy.to)?, device_of(&copy.from)?);
    let sides = match (copy.from.kind, copy.to.kind) {
        (HOST, DEVICE) => Sides::Upload,
        (DEVICE, HOST) => Sides::Download,
        (DEVICE, DEVICE) => Sides::Device,
        _ => Sides::Any,
    };
    // cuda.h: "srcPitch must be greater than or equal to WidthInBytes + srcXInBytes", and heights likewise.
    let overlaps = |side: &Volume| {
        (copy.height.max(copy.depth) > 1 && side.pitch < side.x.saturating_add(copy.width))
            || (copy.depth > 1 && side.height < side.y.saturating_add(copy.height))
    };
    if overlaps(&copy.to) || overlaps(&copy.from) {
        return Err(INVALID_VALUE);
    }
    if copy.height > 0 && copy.depth > 0 {
        // All of it, as far as that is known: only copies of one row were observed.
        for side in [&copy.to, &copy.from] {
            let (first, last) = (side.row(0, 0)?, side.row(copy.height - 1, copy.depth - 1)?);
            if state.host.is_left_by(first, (last - first) as usize + copy.width) {
                return Err(INVALID_VALUE);
            }
        }
    }
    let mut rows = Vec::new();
    for z in 0..copy.depth {
        for y in 0..copy.height {
            let (to, from) = (copy.to.row(y, z)?, copy.from.row(y, z)?);
            copy::check_sides(state, sides, to, from, copy.width, by)?;
            rows.push(Work::Copy { to, from, bytes: copy.width, by: (reach != Reach::Stream).then_some(by) });
        }
    }
    Ok(rows)
}

fn several(mut rows: Vec<Work>) -> Work {
    if rows.len() == 1
        && let Some(only) = rows.pop()
    {
        return only;
    }
    Work::Several(rows.into())
}

/// Copies in a stream.
fn perform(copies: &[Copy3D], reach: Reach, until: Until, handle: Handle) -> Outcome {
    let mut state = state();
    let stream = stream::find(&mut state, handle)?;
    // Copies between contexts, too, cannot be captured.
    if until == Until::Done || reach == Reach::Contexts {
        state.captures.refuse(stream.handle)?;
    }
    let device = if reach == Reach::Stream { stream.context.device } else { context::current_in(&state.contexts)?.device };
    let mut all = Vec::new();
    for copy in copies {
        all.extend(rows(&state, copy, reach, device)?);
    }
    let on_host = |address| !state.space.is_device(address);
    let pageable = |address| !copy::is_device_address(&state, address);
    let touches = |is: &dyn Fn(Address) -> bool| all.iter().any(|row| matches!(*row, Work::Copy { to, from, .. } if is(to) || is(from)));
    let waits = if until == Until::Done { touches(&on_host) } else { touches(&pageable) };
    let ticket = stream::submit(&mut state, &stream, several(all))?;
    drop(state);
    if waits && let Some(ticket) = ticket {
        ticket.wait();
        return stream.context.check();
    }
    Ok(())
}

/// `cuMemcpy2D` and `cuMemcpy2DAsync`.
pub fn copy_2d(copy: In<Copy2D>, until: Until, stream: Handle) -> Outcome {
    perform(&[copy.get()?.into()], Reach::Current, until, stream)
}

/// `cuMemcpy3D`, `cuMemcpy3DPeer` and their asynchronous forms.
pub fn copy_3d(copy: In<Copy3D>, reach: Reach, until: Until, stream: Handle) -> Outcome {
    perform(&[copy.get()?], reach, until, stream)
}

/// `cuMemcpyPeer` and `cuMemcpyPeerAsync`.
pub fn copy_between(
    to: Address,
    to_context: Handle,
    from: Address,
    from_context: Handle,
    bytes: usize,
    until: Until,
    stream: Handle,
) -> Outcome {
    {
        let state = state();
        if !copy::is_device_address(&state, to) || !copy::is_device_address(&state, from) {
            return Err(INVALID_VALUE);
        }
    }
    let copy = Copy3D { from: Volume::linear(from, from_context), to: Volume::linear(to, to_context), width: bytes, height: 1, depth: 1 };
    perform(&[copy], Reach::Contexts, until, stream)
}

/// `cuMemcpyBatchAsync`: in a stream, but not the legacy one.
pub fn batch(to: In<Address>, from: In<Address>, bytes: In<usize>, count: usize, attributes: usize, stream: Handle) -> Outcome {
    // There are at most as many attributes as copies.
    if stream <= stream::LEGACY || attributes > count {
        return Err(INVALID_VALUE);
    }
    {
        let mut state = state();
        let handle = stream::find(&mut state, stream)?.handle;
        if state.captures.is_capturing(handle) {
            return Err(CAPTURE_UNSUPPORTED);
        }
    }
    let (to, from, bytes) = (to.get_all(count)?, from.get_all(count)?, bytes.get_all(count)?);
    let linear = |address| Volume::linear(address, 0);
    let copies = to.iter().zip(&from).zip(&bytes);
    let copies: Vec<_> =
        copies.map(|((to, from), bytes)| Copy3D { from: linear(*from), to: linear(*to), width: *bytes, height: 1, depth: 1 }).collect();
    perform(&copies, Reach::Stream, Until::Queued, stream)
}

/// `cuMemsetD2D8` and the like.
pub fn set_2d(to: Address, pitch: usize, value: u32, element: usize, width: usize, height: usize, stream: Handle) -> Outcome {
    (0..height).try_for_each(|row| copy::set(to + (row * pitch) as u64, value, element, width, stream))
}

/// The same without a stream argument. It cannot be captured.
pub fn set_2d_now(to: Address, pitch: usize, value: u32, element: usize, width: usize, height: usize, stream: Handle) -> Outcome {
    (0..height).try_for_each(|row| copy::set_now(to + (row * pitch) as u64, value, element, width, stream))
}

/// `cuGraphAddMemcpyNode`: the node's context reaches both sides. Dependencies are not looked at: nodes run in the order of their addition.
pub fn add_copy(node: Out<Handle>, graph: Handle, copy: In<Copy3D>, context: Handle) -> Outcome {
    let copy = copy.get()?;
    let mut state = state();
    let context = state.contexts.get(context)?;
    let rows = rows(&state, &copy, Reach::Stream, context.device)?;
    let node_handle = state.graphs.push(graph, Work::Within { context, work: Arc::new(several(rows)) })?;
    node.put(node_handle)
}
