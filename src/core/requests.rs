//! What a client asks for, one request a line.

use crate::connection::{Connection, Lines, Seat};
use crate::memory::Memory;
use crate::memory::share::Loan;
use crate::suspend::suspended;
use crate::transition::Pause;
use crate::{cache, detach, engine, events, lease, member, prefix_cache, room, status, store};
use std::panic::{self, AssertUnwindSafe};
use std::time::Duration;
use vramctl_config::{Config, new_name};
use vramctl_control::protocol::{self, DryRun, Hello, Prepare, ProcessStatus, Refusal, Reply, Request, VERSION};
use vramctl_host::Held;
use vramctl_model::{Error, Transition};

/// How long the driver may take to answer for a status. Less than a client waits for it.
const STATUS_WITHIN: Duration = Duration::from_secs(4);
/// How long the program's allocator may take to report what it holds.
const CACHE_WITHIN: Duration = Duration::from_millis(200);
/// How long it may take to return memory, unless the client sets a limit.
const TRIM_WITHIN: Duration = Duration::from_secs(10);
/// Does what a line asks for. `files`: descriptors to send with the reply.
pub fn answer(line: &[u8], connection: &Connection, lines: &mut Lines<'_>, files: &mut Vec<Held>) -> Reply {
    // A bug in the library becomes an error reply and must not end the program.
    let done = panic::catch_unwind(AssertUnwindSafe(|| protocol::parse(line).and_then(|request| serve(request, connection, lines, files))))
        .unwrap_or_else(|_| Err(Error::Internal("a request panicked".into())));
    done.unwrap_or_else(|error| Reply::Error(Refusal::from(&error)))
}

fn serve(request: Request, connection: &Connection, lines: &mut Lines<'_>, files: &mut Vec<Held>) -> Result<Reply, Error> {
    let memory = Memory::get();
    if suspended().is_some()
        && !matches!(
            request,
            Request::Hello
                | Request::Status
                | Request::Events { .. }
                | Request::Share { .. }
                | Request::Suspend
                | Request::Awake
                | Request::Detach
                | Request::Origin { .. }
                | Request::Close { .. }
        )
    {
        return Err(Error::Suspended);
    }
    if holds(&request) && !connection.is_from_outside() {
        return Err(Error::holds_itself());
    }
    let _seat = if may_wait(&request) { Some(Seat::for_waiting()?) } else { None };
    match request {
        Request::Hello => Ok(Reply::Hello(hello())),
        Request::Status => Ok(Reply::Status(ProcessStatus { process: hello(), memory: status::ask(STATUS_WITHIN)? })),
        Request::Events { .. } | Request::Record | Request::Counted { .. } | Request::Watch { .. } => events::answer(request),
        Request::Pause(wanted) => lease::at_once(Transition::Pause(wanted), connection).map(Reply::Done),
        Request::Plan(Transition::Pause(request)) => {
            let (plan, admitted) = memory.plan_pause(&Pause { engine: engine::name(), ..lease::pause_of(request, connection) })?;
            Ok(Reply::Plan(DryRun { plan, refused: admitted.err().map(|error| Box::new(Refusal::from(&error))) }))
        }
        Request::Plan(Transition::Resume(request)) => {
            let plan = memory.plan_resume(&lease::resume_of(request, connection))?;
            Ok(Reply::Plan(DryRun { plan, refused: None }))
        }
        Request::Resume(wanted) => lease::at_once(Transition::Resume(wanted), connection).map(Reply::Done),
        Request::Hold { lease_ms } => lease::hold(lease_ms, connection, lines).map(Reply::Done),
        Request::Prepare(wanted) => lease::prepare(wanted, connection, lines).map(Reply::Done),
        Request::Drain { .. } | Request::Advance { .. } | Request::SetAside(_) | Request::Renew | Request::Commit | Request::Abort => {
            Err(Error::Invalid("nothing is held or prepared here: the lease has ended, or never began".into()))
        }
        Request::Suspend => memory.suspend(|| connection.is_gone()).map(|gpus| Reply::Suspended { gpus }),
        Request::Awake => {
            memory.awake();
            Ok(Reply::Awake)
        }
        Request::Store(image) => {
            let files = store::received(lines)?;
            memory.store(files, image).map(|(bytes, written_bytes)| Reply::Stored { bytes, written_bytes })
        }
        Request::Origin { image, packs } => Memory::set_origin(store::received(lines)?, image, &packs).map(|()| Reply::Origin),
        Request::Detach => detach::check().map(|()| Reply::Detached),
        Request::SetTag { tag } => {
            memory.set_process_tag(tag.as_deref())?;
            Ok(Reply::Tag { tag })
        }
        Request::Cache => cache::ask(CACHE_WITHIN).map(|cache| Reply::Cache { cache }),
        Request::Trim { timeout_ms } => cache::trim(timeout_ms.map_or(TRIM_WITHIN, Duration::from_millis)).map(Reply::Trimmed),
        Request::Share { epoch } => member::serve(epoch, connection, lines).map(|()| Reply::Closed),
        Request::Sharing(new) => member::share_so(new).map(Reply::Sharing),
        Request::Holdings => Ok(Reply::Holdings(memory.holdings())),
        Request::Room(wanted) => room::keep(wanted, connection, lines),
        Request::ResetPrefixCache { epoch } => {
            member::admit(epoch)?;
            prefix_cache::reset().map(|()| Reply::PrefixCacheReset)
        }
        Request::Order(_) => Err(Error::Invalid("orders are for the connection of a scheduler (`share`)".into())),
        Request::Open { token } => {
            let loan = connection.lend(&token)?;
            Ok(opened(loan, None, files))
        }
        Request::Claim => {
            let file = lines.take_file().ok_or_else(|| Error::Invalid("a claim needs a descriptor".into()))?;
            let (token, loan) = connection.lend_claimed(&file)?;
            Ok(opened(loan, Some(token.text()), files))
        }
        Request::Close { token } => {
            memory.take_back(&token, connection.borrower.connection);
            Ok(Reply::Closed)
        }
    }
}

