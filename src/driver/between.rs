//! Copies for which each side names its context.

use super::{CUdeviceptr, Context, Driver, StreamHandle, memory_at, pointer_attribute};
use cudarc::driver::sys::CUpointer_attribute;
use vramctl_model::{Failure, StatusCode, code};

/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: u32 = 4;

/// One side of a [`CopyBetween`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CopySide {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: CUdeviceptr,
    array: u64,
    context: u64,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_PEER`, and `CUDA_MEMCPY3D`, which has no contexts.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CopyBetween {
    /// Where it reads.
    pub from: CopySide,
    /// Where it writes.
    pub to: CopySide,
    width: usize,
    height: usize,
    depth: usize,
}

/// One side of [`Plane`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct PlaneSide {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: CUdeviceptr,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Plane {
    from: PlaneSide,
    to: PlaneSide,
    width: usize,
    height: usize,
}

const _: () = {
    assert!(size_of::<Plane>() == 128);
    assert!(size_of::<CopyBetween>() == 200);
};

impl From<PlaneSide> for CopySide {
    fn from(side: PlaneSide) -> Self {
        let PlaneSide { x, y, kind, host, device, array, pitch } = side;
        Self { x, y, kind, host, device, array, pitch, ..Self::default() }
    }
}

impl From<Plane> for CopyBetween {
    fn from(plane: Plane) -> Self {
        Self { from: plane.from.into(), to: plane.to.into(), width: plane.width, height: plane.height, depth: 1 }
    }
}

impl CopySide {
    /// Bytes of the host's.
    pub fn of_host(address: u64) -> Self {
        Self { kind: HOST, host: address, ..Self::default() }
    }

    /// Bytes of device memory, or of pinned host memory.
    pub fn of_device(address: u64) -> Self {
        Self { kind: DEVICE, device: address, ..Self::default() }
    }

    /// Bytes at an address that is unique in the process.
    pub fn of_any(address: u64) -> Self {
        Self { kind: UNIFIED, device: address, ..Self::default() }
    }

    /// Whether it is neither of the host nor at an address.
    pub fn is_array(&self) -> bool {
        !matches!(self.kind, HOST | DEVICE | UNIFIED)
    }

    /// Whether it is of the host.
    pub fn is_host(&self) -> bool {
        self.kind == HOST
    }

    /// Where it begins, unless the copy says that it is of the host.
    pub fn address(&self) -> Option<CUdeviceptr> {
        matches!(self.kind, DEVICE | UNIFIED).then_some(self.device)
    }

    /// The address of its first byte.
    fn first(&self) -> u64 {
        let base = if self.is_host() { self.host } else { self.device };
        base + (self.x + self.y * self.pitch + self.z * self.slice()) as u64
    }

    fn slice(&self) -> usize {
        self.pitch * self.height
    }

    /// Begins as many bytes later.
    fn advance(&mut self, bytes: u64) {
        if self.is_host() {
            self.host += bytes;
        } else {
            self.device += bytes;
        }
    }

    /// Names the context of memory on a device.
    pub fn is_in(&mut self, context: Context) {
        self.kind = DEVICE;
        self.context = context.handle().address();
    }

    /// Names the context that the driver knows for the memory, or else the current one.
    pub fn is_as_the_driver_knows(&mut self, current: Context) {
        let Some(address) = self.address() else { return };
        let is_on_device = memory_at(address).is_ok_and(|known| known.is_some_and(|known| known.device.is_some()));
        if self.kind == UNIFIED && !is_on_device {
            self.kind = HOST;
            self.host = address;
            return;
        }
        let owner = pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT);
        self.kind = DEVICE;
        self.context = owner.unwrap_or_else(|_| current.handle().address());
    }
}

impl CopyBetween {
    /// A copy of consecutive bytes.
    pub fn linear(to: CopySide, from: CopySide, bytes: usize) -> Self {
        Self { from, to, width: bytes, height: 1, depth: 1 }
    }

    /// The same in parts, of which none leaves what `end_of` says where it ends. `end_of`: for an address.
    pub fn within(self, end_of: &impl Fn(u64) -> Option<u64>) -> Vec<Self> {
        if self.from.is_array() || self.to.is_array() || [self.width, self.height, self.depth].contains(&0) {
            return vec![self];
        }
        // Bytes up to the end, if the copy goes on behind it.
        let left = [self.from, self.to].into_iter().filter_map(|side| {
            let bytes = self.width + (self.height - 1) * side.pitch + (self.depth - 1) * side.slice();
            end_of(side.first()).map(|end| (end - side.first()) as usize).filter(|room| *room < bytes)
        });
        let Some(room) = left.min() else { return vec![self] };
        let (mut now, mut rest) = (self, self);
        if self.depth > 1 {
            now.depth /= 2;
            rest.depth -= now.depth;
            rest.from.z += now.depth;
            rest.to.z += now.depth;
        } else if self.height > 1 {
            now.height /= 2;
            rest.height -= now.height;
            rest.from.y += now.height;
            rest.to.y += now.height;
        } else {
            now.width = room;
            rest.width -= room;
            rest.from.advance(room as u64);
            rest.to.advance(room as u64);
        }
        [now.within(end_of), rest.within(end_of)].concat()
    }

    /// Its addresses, except those that it says are of the host.
    pub fn addresses(&self) -> impl Iterator<Item = CUdeviceptr> + use<> {
        [self.from.address(), self.to.address()].into_iter().flatten()
    }

    /// Whether one side is the host's, once both are known.
    pub fn touches_the_host(&self) -> bool {
        self.from.is_host() || self.to.is_host()
    }

    /// Starts it in a stream.
    ///
    /// # Safety
    /// As for the driver's `cuMemcpy3DPeerAsync`.
    pub unsafe fn start(&self, stream: StreamHandle) -> StatusCode {
        /// A row may be at most 2 GiB long (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`), so longer ones are copied in several calls.
        const ROW: usize = 1 << 30;
        let mut rest = *self;
        loop {
            let is_long = rest.width > ROW && rest.height == 1 && rest.depth == 1;
            let now = if is_long { Self { width: ROW, ..rest } } else { rest };
            // SAFETY: the caller's promise; these are parts of the copy.
            let started = Driver::get().and_then(|driver| unsafe { driver.cuMemcpy3DPeerAsync(&raw const now, stream.raw()) });
            if started.is_err() || !is_long {
                return started.map_or_else(|failure| failure.code, |()| code::SUCCESS);
            }
            rest.width -= ROW;
            rest.from.advance(ROW as u64);
            rest.to.advance(ROW as u64);
        }
    }
}

