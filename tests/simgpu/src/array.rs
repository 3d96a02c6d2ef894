//! Arrays. Only the memory that they take is simulated: nothing reads or writes them. Their handles are its addresses.

use crate::abi::{Address, Handle, In, Out};
use crate::codes::{INVALID_VALUE, Outcome};
use crate::memory;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Descriptor3D {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `cuArrayCreate`.
pub fn create(array: Out<Handle>, descriptor: In<Descriptor>) -> Outcome {
    let Descriptor { width, height, format, channels } = descriptor.get()?;
    allocate(array, Descriptor3D { width, height, depth: 0, format, channels, flags: 0 }, 1)
}

/// `cuArray3DCreate`.
pub fn create_3d(array: Out<Handle>, descriptor: In<Descriptor3D>) -> Outcome {
    allocate(array, descriptor.get()?, 1)
}

/// `cuMipmappedArrayCreate`.
pub fn create_mipmapped(array: Out<Handle>, descriptor: In<Descriptor3D>, levels: u32) -> Outcome {
    allocate(array, descriptor.get()?, levels)
}

/// Each level is half as large as the one before in every direction. Of the flags, none is simulated.
fn allocate(array: Out<Handle>, of: Descriptor3D, levels: u32) -> Outcome {
    let channel = match of.format {
        0x01 | 0x08 => 1,        // 8 bits
        0x02 | 0x09 | 0x10 => 2, // 16 bits
        0x03 | 0x0a | 0x20 => 4, // 32 bits
        _ => return Err(INVALID_VALUE),
    };
    if of.width == 0 || of.flags != 0 || levels == 0 || !matches!(of.channels, 1 | 2 | 4) {
        return Err(INVALID_VALUE);
    }
    let elements = |level: u32| [of.width, of.height, of.depth].iter().map(|length| (length >> level).max(1)).product::<usize>();
    let bytes = (0..levels.min(usize::BITS)).map(elements).sum::<usize>() * channel * of.channels as usize;
    memory::allocate(array, bytes)
}

/// `cuArrayDestroy` and `cuMipmappedArrayDestroy`.
pub fn destroy(array: Address) -> Outcome {
    if array == 0 { Err(INVALID_VALUE) } else { memory::free(array) }
}
