//! What a scheduler may take, and which allocations a pause of so much takes: the scheduler counts, the process chooses.

use super::Pause;
use super::choose::Chosen;
use super::contents::{may_be_forgotten, policy_for};
use crate::engine;
use crate::memory::{Allocation, Memory, PausedBy};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramctl_driver as driver;
use vramctl_model::{Amount, Amounts, Bytes, Class, Error, Holdings, PauseRequest, Policy, Selection};

/// The most classes and sizes of which a process tells on each GPU: those with the most bytes.
const MOST: usize = 256;

/// How many there are of each class and size.
type Counts = BTreeMap<(Class, u64), u64>;

impl Memory {
    /// What the scheduler may take, and what it has taken.
    pub fn holdings(&self) -> Holdings {
        let request = PauseRequest { amounts: Some(Amounts::new()), ..PauseRequest::default() };
        let pause = Pause { request, is_from_outside: true, engine: engine::name(), unused: Vec::new() };
        let (mut here, mut away) = (BTreeMap::<_, Counts>::new(), BTreeMap::<_, Counts>::new());
        for allocation in &self.registry.all() {
            let (into, class) = match () {
                () if !is_free_to_take(allocation) && !is_taken(allocation) => continue,
                () if is_taken(allocation) => (&mut away, class_of_taken(allocation)),
                // The scheduler asks the engine before it takes anything.
                () if may_be_forgotten(&pause, allocation) => (&mut here, Class::Discardable),
                () => (&mut here, class_of(&pause, allocation)),
            };
            *into.entry(allocation.device).or_default().entry((class, allocation.bytes() as u64)).or_default() += 1;
        }
        let amounts = |counts: BTreeMap<_, Counts>, list: fn(&Counts) -> Vec<Amount>| {
            counts.into_iter().filter_map(|(device, counts)| Some((driver::uuid(device)?, list(&counts)))).collect()
        };
        Holdings { here: amounts(here, largest), away: amounts(away, all) }
    }
}

impl Chosen {
    /// Leaves out what the request does not take.
    pub(super) fn take_amounts(&mut self, pause: &Pause) -> Result<(), Error> {
        let Some(amounts) = &pause.request.amounts else { return Ok(()) };
        if pause.request.scheduler.is_none() {
            return Err(Error::Invalid("`amounts` are for a scheduler: name tags".into()));
        }
        let mut there = BTreeMap::<_, Vec<_>>::new();
        for allocation in self.active.drain(..).filter(|allocation| is_free_to_take(allocation)) {
            there.entry(driver::uuid(allocation.device).unwrap_or_default()).or_default().push(allocation);
        }
        // What is paused already is not asked for.
        self.paused.clear();
        for (gpu, amounts) in amounts {
            let there = there.remove(gpu).unwrap_or_default();
            let offered: Vec<_> = there.iter().map(|allocation| (class_of(pause, allocation), allocation.bytes() as u64)).collect();
            let Some(picked) = pick(&offered, amounts) else {
                let bytes = Bytes(amounts.iter().map(Amount::total).sum());
                return Err(Error::Invalid(format!("{bytes} on {gpu} are no longer free to go as they were asked for")));
            };
            self.active.extend(picked.into_iter().map(|place| Arc::clone(&there[place])));
        }
        self.active.sort_by_cached_key(|allocation| allocation.address().unwrap_or(allocation.key()));
        Ok(())
    }
}

/// Whether nobody else would notice if this memory went, and nothing else has to go with it.
fn is_free_to_take(allocation: &Allocation) -> bool {
    if allocation.on_device().is_none() || !Selection::default().selects(&allocation.tag) {
        return false;
    }
    let contents = allocation.contents();
    contents.state.is_active() && contents.registrant().is_none() && !contents.lending.has_begun()
}

fn is_taken(allocation: &Allocation) -> bool {
    allocation.on_device().is_some() && allocation.contents().state.paused_by() == Some(PausedBy::SCHEDULER)
}

fn class_of(pause: &Pause, allocation: &Allocation) -> Class {
    match policy_for(pause, allocation) {
        Policy::Discard => Class::Discardable,
        _ if allocation.contents().state.backup().is_some() => Class::Retained,
        _ => Class::Kept,
    }
}

fn class_of_taken(allocation: &Allocation) -> Class {
    if allocation.contents().state.backup().is_some() { Class::Kept } else { Class::Discardable }
}

fn list(counts: &Counts) -> Vec<Amount> {
    counts.iter().map(|(&(class, bytes), &count)| Amount { class, bytes, count }).collect()
}

/// Those with the most bytes: the rest is not worth its place.
fn largest(counts: &Counts) -> Vec<Amount> {
    let mut amounts = list(counts);
    amounts.sort_by_key(|amount| Reverse(amount.total()));
    amounts.truncate(MOST);
    amounts
}

/// All of them, the rest as one.
fn all(counts: &Counts) -> Vec<Amount> {
    let mut amounts = list(counts);
    amounts.sort_by_key(|amount| Reverse(amount.total()));
    let rest: u64 = amounts.split_off(amounts.len().min(MOST)).iter().map(Amount::total).sum();
    amounts.extend((rest > 0).then_some(Amount { class: Class::Kept, bytes: rest, count: 1 }));
    amounts
}

