//! `libvramctl.so`: takes the GPU memory of a running, unmodified program away and gives it back at the same addresses.
//!
//! The library is preloaded into the program (`LD_PRELOAD`), serves its CUDA allocation calls with virtual memory that it
//! tracks by tag, and listens on a Unix socket. *Pausing* a tag saves (or discards) its contents and releases its physical memory
//! to the driver. *Resuming* it maps new physical memory at the same addresses and restores the contents. No address changes, so
//! CUDA graphs and captured pointers stay valid.
//!
//! This crate only exports the symbols; `ARCHITECTURE.md` shows the way to the code behind them.

use std::arch::naked_asm;
use std::panic;
use vramctl_host::weak;
use vramctl_intercept::{entries, hooks, launch, nccl, opens, resolve};

/// An exported name: a jump to the function behind it, which therefore sees the call exactly as the program made it, including the return
/// address.
macro_rules! export {
    ($name:ident, $to:path) => {
        /// See the function behind it.
        ///
        /// # Safety
        /// As the function of this name that programs expect.
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!("jmp {to}", to = sym $to);
            #[cfg(target_arch = "aarch64")]
            naked_asm!("b {to}", to = sym $to);
        }
    };
}

macro_rules! runtime {
    ($($effect:ident $name:ident $flavour:ident $arguments:tt $handler:tt;)*) => { $( export!($name, hooks::$name); )* };
}
vramctl_intercept::hooked_functions!(runtime);

macro_rules! driver {
    ($($effect:ident $symbol:ident $name:literal $version:literal $flavour:ident $arguments:tt $handler:tt;)*) => {
        $( export!($symbol, entries::$symbol); )*
    };
}
vramctl_intercept::driver_functions!(driver);

macro_rules! gated {
    ($($effect:ident $symbol:ident $name:literal $version:literal $flavour:ident $arguments:tt;)*) => { $( export!($symbol, launch::$symbol); )* };
}
vramctl_intercept::gated_functions!(gated);

macro_rules! of_nccl {
    ($($symbol:ident $arguments:tt -> $answer:ty => $handler:ident;)*) => { $( export!($symbol, nccl::$symbol); )* };
}
vramctl_intercept::nccl_functions!(of_nccl);

export!(dlsym, resolve::dlsym);
export!(dlvsym, resolve::dlvsym);
export!(dlerror, resolve::dlerror);
export!(dlopen, opens::dlopen);
export!(dlmopen, opens::dlmopen);

#[global_allocator]
static ALLOCATOR: vramctl_host::allocator::Allocator = vramctl_host::allocator::Allocator;

/// Runs when the library is loaded: three system calls.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        vramctl_host::schedule::remember();
    }
    at_load
};

vramctl_host::own_thread_exit!();

/// The loader calls this before anything of the program's runs.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let _ = panic::catch_unwind(|| weak::release(resolve::is_exported));
}
