//! Records of what happens in this process: the event log ([`trace`]), the report when memory runs out ([`out_of_memory`]), what stays in use
//! after each pause (`residue`), sums over pauses and resumes (`totals`), and the watch over free memory ([`watch`]).
//!
//! All of it follows from the events of [`vramctl_core`], which works the same without it. [`subscribe`] connects the two.

mod allowance;
mod nccl;
pub mod out_of_memory;
mod residue;
mod totals;
pub mod trace;
pub mod watch;
mod watermark;

use vramctl_control::protocol::{Reply, Request};
use vramctl_core::events::{self, Event, Subscriber};
use vramctl_model::{Cycle, Status};

/// From now on, events are recorded.
pub fn subscribe() {
    static SUBSCRIBER: Subscriber = Subscriber { hear, complete, answer };
    events::subscribe(&SUBSCRIBER);
}

fn hear(event: Event<'_>) {
    match event {
        Event::Changed(change, owner, device, bytes, presence) => {
            watermark::changed(change, device, bytes);
            trace::changed(change, owner, device, bytes, presence);
        }
        Event::IsThere(owner, device, bytes, presence) => trace::note_presence(owner, device, bytes, presence),
        Event::Failed(request) => {
            trace::failed(&request);
            out_of_memory::failed(request);
        }
        Event::Succeeded { bytes, is_piece } => out_of_memory::succeeded(bytes as u64, is_piece),
        Event::WaitBegun => out_of_memory::wait_begun(),
        Event::WaitEnded => out_of_memory::wait_ended(),
        Event::FreeBegun => out_of_memory::free_begun(),
        Event::FreeEnded => out_of_memory::free_ended(),
        Event::HasMemory => watch::ensure_running(),
        Event::Began(verb) => trace::began(verb),
        Event::Stage(stage, took) => trace::stage(stage, took),
        Event::Ended(verb, outcome, took) => {
            trace::ended(verb, outcome, took);
            totals::ended(verb, outcome);
            residue::ended(verb, outcome);
        }
        Event::Trimmed(bytes, took) => trace::trimmed(bytes, took),
        Event::MayHaveMoved => trace::may_have_moved(),
        Event::NcclFailed(function, error) => nccl::failed(function, error),
    }
}

fn complete(status: &mut Status) {
    status.cycles = residue::cycles();
    status.growing = Cycle::growing(&status.cycles);
    status.totals = totals::so_far();
}

fn answer(request: Request) -> Option<Reply> {
    match request {
        Request::Events { since, most } => Some(Reply::Events(trace::since(since, most))),
        Request::Record => Some(trace::begin()),
        Request::Counted { gpus } => {
            residue::counted(gpus);
            Some(Reply::Counted)
        }
        Request::Watch { below_bytes, trim } => {
            if let Some(below) = below_bytes {
                watch::set(below, trim);
            }
            let (below_bytes, trim) = watch::get();
            Some(Reply::Watch { below_bytes, trim })
        }
        _ => None,
    }
}
