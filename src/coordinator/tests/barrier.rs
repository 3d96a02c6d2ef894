//! The barrier, the participants and the coordinator of nodes, in virtual time: faults in any order, from a seed that replays a run to the byte.
//!
//! `BARRIER_ROUNDS=20000` tries more, and `BARRIER_SEED` one of them again.

mod world;

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use vramctl_coordinator::barrier::Phase;
use vramctl_coordinator::nodes::coordinator::Coordinator;
use vramctl_coordinator::nodes::messages::{Event, NodeRank, Task};
use world::{Conditions, Fault, Key, Planned, Random, World, name};

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}

/// The results of all rounds, which say how often each occurred, or of the one that is wanted.
fn rounds(test: impl Fn(u64) -> String + std::panic::RefUnwindSafe) -> BTreeMap<String, u64> {
    let mut seen = BTreeMap::new();
    let all = number("BARRIER_SEED").map_or(0..number("BARRIER_ROUNDS").unwrap_or(600), |seed| seed..seed + 1);
    for seed in all {
        let done = std::panic::catch_unwind(|| test(seed));
        *seen.entry(done.unwrap_or_else(|_| panic!("BARRIER_SEED={seed}"))).or_default() += 1;
    }
    seen
}

fn unreliable(random: &mut Random) -> Conditions {
    Conditions {
        ranks_per_node: random.of(&[1, 1, 2, 3]),
        lost: random.of(&[0.0, 0.0, 0.003, 0.03]),
        late: random.of(&[0.0, 0.01, 0.1]),
        slow: random.of(&[1.0, 1.0, 30.0]),
        are_apart: true,
        ..Conditions::default()
    }
}

/// From now on, nothing fails.
fn calm(world: &mut World) {
    world.faults.clear();
    world.conditions = Conditions { ranks_per_node: world.conditions.ranks_per_node, ..Conditions::default() };
}

/// What the ranks of the nodes that are left do.
fn states(world: &World) -> BTreeMap<usize, bool> {
    let left = world.nodes.iter().enumerate().filter(|(_, node)| !node.is_gone);
    left.filter_map(|(place, node)| Some((place, node.is_paused()?))).collect()
}

fn committed(outcome: &Value) -> Option<bool> {
    outcome["committed"].as_bool()
}

fn message(outcome: &Value) -> String {
    outcome["error"]["message"].as_str().unwrap_or_default().to_owned()
}

fn behind(world: &World) -> BTreeSet<String> {
    let outcomes = world.drivers.iter().filter_map(|driver| driver.outcome());
    outcomes.flat_map(|outcome| outcome["behind"].as_array().unwrap()).map(|node| node.as_str().unwrap().to_owned()).collect()
}

/// A pause of some nodes, during which things fail; what comes of it, and the digest.
fn pause_with_faults(seed: u64) -> (String, u64) {
    let mut random = Random::new(seed);
    let conditions = unreliable(&mut random);
    let slow = conditions.slow;
    let mut world = World::new(1 + random.below(6), seed, conditions);
    let drivers = random.of(&[1, 1, 1, 2]);
    for _ in 0..drivers {
        world.drive("pause", &[], None);
    }
    for _ in 0..random.of(&[0, 1, 1, 2, 3]) {
        // Steps take some milliseconds, and the slow ones some seconds.
        let moment = if random.happens(0.5) { random.between(0.0, 0.4) } else { random.between(0.0, 8.0) } * (slow / 3.0 + 1.0);
        let node = random.below(world.nodes.len());
        let fault = match random.below(6) {
            0 => Fault::KillDriver(random.below(drivers)),
            1 => Fault::KillAgent(node),
            2 => Fault::KillCommands(node),
            3 => Fault::Stop(node, random.between(0.5, 60.0)),
            4 => Fault::KillRank(node, random.below(world.nodes[node].ranks.len())),
            _ => Fault::LoseNode(node),
        };
        if random.happens(0.5) {
            world.fault(moment, fault);
        } else {
            world.fault_at(random.next() % (60 * world.nodes.len() as u64), fault);
        }
    }
    let done = all_or_none_of_the_nodes(&mut world);
    (done, world.digest)
}

