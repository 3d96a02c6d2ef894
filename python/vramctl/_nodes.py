"""Pauses or resumes a job over several nodes as one: the protocol, without a network, a clock or threads.

On each node, the ranks are taken through an attempt by a participant, ``vramctl operate`` (``docs/protocol.md``, "A job over several nodes").
The `Coordinator` takes all participants through the steps together: what happens goes in, and what is to be done comes out. The decision is a
record that is set once; whoever has voted and hears nothing any more reads it. `vramctl.ray` carries this out on
Ray.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

#: How long a participant does without a sign of its coordinator.
LEASE = 5.0
#: How often the coordinator gives one, and expects one.
RENEW_EVERY = 1.0
#: When a node that answers nothing counts as lost.
SILENT = 10.0
#: And one that has not answered yet: its agent has to start.
STARTED_WITHIN = 30.0
#: How long to try to set the record, and to find out what has become of a node.
SETTLED_WITHIN = 20.0
#: How long it takes until all nodes know when to hold their ranks, and how much longer for each node.
HOLD_AFTER, HOLD_AFTER_EACH = 0.01, 0.0005
#: How often to try.
AGAIN_EVERY = 0.3
#: After how long without progress some of those are asked whose ranks have work in flight. If they still have, the ranks of all other nodes go on
#: a little: somebody waits for them.
ADVANCE_AFTER, ASKED = 0.03, 4
#: What all ranks wait for at each other.
STEPS = ("found", "held", "drained", "prepared")
#: As on one node (``src/coordinator/retry.rs``): the first attempt's time for work in flight, and for another client's operation. There, ranks
#: that are held at different collectives need another attempt; here, those that are behind go on.
FIRST_DRAIN, TURN_WITHIN = 2.0, 10.0


class Rank(NamedTuple):
    """A process of a job over several nodes."""

    #: The node's id in Ray.
    node: str
    pid: int


@dataclass(frozen=True)
class Say:
    """Tell the participant of a node, once; the answer goes to `Coordinator.heard`, with the ``number`` of the word if it is a step. ``begin``
    has a request. ``renew`` is answered at once: with the last answer, and the number of the last other word that has come (``told``).
    """

    node: str
    attempt: int
    word: str
    #: Which of the words in this attempt this is. One that has come is not told again, and answered again.
    number: int = 0
    request: Mapping[str, Any] | None = None
    #: Not before this moment, so that all nodes hold their ranks at once: the less they are apart, the more often do the ranks stand at the
    #: same collective. Clocks that differ only cost further attempts.
    at: float | None = None


@dataclass(frozen=True)
class Record:
    """Set the attempt's record to committed, unless it is set; what it says goes to `Coordinator.recorded`."""

    attempt: int


@dataclass(frozen=True)
class Look:
    """Find out how the ranks of a node are; the answer goes to `Coordinator.looked`."""

    node: str


Action = Union[Say, Record, Look]


