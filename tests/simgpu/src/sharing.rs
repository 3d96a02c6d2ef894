//! Memory that several processes of a machine use: shareable handles of `cuMemCreate`, and `cuIpc*` for plain memory.
//!
//! Shared memory is in an anonymous file whose name says which machine and device it belongs to. A shareable handle is a descriptor
//! of that file. An IPC handle names the descriptor of the process that made it, and other processes open that through `/proc`.

use crate::abi::{Address, Handle, IpcHandle, Out};
use crate::codes::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, OPERATING_SYSTEM, Outcome, UNKNOWN};
use crate::context;
use crate::driver::{self, machine, state};
use crate::machine::{Key, Tie};
use crate::vmm::{HANDLE_TYPE_FILE, Home, Physical, Purpose};
use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use vramctl_host::system::{folder_of, own_folder};

/// Memory opened with `cuIpcOpenMemHandle`, by address, with how often it was opened.
pub type Opened = BTreeMap<Address, (Key, usize)>;

const MAGIC: &[u8; 8] = b"simgpu\0\x02";
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, without which driver 580 opens nothing.
const LAZY: u32 = 1;

/// A new file for memory.
pub fn memory_file(name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: a NUL-terminated name; the new descriptor is owned by the `File`.
    unsafe {
        let descriptor = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if descriptor < 0 { Err(io::Error::last_os_error()) } else { Ok(File::from_raw_fd(descriptor)) }
    }
}

/// The beginning of the names of this machine's files.
fn prefix() -> Outcome<String> {
    let (device, inode) = machine()?.identity();
    Ok(format!("simgpu-{device}-{inode}-"))
}

/// The end of the name of a file with the host's memory.
const HOST: &str = "host";

/// Whose memory a file holds; `None` if it is no memory of this machine.
fn home_of(file: &File) -> Option<Home> {
    let name = std::fs::read_link(own_folder().join(format!("fd/{}", file.as_raw_fd()))).ok()?;
    let rest = name.to_str()?.strip_prefix(&format!("/memfd:{}", prefix().ok()?))?;
    let rest = rest.split(' ').next()?;
    if rest == HOST {
        return Some(Home::Host);
    }
    driver::device(rest.parse().ok()?).ok().and_then(|device| Some(Home::Device(machine().ok()?.ordinal(device))))
}

/// The same for what can only be on a device.
fn device_of(file: &File) -> Option<usize> {
    if let Home::Device(device) = home_of(file)? { Some(device) } else { None }
}

/// The name of the file that holds memory.
pub fn name_of(physical: &Physical) -> Outcome<String> {
    match physical.home {
        Home::Device(device) => Ok(format!("{}{}", prefix()?, machine()?.place(device))),
        Home::Host => Ok(format!("{}{HOST}", prefix()?)),
    }
}

/// `cuMemExportToShareableHandle`.
pub fn export(shared: Out<c_int>, handle: Handle, kind: u32, flags: u64) -> Outcome {
    shared.required()?;
    if kind != HANDLE_TYPE_FILE || flags != 0 {
        return Err(INVALID_VALUE);
    }
    let physical =
        state().space.created_as(handle).filter(|physical| physical.handle_types() & HANDLE_TYPE_FILE != 0).ok_or(INVALID_VALUE)?;
    let file = physical.share(&name_of(&physical)?)?;
    // SAFETY: touches no memory.
    let copy = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 { Err(OPERATING_SYSTEM) } else { shared.put(copy) }
}

/// `cuMemImportFromShareableHandle`. Each import gives a new handle. The descriptor stays the caller's.
pub fn import(handle: Out<Handle>, shared: usize, kind: u32) -> Outcome {
    handle.required()?;
    if kind != HANDLE_TYPE_FILE {
        return Err(INVALID_VALUE);
    }
    let file = duplicate(shared)?;
    let home = home_of(&file).ok_or(UNKNOWN)?;
    let new = driver::new_handle();
    let physical = Physical::import(new, home, file, Tie::Imported)?;
    state().space.add_handle(physical);
    handle.put(new)
}

/// `cuIpcGetMemHandle`: only for `cuMemAlloc` memory of this process. All addresses of an allocation give the same handle.
pub fn get(handle: Out<IpcHandle>, address: Address) -> Outcome {
    handle.required()?;
    let range = state().space.find(address).ok_or(INVALID_VALUE)?;
    if !matches!(range.purpose, Purpose::Plain { pool: None, .. }) {
        return Err(INVALID_VALUE);
    }
    handle.put(name(address)?)
}

/// Says where other processes find the file that holds the memory at an address.
pub fn name(address: Address) -> Outcome<IpcHandle> {
    let physical = state().space.physical(address).ok_or(INVALID_VALUE)?;
    let file = physical.share(&name_of(&physical)?)?;
    physical.is_tied(Tie::Opened);
    let metadata = file.metadata().map_err(|_| OPERATING_SYSTEM)?;
    let mut reserved = [0; 64];
    reserved[..8].copy_from_slice(MAGIC);
    reserved[8..16].copy_from_slice(&metadata.dev().to_le_bytes());
    reserved[16..24].copy_from_slice(&metadata.ino().to_le_bytes());
    reserved[24..28].copy_from_slice(&std::process::id().to_le_bytes());
    reserved[28..32].copy_from_slice(&file.as_raw_fd().to_le_bytes());
    Ok(IpcHandle { reserved })
}

