//! `--nccl`: selects the communicators that NCCL is to suspend, and reports the results.

use crate::failure::CommandError;
use crate::observer::Observer;
use crate::processes::{Found, Process};
use crate::text;
use std::collections::{BTreeMap, BTreeSet};
use vramctl_model::{Bytes, Communicator, CommunicatorState, NCCL, Verb};

/// The communicators that NCCL is to suspend.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ChosenCommunicators {
    /// By process.
    communicators: BTreeMap<u32, Vec<Communicator>>,
    /// The communicators that are left as they are, and why.
    left: BTreeSet<String>,
}

impl ChosenCommunicators {
    /// Asks the processes of one job. Where NCCL's memory is managed, it is paused by its tag instead, and NCCL need not do anything.
    pub fn ask(found: &Found, processes: &[&Process]) -> Result<Self, CommandError> {
        let is_managed = |process: &&&Process| process.tags().iter().any(|tag| tag.tag == NCCL);
        if processes.iter().any(|process| is_managed(&process)) {
            return Ok(Self::default());
        }
        let ask = |process: &&Process| Ok((process.pid, found.connect(process.pid)?.communicators()?));
        let all: Vec<_> = processes.iter().map(ask).collect::<Result<_, CommandError>>()?;
        let has_none = all.iter().all(|(_, communicators)| communicators.is_empty());
        let mut chosen = Self::among(all);
        if let Some(first) = processes.first().filter(|_| has_none) {
            chosen.left.insert(format!("{} has no communicators of NCCL; --nccl changes nothing", first.job_or_itself()));
        }
        Ok(chosen)
    }

    /// NCCL waits for all ranks of a communicator, so only communicators whose ranks are all here and suitable are chosen.
    fn among(all: Vec<(u32, Vec<Communicator>)>) -> Self {
        let mut whole = BTreeMap::<_, (u32, Option<String>)>::new();
        for one in all.iter().flat_map(|(_, communicators)| communicators) {
            let (here, unfit) = whole.entry(one.id.clone()).or_default();
            *here += 1;
            let is_away = || (one.state != CommunicatorState::Active).then(|| format!("it is {}", one.state.name()));
            *unfit = unfit.take().or_else(|| one.unfit.clone()).or_else(is_away);
        }
        let mut chosen = Self::default();
        for (pid, communicators) in all {
            let meant = chosen.communicators.entry(pid).or_default();
            for one in communicators {
                let left = match &whole[&one.id] {
                    // Already suspended: no message.
                    _ if one.state == CommunicatorState::Suspended => continue,
                    (_, Some(unfit)) => unfit.clone(),
                    (here, None) if *here != one.ranks => {
                        format!("this job has {here} of its ranks, and NCCL would wait for the others")
                    }
                    _ => {
                        meant.push(one);
                        continue;
                    }
                };
                chosen.left.insert(format!("NCCL keeps the memory of a communicator of {}: {left}", ranks(one.ranks)));
            }
        }
        chosen
    }

    /// The ids to send to a process.
    pub fn ids(&self, pid: u32) -> Vec<String> {
        self.of(pid).iter().map(|one| one.id.clone()).collect()
    }

    /// Those of a process.
    pub fn of(&self, pid: u32) -> &[Communicator] {
        self.communicators.get(&pid).map_or(&[], Vec::as_slice)
    }

    /// Adds the communicators of another job.
    pub fn add(&mut self, other: Self) {
        self.communicators.extend(other.communicators);
        self.left.extend(other.left);
    }

    /// Notes which communicators are left as they are.
    pub fn note_what_is_left(&self, observer: &dyn Observer) {
        self.left.iter().for_each(|why| observer.note(why));
    }
}

/// Bytes of the communicators in this state.
pub fn bytes(communicators: &[Communicator], state: CommunicatorState) -> u64 {
    communicators.iter().filter(|one| one.state == state).map(|one| one.bytes).sum()
}

fn ranks(ranks: u32) -> String {
    match ranks {
        0 => "unknown size".to_owned(),
        ranks => text::count(ranks as usize, "rank", "ranks"),
    }
}

fn several(count: usize) -> String {
    text::count(count, "communicator", "communicators")
}

/// NCCL's successes in one line. `None` if there are none.
pub fn success(verb: Verb, process: &Process, communicators: &[Communicator]) -> Option<String> {
    let state = if verb == Verb::Pause { CommunicatorState::Suspended } else { CommunicatorState::Active };
    let done: Vec<_> = communicators.iter().filter(|one| one.state == state && one.error.is_none()).cloned().collect();
    let (bytes, kept) = (bytes(&done, state), done.iter().map(|one| one.kept_bytes).sum());
    let (count, bytes) = (several(done.len()), Bytes(bytes));
    match verb {
        _ if done.is_empty() => None,
        Verb::Pause => Some(format!("NCCL of {process} gave back {bytes} of {count}; it keeps {}", Bytes(kept))),
        Verb::Resume => Some(format!("NCCL of {process} took back {bytes} of {count}")),
    }
}

/// The line for a dry run. `None` if there is nothing to report.
pub fn foretold(communicators: &[Communicator]) -> Option<String> {
    let kept = communicators.iter().map(|one| one.kept_bytes).sum();
    let bytes = Bytes(bytes(communicators, CommunicatorState::Active));
    let text = || format!("NCCL would give back {bytes} of {}; it keeps {}.", several(communicators.len()), Bytes(kept));
    (!communicators.is_empty()).then(text)
}

