//! Fault injection and call counting: any exported function can be made to fail with any code at any call, and its calls are
//! counted.

use crate::codes::Code;
use crate::driver::machine;
use crate::exports::{self, FUNCTIONS};
use crate::machine::Machine;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// The codes of faults that end the process, as `kill -9` does: instead of the call, and once it is carried out.
pub const KILLED_BEFORE: Code = Code::MAX - 1;
/// See [`KILLED_BEFORE`].
pub const KILLED_AFTER: Code = Code::MAX;

/// The codes of faults that stop the process, as `kill -STOP` does, until it is continued: before the call, and once it is carried out.
pub const STOPPED_BEFORE: Code = Code::MAX - 3;
/// See [`STOPPED_BEFORE`].
pub const STOPPED_AFTER: Code = Code::MAX - 2;

/// The signal that a fault sends to this process before the call.
pub fn signal_before(fault: Option<Code>) -> Option<libc::c_int> {
    match fault {
        Some(KILLED_BEFORE) => Some(libc::SIGKILL),
        Some(STOPPED_BEFORE) => Some(libc::SIGSTOP),
        _ => None,
    }
}

/// And the one after it.
pub fn signal_after(fault: Option<Code>) -> Option<libc::c_int> {
    match fault {
        Some(KILLED_AFTER) => Some(libc::SIGKILL),
        Some(STOPPED_AFTER) => Some(libc::SIGSTOP),
        _ => None,
    }
}

/// Ends or stops the process.
pub fn raise(signal: Option<libc::c_int>) {
    if let Some(signal) = signal {
        // None of its threads may be stopped with the machine's lock. A killed process loses it.
        let _alone = if signal == libc::SIGSTOP { machine().ok().map(Machine::keep_threads_out) } else { None };
        // SAFETY: touches no memory.
        unsafe { libc::raise(signal) };
    }
}

/// A pending fault.
#[derive(Clone, Copy, Debug)]
struct Fault {
    function: usize,
    /// The first call to fail; 1 is the next one.
    nth: u64,
    code: Code,
    /// Number of consecutive calls that fail.
    count: u64,
}

static CALLS: [AtomicU64; FUNCTIONS] = [const { AtomicU64::new(0) }; FUNCTIONS];
static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
/// Lets calls skip the lock while there are no faults.
static ARMED: AtomicBool = AtomicBool::new(false);

/// Extra milliseconds per call, by function.
static DELAYS: [AtomicU64; FUNCTIONS] = [const { AtomicU64::new(0) }; FUNCTIONS];
/// Number of calls being delayed now.
static DELAYED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static DELAYED_HERE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Adds a delay to each call of a function, including those being delayed now. `false` if there is no such function.
pub fn slow_down(name: &str, milliseconds: u64) -> bool {
    let Some(function) = exports::index_of(name) else { return false };
    DELAYS[function].store(milliseconds, Ordering::Relaxed);
    true
}

/// Sleeps for the function's delay.
pub fn delay(function: usize) {
    wait_if_held();
    let milliseconds = || DELAYS[function].load(Ordering::Relaxed);
    if milliseconds() > 0 {
        delayed(|| sleep_for(milliseconds));
    }
}

/// Sleeps until this much time has passed since the beginning. It may change meanwhile, so a test can begin a delay and end it.
pub fn sleep_for(milliseconds: impl Fn() -> u64) {
    let begun = Instant::now();
    while let Some(left) = Duration::from_millis(milliseconds()).checked_sub(begun.elapsed()) {
        std::thread::sleep(left.min(Duration::from_millis(1)));
    }
}

/// Whether a call on another thread is being delayed now. (One on this thread cannot proceed meanwhile.)
pub fn is_delaying_elsewhere() -> bool {
    DELAYED.load(Ordering::SeqCst) > DELAYED_HERE.get()
}

/// Number of calls until one is held; 0 if none will be.
static UNTIL_HELD: AtomicU64 = AtomicU64::new(0);
static HOLDING: AtomicBool = AtomicBool::new(false);

/// Holds the `nth` call of any function (1 is the next) until [`release`].
pub fn hold(nth: u64) {
    UNTIL_HELD.store(nth, Ordering::SeqCst);
}

/// Whether a call is being held.
pub fn is_holding() -> bool {
    HOLDING.load(Ordering::SeqCst)
}

