//! Modules, functions and launches of known kernels: the digest of `src/backup/digest/kernel.cu`, the copy of
//! `src/backup/copier/kernel.cu`, those that wait ([`crate::waiting`]), and any that does nothing. Programs load their PTX, as with a real driver; what runs is a
//! reimplementation here that follows the kernel step by step.

use crate::abi::{Address, Handle, In, Out};
use crate::codes::{ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, MISALIGNED_ADDRESS, NOT_FOUND, NOT_SUPPORTED, Outcome};
use crate::context::{self, Context};
use crate::copy::{self, Work};
use crate::device;
use crate::driver::{self, machine, settings, state};
use crate::host;
use crate::stream::{self, Ticket};
use crate::vmm::{self, Piece, READ, READ_WRITE};
use crate::waiting::{Collective, Persistent};
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::slice;
use std::sync::Arc;

/// A known kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kernel {
    Digest,
    Copy,
    Collective,
    Persistent,
    /// Does nothing.
    Empty,
}

impl Kernel {
    /// The kernel behind an entry point, if it is known.
    fn of(text: &str, name: &str) -> Option<Self> {
        match name {
            "vramctl_digest" => Some(Self::Digest),
            "vramctl_copy" => Some(Self::Copy),
            "simgpu_collective" => Some(Self::Collective),
            "simgpu_persistent" => Some(Self::Persistent),
            _ => text.contains(&format!(".entry {name}() {{ ret; }}")).then_some(Self::Empty),
        }
    }

    /// Threads per block: what the kernel is written for, although the driver itself would accept fewer.
    fn threads(self) -> Option<u32> {
        match self {
            Self::Digest => Some(THREADS as u32),
            Self::Copy => Some(512),
            Self::Collective | Self::Persistent | Self::Empty => None,
        }
    }
}

#[derive(Debug)]
struct Module {
    context: Handle,
    text: String,
    code: Code,
}

/// Device memory of code, until dropped.
#[derive(Debug)]
pub struct Code(usize, u64);

impl Code {
    /// Loads some onto a device.
    pub fn load(device: usize) -> Outcome<Self> {
        let bytes = settings().code_bytes;
        device::take(device, bytes)?;
        Ok(Self(device, bytes))
    }

    /// Loads more of it.
    fn load_more(&mut self) -> Outcome {
        device::take(self.0, settings().code_bytes)?;
        self.1 += settings().code_bytes;
        Ok(())
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        if let Ok(machine) = machine() {
            machine.give(self.0, self.1);
        }
    }
}

/// A function of a module.
#[derive(Debug)]
struct Function {
    kernel: Kernel,
    home: Handle,
    /// Whether its code is on the device: lazy loading puts it there at the first launch.
    is_loaded: bool,
}

/// This process's modules and functions.
#[derive(Debug, Default)]
pub struct Modules {
    loaded: HashMap<Handle, Module>,
    /// By handle.
    functions: HashMap<Handle, Function>,
    /// What is being compiled.
    linkers: HashMap<Handle, CString>,
}

impl Modules {
    /// Drops the modules of a destroyed context.
    pub fn forget_context(&mut self, context: Handle) {
        self.loaded.retain(|_, module| module.context != context);
    }

    /// Number of loaded modules.
    pub fn live(&self) -> usize {
        self.loaded.len()
    }

    /// A function's kernel and context. Loads it if it is not loaded yet.
    fn function(&mut self, function: Handle) -> Outcome<(Kernel, Handle)> {
        let function = self.functions.get_mut(&function).ok_or(INVALID_HANDLE)?;
        let module = self.loaded.get_mut(&function.home).ok_or(INVALID_HANDLE)?;
        if !function.is_loaded {
            module.code.load_more()?;
            function.is_loaded = true;
        }
        Ok((function.kernel, module.context))
    }
}

