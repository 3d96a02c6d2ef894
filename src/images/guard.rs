//! What lets a stopped program go on if the command dies: a child that waits for the end of the command and of CRIU.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The child, until this is dropped. While it lives, the death of this process has the program continued.
pub struct Guard {
    tell: File,
    child: libc::pid_t,
}

impl Guard {
    /// Starts the child. It watches no process yet.
    pub fn start() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: two numbers, writable.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else's.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: the child only makes system calls, and never returns.
        match unsafe { libc::fork() } {
            0 => watch(read.as_raw_fd(), write.as_raw_fd()),
            -1 => Err(io::Error::last_os_error()),
            child => Ok(Self { tell: write.into(), child }),
        }
    }

    /// From now on, this process is continued if this one dies and whoever else has [`held_open`](Self::held_open).
    pub fn watch(&mut self, pid: u32) -> io::Result<()> {
        self.tell.write_all(&pid.to_ne_bytes())
    }

    /// Open in each process whose end the child waits for.
    pub fn held_open(&self) -> RawFd {
        self.tell.as_raw_fd()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // It has nothing to do any more.
        // SAFETY: touches no memory; the child is ours until it is waited for.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, std::ptr::null_mut(), 0);
        }
    }
}

/// The child: reads whom to continue, and does so when nobody can tell it any more.
fn watch(told: RawFd, other: RawFd) -> ! {
    let mut watched = -1;
    // SAFETY: system calls alone, with memory of this function.
    unsafe {
        // ^C is for the command.
        libc::setsid();
        libc::close(other);
        let mut pid = 0_u32;
        loop {
            let got = libc::read(told, (&raw mut pid).cast(), size_of::<u32>());
            if got == size_of::<u32>() as isize {
                watched = libc::syscall(libc::SYS_pidfd_open, pid, 0) as libc::c_int;
            } else if got == 0 || *libc::__errno_location() != libc::EINTR {
                break;
            }
        }
        if watched >= 0 {
            libc::syscall(libc::SYS_pidfd_send_signal, watched, libc::SIGCONT, std::ptr::null::<libc::siginfo_t>(), 0);
        }
        libc::_exit(0)
    }
}