/// Releases the call being held, after a moment.
pub fn release() {
    HOLDING.store(false, Ordering::SeqCst);
}

fn wait_if_held() {
    let next = |left: u64| left.checked_sub(1);
    if UNTIL_HELD.load(Ordering::Relaxed) > 0 && UNTIL_HELD.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) == Ok(1) {
        HOLDING.store(true, Ordering::SeqCst);
        delayed(|| {
            while is_holding() {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(10));
        });
    }
}

fn delayed(wait: impl FnOnce()) {
    DELAYED.fetch_add(1, Ordering::SeqCst);
    DELAYED_HERE.set(DELAYED_HERE.get() + 1);
    wait();
    DELAYED_HERE.set(DELAYED_HERE.get() - 1);
    DELAYED.fetch_sub(1, Ordering::SeqCst);
}

/// Counts a call of a function; returns the code of an injected fault, if any.
pub fn use_of(function: usize) -> Option<Code> {
    read_environment();
    CALLS[function].fetch_add(1, Ordering::Relaxed);
    if !ARMED.load(Ordering::Relaxed) {
        return None;
    }
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut answer = None;
    for fault in faults.iter_mut().filter(|fault| fault.function == function) {
        if fault.nth > 1 {
            fault.nth -= 1;
        } else if fault.count > 0 {
            if fault.count != u64::MAX {
                fault.count -= 1;
            }
            answer = answer.or(Some(fault.code));
        }
    }
    faults.retain(|fault| fault.count > 0);
    ARMED.store(!faults.is_empty(), Ordering::Relaxed);
    answer
}

/// Makes a function fail from its `nth` call (1 is the next), `count` times in a row (`u64::MAX`: always). `false` if there
/// is no such function.
pub fn inject(name: &str, nth: u64, code: Code, count: u64) -> bool {
    let Some(function) = exports::index_of(name) else { return false };
    let mut faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    faults.push(Fault { function, nth: nth.max(1), code, count });
    ARMED.store(true, Ordering::Relaxed);
    true
}

/// Removes all faults that have not triggered yet.
pub fn clear() {
    read_environment();
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ARMED.store(false, Ordering::Relaxed);
}

/// Number of calls of a function, including failed ones; of all functions if the name is empty.
pub fn calls(name: &str) -> u64 {
    if name.is_empty() {
        return CALLS.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    }
    exports::index_of(name).map_or(0, |function| CALLS[function].load(Ordering::Relaxed))
}

/// Resets all call counts.
pub fn reset_counts() {
    for count in &CALLS {
        count.store(0, Ordering::Relaxed);
    }
}

/// Parses `SIMGPU_FAIL` at the first call of any function.
fn read_environment() {
    static READ: Once = Once::new();
    READ.call_once(|| {
        let text = &crate::settings::get().faults;
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let known = parse(item).is_some_and(|(name, nth, code, count)| inject(name, nth, code, count));
            if !known {
                eprintln!("simgpu: SIMGPU_FAIL: cannot use {item:?} (function:use:code[:times])");
            }
        }
    });
}

fn parse(item: &str) -> Option<(&str, u64, Code, u64)> {
    let mut parts = item.split(':');
    let name = parts.next()?;
    let nth = parts.next()?.parse().ok()?;
    let code = match parts.next()? {
        "kill-before" => KILLED_BEFORE,
        "kill-after" => KILLED_AFTER,
        "stop-before" => STOPPED_BEFORE,
        "stop-after" => STOPPED_AFTER,
        code => code.parse().ok()?,
    };
    let count = match parts.next() {
        None => 1,
        Some("*") => u64::MAX,
        Some(count) => count.parse().ok()?,
    };
    parts.next().is_none().then_some((name, nth, code, count))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_environment_s_syntax() {
        assert_eq!(parse("cuMemCreate:3:2"), Some(("cuMemCreate", 3, 2, 1)));
        assert_eq!(parse("cuMemMap:1:999:2"), Some(("cuMemMap", 1, 999, 2)));
        assert_eq!(parse("cuMemMap:1:999:*"), Some(("cuMemMap", 1, 999, u64::MAX)));
        assert_eq!(parse("cuMemMap:1:kill-after"), Some(("cuMemMap", 1, u32::MAX, 1)));
        assert_eq!(parse("cuMemMap:1"), None);
        assert_eq!(parse("cuMemMap:1:2:3:4"), None);
    }
}
