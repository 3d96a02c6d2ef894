//! Prepares a program so that an image can be made of it later.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The number of `io_uring_setup`, the same for all processors.
const IO_URING_SETUP: u32 = 425;
/// What a filter sees of a call: where its number is, and its processor's kind.
const NUMBER_AT: u32 = 0;
const KIND_AT: u32 = 4;
#[cfg(target_arch = "x86_64")]
const KIND: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const KIND: u32 = 0xC000_00B7;

/// Has the program that this command becomes find no `io_uring`, which CRIU does not save; libraries that ask for one do without. If its session began
/// outside of this container, it gets one of its own.
pub fn prepare(command: &mut Command) {
    // SAFETY: the closure only makes system calls, and allocates nothing.
    unsafe { command.pre_exec(|| begin_session().and_then(|()| refuse_io_uring())) };
}

fn begin_session() -> io::Result<()> {
    // SAFETY: takes no pointers. The leader of a session that began elsewhere is 0.
    let done = unsafe { libc::getsid(0) != 0 || libc::setsid() >= 0 };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has `io_uring_setup` answer that there is no such call, in this process and in all that it becomes and starts.
fn refuse_io_uring() -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const ANSWER: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let mut steps = [
        step(LOAD, KIND_AT, 0, 0),
        step(IF_EQUAL, KIND, 0, 3),
        step(LOAD, NUMBER_AT, 0, 0),
        step(IF_EQUAL, IO_URING_SETUP, 0, 1),
        step(ANSWER, libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(), 0, 0),
        step(ANSWER, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: a filter of so many steps, which the kernel copies.
    let set = || unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter) } == 0;
    // Without the right to set one, only a process that never gets more rights may.
    // SAFETY: touches no memory.
    if set() || unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0 && set() {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
