//! Has the programs of a host share its GPUs by themselves (`vramctl run --share`).
//!
//! Each `vramctl run --share` leaves a *keeper*: a process that ends with the last process of its run (`leave`, `keep`). One keeper of a
//! directory of control sockets has the *office* (`office`): it is the scheduler. It connects to each program that shares, the *members*
//! (`member`), and translates: what they say and hold becomes events of the pure policy (`vramctl-scheduler`), and the policy's actions
//! become orders to members, and pauses, resumes and swaps of the coordinator (`change`). If it dies or stands still, another keeper takes the
//! office, with the next *epoch*, and asks all members again, which have kept what the last one left with them (`memo`); members refuse what a
//! scheduler of an older epoch asks for.

mod books;
mod change;
mod growth;
mod keep;
mod leave;
mod member;
mod memo;
mod news;
mod node;
mod office;
mod totals;
mod view;

pub use keep::keep;
pub use leave::leave;
pub use totals::Totals;
pub use view::{ChangeView, MemberView, Place, PolicyView, View, ask, stranded};
