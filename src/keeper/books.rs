//! What members hold, in the scheduler's terms: from what they say and from what NVML counts.

use std::collections::BTreeMap;
use vramctl_driver::{self as driver, Card};
use vramctl_model::{self as model, Amount, Amounts};
use vramctl_scheduler::{Class, GpuId, Holdings, Memory, PerGpu};

/// The GPUs of the host, numbered, and what NVML counts on each.
#[derive(Debug, Default)]
pub struct Gpus {
    numbers: BTreeMap<String, GpuId>,
    cards: Vec<Card>,
    /// Bytes by GPU and process.
    used: BTreeMap<(GpuId, u32), u64>,
}

impl Gpus {
    /// Asks NVML.
    pub fn look(&mut self) {
        self.cards = driver::cards().unwrap_or_default();
        self.used.clear();
        for card in &self.cards {
            let next = GpuId(self.numbers.len() as u32);
            let number = *self.numbers.entry(card.uuid.clone()).or_insert(next);
            for holder in driver::holders_of(&card.uuid) {
                self.used.insert((number, holder.pid), holder.bytes.unwrap_or(0));
            }
        }
    }

    /// The number of a GPU.
    pub fn number(&self, uuid: &str) -> Option<GpuId> {
        self.numbers.get(uuid).copied()
    }

    /// Bytes by the GPUs' UUIDs.
    pub fn named(&self, bytes: &PerGpu) -> BTreeMap<String, u64> {
        self.numbers.iter().filter_map(|(uuid, number)| Some((uuid.clone(), *bytes.get(number)?))).collect()
    }

    /// Bytes of a GPU: free, and all.
    pub fn free_and_all(&self, number: GpuId) -> [u64; 2] {
        let card = self.cards.iter().find(|card| self.number(&card.uuid) == Some(number));
        card.map_or([0; 2], |card| [card.free, card.free + card.used])
    }

    /// Allocations of one process, as it is asked for them.
    pub fn amounts<'a>(&self, taken: impl IntoIterator<Item = (GpuId, &'a Holdings)>) -> Amounts {
        let of_gpu = |(number, holdings): (GpuId, &Holdings)| {
            let (uuid, _) = self.numbers.iter().find(|(_, known)| **known == number)?;
            let amounts = holdings.iter().map(|(class, bytes, count)| Amount { class: asked(class), bytes, count });
            Some((uuid.clone(), amounts.collect()))
        };
        taken.into_iter().filter_map(of_gpu).collect()
    }

    /// Each GPU, its bytes in all, and those that members do not hold.
    pub fn unmanaged(&self, members: &[u32]) -> Vec<(GpuId, u64, u64)> {
        let of = |card: &Card| {
            let number = self.number(&card.uuid)?;
            let held: u64 = members.iter().filter_map(|pid| self.used.get(&(number, *pid))).sum();
            Some((number, card.free + card.used, card.used.saturating_sub(held)))
        };
        self.cards.iter().filter_map(of).collect()
    }

    /// The processes on a GPU that are no members, with their bytes.
    pub fn others(&self, number: GpuId, members: &[u32]) -> impl Iterator<Item = (u32, u64)> {
        let others = self.used.iter().filter(move |((gpu, pid), _)| *gpu == number && !members.contains(pid));
        others.map(|((_, pid), bytes)| (*pid, *bytes))
    }

    /// What a member has on each GPU. `peaks`: the most so far, which this raises.
    pub fn memory(&self, pid: u32, holdings: &model::Holdings, peaks: &mut PerGpu) -> PerGpu<Memory> {
        let mut all: PerGpu<Memory> = peaks.keys().map(|number| (*number, Memory::default())).collect();
        for (uuid, amounts) in &holdings.here {
            if let Some(number) = self.number(uuid) {
                all.entry(number).or_default().resident = counted(amounts);
            }
        }
        for (uuid, amounts) in &holdings.away {
            if let Some(number) = self.number(uuid) {
                all.entry(number).or_default().away = counted(amounts);
            }
        }
        for ((number, holder), used) in &self.used {
            if *holder == pid {
                let memory = all.entry(*number).or_default();
                memory.fixed = used.saturating_sub(memory.resident.bytes());
            }
        }
        for (number, memory) in &mut all {
            let peak = peaks.entry(*number).or_default();
            *peak = (*peak).max(memory.own());
            memory.peak = *peak;
        }
        all
    }
}

fn counted(amounts: &[Amount]) -> Holdings {
    amounts.iter().map(|amount| (known(amount.class), amount.bytes, amount.count)).collect()
}

fn known(class: model::Class) -> Class {
    match class {
        model::Class::Discardable => Class::Discardable,
        model::Class::Retained => Class::Unchanged,
        model::Class::Kept => Class::Kept,
    }
}

fn asked(class: Class) -> model::Class {
    match class {
        Class::FreeCache | Class::Discardable => model::Class::Discardable,
        Class::Unchanged => model::Class::Retained,
        Class::Kept => model::Class::Kept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A member gets the numbers back that it gave.
    #[test]
    fn amounts_pass_through_the_scheduler_as_they_are() {
        let gpus = Gpus { numbers: [("GPU-a".to_owned(), GpuId(0)), ("GPU-b".to_owned(), GpuId(1))].into(), ..Gpus::default() };
        let amounts = vec![
            Amount { class: model::Class::Discardable, bytes: 2, count: 5 },
            Amount { class: model::Class::Retained, bytes: 4, count: 1 },
            Amount { class: model::Class::Kept, bytes: 3, count: 7 },
        ];
        let here: Amounts = [("GPU-b".to_owned(), amounts)].into();
        let away = [("GPU-a".to_owned(), vec![Amount { class: model::Class::Kept, bytes: 6, count: 2 }])].into();
        let memory = gpus.memory(1, &model::Holdings { here: here.clone(), away }, &mut PerGpu::new());
        assert_eq!((memory[&GpuId(0)].away.bytes(), memory[&GpuId(1)].resident.bytes(), memory[&GpuId(1)].own()), (12, 35, 35));
        assert_eq!(gpus.amounts(memory.iter().map(|(gpu, memory)| (*gpu, &memory.resident)).skip(1)), here);
    }
}
