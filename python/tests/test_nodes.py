"""The protocol of a job over several nodes, without nodes: faults in any order, from a seed.

``NODES_ROUNDS=20000`` tries more, and ``NODES_SEED`` one of them again.
"""

from __future__ import annotations

import os
import random
import unittest
from typing import Any

from simulated_nodes import Driver, Node, Participant, World
from vramctl import _nodes
from vramctl._nodes import Rank

ROUNDS = int(os.environ.get("NODES_ROUNDS", "600"))
SEED = os.environ.get("NODES_SEED")


class Unreliable(World):
    """Messages are late and lost, and ranks do not always stand at the same collective."""

    def __init__(self, nodes: int, seed: int) -> None:
        super().__init__(nodes, seed)
        self.lost = self.chance.choice([0.0, 0.0, 0.003, 0.03])
        self.late = self.chance.choice([0.0, 0.02, 0.2])
        self.slow = self.chance.choice([1.0, 1.0, 30.0])
        self.is_calm = False

    def takes(self, seconds: float) -> float:
        late = self.chance.random() < self.late and not self.is_calm
        return super().takes(seconds) * self.slow + (self.chance.uniform(0, 8) if late else 0.0)

    def is_lost(self) -> bool:
        return self.chance.random() < self.lost and not self.is_calm

    def collective(self, participant: Participant) -> int:
        """Some are ahead, in some attempts."""
        return 0 if random.Random(str(participant.key[1])).random() < 0.5 else self.chance.randint(0, 3)

    def collectives_of_an_advance(self, participant: Participant) -> int:
        return self.chance.choice([0, 1, 1, 2])


class Faults(unittest.TestCase):
    def test_all_nodes_do_the_same_whatever_happens(self) -> None:
        seen: dict[str, int] = {}
        for seed in [int(SEED)] if SEED else range(ROUNDS):
            with self.subTest(f"NODES_SEED={seed}"):
                what = self.happens(seed)
                seen[what] = seen.get(what, 0) + 1
        if not SEED:
            # The faults come at moments that matter.
            for what in ("paused", "active", "driver died: paused", "driver died: active", "behind", "gone"):
                self.assertGreater(seen.get(what, 0), 0, seen)

    def happens(self, seed: int) -> str:
        chance = random.Random(f"faults {seed}")
        world = Unreliable(chance.randint(1, 6), seed)
        drivers = [Driver(world) for _ in range(chance.choice([1, 1, 1, 2]))]
        killed: set[Node] = set()
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            self.arrange(world, chance, drivers, killed)
        world.run()
        left = [node for node in world.nodes.values() if not node.is_gone]
        self.assertEqual([node.name for node in left if node.owner is not None], [], "nobody is held for ever")
        behind = {name for driver in drivers if driver.outcome for name in driver.outcome["behind"]}
        states = {node.is_paused for node in left}
        if len(states) > 1:
            # Ranks run on if their participant is killed after the decision. Whoever has decided says so, unless dead as well.
            running = {node.name for node in left if not node.is_paused}
            self.assertLessEqual(running, {node.name for node in killed})
            self.assertTrue(running <= behind or not all(driver.is_alive for driver in drivers), (running, behind))
        elif left:
            self.is_true_of(drivers, states.pop(), len(left) < len(world.nodes))
        return self.comes_back(world, drivers, left, bool(behind))

    def arrange(self, world: Unreliable, chance: random.Random, drivers: list[Driver], killed: set[Node]) -> None:
        """A fault at some moment."""
        driver, node = chance.choice(drivers), chance.choice(list(world.nodes.values()))

        def kill_driver() -> None:
            driver.is_alive = False

        def kill_participants() -> None:
            if node.kill_participants():
                killed.add(node)

        def lose_node() -> None:
            if len([one for one in world.nodes.values() if not one.is_gone]) > 1:
                node.is_gone = True

        faults = [kill_driver, node.kill_agent, kill_participants, lambda: node.stop(chance.uniform(0.5, 60)), lose_node]
        # Steps take some milliseconds, and the slow ones some seconds.
        world.at(chance.choice([chance.uniform(0, 0.4), chance.uniform(0, 8)]) * (world.slow / 3 + 1), chance.choice(faults))

    def is_true_of(self, drivers: list[Driver], is_paused: bool, is_one_gone: bool) -> None:
        """What the drivers say, if no node is behind."""
        said = [driver.outcome for driver in drivers if driver.outcome and not driver.outcome["behind"]]
        if any(outcome["committed"] for outcome in said):
            self.assertTrue(is_paused, said)
        if len(drivers) == 1 and said and said[0]["committed"] is False:
            self.assertFalse(is_paused, said)
        for outcome in said:
            self.assertEqual(
                "error" in outcome, outcome["committed"] is not True or "lost with the node" in str(outcome.get("error"))
            )

    def comes_back(self, world: Unreliable, drivers: list[Driver], left: list[Node], is_behind: bool) -> str:
        """Whatever has happened, the next operation succeeds. Returns what had."""
        is_paused = any(node.is_paused for node in left)
        is_gone = any("lost with the node" in str((driver.outcome or {}).get("error")) for driver in drivers)
        world.is_calm, world.nodes = True, {node.name: node for node in left}
        resume = Driver(world, "resume")
        world.run(limit=world.now + 1000)
        assert resume.outcome is not None
        self.assertEqual((resume.outcome["committed"], {node.is_paused for node in left}), (True, {False}), resume.outcome)
        if is_behind or is_gone:
            return "behind" if is_behind else "gone"
        return f"{'' if drivers[0].is_alive else 'driver died: '}{'paused' if is_paused else 'active'}"


