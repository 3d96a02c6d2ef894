"""Nodes that exist in this program only, for `vramctl._nodes`: events in order, without a network, a clock or threads.

The participants do what those of ``src/coordinator/nodes.rs`` do: they vote, keep to their lease, and read the record. Messages are late or
lost, processes die, and nodes stop for a while or for good. test_nodes.py and scripts/simulate-nodes use this.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from typing import Any, Callable

from vramctl import _nodes

Reply = Mapping[str, Any]
Answer = Callable[[Any], None]


class World:
    """What the nodes and the drivers share: the time, the network, and the store of the records. Seconds."""

    #: What a participant takes to find its ranks, to hold them, to wait for their work, to save contents, and to release or undo.
    find, hold, drain, save, release = 0.03, 0.004, 0.02, 0.1, 0.06
    #: A message's way, and a put into the store.
    way, put = 0.0005, 0.0005
    ranks_per_node = 1

    def __init__(self, nodes: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now, self._queue, self._number = 0.0, list[tuple[float, int, Callable[[], Any]]](), 0
        self.store: dict[Any, bool] = {}
        #: The participants that wait for the work of their ranks, by attempt.
        self.draining: dict[Any, list[Participant]] = {}
        self.nodes = {f"{place:04}": Node(self, f"{place:04}", place) for place in range(nodes)}

    def at(self, when: float, what: Callable[[], Any]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, what))

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = 1000.0) -> None:
        """Until it is so, or nothing happens any more."""
        while self._queue and not until():
            self.now, _, what = heapq.heappop(self._queue)
            assert self.now < limit, "it does not end"
            what()

    # What may be otherwise.

    def takes(self, seconds: float) -> float:
        """How long something does take."""
        return seconds * self.chance.uniform(0.9, 1.3)

    def slowest(self, seconds: float, count: int) -> float:
        """How long the slowest of so many takes."""
        return max(self.takes(seconds) for _ in range(count))

    def is_lost(self) -> bool:
        """Whether a message is."""
        return False

    def collective(self, participant: Participant) -> int:
        """Which collective the ranks of the node have started when they are held, of those of this attempt."""
        return 0

    def collectives_of_an_advance(self, participant: Participant) -> int:
        """How many more they start when some of their calls pass."""
        return 1

    def send(self, node: Node, what: Callable[[], Any]) -> None:
        """From a driver to a node."""
        self.at(self.now + self.takes(self.way), what)

    def send_back(self, node: Node, what: Callable[[], Any]) -> None:
        self.at(self.now + self.takes(self.way), what)


class Node:
    """A node with its ranks and its agent."""

    def __init__(self, world: World, name: str, place: int) -> None:
        self.world, self.name, self.place = world, name, place
        self.is_paused, self.is_gone, self.stopped_until = False, False, 0.0
        #: When the cluster notices that the node does not belong to it any more, if that is so.
        self.leaves_at: float | None = None
        #: By how much its clock is late.
        self.skew = 0.0
        #: Who is taking the ranks through an attempt.
        self.owner: Participant | None = None
        #: Of the agent. Those of an agent that has died go on alone.
        self.participants: dict[Any, Participant] = {}

    def later(self, seconds: float, what: Callable[[], Any]) -> None:
        """On this node: not while it is stopped, nor after its end."""

        def begin() -> None:
            if self.is_gone:
                return
            if self.world.now < self.stopped_until:
                self.world.at(self.stopped_until, begin)
            else:
                what()

        self.world.at(self.world.now + seconds, begin)

    def takes(self, seconds: float) -> float:
        """As long as the slowest of its ranks."""
        return self.world.slowest(seconds, self.world.ranks_per_node)

    def processes(self) -> list[dict[str, Any]]:
        return [{"pid": number + 1, "tags": ["default"]} for number in range(self.world.ranks_per_node)]

    # Faults.

    def stop(self, seconds: float) -> None:
        self.stopped_until = self.world.now + seconds

    def lose_raylet(self, noticed_after: float) -> None:
        """The ranks and their participants live on."""
        self.leaves_at = self.world.now + noticed_after
        self.kill_agent()

    def kill_agent(self) -> None:
        orphans, self.participants = self.participants, {}
        for participant in orphans.values():
            participant.hang_up()

    def kill_participants(self) -> list[Participant]:
        """Returns those that were at work."""
        return [participant for participant in list(self.participants.values()) if participant.kill()]


class Participant:
    """``vramctl operate`` with a `node`, for one attempt."""

    def __init__(self, node: Node, key: Any, request: Mapping[str, Any], answer: Answer) -> None:
        self._node, self._world, self.key = node, node.world, key
        self.pauses = request["operation"] == "pause"
        self.steps = (
            ["found", "held", "drained", "prepared"] if self.pauses and request.get("hold", True) else ["found", "prepared"]
        )
        self.lease, self.drain = request["node"]["lease_ms"] / 1000, request["node"]["drain_ms"] / 1000
        self.step: str | None = None
        self.committed: bool | None = None
        self.outcome: Reply | None = None
        self.held_at = 0.0
        #: The last collective that its ranks have started.
        self.collective, self.is_draining = 0, False
        #: Whether their work has waited for others since they last advanced.
        self.has_waited = False
        self._heard, self._reads = self._world.now, False
        self._told, self._last, self._number = 0, {"reply": "none"}, -1
        self._for_step, self._for_outcome = [answer], list[Answer]()
        node.later(node.takes(self._world.find), lambda: self._reach("found"))
        self._watch()

    @property
    def has_voted(self) -> bool:
        return self.step == "prepared"

    def say(self, number: int, word: str, answer: Answer) -> None:
        self._heard = self._world.now
        if self.outcome is not None or word == "renew":
            return answer({**(self.outcome or self._last), "told": self._told})
        if number <= self._told:
            return None
        self._told = number
        (self._for_step if word in ("go", "advance") else self._for_outcome).append(answer)
        if word == "go" and not self.has_voted:
            self._go_on()
        elif word == "advance" and self.step == "drained":
            self.step = "held"
            self._node.later(self._node.takes(self._world.hold), self._advance)
        elif word == "abort" or (word == "commit" and self.has_voted):
            self._settle(word == "commit")

    def hang_up(self) -> None:
        """Nobody speaks with it any more."""
        self._for_step, self._for_outcome = [], []
        if self.has_voted:
            self._read()
        else:
            self._settle(False)

    def kill(self) -> bool:
        """Its ranks do what had been decided, else they undo it. Returns whether it was at work."""
        if self.outcome is not None:
            return False
        self._settle(False)
        self._end(None, "internal")
        return True

    def _go_on(self) -> None:
        assert self.step is not None
        following = self.steps[self.steps.index(self.step) + 1]
        node, world = self._node, self._world
        if self.step == "found":
            if node.owner is not None:
                self.committed = False
                return self._end(False, "leased")
            node.owner = self
        if following == "held":
            node.later(node.takes(world.hold), lambda: self._reach(following))
        elif following == "prepared":
            node.later(node.takes(world.save), lambda: self._reach(following))
        else:
            world.draining.setdefault(self.key, []).append(self)
            self._drain_until = world.now + self.drain
            self._drain()

    def _advance(self) -> None:
        self.collective += self._world.collectives_of_an_advance(self)
        self.has_waited = False
        self._drain()

    def _drain(self) -> None:
        self.is_draining = True
        self._node.later(max(self._drain_until - self._world.now, 0.05), self._is_late)
        self._see_who_has_drained()

    def _see_who_has_drained(self) -> None:
        """The work of a node ends when all others have started the same collective, too."""
        participants = self._world.draining[self.key]
        first = min(one.collective for one in participants)
        for one in participants:
            one.has_waited |= one.is_draining and one.collective > first
            if one.is_draining and one.collective == first and one.committed is None:
                one.is_draining = False
                one._node.later(one._node.takes(self._world.drain), lambda one=one: one._reach("drained"))

    def _is_late(self) -> None:
        if self.is_draining and self._world.now >= self._drain_until:
            self._settle(False, "busy")

    def _reach(self, step: str) -> None:
        if self.committed is not None:
            return
        self.step, self._heard = step, self._world.now
        if step == "held":
            self.held_at = self._world.now
            self.collective = self._world.collective(self)
        self._number += 1
        reply = {
            "reply": "reached",
            "step": step,
            "number": self._number,
            **({"processes": self._node.processes()} if step == "found" else {}),
        }
        answers, self._for_step, self._last = self._for_step, [], reply
        for answer in answers:
            answer(reply)

    def _settle(self, committed: bool, code: str = "aborted") -> None:
        """Decides, once. Then the ranks do it."""
        if self.committed is not None:
            return
        self.committed = committed

        def done() -> None:
            if self._node.owner is self:
                self._node.owner = None
                if committed:
                    self._node.is_paused = self.pauses
            self._end(committed, None if committed else code)

        self._node.later(self._node.takes(self._world.release), done)

    def _end(self, committed: bool | None, code: str | None) -> None:
        if self.outcome is not None:
            return
        error = {"error": {"code": code, "message": str(code)}} if code else {}
        self.outcome = {"reply": "outcome", "committed": committed, "processes": [], **error}
        answers, self._for_step, self._for_outcome = self._for_step + self._for_outcome, [], []
        for answer in answers:
            answer(self.outcome)

    def _watch(self) -> None:
        """The lease."""
        if self.committed is not None:
            return
        left = self._heard + self.lease - self._world.now
        if left > 1e-6:
            self._node.later(left, self._watch)
        elif self.has_voted:
            self._read()
        else:
            self._settle(False)

    def _read(self) -> None:
        """The record: aborted, unless it is set."""
        if not self._reads:
            self._reads = True
            put = self._world.takes(self._world.put)
            self._node.later(put, lambda: self._settle(self._world.store.setdefault(self.key, False)))


class Driver:
    """Carries out what a coordinator wants, as ``vramctl.ray`` does."""

    def __init__(self, world: World, operation: str = "pause", **known: Any) -> None:
        self._world, self._wants_paused = world, operation == "pause"
        request = (
            {"operation": operation, "target": {"name": "job"}, "hold_ms": 60_000}
            if operation == "pause"
            else {"operation": operation, "target": {"name": "job"}, "timeout_ms": 60_000}
        )
        self.coordinator = _nodes.Coordinator(request, list(world.nodes), world.now, chance=world.chance, **known)
        self.is_alive, self.messages = True, 0
        self._tick()

    @property
    def outcome(self) -> dict[str, Any] | None:
        return self.coordinator.outcome

    def has_ended(self) -> bool:
        return self.outcome is not None or not self.is_alive

    def _tick(self) -> None:
        if not self.has_ended():
            self._carry_out(self.coordinator.tick(self._world.now))
            self._world.at(self._world.now + self.coordinator.moment, self._tick)

    def _tell(self, handler: Callable[..., list[Any]], *what: Any) -> None:
        if not self.has_ended():
            self._carry_out(handler(self._world.now, *what))

    def _carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, _nodes.Say):
                self._say(action)
            elif isinstance(action, _nodes.Record):
                self._record(action.attempt)
            else:
                self._look(self._world.nodes[action.node])

    def _say(self, said: Any) -> None:
        node, key = self._world.nodes[said.node], (id(self), said.attempt)

        def lost(why: str) -> None:
            self._tell(self.coordinator.lost, said.node, why)

        def answer(reply: Any) -> None:
            self.messages += 1
            if self._world.is_lost():
                # It is noticed sooner or later, or never.
                return (
                    self._world.at(self._world.now + 1.0, lambda: lost("a message is lost"))
                    if self._world.chance.random() < 0.5
                    else None
                )
            self._world.send_back(node, lambda: self._tell(self.coordinator.heard, said.node, said.attempt, reply))

        def arrives() -> None:
            if said.request is not None:
                node.participants[key] = Participant(node, key, said.request, answer)
            elif key not in node.participants:
                self._world.send_back(node, lambda: lost("the agent has been started anew"))
            else:
                at = self._world.now if said.at is None else said.at
                participant = node.participants[key]
                node.later(max(at + node.skew - self._world.now, 0.0), lambda: participant.say(said.number, said.word, answer))

        self.messages += 1
        if node.is_gone or node.leaves_at is not None:
            self._world.at(self._world.now + self._world.takes(0.3), lambda: lost("the node has died"))
            noticed = max(node.leaves_at or 0.0, self._world.now + self._world.takes(0.5))
            self._world.at(noticed, lambda: self._tell(self.coordinator.gone, said.node))
        elif not self._world.is_lost():
            self._world.send(node, lambda: node.later(0.0, arrives))

    def _record(self, attempt: int) -> None:
        def put() -> None:
            said: bool | None = self._world.store.setdefault((id(self), attempt), True)
            if self._world.is_lost():
                said = None
            self._tell(self.coordinator.recorded, attempt, said)

        self._world.at(self._world.now + self._world.takes(self._world.put), put)

    def _look(self, node: Node) -> None:
        def looked() -> None:
            if node.is_gone or (node.leaves_at is not None and self._world.now >= node.leaves_at):
                state = "gone"
            elif node.leaves_at is not None:
                state = "unknown"
            elif self._world.now < node.stopped_until or node.owner is not None:
                state = "unknown"
            else:
                state = "done" if node.is_paused == self._wants_paused else "as_it_was"
            self._tell(self.coordinator.looked, node.name, state)

        self._world.at(self._world.now + self._world.takes(0.1), looked)
