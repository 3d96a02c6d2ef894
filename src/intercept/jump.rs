//! Functions of the loader's that depend on their caller: what `RTLD_NEXT`, `RTLD_DEFAULT` and a library's search path mean. So ours do not
//! call the real ones but jump to them, which leaves the program's return address in place.

use std::ffi::c_void;
use std::ptr;

/// What becomes of such a call. Returned in two registers.
#[repr(C)]
pub struct Ruling {
    /// The answer, if `onward` is null.
    answer: *mut c_void,
    /// The real function to jump to, as if this library were not there; or null.
    onward: *mut c_void,
}

impl Ruling {
    pub fn answer(answer: *mut c_void) -> Self {
        Self { answer, onward: ptr::null_mut() }
    }

    pub fn onward(real: *mut c_void) -> Self {
        Self { answer: ptr::null_mut(), onward: real }
    }
}

/// A function of up to three arguments. `$judge` gets what is in the three registers, then the return address.
macro_rules! jumps {
    ($name:ident($($argument:ident: $type:ty),*) => $judge:ident) => {
        /// The C library's function of this name.
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> *mut c_void {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                ".cfi_startproc",
                "mov rcx, [rsp]",
                "push rdi",
                ".cfi_adjust_cfa_offset 8",
                "push rsi",
                ".cfi_adjust_cfa_offset 8",
                "push rdx", // Also aligns the stack.
                ".cfi_adjust_cfa_offset 8",
                "call {judge}",
                "mov r11, rdx",
                "pop rdx",
                ".cfi_adjust_cfa_offset -8",
                "pop rsi",
                ".cfi_adjust_cfa_offset -8",
                "pop rdi",
                ".cfi_adjust_cfa_offset -8",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                "2: ret",
                ".cfi_endproc",
                judge = sym $judge,
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
                "mov x3, x30",
                "bl {judge}",
                "cbz x1, 2f",
                "mov x16, x1",
                "ldp x0, x1, [sp, #16]",
                "ldr x2, [sp, #32]",
                "ldp x29, x30, [sp], #48",
                "br x16",
                "2: ldp x29, x30, [sp], #48",
                "ret",
                ".cfi_endproc",
                judge = sym $judge,
            );
        }
    };
}
pub(crate) use jumps;
