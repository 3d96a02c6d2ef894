"""What callers ask for, checked: the same for the memory of this process and for that of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Optional, Union, get_args

from . import errors

#: What becomes of contents while their memory is paused: `host` keeps them in host memory, `disk` in a file, `discard`
#: drops them (the memory reads as zero after the resume); `default` is as ``VRAMCTL_BACKUP`` says, else `host`.
Backup = Literal["default", "discard", "host", "disk"]

#: Tags to pause: one; several; None for all; or a policy for each, in which the key None stands for all others.
Tags = Union[str, Iterable[str], Mapping[Optional[str], Backup], Mapping[str, Backup], None]


def checked(backup: str) -> str:
    """A backup policy that there is."""
    if backup not in get_args(Backup):
        raise errors.Invalid(f"{backup!r} is not a backup policy; they are {', '.join(map(repr, get_args(Backup)))}")
    return backup


def names(tags: str | Iterable[str] | None) -> list[str | None]:
    """The tags, each once; None stands for all."""
    chosen: list[str | None] = [tags] if tags is None or isinstance(tags, str) else list(dict.fromkeys(tags))
    if not chosen:
        raise errors.Invalid("no tags: None means all of them")
    return chosen


def policies(tags: Tags, backup: str) -> dict[str | None, str]:
    """What becomes of the contents of each tag; None stands for all others."""
    if not isinstance(tags, Mapping):
        return dict.fromkeys(names(tags), checked(backup))
    if backup != "default":
        raise errors.Invalid("a mapping of tags to policies says what becomes of each: backup is not for it")
    if not tags:
        raise errors.Invalid("no tags: None means all of them")
    return {tag: checked(policy) for tag, policy in tags.items()}


def milliseconds(timeout: float | None) -> int | None:
    """A timeout in seconds, rounded up, so that a short one is not none at all; None: without limit."""
    if timeout is None:
        return None
    if not timeout >= 0:
        raise errors.Invalid(f"a timeout is a number of seconds from 0 on, or None: not {timeout!r}")
    return None if timeout > 1e9 else -int(-timeout * 1000 // 1)
