//! `--shared`: finds the borrowers, processes that have the memory to pause open, and takes them along: they are held as well.

use crate::failure::{CommandError, Exit};
use crate::processes::{Found, Process};
use std::collections::{BTreeMap, BTreeSet};
use vramctl_control::client::ClientError;
use vramctl_model::{Bytes, Participants, PauseOptions, PauseRequest, Registered, Report, Transition};

/// Processes that are paused or resumed as one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Group<B> {
    /// The indices of the processes whose memory is paused or resumed.
    pub members: Vec<usize>,
    /// Those that have it open, and pause nothing of their own.
    pub borrowers: Vec<B>,
}

/// A process that has memory of others open.
#[derive(Debug, Clone)]
pub struct Borrower {
    /// The process.
    pub process: Process,
    /// How much of the memory to pause it has open.
    pub bytes: u64,
}

/// What other processes have open, by pid.
pub type OpenBy = BTreeMap<u32, u64>;

/// Merges jobs that have memory of each other open into one group: two coordinators would block each other. `lent`: what others have open
/// of the processes at these indices.
pub fn groups(jobs: Vec<Vec<usize>>, pid: impl Fn(usize) -> u32, lent: impl Fn(&[usize]) -> OpenBy) -> Vec<Group<(u32, u64)>> {
    let group = |members: Vec<usize>| Group { borrowers: lent(&members).into_iter().collect(), members };
    let mut groups: Vec<_> = jobs.into_iter().map(group).collect();
    while let Some((one, other)) = related(&groups, &pid) {
        let (later, sooner) = (groups.swap_remove(one.max(other)), groups.swap_remove(one.min(other)));
        groups.push(group([sooner.members, later.members].concat()));
    }
    for group in &mut groups {
        group.members.sort_unstable();
    }
    groups.sort_by_key(|group| group.members.first().copied());
    groups
}

/// Two groups, one of which has memory of the other open.
fn related(groups: &[Group<(u32, u64)>], pid: &impl Fn(usize) -> u32) -> Option<(usize, usize)> {
    let place_of: BTreeMap<_, _> =
        groups.iter().enumerate().flat_map(|(at, group)| group.members.iter().map(move |place| (pid(*place), at))).collect();
    groups.iter().enumerate().find_map(|(at, group)| {
        group.borrowers.iter().find_map(|(pid, _)| place_of.get(pid).filter(|other| **other != at).map(|other| (at, *other)))
    })
}

/// What others have open of the memory that a pause of these processes selects. Empty if a process does not answer: then the pause itself
/// reports why.
pub fn lent_by(found: &Found, pids: &[u32], wanted: &PauseRequest) -> OpenBy {
    let mut lent = OpenBy::new();
    for pid in pids {
        // Ignore registered memory here.
        let options = PauseOptions { registered: Registered::Take, ..wanted.options.clone() };
        let participants = Participants { partners: pids.to_vec(), ..wanted.participants.clone() };
        let request = Transition::Pause(PauseRequest { options, participants, ..wanted.clone() });
        let asked = found.connect(*pid).and_then(|mut client| client.plan(request));
        if let Err(ClientError::Refused(refusal)) = asked {
            for open in refusal.lent.iter().flatten() {
                *lent.entry(open.by.pid).or_default() += open.by.bytes.unwrap_or_default();
            }
        }
    }
    lent
}

/// The result of a borrower, as text.
pub fn text(process: &Process, report: &Report) -> String {
    let open =
        report.missing.iter().map(|missing| format!("{} that it has opened from process {}", Bytes(missing.paused_bytes), missing.owner));
    match &open.collect::<Vec<_>>()[..] {
        [] => format!("nothing to do: {process} has none of it open any more"),
        aside => format!("held {process}: {} is paused; it continues by itself when it is resumed", aside.join(", ")),
    }
}

/// Finds the borrowers; fails if one cannot set aside its open memory.
pub fn find(found: &Found, lent: impl IntoIterator<Item = (u32, u64)>) -> Result<Vec<Borrower>, CommandError> {
    let lent: OpenBy = lent.into_iter().collect();
    let now = found.look_again(&lent.keys().copied().collect::<Vec<_>>());
    let silent: BTreeSet<_> = lent.keys().filter(|pid| now.iter().all(|process| process.pid != **pid)).collect();
    let cannot = |who: String, bytes: u64, why: &str| {
        CommandError::new(Exit::Busy, format!("nothing was paused: {who} has {} of it open and cannot be held: {why}", Bytes(bytes)))
    };
    if let Some(pid) = silent.first() {
        let why = match pid {
            0 => "it is in another container; run vramctl where all of them can be seen, or let it close the memory".to_owned(),
            pid => format!(
                "it does not listen in the directory of the control sockets. Was it started with another VRAMCTL_DIR, or has it closed the \
                 socket? Let it close the memory, or end it (kill {pid})"
            ),
        };
        return Err(cannot(format!("process {pid}"), lent[pid], &why));
    }
    let along = |process: Process| {
        let bytes = lent[&process.pid];
        let why = match &process.status {
            Err(failure) => failure.to_string(),
            Ok(_) if process.suspended().is_some() => "it is suspended; resume it first".into(),
            Ok(_) => return Ok(Borrower { process, bytes }),
        };
        Err(cannot(process.to_string(), bytes, &why))
    };
    now.into_iter().map(along).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes 10, 11, 12 …, and which has memory of which open.
    fn grouped(jobs: &[&[usize]], opened: &[(u32, u32)]) -> Vec<(Vec<usize>, Vec<u32>)> {
        let pid = |place: usize| 10 + place as u32;
        let groups = groups(jobs.iter().map(|job| job.to_vec()).collect(), pid, |places| {
            let own: Vec<_> = places.iter().map(|place| pid(*place)).collect();
            let meant = opened.iter().filter(|(by, of)| own.contains(of) && !own.contains(by));
            meant.map(|(by, _)| (*by, 1)).collect()
        });
        groups.into_iter().map(|group| (group.members, group.borrowers.into_iter().map(|(pid, _)| pid).collect())).collect()
    }

    #[test]
    fn jobs_that_share_are_one_group_and_other_processes_are_borrowers() {
        let jobs = [&[0, 1][..], &[2], &[3]];
        assert_eq!(grouped(&jobs, &[]), [(vec![0, 1], vec![]), (vec![2], vec![]), (vec![3], vec![])]);
        assert_eq!(grouped(&jobs, &[(99, 10), (98, 12)]), [(vec![0, 1], vec![99]), (vec![2], vec![98]), (vec![3], vec![])]);
        for (by, of) in [(10, 13), (13, 10), (11, 13), (13, 11)] {
            assert_eq!(grouped(&jobs, &[(by, of), (99, 13)]), [(vec![0, 1, 3], vec![99]), (vec![2], vec![])], "{by} {of}");
        }
        for opened in [[(10, 12), (12, 13)], [(12, 10), (13, 12)], [(10, 12), (13, 12)], [(12, 10), (12, 13)]] {
            assert_eq!(grouped(&jobs, &opened), [(vec![0, 1, 2, 3], vec![])], "{opened:?}");
        }
        assert_eq!(grouped(&jobs, &[(10, 11)]), [(vec![0, 1], vec![]), (vec![2], vec![]), (vec![3], vec![])], "within a job");
    }
}
