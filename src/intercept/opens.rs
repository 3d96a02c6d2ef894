//! `dlopen` and `dlmopen`: what the program opens so that its calls pass by this library is noted, and nothing else changes. With a call,
//! this library would appear to be the caller, to which the search for the library is relative. So these are jumps.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::{panic, ptr};
use vramctl_host::{opens, symbols};

/// The names of this module's functions, which are exported.
pub const OPENERS: [&str; 2] = ["dlopen", "dlmopen"];

macro_rules! noted {
    ($name:ident($($argument:ident: $type:ty),*) => $note:ident) => {
        /// The C library's function of this name.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> *mut c_void {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                ".cfi_startproc",
                "push rdi",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "push rdx",
                ".cfi_adjust_cfa_offset 8",
                "call {note}",
                "pop rdx",
                ".cfi_adjust_cfa_offset -8",
                "pop rsi",
                ".cfi_adjust_cfa_offset -8",
                "pop rdi",
                ".cfi_adjust_cfa_offset -8",
                "test rax, rax",
                "jz 2f",
                "jmp rax",
                "2: ret",
                ".cfi_endproc",
                note = sym $note,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, #-48]!",
                ".cfi_def_cfa_offset 48",
                ".cfi_offset 29, -48",
                ".cfi_offset 30, -40",
                "stp x0, x1, [sp, #16]",
                "str x2, [sp, #32]",
                "bl {note}",
                "mov x16, x0",
                "cbz x16, 2f",
                "ldp x0, x1, [sp, #16]",
                "ldr x2, [sp, #32]",
                "ldp x29, x30, [sp], #48",
                "br x16",
                "2: ldp x29, x30, [sp], #48",
                "ret",
                ".cfi_endproc",
                note = sym $note,
            );
        }
    };
}

noted!(dlopen(name: *const c_char, flags: c_int) => note);
noted!(dlmopen(namespace: c_long, name: *const c_char, flags: c_int) => note_elsewhere);

/// The real function to jump to.
unsafe extern "C" fn note(name: *const c_char, flags: c_int) -> *mut c_void {
    // SAFETY: the program promises that the name is null or NUL-terminated.
    let _ = panic::catch_unwind(|| unsafe { opens::note(name, flags) });
    symbols::next_dlopen().unwrap_or(ptr::null_mut())
}

/// The same for `dlmopen`.
unsafe extern "C" fn note_elsewhere(namespace: c_long, name: *const c_char, flags: c_int) -> *mut c_void {
    let _ = panic::catch_unwind(|| opens::note_elsewhere(namespace, name, flags));
    symbols::next_dlmopen().unwrap_or(ptr::null_mut())
}
