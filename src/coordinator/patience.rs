//! How long this crate waits, and how often it looks: every limit by its purpose.

use std::time::Duration;

/// How long a process waits for this coordinator before it undoes everything.
pub const LEASE: Duration = Duration::from_secs(5);
/// How often to renew a process's lease.
pub const RENEW_EVERY: Duration = Duration::from_secs(1);
/// How often an attempt checks whether processes that wait for others have ended.
pub const CHECK_RANKS_EVERY: Duration = Duration::from_millis(50);
/// How long a participant tries to read the record of the decision.
pub const READ_RECORD_WITHIN: Duration = Duration::from_secs(60);
/// And how often.
pub const READ_RECORD_AGAIN: Duration = Duration::from_millis(300);
/// How long to wait at least while another client uses a process, and, without a limit, while it resumes a job on the same GPUs. Also for the
/// work in flight on several nodes, if nobody says how long.
pub const TURN_WITHIN: Duration = Duration::from_secs(10);

/// The limit of a wait without one.
pub const AS_LONG_AS_IT_TAKES: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long a party that begins when others have drained waits, at the commit, until those have given back all of their memory. It does not wait
/// long, because all is decided, and one of the others may be stopped.
pub const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(1);
/// After how long without progress the others count as waiting for those that have drained.
pub const ADVANCE_AFTER: Duration = Duration::from_millis(30);
/// How long the first attempt on one node waits for the work of several processes to drain.
pub const FIRST_DRAIN: Duration = Duration::from_millis(100);
/// How long the program's GPU work in flight may take once it is held, if the caller gives no limit.
pub const HOLD_WITHIN: Duration = Duration::from_secs(10);
/// How long a program's own command may take before its pause, and after its resume.
pub const HOOK_WITHIN: Duration = Duration::from_secs(10);
/// And how often to look whether it is done.
pub const LOOK_AT_HOOK_EVERY: Duration = Duration::from_millis(10);
/// How long the engines may take to confirm that they still have no requests: the program waits meanwhile.
pub const CONFIRM_WITHIN: Duration = Duration::from_secs(3);
/// How long an engine may take to answer a request.
pub const ENGINE_ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// How often to ask an engine that still has requests.
pub const ASK_ENGINE_EVERY: Duration = Duration::from_millis(100);

// Of jobs over several nodes.

/// How long the first attempt waits for work in flight. On one node, ranks that are held at different collectives need another attempt; here,
/// those that are behind go on.
pub const FIRST_DRAIN_OF_NODES: Duration = Duration::from_secs(2);
/// When a node that answers nothing counts as lost.
pub const SILENT_NODE_WITHIN: Duration = Duration::from_secs(10);
/// And one that has not answered yet: its agent has to start.
pub const STARTED_WITHIN: Duration = Duration::from_secs(30);
/// How long to try to set the record, and to find out what has become of a node.
pub const SETTLE_WITHIN: Duration = Duration::from_secs(20);
/// And how often.
pub const SETTLE_AGAIN: Duration = Duration::from_millis(300);
/// How long it takes until all nodes know when to hold their ranks.
pub const HOLD_AFTER: Duration = Duration::from_millis(10);
/// And how much longer for each node.
pub const HOLD_AFTER_EACH: Duration = Duration::from_micros(500);
/// How long to rest between two attempts: a random time, so that two operations do not collide repeatedly.
pub const SHORTEST_REST: Duration = Duration::from_millis(10);
/// And at most, if two operations are in each other's way on different nodes.
pub const LONGEST_REST: Duration = Duration::from_millis(1600);
/// How often to check for nodes that are silent.
pub const CHECK_NODES_EVERY: Duration = Duration::from_millis(100);
/// How long ranks wait for memory at a time: two jobs may wait for memory that the other one has on another node.
pub const WAIT_FOR_MEMORY_AT_ONCE: Duration = Duration::from_secs(5);

// Of plans.

/// How often to check whether processes still have the memory to pause open.
pub const LOOK_FOR_BORROWERS_EVERY: Duration = Duration::from_millis(100);
/// Within which time processes notice that their client has gone. They check twice as often.
pub const INTERRUPTION_NOTICED_WITHIN: Duration = Duration::from_secs(1);

// Of checkpoints.

/// How long to wait, without a limit, for another operation's restore. Restores come one after the other, and the driver takes its time.
pub const RESTORE_WITHIN: Duration = Duration::from_secs(60);
/// How long to wait, without a limit, for an operation that is about to finish.
pub const OTHERS_FINISH_WITHIN: Duration = Duration::from_secs(10);
/// How often a restore looks for room.
pub const LOOK_FOR_ROOM_EVERY: Duration = Duration::from_millis(50);

// Of processes, and of commands among themselves.

/// A process whose socket was deleted creates it again within this time.
pub const NEW_SOCKET_WITHIN: Duration = Duration::from_secs(3);
/// How often to look for it, and for processes that have too many clients.
pub const LOOK_FOR_PROCESSES_EVERY: Duration = Duration::from_millis(100);
/// How long a process may take to answer `hello`. A stopped one never does, and must not delay the others.
pub const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// How long it may take to answer `status`, for which it calls the driver.
pub const STATUS_WITHIN: Duration = Duration::from_secs(5);
/// How long NVML may take after the pause. Usually, it is done by then.
pub const FIGURES_WITHIN: Duration = Duration::from_secs(5);
/// How often to try to take the lock of a file.
pub const TRY_LOCK_EVERY: Duration = Duration::from_millis(10);
/// How often to check whether it is this job's turn.
pub const LOOK_AT_QUEUE_EVERY: Duration = Duration::from_millis(20);
/// How long to wait for others that read or change the queue.
pub const LOCK_QUEUE_WITHIN: Duration = Duration::from_millis(500);

/// A time that doubles, up to a limit, each time it was too short.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    now: Duration,
    most: Duration,
}

impl Backoff {
    /// From one time to another.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self { now: first, most }
    }

    /// The time at present.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// It was too short.
    pub fn grow(&mut self) {
        self.now = self.now.saturating_mul(2).min(self.most);
    }
}
