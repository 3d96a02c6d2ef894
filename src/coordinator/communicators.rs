//! NCCL's communicators: their ranks share memory, so all of them leave their GPUs together, or none.

use crate::failure::{CommandError, Exit};
use crate::processes::Process;
use crate::text;
use std::collections::{BTreeMap, BTreeSet};
use vramctl_model::{Communicator, Obstacle, ObstacleKind};

/// What a job with ranks elsewhere can do.
const ADVICE: &str = "NCCL's memory is theirs, too, and a network card keeps its pages. Name all of the job's processes in one command; if some \
                      are on other nodes, or were not started with `vramctl run`, pause by tag instead";

/// The ranks of communicators that are not among some processes.
pub struct Elsewhere(BTreeMap<String, String>);

impl Elsewhere {
    /// Looks for them in the processes' status.
    pub fn of<'a>(processes: impl IntoIterator<Item = &'a Process>) -> Self {
        let mut here = BTreeMap::<&str, BTreeSet<&Communicator>>::new();
        for one in processes.into_iter().flat_map(communicators) {
            here.entry(&one.id).or_default().insert(one);
        }
        let missing = |(id, here): (&str, BTreeSet<&Communicator>)| {
            let ranks = here.first()?.ranks;
            let elsewhere = match ranks {
                0 => "ranks that are not known".to_owned(),
                _ if here.len() as u32 == ranks => return None,
                _ => format!("{} of {ranks} ranks elsewhere", ranks.saturating_sub(here.len() as u32)),
            };
            Some((id.to_owned(), elsewhere))
        };
        Self(here.into_iter().filter_map(missing).collect())
    }

    /// What prevents a suspend of this process.
    pub fn obstacle(&self, process: &Process) -> Option<Obstacle> {
        let of_process: BTreeSet<_> = communicators(process).filter_map(|one| Some((&one.id, self.0.get(&one.id)?))).collect();
        let (_, first) = of_process.first()?;
        let more = match of_process.len() {
            1 => String::new(),
            all => format!(", and {}", text::count(all - 1, "other", "others")),
        };
        let what = format!("a communicator of NCCL with {first}{more}: {ADVICE}");
        Some(Obstacle { kind: ObstacleKind::Communicator, what, bytes: 0 })
    }

    /// Fails if NCCL's memory of these processes cannot be paused.
    pub fn check<'a>(processes: impl IntoIterator<Item = &'a Process> + Clone) -> Result<(), CommandError> {
        let elsewhere = Self::of(processes.clone());
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
    use crate::processes::made_up::process;

    fn with(pid: u32, communicators: &[(&str, u32, u32)]) -> Process {
        let mut process = process(pid, "job", &[]);
        let one = |(id, rank, ranks): &(&str, u32, u32)| Communicator { id: (*id).into(), rank: *rank, ranks: *ranks };
        process.status.as_mut().unwrap().memory.communicators = communicators.iter().map(one).collect();
        process
    }

    #[test]
    fn ranks_elsewhere_are_counted() {
        let both = [with(1, &[("a", 0, 2), ("b", 0, 3)]), with(2, &[("a", 1, 2), ("b", 1, 3)])];
        let elsewhere = Elsewhere::of(&both);
        let what = elsewhere.obstacle(&both[1]).unwrap().what;
        assert!(what.starts_with("a communicator of NCCL with 1 of 3 ranks elsewhere: "), "{what}");
        // All ranks of one process, and one that has been split off.
        let whole = [with(1, &[("a", 0, 2), ("a", 1, 2)]), with(2, &[])];
        assert!(whole.iter().all(|process| Elsewhere::of(&whole).obstacle(process).is_none()));
        assert!(Elsewhere::check(&whole).is_ok());
        let unknown = [with(1, &[("", 0, 0), ("a", 0, 4)])];
        let what = Elsewhere::check(&unknown).unwrap_err().to_string();
        assert!(what.contains("ranks that are not known, and 1 other: "), "{what}");
    }
}
