//! Copies for which each side names its context.

use super::{CUdeviceptr, Context, CopyBetween, CopySide, Driver, RelaxedCapture, StreamHandle, memory_at, pointer_attribute};
use cudarc::driver::sys::CUpointer_attribute;
use vramctl_model::{Failure, Span, StatusCode, code};

/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: u32 = 4;

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

    /// Where it begins, unless it is an array: the driver takes a device's memory for the host's as well.
    pub fn address(&self) -> Option<CUdeviceptr> {
        if self.is_host() { Some(self.host) } else { (!self.is_array()).then_some(self.device) }
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
    pub fn set_context(&mut self, context: Context) {
        self.device = self.address().unwrap_or(self.device);
        self.kind = DEVICE;
        self.context = context.handle().address();
    }

    /// Names the context that the driver knows for memory that is not to be the host's, or else the current one. `false` if the driver does not
    /// know the memory, and it is to be a device's.
    #[must_use]
    pub fn set_context_of_driver(&mut self, current: Context) -> bool {
        let Some(address) = self.address().filter(|_| !self.is_host()) else { return true };
        let known = memory_at(address);
        let is_on_device = known.is_ok_and(|known| known.is_some_and(|known| known.device.is_some()));
        if self.kind == UNIFIED && !is_on_device {
            self.kind = HOST;
            self.host = address;
            return true;
        }
        let owner = pointer_attribute(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT);
        self.kind = DEVICE;
        self.context = owner.unwrap_or_else(|_| current.handle().address());
        known != Ok(None)
    }
}

impl CopyBetween {
    /// A copy of consecutive bytes.
    pub fn linear(to: CopySide, from: CopySide, bytes: usize) -> Self {
        Self { from, to, width: bytes, height: 1, depth: 1 }
    }

    /// What a side reads or writes, from its first byte to its last. `None` if nothing, or if the driver refuses it because rows or slices
    /// would overlap.
    fn span(&self, side: &CopySide) -> Option<Span> {
        let (rows, slices) = (self.height.checked_sub(1)?, self.depth.checked_sub(1)?);
        let are_apart = (rows, slices) == (0, 0) || side.pitch >= side.x.checked_add(self.width)?;
        if self.width == 0 || !are_apart || (slices > 0 && side.height < side.y.checked_add(self.height)?) {
            return None;
        }
        let slice = side.pitch.checked_mul(side.height)?;
        let at = |x: usize, y: usize, z: usize| x.checked_add(y.checked_mul(side.pitch)?)?.checked_add(z.checked_mul(slice)?);
        let base = if side.is_host() { side.host } else { side.device };
        let (address, bytes) = (base.checked_add(at(side.x, side.y, side.z)? as u64)?, at(self.width, rows, slices)?);
        address.checked_add(bytes as u64)?;
        Some(Span { address, bytes })
    }

    /// The same in parts that leave no piece of memory. `end_of`: where the piece ends in which bytes begin, if they are of such memory.
    pub fn within(self, end_of: &impl Fn(Span) -> Option<u64>) -> Vec<Self> {
        if self.from.is_array() || self.to.is_array() {
            return vec![self];
        }
        // Bytes up to the end of the piece, if the copy goes on behind it.
        let left = [&self.from, &self.to].into_iter().filter_map(|side| {
            let span = self.span(side)?;
            let room = end_of(span)?.checked_sub(span.address)? as usize;
            (room < span.bytes).then_some(room)
        });
        let Some(room) = left.min().filter(|room| *room > 0) else { return vec![self] };
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

    /// Its addresses.
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

    /// Waits for the stream's work, as copies do that are no calls of a stream: a capture does not forbid them.
    pub fn wait(self) -> Result<(), Failure> {
        let _relaxed = RelaxedCapture::enter();
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

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 1000;
    /// The memory in pieces.
    const MEMORY: std::ops::Range<u64> = 10_000..60_000;

    fn end_of(span: Span) -> Option<u64> {
        let is_inside = MEMORY.contains(&span.address) && span.address + span.bytes as u64 <= MEMORY.end;
        is_inside.then(|| (span.address / PIECE + 1) * PIECE)
    }

    /// Each row: where it reads, where it writes, its bytes.
    fn rows(copy: &CopyBetween) -> Vec<(u64, u64, usize)> {
        let at = |side: &CopySide, y, z| {
            let base = if side.is_host() { side.host } else { side.device };
            base + (side.x + (side.y + y) * side.pitch + (side.z + z) * side.pitch * side.height) as u64
        };
        let places = (0..copy.depth).flat_map(|z| (0..copy.height).map(move |y| (y, z)));
        places.map(|(y, z)| (at(&copy.from, y, z), at(&copy.to, y, z), copy.width)).collect()
    }

    /// All bytes, as pairs of addresses.
    fn bytes(copies: &[CopyBetween]) -> Vec<(u64, u64)> {
        let rows = copies.iter().flat_map(rows);
        let mut all: Vec<_> = rows.flat_map(|(from, to, width)| (0..width as u64).map(move |byte| (from + byte, to + byte))).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn parts_copy_the_same_bytes_and_leave_no_piece() {
        let mut state = 1_u64;
        let mut below = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % most
        };
        let mut were_parted = 0;
        for _ in 0..2000 {
            let (width, height, depth) = (1 + below(400), 1 + below(9), 1 + below(3));
            let mut side = |base: u64| {
                let (x, y, z) = (below(20), below(3), below(3));
                let (pitch, rows) = (x + width + below(300), y + height + below(3));
                let side = if below(2) == 0 { CopySide::of_host(base) } else { CopySide::of_any(base) };
                CopySide { x, y, z, pitch, height: rows, ..side }
            };
            let copy = CopyBetween { from: side(20_000), to: side(1_000_000), width, height, depth };
            let parts = copy.within(&end_of);
            were_parted += usize::from(parts.len() > 1);
            assert_eq!(bytes(&parts), bytes(&[copy]), "{copy:?}");
            for part in &parts {
                let span = part.span(&part.from).unwrap();
                assert!(parts.len() == 1 || span.address + span.bytes as u64 <= end_of(span).unwrap(), "{part:?} of {copy:?}");
            }
        }
        assert!(were_parted > 1000, "{were_parted}");
    }

    #[test]
    fn what_the_driver_refuses_stays_as_it_is() {
        let from = CopySide::of_host(MEMORY.start);
        let with = |pitch, height| CopySide { pitch, height, ..from };
        let to = CopySide { pitch: 4096, height: usize::MAX, ..CopySide::of_device(1 << 40) };
        for (from, width, height, depth) in [
            (with(0, 0), 800, 3_000_000, 1),
            (with(799, 0), 800, 3_000_000, 1),
            (with(1 << 60, 0), 800, 1 << 20, 1),
            (with(1000, 0), 800, usize::MAX, 1),
            (with(usize::MAX, usize::MAX), 800, usize::MAX, usize::MAX),
            (with(1000, 1), 800, 2, 2),
            (with(1000, 0), 800, 1000, 1),
            (from, 2000, 0, 1),
            (from, 0, 1, 1),
            (CopySide::of_host(MEMORY.end - 500), 600, 1, 1),
            (CopySide::of_host(u64::MAX), 600, 1, 1),
        ] {
            assert_eq!(CopyBetween { from, to, width, height, depth }.within(&end_of).len(), 1, "{from:?} {width} {height} {depth}");
        }
        let many = CopyBetween { from: with(25, 0), to, width: 25, height: 2000, depth: 1 };
        let parts = many.within(&end_of).len();
        assert!(parts < 50 * 10, "some for each of 50 pieces, not one for each row: {parts}");
    }
}
