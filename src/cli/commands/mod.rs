//! The commands: each has its options, asks the coordinator or the processes, and prints. None uses another.

pub mod completions;
pub mod coordinate;
pub mod doctor;
pub mod gpus;
pub mod image_init;
pub mod keeper;
pub mod load;
pub mod metrics;
pub mod operate;
pub mod pause;
pub mod ps;
pub mod python_path;
pub mod ray;
pub mod relocate;
pub mod resume;
pub mod run;
pub mod save;
pub mod set_tag;
pub mod share;
pub mod status;
pub mod suspend;
pub mod swap;
pub mod top;
pub mod trace;
pub mod trim;
pub mod watch;
