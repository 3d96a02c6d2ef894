"""Jobs over several nodes of a Ray cluster.

``vramctl.ray.Job("engine")`` offers what `vramctl.Job` does, for all processes with a name on all nodes (``docs/many-nodes.md``). Each node has an
agent, which is started when it is needed: an actor that needs no CPU and no GPU, and runs ``vramctl operate``. What the agents do together, ``vramctl
coordinate`` decides (``src/coordinator/nodes``); this transports the messages. The record of a decision is an entry of Ray's key-value store (GCS) that is put without overwriting.

``python -m vramctl.ray pause engine``, or ``vramctl ray pause engine``, does the same from the shell of any node.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import ray  # type: ignore[import-not-found]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

from . import __version__, errors
from . import job as _job
from .types import Status

__all__ = ["Job", "Rank"]

_log = logging.getLogger("vramctl")

#: How often to ask a node that is at work whether it is still there, when one that answers nothing counts as lost, and when one whose agent has to
#: start. As in ``src/coordinator/patience.rs``.
RENEW_EVERY, SILENT, STARTED_WITHIN = 1.0, 10.0, 30.0
#: Where agents and records are.
_NAMESPACE = "vramctl"
#: How names of records begin. The rest is when, in seconds, and which.
_RECORD = "record-"
#: After how many seconds nobody reads a record any more. A participant does so for 60 s at most, and without it its ranks decide after 5 s.
_EXPIRES = 600
#: What a record says. Anything else is no answer.
_DECISIONS = {b"commit": True, b"abort": False}


class Rank(NamedTuple):
    """A process of a job over several nodes."""

    #: The node's id in Ray.
    node: str
    pid: int


class Job(_job.Job):
    """All processes with a name (``vramctl run --name``) on all nodes of the Ray cluster that this program is connected to, or else of
    ``RAY_ADDRESS``, or that of this node.

    Has the methods of `vramctl.Job`, and promises the same: all processes are paused or resumed, or none is. Reports and `status` are by
    `Rank`: the node's id in Ray, and the process id. If a process is missing or new since the job was last paused or resumed, a pause
    raises `errors.NoProcess` and names it; `ranks` says how many there must be instead.
    """

    def __init__(self, name: str, *, ranks: int | None = None) -> None:
        super().__init__(name, ranks=ranks)
        self._name = name

    def status(self) -> dict[Rank, Status]:  # type: ignore[override]
        """The managed memory of each process, by its `Rank`."""
        return {process["pid"]: Status._from(process) for process in self._operate("status")["processes"]}

    def _operation(self, operation: str, **fields: Any) -> _Operation:
        if operation == "swap":
            raise errors.Unsupported(
                "jobs over several nodes cannot change places as one: pause the one, and then resume the other"
            )
        # A participant is never detached: it is held to the record instead.
        left_out = ("ranks", "target", "detached")
        given = {name: value for name, value in fields.items() if value is not None and name not in left_out}
        return _Operation(self, {**given, "operation": operation, "target": {"name": self._name}}, fields.get("ranks"))


class _Operation(_job._Work["dict[str, Any]"]):
    """An operation on a job. `stop` has it undone, unless it is decided."""

    def __init__(self, job: Job, request: dict[str, Any], ranks: int | None) -> None:
        super().__init__(self._carry_out)
        self._name, self._request, self._ranks, self._stopped = job._name, request, ranks, False
        self._cancel: Callable[[], None] = lambda: None

    def stop(self) -> None:
        self._stopped = True
        self._cancel()

    def _carry_out(self) -> dict[str, Any]:
        try:
            _connect()
            with contextlib.closing(_Nodes()) as nodes:
                outcome = self._among(nodes)
        except (ray.exceptions.RaySystemError, ConnectionError) as error:
            # Whatever had been begun is settled by the participants.
            raise errors.Disconnected(f"the Ray cluster cannot be reached: {_line(error)}") from error
        if outcome.get("error"):
            failed = errors._from_reply(outcome["error"])
            failed.committed = outcome["committed"]
            raise failed
        return outcome

    def _among(self, nodes: _Nodes) -> dict[str, Any]:
        operation = self._request["operation"]
        if operation in ("pause", "resume"):
            takes_nccl = operation == "pause" and "nccl" in self._request.get("tags", ())
            more = {"everywhere": self._everywhere(nodes)} if takes_nccl else {}
            return self._settle(nodes, {**self._request, **more})
        if operation == "suspend":
            return self._suspend(nodes, {**self._request, "everywhere": self._everywhere(nodes)})
        if operation == "move":
            return self._move(nodes, {**self._request, "everywhere": self._everywhere(nodes)})
        return _joined(nodes.ask_all(self._request))

    def _everywhere(self, nodes: _Nodes) -> list[str]:
        """NCCL's communicators of which all ranks are processes of the job, wherever: a node knows those of its own processes only."""
        there: dict[str, set[int]] = {}
        sizes: dict[str, int] = {}
        for process in _joined(nodes.ask_all({"operation": "status", "target": self._request["target"]}))["processes"]:
            for one in process.get("communicators", ()):
                there.setdefault(one["id"], set()).add(one["rank"])
                sizes[one["id"]] = one["ranks"]
        return sorted(name for name, ranks in there.items() if len(ranks) == sizes[name])

    def _settle(self, nodes: _Nodes, request: Mapping[str, Any]) -> dict[str, Any]:
        """A pause or resume. If a node could not do what was decided, all are resumed."""
        outcome = self._coordinate(nodes, request)
        if outcome.get("behind"):
            back = {"operation": "resume", "target": request["target"], "tags": request.get("tags", []), "timeout_ms": 10_000}
            if request["operation"] == "pause":
                # What the job had paused itself was paused before, too.
                back["self_paused"] = False
            again = self._coordinate(nodes, back)
            if not again["committed"]:
                outcome["committed"] = None
                outcome["error"]["message"] += f". The resume failed: {again['error']['message']}"
            elif request["operation"] == "pause":
                outcome["committed"] = False
                outcome["error"]["message"] += ". So all of them were resumed"
            else:
                return again
        return outcome

    def _coordinate(self, nodes: _Nodes, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out what ``vramctl coordinate`` wants, and tells it what happens."""
        store, key = _Store(), f"{os.getuid()}/{self._name}"
        name = f"{key}/{_RECORD}{int(time.time())}-{uuid.uuid4().hex}"
        task = {
            "request": request,
            "nodes": nodes.ids,
            "members": json.loads(store.get(f"{key}/ranks") or b"[]"),
            "ranks": self._ranks,
            "record": ["-m", __name__, "record", store.address, name],
        }
        end: dict[str, Any] | None = None
        with contextlib.closing(_job._Command("coordinate")) as command:
            telling = threading.Lock()

            def tell(line: Mapping[str, Any]) -> None:
                with telling, contextlib.suppress(ValueError):  # it has ended
                    command.tell(json.dumps(line))

            tell(task)
            self._cancel = lambda: tell({"event": "cancel"})
            if self._stopped:
                self._cancel()
            for line in command.replies():
                action = json.loads(line)
                if action["action"] == "end":
                    end = action
                else:
                    self._carry_out_action(nodes, store, name, request, action, tell)
        self._cancel = lambda: None
        if end is None:
            why = command.complaints() or f"it ended with {command.wait()}"
            return _unknown("disconnected", f"vramctl coordinate: {why}. Each node does what has been decided")
        outcome: dict[str, Any] = end["outcome"]
        for process in outcome["processes"]:
            process["pid"] = Rank(*process["pid"])
        there, away = ([Rank(*rank) for rank in end[which]] for which in ("there", "away"))
        # Whether the store answers or not, it is done.
        with contextlib.suppress(Exception):
            if outcome["committed"]:
                store.put(f"{key}/ranks", json.dumps(there).encode())
                if request["operation"] == "resume" and self._ranks is None and away:
                    _log.warning(
                        "of the job %s, the nodes of these processes do not belong to the cluster any more, and were not asked: %s",
                        *(self._name, ", ".join(f"{rank.pid} of node {rank.node}" for rank in away)),
                    )
            if "error" not in outcome:
                # All have done it: nobody will ask.
                for attempt in range(1, end["attempts"] + 1):
                    store.delete(f"{name}/{attempt}")
            # Those of operations that failed or lost their driver.
            for left in store.keys(f"{key}/{_RECORD}"):
                began = left[len(f"{key}/{_RECORD}") :].partition("-")[0]
                if int(began) < time.time() - _EXPIRES:
                    store.delete(left)
        return outcome

    def _carry_out_action(
        self,
        nodes: _Nodes,
        store: _Store,
        name: str,
        request: Mapping[str, Any],
        action: Mapping[str, Any],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        attempt, node = action.get("attempt"), action.get("node", "")
        if action["action"] == "record":
            nodes.later(
                lambda: _DECISIONS.get(store.put_once(f"{name}/{attempt}", b"commit")),
                lambda said: tell({"event": "recorded", "attempt": attempt, "committed": said}),
            )
        elif action["action"] == "look":
            nodes.later(
                lambda: nodes.look(node, request),
                lambda state: tell({"event": "looked", "node": node, "state": state or "unknown"}),
            )
        else:

            def answered(answer: Any) -> None:
                if not isinstance(answer, Exception):
                    tell({"event": "heard", "node": node, "attempt": attempt, "reply": answer})
                    return
                nodes.forget(node)
                tell({"event": "lost", "node": node, "why": _line(answer)})
                nodes.later(
                    lambda: nodes.has_left(node), lambda has_left: tell({"event": "gone", "node": node}) if has_left else None
                )

            nodes.say(action, name, answered)

    def _suspend(self, nodes: _Nodes, request: Mapping[str, Any]) -> dict[str, Any]:
        """Once all tags are paused, each node's ranks leave their GPUs by themselves: none of them has work in flight any more."""
        suspend = {name: value for name, value in request.items() if name not in ("to", "swap")}
        refused = _joined(nodes.ask_all({**suspend, "operation": "suspend", "dry_run": True}))
        if refused.get("error"):
            return refused
        # A suspend that is repeated, or goes on where an interrupted one has ended.
        if not self._stands_still(nodes):
            outcome = self._settle(nodes, {**suspend, "operation": "pause"})
            if outcome.get("error"):
                return outcome
        left = _joined(nodes.ask_all({**suspend, "operation": "suspend"}))
        if left.get("error"):
            # The tags are paused all the same.
            left["committed"] = True if left["error"]["code"] == "not_restorable" else None
        return left

    def _move(self, nodes: _Nodes, request: Mapping[str, Any]) -> dict[str, Any]:
        """The ranks of each node go to other GPUs of the node: the same for all. If some cannot, all continue where they are then."""
        refused = _joined(nodes.ask_all({**request, "dry_run": True}))
        if refused.get("error"):
            return refused
        outcome = self._suspend(nodes, request)
        moves: dict[str, Any] = {}
        if not outcome.get("error"):
            moves = nodes.ask_all(request)
            outcome = _joined(moves)
        if not outcome.get("error") or (outcome["committed"] is False and not moves):
            return outcome
        arrived = sorted(node for node, one in moves.items() if not one.get("error"))
        if arrived:
            outcome["error"]["message"] += f". The ranks of node {', '.join(arrived)} have moved"
        back = self._settle(
            nodes, {"operation": "resume", "target": request["target"], "self_paused": False, "timeout_ms": 10_000}
        )
        outcome["committed"] = None if arrived or back.get("error") else False
        why = (
            f"The resume failed: {back['error']['message']}. `vramctl ray resume` tries again"
            if back.get("error")
            else "All of them run"
        )
        outcome["error"]["message"] += f". {why}"
        return outcome

    def _stands_still(self, nodes: _Nodes) -> bool:
        """Whether all ranks are held with all of their memory paused, or suspended."""
        found = nodes.ask_all({"operation": "status", "target": self._request["target"]})
        processes = _joined(found)["processes"]
        return bool(processes) and not any(one.get("error") for one in found.values()) and all(map(_stands_still, processes))


class _Store:
    """Ray's key-value store. It survives the death of drivers, workers and nodes; that of the head only if Ray has been told to keep it."""

    def __init__(self, address: str | None = None) -> None:
        from ray._raylet import GcsClient  # type: ignore[import-not-found]

        self.address = address or ray.get_runtime_context().gcs_address
        self._client = GcsClient(address=self.address)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._client.internal_kv_get(key.encode(), _NAMESPACE.encode(), timeout=10)
        return found

    def put(self, key: str, value: bytes) -> None:
        self._client.internal_kv_put(key.encode(), value, True, _NAMESPACE.encode(), timeout=10)

    def put_once(self, key: str, value: bytes) -> bytes:
        """Sets it unless it is set, and returns what it is."""
        self._client.internal_kv_put(key.encode(), value, False, _NAMESPACE.encode(), timeout=10)
        return self.get(key) or b""

    def keys(self, beginning: str) -> list[str]:
        found: list[bytes] = self._client.internal_kv_keys(beginning.encode(), _NAMESPACE.encode(), timeout=10)
        return [key.decode() for key in found]

    def delete(self, key: str) -> None:
        self._client.internal_kv_del(key.encode(), False, _NAMESPACE.encode(), timeout=10)


class _Nodes:
    """The nodes of the cluster that are alive, and their agents."""

    def __init__(self) -> None:
        self.ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        self._here = ray.get_runtime_context().get_node_id()
        self._agents: dict[str, Any] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(32, "vramctl-ray")

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def agent(self, node: str) -> Any:
        """The agent of a node, which is started if there is none."""
        if node not in self._agents:
            self._agents[node] = (
                ray.remote(_Agent)
                .options(
                    # One of another version does not understand this one.
                    name=f"agent/{__version__}/{os.getuid()}/{node}",
                    namespace=_NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    num_gpus=0,
                    max_concurrency=1000,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote()
            )
        return self._agents[node]

    def forget(self, node: str) -> None:
        """Its agent has died."""
        self._agents.pop(node, None)

    def later(self, work: Any, done: Any) -> None:
        """In a thread. What fails is None."""

        def run() -> None:
            answer = None
            with contextlib.suppress(Exception):
                answer = work()
            done(answer)

        with contextlib.suppress(RuntimeError):  # the operation has ended
            self._threads.submit(run)

    def say(self, said: Mapping[str, Any], name: str, answered: Callable[[Any], None]) -> None:
        node, request = said["node"], said.get("request")
        if request is not None and node != self._here:
            request.pop("waiting", None)
        try:
            at = None if "after_ms" not in said else time.time() + said["after_ms"] / 1000
            word = said["word"] or "begin"
            reference = self.agent(node).say.remote(f"{name}/{said['attempt']}", said["number"], word, request, at)
        except Exception as error:
            answered(error)
            return
        reference.future().add_done_callback(lambda future: answered(future.exception() or future.result()))

    def ask_all(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """An operation of each node for itself: its outcome, or why there is none. Those without a process of the job are left out."""
        with concurrent.futures.ThreadPoolExecutor(len(self.ids), "vramctl-ray") as threads:
            outcomes = dict(zip(self.ids, threads.map(lambda node: self._ask(node, request), self.ids)))
        there = {node: one for node, one in outcomes.items() if (one.get("error") or {}).get("code") != "no_process"}
        return there or outcomes

    def _ask(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        own = {**request, "version": 1}
        if node != self._here:
            own.pop("waiting", None)
        try:
            try:
                ray.get(self.agent(node).is_there.remote(), timeout=STARTED_WITHIN)
            except ray.exceptions.RayActorError:
                # It has died since it was last needed.
                self.forget(node)
                ray.get(self.agent(node).is_there.remote(), timeout=STARTED_WITHIN)
            agent = self.agent(node)
            asked = agent.operate.remote(own)
            while not ray.wait([asked], timeout=RENEW_EVERY)[0]:
                ray.get(agent.is_there.remote(), timeout=SILENT)
            outcome: dict[str, Any] = ray.get(asked)
            return outcome
        except ray.exceptions.RayError as error:
            self.forget(node)
            return _unknown("disconnected", f"node {node} does not answer: {_line(error)}")

    def has_left(self, node: str) -> bool:
        """Whether Ray knows that a node does not belong to the cluster any more."""
        return any(one["NodeID"] == node and not one["Alive"] for one in ray.nodes())

    def look(self, node: str, request: Mapping[str, Any]) -> str:
        """How the ranks of a node are."""
        if self.has_left(node):
            return "gone"
        self.forget(node)
        asked = {"version": 1, "operation": "status", "target": request["target"]}
        status = ray.get(self.agent(node).operate.remote(asked), timeout=5)
        if status.get("error"):
            return "gone" if status["error"]["code"] == "no_process" else "unknown"
        wanted = "paused" if request["operation"] == "pause" else "active"
        tags = [tag for process in status["processes"] for tag in process["tags"]]
        meant = [tag["state"] for tag in tags if not request.get("tags") or tag["tag"] in request["tags"]]
        if any(state in ("pausing", "resuming", "undoing") for state in meant):
            return "unknown"
        return "done" if all(state == wanted for state in meant) else "as_it_was"


class _Agent:
    """The agent of a node. It does nothing that its user could not do in a shell of the node."""

    def __init__(self) -> None:
        self._participants: dict[str, asyncio.Future[_Participant]] = {}

    async def is_there(self) -> None:
        """Answers."""

    async def operate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """An operation of this node alone."""
        try:
            outcome: dict[str, Any] = await (await _Participant.start(request)).outcome
        except OSError as error:
            return _unknown("internal", str(error))
        return outcome

    async def say(
        self, attempt: str, number: int, word: str, request: Mapping[str, Any] | None, at: float | None
    ) -> dict[str, Any]:
        """Says something to the participant in an attempt, and returns what it comes to: a step, or the outcome."""
        if request is not None:
            *reads, name, attempt_number = request["node"]["record"]
            terms = {**request["node"], "record": [sys.executable, *reads, f"{name}/{attempt_number}"]}
            # Before anything else, since the next words may come while it starts.
            started = asyncio.ensure_future(_Participant.start({**request, "node": terms}))
            self._participants[attempt] = started
            # It is spoken with for a while after its end, or never again.
            asyncio.get_running_loop().call_later(60, self._forget, attempt)
        if attempt not in self._participants:
            # It is another agent that has begun this.
            raise RuntimeError("the agent has been started anew")
        try:
            participant = await self._participants[attempt]
        except OSError as error:
            return {**_unknown("internal", str(error)), "committed": False}
        if at is not None:
            await asyncio.sleep(min(max(at - time.time(), 0.0), 1.0))
        return await participant.say(number, word)

    def _forget(self, attempt: str) -> None:
        """Some time after its end."""
        started = self._participants[attempt]
        has_ended = started.done() and (started.exception() is not None or started.result().outcome.done())
        if has_ended:
            asyncio.get_running_loop().call_later(60, self._participants.pop, attempt, None)
        else:
            asyncio.get_running_loop().call_later(60, self._forget, attempt)


class _Participant:
    """``vramctl operate``."""

    @classmethod
    async def start(cls, request: Mapping[str, Any]) -> _Participant:
        from .__main__ import command

        # A shell's child, and of a session of its own: it goes on if the agent dies. If the raylet dies, the agent ends, and Ray then kills the
        # agent's own children (RAY_kill_child_processes_on_worker_exit), which is the shell. Its command for the record finds the modules that
        # are found here.
        child = await asyncio.create_subprocess_exec(
            *("sh", "-c", '{ "$0" operate <&3 3<&- & } 3<&0; wait "$!"', command()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
            limit=1 << 26,
        )
        self = cls(child)
        self._tell(json.dumps(request))
        return self

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._reached: list[dict[str, Any]] = []
        self._told, self._has_ended = 0, False
        self._changed = asyncio.Condition()
        self.outcome: asyncio.Task[dict[str, Any]] = asyncio.get_running_loop().create_task(self._follow())

    async def say(self, number: int, word: str) -> dict[str, Any]:
        """Each word is told once, and answered as often as it comes."""
        if word == "renew":
            self._tell(word)
            return {**(self._reached[-1] if self._reached else {"reply": "none"}), "told": self._told}
        if number > self._told:
            self._told = number
            self._tell(word)
        if word in ("commit", "abort"):
            return await self.outcome
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_ended or len(self._reached) > number)
        return self._reached[min(number, len(self._reached) - 1)]

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._child.stdin.write(line.encode() + b"\n")

    async def _follow(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        found: dict[str, Any] = {}
        outcome: dict[str, Any] | None = None
        async for line in self._child.stdout:
            reply = json.loads(line)
            if reply["reply"] == "found":
                found = {"processes": reply["processes"]}
            elif reply["reply"] == "reached":
                await self._reach({**found, **reply})
            elif reply["reply"] == "outcome":
                outcome = reply
        code = await self._child.wait()
        if outcome is None:
            outcome = _unknown("internal", f"vramctl operate ended with {code} and said nothing")
            if code in (126, 127):
                outcome["committed"] = False
        # For whoever waits for a step.
        await self._reach(outcome, last=True)
        return outcome

    async def _reach(self, reply: dict[str, Any], last: bool = False) -> None:
        async with self._changed:
            self._reached.append({**reply, "number": len(self._reached)})
            self._has_ended = last
            self._changed.notify_all()


def _stands_still(process: Mapping[str, Any]) -> bool:
    is_paused = process.get("held") and all(tag["state"] == "paused" for tag in process["tags"])
    return bool(process.get("suspended") or is_paused)


def _joined(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of all nodes in one."""
    processes = [
        {**process, "pid": Rank(node, process["pid"])} for node, one in outcomes.items() for process in one["processes"]
    ]
    joined: dict[str, Any] = {
        "committed": all(one["committed"] for one in outcomes.values()),
        "processes": processes,
        "jobs": [],
    }
    failed = [(node, one["error"]) for node, one in outcomes.items() if one.get("error")]
    if failed:
        node, cause = failed[0]
        joined["error"] = {**cause, "message": f"{cause['message']} (node {node})"}
        joined["committed"] = False if not any(one["committed"] for one in outcomes.values()) else None
    return joined


def _unknown(code: str, message: str) -> dict[str, Any]:
    """The outcome of a node, if nobody can say what has become of it."""
    error = {"code": code, "message": message}
    return {"reply": "outcome", "committed": None, "processes": [], "error": error}


def _line(error: BaseException) -> str:
    """What an exception of Ray says, without the trace."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


_connecting = threading.Lock()


def _connect() -> None:
    """To the cluster, unless the program is connected."""
    with _connecting:
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "auto")
            ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")


# From the shell.


def _main() -> int:
    if sys.argv[1:2] == ["record"]:
        # A participant asks, because it hears nothing any more. Nobody who has not decided yet may do so after this.
        address, key = sys.argv[2:]
        print(_Store(address).put_once(key, b"abort").decode(), flush=True)
        return 0
    parser = argparse.ArgumentParser(
        prog="vramctl ray", description="Pause and resume a job over several nodes of a Ray cluster."
    )
    parser.add_argument("verb", choices=["status", "pause", "resume", "suspend", "move"])
    parser.add_argument("name", help="the job's name")
    parser.add_argument("tags", nargs="*", help="pause, resume: only these tags")
    parser.add_argument("--ranks", type=int, help="fail unless there are so many processes")
    parser.add_argument("--backup", choices=["host", "disk", "discard"], default="default", help="where contents go")
    parser.add_argument("--hold-timeout", type=float, default=10.0, metavar="SECONDS", help="for the work in flight")
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="resume: wait for memory that others hold"
    )
    parser.add_argument(
        "--to", action="append", metavar="GPU", help="move: index or UUID, one for each GPU of the job on a node"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.verb == "move" and not given.to:
        parser.error("move needs --to GPU")
    job = _Told(given.name, ranks=given.ranks)
    try:
        answer = _call(job, given)
        print(json.dumps(_json(job.outcome)) if given.json else _text(answer, job.outcome, given))
    except errors.Error as error:
        if given.json:
            told = {"code": error.code, "message": str(error)}
            print(json.dumps({"processes": [], "committed": error.committed, "error": told}))
        else:
            print(f"vramctl ray {given.verb}: {error}", file=sys.stderr)
        return _EXITS.get(error.code, 1)
    return 0


#: The exit codes of `vramctl help`, by the code of the error; 1 for all others.
_EXITS = {
    "several_processes": 2,
    "no_process": 3,
    "device_memory": 4,
    "host_memory": 4,
    "busy": 5,
    "capturing": 5,
    "leased": 5,
    "shared": 5,
    "suspended": 5,
    "unknown_tag": 6,
    "not_restorable": 7,
}


class _Told(Job):
    """Keeps what an operation has said."""

    outcome: dict[str, Any]

    def _operate(self, operation: str, **fields: Any) -> dict[str, Any]:
        self.outcome = super()._operate(operation, **fields)
        return self.outcome


def _call(job: Job, given: argparse.Namespace) -> Mapping[Any, Any]:
    if given.verb == "pause":
        return job.pause(given.tags or None, backup=given.backup, hold_timeout=given.hold_timeout).processes
    if given.verb == "resume":
        return job.resume(given.tags or None, timeout=given.timeout).processes
    if given.verb == "suspend":
        return job.suspend(backup=given.backup, hold_timeout=given.hold_timeout)
    if given.verb == "move":
        return job.move([gpu for gpus in given.to for gpu in gpus.split(",")], hold_timeout=given.hold_timeout)
    return job.status()


def _json(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """As the commands of one node print it, with the node of each process."""
    processes = [{"node": process["pid"].node, **process, "pid": process["pid"].pid} for process in outcome["processes"]]
    return {"processes": processes, **({"jobs": outcome["jobs"]} if outcome["jobs"] else {})}


def _text(answer: Mapping[Any, Any], outcome: Mapping[str, Any], given: argparse.Namespace) -> str:
    told = {process["pid"]: process for process in outcome["processes"]}
    lines = []
    for rank, about in sorted(answer.items()):
        if isinstance(about, Status):
            what = ", ".join(f"{tag.tag} {tag.state} {tag.bytes >> 20} MiB" for tag in about.tags)
            gpus = ", ".join(device.uuid or "?" for device in about.devices)
            how = next((f", {how}" for how in ("suspended", "held") if told[rank].get(how)), "")
            lines.append(f"{rank.node[:12]} pid {rank.pid} on {gpus}: {what}{how}")
        elif given.verb in ("suspend", "move"):
            stages = ", ".join(f"{stage} {ms:.0f}" for stage, ms in about.stages.items())
            lines.append(f"{rank.node[:12]} pid {rank.pid}: {given.verb} in {about.ms:.0f} ms ({stages})")
        else:
            lines.append(f"{rank.node[:12]} pid {rank.pid}: {given.verb} {about.bytes >> 20} MiB in {about.ms:.0f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    # As the agents import it.
    from vramctl.ray import _main as main

    sys.exit(main())
