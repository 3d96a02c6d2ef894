"""The protocol's replies as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


def _read(kind: type[_T], reply: Mapping[str, Any], **converted: Any) -> _T:
    """Builds a `kind` from the fields it knows; a newer library may send more."""
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in reply.items() if name in known}
    return kind(**{**values, **converted})


@dataclass(frozen=True)
class Borrowed:
    """Memory of another process that this one has open (CUDA IPC), on one GPU."""

    #: The process id of the owner.
    owner: int
    #: Bytes of device memory when active.
    bytes: int
    #: Of those, paused ones: until they are resumed, this process is held.
    paused_bytes: int = 0
    #: As in ``nvidia-smi -L``; None if the driver does not answer.
    gpu: str | None = None


@dataclass(frozen=True)
class Communicator:
    """A rank of a communicator of NCCL. One that was split off another has that one's values."""

    #: The same at all of its ranks, in whichever process.
    id: str
    #: Which of its ranks this is.
    rank: int = 0
    #: How many ranks it has; 0 if that is not known.
    ranks: int = 0


@dataclass(frozen=True)
class Report:
    """What a pause or resume did. Sizes are in bytes of device memory, times in milliseconds."""

    #: Allocations that changed state.
    allocations: int = 0
    #: Their size, released or taken back.
    bytes: int = 0
    #: Part of `bytes`: contents saved or restored.
    kept_bytes: int = 0
    #: Part of `kept_bytes`: contents in files, not in host memory.
    disk_bytes: int = 0
    #: Part of `kept_bytes`: not copied because the backup already had them.
    unchanged_bytes: int = 0
    #: Part of `bytes`: contents dropped; they read as zero after the resume.
    discarded_bytes: int = 0
    #: Allocations already in the requested state.
    unchanged: int = 0
    #: After a resume: bytes that stay paused, because the program has paused them itself.
    self_paused_bytes: int = 0
    #: Bytes that the driver has so far refused to release; the library retries.
    late_bytes: int = 0
    #: After a resume: memory of other processes that this one has open and that is not back. After a pause with `shared`, of a process
    #: that was only held: the memory that it set aside. The process stays held until it is back.
    missing: tuple[Borrowed, ...] = ()
    #: After a resume: such memory that is lost, because its owner has ended, or has freed it while it was paused. The process runs on without it.
    lost: tuple[Borrowed, ...] = ()
    #: After a resume: texts about mappings made, and access given, while the memory was paused, which the driver refuses. It is back without them.
    refused: tuple[str, ...] = ()
    #: After a pause with a guard: the bytes that have one.
    guarded_bytes: int = 0
    #: After a pause with a guard: the bytes for which the guard failed.
    unguarded_bytes: int = 0
    #: Device memory used by guards, until no memory of their device is guarded any more.
    guard_bytes: int = 0
    #: After a resume: bytes of the guards that something wrote to. Reads cannot be detected.
    guard_written_bytes: int = 0
    #: Milliseconds per stage: `wait`, `save`, `unmap`, `release` for a pause; `wait`, `map`, `restore` for a resume; `guard` for both.
    stages: Mapping[str, float] = field(default_factory=dict)
    #: Total milliseconds.
    ms: float = 0.0

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Report:
        return _read(
            cls,
            reply,
            missing=tuple(_read(Borrowed, missing) for missing in reply.get("missing", ())),
            lost=tuple(_read(Borrowed, lost) for lost in reply.get("lost", ())),
            refused=tuple(reply.get("refused", ())),
        )


@dataclass(frozen=True)
class Tag:
    """The allocations under one tag. Sizes are in bytes of device memory unless noted."""

    tag: str
    #: ``active``, ``paused``, ``mixed`` (some allocations are paused), or ``pausing`` or ``resuming`` during a transition.
    state: str
    allocations: int = 0
    bytes: int = 0
    paused_bytes: int = 0
    #: Part of `paused_bytes`: what the program has paused itself.
    self_paused_bytes: int = 0
    #: Part of `self_paused_bytes`: what others have paused as well, so that the program is held.
    both_paused_bytes: int = 0
    #: Part of `paused_bytes`: what the scheduler has taken (``vramctl run --share``), and nobody else has paused.
    away_bytes: int = 0
    #: Contents in host memory: backups of paused allocations, and retained copies of active ones.
    host_bytes: int = 0
    #: Contents in files.
    disk_bytes: int = 0
    #: Bytes by the policy a pause would follow: ``host``, ``disk``, ``discard``.
    backup: Mapping[str, int] = field(default_factory=dict)
    #: Whether saved contents stay in host memory after a resume.
    retained: bool = False
    #: Progress of the current pause or resume, once it copies contents.
    progress: Progress | None = None

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Tag:
        progress = reply.get("progress")
        return _read(cls, reply, progress=progress and Progress._from(progress))


