//! Random sequences against a model.

use crate::common::{Folder, Program, SMALL};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use vramctl_store::{Error, Store};

#[derive(Debug, Clone)]
enum Action {
    Save(u8, Vec<u64>),
    /// A save of which the process ends at a step.
    SavePart(u8, Vec<u64>, usize),
    Remove(u8),
    Gc,
    /// A `gc` of which the process ends at a step.
    GcPart(usize),
    Copy(u8, u8),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let name = || 0_u8..4;
    let seeds = || prop::collection::vec(0_u64..12, 1..8);
    let action = prop_oneof![
        4 => (name(), seeds()).prop_map(|(name, seeds)| Action::Save(name, seeds)),
        2 => (name(), seeds(), 0_usize..80).prop_map(|(name, seeds, step)| Action::SavePart(name, seeds, step)),
        3 => name().prop_map(Action::Remove),
        2 => Just(Action::Gc),
        2 => (0_usize..60).prop_map(Action::GcPart),
        1 => (name(), name()).prop_map(|(from, to)| Action::Copy(from, to)),
    ];
    prop::collection::vec(action, 1..12)
}

fn dying(folder: &Folder, step: usize) -> Result<Store, Error> {
    let counter = AtomicUsize::new(0);
    let hook = move |_: vramctl_store::Step, _: &std::path::Path| {
        if counter.fetch_add(1, Ordering::Relaxed) < step { Ok(()) } else { Err(std::io::ErrorKind::Other.into()) }
    };
    Store::create_with_hook(&folder.images(), Arc::new(hook))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn images_are_what_was_saved(actions in actions()) {
        let folder = Folder::new();
        let store = folder.store();
        let mut model = BTreeMap::<String, Vec<u64>>::new();
        for action in actions {
            match action {
                Action::Save(name, seeds) => {
                    let name = name.to_string();
                    let saved = Program::of(&seeds).save(&store, &name);
                    prop_assert_eq!(saved.is_ok(), !model.contains_key(&name), "{:?}", saved);
                    model.entry(name).or_insert(seeds);
                }
                Action::SavePart(name, seeds, step) => {
                    let name = name.to_string();
                    drop(dying(&folder, step).and_then(|store| Program::of(&seeds).save(&store, &name)));
                    if store.names().unwrap().contains(&name) {
                        model.entry(name).or_insert(seeds);
                    }
                }
                Action::Remove(name) => {
                    let removed = store.remove(&name.to_string());
                    prop_assert_eq!(removed.is_ok(), model.remove(&name.to_string()).is_some(), "{:?}", removed);
                }
                Action::Gc => {
                    let cleaned = store.gc(Duration::from_secs(60)).unwrap();
                    prop_assert!(cleaned.left.is_empty(), "{:?}", cleaned.left);
                }
                Action::GcPart(step) => drop(dying(&folder, step).and_then(|store| store.gc(Duration::from_secs(60)))),
                Action::Copy(from, to) => {
                    let (from, to) = (from.to_string(), to.to_string());
                    let copied = store.inspect(&from).and_then(|image| image.copy_to(&store, &to));
                    prop_assert_eq!(copied.is_ok(), model.contains_key(&from) && !model.contains_key(&to), "{:?}", copied);
                    if copied.is_ok() {
                        model.insert(to, model[&from].clone());
                    }
                }
            }
            prop_assert_eq!(store.names().unwrap(), model.keys().cloned().collect::<Vec<_>>());
            for (name, seeds) in &model {
                prop_assert_eq!(Program::load(&store, name).unwrap(), Program::of(seeds));
            }
        }
        store.gc(Duration::from_secs(60)).unwrap();
        let pieces: BTreeSet<Vec<u8>> =
            model.values().flat_map(|seeds| Program::of(seeds).memory).map(|(_, bytes)| bytes).filter(|bytes| bytes[0] != 0).collect();
        let stored: u64 = folder.packs().iter().map(|pack| fs::metadata(pack).unwrap().len()).sum();
        // Less than a quarter of a pack is what nobody needs.
        prop_assert!(stored * 3 <= (pieces.len() * SMALL) as u64 * 4, "{stored} bytes for {} pieces", pieces.len());
    }
}
