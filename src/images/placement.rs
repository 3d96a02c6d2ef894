//! Which GPUs a loaded program gets: its own, those that the user names, or on another machine those that can only be meant.

use crate::details::counted;
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_coordinator::gpus;
use vramctl_driver::Card;
use vramctl_driver::checkpoint::GpuMap;
use vramctl_model::{short_uuid, support};
use vramctl_store::Gpu;

/// Where a program had its GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Those that it sees, in the order of their indices.
    pub own: &'a [Gpu],
    /// All of the machine; none in images that do not say it.
    pub all: &'a [Gpu],
}

/// A GPU for each of a program's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Its own, each with the one that it gets.
    pub own: Vec<(Gpu, Card)>,
    /// What the driver is told: all GPUs of the machine of the save, as far as there are some for them here. Empty if all are where they were.
    pub map: GpuMap,
}

impl Placement {
    /// Finds them. `named`: by the user; if by nobody, a program keeps what it had, and gets others in place of what is not here if there are no more
    /// of their model than it needs.
    pub fn find(saved: Saved<'_>, named: &[String], cards: &[Card]) -> Result<Self, CommandError> {
        let targets = if named.is_empty() { meant(saved.own, cards)? } else { as_named(saved.own, named, cards)? };
        if let Some(card) = targets.iter().find(|card| card.mig) {
            return Err(failed(&support::in_mig_mode(card.index)));
        }
        let own: Vec<_> = saved.own.iter().zip(targets).collect();
        let map = complete(&own, saved.all, cards);
        let own = own.into_iter().map(|(gpu, card)| (gpu.clone(), card.clone())).collect();
        Ok(Self { own, map })
    }

    /// Whether it gets other GPUs than it had.
    pub fn is_elsewhere(&self) -> bool {
        self.own.iter().any(|(gpu, card)| gpu.uuid != card.uuid)
    }

    /// The GPU in place of another one of its own.
    pub fn onto<'a>(&'a self, uuid: &'a str) -> &'a str {
        self.own.iter().find(|(gpu, _)| gpu.uuid == uuid).map_or(uuid, |(_, card)| &card.uuid)
    }

    /// For people: what it gets in place of what it had.
    pub fn in_words(&self) -> String {
        let moves = self.own.iter().filter(|(gpu, card)| gpu.uuid != card.uuid);
        let moves =
            moves.map(|(gpu, card)| format!("GPU {} ({}) in place of {}", card.index, short_uuid(&card.uuid), short_uuid(&gpu.uuid)));
        moves.collect::<Vec<_>>().join(", ")
    }
}

fn failed(why: &str) -> CommandError {
    CommandError::new(Exit::Failed, format!("{why}. Nothing was started"))
}

fn usage(why: &str) -> CommandError {
    CommandError::new(Exit::Usage, format!("{why}. Nothing was started"))
}

/// Whether it is one of the model. What an older image does not say is compared by the size of the memory.
fn is_of_model(gpu: &Gpu, card: &Card) -> bool {
    if gpu.model.is_empty() { gpu.bytes == card.total } else { gpu.model == card.name }
}

fn model(gpu: &Gpu) -> &str {
    if gpu.model.is_empty() { "GPU of an unknown model" } else { &gpu.model }
}

fn list<'a>(gpus: impl IntoIterator<Item = &'a Gpu>) -> String {
    gpus.into_iter().map(|gpu| format!("{} ({})", short_uuid(&gpu.uuid), model(gpu))).collect::<Vec<_>>().join(", ")
}

fn indices(cards: &[&Card]) -> String {
    cards.iter().map(|card| card.index.to_string()).collect::<Vec<_>>().join(", ")
}

