//! What CUDA says of virtual memory: its properties, and who may access it. Plain data.

use super::extras::Extras;
use super::{CUdevice, Driver};
use cudarc::driver::sys::{CUmemAccess_flags, CUmemAllocationType, CUmemLocationType};
use vramctl_model::{StatusCode, code};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`: memory that can be passed to other processes by file descriptor.
pub(super) const BY_DESCRIPTOR: u32 = 1;

/// `CU_MEM_CREATE_USAGE_HW_DECOMPRESS` (CUDA 12.8): virtual memory needs it for the device's decompression engine, unlike plain memory.
const FOR_DECOMPRESSION: u16 = 2;

/// What physical memory is to be: `CUmemAllocationProp` with numbers in place of enumerations, because a program may use values
/// that are newer than this library.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    pub(super) location: Location,
    /// Only used on Windows.
    metadata: usize,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    kind: u32,
    id: i32,
}

impl Location {
    fn of_device(device: CUdevice) -> Self {
        Self { kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32, id: device }
    }

    /// The device; `None` for host memory and the like.
    pub fn device(self) -> Option<CUdevice> {
        (self == Self::of_device(self.id)).then_some(self.id)
    }

    /// Whether it is the host, at whichever node.
    pub fn is_host(self) -> bool {
        // `CU_MEM_LOCATION_TYPE_HOST` and `…_HOST_NUMA` (CUDA 12.2).
        matches!(self.kind, 2 | 3)
    }
}

impl Properties {
    /// Device memory.
    pub(super) fn of_device(device: CUdevice, extras: Extras) -> Self {
        Self {
            kind: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
            handle_types: if extras.shareable { BY_DESCRIPTOR } else { 0 },
            location: Location::of_device(device),
            metadata: 0,
            compression: 0,
            rdma: extras.rdma.into(),
            usage: if extras.decompression { FOR_DECOMPRESSION } else { 0 },
            reserved: [0; 4],
        }
    }

    /// The device whose plain memory this describes; `None` for host memory, tile pools and whatever else exists.
    pub fn device(&self) -> Option<CUdevice> {
        self.location.device().filter(|_| self.is_plain())
    }

    /// Whether this describes plain memory of the host.
    pub fn is_on_host(&self) -> bool {
        self.location.is_host() && self.is_plain()
    }

    fn is_plain(&self) -> bool {
        self.kind == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32 && self.usage & !FOR_DECOMPRESSION == 0
    }

    /// Whether other processes can import the memory by descriptor.
    pub fn is_by_descriptor(&self) -> bool {
        self.handle_types & BY_DESCRIPTOR != 0
    }

    /// The kinds of handles by which it can be shared, as bits.
    pub fn handle_types(&self) -> u32 {
        self.handle_types
    }
}

/// Who may access a mapping: `CUmemAccessDesc`, with numbers in place of enumerations as in [`Properties`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Whose access.
    pub location: Location,
    flags: u32,
}

impl Access {
    /// Full access for a device.
    pub fn of_device(device: CUdevice) -> Self {
        Self { location: Location::of_device(device), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32 }
    }

    /// No access for a device.
    pub fn none(device: CUdevice) -> Self {
        Self { flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32, ..Self::of_device(device) }
    }

    /// Whether the device may read and write.
    pub fn is_full_for(self, device: CUdevice) -> bool {
        self == Self::of_device(device)
    }

    /// Whether the location may do anything.
    pub fn is_any(self) -> bool {
        self.flags != CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32
    }

    /// The driver's answer to this access to memory of a device: it cannot be asked while the memory is not mapped.
    pub fn check(self, owner: CUdevice) -> Result<(), StatusCode> {
        const KNOWN: [CUmemAccess_flags; 3] = [
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        ];
        if KNOWN.iter().all(|flags| *flags as u32 != self.flags) {
            return Err(code::INVALID_VALUE);
        }
        let Some(device) = self.location.device() else { return Err(code::NOT_SUPPORTED) };
        let mut can = i32::from(device == owner);
        if can == 0 {
            // SAFETY: `can` is writable; an unknown device is an error.
            let asked = Driver::get().and_then(|driver| unsafe { driver.cuDeviceCanAccessPeer(&raw mut can, device, owner) });
            asked.map_err(|_| code::INVALID_VALUE)?;
        }
        // Programs report this answer where the devices have no path to each other.
        if can == 0 { Err(code::INVALID_DEVICE) } else { Ok(()) }
    }

    /// The bits, as `cuMemGetAccess` reports them.
    pub fn flags(self) -> u64 {
        u64::from(self.flags)
    }
}
