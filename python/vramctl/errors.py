"""The exceptions of this package. Each is an `Error` and carries the numbers behind its message.

`Error.code` is the error's name in the control protocol, `Error.number` its number in the C ABI; both are stable, and those of
``src/model/kind.rs``.
`Error.message` is for people and may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "Aborted",
    "Busy",
    "BufferTooSmall",
    "Capturing",
    "Disconnected",
    "Disk",
    "DeviceMemory",
    "Driver",
    "Ending",
    "Error",
    "HostMemory",
    "Internal",
    "Invalid",
    "Leased",
    "NoProcess",
    "NotPaused",
    "NotPreloaded",
    "NotRestorable",
    "PrefixCache",
    "Registered",
    "SeveralProcesses",
    "Shared",
    "Stale",
    "Suspended",
    "UnknownTag",
    "Unsupported",
    "Work",
]


class Error(RuntimeError):
    """Base class of this package's exceptions. A pause or resume that raises one has changed nothing, unless `committed` says otherwise."""

    #: The error's name in the protocol, such as ``device_memory``.
    code: str = "internal"
    #: The error's number in the C ABI; 0 for errors that only Python raises.
    number: ClassVar[int] = 0

    def __init__(self, message: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        #: What happened and what to do next, for people.
        self.message = message
        #: The numbers in the message, sizes in bytes. The keys depend on the class.
        self.numbers: dict[str, Any] = dict(numbers or {})
        #: Of a `Job`: whether it was paused or resumed all the same. True: one of its processes has not answered after the decision,
        #: because it has ended or is stopped; all others are done. Also if a suspend raises `NotRestorable`: all tags are paused, and the
        #: program is held until `resume`. None: unknown, because the answer is missing, or only a part is done.
        self.committed: bool | None = False

    def __str__(self) -> str:
        return self.message  # OSError would format its arguments

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes pickle their exceptions; keep the numbers.
        return (type(self), (self.message, self.numbers), {"code": self.code, "committed": self.committed})


class Invalid(Error, ValueError):
    """An argument or request is invalid, or the process does not accept requests from this user."""

    code = "invalid"
    number = 1


class UnknownTag(Error, LookupError):
    """A tag has no allocations; nothing was done."""

    code = "unknown_tag"
    number = 2

    @property
    def known_tags(self) -> list[str]:
        """The existing tags."""
        return list(self.numbers.get("known_tags", ()))


class DeviceMemory(Error, MemoryError):
    """Not enough device memory for a resume; everything stays paused."""

    code = "device_memory"
    number = 3

    @property
    def device(self) -> int | None:
        """The device's ordinal in the process; None if unknown."""
        return self.numbers.get("device")

    @property
    def needed(self) -> int:
        """Bytes needed."""
        return int(self.numbers.get("needed", 0))

    @property
    def free(self) -> int:
        """Bytes free."""
        return int(self.numbers.get("free", 0))

    @property
    def holders(self) -> list[dict[str, Any]]:
        """The processes that hold the rest, as far as the driver knows: ``pid``, and ``bytes`` and ``program`` if known."""
        return list(self.numbers.get("holders", ()))


class HostMemory(Error, MemoryError):
    """Not enough host memory to save the contents; everything stays active."""

    code = "host_memory"
    number = 4

    @property
    def needed(self) -> int:
        """Bytes needed for the contents."""
        return int(self.numbers.get("needed", 0))

    @property
    def available(self) -> int:
        """Bytes the host has available."""
        return int(self.numbers.get("available", 0))


class Driver(Error):
    """A CUDA driver call failed."""

    code = "driver"
    number = 5

    @property
    def cuda_code(self) -> int | None:
        """The driver's error code; None if unknown."""
        return self.numbers.get("cuda_code")


class Work(Driver):
    """The program's own GPU work has failed; its context is lost."""

    code = "work"
    number = 6


class Capturing(Error):
    """A CUDA graph capture is in progress; try again after it."""

    code = "capturing"
    number = 7


class Busy(Error, TimeoutError):
    """Timed out waiting for the device's work or for a process to answer."""

    code = "busy"
    number = 8


class Unsupported(Error):
    """The device, the driver, torch or the preloaded library lacks a required feature."""

    code = "unsupported"
    number = 9


class Internal(Error):
    """A bug in the library; please report it."""

    code = "internal"
    number = 10


class NotPaused(Error, LookupError):
    """The address is not in a paused allocation with contents in host memory."""

    code = "not_paused"
    number = 11


class BufferTooSmall(Error):
    """Used by the C ABI; this package's functions never raise it."""

    code = "buffer_too_small"
    number = 12


class Disk(Error, OSError):
    """A backup file could not be created, written or read."""

    code = "disk"
    number = 13


class PrefixCache(Error):
    """The pause would drop a KV cache that the process's inference engine still describes in its prefix cache. Reset the
    engine's prefix cache, then pass ``force=True``.
    """

    code = "prefix_cache"
    number = 14


class Ending(Error):
    """The program is exiting: the pause or resume in progress was abandoned, and its memory goes with the process."""

    code = "ending"
    number = 15


class Registered(Error):
    """The pause would replace memory that another process, a network card or NCCL knows by its physical pages. Pass
    ``registered="keep"`` to pause the rest, or ``registered="take"`` once nobody uses the registration any more.
    """

    code = "registered"
    number = 16


class Shared(Error):
    """Other processes have memory open that would be paused. Have them close it, or end them, first; or pass ``shared=True`` to `Job.pause`."""

    code = "shared"
    number = 17


class Aborted(Error):
    """The pause or resume was undone before its commit: another process of the job failed, say."""

    code = "aborted"
    number = 18


class Suspended(Error):
    """The process is suspended, and the request needs its driver; ``vramctl resume`` brings it back."""

    code = "suspended"
    number = 20


class NotRestorable(Error):
    """The driver could checkpoint the process, but not restore it."""

    code = "not_restorable"
    number = 21


class Stale(Error):
    """A newer scheduler has taken over from the one that asks."""

    code = "stale"
    number = 22


class Leased(Error):
    """Another client is in the middle of a pause or resume of this process; try again."""

    code = "leased"
    number = 19


class NotPreloaded(Error):
    """The library is not preloaded in this process, so none of its memory is managed."""

    code = "not_preloaded"


class NoProcess(Error, LookupError):
    """There is no such managed process."""

    code = "no_process"


class SeveralProcesses(Error, LookupError):
    """The target matches several processes; it must match one."""

    code = "several_processes"

    @property
    def pids(self) -> list[int]:
        """The ids of those processes."""
        return list(self.numbers.get("pids", ()))


class Disconnected(Error, ConnectionError):
    """The process ended or closed the connection before it answered. Check its status to see what became of the request."""

    code = "disconnected"


_CLASSES = [
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Error) and kind is not Error
]
_BY_NUMBER = {kind.number: kind for kind in _CLASSES if kind.number}
_BY_CODE = {kind.code: kind for kind in _CLASSES}


def _from_number(number: int, message: str, reply: Mapping[str, Any] | None = None) -> Error:
    """The exception for a `VramctlResult`; a plain `Error` if this package does not know the number."""
    return _BY_NUMBER.get(number, Error)(message, _numbers(reply or {}))


def _from_reply(reply: Mapping[str, Any]) -> Error:
    """The exception for an `error` reply."""
    code = str(reply.get("code", ""))
    kind = _BY_CODE.get(code)
    error = (kind or Error)(str(reply.get("message", "no message")), _numbers(reply))
    if kind is None:
        error.code = code
    return error


def _numbers(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields of an `error` reply, with those of a shortage flattened in."""
    shortages = ("shortage", "host_shortage")
    numbers = {name: value for name, value in reply.items() if name not in ("reply", "code", "message", *shortages)}
    for shortage in shortages:
        numbers.update(reply.get(shortage) or {})
    return numbers