fn as_named<'a>(own: &[Gpu], named: &[String], cards: &'a [Card]) -> Result<Vec<&'a Card>, CommandError> {
    let targets = named.iter().map(|gpu| gpus::named(gpu, cards)).collect::<Result<Vec<_>, _>>()?;
    if targets.len() != own.len() {
        let (has, given) = (counted(own.len(), "GPU", "s"), targets.len());
        return Err(usage(&format!("the program has {has}, and --gpus names {given}: name one for each of {}, in this order", list(own))));
    }
    if let Some((place, card)) = targets.iter().enumerate().find(|(place, card)| targets[..*place].contains(card)) {
        return Err(usage(&format!("GPU {} is named twice in --gpus, at the places {place} and before: each needs its own", card.index)));
    }
    if let Some((gpu, card)) = own.iter().zip(&targets).find(|(gpu, card)| !is_of_model(gpu, card)) {
        let (uuid, index, name) = (short_uuid(&gpu.uuid), card.index, &card.name);
        let model = model(gpu);
        return Err(failed(&format!("{uuid} is a {model}, GPU {index} a {name}: the driver restores only on GPUs of one model")));
    }
    Ok(targets)
}

fn meant<'a>(own: &[Gpu], cards: &'a [Card]) -> Result<Vec<&'a Card>, CommandError> {
    let here = |gpu: &Gpu| cards.iter().find(|card| card.uuid == gpu.uuid);
    let mut others: Vec<_> = cards.iter().filter(|card| own.iter().all(|gpu| gpu.uuid != card.uuid)).collect();
    let missing: Vec<_> = own.iter().filter(|gpu| here(gpu).is_none()).collect();
    for gpu in &missing {
        let alike: Vec<_> = others.iter().copied().filter(|card| is_of_model(gpu, card)).collect();
        let needed = missing.iter().filter(|other| alike.first().is_some_and(|card| is_of_model(other, card))).count();
        let not_here = format!("the image was made with {}, which is not here", list(missing.iter().copied()));
        if alike.len() < needed.max(1) {
            let found = if alike.is_empty() {
                "there is no other of the model".into()
            } else {
                format!("of the model, there is only GPU {}", indices(&alike))
            };
            return Err(failed(&format!("{not_here}, and {found}")));
        }
        if alike.len() > needed {
            let whole = list(own);
            let choose = format!("choose with --gpus, one for each of {whole}, in this order");
            return Err(usage(&format!("{not_here}; of the model there are GPU {}: {choose}", indices(&alike))));
        }
    }
    let target = |gpu: &Gpu| {
        let place = others.iter().position(|card| is_of_model(gpu, card));
        here(gpu).or_else(|| place.map(|place| others.remove(place))).ok_or_else(|| failed(&format!("{} is not here", list([gpu]))))
    };
    own.iter().map(target).collect()
}

