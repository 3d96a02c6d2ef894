//! What an entry is: a function that the program calls in place of the driver's or NCCL's.

use crate::real::Symbol;
use crate::table::{Effect, Flavour};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use vramctl_host::symbols::Loaded;

/// A line of the table.
#[derive(Debug)]
pub struct DriverFunction {
    /// What it does.
    pub effect: Effect,
    /// Its symbol.
    pub symbol: &'static CStr,
    /// Its name for `cuGetProcAddress`.
    pub name: &'static str,
    /// The CUDA version that introduced it.
    pub version: c_int,
    /// Its flavour.
    pub flavour: Flavour,
    /// The number of its arguments.
    pub arguments: usize,
    /// The function that the program gets instead.
    pub entry: *const c_void,
    /// What the entry calls.
    pub original: &'static Symbol,
}

// SAFETY: a function's address is the same for all threads.
unsafe impl Sync for DriverFunction {}

impl DriverFunction {
    /// Whether the caller is the library whose function the entry calls: another interposer after this library, or a stand-in for the driver.
    /// It is looking for the function that its own one forwards to. If it got the entry, the two would call each other forever.
    pub(crate) fn is_behind(&self, caller: *const c_void) -> bool {
        let own = Loaded::around(caller).and_then(|library| library.symbol(self.symbol)).and_then(NonNull::new);
        own.is_some() && own == self.original.address()
    }
}

/// A symbol of the table.
pub(crate) const fn symbol(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("no NUL in a symbol"),
    }
}

/// Appends the return address to the arguments, in the register after the last argument's.
#[cfg(target_arch = "x86_64")]
macro_rules! pass_caller {
    () => {
        "mov rdi, [rsp]"
    };
    // `cudaIpcOpenMemHandle`: the handle is on the stack.
    (pointer handle flags) => {
        "mov rdx, [rsp]"
    };
    // `cudaMalloc3D`: the extent is on the stack.
    (pitched extent) => {
        "mov rsi, [rsp]"
    };
    // `ncclCommInitRank…`: the unique id is on the stack.
    (communicator ranks unique rank) => {
        "mov rcx, [rsp]"
    };
    (communicator ranks unique rank config) => {
        "mov r8, [rsp]"
    };
    ($a:ident) => {
        "mov rsi, [rsp]"
    };
    ($a:ident $b:ident) => {
        "mov rdx, [rsp]"
    };
    ($a:ident $b:ident $c:ident) => {
        "mov rcx, [rsp]"
    };
    ($a:ident $b:ident $c:ident $d:ident) => {
        "mov r8, [rsp]"
    };
    ($a:ident $b:ident $c:ident $d:ident $e:ident) => {
        "mov r9, [rsp]"
    };
    // All registers are in use, so it goes onto the stack, and the call returns here: backtraces pass through.
    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident) => {
        "push qword ptr [rsp]\n .cfi_adjust_cfa_offset 8\n call {to}\n add rsp, 8\n .cfi_adjust_cfa_offset -8\n ret"
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {to}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! pass_caller {
    () => {
        "mov x0, x30"
    };
    ($a:ident) => {
        "mov x1, x30"
    };
    ($a:ident $b:ident) => {
        "mov x2, x30"
    };
    ($a:ident $b:ident $c:ident) => {
        "mov x3, x30"
    };
    ($a:ident $b:ident $c:ident $d:ident) => {
        "mov x4, x30"
    };
    ($a:ident $b:ident $c:ident $d:ident $e:ident) => {
        "mov x5, x30"
    };
    ($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident) => {
        "mov x6, x30"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {to}"
    };
}

pub(crate) use {jump, pass_caller};