/// Runs until nothing happens any more. Returns what came of it.
fn all_or_none_of_the_nodes(world: &mut World) -> String {
    world.run(1000.0, |_| false);
    assert!(!world.nodes.iter().any(|node| !node.is_gone && node.is_held()), "nobody is held for ever");
    let (states, behind, are_alive) = (states(world), behind(world), world.drivers.iter().all(|driver| driver.is_alive));
    let kinds: BTreeSet<_> = states.values().copied().collect();
    if kinds.len() > 1 {
        // Ranks run on if their command is killed after the decision. Whoever has decided says so, unless dead as well.
        for (node, _) in states.iter().filter(|(_, is_paused)| !**is_paused) {
            assert!(world.nodes[*node].may_run, "node {node}: {states:?}");
            assert!(!are_alive || behind.contains(&name(*node)), "{states:?}, {behind:?}");
        }
    } else if let Some(is_paused) = kinds.first() {
        check_truth(world, *is_paused);
    }
    come_back(world, !behind.is_empty())
}

/// What the drivers say, if no node is behind.
fn check_truth(world: &World, is_paused: bool) {
    let said: Vec<_> =
        world.drivers.iter().filter_map(|driver| driver.outcome()).filter(|outcome| outcome["behind"] == json!([])).collect();
    if said.iter().any(|outcome| committed(outcome) == Some(true)) {
        assert!(is_paused, "{said:?}");
    }
    if let ([_], [outcome]) = (&world.drivers[..], &said[..])
        && committed(outcome) == Some(false)
    {
        assert!(!is_paused, "{outcome}");
    }
    for outcome in said {
        let has_failed = committed(outcome) != Some(true) || message(outcome).contains("lost with the node");
        assert_eq!(outcome.get("error").is_some(), has_failed, "{outcome}");
    }
}

/// Whatever has happened, the next operation succeeds. Returns what had.
fn come_back(world: &mut World, is_behind: bool) -> String {
    let states_before = states(world);
    let is_gone = world.drivers.iter().filter_map(|driver| driver.outcome()).any(|outcome| message(outcome).contains("lost with the node"));
    let is_alive = world.drivers[0].is_alive;
    calm(world);
    let limit = world.now.as_secs_f64() + 1000.0;
    if !states_before.is_empty() {
        let resume = world.drive("resume", &[], None);
        world.run(limit, |_| false);
        let outcome = world.drivers[resume].outcome().unwrap();
        assert_eq!(committed(outcome), Some(true), "{outcome}");
        assert!(states(world).values().all(|is_paused| !is_paused));
    }
    match () {
        () if is_behind => "behind".into(),
        () if is_gone => "gone".into(),
        () => {
            let state = if states_before.values().any(|is_paused| *is_paused) { "paused" } else { "active" };
            format!("{}{state}", if is_alive { "" } else { "driver died: " })
        }
    }
}

#[test]
fn all_nodes_do_the_same_whatever_happens() {
    let seen = rounds(|seed| pause_with_faults(seed).0);
    if number("BARRIER_SEED").is_none() {
        // The faults come at moments that matter.
        for what in ["paused", "active", "driver died: paused", "driver died: active", "behind", "gone"] {
            assert!(seen.contains_key(what), "{seen:?}");
        }
    }
}

/// Some moments are too short for a random one: between a node's vote and the decision, there are a few events.
#[test]
fn all_nodes_do_the_same_whenever_somebody_dies() {
    let dies = [
        Fault::KillDriver(0),
        Fault::KillAgent(1),
        Fault::KillCommands(1),
        Fault::KillRank(1, 0),
        Fault::LoseNode(1),
        Fault::Stop(1, 20.0),
    ];
    for fault in dies {
        for event in 1..100 {
            let mut world = World::new(2, event, Conditions::default());
            world.drive("pause", &[], None);
            world.fault_at(event, fault);
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| all_or_none_of_the_nodes(&mut world)));
            assert!(done.is_ok(), "{fault:?} at event {event}");
        }
    }
}

#[test]
fn a_seed_replays_a_run_to_the_byte() {
    let digests: Vec<_> = (0..20).map(|seed| pause_with_faults(seed).1).collect();
    assert_eq!(digests, (0..20).map(|seed| pause_with_faults(seed).1).collect::<Vec<_>>());
    assert_eq!(digests.iter().collect::<BTreeSet<_>>().len(), digests.len());
}