/// `cuModuleLoadData`, for PTX only. Waits for the context's work, and holds up its other calls meanwhile.
pub fn load(module: Out<Handle>, image: In<c_char>) -> Outcome {
    module.required()?;
    let text = image.text().map_err(|_| INVALID_IMAGE)?;
    if !text.lines().any(|line| line.starts_with(".version")) {
        return Err(INVALID_IMAGE);
    }
    let context = context::current()?;
    let pending = state().streams.pending(context.handle);
    context.wait_alone(&pending);
    context.check()?;
    let handle = driver::new_handle();
    let loaded = Module { context: context.handle, text: text.to_owned(), code: Code::load(context.device)? };
    state().modules.loaded.insert(handle, loaded);
    module.put(handle)
}

/// `cuLinkCreate`. Compiling touches no context, and waits for nothing.
pub fn create_linker(linker: Out<Handle>) -> Outcome {
    linker.required()?;
    let handle = driver::new_handle();
    state().modules.linkers.insert(handle, CString::default());
    linker.put(handle)
}

/// `cuLinkAddData`, for one PTX module.
pub fn add_to_linker(linker: Handle, kind: u32, data: In<c_char>) -> Outcome {
    const PTX: u32 = 1;
    let text = data.text().map_err(|_| INVALID_IMAGE)?;
    if kind != PTX {
        return Err(NOT_SUPPORTED);
    }
    *state().modules.linkers.get_mut(&linker).ok_or(INVALID_HANDLE)? = CString::new(text).map_err(|_| INVALID_IMAGE)?;
    Ok(())
}

/// `cuLinkComplete`: the image is the text itself, and lives as long as the linker.
pub fn link(linker: Handle, image: Out<*const c_char>, bytes: Out<usize>) -> Outcome {
    let state = state();
    let text = state.modules.linkers.get(&linker).ok_or(INVALID_HANDLE)?;
    image.put(text.as_ptr())?;
    bytes.put(text.as_bytes_with_nul().len())
}

/// `cuLinkDestroy`.
pub fn destroy_linker(linker: Handle) -> Outcome {
    state().modules.linkers.remove(&linker).map(drop).ok_or(INVALID_HANDLE)
}

/// `cuModuleUnload`: waits for the work of the module's context, but holds nobody up.
pub fn unload(module: Handle) -> Outcome {
    let home = state().modules.loaded.get(&module).ok_or(INVALID_HANDLE)?.context;
    let pending = state().streams.pending(home);
    Ticket::wait_all(&pending);
    let modules = &mut state().modules;
    modules.functions.retain(|_, function| function.home != module);
    modules.loaded.remove(&module).map(drop).ok_or(INVALID_HANDLE)
}

/// `cuModuleGetFunction`: an entry point that exists in the module but is not a known kernel is "not supported".
pub fn get_function(function: Out<Handle>, module: Handle, name: In<c_char>) -> Outcome {
    function.required()?;
    let name = name.text()?;
    let modules = &mut state().modules;
    let home = modules.loaded.get(&module).ok_or(INVALID_HANDLE)?;
    if !home.text.contains(&format!(".entry {name}(")) {
        return Err(NOT_FOUND);
    }
    let kernel = Kernel::of(&home.text, name).ok_or(NOT_SUPPORTED)?;
    let handle = driver::new_handle();
    modules.functions.insert(handle, Function { kernel, home: module, is_loaded: false });
    function.put(handle)
}

