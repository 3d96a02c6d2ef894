//! Devices whose driver refuses virtual memory: what the program asks for there is left to CUDA.
//!
//! A refusal may be the only one, so the driver is asked again, but ever more rarely while it keeps refusing.
//!
//! Unless memory is short, a request may have failed only because it is for virtual memory. So the real function answers: plain CUDA may or may
//! not fail as well. Only the program's own `cuMemCreate` gets the driver's answer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use vramctl_driver::{self as driver, CUdevice};
use vramctl_host::Unpoison;
use vramctl_model::{Failure, RefusingDevice};

#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<BTreeMap<CUdevice, Refusing>>);

#[derive(Debug)]
struct Refusing {
    last: Failure,
    /// Refused requests in a row, up to the last one. 0: the driver has granted one since.
    in_a_row: u32,
    /// How many more requests are left to CUDA unasked.
    unasked: u32,
}

/// The most requests in a row that are left to CUDA without asking the driver.
const MOST_UNASKED: u32 = 1 << 10;

impl Refusals {
    fn all(&self) -> MutexGuard<'_, BTreeMap<CUdevice, Refusing>> {
        self.0.lock().unpoisoned()
    }

    /// Counts the next request as left to CUDA without asking the driver, if it is; then what the driver has refused last.
    pub fn skip(&self, device: CUdevice) -> Option<Failure> {
        let mut all = self.all();
        let refused = all.get_mut(&device).filter(|refused| refused.unasked > 0)?;
        refused.unasked -= 1;
        Some(refused.last)
    }

    /// Records the driver's answer to a request.
    pub fn note<T>(&self, device: CUdevice, answer: &Result<T, Failure>) {
        let mut all = self.all();
        match answer {
            Ok(_) => {
                if let Some(refused) = all.get_mut(&device) {
                    refused.in_a_row = 0;
                }
            }
            Err(failure) if failure.is_refusal() => {
                let is_first = !all.contains_key(&device);
                let refused = all.entry(device).or_insert(Refusing { last: *failure, in_a_row: 0, unasked: 0 });
                refused.last = *failure;
                // The first refusals may be the only ones.
                refused.unasked = (1 << refused.in_a_row.min(31)).min(MOST_UNASKED) - 1;
                refused.in_a_row += 1;
                drop(all);
                if is_first {
                    log::warn!(
                        "{}: the driver refuses virtual memory ({failure}). What the program allocates there is left to CUDA and cannot be \
                         paused, unless the driver grants later requests; `vramctl doctor` tests it",
                        driver::gpu_in_words(device)
                    );
                }
            }
            Err(_) => (),
        }
    }

    /// The devices where it has refused the last request.
    pub fn now(&self) -> Vec<RefusingDevice> {
        let refused: Vec<_> = self.all().iter().filter(|(_, one)| one.in_a_row > 0).map(|(device, one)| (*device, one.last)).collect();
        // The driver is asked without the lock.
        refused
            .into_iter()
            .map(|(device, failure)| RefusingDevice { device, gpu: driver::uuid(device), what: failure.to_string() })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramctl_model::code;

    const REFUSED: Result<(), Failure> = Err(Failure { call: "cuMemMap", code: code::UNKNOWN });

    /// How many of so many requests the driver is asked for.
    fn asked(refusals: &Refusals, requests: u32, answer: Result<(), Failure>) -> u32 {
        let ask = |_: &u32| {
            let is_asked = refusals.skip(0).is_none();
            if is_asked {
                refusals.note(0, &answer);
            }
            is_asked
        };
        (0..requests).filter(ask).count() as u32
    }

    #[test]
    fn a_driver_that_keeps_refusing_is_asked_ever_more_rarely_and_never_given_up() {
        let refusals = Refusals::default();
        assert_eq!(asked(&refusals, 2, REFUSED), 2, "one refusal may be the only one");
        let first = asked(&refusals, 2000, REFUSED);
        assert!((9..=11).contains(&first), "{first}");
        assert_eq!(asked(&refusals, 10 * MOST_UNASKED, REFUSED), 10);
        assert_eq!(refusals.now().len(), 1);
        assert!(asked(&refusals, MOST_UNASKED, Ok(())) > 0);
        assert!(refusals.now().is_empty() && asked(&refusals, 5, Ok(())) == 5);
    }

    #[test]
    fn lack_of_memory_is_no_refusal_and_other_devices_are_unaffected() {
        let refusals = Refusals::default();
        refusals.note(0, &Err::<(), _>(Failure { call: "cuMemCreate", code: code::OUT_OF_MEMORY }));
        assert!(refusals.now().is_empty());
        asked(&refusals, 50, REFUSED);
        assert!(refusals.skip(0).is_some() && refusals.skip(1).is_none());
    }
}