/// What a handle says: the file's key, and the process and descriptor where it is. Not for a handle of this process.
fn parse(handle: IpcHandle) -> Outcome<(Key, u32, u32)> {
    let bytes = handle.reserved;
    let wide = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    if &bytes[..8] != MAGIC {
        return Err(INVALID_VALUE);
    }
    let (pid, descriptor) = (wide(24) as u32, (wide(24) >> 32) as u32);
    if pid == std::process::id() { Err(INVALID_CONTEXT) } else { Ok(((wide(8), wide(16)), pid, descriptor)) }
}

/// The memory that a handle names.
fn opened((key, pid, descriptor): (Key, u32, u32)) -> Outcome<Arc<Physical>> {
    let file = File::options().read(true).write(true).open(folder_of(pid).join(format!("fd/{descriptor}"))).map_err(|_| INVALID_HANDLE)?;
    let metadata = file.metadata().map_err(|_| INVALID_HANDLE)?;
    if (metadata.dev(), metadata.ino()) != key {
        return Err(INVALID_HANDLE);
    }
    let device = device_of(&file).ok_or(INVALID_HANDLE)?;
    Physical::import(0, Home::Device(device), file, Tie::Opened)
}

/// Memory of another process's pool, at a new address in the current context.
pub fn import_pooled(data: IpcHandle, pool: Handle) -> Outcome<Address> {
    let context = context::current()?;
    let physical = opened(parse(data)?)?;
    state().space.open(physical, Purpose::Plain { context: context.owner(), pool: Some(pool) })
}

/// The descriptor of a new file that says which device a pool is on.
pub fn pool_file(device: usize) -> Outcome<c_int> {
    let file = memory_file(&format!("{}{}", prefix()?, machine()?.place(device))).map_err(|_| OPERATING_SYSTEM)?;
    Ok(file.into_raw_fd())
}

/// The device in such a file.
pub fn device_of_pool(shared: usize) -> Outcome<usize> {
    device_of(&duplicate(shared)?).ok_or(UNKNOWN)
}

/// The descriptor stays the caller's.
fn duplicate(shared: usize) -> Outcome<File> {
    let descriptor = i32::try_from(shared).map_err(|_| UNKNOWN)?;
    // SAFETY: only duplicated, which fails if it is not open.
    unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().map(File::from).map_err(|_| UNKNOWN)
}

/// `cuMemGetHandleForAddressRange`: a descriptor for whole pages of memory that any device can access. The simulated one is good for
/// nothing.
pub fn range_handle(shared: Out<c_int>, address: Address, bytes: usize, kind: u32, flags: u64) -> Outcome {
    /// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
    const DMA_BUF: u32 = 1;
    const PAGE: u64 = 4096;
    shared.required()?;
    if kind != DMA_BUF || flags != 0 || bytes == 0 || !address.is_multiple_of(PAGE) || !(bytes as u64).is_multiple_of(PAGE) {
        return Err(INVALID_VALUE);
    }
    {
        let state = state();
        let (mut at, end) = (address, address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?);
        while at < end {
            let range = state.space.find(at).filter(|range| range.accessible).ok_or(INVALID_VALUE)?;
            at = range.base + range.bytes as u64;
        }
    }
    shared.put(memory_file("simgpu-dma-buf").map_err(|_| OPERATING_SYSTEM)?.into_raw_fd())
}

/// `cuIpcOpenMemHandle`: memory that is open already has the same address again.
pub fn open(pointer: Out<Address>, handle: IpcHandle, flags: u32) -> Outcome {
    pointer.required()?;
    let context = context::current()?;
    if flags != LAZY {
        return Err(INVALID_VALUE);
    }
    let named = parse(handle)?;
    let (key, ..) = named;
    let mut state = state();
    let state = &mut *state;
    // What was open in a context that has been reset is gone.
    state.opened.retain(|address, _| state.space.is_open(*address));
    if let Some((address, (_, count))) = state.opened.iter_mut().find(|(_, (other, _))| *other == key) {
        *count += 1;
        return pointer.put(*address);
    }
    let address = state.space.open(opened(named)?, Purpose::Opened { context: context.owner() })?;
    state.opened.insert(address, (key, 1));
    pointer.put(address)
}

/// `cuIpcCloseMemHandle`: as often as it was opened. Waits for the context's work, and holds up its other calls meanwhile.
pub fn close(address: Address) -> Outcome {
    let (context, pending) = {
        let state = state();
        let owner = state.space.opened_in(address).ok_or(INVALID_VALUE)?;
        (state.contexts.get(owner)?, state.streams.pending(owner))
    };
    context.wait_alone(&pending);
    let mut state = state();
    if !state.space.is_open(address) {
        return Err(INVALID_VALUE);
    }
    let (_, count) = state.opened.get_mut(&address).ok_or(INVALID_VALUE)?;
    *count -= 1;
    if *count == 0 {
        state.opened.remove(&address);
        state.space.release_plain(address);
    }
    Ok(())
}
