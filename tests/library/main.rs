//! The library inside the test process, on the simulated GPU: most tests hold the one [`common::Gpu`] and call the hooked functions themselves. In one
//! test program, because to build, lint and link one for each of these files takes longer than most of their tests.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, clippy::missing_transmute_annotations)]

#[path = "../common/mod.rs"]
mod common;

mod abi;
mod addresses;
mod amounts;
mod copier;
mod guard;
mod hand_over;
mod hold;
mod host_memory;
mod interpose;
mod ledger;
mod nccl;
mod obstacles;
mod prefix_cache;
mod stream_ordered;
mod tms;
mod unmanaged;