@dataclass
class Coordinator:
    """One pause or resume. Ends when there is an `outcome`: that of ``vramctl operate``, with `Rank` for ``pid``, and the nodes that are
    ``behind``: they could not do what had been decided, so the job is to be resumed.
    """

    #: As for ``vramctl operate``.
    request: Mapping[str, Any]
    #: Where ranks may be.
    nodes: Collection[str]
    begun: float
    #: The ranks that the job had when it was last paused or resumed, and how many there must be, if somebody said so.
    members: Collection[Rank] = ()
    ranks: int | None = None
    #: The participant's command that reads the record of an attempt, without its number.
    record: Collection[str] = ()
    chance: random.Random = field(default_factory=random.Random)

    outcome: dict[str, Any] | None = None
    attempt: int = 0
    #: ``steps``, ``deciding``, ``committing``, ``aborting``, ``resting``
    phase: str = "resting"
    #: The nodes that have ranks, with them.
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pauses = self.request["operation"] == "pause"
        hold, timeout = self.request.get("hold_ms"), self.request.get("timeout_ms")
        holds = self._pauses and self.request.get("hold", True)
        self._hold: float | None = (10.0 if hold is None else hold / 1000) if holds else None
        self._timeout: float | None = None if timeout is None else timeout / 1000
        self._next_drain, self._early, self._next = FIRST_DRAIN, set[str](), self.begun
        self._part, self._collisions, self._tried_since = set(self.nodes), 0, 0.0
        # Nodes that have left, with the ranks that they had; None if they had not said so yet.
        self._gone: dict[str, list[Rank] | None] = {}
        # Those that have not ended, and those that have not reached the next step.
        self._open, self._under_way = set[str](), set[str]()
        # When a node last reached a step, when and whether one has said that it has not, and until when those that are behind may go on.
        self._progress, self._asked, self._is_stuck, self._advances_until = self.begun, self.begun, False, self.begun
        # By node, in this attempt: what it was told last, its step, its outcome, when it has answered, and when to look at its ranks.
        self._told: dict[str, Say] = {}
        # And when it was told anything.
        self._spoken: dict[str, float] = {}
        self._steps: dict[str, str] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, float] = {}
        self._looking: dict[str, float] = {}
        # Those that have answered in this operation, and whose participants have ended without having committed.
        self._known, self._given_up = set[str](), set[str]()
        self._checked = self._cancelled = False
        self._fatal: tuple[str, str] | None = None

    @property
    def there(self) -> list[Rank]:
        """The ranks that were found."""
        return [rank for node in self.found for rank in self._ranks(node)]

    @property
    def away(self) -> list[Rank]:
        """Members on nodes that do not belong to the cluster."""
        members = {rank for rank in self.members if rank.node not in self.nodes or rank.node in self._gone}
        return sorted(members | self._left)

    @property
    def _left(self) -> set[Rank]:
        """The ranks that were found on nodes that have left since."""
        return {rank for ranks in self._gone.values() for rank in ranks or ()}

    def _ranks(self, node: str) -> list[Rank]:
        return [Rank(node, process["pid"]) for process in self.found.get(node, ())]

    # What happens.

    @property
    def moment(self) -> float:
        """After how long at most to call `tick` again."""
        return ADVANCE_AFTER / 3 if self._behind else AGAIN_EVERY / 3

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.phase == "resting":
            return self._begin(now) if now >= self._next else []
        actions: list[Action] = []
        if self._behind and self._progress + ADVANCE_AFTER <= now < self._advances_until:
            actions += self._advance_those_behind(now)
        if now >= self._next and self.phase == "deciding":
            self._next = now + 10 * RENEW_EVERY
            actions.append(Record(self.attempt))
        for node in sorted(self._open):
            silent = SILENT if node in self._known else STARTED_WITHIN
            if node not in self._looking and now - self._heard[node] > silent:
                actions += self.lost(now, node, f"it has not answered for {silent:.0f} s")
        if self.outcome is None:
            # Each word renews the lease, too.
            due = [node for node in sorted(self._open - set(self._looking)) if now - self._spoken[node] >= RENEW_EVERY]
            self._spoken.update(dict.fromkeys(due, now))
            actions += [Say(node, self.attempt, "renew") for node in due]
        if self.phase == "committing":
            due = [node for node, at in self._looking.items() if now >= at]
            self._looking.update((node, now + SILENT) for node in due)
            actions += [Look(node) for node in due]
        return actions

    def heard(self, now: float, node: str, attempt: int, reply: Mapping[str, Any]) -> list[Action]:
        """A participant has answered: with the step that it has reached, with its outcome, or with ``none`` so far."""
        if attempt != self.attempt or self.phase == "resting" or node not in self._part:
            return []
        self._heard[node] = now
        self._known.add(node)
        told = self._told[node]
        if node in self._outcomes:
            return []
        if reply["reply"] != "outcome" and reply.get("told", told.number) < told.number:
            # A message is lost, or late.
            return [told]
        if reply["reply"] == "none":
            return []
        if reply["reply"] == "reached":
            if reply["number"] != told.number or node not in self._under_way:
                self._is_stuck |= node in self._under_way and reply.get("told") == told.number
                return []
            self._steps[node], self._progress, self._is_stuck = reply["step"], now, False
            self._under_way.discard(node)
            if "processes" in reply:
                self.found[node] = reply["processes"]
            return self._advance(now)
        if self.phase == "steps" and node not in self._steps and _codes(reply) == {"no_process"}:
            for nodes in (self._part, self._open, self._under_way):
                nodes.discard(node)
            self.found.pop(node, None)
            return self._advance(now)
        if self.phase == "committing" and reply["committed"] is not True:
            self._given_up.add(node)
            return self._look(now, node) if node not in self._looking else []
        return self._ends(now, node, dict(reply))

    def lost(self, now: float, node: str, why: str) -> list[Action]:
        """A participant cannot be reached any more."""
        if self.phase == "resting" or node not in self._open:
            return []
        if self.phase == "committing":
            return [] if node in self._looking else self._look(now, node)
        return self._ends(now, node, _failed("disconnected", f"node {node} is lost: {why}"))

    def gone(self, now: float, node: str) -> list[Action]:
        """A node does not belong to the cluster any more. Further attempts are without it, and its ranks are missing."""
        if node not in self._gone:
            has_said = node in self.found or node not in self._part
            self._gone[node] = self._ranks(node) if has_said else None
        return self.lost(now, node, "it does not belong to the cluster any more")

    def recorded(self, now: float, attempt: int, committed: bool | None) -> list[Action]:
        """What the record says. None: its store did not answer."""
        if attempt != self.attempt or self.phase != "deciding":
            return []
        if committed is None:
            if now - self._tried_since < SETTLED_WITHIN:
                self._next = now + AGAIN_EVERY
                return []
            self._fail(
                now, "disconnected", "the record of the decision cannot be reached: each node follows it once it can", None
            )
            return []
        if not committed:
            return self._abort(now)
        self.phase, self._tried_since = "committing", now
        for node in list(self._outcomes):
            del self._outcomes[node]
            self._open.add(node)
            self._look(now, node)
        return [self._tell(now, node, "commit") for node in sorted(self._open - set(self._looking))]

    def looked(self, now: float, node: str, state: str) -> list[Action]:
        """How the ranks of a node are: ``done``, ``as_it_was``, ``gone`` with the node, or ``unknown``."""
        if self.phase != "committing" or node not in self._looking:
            return []
        # Its participant may be about to read the record, unless there is none any more.
        is_open = state == "unknown" or (state == "as_it_was" and node not in self._given_up)
        if is_open and now - self._tried_since < SETTLED_WITHIN:
            self._looking[node] = now + AGAIN_EVERY
            return []
        del self._looking[node]
        return self._ends(now, node, {"reply": "outcome", "committed": state == "done", "processes": [], "state": state})

    def cancel(self, now: float) -> list[Action]:
        """Nobody wants it any more. What is decided is completed."""
        if self.phase in ("deciding", "committing"):
            return []
        self._cancelled = True
        if self.phase == "steps":
            return self._abort(now)
        if self.phase == "resting":
            self._fail(now, "cancelled", "cancelled", False)
        return []

    # What follows.

    def _begin(self, now: float) -> list[Action]:
        self.attempt += 1
        if self._checked and self._pauses:
            # This attempt is to find the same.
            self.members = self.there
        self._checked = False
        self._part = (self._part - set(self._gone)) or set(self.nodes) - set(self._gone)
        self.found = {node: found for node, found in self.found.items() if node not in self._gone}
        if not self._part:
            self._fail(now, "disconnected", f"none of {len(self.nodes)} nodes belongs to the cluster any more", False)
            return []
        self.phase = "steps"
        self._steps, self._outcomes, self._looking, self._given_up = {}, {}, {}, set()
        self._heard, self._spoken = dict.fromkeys(self._part, now), dict.fromkeys(self._part, now)
        self._open, self._under_way = set(self._part), set(self._part)
        self._told = {node: Say(node, self.attempt, "begin", 0, self._request(now, node)) for node in sorted(self._part)}
        return list(self._told.values())

    def _tell(self, now: float, node: str, word: str, at: float | None = None) -> Say:
        self._spoken[node] = now
        self._told[node] = Say(node, self.attempt, word, self._told[node].number + 1, at=at)
        return self._told[node]

    def _request(self, now: float, node: str) -> dict[str, Any]:
        terms = {"lease_ms": int(LEASE * 1000), "record": [*self.record, str(self.attempt)], "early": node in self._early}
        terms["drain_ms"] = int(self._drain(now) * 1000)
        request = {**self.request, "version": 1, "ranks": 0, "node": terms}
        if self._timeout is not None and not self._pauses:
            # Not for long at a time: two jobs may wait for memory that the other one has on another node.
            request["timeout_ms"] = int(min(self._timeout - (now - self.begun), 5.0) * 1000) if node in self._early else 0
        return request

    def _drain(self, now: float) -> float:
        """As on one node: half of what is left is for further attempts."""
        if self._hold is None:
            return 0.0
        return max(min(self._next_drain, (self._hold - (now - self.begun)) / 2), min(FIRST_DRAIN, self._hold))

    def _advance(self, now: float) -> list[Action]:
        if self.phase != "steps" or self._under_way:
            return []
        steps = {node: self._steps[node] for node in self._part}
        if not self._checked and all(step == "found" for step in steps.values()):
            problem = self._problem()
            if problem is not None:
                self._fatal = problem
                return self._abort(now)
            self._checked = True
        early = self._early & self._part
        if early and any(step == "found" for step in steps.values()):
            if all(steps[node] == "found" for node in early):
                return self._go(now, early)
            return self._go(now, self._part - early) if all(steps[node] == "prepared" for node in early) else []
        if len(set(steps.values())) > 1:
            return []
        if "prepared" in steps.values():
            self.phase, self._tried_since, self._next = "deciding", now, now + 10 * RENEW_EVERY
            return [Record(self.attempt)]
        return self._go(now, self._part)

    def _go(self, now: float, nodes: Collection[str]) -> list[Action]:
        self._under_way.update(nodes)
        if "held" in self._steps.values():
            self._advances_until = now + self._drain(now)
        holds = self._hold is not None and "found" in self._steps.values()
        at = now + HOLD_AFTER + HOLD_AFTER_EACH * len(nodes) if holds else None
        return [self._tell(now, node, "go", at) for node in sorted(nodes)]

    @property
    def _behind(self) -> list[str]:
        """The nodes whose ranks have no work in flight any more while that of others has not ended: those may wait for them in a collective, which
        they have started and these have not. It is the same for the ranks of a node, which see to that themselves.
        """
        steps = self._steps
        if self.phase != "steps" or not self._under_way or not all(steps.get(node) == "held" for node in self._under_way):
            return []
        return [node for node in sorted(self._part) if steps.get(node) == "drained"]

    def _advance_those_behind(self, now: float) -> list[Action]:
        if self._is_stuck:
            behind = self._behind
            self._steps.update(dict.fromkeys(behind, "held"))
            self._under_way.update(behind)
            self._progress, self._is_stuck = now, False
            return [self._tell(now, node, "advance") for node in behind]
        # Or is it only the answer that is late?
        if now - self._asked < ADVANCE_AFTER:
            return []
        self._asked = now
        asked = self.chance.sample(sorted(self._under_way), min(len(self._under_way), ASKED))
        return [Say(node, self.attempt, "renew") for node in asked]

    def _problem(self) -> tuple[str, str] | None:
        """Why nothing is to be done: a rank is missing or new, or nobody has a tag."""
        there = set(self.there)
        if not there:
            return "no_process", f"no process of the job is managed on any of {len(self.nodes)} nodes"
        tags = {tag for node in self._part for process in self.found[node] for tag in process["tags"]}
        unknown = [tag for tag in self.request.get("tags") or () if tag not in tags]
        if unknown:
            return "unknown_tag", f"no allocation has the tag {', '.join(unknown)}; the tags are {', '.join(sorted(tags))}"
        known = set(self.members)
        if not known & there:
            # Of an earlier job, of which nothing is left.
            known = there if self._left else set()
        known = known | self._left
        missing, new = known - there, there - known
        if self.ranks is not None:
            if len(there) >= self.ranks:
                return None
            text = f"{len(there)} of {self.ranks} processes are there"
        elif not self._pauses:
            return None
        elif not known:
            silent = [node for node, ranks in self._gone.items() if ranks is None]
            if not silent:
                return None
            return "disconnected", (
                f"nothing was done: node {', '.join(silent)} has left the cluster and has not said whether it has ranks of the job. "
                f"To do with those of the others, say that there are {len(there)} ranks"
            )
        elif not (missing or new):
            return None
        else:
            text = f"{len(there)} processes are there, and the job had {len(known)}"
        named = [f"{what}: {_names(ranks)}" for what, ranks in (("missing", missing), ("new", new)) if ranks and known]
        rest = f"; {'; '.join(named)}" if named else ""
        return "no_process", f"nothing was done: {text}{rest}. To do with these, say that there are {len(there)} ranks"

    def _abort(self, now: float) -> list[Action]:
        self.phase = "aborting"
        actions: list[Action] = [self._tell(now, node, "abort") for node in sorted(self._open)]
        return actions or self._one_ended(now)

    def _look(self, now: float, node: str) -> list[Action]:
        self._looking[node] = now
        return []

    def _ends(self, now: float, node: str, outcome: dict[str, Any]) -> list[Action]:
        self._outcomes[node] = outcome
        self._open.discard(node)
        return self._one_ended(now)

    def _one_ended(self, now: float) -> list[Action]:
        if self.phase == "steps":
            return self._abort(now)
        if self.phase == "deciding" or self._open:
            return []
        if self.phase == "committing":
            self._end(now)
            return []
        return self._retry(now)

    def _retry(self, now: float) -> list[Action]:
        """The same policy as on one node. An attempt that was aborted has changed nothing."""
        if self._cancelled:
            self._fail(now, "cancelled", "cancelled", False)
            return []
        if self._fatal is not None:
            self._fail(now, *self._fatal, False)
            return []
        codes = set().union(*(_codes(outcome) for outcome in self._outcomes.values())) - {"aborted", "cancelled"}
        rest = self.chance.uniform(0.01, 0.05)
        limits: list[float | None] = []
        for code in codes:
            if code in ("leased", "disconnected"):
                # Another client, or an agent that has died.
                limits.append(max(TURN_WITHIN, self._hold or self._timeout or 0.0))
            elif code in ("busy", "capturing") and self._pauses:
                limits.append(None if self._hold is None else self._hold - FIRST_DRAIN)
            elif code == "device_memory" and not self._pauses:
                limits.append(self._timeout or None)
            else:
                limits.append(None)
        allowed = [limit for limit in limits if limit is not None]
        if len(allowed) < len(limits) or not allowed or now - self.begun + rest >= min(allowed):
            self._end(now)
            return []
        if "device_memory" in codes:
            self._early |= {node for node, outcome in self._outcomes.items() if "device_memory" in _codes(outcome)}
        elif codes & {"busy", "capturing"}:
            self._next_drain = self._drain(now) * 2
        elif "leased" in codes:
            # Two operations that are in each other's way on different nodes.
            self._collisions += 1
            rest *= min(2.0**self._collisions, 32.0)
        self.phase, self._next = "resting", now + rest
        return []

    def _end(self, now: float) -> None:
        """All participants have ended."""
        outcomes, is_committed = self._outcomes, self.phase == "committing"
        gone = sorted(node for node, outcome in outcomes.items() if outcome.get("state") == "gone")
        behind = [node for node, one in sorted(outcomes.items()) if is_committed and not one["committed"] and node not in gone]
        self._answer(now, is_committed and not behind, behind)
        if gone or behind:
            where = f"the ranks of {', '.join(gone)} are lost with the node" if gone else ""
            why = f"node {', '.join(behind)} could not do what was decided" if behind else ""
            text = "; ".join(part for part in (where, why) if part)
            self._error("disconnected", f"{text}. All others are {'paused' if self._pauses else 'resumed'}, and can be resumed")
            return
        failures = [(node, one["error"]) for node, one in sorted(outcomes.items()) if one.get("error")]
        if failures:
            node, cause = min(failures, key=lambda failure: failure[1]["code"] in ("aborted", "cancelled"))
            assert self.outcome is not None
            tries = f", {self.attempt} attempts in {now - self.begun:.1f} s" if self.attempt > 1 else ""
            self.outcome["error"] = {**cause, "message": f"{cause['message']} (node {node}{tries})"}

    def _fail(self, now: float, code: str, message: str, committed: bool | None) -> None:
        self._answer(now, committed, [])
        self._error(code, message)

    def _answer(self, now: float, committed: bool | None, behind: list[str]) -> None:
        outcomes = self._outcomes if self.attempt else {}
        processes = [
            {**process, "pid": Rank(node, process["pid"])}
            for node, outcome in sorted(outcomes.items())
            for process in outcome["processes"]
        ]
        job = {
            "job": self.request["target"]["name"],
            "attempts": self.attempt,
            "ms": (now - self.begun) * 1000,
            "committed": committed,
        }
        self.outcome = {"committed": committed, "processes": processes, "jobs": [job], "behind": behind}

    def _error(self, code: str, message: str) -> None:
        assert self.outcome is not None
        self.outcome["error"] = {"code": code, "message": message}


def _codes(outcome: Mapping[str, Any]) -> set[str]:
    """Why a participant has failed."""
    errors = [outcome.get("error"), *(process.get("error") for process in outcome["processes"])]
    return {error["code"] for error in errors if error}


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"reply": "outcome", "committed": False, "processes": [], "error": {"code": code, "message": message}}


def _names(ranks: Collection[Rank]) -> str:
    return ", ".join(f"process {rank.pid} of node {rank.node}" for rank in sorted(ranks))
