//! Leaves a keeper behind.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Starts a keeper for the run that the process `pid` begins: this one, which is about to become the program, or its child. The keeper is nobody's
/// child, has a session of its own and none of this process's descriptors: the program, its parent, a pipe behind it and a batch system do not see
/// it.
pub fn leave(run: &OsStr, pid: u32) -> io::Result<()> {
    let mut keeper = Command::new("/proc/self/exe");
    keeper.args(["keeper", "--run"]).arg(run).arg("--pid").arg(pid.to_string());
    keeper.stdin(Stdio::null()).stdout(Stdio::null()).current_dir("/");
    // For those who look for a fault in it.
    match env::var_os("VRAMCTL_KEEPER_LOG").and_then(|path| std::fs::File::options().append(true).create(true).open(path).ok()) {
        Some(file) => keeper.stderr(file),
        None => keeper.stderr(Stdio::null()),
    };
    keeper.env("VRAMCTL_DIR", vramctl_config::socket_directory());
    // Of the program's libraries it needs none. Tests have it see a host as small as the program's.
    match env::var_os("VRAMCTL_KEEPER_PRELOAD") {
        Some(library) => keeper.env("LD_PRELOAD", library),
        None => keeper.env_remove("LD_PRELOAD"),
    };
    // SAFETY: only calls that are safe after a fork.
    unsafe {
        keeper.pre_exec(|| {
            // Signals as at the start of a program. `Command` resets the mask and SIGPIPE.
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGCHLD, libc::SIGUSR1, libc::SIGUSR2] {
                libc::signal(signal, libc::SIG_DFL);
            }
            libc::setsid();
            // CLOSE_RANGE_CLOEXEC, from Linux 5.11 on.
            if libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 4) != 0 {
                let most = libc::sysconf(libc::_SC_OPEN_MAX).clamp(256, 65536) as libc::c_int;
                (3..most).for_each(|file| _ = libc::fcntl(file, libc::F_SETFD, libc::FD_CLOEXEC));
            }
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => Ok(()),
                _ => libc::_exit(0),
            }
        })
    };
    keeper.spawn()?.wait().map(drop)
}
