//! Who listens in a directory, and who does not although it lives: their pids here, and what they call each other.

use crate::absence::{Absence, Absent, Found};
use crate::address::{Address, HIDDEN, MOST_NAMESAKES, namespace_of};
use std::collections::BTreeMap;
use std::path::Path;
use vramctl_host::system::{folder_of, own_folder};

/// Added to the pid here of a process that another one, of another namespace, has no pid for: above all numbers of hidden ones.
const HERE: u32 = 1 << 30;

/// Processes that listen.
#[derive(Debug, Default)]
pub struct Listeners {
    found: BTreeMap<u32, Listed>,
    /// Those that live and do not listen.
    absent: Vec<Absent>,
}

#[derive(Debug)]
struct Listed {
    address: Address,
    /// The inode of its PID namespace. `None` if that cannot be known.
    namespace: Option<u64>,
    is_of_our_namespace: bool,
}

impl Listeners {
    /// By their pids here, `None` for those that cannot be seen, and their addresses.
    /// `alive`: those known to live. `marked`: those that are said not to listen.
    pub(crate) fn of(mut listening: Vec<(Option<u32>, Address)>, alive: Vec<Address>, marked: Vec<Found>) -> Self {
        listening.sort_by(|(_, one), (_, other)| one.cmp(other));
        let (mut known, mut unseen) = (Self::default(), Vec::new());
        for (here, address) in listening {
            let Some(here) = here else {
                unseen.push(address);
                continue;
            };
            let is_of_our_namespace = here == address.pid;
            let namespace = address.namespace.or_else(|| if is_of_our_namespace { None } else { namespace_of(&folder_of(here)) });
            known.found.insert(here, Listed { address, namespace, is_of_our_namespace });
        }
        for address in unseen {
            if let Some(number) = known.number_for(&address) {
                known.found.insert(number, Listed { namespace: address.namespace, address, is_of_our_namespace: false });
            }
        }
        let own = namespace_of(own_folder());
        let listens = |known: &Self, address: &Address| known.found.values().any(|listed| listed.may_be(address, own));
        let (mut absent, are_said) = (Vec::new(), marked.iter().map(|found| found.address.clone()).collect::<Vec<_>>());
        for Found { address, seen, name, why } in marked {
            if !listens(&known, &address) {
                absent.push((seen, address, name, why));
            }
        }
        for address in alive.into_iter().filter(|address| !are_said.contains(address) && !listens(&known, address)) {
            // A child that it has forked without the library's knowledge may have its lock.
            let seen = (address.namespace == own).then_some(address.pid);
            if seen.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
                absent.push((seen, address, None, Absence::Deleted));
            }
        }
        for (seen, address, name, why) in absent {
            let pid = seen.or_else(|| known.number_for(&address));
            known.absent.extend(pid.map(|pid| Absent { pid, name, why }));
        }
        known
    }

    /// A number for a process that cannot be seen.
    fn number_for(&self, address: &Address) -> Option<u32> {
        let mut numbers = (1..=MOST_NAMESAKES).map(|nth| nth * HIDDEN + address.pid % HIDDEN);
        numbers.find(|number| !self.found.contains_key(number) && self.absent.iter().all(|absent| absent.pid != *number))
    }

    /// Those that live and do not listen.
    pub fn absent(&self) -> &[Absent] {
        &self.absent
    }

    /// Their pids here.
    pub fn pids(&self) -> Vec<u32> {
        self.found.keys().copied().collect()
    }

    /// Where the process of this pid here listens.
    pub fn address(&self, pid: u32) -> Option<&Address> {
        self.found.get(&pid).map(|listener| &listener.address)
    }

    /// The pid here of the process that another one, of this pid here, calls so.
    pub fn pid_here(&self, pid: u32, of: u32) -> u32 {
        if let Some(here) = pid.checked_sub(HERE) {
            return here;
        }
        let Some(speaker) = self.found.get(&of).filter(|speaker| !speaker.is_of_our_namespace && pid != 0) else { return pid };
        let is_meant = |listener: &Listed| listener.address.pid == pid && speaker.is_beside(listener);
        if is_meant(speaker) {
            return of;
        }
        // One that does not listen cannot be known, and must not pass for one of ours.
        self.found.iter().find(|(_, listener)| is_meant(listener)).map_or(HIDDEN + pid % HIDDEN, |(pid, _)| *pid)
    }

    /// What another process, of this pid here, calls the process of a pid here.
    pub fn pid_there(&self, pid: u32, of: u32) -> u32 {
        match (self.found.get(&of), self.found.get(&pid)) {
            (Some(speaker), Some(meant)) if speaker.is_beside(meant) => meant.address.pid,
            // It only remembers the number.
            (Some(speaker), Some(_)) if !speaker.is_of_our_namespace => HERE + pid,
            _ => pid,
        }
    }
}

impl Listed {
    /// Whether it is the process of this address, as far as can be known. `own`: the PID namespace of this process.
    fn may_be(&self, address: &Address, own: Option<u64>) -> bool {
        let namespace = if self.is_of_our_namespace { own } else { self.namespace };
        self.address.pid == address.pid && (namespace.is_none() || namespace == address.namespace)
    }

    /// Whether both are in the same namespace, as far as can be known.
    fn is_beside(&self, other: &Self) -> bool {
        self.is_of_our_namespace == other.is_of_our_namespace && (self.is_of_our_namespace || self.namespace == other.namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::hidden;

    /// A container in which 7 and 8 are what is 107 and 108 here, and another one that cannot be seen.
    #[test]
    fn each_process_gets_the_pids_of_its_own_namespace() {
        let listener = |pid, namespace, ours| Listed { address: Address::plain(pid), namespace, is_of_our_namespace: ours };
        let found = BTreeMap::from([
            (7, listener(7, None, true)),
            (9, listener(9, None, true)),
            (107, listener(7, Some(1), false)),
            (108, listener(8, Some(1), false)),
            (HIDDEN + 7, listener(7, None, false)),
        ]);
        let known = Listeners { found, absent: Vec::new() };
        assert_eq!([7, 9].map(|pid| known.pid_there(pid, 7)), [7, 9]);
        assert_eq!([107, 108].map(|pid| known.pid_there(pid, 107)), [7, 8]);
        assert_eq!([0, 7, 8].map(|pid| known.pid_here(pid, 107)), [0, 107, 108]);
        assert_eq!(known.pid_here(9, 107), HIDDEN + 9, "that is not the 9 here");
        // What is remembered of another namespace's processes comes back as it was told.
        for (pid, of) in [(9, 107), (9, HIDDEN + 7), (108, HIDDEN + 7), (HIDDEN + 7, 107), (107, 9)] {
            assert_eq!(known.pid_here(known.pid_there(pid, of), of), pid);
        }
        assert_eq!(known.pid_there(107, 9), 107, "it sees that one so");
        assert_eq!(known.pid_here(9, 7), 9);
        assert_eq!(known.pid_here(7, HIDDEN + 7), HIDDEN + 7);
        assert_eq!((hidden(HIDDEN + 7), hidden(7)), (Some(7), None));
    }
}
