//! A keeper's life: it waits for the office or for the end of its run.

use crate::node::Node;
use crate::office::Office;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_control::client::Client;
use vramctl_control::discovery::Directory;

/// How long a run may take until its first process is found by its control socket.
const FIRST_PROCESS_WITHIN: Duration = Duration::from_secs(10);

/// Keeps a run: `pid`, which began it, and all processes that say that they belong to it. Ends this process once they have ended.
pub fn keep(run: &str, pid: u32) -> io::Result<()> {
    end_with_run(run.to_owned(), pid);
    loop {
        // Somebody may have deleted it; members make it again.
        let directory = Directory::open_or_create_again()?;
        if let Some(office) = Office::wait_for(&directory)? {
            Node::new(directory, office)?.serve()?;
        }
    }
}

fn end_with_run(run: String, pid: u32) {
    thread::spawn(move || {
        let begun = Instant::now();
        wait_for_end(pid);
        // Its children may live on.
        loop {
            let alive = members_of(&run);
            if alive.is_empty() && begun.elapsed() > FIRST_PROCESS_WITHIN {
                break;
            }
            if alive.is_empty() {
                thread::sleep(Duration::from_millis(500));
            }
            alive.into_iter().for_each(wait_for_end);
        }
        // A scheduler holds nothing that needs an end.
        std::process::exit(0);
    });
}

fn members_of(run: &str) -> Vec<u32> {
    let Ok(Some(directory)) = Directory::open() else { return Vec::new() };
    let of_run = |pid: &u32| Client::greet(&directory, *pid).is_ok_and(|(_, hello)| hello.run.as_deref() == Some(run));
    directory.processes().unwrap_or_default().into_iter().filter(of_run).collect()
}

/// Waits until a process has ended.
fn wait_for_end(pid: u32) {
    // SAFETY: touches no memory. The descriptor is this function's own.
    let file = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if file < 0 {
        // It has ended; or the kernel has no such call, or this is another PID namespace.
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            thread::sleep(Duration::from_secs(1));
        }
        return;
    }
    // SAFETY: just opened.
    let file = unsafe { File::from_raw_fd(file as libc::c_int) };
    let mut wanted = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure.
    while unsafe { libc::poll(&raw mut wanted, 1, -1) } < 1 {}
}
