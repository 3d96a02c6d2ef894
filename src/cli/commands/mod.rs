//! The commands: each has its options, asks the coordinator or the processes, and prints.

pub mod doctor;
mod each;
pub mod gpus;
pub mod ledger;
pub mod metrics;
pub mod operate;
mod places;
mod preloading;
pub mod ps;
pub mod python_path;
pub mod ray;
pub mod relocate;
pub mod run;
pub mod status;
pub mod suspend;
pub mod swap;
pub mod tag;
pub mod trace;
pub mod transition;
pub mod trim;
pub mod watch;
