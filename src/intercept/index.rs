//! Where the driver's functions are in the tables, by their names: a hash table that is made when the library is built, so that a look-up
//! neither allocates nor locks.

use crate::entry::DriverFunction;

/// About three times as many as there are functions.
const SLOTS: usize = 2048;

/// What a function is found by.
#[derive(Clone, Copy)]
pub enum Key {
    Symbol,
    /// What `cuGetProcAddress` knows it by. Several may have the same one.
    Name,
}

impl Key {
    const fn of(self, function: &'static DriverFunction) -> &'static [u8] {
        match self {
            Self::Symbol => function.symbol.to_bytes(),
            Self::Name => function.name.as_bytes(),
        }
    }
}

pub struct Index {
    key: Key,
    tables: [&'static [DriverFunction]; 2],
    /// The number of a function from 1 on, or 0.
    slots: [u16; SLOTS],
}

impl Index {
    pub const fn new(key: Key, tables: [&'static [DriverFunction]; 2]) -> Self {
        let mut index = Self { key, tables, slots: [0; SLOTS] };
        let mut number = 0;
        while number < tables[0].len() + tables[1].len() {
            let mut slot = hash(key.of(index.function(number))) % SLOTS;
            while index.slots[slot] != 0 {
                slot = (slot + 1) % SLOTS;
            }
            number += 1;
            index.slots[slot] = number as u16;
        }
        index
    }

    /// The functions with this key, in the order of the tables.
    pub fn find(&'static self, key: &[u8]) -> impl Iterator<Item = &'static DriverFunction> {
        let first = hash(key);
        let numbers = (first..).map(|slot| self.slots[slot % SLOTS]).take_while(|number| *number != 0);
        numbers.map(|number| self.function(usize::from(number) - 1)).filter(move |function| self.key.of(function) == key)
    }

    const fn function(&self, number: usize) -> &'static DriverFunction {
        let [first, second] = self.tables;
        if number < first.len() { &first[number] } else { &second[number - first.len()] }
    }
}

/// FNV-1a. The upper half, in which all of the key shows.
const fn hash(key: &[u8]) -> usize {
    let (mut hash, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while at < key.len() {
        hash = (hash ^ key[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    (hash >> 32) as usize
}
