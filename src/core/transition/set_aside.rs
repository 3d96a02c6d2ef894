//! The part of a borrower in a pause: it pauses nothing of its own, and gives up its open memory that its partners pause.

use super::prepared::{Preparation, Prepared};
use super::{Clock, WAIT_LOCKED, busy_since, milliseconds};
use crate::drain;
use crate::memory::{Allocation, Memory, aside, guard};
use std::mem;
use std::sync::{Arc, RwLockWriteGuard};
use std::time::Instant;
use vramctl_driver::{self as driver, RelaxedCapture};
use vramctl_model::{Bytes, Error, Observer, Report, SetAside, Stage};

impl Memory {
    /// Prepares to give up the open memory that the request selects, once the device's work, which may use it, has finished.
    pub(super) fn prepare_set_aside(&self, request: &SetAside, observer: &mut dyn Observer) -> Preparation<'_> {
        let started = Instant::now();
        let mut clock = Clock::default();
        let is_over = || request.timeout.is_some_and(|timeout| started.elapsed() >= timeout);
        loop {
            match self.try_set_aside(request, started, &mut clock, observer) {
                Err(Error::Busy(_)) if !is_over() && observer.is_wanted() => (),
                Err(error) => return Err(busy_since(started)(error).into()),
                Ok(prepared) => return Ok(Box::new(prepared)),
            }
        }
    }

    fn try_set_aside(
        &self,
        request: &SetAside,
        started: Instant,
        clock: &mut Clock,
        observer: &mut dyn Observer,
    ) -> Result<PreparedAside<'_>, Error> {
        let exclusive = self.exclude_unless_quiesced()?;
        let relaxed = RelaxedCapture::enter();
        self.settle();
        let all = self.registry.snapshot();
        let contexts = self.contexts_that_use(all.iter().map(|allocation| &**allocation));
        clock.time(Stage::Wait, || drain::wait_at_most(contexts, WAIT_LOCKED, &mut || true))?;
        // The client may have gone while this waited for the lock, or for the driver.
        if !observer.is_wanted() {
            return Err(Error::Busy(started.elapsed()));
        }
        self.registry.release_freed();
        let (request, clock) = (request.clone(), mem::take(clock));
        Ok(PreparedAside { request, started, clock, all, _relaxed: relaxed, _exclusive: exclusive })
    }
}

/// Work has ended, and none begins.
struct PreparedAside<'a> {
    request: SetAside,
    started: Instant,
    clock: Clock,
    all: Vec<Arc<Allocation>>,
    _relaxed: RelaxedCapture,
    _exclusive: RwLockWriteGuard<'a, ()>,
}

impl Prepared for PreparedAside<'_> {
    fn commit(self: Box<Self>, _: &mut dyn Observer) -> Report {
        let Self { request: SetAside { selection, partners, .. }, started, clock, all, .. } = &*self;
        aside::set_aside(selection, partners, true);
        let missing = aside::missing(selection);
        let bytes = Bytes(missing.iter().map(|aside| aside.paused_bytes).sum());
        log::info!("set aside {bytes} of paused memory of processes {partners:?}");
        Report {
            late_bytes: driver::leftover_bytes(),
            missing,
            guard_bytes: guard::all_bytes(all),
            stages: clock.0.clone(),
            ms: milliseconds(started.elapsed()),
            ..Report::default()
        }
    }

    fn undo(self: Box<Self>, why: Error) -> Error {
        why
    }
}
