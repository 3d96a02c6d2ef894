//! Programs that grow ask for more room than they need at once, so that others give way once for many of their allocations: twice as much each time.
//!
//! What is not used stays free, for whoever asks next. If nobody can give so much, what is needed is asked for.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vramctl_scheduler::{GpuId, PerGpu};

/// How long after it was granted room a program counts as growing.
const MOMENT: Duration = Duration::from_secs(10);
/// No more than this part of a GPU is asked for at once without need.
const PART: u64 = 32;

/// What was asked for, and what has been granted lately.
#[derive(Debug, Default)]
pub struct Growth {
    /// By process and ticket.
    asked: BTreeMap<(u32, u64), Asked>,
    /// By process and GPU: when, and how many bytes.
    granted: BTreeMap<(u32, GpuId), (Instant, u64)>,
}

#[derive(Debug)]
struct Asked {
    gpu: GpuId,
    needed: u64,
    bytes: u64,
}

impl Growth {
    /// How much room to ask for, for a request that needs so many bytes of a GPU with that many `free` and in all. Where there is enough, nobody
    /// has to give way for it, nor for more.
    pub fn ask(&mut self, (pid, ticket): (u32, u64), gpu: GpuId, needed: u64, [free, total]: [u64; 2], now: Instant) -> u64 {
        let lately = self.granted.get(&(pid, gpu)).filter(|(at, _)| needed > free && now.saturating_duration_since(*at) < MOMENT);
        let step = lately.map_or(0, |(_, bytes)| bytes.saturating_mul(2).min(total / PART));
        let bytes = needed.max(step);
        self.asked.insert((pid, ticket), Asked { gpu, needed, bytes });
        bytes
    }

    /// A request has been granted.
    pub fn grant(&mut self, pid: u32, ticket: u64, now: Instant) {
        if let Some(asked) = self.asked.get(&(pid, ticket)) {
            let (at, bytes) = self.granted.entry((pid, asked.gpu)).or_insert((now, 0));
            // What finds room meanwhile is no step back.
            *bytes = if now.saturating_duration_since(*at) < MOMENT { asked.bytes.max(*bytes) } else { asked.bytes };
            *at = now;
        }
    }

    /// There is no room for what was asked for. Returns what is to be asked for then; `None`: it was no more than what is needed.
    pub fn less(&mut self, pid: u32, ticket: u64) -> Option<PerGpu> {
        let asked = self.asked.get_mut(&(pid, ticket)).filter(|asked| asked.bytes > asked.needed)?;
        asked.bytes = asked.needed;
        Some([(asked.gpu, asked.needed)].into())
    }

    /// A request is over.
    pub fn settle(&mut self, pid: u32, ticket: u64) {
        self.asked.remove(&(pid, ticket));
    }

    /// A process has ended.
    pub fn forget(&mut self, pid: u32) {
        self.asked.retain(|(of, _), _| *of != pid);
        self.granted.retain(|(of, _), _| *of != pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GPU: GpuId = GpuId(0);

    /// 500 allocations of 2 MiB on a GPU of 64 GiB.
    #[test]
    fn a_program_that_grows_by_small_allocations_asks_seldom() {
        let (mut growth, now) = (Growth::default(), Instant::now());
        let (mut free, mut asked) = (0, 0);
        for ticket in 0..500 {
            if free < 2 * MIB {
                free += growth.ask((1, ticket), GPU, 2 * MIB, [free, 65_536 * MIB], now);
                growth.grant(1, ticket, now);
                growth.settle(1, ticket);
                asked += 1;
            }
            free -= 2 * MIB;
        }
        assert_eq!(asked, 9, "2, 4, 8, … 512 MiB");
    }

    #[test]
    fn no_more_than_a_part_of_the_gpu_is_asked_for_and_what_is_needed_where_there_is_no_more() {
        let (mut growth, now) = (Growth::default(), Instant::now());
        for (ticket, expected) in [(0, 8), (1, 16), (2, 32), (3, 32)] {
            assert_eq!(growth.ask((1, ticket), GPU, 8 * MIB, [0, 1024 * MIB], now), expected * MIB);
            growth.grant(1, ticket, now);
        }
        assert_eq!(growth.ask((1, 4), GPU, 90 * MIB, [0, 1024 * MIB], now), 90 * MIB, "it needs more");
        assert_eq!(growth.less(1, 4), None);
        assert_eq!(growth.less(1, 3), Some([(GPU, 8 * MIB)].into()));
        assert_eq!(growth.less(1, 3), None, "that is what it needs");
        assert_eq!(growth.ask((2, 0), GPU, MIB, [0, 1024 * MIB], now), MIB, "another process");
        assert_eq!(growth.ask((1, 5), GPU, MIB, [0, 1024 * MIB], now + MOMENT), MIB, "it no longer grows");
        growth.grant(1, 4, now);
        assert_eq!(growth.ask((1, 7), GPU, MIB, [MIB, 1024 * MIB], now), MIB, "there is enough");
        growth.forget(1);
        assert_eq!(growth.ask((1, 6), GPU, MIB, [0, 1024 * MIB], now), MIB);
    }
}