@dataclass(frozen=True)
class Device:
    """A device with managed allocations. Sizes are in bytes."""

    #: Its ordinal in the process.
    device: int
    active_bytes: int = 0
    paused_bytes: int = 0
    #: Part of `paused_bytes`: what the program has paused itself.
    self_paused_bytes: int = 0
    #: Part of `paused_bytes`: what the scheduler has taken (``vramctl run --share``), and nobody else has paused.
    away_bytes: int = 0
    #: The block that is mapped under guarded paused memory.
    guard_bytes: int = 0
    #: The most memory that the process may take of the device; None without a limit.
    limit_bytes: int | None = None
    #: What counts against that: managed memory, also while it is paused, what is left to CUDA, and the context.
    counted_bytes: int = 0
    #: Free memory on the whole device; None if the driver does not answer.
    free_bytes: int | None = None
    total_bytes: int | None = None
    #: As in ``nvidia-smi -L``; None if the driver does not answer.
    uuid: str | None = None
    #: What there is on it now, by tag: during a pause or resume, this differs from the active bytes.
    tags: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """Host memory for backups, in bytes."""

    #: In use for contents.
    used_bytes: int = 0
    #: Allocated in total.
    ready_bytes: int = 0
    #: Part of `ready_bytes`: pinned, so the copy engines reach it directly.
    pinned_bytes: int = 0


@dataclass(frozen=True)
class Unmanaged:
    """Memory that the library sees but leaves to CUDA."""

    #: The file name of the library, or of the program, that asked CUDA for it.
    owner: str = ""
    #: Asked for and not freed, without small requests.
    bytes: int = 0
    #: Of those, bytes by the UUID of their GPU.
    gpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cached:
    """The memory of a program's own allocator, such as torch's, under one tag on one GPU."""

    #: The UUID; None if the memory is not managed.
    gpu: str | None = None
    #: None: left to CUDA.
    tag: str | None = None
    #: In use.
    live_bytes: int = 0
    #: Free, in whole segments.
    cached_bytes: int = 0
    #: Free, but stuck in segments that are partly in use.
    fragmented_bytes: int = 0
    #: After a trim: returned to the driver.
    returned_bytes: int = 0


@dataclass(frozen=True)
class Trimmed:
    """What a trim did."""

    #: Returned to the driver.
    returned_bytes: int = 0
    #: The allocator's memory afterwards.
    cache: tuple[Cached, ...] = ()
    #: Milliseconds in total.
    ms: float = 0.0

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Trimmed:
        return _read(cls, reply, cache=tuple(_read(Cached, part) for part in reply.get("cache", ())))


@dataclass(frozen=True)
class Cycle:
    """The memory of a process after a pause, in bytes. Pauses without a resume in between are one cycle."""

    #: By tag, paused or not.
    tags: Mapping[str, int] = field(default_factory=dict)
    #: Left to CUDA, by the file name of the library that asked for it.
    unmanaged: Mapping[str, int] = field(default_factory=dict)
    #: The rest of what NVML counts, by the UUID of the GPU. `vramctl pause` sends it, so it may be empty.
    driver: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """An owner whose memory grows in each cycle: a leak, unless the program is still warming up."""

    #: A tag, a library, or the driver, for people.
    owner: str
    #: Mean growth.
    bytes_per_cycle: int
    #: Over how many cycles.
    cycles: int