impl StreamHandle {
    /// A handle as it was passed to the driver.
    pub fn of_argument(argument: usize) -> Self {
        // SAFETY: an opaque handle, which the driver looks up.
        unsafe { std::mem::transmute::<usize, Self>(argument) }
    }

    /// Waits for the stream's work.
    pub fn wait(self) -> Result<(), Failure> {
        // SAFETY: a handle that the program passed to CUDA as a stream.
        unsafe { Driver::get()?.cuStreamSynchronize(self.raw()) }
    }
}

/// `CUgraphNodeParams`, the part that says what a copy or a memset touches.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NodeParameters {
    /// `CUgraphNodeType`.
    kind: u32,
    reserved: [u32; 3],
    /// A memset's address, or the flags of a copy.
    address: CUdeviceptr,
    context: u64,
    copy: CopyBetween,
}

impl NodeParameters {
    /// The addresses that the node touches, if it is a copy or a memset.
    pub fn addresses(&self) -> Vec<CUdeviceptr> {
        /// `CU_GRAPH_NODE_TYPE_MEMCPY`.
        const COPY: u32 = 1;
        /// `CU_GRAPH_NODE_TYPE_MEMSET`.
        const SET: u32 = 2;
        match self.kind {
            COPY => self.copy.addresses().collect(),
            SET => vec![self.address],
            _ => Vec::new(),
        }
    }
}