/// The failures, and what to do about them.
pub fn failures(process: &Process, communicators: &[Communicator]) -> Vec<String> {
    let tell = |one: &Communicator| {
        let (pid, whose) = (process.pid, format!("a communicator of {}", ranks(one.ranks)));
        let error = one.error.as_deref();
        match (one.state, error) {
            (CommunicatorState::Active | CommunicatorState::Suspended, None) => None,
            (CommunicatorState::Active, Some(error)) => {
                Some(format!("{process}: NCCL keeps the memory of {whose}, which can be used as before: {error}"))
            }
            (CommunicatorState::Suspending, _) => Some(format!(
                "{process}: NCCL has not given back the memory of {whose} yet: it is waiting for the other ranks. The program stays held; \
                 `vramctl status` tells when it is done, and `vramctl resume` of the whole job brings it back"
            )),
            (CommunicatorState::Resuming, _) => Some(format!(
                "{process} stays held: NCCL has not taken back the memory of {whose} yet, because it waits for the other ranks. `vramctl resume` \
                 them, too, and this one continues by itself; if one has ended, end this one (kill {pid}) and start the job again"
            )),
            (CommunicatorState::Suspended, Some(error)) => Some(format!(
                "{process} stays held: NCCL could not take back the memory of {whose}: {error}. If GPU memory was short, free some and \
                 `vramctl resume` again; if a rank has ended, end this one, too (kill {pid}), and start the job again"
            )),
            (CommunicatorState::Broken, error) => Some(format!(
                "{process} stays held: NCCL failed halfway with the memory of {whose}: {}. It can never be used again: \
                 end the job (kill {pid}) and start it again",
                error.unwrap_or_default()
            )),
        }
    };
    communicators.iter().filter_map(tell).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The lines of a status about communicators that are not active.
pub fn described(communicators: &[Communicator]) -> Vec<String> {
    let tell = |one: &Communicator| {
        let (whose, bytes) = (format!("a communicator of {} (NCCL {})", ranks(one.ranks), one.nccl), Bytes(one.bytes));
        let error = one.error.as_deref().map_or_else(String::new, |error| format!(" The last attempt failed: {error}."));
        match one.state {
            CommunicatorState::Active => None,
            CommunicatorState::Suspended => {
                Some(format!("NCCL has given back {bytes} of {whose}; `vramctl resume` of the whole job brings it back.{error}"))
            }
            CommunicatorState::Broken => Some(format!("{whose} is broken: end the job and start it again.{error}")),
            state => Some(format!("{whose} is {}: NCCL waits for its other ranks.", state.name())),
        }
    };
    communicators.iter().filter_map(tell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::made_up::process;

    fn one(id: &str, ranks: u32) -> Communicator {
        Communicator { id: id.into(), ranks, bytes: 1 << 30, kept_bytes: 1 << 20, ..Communicator::default() }
    }

    #[test]
    fn only_whole_communicators_are_chosen() {
        let unfit = Communicator { unfit: Some("too old".into()), ..one("c", 2) };
        let first = vec![one("a", 2), one("b", 3), one("c", 2), one("d", 1)];
        let chosen = ChosenCommunicators::among(vec![(1, first), (2, vec![one("a", 2), one("b", 3), unfit])]);
        assert_eq!((chosen.ids(1), chosen.ids(2)), (vec!["a".to_owned(), "d".to_owned()], vec!["a".to_owned()]));
        let left: Vec<_> = chosen.left.iter().map(String::as_str).collect();
        assert_eq!(
            left,
            [
                "NCCL keeps the memory of a communicator of 2 ranks: too old",
                "NCCL keeps the memory of a communicator of 3 ranks: this job has 2 of its ranks, and NCCL would wait for the others"
            ]
        );
        // All of its ranks in one process.
        assert_eq!(ChosenCommunicators::among(vec![(1, vec![one("a", 2), one("a", 2)])]).ids(1).len(), 2);
    }

    /// A communicator that one rank has suspended and another has not would wait forever.
    #[test]
    fn communicators_that_differ_between_ranks_are_left_alone() {
        let away = Communicator { state: CommunicatorState::Suspended, ..one("a", 2) };
        let chosen = ChosenCommunicators::among(vec![(1, vec![one("a", 2)]), (2, vec![away.clone()])]);
        assert_eq!((chosen.ids(1).len(), chosen.ids(2).len(), chosen.left.len()), (0, 0, 1));
        let chosen = ChosenCommunicators::among(vec![(1, vec![away.clone()]), (2, vec![away])]);
        assert_eq!((chosen.ids(1).len(), chosen.left.len()), (0, 0));
    }

    #[test]
    fn nccls_results_are_reported() {
        let process = process(7, "engine", &[]);
        let suspended = Communicator { state: CommunicatorState::Suspended, ..one("a", 2) };
        let text = success(Verb::Pause, &process, &[suspended.clone(), suspended.clone()]).unwrap();
        assert_eq!(text, "NCCL of engine (pid 7) gave back 2.00 GiB of 2 communicators; it keeps 2.00 MiB");
        assert_eq!(success(Verb::Resume, &process, &[one("a", 2)]).unwrap(), "NCCL of engine (pid 7) took back 1.00 GiB of 1 communicator");
        assert_eq!(success(Verb::Resume, &process, &[]), None);
        assert!(failures(&process, &[suspended.clone(), one("a", 2)]).is_empty());
        let states = [CommunicatorState::Suspending, CommunicatorState::Resuming, CommunicatorState::Broken];
        let failed = states.map(|state| Communicator { state, ..one("a", 2) });
        assert!(failures(&process, &failed).iter().all(|text| text.contains("stays held")));
        assert_eq!((described(&failed).len(), described(&[one("a", 2)]).len(), described(&[suspended]).len()), (3, 0, 1));
    }
}
