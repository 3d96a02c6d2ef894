//! NCCL's communicators: their ranks share memory, so all of them leave their GPUs together, or none.

use crate::failure::{CommandError, Exit};
use crate::processes::Process;
use crate::{proc, text};
use std::collections::{BTreeMap, BTreeSet};
use vramctl_model::{Communicator, Obstacle, ObstacleKind};

/// What a job with ranks elsewhere can do.
const ADVICE: &str = "NCCL's memory is theirs, too, and a network card keeps its pages. Name all of the job's processes in one command; if some \
                      are on other nodes, or were not started with `vramctl run`, pause by tag instead";

/// The same, if the ranks on other nodes take part.
const OVER_A_CARD: &str = "which may keep pages of GPU memory for the ranks on other nodes. Have NCCL use sockets (NCCL_IB_DISABLE=1), or pause by \
                           tag instead";

/// Devices of network cards, and the one that gives the processor a view of GPU memory.
const CARDS: [&str; 3] = ["/dev/infiniband/", "/dev/cxi", "/dev/gdrdrv"];

/// The communicators with ranks that are not among some processes.
pub struct Elsewhere(BTreeMap<String, Ranks>);

/// Those ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Ranks {
    /// They take part on their nodes.
    OnOtherNodes,
    /// They do not, as this text says.
    Left(String),
}

impl Elsewhere {
    /// Looks for them in the processes' status. `everywhere`: the communicators whose ranks on other nodes take part.
    pub fn of<'a>(processes: impl IntoIterator<Item = &'a Process>, everywhere: &BTreeSet<String>) -> Self {
        let mut here = BTreeMap::<&str, BTreeSet<&Communicator>>::new();
        for one in processes.into_iter().flat_map(communicators) {
            here.entry(&one.id).or_default().insert(one);
        }
        let missing = |(id, here): (&str, BTreeSet<&Communicator>)| {
            let ranks = here.first()?.ranks;
            let elsewhere = match ranks {
                0 => Ranks::Left("ranks that are not known".to_owned()),
                _ if here.len() as u32 == ranks => return None,
                _ if everywhere.contains(id) => Ranks::OnOtherNodes,
                _ => Ranks::Left(format!("{} of {ranks} ranks elsewhere", ranks.saturating_sub(here.len() as u32))),
            };
            Some((id.to_owned(), elsewhere))
        };
        Self(here.into_iter().filter_map(missing).collect())
    }

    /// What prevents a suspend of this process.
    pub fn obstacle(&self, process: &Process) -> Option<Obstacle> {
        let of_process: BTreeMap<_, _> = communicators(process).filter_map(|one| Some((&one.id, self.0.get(&one.id)?))).collect();
        let left: Vec<_> = of_process.values().filter_map(|ranks| if let Ranks::Left(text) = ranks { Some(text) } else { None }).collect();
        let what = if let [first, others @ ..] = &left[..] {
            let more = if others.is_empty() { String::new() } else { format!(", and {}", text::count(others.len(), "other", "others")) };
            format!("a communicator of NCCL with {first}{more}: {ADVICE}")
        } else {
            of_process.first_key_value()?;
            let card = proc::opened(process.pid, &CARDS).unwrap_or(Some("files that cannot be seen".to_owned()))?;
            format!("a communicator of NCCL with ranks on other nodes, and {card}, {OVER_A_CARD}")
        };
        Some(Obstacle { kind: ObstacleKind::Communicator, what, bytes: 0 })
    }

    /// Fails if NCCL's memory of these processes cannot be paused.
    pub fn check<'a>(processes: impl IntoIterator<Item = &'a Process> + Clone, everywhere: &BTreeSet<String>) -> Result<(), CommandError> {
        let elsewhere = Self::of(processes.clone(), everywhere);
        let first = processes.into_iter().find_map(|process| Some((process, elsewhere.obstacle(process)?)));
        let refused = |(process, obstacle)| CommandError::new(Exit::Failed, format!("{process} has {obstacle}. Nothing has changed"));
        first.map(refused).map_or(Ok(()), Err)
    }
}

fn communicators(process: &Process) -> impl Iterator<Item = &Communicator> {
    process.status.iter().flat_map(|status| &status.memory.communicators)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::made_up::process;

    fn with(pid: u32, communicators: &[(&str, u32, u32)]) -> Process {
        let mut process = process(pid, "job", &[]);
        process.status.as_mut().unwrap().memory.communicators =
            communicators.iter().map(|(id, rank, ranks)| Communicator { id: (*id).into(), rank: *rank, ranks: *ranks }).collect();
        process
    }

    /// Those of this process are seen, and it has no network card.
    #[test]
    fn ranks_on_other_nodes_may_take_part() {
        let mut one = with(std::process::id(), &[("a", 0, 2), ("b", 0, 2)]);
        let everywhere: BTreeSet<_> = ["a".to_owned()].into();
        let what = Elsewhere::of([&one], &everywhere).obstacle(&one).unwrap().what;
        assert!(what.starts_with("a communicator of NCCL with 1 of 2 ranks elsewhere: "), "{what}");
        let everywhere: BTreeSet<_> = ["a".to_owned(), "b".to_owned()].into();
        assert!(Elsewhere::of([&one], &everywhere).obstacle(&one).is_none());
        one.pid = u32::MAX;
        let what = Elsewhere::of([&one], &everywhere).obstacle(&one).unwrap().what;
        assert!(what.contains("on other nodes, and files that cannot be seen"), "{what}");
    }

    #[test]
    fn ranks_elsewhere_are_counted() {
        let none = BTreeSet::new();
        let both = [with(1, &[("a", 0, 2), ("b", 0, 3)]), with(2, &[("a", 1, 2), ("b", 1, 3)])];
        let elsewhere = Elsewhere::of(&both, &none);
        let what = elsewhere.obstacle(&both[1]).unwrap().what;
        assert!(what.starts_with("a communicator of NCCL with 1 of 3 ranks elsewhere: "), "{what}");
        // All ranks of one process, and one that has been split off.
        let whole = [with(1, &[("a", 0, 2), ("a", 1, 2)]), with(2, &[])];
        assert!(whole.iter().all(|process| Elsewhere::of(&whole, &none).obstacle(process).is_none()));
        assert!(Elsewhere::check(&whole, &none).is_ok());
        let unknown = [with(1, &[("", 0, 0), ("a", 0, 4)])];
        let what = Elsewhere::check(&unknown, &none).unwrap_err().to_string();
        assert!(what.contains("ranks that are not known, and 1 other: "), "{what}");
    }
}