/// `cuLaunchKernel`: reads the arguments before it returns. Addresses are checked when the kernel runs.
pub fn launch(
    function: Handle,
    blocks: [u32; 3],
    threads: [u32; 3],
    handle: Handle,
    arguments: In<*const c_void>,
    extra: usize,
) -> Outcome {
    if extra != 0 {
        return Err(NOT_SUPPORTED);
    }
    let (kernel, context) = state().modules.function(function)?;
    if blocks[0] == 0 || blocks[1..] != [1, 1] || kernel.threads().is_some_and(|wanted| threads != [wanted, 1, 1]) {
        return Err(INVALID_VALUE);
    }
    let work = match kernel {
        Kernel::Digest => Work::Kernel(Launch::Digest(Digests::of_arguments(arguments, blocks[0])?)),
        Kernel::Copy => Work::Kernel(Launch::Copy(Copy::of_arguments(arguments)?)),
        Kernel::Collective => Work::Kernel(Launch::Collective(collective_of(arguments)?)),
        Kernel::Persistent => Work::Kernel(Launch::Persistent(persistent_of(arguments)?)),
        Kernel::Empty => Work::Marker,
    };
    loop {
        let mut state = state();
        let stream = stream::find(&mut state, handle)?;
        if context != stream.context.handle {
            return Err(INVALID_HANDLE);
        }
        let Some(first) = stream.first_if_full() else { return stream::submit(&mut state, &stream, work).map(drop) };
        drop(state);
        stream.context.wait_alone(&[first]);
    }
}

/// The arguments of a launch, each a pointer to a value.
fn arguments_of(arguments: In<*const c_void>, count: usize) -> Outcome<Vec<*const c_void>> {
    let arguments = arguments.get_all(count)?;
    if arguments.iter().any(|argument| argument.is_null()) { Err(INVALID_VALUE) } else { Ok(arguments) }
}

fn collective_of(arguments: In<*const c_void>) -> Outcome<Collective> {
    let arguments = arguments_of(arguments, 4)?;
    // SAFETY: CUDA's contract: each argument points to a value of its parameter's type in the kernel.
    let collective = unsafe {
        Collective {
            communicator: arguments[0].cast::<u64>().read_unaligned(),
            rank: arguments[1].cast::<u32>().read_unaligned() as usize,
            ranks: arguments[2].cast::<u32>().read_unaligned() as usize,
            address: arguments[3].cast::<Address>().read_unaligned(),
        }
    };
    collective.check().map(|()| collective)
}

fn persistent_of(arguments: In<*const c_void>) -> Outcome<Persistent> {
    let arguments = arguments_of(arguments, 3)?;
    // SAFETY: as above.
    unsafe {
        Ok(Persistent {
            word: arguments[0].cast::<Address>().read_unaligned(),
            address: arguments[1].cast::<Address>().read_unaligned(),
            bytes: arguments[2].cast::<u64>().read_unaligned() as usize,
        })
    }
}

/// A launch of a known kernel.
#[derive(Clone, Debug)]
pub enum Launch {
    /// The digest.
    Digest(Digests),
    /// The copy.
    Copy(Copy),
    /// A collective between processes.
    Collective(Collective),
    /// One that ends when it is told to.
    Persistent(Persistent),
}

impl Launch {
    /// Runs the kernel. As for copies, the memory must stay mapped from start to end.
    pub fn run(&self, context: &Context) -> Outcome {
        match self {
            Self::Digest(launch) => launch.run(context),
            Self::Copy(launch) => launch.run(context),
            Self::Collective(launch) => launch.run(context),
            Self::Persistent(launch) => launch.run(context),
        }
    }
}

/// A launch of the copy.
#[derive(Clone, Debug)]
pub struct Copy {
    from: Address,
    to: Address,
    bytes: usize,
}

impl Copy {
    fn of_arguments(arguments: In<*const c_void>) -> Outcome<Self> {
        let arguments = arguments_of(arguments, 3)?;
        // SAFETY: CUDA's contract: each argument points to a value of its parameter's type in the kernel.
        unsafe {
            Ok(Self {
                from: arguments[0].cast::<Address>().read_unaligned(),
                to: arguments[1].cast::<Address>().read_unaligned(),
                bytes: 16 * arguments[2].cast::<u64>().read_unaligned() as usize,
            })
        }
    }

