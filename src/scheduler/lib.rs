//! Decides which programs have their memory on the GPUs: who is idle gives way, who calls comes back.
//!
//! A pure function of what happens: [`State::step`] takes an [`Event`] and the time, and returns [`Action`]s and when it wants to be woken.
//! No clock, thread, socket or file. Whoever runs it carries the actions out, tells how they ended, and refuses those of an older
//! scheduler.
//!
//! To read it: names (`ids.rs`), what a program has (`memory.rs`), what is told (`event.rs`), what is wanted (`action.rs`), what is known
//! (`state.rs`) and left for the next scheduler (`remembered.rs`), what that means for programs that stay or go together (`gangs.rs`). Then
//! the loop (`step.rs`): in the order of `order.rs`, each waiter gets the room that is there, or that those give who may (`victims.rs`) and
//! whose contents have a place (`host.rs`). `events.rs` is what the events change.
//!
//! # What holds
//!
//! `tests/simulation` checks this after every event of a node in virtual time, with programs that do all that programs do:
//!
//! 1. Resident, fixed and promised bytes never exceed a GPU, nor contents the host. Gangs are whole before they run.
//! 2. There is no state with a waiter that could be served but neither action nor timer.
//! 3. A waiter waits at most for the turns of those ahead, with their changes and drains.
//! 4. Changes take at most 1/k of busy time, plus drains, and plus what single ones took longer than those before.
//! 5. Nobody leaves where there is room, and no more than is missing and one allocation. A program is out of memory only if its request
//!    never fits, or nobody could give way for [`Policy::wait`].
//!
//! # The policy
//!
//! - Whoever calls comes back; whoever allocates more than there is waits for room. First come those with a blocked rank, then a higher
//!   priority, then those who ask for more in their turn, then the oldest (`order.rs` says why).
//! - Those give way, in this order, that are away already, that wait behind, that are idle, that are of a lower priority, whose turn is
//!   over. Of their memory goes what is missing, the cheapest first; where the host is short of room, what has no contents goes first of
//!   all of them. In its turn, an idle program is safe for as long as bringing it back would take.
//! - A turn begins when a change has brought a program in, and its length is fixed then: k times what the change took. So each change is
//!   paid for by the turn after it, and a waiter knows for how long it waits. What a change took beyond what its bytes should take counts
//!   only if two of the last three did so: the first is dearer than those that follow, where the host's memory has not been touched. Who
//!   gets room without a change has a slice. While a program waits for more in its turn, it is not idle; but it gives way to those that
//!   wait before it, since it can do nothing meanwhile.
//! - Whoever cannot be served by anybody holds nobody up: younger waiters pass, since they give way again once it can be served.
//! - A program that did not drain is left alone for 10 s, then for 20, up to 300.
//! - Gangs of several parts are active beside each other on a GPU only if their limits, or peaks so far, fit together: a gang of which one
//!   part waits for room and others spin cannot drain, and two of these would wait for each other.

mod action;
mod event;
mod events;
mod gangs;
mod host;
mod ids;
mod memory;
mod order;
mod policy;
mod remembered;
mod state;
mod step;
mod victims;

pub use action::{Action, Because, Cause, Change, Leave, Refusal, Why};
pub use event::{Activity, Asked, Event, Outcome, Report, Settings};
pub use ids::{AskId, ChangeId, GangId, GpuId, JobId, Priority, ProgramId};
pub use memory::{Class, Holdings, Memory, PerGpu};
pub use policy::Policy;
pub use remembered::{Paces, Remembered};
pub use state::{Books, State};
pub use step::Step;
