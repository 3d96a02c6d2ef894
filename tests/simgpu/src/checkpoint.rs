//! The driver's checkpoint of a process, requested by another process.
//!
//! A locked process's calls wait. A checkpointed process has nothing on any device; its contents are in its own host memory, where they
//! always are in this simulation. The state is in the machine's shared state: [`crate::machine`].

use crate::abi::{In, Out, Uuid};
use crate::codes::{INVALID_VALUE, OPERATING_SYSTEM, Outcome};
use crate::driver::{machine, settings};
use std::time::Duration;
use vramctl_host::system::has_main_thread;

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LockArgs {
    timeout_ms: u32,
    reserved: u32,
    reserved_too: [u64; 7],
}

/// `CUcheckpointCheckpointArgs` and `CUcheckpointUnlockArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NoArgs {
    reserved: [u64; 8],
}

/// `CUcheckpointGpuPair`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GpuPair {
    old: Uuid,
    new: Uuid,
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RestoreArgs {
    pairs: In<GpuPair>,
    count: u32,
    reserved: [u8; 44],
    reserved_too: u64,
}

const _: () = assert!(size_of::<LockArgs>() == 64 && size_of::<NoArgs>() == 64 && size_of::<RestoreArgs>() == 64);

/// CUDA 13.0 (driver 580), which is the first that restores processes on other devices.
const FIRST_THAT_MOVES: i32 = 13_000;

fn given<T: Copy>(args: In<T>) -> Option<T> {
    args.get().ok()
}

/// The driver asks the process's main thread: without it, it answers this (driver 580).
fn process(pid: i32) -> Outcome<u32> {
    let pid = u32::try_from(pid).map_err(|_| INVALID_VALUE)?;
    if has_main_thread(pid) { Ok(pid) } else { Err(OPERATING_SYSTEM) }
}

/// `cuCheckpointProcessGetState`.
pub fn state(pid: i32, state: Out<u32>) -> Outcome {
    state.required()?;
    state.put(machine()?.state_of(process(pid)?)? as u32)
}

/// `cuCheckpointProcessGetRestoreThreadId`: the main thread's; that of [`crate::restore_thread`] calls nothing.
pub fn restore_thread(pid: i32, thread: Out<i32>) -> Outcome {
    machine()?.state_of(process(pid)?)?;
    thread.put(pid)
}

/// `cuCheckpointProcessLock`.
pub fn lock(pid: i32, args: In<LockArgs>) -> Outcome {
    let args = given(args);
    if args.is_some_and(|args| args.reserved != 0 || args.reserved_too != [0; 7]) {
        return Err(INVALID_VALUE);
    }
    let limit = args.map(|args| args.timeout_ms).filter(|&limit| limit > 0);
    machine()?.lock_process(process(pid)?, limit.map(|limit| Duration::from_millis(limit.into())))
}

fn checked(args: In<NoArgs>) -> Outcome {
    if given(args).is_some_and(|args| args.reserved != [0; 8]) { Err(INVALID_VALUE) } else { Ok(()) }
}

/// `cuCheckpointProcessCheckpoint`.
pub fn checkpoint(pid: i32, args: In<NoArgs>) -> Outcome {
    checked(args)?;
    machine()?.checkpoint_process(process(pid)?)
}

/// `cuCheckpointProcessRestore`: with pairs, each device of the machine of the checkpoint must be in them.
pub fn restore(pid: i32, args: In<RestoreArgs>) -> Outcome {
    let machine = machine()?;
    let Some(args) = given(args) else { return machine.restore_process(process(pid)?, &[]) };
    if args.reserved != [0; 44] || args.reserved_too != 0 {
        return Err(INVALID_VALUE);
    }
    // Before, all of it was reserved, and had to be zero.
    if args.count > 0 && settings().cuda < FIRST_THAT_MOVES {
        return Err(INVALID_VALUE);
    }
    let pairs = if args.count == 0 { Vec::new() } else { args.pairs.get_all(args.count as usize)? };
    let pairs: Vec<_> = pairs.into_iter().map(|pair| (pair.old.bytes, pair.new.bytes)).collect();
    machine.restore_process(process(pid)?, &pairs)
}

/// `cuCheckpointProcessUnlock`.
pub fn unlock(pid: i32, args: In<NoArgs>) -> Outcome {
    checked(args)?;
    machine()?.unlock_process(process(pid)?)
}