    fn find(&self, context: &Context) -> Outcome<Vec<Piece>> {
        if !(self.from | self.to).is_multiple_of(16) {
            return Err(MISALIGNED_ADDRESS);
        }
        let state = state();
        // Kernels can access only pinned host memory.
        let (base, bytes) = state.host.find(self.from).ok_or(ILLEGAL_ADDRESS)?;
        if self.from + self.bytes as u64 > base + bytes as u64 {
            return Err(ILLEGAL_ADDRESS);
        }
        state.space.touch(self.to, self.bytes, context.device, READ_WRITE)
    }

    fn run(&self, context: &Context) -> Outcome {
        if self.bytes == 0 {
            return Ok(());
        }
        let mappings = |pieces: &[Piece]| pieces.iter().map(|piece| piece.mapping).collect::<Vec<_>>();
        let at_first = mappings(&self.find(context)?);
        copy::delay();
        let pieces = self.find(context)?;
        let mut from = self.from;
        let end = copy::take_link(host::Direction::FromHost, self.bytes);
        for piece in &pieces {
            let _touching = vmm::touching();
            host::transfer(host::Direction::FromHost, piece.physical.backing.at(piece.offset), from, piece.bytes)?;
            from += piece.bytes as u64;
        }
        copy::arrive(end);
        if mappings(&self.find(context)?) == at_first { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
    }
}

/// A launch of the digest.
#[derive(Clone, Debug)]
pub struct Digests {
    key: Arc<Key>,
    pieces: Address,
    results: Address,
    count: usize,
}

/// The memory of a launch, looked up at one moment.
struct Found {
    addresses: Vec<Piece>,
    contents: Vec<Vec<Piece>>,
    digests: Vec<Piece>,
}

impl Found {
    fn mappings(&self) -> Vec<u64> {
        [&self.addresses, &self.digests].into_iter().chain(&self.contents).flatten().map(|piece| piece.mapping).collect()
    }
}

impl Digests {
    fn of_arguments(arguments: In<*const c_void>, blocks: u32) -> Outcome<Self> {
        let arguments = arguments_of(arguments, 4)?;
        // SAFETY: CUDA's contract: each argument points to a value of its parameter's type in the kernel.
        unsafe {
            Ok(Self {
                key: Arc::new(arguments[0].cast::<Key>().read_unaligned()),
                pieces: arguments[1].cast::<Address>().read_unaligned(),
                results: arguments[2].cast::<Address>().read_unaligned(),
                count: blocks.min(arguments[3].cast::<u32>().read_unaligned()) as usize,
            })
        }
    }

    fn find(&self, context: &Context) -> Outcome<Found> {
        let state = state();
        let touch = |address: Address, bytes, alignment, access| {
            if !address.is_multiple_of(alignment) {
                return Err(MISALIGNED_ADDRESS);
            }
            state.space.touch(address, bytes, context.device, access)
        };
        let addresses = touch(self.pieces, 8 * self.count, 8, READ)?;
        let contents = gather(&addresses)
            .chunks_exact(8)
            .map(|address| touch(address.iter().rev().fold(0, |address, byte| address << 8 | Address::from(*byte)), PIECE, 16, READ))
            .collect::<Outcome<_>>()?;
        Ok(Found { addresses, contents, digests: touch(self.results, 16 * self.count, 16, READ_WRITE)? })
    }

