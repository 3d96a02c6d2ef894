"""What the functions answer: the protocol's replies as typed, read-only values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


def _read(kind: type[_T], reply: Mapping[str, Any], **converted: Any) -> _T:
    """A value of `kind` from the fields that it knows; a library that is newer than this package says more."""
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in reply.items() if name in known}
    return kind(**{**values, **converted})


@dataclass(frozen=True)
class Report:
    """What a pause or resume did. Sizes are in bytes of device memory, times in milliseconds."""

    #: Allocations that changed their state.
    allocations: int = 0
    #: Their bytes, now given back or taken again.
    bytes: int = 0
    #: Of those, bytes whose contents were saved or restored.
    kept_bytes: int = 0
    #: Of those saved, bytes that were not copied, because the backup had them already.
    unchanged_bytes: int = 0
    #: Of `bytes`, bytes whose contents were dropped: they read as zero after the resume.
    discarded_bytes: int = 0
    #: Allocations that were so already.
    unchanged: int = 0
    #: Bytes that the driver has refused to take back so far; it is tried again.
    late_bytes: int = 0
    #: Milliseconds in each stage: `wait`, `save`, `unmap`, `release` of a pause, `wait`, `map`, `restore` of a resume.
    stages: Mapping[str, float] = field(default_factory=dict)
    #: Milliseconds in all.
    ms: float = 0.0

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Report:
        return _read(cls, reply)


@dataclass(frozen=True)
class Tag:
    """What there is under one tag, in bytes of device memory unless it says otherwise."""

    tag: str
    #: ``active``, ``paused``, or ``mixed``: some of its allocations are paused. While a pause or resume works on it,
    #: ``pausing`` or ``resuming``.
    state: str
    allocations: int = 0
    bytes: int = 0
    paused_bytes: int = 0
    #: Bytes of contents kept in host memory, of what is paused and what is retained of what is active.
    host_bytes: int = 0
    #: Bytes of contents kept in files.
    disk_bytes: int = 0
    #: Its bytes by the policy that a pause follows: ``host``, ``disk``, ``discard``.
    backup: Mapping[str, int] = field(default_factory=dict)
    #: Whether what is saved in host memory stays there after a resume.
    retained: bool = False
    #: How far a pause or resume of it has come, as soon as contents are copied.
    progress: Progress | None = None

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Tag:
        progress = reply.get("progress")
        return _read(cls, reply, progress=progress and Progress._from(progress))


@dataclass(frozen=True)
class Device:
    """Memory of a device that has managed allocations, in bytes."""

    #: Its ordinal inside the process.
    device: int
    active_bytes: int = 0
    paused_bytes: int = 0
    #: Free on the device, whoever has the rest; None where the driver does not answer.
    free_bytes: int | None = None
    total_bytes: int | None = None
    #: The one that ``nvidia-smi -L`` shows; None where the driver does not answer.
    uuid: str | None = None


@dataclass(frozen=True)
class Host:
    """Host memory for backups, in bytes."""

    #: Holds contents.
    used_bytes: int = 0
    #: What there is of it.
    ready_bytes: int = 0
    #: Of that, what the copy engines reach directly.
    pinned_bytes: int = 0


@dataclass(frozen=True)
class Status:
    """What a process has under management."""

    #: The tag of allocations outside regions; None: those are left to CUDA.
    process_tag: str | None = None
    #: By tag, in alphabetical order.
    tags: tuple[Tag, ...] = ()
    devices: tuple[Device, ...] = ()
    host: Host = Host()
    #: Bytes that the driver has refused to take back so far; it is tried again.
    late_bytes: int = 0

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Status:
        return _read(
            cls,
            reply,
            tags=tuple(Tag._from(tag) for tag in reply.get("tags", ())),
            devices=tuple(_read(Device, device) for device in reply.get("devices", ())),
            host=_read(Host, reply.get("host") or {}),
        )

    def tag(self, name: str) -> Tag | None:
        """What there is under a tag; None: nothing."""
        return next((tag for tag in self.tags if tag.tag == name), None)


@dataclass(frozen=True)
class Hello:
    """Who a process is."""

    #: The version of the control protocol that it speaks.
    protocol: int
    #: The version of its library.
    library: str
    #: Its id, in its own PID namespace.
    pid: int
    #: ``VRAMCTL_NAME``, else the program's name.
    name: str
    #: Its command line, the first 200 characters.
    program: str = ""
    #: The inference engine in it (``vllm``, ``sglang``), where it has said so: discard its ``kv_cache`` only if the engine
    #: forgets what its prefix cache says of it.
    engine: str | None = None

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Hello:
        return _read(cls, reply)


@dataclass(frozen=True)
class Progress:
    """How far a pause or resume has come."""

    #: As in `Report.stages`.
    stage: str
    #: Bytes done, of `total`.
    done: int
    total: int

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Progress:
        return _read(cls, reply)
