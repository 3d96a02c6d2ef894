//! The devices: count, names and attributes.

use crate::abi::{In, Out, Uuid};
use crate::codes::{INVALID_VALUE, OUT_OF_MEMORY, Outcome};
use crate::context;
use crate::driver::{self, machine, settings};
use std::ffi::{c_char, c_int};
use std::fmt::Write as _;

/// `cuDeviceGetCount`.
pub fn count(count: Out<i32>) -> Outcome {
    count.put(machine()?.visible() as i32)
}

/// `cuDeviceGet`.
pub fn get(device: Out<i32>, ordinal: i32) -> Outcome {
    driver::device(ordinal)?;
    device.put(ordinal)
}

/// `cuDeviceGetName`.
pub fn name(name: Out<c_char>, room: c_int, device: i32) -> Outcome {
    driver::device(device)?;
    name.put_text(&model_name(machine()?.model()), room)
}

/// What all devices of a machine are called.
pub fn model_name(model: u64) -> String {
    if model == 0 { "Simulated GPU".into() } else { format!("Simulated GPU {model}") }
}

/// `cuDeviceGetUuid`.
pub fn uuid(uuid: Out<Uuid>, device: i32) -> Outcome {
    let machine = machine()?;
    uuid.put(Uuid { bytes: uuid_bytes(machine.serial(), machine.place(driver::device(device)?)) })
}

/// The UUID of a device of the machine with this serial number.
pub fn uuid_bytes(serial: u64, device: usize) -> [u8; 16] {
    let mut bytes = *b"simulated-gpu-00";
    // People and messages shorten UUIDs to their first group.
    bytes[2] = bytes[2].wrapping_add(serial as u8);
    bytes[3] += device as u8;
    bytes[15] += device as u8;
    bytes
}

/// A device's UUID as NVML and nvidia-smi print it.
pub fn uuid_text(serial: u64, device: usize) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in uuid_bytes(serial, device).iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The simulated PCI bus number of a device.
pub fn bus(device: usize) -> u32 {
    0x10 + device as u32
}

/// `cuDeviceGetPCIBusId`: still that of the first device after a restore onto another.
pub fn pci_bus_id(text: Out<c_char>, room: c_int, device: i32) -> Outcome {
    let device = driver::device(device)?;
    text.put_text(&format!("0000:{:02X}:00.0", bus(machine()?.first_place(device))), room)
}

/// The device with this PCI bus id, with or without the domain.
pub fn by_pci_bus_id(text: &str) -> Option<usize> {
    let bus_text = text.rsplit(':').nth(1)?;
    let number = u32::from_str_radix(bus_text, 16).ok()?;
    let devices = machine().ok()?.devices();
    (0..devices).find(|&device| bus(device) == number)
}

/// `cuDeviceGetByPCIBusId`.
pub fn get_by_pci_bus_id(device: Out<i32>, text: In<c_char>) -> Outcome {
    let (wanted, machine) = (by_pci_bus_id(text.text()?).ok_or(INVALID_VALUE)?, machine()?);
    let found = (0..machine.visible()).find(|&ordinal| machine.first_place(ordinal) == wanted);
    device.put(found.ok_or(INVALID_VALUE)? as i32)
}

/// `cuDeviceTotalMem`.
pub fn total_memory(bytes: Out<usize>, device: i32) -> Outcome {
    driver::device(device)?;
    bytes.put(machine()?.memory() as usize)
}

/// `cuMemGetInfo`, for the current context's device.
pub fn memory_info(free: Out<usize>, total: Out<usize>) -> Outcome {
    let machine = machine()?;
    let device = machine.place(context::current()?.device);
    free.put_if_given((machine.memory() - machine.used(device)) as usize);
    total.put_if_given(machine.memory() as usize);
    Ok(())
}

/// Constant device attributes, by `CUdevice_attribute`. The others are computed.
const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024),       // MAX_THREADS_PER_BLOCK
    (2, 1024),       // MAX_BLOCK_DIM_X
    (3, 1024),       // MAX_BLOCK_DIM_Y
    (4, 64),         // MAX_BLOCK_DIM_Z
    (5, i32::MAX),   // MAX_GRID_DIM_X
    (6, 65535),      // MAX_GRID_DIM_Y
    (7, 65535),      // MAX_GRID_DIM_Z
    (8, 48 << 10),   // MAX_SHARED_MEMORY_PER_BLOCK
    (10, 32),        // WARP_SIZE
    (11, i32::MAX),  // MAX_PITCH
    (12, 65536),     // MAX_REGISTERS_PER_BLOCK
    (13, 1_000_000), // CLOCK_RATE
    (14, 512),       // TEXTURE_ALIGNMENT
    (16, 16),        // MULTIPROCESSOR_COUNT
    (19, 1),         // CAN_MAP_HOST_MEMORY
    (31, 1),         // CONCURRENT_KERNELS
    (40, 2),         // ASYNC_ENGINE_COUNT
    (41, 1),         // UNIFIED_ADDRESSING
    (51, 32),        // TEXTURE_PITCH_ALIGNMENT
    (75, 9),         // COMPUTE_CAPABILITY_MAJOR
    (76, 0),         // COMPUTE_CAPABILITY_MINOR
    (78, 1),         // STREAM_PRIORITIES_SUPPORTED
    (83, 1),         // MANAGED_MEMORY
    (91, 1),         // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    (99, 1),         // HOST_REGISTER_SUPPORTED
    (115, 1),        // MEMORY_POOLS_SUPPORTED
    (134, -1),       // HOST_NUMA_ID: none
];

/// `cuDeviceGetAttribute`. Attributes not listed are 0: the simulated device lacks the feature.
pub fn attribute(value: Out<i32>, attribute: i32, device: i32) -> Outcome {
    const PCI_BUS_ID: i32 = 33;
    const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
    const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
    const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: i32 = 110;
    const MPS_ENABLED: i32 = 133;
    const MEM_DECOMPRESS_ALGORITHM_MASK: i32 = 136;
    let device = driver::device(device)?;
    value.put(match attribute {
        PCI_BUS_ID => bus(device) as i32,
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED | GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => i32::from(!settings().no_vmm),
        HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => i32::from(!settings().no_vmm && !settings().no_sharing),
        MEM_DECOMPRESS_ALGORITHM_MASK => i32::from(settings().decompression),
        MPS_ENABLED => i32::from(settings().mps),
        attribute if attribute <= 0 => return Err(INVALID_VALUE),
        attribute => ATTRIBUTES.iter().find(|(known, _)| *known == attribute).map_or(0, |&(_, value)| value),
    })
}

/// Takes capacity of a device, or fails with the driver's out-of-memory code.
pub fn take(device: usize, bytes: u64) -> Outcome {
    if machine()?.take(device, bytes) { Ok(()) } else { Err(OUT_OF_MEMORY) }
}
