//! Arrays for textures and surfaces, which CUDA places: they only count against the limit. The runtime's functions call these.

use crate::alloc::{admit, forward_unmanaged};
use crate::call::{Call, forward};
use crate::limited;
use std::ffi::{c_uint, c_void};
use vramctl_core::memory::unmanaged;
use vramctl_driver::Current;
use vramctl_model::StatusCode;

/// `CUDA_ARRAY_DESCRIPTOR`, with a number in place of the enumeration.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Descriptor {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Descriptor3D {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl From<Descriptor> for Descriptor3D {
    fn from(Descriptor { width, height, format, channels }: Descriptor) -> Self {
        Self { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl Descriptor3D {
    /// Bytes of the array with so many levels, each half as large as the one before. Without the driver's padding, which it does not tell.
    fn bytes(self, levels: c_uint) -> usize {
        /// `CUDA_ARRAY3D_LAYERED`: the depth is a number of layers, which all levels have.
        const LAYERED: c_uint = 1;
        /// `CUDA_ARRAY3D_SPARSE`, `CUDA_ARRAY3D_DEFERRED_MAPPING`: the program maps memory of its own.
        const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;
        if self.flags & WITHOUT_MEMORY != 0 {
            return 0;
        }
        let of_level = |level: c_uint| {
            let half = |length: usize| (length >> level).max(1);
            let depth = if self.flags & LAYERED == 0 { half(self.depth) } else { self.depth.max(1) };
            half(self.width).saturating_mul(half(self.height)).saturating_mul(depth)
        };
        let elements = (0..levels.clamp(1, 32)).map(of_level).fold(0, usize::saturating_add);
        elements.saturating_mul(self.half_bytes()) / 2
    }

    /// Bytes of two elements: a compressed one may have half a byte.
    fn half_bytes(self) -> usize {
        let of_channel = match self.format {
            0x01 | 0x08 => 1,                      // 8 bits
            0x02 | 0x09 | 0x10 => 2,               // 16 bits
            0xb0 => return 3,                      // NV12
            0x91 | 0x92 | 0x97 | 0x98 => return 1, // BC1, BC4
            0x93..=0x9e => return 2,               // BC2, BC3, BC5 to BC7
            0xc0..=0xcb => return 2 * [1, 2, 4, 2, 4, 8][(self.format as usize - 0xc0) % 6],
            _ => 4,
        };
        2 * of_channel * self.channels.max(1) as usize
    }
}

pub unsafe fn create(call: &mut Call, array: *mut *mut c_void, descriptor: *const Descriptor) -> StatusCode {
    // SAFETY: here and below, the program promises that pointers that are not null are valid.
    let described = unsafe { descriptor.as_ref() }.map(|described| Descriptor3D::from(*described));
    // SAFETY: as above.
    unsafe { charged(call, array, described, 1) }
}

pub unsafe fn create_3d(call: &mut Call, array: *mut *mut c_void, descriptor: *const Descriptor3D, levels: c_uint) -> StatusCode {
    // SAFETY: as above.
    unsafe { charged(call, array, descriptor.as_ref().copied(), levels) }
}

/// # Safety
/// `array` must be null or where the real function writes the handle.
unsafe fn charged(call: &mut Call, array: *mut *mut c_void, described: Option<Descriptor3D>, levels: c_uint) -> StatusCode {
    let bytes = described.map_or(0, |described| described.bytes(levels));
    let Ok(Some(current)) = Current::of_thread() else { return call.real() };
    match admit(call, current.device(), bytes, || limited::on(current.device(), bytes)) {
        Ok(admitted) => forward_unmanaged(call, bytes, None, forward, |requester| {
            // SAFETY: the real function has succeeded. Its handle is no address of a device.
            unmanaged::note(unsafe { array.read() } as u64, bytes, requester, admitted.charge);
        }),
        Err(error) => error,
    }
}

pub fn destroy(call: &mut Call, array: *mut c_void) -> StatusCode {
    unmanaged::free(array as u64, || call.real())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_takes_what_its_elements_take() {
        let array = |width, height, depth, format, channels, flags| Descriptor3D { width, height, depth, format, channels, flags };
        for (name, array, levels, bytes) in [
            ("one dimension", array(1000, 0, 0, 0x20, 1, 0), 1, 4000),
            ("two", array(100, 10, 0, 0x01, 4, 0), 1, 4000),
            ("three", array(10, 10, 10, 0x10, 2, 0), 1, 4000),
            ("layers", array(10, 10, 6, 0x08, 1, 1), 1, 600),
            ("levels", array(8, 8, 8, 0x01, 1, 0), 4, 512 + 64 + 8 + 1),
            ("levels of layers", array(4, 4, 2, 0x01, 1, 1), 3, 2 * (16 + 4 + 1)),
            ("compressed", array(64, 64, 0, 0x91, 1, 0), 1, 2048),
            ("normalised, of four channels", array(16, 16, 0, 0xcb, 4, 0), 1, 2048),
            ("sparse", array(1 << 20, 1 << 20, 0, 0x20, 4, 0x40), 1, 0),
        ] {
            assert_eq!(array.bytes(levels), bytes, "{name}");
        }
        assert_eq!(array(usize::MAX, 2, 0, 0x20, 4, 0).bytes(1), usize::MAX / 2, "too large is refused, not counted as little");
    }
}