#[test]
fn no_pause_says_that_all_are_paused_while_ranks_run_on_a_node_that_has_left() {
    rounds(|seed| {
        let mut random = Random::new(seed + 1_000_000);
        let conditions = Conditions { ranks_per_node: 1, ..unreliable(&mut random) };
        let mut world = World::new(2 + random.below(4), seed, conditions);
        let all = |pid| (0..world.nodes.len()).map(|node| NodeRank(name(node), pid)).collect::<Vec<_>>();
        let members = vec![Vec::new(), all(1), all(9)].swap_remove(random.below(3));
        world.drive("pause", &members, None);
        for _ in 0..random.of(&[1, 1, 2]) {
            let moment = if random.happens(0.5) { random.between(0.0, 0.4) } else { random.between(0.0, 3.0) };
            let node = random.below(world.nodes.len());
            world.fault(moment, Fault::LoseRaylet(node, random.of(&[0.0, 0.2, 2.0, 15.0])));
        }
        world.run(1000.0, |_| false);
        assert!(!world.nodes.iter().any(world::Node::is_held));
        let outcome = world.drivers[0].outcome().unwrap();
        if committed(outcome) == Some(true) && outcome.get("error").is_none() {
            assert!(states(&world).values().all(|is_paused| *is_paused), "{outcome}");
        }
        String::new()
    });
}

#[test]
fn nodes_whose_ranks_are_behind_go_on_until_all_have_drained() {
    let attempts = (0..20).map(|seed| {
        let mut world = World::new(7, seed, Conditions { are_apart: true, ..Conditions::default() });
        world.drive("pause", &[], None);
        world.run(1000.0, |_| false);
        assert_eq!(committed(world.drivers[0].outcome().unwrap()), Some(true));
        assert!(states(&world).values().all(|is_paused| *is_paused));
        world.drivers[0].coordinator.attempt()
    });
    // Without that, no first attempt succeeds.
    assert!(attempts.filter(|attempts| *attempts == 1).count() > 10);
}

/// Ranks of one node, without others: a pause, a resume of which some have to wait for memory, or a swap, while ranks and the command die.
fn alone(seed: u64) -> (String, u64) {
    let mut random = Random::new(seed + 2_000_000);
    let conditions = Conditions { ranks_per_node: 2 + random.below(4), ..unreliable(&mut random) };
    let slow = conditions.slow;
    let mut world = World::new(1, seed, conditions);
    let count = world.nodes[0].ranks.len();
    let what = random.of(&["pause", "resume", "swap"]);
    let split = if what == "swap" { 1 + random.below(count - 1) } else { count };
    for (place, rank) in world.nodes[0].ranks.iter_mut().enumerate() {
        rank.is_paused = what == "resume" || place >= split;
    }
    let before: Vec<_> = world.nodes[0].ranks.iter().map(|rank| rank.is_paused).collect();
    let which: Vec<_> = (0..count).map(|rank| (rank, !before[rank])).collect();
    let waits: Vec<_> = (0..count).filter(|_| what == "resume" && random.happens(0.3)).collect();
    for _ in 0..random.of(&[0, 1, 1, 2]) {
        let moment = random.between(0.0, 0.4) * slow;
        let fault = match random.below(3) {
            0 => Fault::KillCommands(0),
            1 => Fault::KillRank(0, random.below(count)),
            _ => Fault::Stop(0, random.between(0.5, 20.0)),
        };
        world.fault(moment, fault);
    }
    let key = world.drive_alone(&which, what == "swap" || random.happens(0.8), &waits);
    world.run(1000.0, |_| false);
    let is_done = all_or_none(&world, &before);
    if let (Some(said), Some(is_done)) = (world.alone.get(&key), is_done) {
        assert!(*said == is_done || !said, "{what}: it says {said}");
    }
    // A way back.
    calm(&mut world);
    let living: Vec<_> = (0..count).filter(|rank| !world.nodes[0].ranks[*rank].is_dead).map(|rank| (rank, false)).collect();
    if !living.is_empty() {
        let key: Key = world.drive_alone(&living, false, &[]);
        world.run(world.now.as_secs_f64() + 1000.0, |_| false);
        assert!(world.alone[&key] && states_of(&world).iter().all(|is_paused| !is_paused));
    }
    (format!("{what} {}", if is_done == Some(true) { "done" } else { "undone" }), world.digest)
}

fn states_of(world: &World) -> Vec<bool> {
    world.nodes[0].ranks.iter().filter(|rank| !rank.is_dead).map(|rank| rank.is_paused).collect()
}

