//! Work in threads of this command. Where the system starts no further thread (`ulimit -u`, `pids.max`), it is done one after the other on the
//! calling thread, or fails with the limit's name: nothing waits for a thread that is not there.

use crate::failure::CommandError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread::{self, Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::{io, iter};
use vramctl_host::Unpoison;
use vramctl_host::worker::with_signals_blocked;
use vramctl_model::Error;

/// A result, or what a thread has panicked with.
pub type Joined<R> = Result<R, Box<dyn Any + Send>>;

/// Does this work for each, at once as far as there are threads. The results are in order.
pub fn each<T: Send, R: Send>(all: impl IntoIterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<Joined<R>> {
    let all: Vec<_> = all.into_iter().map(|one| Mutex::new(Some(one))).collect();
    let work = |one: &Mutex<Option<T>>| one.lock().unpoisoned().take().map(&work);
    let here = |one| catch_unwind(AssertUnwindSafe(|| work(one)));
    let work = &work;
    thread::scope(|scope| {
        // One of them needs no other thread.
        let others = all.iter().take(all.len().saturating_sub(1));
        let started: Vec<_> = others.map(|one| spawn_in(scope, move || work(one)).ok()).chain(iter::once(None)).collect();
        let mut left: Vec<_> = started.iter().zip(&all).map(|(thread, one)| thread.is_none().then(|| here(one))).collect();
        let join = |(thread, left): (Option<ScopedJoinHandle<'_, _>>, &mut Option<_>)| left.take().or_else(|| Some(thread?.join()));
        started.into_iter().zip(&mut left).filter_map(join).filter_map(Result::transpose).collect()
    })
}

/// The same, and goes on with a panic of any.
pub fn each_well<T: Send, R: Send>(all: impl IntoIterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    each(all, work).into_iter().map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// Starts a thread that may be abandoned. Signals are for the caller's own threads.
pub fn spawn<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> io::Result<JoinHandle<R>> {
    with_signals_blocked(|| Builder::new().spawn(work)).map_err(no_thread)
}

/// Starts a thread that ends with a scope.
pub fn spawn_in<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, R>> {
    Builder::new().spawn_scoped(scope, work).map_err(no_thread)
}

/// Which limit a thread has met.
#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn no_thread(error: io::Error) -> io::Error {
    let text = format!(
        "this command gets no further thread: the limit of the user (ulimit -u) or of the container (pids.max) is reached ({error})"
    );
    // Not of its kind: elsewhere, "try again" is said of a process.
    io::Error::other(text)
}

/// What cannot be done without a thread is refused, as by a process that has none.
pub fn refused(error: &io::Error) -> CommandError {
    CommandError::from(&Error::NoThread(String::new())).saying(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_a_panic_is_one_of_them() {
        let done = each(0..5, |number| if number == 3 { panic!("three") } else { number * 2 });
        let done: Vec<_> = done.into_iter().map(Result::ok).collect();
        assert_eq!(done, [Some(0), Some(2), Some(4), None, Some(8)]);
        assert!(each(0..0, |number: i32| number).is_empty());
    }
}