/// Whether a request may wait long: for the driver, a lock or the program. A `status` does not ([`status::ask`](crate::status::ask)). The steps of
/// a transition may, but only one client is at them.
fn may_wait(request: &Request) -> bool {
    use Request::{Cache, Counted, Holdings, Pause, Plan, Record, ResetPrefixCache, Resume, Room, Store, Suspend, Trim};
    let asks = matches!(request, Cache | Holdings | Room(_) | Trim { .. } | ResetPrefixCache { .. });
    asks || matches!(request, Pause(_) | Plan(_) | Resume(_) | Store(_) | Suspend | Record | Counted { .. })
}

/// Whether the program is held afterwards.
fn holds(request: &Request) -> bool {
    match request {
        Request::Hold { .. } => true,
        Request::Pause(wanted) => wanted.hold.is_some(),
        Request::Prepare(Prepare { transition, .. }) => transition.holds(),
        _ => false,
    }
}

/// The answer that goes with the descriptors of a loan.
fn opened(loan: Loan, token: Option<String>, files: &mut Vec<Held>) -> Reply {
    let pieces;
    (*files, pieces) = loan.pieces.into_iter().map(|(file, bytes)| (file, bytes as u64)).unzip();
    Reply::Opened { pieces, tag: Some(loan.tag.to_string()), pauses: loan.pauses, token }
}

fn hello() -> Hello {
    Hello {
        protocol: VERSION,
        library: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        name: engine::process_name(),
        program: engine::program(),
        engine: engine::name(),
        job: new_name().or_else(|| Config::get().job.clone()),
        // Several may run of one image.
        run: Config::get().run.clone().filter(|_| new_name().is_none()),
        age_s: engine::age_s(),
        ranks: lease::ranks().clone(),
        shares: member::is_member(),
        trims: cache::is_served(),
        on_pause: Config::get().on_pause.clone(),
        on_resume: Config::get().on_resume.clone(),
    }
}