/// Whether all ranks that live have changed; `None` if none lives.
fn all_or_none(world: &World, before: &[bool]) -> Option<bool> {
    assert!(!world.nodes[0].is_held(), "nobody is held for ever");
    let living = world.nodes[0].ranks.iter().zip(before).filter(|(rank, _)| !rank.is_dead);
    let changed: BTreeSet<_> = living.map(|(rank, before)| rank.is_paused != *before).collect();
    assert!(changed.len() < 2, "a half job: {:?}, before {before:?}", world.nodes[0].ranks);
    changed.first().copied()
}

#[test]
fn all_ranks_do_the_same_whatever_happens() {
    let seen = rounds(|seed| alone(seed).0);
    if number("BARRIER_SEED").is_none() {
        assert_eq!(seen.len(), 6, "{seen:?}");
    }
    assert_eq!((0..20).map(alone).collect::<Vec<_>>(), (0..20).map(alone).collect::<Vec<_>>());
}

/// A pause of two nodes without faults. Returns its outcome, and whether somebody is paused.
fn pause_of_two(members: &[NodeRank], ranks: Option<usize>) -> (Value, bool) {
    let mut world = World::new(2, 0, Conditions::default());
    world.drive("pause", members, ranks);
    world.run(1000.0, |_| false);
    (world.drivers[0].outcome().unwrap().clone(), states(&world).values().any(|is_paused| *is_paused))
}

fn rank(node: usize, pid: u32) -> NodeRank {
    NodeRank(name(node), pid)
}

#[test]
fn a_missing_or_new_rank_is_named_and_nothing_is_paused() {
    let both = [rank(0, 1), rank(1, 1)];
    for (members, said) in [
        (vec![rank(0, 1), rank(1, 1), rank(1, 7)], "missing: process 7 of node 0001"),
        (vec![rank(0, 1)], "new: process 1 of node 0001"),
        (vec![rank(0, 1), rank(2, 9)], "missing: process 9 of node 0002; new: process 1 of node 0001"),
    ] {
        let (outcome, is_paused) = pause_of_two(&members, None);
        assert!(message(&outcome).contains(said), "{outcome}");
        assert!(committed(&outcome) == Some(false) && !is_paused);
        // Somebody who knows says how many there must be.
        assert_eq!(committed(&pause_of_two(&members, Some(2)).0), Some(true));
    }
    assert!(message(&pause_of_two(&[], Some(3)).0).contains("2 of 3 processes are there"));
    assert_eq!(committed(&pause_of_two(&both, None).0), Some(true));
    // All are new: the job was started again.
    assert_eq!(committed(&pause_of_two(&[rank(0, 5), rank(1, 6)], None).0), Some(true));
}

#[test]
fn a_node_that_answers_nothing_is_waited_for_and_named() {
    let mut world = World::new(3, 0, Conditions::default());
    world.fault(0.0, Fault::Stop(1, 1e6));
    world.drive("pause", &[], None);
    world.run(1000.0, |world| world.drivers[0].has_ended());
    let outcome = world.drivers[0].outcome().unwrap();
    assert!(message(outcome).contains("node 0001 is lost: it has not answered"), "{outcome}");
    assert!(world.now.as_secs() >= 30 && committed(outcome) == Some(false));
}

#[test]
fn a_node_that_has_left_the_cluster_is_left_out_and_its_ranks_are_missing() {
    let all_three: Vec<_> = (0..3).map(|node| rank(node, 1)).collect();
    // All ranks of an earlier job have ended.
    let earlier: Vec<_> = (0..8).map(|node| rank(node, 9)).collect();
    for operation in ["pause", "resume"] {
        for is_found in [false, true] {
            for members in [&[][..], &all_three, &earlier] {
                for ranks in [None, Some(2)] {
                    let mut world = World::new(3, 0, Conditions::default());
                    world.drive(operation, members, ranks);
                    if is_found {
                        world.run(1000.0, |world| world.drivers[0].coordinator.there().contains(&rank(1, 1)));
                    }
                    world.nodes[1].is_gone = true;
                    world.run(1000.0, |world| world.drivers[0].has_ended());
                    let driver = &world.drivers[0];
                    let outcome = driver.outcome().unwrap();
                    let goes_on = operation == "resume" || ranks.is_some();
                    assert!(committed(outcome) == Some(goes_on) && world.now.as_secs() < 10, "{outcome}");
                    let is_known = is_found || members == all_three;
                    if !goes_on && is_known {
                        let said = "2 processes are there, and the job had 3; missing: process 1 of node 0001.";
                        assert!(message(outcome).contains(said), "{outcome}");
                    } else if !goes_on {
                        assert!(message(outcome).contains("node 0001 has left the cluster"), "{outcome}");
                    }
                    assert!(states(&world).values().all(|is_paused| *is_paused == (operation == "pause" && goes_on)));
                    assert_eq!(driver.coordinator.there(), [rank(0, 1), rank(2, 1)].into());
                    assert_eq!(driver.coordinator.away().contains(&rank(1, 1)), is_known);
                }
            }
        }
    }
}

