//! The words that all layers share: what is said of memory ([`Backup`], tags), what can be asked for ([`TransitionRequest`]) and what
//! came of it ([`Report`], [`Error`]), what there is ([`Status`]).
//!
//! This crate knows no other crate of the project, calls nobody and holds no state.

mod error;
mod failure;
mod holder;
mod plan;
mod policy;
mod report;
mod span;
mod status;
mod units;

pub use error::{Error, Kind, Shortage};
pub use failure::{Failure, StatusCode, code};
pub use holder::Holder;
pub use plan::{HostRoom, Plan, TagPlan};
pub use policy::{Backup, DEFAULT_TAG, LONGEST_TAG, checked_tag};
pub use report::{Observer, Progress, Report, Stage, TransitionRequest};
pub use span::Span;
pub use status::{DeviceStatus, HostStatus, Status, TagState, TagStatus};
pub use units::{Bytes, parse_bytes};