    fn run(&self, context: &Context) -> Outcome {
        let at_first = self.find(context)?.mappings();
        copy::delay();
        let found = self.find(context)?;
        let digests: Vec<u8> = found
            .contents
            .iter()
            .flat_map(|contents| {
                let contents = gather(contents);
                self.key.halves.each_ref().map(|half| half.digest(&contents).to_le_bytes())
            })
            .flatten()
            .collect();
        scatter(&digests, &found.digests);
        if self.find(context)?.mappings() == at_first { Ok(()) } else { Err(ILLEGAL_ADDRESS) }
    }
}

/// Reads consecutive pieces.
fn gather(pieces: &[Piece]) -> Vec<u8> {
    let _touching = vmm::touching();
    let mut bytes = Vec::new();
    for piece in pieces {
        // SAFETY: part of a backing that the piece keeps alive.
        bytes.extend_from_slice(unsafe { slice::from_raw_parts(piece.physical.backing.at(piece.offset), piece.bytes) });
    }
    bytes
}

fn scatter(mut bytes: &[u8], pieces: &[Piece]) {
    let _touching = vmm::touching();
    for piece in pieces {
        let (part, rest) = bytes.split_at(piece.bytes);
        // SAFETY: writes to part of a backing that the piece keeps alive.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.physical.backing.at(piece.offset), part.len()) };
        bytes = rest;
    }
}

const THREADS: usize = 256;
const VECTORS: usize = 16;
const GROUPS: usize = 32;
const SUMS: usize = 2;
const PIECE: usize = 16 * VECTORS * GROUPS * THREADS;
const PRIME: u64 = (1 << 61) - 1;

/// The kernel's parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Key {
    halves: [Half; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Half {
    sums: [[u32; 4 * VECTORS]; SUMS],
    point: u64,
}

/// The kernel's arithmetic, without the final reduction: results are up to 2^61 + 2.
fn step(value: u64, point: u64, next: u64) -> u64 {
    let product = u128::from(value) * u128::from(point);
    let sum = (product as u64 & PRIME) + (product >> 61) as u64 + (next & PRIME) + (next >> 61);
    (sum & PRIME) + (sum >> 61)
}

impl Half {
    /// Each thread has a word of four in each row. The threads' sums are side by side, so that the compiler vectorises.
    fn digest(&self, piece: &[u8]) -> u64 {
        let mut values = vec![0; THREADS];
        for group in piece.chunks_exact(16 * THREADS * VECTORS) {
            let mut sums = [[0u64; THREADS]; SUMS];
            for (vector, row) in group.chunks_exact(16 * THREADS).enumerate() {
                for (sums, keys) in sums.iter_mut().zip(&self.sums) {
                    let keys: [u32; 4] = std::array::from_fn(|word| keys[4 * vector + word]);
                    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<16>().0) {
                        let keyed = |word: usize| {
                            let bytes = [bytes[4 * word], bytes[4 * word + 1], bytes[4 * word + 2], bytes[4 * word + 3]];
                            u64::from(u32::from_le_bytes(bytes).wrapping_add(keys[word]))
                        };
                        *sum = sum.wrapping_add(keyed(0) * keyed(1)).wrapping_add(keyed(2) * keyed(3));
                    }
                }
            }
            for sums in sums {
                values.iter_mut().zip(sums).for_each(|(value, sum)| *value = step(*value, self.point, sum));
            }
        }
        let mut power = self.point;
        for _ in 0..(GROUPS * SUMS).ilog2() {
            power = step(power, power, 0);
        }
        while values.len() > 1 {
            values = values.chunks_exact(2).map(|pair| step(pair[0], power, pair[1])).collect();
            power = step(power, power, 0);
        }
        if values[0] >= PRIME { values[0] - PRIME } else { values[0] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds that the kernel relies on, at its extreme inputs.
    #[test]
    fn steps_are_right_and_stay_small() {
        let small = [0, 1, 2, PRIME - 1, PRIME, PRIME + 1, PRIME + 3];
        for value in small {
            for point in small {
                for next in [0, 1, PRIME - 1, PRIME, PRIME + 1, 8 * PRIME, u64::MAX - 1, u64::MAX] {
                    let right = (u128::from(value) * u128::from(point) + u128::from(next)) % u128::from(PRIME);
                    let stepped = step(value, point, next);
                    assert!(stepped <= PRIME + 3, "{value} {point} {next}: {stepped}");
                    assert_eq!(u128::from(stepped % PRIME), right, "{value} {point} {next}");
                }
            }
        }
    }
}