@dataclass(frozen=True)
class Status:
    """The managed memory of a process."""

    #: The tag of allocations outside regions; None if they are left to CUDA.
    process_tag: str | None = None
    #: In alphabetical order.
    tags: tuple[Tag, ...] = ()
    devices: tuple[Device, ...] = ()
    host: Host = Host()
    #: Bytes that the driver has so far refused to release; the library retries.
    late_bytes: int = 0
    #: Memory of other processes that it has open, by owner and GPU.
    borrowed: tuple[Borrowed, ...] = ()
    #: The ranks of NCCL's communicators that the library has seen the program create, and that are not destroyed yet.
    communicators: tuple[Communicator, ...] = ()
    #: By owner, in alphabetical order.
    unmanaged: tuple[Unmanaged, ...] = ()
    #: The last cycles, the oldest first.
    cycles: tuple[Cycle, ...] = ()
    #: Owners whose memory grows from cycle to cycle.
    growing: tuple[Growth, ...] = ()

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Status:
        return _read(
            cls,
            reply,
            tags=tuple(Tag._from(tag) for tag in reply.get("tags", ())),
            devices=tuple(_read(Device, device) for device in reply.get("devices", ())),
            host=_read(Host, reply.get("host") or {}),
            borrowed=tuple(_read(Borrowed, borrowed) for borrowed in reply.get("borrowed", ())),
            communicators=tuple(_read(Communicator, one) for one in reply.get("communicators", ())),
            unmanaged=tuple(_read(Unmanaged, left) for left in reply.get("unmanaged", ())),
            cycles=tuple(_read(Cycle, cycle) for cycle in reply.get("cycles", ())),
            growing=tuple(_read(Growth, growth) for growth in reply.get("growing", ())),
        )

    def tag(self, name: str) -> Tag | None:
        """One tag by name; None if it has no allocations."""
        return next((tag for tag in self.tags if tag.tag == name), None)


@dataclass(frozen=True)
class Share:
    """A part of a GPU's memory in use."""

    #: ``tag``, ``unmanaged``, ``page_tables``, ``driver``, ``process``, ``out_of_sight`` or ``unexplained``: docs/out-of-memory.md.
    what: str
    #: Negative if the library counts more than NVML.
    bytes: int
    #: The process, and its name.
    pid: int | None = None
    name: str | None = None
    #: The tag, or the file name of the library that asked CUDA for it.
    of: str | None = None
    #: For a tag: its state, such as ``pausing``; None if the program has freed all of it.
    state: str | None = None
    #: For a tag, if the program's own allocator, such as torch's, reports it: bytes in use, free in whole segments, and free in segments
    #: that are partly in use.
    live_bytes: int | None = None
    cached_bytes: int | None = None
    fragmented_bytes: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The memory of a GPU. Sizes are in bytes."""

    #: Its index in ``nvidia-smi``.
    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    #: What the shares add up to.
    used_bytes: int
    #: Reserved by the driver, and not part of `used_bytes`; None if it counts as used.
    reserved_bytes: int | None
    shares: tuple[Share, ...]

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Ledger:
        return _read(cls, reply, shares=tuple(_read(Share, share) for share in reply["shares"]))


@dataclass(frozen=True)
class Hello:
    """Identifies a process."""

    #: The version of its control protocol.
    protocol: int
    #: The version of its library.
    library: str
    #: The process id, in its own PID namespace.
    pid: int
    #: ``VRAMCTL_NAME``, else the program's name.
    name: str
    #: The first 200 characters of its command line.
    program: str = ""
    #: The inference engine that it has declared (``vllm``, ``sglang``). Reset the engine's prefix cache before discarding its
    #: ``kv_cache``.
    engine: str | None = None

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Hello:
        return _read(cls, reply)


@dataclass(frozen=True)
class Progress:
    """The progress of a pause or resume."""

    #: As in `Report.stages`.
    stage: str
    #: Bytes done, of `total`.
    done: int
    total: int

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> Progress:
        return _read(cls, reply)


@dataclass(frozen=True)
class JobReport:
    """What a pause or resume of a job did."""

    #: By process id.
    processes: Mapping[int, Report] = field(default_factory=dict)
    #: How many attempts it took. If the processes of a job stand at different collectives, they run on for a moment and are held again.
    attempts: int = 0
    #: Milliseconds from the request until the last process was done.
    ms: float = 0.0

    @property
    def bytes(self) -> int:
        """The device memory released or taken back, of all processes."""
        return sum(report.bytes for report in self.processes.values())


@dataclass(frozen=True)
class StepsReport:
    """What `Job.suspend` or `Job.move` did to one process."""

    #: The device memory released: of its tags, and of the rest.
    bytes: int
    #: Milliseconds in all.
    ms: float
    #: Milliseconds by step: pause, quiesce, lock, checkpoint; of a move, restore, unlock and resume, too.
    stages: Mapping[str, float]
    #: Memory of other processes that this one has open: after a move, that is not back; after a suspend of others with `shared`, that it
    #: has set aside. The process stays held until it is back.
    missing: tuple[Borrowed, ...] = ()

    @classmethod
    def _from(cls, reply: Mapping[str, Any]) -> StepsReport:
        return _read(cls, reply, missing=tuple(_read(Borrowed, missing) for missing in reply.get("missing", ())))