class Raylets(unittest.TestCase):
    def test_no_pause_says_that_all_are_paused_while_ranks_run_on_a_node_that_has_left(self) -> None:
        for seed in [int(SEED)] if SEED else range(ROUNDS):
            with self.subTest(f"NODES_SEED={seed}"):
                chance = random.Random(f"raylets {seed}")
                world = Unreliable(chance.randint(2, 5), seed)
                members = chance.choice([[], [Rank(name, 1) for name in world.nodes], [Rank(name, 9) for name in world.nodes]])
                driver = Driver(world, members=members)
                for node in chance.sample(list(world.nodes.values()), chance.choice([1, 1, 2])):
                    moment = chance.choice([chance.uniform(0, 0.4), chance.uniform(0, 3)])
                    noticed_after = chance.choice([0.0, 0.2, 2.0, 15.0])
                    world.at(moment, lambda node=node, after=noticed_after: node.lose_raylet(after))
                world.run(limit=1000)
                assert driver.outcome is not None
                self.assertEqual([node.name for node in world.nodes.values() if node.owner is not None], [])
                states = {node.is_paused for node in world.nodes.values()}
                if driver.outcome["committed"] and "error" not in driver.outcome:
                    self.assertEqual(states, {True}, driver.outcome)


class Apart(World):
    """The ranks of each node are held at another collective."""

    def collective(self, participant: Participant) -> int:
        return participant._node.place % 3

    def collectives_of_an_advance(self, participant: Participant) -> int:
        """Sometimes one too many."""
        return self.chance.choice([1, 1, 1, 2])


class Collectives(unittest.TestCase):
    def test_nodes_whose_ranks_are_behind_go_on_until_all_have_drained(self) -> None:
        attempts = []
        for seed in range(20):
            world = Apart(7, seed)
            driver = Driver(world)
            world.run()
            assert driver.outcome is not None
            self.assertTrue(driver.outcome["committed"], driver.outcome)
            self.assertEqual({node.is_paused for node in world.nodes.values()}, {True})
            attempts.append(driver.coordinator.attempt)
        # Without that, each attempt fails.
        self.assertLessEqual(max(attempts), 4, attempts)


