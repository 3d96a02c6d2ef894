//! The vocabulary that all layers share: policies ([`Policy`], tags), requests ([`PauseRequest`], [`ResumeRequest`]), their results
//! ([`Report`], [`Error`]) and the current state ([`Status`]).
//!
//! This crate depends on no other crate of the project and holds no state.

mod cache;
mod communicator;
mod durations;
mod error;
mod event;
mod failure;
mod holder;
mod kind;
mod limit;
mod member;
mod obstacle;
mod plan;
mod policy;
mod refusal;
mod registration;
mod report;
mod request;
mod residue;
mod span;
mod status;
pub mod support;
mod totals;
mod units;
mod verb;

pub use cache::{Cached, Trimmed};
pub use communicator::Communicator;
pub use durations::Durations;
pub use error::{Error, Shortage};
pub use event::{Events, Happening, MemoryOwner, OwnersBytes, TraceEvent};
pub use failure::{Failure, StatusCode, code};
pub use holder::{Borrowed, Holder, Lent};
pub use kind::{Kind, Surface};
pub use limit::{Limit, OverLimit, Share, Shown};
pub use member::{Amount, Amounts, Class, Holdings, MemberState, Order, Remembered, SharePriority, Sharing, Want};
pub use obstacle::{GpuUse, Obstacle, ObstacleKind};
pub use plan::{GpuPlan, HandOver, HostRoom, Moving, Plan, TagPlan};
pub use policy::{DEFAULT_TAG, LONGEST_TAG, Policy, Registered, checked_name, checked_tag};
pub use refusal::RefusingDevice;
pub use registration::Registration;
pub use report::{Observer, Report};
pub use request::{
    NCCL, Needed, NoOther, Participants, PauseOptions, PauseRequest, ResumeRequest, Selection, SetAside, SwapIn, SwapOut, Transition,
};
pub use residue::{Cycle, Growth, OF_DRIVER};
pub use span::Span;
pub use status::{Caller, DeviceStatus, HostStatus, Standing, Status, TagStatus, Unmanaged};
pub use totals::Totals;
pub use units::{Bytes, gpu_in_words, is_zero, milliseconds, parse_bytes, short_uuid, unmanaged_of};
pub use verb::{Progress, Stage, TagState, Verb};
