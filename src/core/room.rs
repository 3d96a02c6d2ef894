//! Room for a resume that somebody else asks for, of a program that shares its GPUs: it waits in the scheduler's queue as the program's own requests
//! do, and is kept for the client until it has resumed the program, or is gone.

use crate::connection::{Connection, Line, Lines};
use crate::lease;
use crate::member::{self, room::Ticket};
use crate::memory::Memory;
use std::time::Duration;
use vramctl_control::protocol::Reply;
use vramctl_host::exit;
use vramctl_model::{Error, ResumeRequest};

/// What is waited for so long is worth a word.
const WORTH_A_WORD: Duration = Duration::from_millis(500);
/// How often to look whether the program exits while the client has room.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Waits for room for what the client is about to resume, tells it that it is there, and keeps it as long as the client is connected.
pub fn keep(wanted: ResumeRequest, connection: &Connection, lines: &mut Lines<'_>) -> Result<Reply, Error> {
    let wanted = if member::is_member() { Memory::get().room_for(&lease::resume_of(wanted, connection)) } else { Ok(Vec::new()) };
    // What the scheduler has taken, it brings back by itself when anything is asked for.
    let asked = |bytes| if member::is_away() { 0 } else { bytes };
    let mut tickets: Vec<_> = wanted?.into_iter().filter_map(|(device, bytes)| Ticket::take(device, asked(bytes))).collect();
    let granted = tickets.iter_mut().all(|ticket| wait(ticket, connection));
    if !granted || tickets.is_empty() {
        return Ok(Reply::Room { granted });
    }
    if connection.send(&Reply::Room { granted }, 0).is_ok() {
        while !exit::is_ending() && matches!(lines.next(LOOK_EVERY)?, Line::Late) {}
    }
    Ok(Reply::Closed)
}

/// Whether the scheduler grants it before the client is gone. The client hears why it waits, whenever that is another reason.
fn wait(ticket: &mut Ticket, connection: &Connection) -> bool {
    let (mut waited, mut told) = (Duration::ZERO, None);
    loop {
        let granted = ticket.wait_a_moment();
        if let Some(granted) = granted {
            return granted;
        }
        if connection.is_gone() {
            return false;
        }
        waited += LOOK_EVERY;
        let why = Some(member::why_waiting()).filter(|_| waited >= WORTH_A_WORD);
        if let Some(why) = why.filter(|why| told.as_ref() != Some(why)) {
            let _ = connection.send(&Reply::Waits { why: why.clone() }, libc::MSG_DONTWAIT);
            told = Some(why);
        }
    }
}