class Members(unittest.TestCase):
    """Ranks that are missing or new."""

    def outcome(self, **known: Any) -> dict[str, Any]:
        self.world = World(2, 0)
        driver = Driver(self.world, **known)
        self.world.run()
        assert driver.outcome is not None
        return driver.outcome

    def test_a_missing_or_new_rank_is_named_and_nothing_is_paused(self) -> None:
        both = [Rank("0000", 1), Rank("0001", 1)]
        for members, said in (
            ([*both, Rank("0001", 7)], "missing: process 7 of node 0001"),
            (both[:1], "new: process 1 of node 0001"),
            ([both[0], Rank("0002", 9)], "missing: process 9 of node 0002; new: process 1 of node 0001"),
        ):
            outcome = self.outcome(members=members)
            self.assertIn(said, outcome["error"]["message"])
            self.assertIs(outcome["committed"], False)
            self.assertFalse(any(node.is_paused for node in self.world.nodes.values()))
            # Somebody who knows says how many there must be.
            self.assertTrue(self.outcome(members=members, ranks=2)["committed"])
        self.assertIn("2 of 3 processes are there", self.outcome(ranks=3)["error"]["message"])
        # All are new: the job was started again.
        self.assertTrue(self.outcome(members=[Rank("0000", 5), Rank("0001", 6)])["committed"])

    def test_a_node_that_answers_nothing_is_waited_for_and_named(self) -> None:
        world = World(3, 0)
        world.nodes["0001"].stop(1e6)
        driver = Driver(world)
        world.run(driver.has_ended)
        assert driver.outcome is not None
        self.assertIn("node 0001 is lost: it has not answered", driver.outcome["error"]["message"])
        self.assertGreaterEqual(world.now, _nodes.STARTED_WITHIN)
        self.assertIs(driver.outcome["committed"], False)

    def test_a_node_that_has_left_the_cluster_is_left_out_and_its_ranks_are_missing(self) -> None:
        all_three = [Rank(f"000{node}", 1) for node in range(3)]
        # All ranks of an earlier job have ended.
        earlier = [Rank(f"000{node}", 9) for node in range(8)]
        for operation in ("pause", "resume"):
            for is_found in (False, True):
                for members in ([], all_three, earlier):
                    for ranks in (None, 2):
                        with self.subTest(f"{operation}, {'found' if is_found else 'not found'}, {members}, {ranks} ranks"):
                            world = World(3, 0)
                            driver = Driver(world, operation, members=members, ranks=ranks)
                            if is_found:
                                world.run(lambda driver=driver: "0001" in driver.coordinator.found)
                            world.nodes["0001"].is_gone = True
                            world.run(driver.has_ended)
                            assert driver.outcome is not None
                            goes_on = operation == "resume" or ranks is not None
                            self.assertIs(driver.outcome["committed"], goes_on, driver.outcome)
                            self.assertLess(world.now, 10)
                            if not goes_on and (is_found or members == all_three):
                                said = "2 processes are there, and the job had 3; missing: process 1 of node 0001."
                                self.assertIn(said, driver.outcome["error"]["message"])
                            elif not goes_on:
                                self.assertIn("node 0001 has left the cluster", driver.outcome["error"]["message"])
                            left = [node.is_paused for node in world.nodes.values() if not node.is_gone]
                            self.assertEqual(left, [operation == "pause" and goes_on] * 2)
                            self.assertEqual(set(driver.coordinator.there), {all_three[0], all_three[2]})
                            is_known = is_found or members == all_three
                            self.assertEqual(all_three[1] in driver.coordinator.away, is_known)

    def test_a_rank_that_ends_between_two_attempts_is_missing(self) -> None:
        """Of one whose node has no other, the node says that it has none."""
        none = {"reply": "outcome", "committed": False, "processes": [], "error": {"code": "no_process", "message": ""}}
        busy = {"reply": "outcome", "committed": False, "processes": [], "error": {"code": "busy", "message": ""}}

        def found(*pids: int) -> dict[str, Any]:
            processes = [{"pid": pid, "tags": ["default"]} for pid in pids]
            return {"reply": "reached", "number": 0, "step": "found", "processes": processes}

        for members in ([], [Rank("a", 1), Rank("b", 2), Rank("b", 3)]):
            for then in (none, found(2)):
                request = {"operation": "pause", "target": {"name": "job"}, "hold_ms": 60_000}
                coordinator = _nodes.Coordinator(request, ["a", "b"], 0.0, members=members)
                coordinator.tick(0.0)
                for node, pids in (("a", (1,)), ("b", (2, 3))):
                    coordinator.heard(0.1, node, 1, found(*pids))
                for node in ("a", "b"):
                    coordinator.heard(0.2, node, 1, busy)
                coordinator.tick(1.0)
                coordinator.heard(1.1, "a", 2, found(1))
                coordinator.heard(1.1, "b", 2, then)
                self.assertEqual(coordinator.phase, "aborting")
                for node in ("a", "b"):
                    coordinator.heard(1.2, node, 2, busy)
                assert coordinator.outcome is not None
                self.assertIn("missing: process", coordinator.outcome["error"]["message"])
                self.assertIs(coordinator.outcome["committed"], False)


if __name__ == "__main__":
    unittest.main()
