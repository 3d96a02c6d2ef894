//! How much device memory there is, and for what: counted at the calls by which the driver gives and takes it. So it is right whatever
//! is being done with the memory: while a pause saves it, while a resume fills it, and while the driver refuses to take it back.

use super::CUdevice;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use vramctl_host::{PerProcess, Unpoison};

/// Where physical memory is counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// The device that has the memory.
    pub device: CUdevice,
    /// What it is for, in the caller's words.
    pub label: Option<Arc<str>>,
}

static BALANCES: PerProcess<Mutex<BTreeMap<Account, u64>>> = PerProcess::new(Mutex::default);

fn balances() -> MutexGuard<'static, BTreeMap<Account, u64>> {
    BALANCES.get().lock().unpoisoned()
}

impl Account {
    /// Memory with a label.
    pub fn of(device: CUdevice, label: &Arc<str>) -> Self {
        Self { device, label: Some(Arc::clone(label)) }
    }

    /// The driver has given some.
    pub(super) fn add(&self, bytes: usize) {
        *balances().entry(self.clone()).or_default() += bytes as u64;
    }

    /// The driver has taken some back.
    pub(super) fn subtract(&self, bytes: usize) {
        let mut balances = balances();
        let Some(balance) = balances.get_mut(self) else { return };
        *balance = balance.saturating_sub(bytes as u64);
        if *balance == 0 {
            balances.remove(self);
        }
    }
}

/// Device memory that there is now. Accounts without any are left out.
pub fn device_memory() -> BTreeMap<Account, u64> {
    balances().clone()
}