/// The places of what goes: as many of each class and size as are asked for. For those that are not there, as many bytes, the cheapest first, with no
/// more contents than were asked for, or those of one allocation more: programs take and free memory between the question and the order. `None`: there
/// is not as much.
fn pick(there: &[(Class, u64)], amounts: &[Amount]) -> Option<Vec<usize>> {
    let mut by_kind = BTreeMap::<(Class, Reverse<u64>), Vec<usize>>::new();
    for (place, &(class, bytes)) in there.iter().enumerate().rev() {
        by_kind.entry((class, Reverse(bytes))).or_default().push(place);
    }
    let (mut picked, mut missing, mut contents) = (Vec::new(), 0_u64, 0_u64);
    for Amount { class, bytes, count } in amounts {
        let places = by_kind.get_mut(&(*class, Reverse(*bytes)));
        let found = places.as_ref().map_or(0, |places| places.len() as u64).min(*count);
        picked.extend(places.into_iter().flat_map(|places| places.split_off(places.len() - found as usize)));
        let lacking = bytes.saturating_mul(count - found);
        missing = missing.saturating_add(lacking);
        contents += if class.has_contents() { lacking } else { 0 };
    }
    for class in [Class::Discardable, Class::Retained, Class::Kept] {
        let mut smallest_left = None;
        for (&(_, Reverse(bytes)), places) in by_kind.range_mut((class, Reverse(u64::MAX))..=(class, Reverse(0))) {
            let fits = if class.has_contents() { missing.min(contents) } else { missing } / bytes;
            let number = fits.min(places.len() as u64);
            picked.extend(places.split_off(places.len() - number as usize));
            missing -= bytes * number;
            contents -= if class.has_contents() { bytes * number } else { 0 };
            if let Some(place) = places.last() {
                smallest_left = Some((*place, bytes));
            }
        }
        // What is left of this class is larger than what is missing, unless its contents have no place.
        if let Some((place, bytes)) = smallest_left.filter(|(_, bytes)| missing > 0 && (!class.has_contents() || *bytes <= contents)) {
            picked.push(place);
            missing = missing.saturating_sub(bytes);
            contents -= if class.has_contents() { bytes } else { 0 };
        }
        if missing == 0 {
            break;
        }
    }
    if missing > 0 && contents > 0 {
        let left = by_kind.iter().filter_map(|(&(_, Reverse(bytes)), places)| Some((bytes, *places.last()?)));
        if let Some((_, place)) = left.filter(|&(bytes, _)| bytes >= missing).min() {
            picked.push(place);
            missing = 0;
        }
    }
    picked.sort_unstable();
    (missing == 0).then_some(picked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Class::{Discardable, Kept, Retained};

    fn amounts(list: &[(Class, u64, u64)]) -> Vec<Amount> {
        list.iter().map(|&(class, bytes, count)| Amount { class, bytes, count }).collect()
    }

    fn picked(asked: &[(Class, u64, u64)]) -> Option<Vec<usize>> {
        let there = [(Kept, 4), (Kept, 4), (Discardable, 6), (Retained, 10), (Kept, 20), (Kept, 4)];
        pick(&there, &amounts(asked))
    }

    #[test]
    fn what_is_asked_for_goes_if_it_is_there() {
        assert_eq!(picked(&[]), Some(Vec::new()));
        assert_eq!(picked(&[(Kept, 4, 2)]), Some(vec![0, 1]));
        assert_eq!(picked(&[(Kept, 20, 1), (Kept, 4, 3), (Discardable, 6, 1)]), Some(vec![0, 1, 2, 4, 5]));
    }

    /// A class has changed, or a size.
    #[test]
    fn otherwise_as_many_bytes_go_the_cheapest_first() {
        assert_eq!(picked(&[(Kept, 5, 1)]), Some(vec![2]), "the discardable one is larger, and has no contents");
        assert_eq!(picked(&[(Retained, 10, 2)]), Some(vec![0, 2, 3]));
        assert_eq!(picked(&[(Discardable, 6, 1), (Kept, 8, 1)]), Some(vec![0, 1, 2]));
        assert_eq!(picked(&[(Kept, 48, 1)]), Some(vec![0, 1, 2, 3, 4, 5]), "all");
        assert_eq!(picked(&[(Kept, 49, 1)]), None, "there is less");
    }

    #[test]
    fn no_more_contents_go_than_were_asked_for() {
        assert_eq!(picked(&[(Discardable, 6, 2)]), None);
        assert_eq!(picked(&[(Kept, 13, 1)]), Some(vec![2, 3]));
        assert_eq!(
            pick(&[(Kept, 9), (Kept, 9), (Kept, 9)], &amounts(&[(Discardable, 20, 1), (Kept, 9, 1)])),
            None,
            "two more would have to go"
        );
    }

    /// What was asked for was freed since, and everything else is larger.
    #[test]
    fn or_those_of_one_allocation_more() {
        assert_eq!(picked(&[(Discardable, 6, 2), (Kept, 3, 1)]), Some(vec![2, 3]));
        assert_eq!(picked(&[(Discardable, 6, 2), (Kept, 9, 1)]), Some(vec![0, 1, 2, 3]));
        assert_eq!(pick(&[(Kept, 22), (Kept, 22)], &amounts(&[(Kept, 20, 2)])), Some(vec![0, 1]));
        assert_eq!(pick(&[(Kept, 900)], &amounts(&[(Kept, 6, 1)])), Some(vec![0]));
    }

    /// A program may have many allocations of different sizes.
    #[test]
    fn the_list_is_short_and_its_sum_is_right() {
        let counts: Counts = (1..100_000_u64).map(|bytes| ((Kept, bytes), 1)).collect();
        assert_eq!((largest(&counts).len(), all(&counts).len()), (MOST, MOST + 1));
        assert_eq!(all(&counts).iter().map(Amount::total).sum::<u64>(), (1..100_000_u64).sum::<u64>());
        assert_eq!(largest(&counts)[0].bytes, 99_999);
    }
}
