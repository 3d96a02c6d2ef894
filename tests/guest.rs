//! Moments of a program at which the preloaded library must not be noticed.
#![allow(missing_docs)]

mod common;

use common::machine::{Machine, Rank};
use common::programs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::process::Stdio;

impl Rank {
    /// Waits until it has ended well. Returns what it has written to its standard error.
    #[track_caller]
    fn ends(mut self) -> String {
        let (mut text, mut errors) = (String::new(), String::new());
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        self.output.read_to_string(&mut text).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {text}{errors}");
        errors
    }
}

/// An exit in a signal handler that has interrupted `malloc` would hang if an exit handler needed memory. Reports that are held back,
/// because the program would try again, are made all the same.
#[test]
fn a_program_that_exits_in_malloc_ends_with_its_reports() {
    let machine = Machine::new();
    // The name of torch's allocator, which tries again.
    let torch = machine.folder.path().join("libc10_cuda.so");
    symlink(programs().join("guest"), &torch).unwrap();
    let mut program = machine.start("ends", torch.to_str().unwrap(), |command| {
        command.arg("exit-in-malloc").stderr(Stdio::piped());
    });
    let socket = machine.folder.path().join(format!("sockets/{}.sock", program.pid()));
    // From the first hold on, there is an exit handler for that, too.
    machine.vramctl("pause").expect(0, "", "");
    machine.vramctl("resume").expect(0, "", "");
    assert!(socket.exists());
    program.tell("end");
    let said = program.ends();
    // Three at once, as the rate limit wants it.
    assert_eq!(said.matches("out of memory: libc10_cuda.so asked for 1024.00 GiB").count(), 3, "{said}");
    assert!(said.contains("2 other requests have failed") && !said.contains("more requests"), "{said}");
    assert!(!socket.exists());
}