/// A map of all GPUs of the machine of the save, each to one of its own here: the driver wants all that the process could see there, and does not say
/// which those are.
fn complete(own: &[(&Gpu, &Card)], all: &[Gpu], cards: &[Card]) -> GpuMap {
    let is_as_it_was = own.iter().all(|(gpu, card)| gpu.uuid == card.uuid);
    // Without a map, the driver goes by the numbers of the GPUs.
    if is_as_it_was && (all.is_empty() || all.iter().map(|gpu| &gpu.uuid).eq(cards.iter().map(|card| &card.uuid))) {
        return GpuMap::new();
    }
    let mut map: GpuMap = own.iter().map(|(gpu, card)| (gpu.uuid.clone(), card.uuid.clone())).collect();
    let stays = |gpu: &Gpu, card: &Card| gpu.uuid == card.uuid;
    for fits in [stays, is_of_model] {
        for gpu in all {
            let is_free = |card: &&Card| map.iter().all(|(_, new)| *new != card.uuid);
            if let Some(card) = cards.iter().filter(is_free).find(|card| fits(gpu, card))
                && map.iter().all(|(old, _)| *old != gpu.uuid)
            {
                map.push((gpu.uuid.clone(), card.uuid.clone()));
            }
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(names: &[&str]) -> Vec<Gpu> {
        names.iter().map(|name| Gpu { uuid: format!("GPU-{name}"), model: model_of(name), bytes: 1 << 30 }).collect()
    }

    /// `h1` is one of the model H.
    fn model_of(name: &str) -> String {
        name[..1].to_uppercase()
    }

    fn cards(names: &[&str]) -> Vec<Card> {
        let card = |(index, name): (usize, &&str)| Card {
            index: index as u32,
            uuid: format!("GPU-{name}"),
            name: model_of(name),
            total: 1 << 30,
            ..Card::default()
        };
        names.iter().enumerate().map(card).collect()
    }

    /// The map of a program with these GPUs, of a machine with those, on another machine.
    fn map(own: &[&str], all: &[&str], here: &[&str], named: &[&str]) -> Result<String, (Exit, String)> {
        let named: Vec<_> = named.iter().map(ToString::to_string).collect();
        let found = Placement::find(Saved { own: &gpus(own), all: &gpus(all) }, &named, &cards(here));
        let found = found.map_err(|failure| (failure.exit(), failure.to_string()))?;
        let pairs = found.map.iter().map(|(old, new)| format!("{}>{}", &old[4..], &new[4..]));
        Ok(pairs.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_program_keeps_its_gpus_and_gets_those_that_can_only_be_meant() {
        let of = |own: &[&str], all: &[&str], here: &[&str]| map(own, all, here, &[]).unwrap();
        assert_eq!(of(&["h1"], &["h1", "h2"], &["h1", "h2"]), "");
        assert_eq!(of(&["h1"], &[], &["h2", "h1"]), "", "an older image does not say what else there was");
        assert_eq!(of(&["h1"], &["h1", "h2"], &["h2", "h1"]), "h1>h1 h2>h2", "the driver goes by the number");
        assert_eq!(of(&["h1"], &["h1"], &["h9"]), "h1>h9");
        assert_eq!(of(&["h1", "h2"], &["h1", "h2"], &["h8", "h9"]), "h1>h8 h2>h9");
        assert_eq!(of(&["h1", "h2"], &["h1", "h2"], &["h9", "h1"]), "h1>h1 h2>h9", "what is here stays");
        assert_eq!(of(&["h1", "l1"], &["h1", "l1"], &["l9", "h9"]), "h1>h9 l1>l9");
        assert_eq!(of(&["h1"], &["h1", "l1"], &["l9", "l8", "h9"]), "h1>h9 l1>l9");
        assert_eq!(of(&["h1"], &["h1", "h2"], &["h9"]), "h1>h9", "there may be fewer");
    }

    #[test]
    fn what_is_ambiguous_or_of_another_model_is_refused_by_name() {
        let refused = |own: &[&str], here: &[&str], named: &[&str], exit: Exit, words: &[&str]| {
            let (found, text) = map(own, own, here, named).unwrap_err();
            assert!(found == exit && words.iter().all(|word| text.contains(word)), "{text}");
        };
        refused(&["h1"], &["h8", "h9"], &[], Exit::Usage, &["GPU-h1", "GPU 0, 1", "--gpus"]);
        refused(&["h1"], &["l9"], &[], Exit::Failed, &["GPU-h1", "no other of the model"]);
        refused(&["h1", "h2"], &["l9", "h9"], &[], Exit::Failed, &["GPU-h1 (H), GPU-h2 (H)", "only GPU 1"]);
        refused(
            &["h1", "h2"],
            &["h8", "h9"],
            &["0"],
            Exit::Usage,
            &["has 2 GPUs", "--gpus names 1", "GPU-h1 (H), GPU-h2 (H), in this order"],
        );
        refused(&["h1", "h2"], &["h8", "h9"], &["1", "1"], Exit::Usage, &["GPU 1", "twice"]);
        refused(&["h1"], &["l9"], &["0"], Exit::Failed, &["GPU-h1 is a H, GPU 0 a L"]);
        refused(&["h1"], &["h1"], &["7"], Exit::Usage, &["no GPU 7"]);
    }

    #[test]
    fn the_user_chooses_and_all_others_change_places() {
        let of = |own: &[&str], all: &[&str], named: &[&str]| map(own, all, all, named).unwrap();
        assert_eq!(of(&["h1", "h2"], &["h1", "h2"], &["1", "0"]), "h1>h2 h2>h1");
        assert_eq!(of(&["h1"], &["h1", "h2", "h3"], &["1"]), "h1>h2 h3>h3 h2>h1");
        assert_eq!(of(&["h1"], &["h1", "h2"], &["0"]), "");
        let elsewhere = map(&["h1"], &["h1", "h2", "h3"], &["h7", "h8", "h9"], &["GPU-h9"]).unwrap();
        assert_eq!(elsewhere, "h1>h9 h2>h7 h3>h8");
    }
}
