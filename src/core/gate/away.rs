//! A second latch, which is closed while another process has the driver checkpoint this one.
//!
//! The driver then blocks most calls. But those that only look at what the device has written to the host's memory, or wait for that, end the
//! program with a segmentation fault, because that memory is gone (driver 580), also in a process that CRIU has restored and the driver has not.
//! So they wait here, and nowhere else: no pause waits for them, and they are no sign that the program is at work.

use super::latch::{self, ThreadMark};
use super::{AWAY, Gated, Inside, Stuck, calls_of, number, sync, threads};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Fast path: goes inside if the driver is there and the thread already has a mark. Otherwise the caller uses [`pass`].
#[inline]
pub fn enter(gated: &'static Gated) -> Option<Inside> {
    let mark = threads::known_away_mark()?;
    if mark.enter(&AWAY, number(gated)) { Some(Inside(mark)) } else { None }
}

/// Calls `make` once the driver is there.
pub fn pass<R>(gated: &'static Gated, make: impl FnOnce() -> R) -> R {
    let inside = enter_slowly(gated).map(Inside);
    let answer = make();
    drop(inside);
    answer
}

/// Waits until the driver is there, and goes inside. The caller then has the mark `leave`: without a destructor, for calls in
/// which a thread may be cancelled. `None`: the thread has no mark, or is inside already.
#[inline]
pub fn begin(gated: &'static Gated) -> Option<&'static ThreadMark> {
    match threads::known_away_mark() {
        Some(mark) if mark.enter(&AWAY, number(gated)) => Some(mark),
        _ => enter_slowly(gated),
    }
}

#[cold]
fn enter_slowly(gated: &'static Gated) -> Option<&'static ThreadMark> {
    let Some(mark) = threads::away_mark() else {
        // The thread's destructors run. Nobody sees it inside, so it only waits.
        wait();
        return None;
    };
    // A nested call, or that of a signal handler: the outer one is seen.
    if mark.is_inside() {
        return None;
    }
    mark.wait_and_enter(&AWAY, number(gated));
    Some(mark)
}

/// Waits until the driver is there.
pub fn wait() {
    loop {
        let seen = AWAY.0.load(Ordering::Acquire);
        if seen & latch::CLOSED == 0 {
            return;
        }
        sync::wait(&AWAY.0, seen);
    }
}

/// From now on, such calls wait. Returns once none is inside, or fails after so long, and they pass again.
pub fn close(limit: Duration) -> Result<(), Stuck> {
    const LOOK_EVERY: Duration = Duration::from_micros(50);
    let deadline = Instant::now() + limit;
    threads::start_clean_in_children();
    AWAY.close();
    loop {
        let inside = calls_of(threads::away_marks());
        if inside.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            open();
            return Err(Stuck(inside));
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Such calls pass.
pub fn open() {
    AWAY.open();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::sync::{Mutex, MutexGuard};
    use vramctl_host::Unpoison;

    static CALL: Gated = Gated("call");
    const LONG: Duration = Duration::from_secs(100);

    /// What entries do.
    fn call<R>(make: impl FnOnce() -> R) -> R {
        match enter(&CALL) {
            Some(_inside) => make(),
            None => pass(&CALL, make),
        }
    }

    /// A process has one latch.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unpoisoned()
    }

    #[test]
    fn who_closes_it_waits_for_calls_inside_and_later_ones_wait() {
        let _turn = turn();
        let (say, said) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            call(|| {
                say.send(()).unwrap();
                gone.recv().unwrap();
            });
            // This one waits.
            let mark = begin(&CALL);
            say.send(()).unwrap();
            mark.unwrap().leave();
        });
        said.recv().unwrap();
        let stuck = close(Duration::from_millis(10)).unwrap_err();
        assert!(stuck.to_string().contains("1 in call"), "{stuck}");
        // Another thread's call passes again.
        call(|| ());
        go.send(()).unwrap();
        close(LONG).unwrap();
        assert!(said.recv_timeout(Duration::from_millis(50)).is_err());
        open();
        said.recv().unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn a_call_within_a_call_passes() {
        static CLOSED: AtomicBool = AtomicBool::new(false);
        let _turn = turn();
        let closer = call(|| {
            let closer = thread::spawn(|| {
                close(LONG).unwrap();
                CLOSED.store(true, Ordering::SeqCst);
            });
            while !AWAY.is_closed() {
                thread::yield_now();
            }
            // It would wait for ever.
            call(|| assert!(begin(&CALL).is_none()));
            assert!(!CLOSED.load(Ordering::SeqCst));
            closer
        });
        closer.join().unwrap();
        open();
    }
}
