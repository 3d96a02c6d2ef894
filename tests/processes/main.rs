//! Programs under the library, and the command line, on simulated machines: each test has a machine of its own, and its programs are processes.
//! In one test program, because to build and lint one for each of these files takes longer than most of their tests.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod cli;
mod communicators;
mod deepbind;
mod descriptors;
mod differential;
mod disturbed;
mod guest;
mod imports;
mod job;
mod limit;
mod metrics;
mod nodes;
mod preloading;
mod programs;
mod reach;
mod refusals;
mod runtimes;
mod shared;
mod sharing;
mod swap;
mod taking_turns;
mod top;
mod trace;
mod waiting;
mod watch;