/// Of one whose node has no other, the node says that it has none.
#[test]
fn a_rank_that_ends_between_two_attempts_is_missing() {
    let failed = |code: &str| json!({ "reply": "outcome", "committed": false, "processes": [], "error": { "code": code, "message": "" } });
    let found = |pids: &[u32]| {
        let processes: Vec<_> = pids.iter().map(|pid| json!({ "pid": pid, "tags": ["default"] })).collect();
        json!({ "reply": "reached", "number": 0, "step": "found", "processes": processes })
    };
    let ranks = |ranks: &[(&str, u32)]| ranks.iter().map(|(node, pid)| NodeRank((*node).to_owned(), *pid)).collect();
    for members in [ranks(&[]), ranks(&[("a", 1), ("b", 2), ("b", 3)])] {
        for then in [failed("no_process"), found(&[2])] {
            let request = json!({ "operation": "pause", "target": { "name": "job" }, "hold_ms": 60_000 });
            let request = request.as_object().unwrap().clone();
            let nodes = ["a", "b"].map(str::to_owned).into();
            let mut coordinator =
                Coordinator::new(Task { request, nodes, members: Vec::clone(&members).into_iter().collect(), ..Task::default() }, 0);
            let time = std::time::Duration::from_millis;
            coordinator.tick(time(0));
            let mut hear = |now, node: &str, attempt, reply: &Value| {
                let reply = serde_json::from_value(reply.clone()).unwrap();
                coordinator.tick(time(now));
                coordinator.handle(time(now), Event::Heard { node: node.into(), attempt, reply });
                (coordinator.phase(), coordinator.outcome().cloned())
            };
            hear(100, "a", 1, &found(&[1]));
            hear(100, "b", 1, &found(&[2, 3]));
            hear(200, "a", 1, &failed("busy"));
            hear(200, "b", 1, &failed("busy"));
            hear(1000, "a", 1, &failed("busy"));
            hear(1100, "a", 2, &found(&[1]));
            let (phase, _) = hear(1100, "b", 2, &then);
            assert_eq!(phase, Phase::Aborting);
            hear(1200, "a", 2, &failed("busy"));
            let (_, outcome) = hear(1200, "b", 2, &failed("busy"));
            let outcome = outcome.unwrap();
            assert!(message(&outcome).contains("missing: process") && committed(&outcome) == Some(false), "{outcome}");
        }
    }
}

/// Pauses of many nodes, for `scripts/simulate-nodes`: one line of JSON each, as `PLANNED` asks for.
#[test]
#[ignore = "prints figures"]
fn planned() {
    let wanted: Value = serde_json::from_str(&env::var("PLANNED").unwrap()).unwrap();
    let count = |field: &str| wanted[field].as_u64().unwrap_or_default() as usize;
    let seconds = |field: &str, otherwise: f64| wanted[field].as_f64().unwrap_or(otherwise);
    let (ranks, nodes) = (count("ranks"), count("nodes"));
    for seed in 0..count("runs") {
        let planned = Planned { ranks: ranks / nodes, gap: seconds("gap", 1.0) };
        let save = seconds("save", 0.0);
        let conditions = Conditions { save, lost: seconds("lost", 0.0), planned: Some(planned), ..Conditions::default() };
        let mut world = World::new(nodes, seed as u64, conditions);
        world.drive("pause", &[], None);
        world.run(1000.0, |world| world.drivers[0].has_ended());
        let driver = &world.drivers[0];
        let done = json!({
            "committed": committed(driver.outcome().unwrap()),
            "attempts": driver.coordinator.attempt(),
            "seconds": world.now.as_secs_f64(),
            "messages": world.messages as f64 / nodes as f64,
        });
        println!("{done}");
    }
}
