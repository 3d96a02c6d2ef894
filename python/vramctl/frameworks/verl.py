"""verl: pauses and resumes the FSDP trainer's state, which verl copies tensor by tensor. verl imports this module itself::

    actor_rollout_ref.model.external_lib=vramctl.frameworks.verl      # for the critic: critic.model.external_lib=…

verl imports it in each process that reads the model's configuration, most of which have no GPU; so the import only registers hooks.

An engine has two shelves: its parameters and its optimizer's state, each with a tag. verl builds the parameters inside a region of
their tag; the optimizer's state comes into its region when verl's own function first loads it. From then on, an offload is a pause of
the tag and a load is a resume. Before each offload, the shelf checks that all tensors that verl would move are where that put them.
If more than a little is not (new state from a checkpoint or the first `optimizer.step()`, a gradient that FSDP2 would move along, an
offload policy of torch's), verl's own function runs, and the next load fills the shelf again.

Buckets that go to the rollout by CUDA IPC, gradients, and activations stay in torch's default pool: verl frees them, and each offload
returns torch's free blocks, or vLLM would not get the memory (verl#6912). A full garbage collection is not worth its time there, as
verl found (verl#7864).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import vramctl
from vramctl import engines
from vramctl.engines import Hook, Place

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
#: `ENGINE` imports these by name; the checkpoint and export code calls them as well as `FSDPEngine.to`.
MOVES = "verl.utils.fsdp_utils"

BUILD = Hook(
    what="builds the parameters in their region",
    through=engines.BY_NAME,
    places=(Place(f"{ENGINE}:FSDPEngine._build_model_optimizer", "0.8"),),
    without="verl keeps its own offload",
)
OFFLOAD = Hook(
    what="pauses the parameters or the optimizer's state",
    through=engines.BY_NAME,
    places=(Place(f"{MOVES}:offload_fsdp_model_to_cpu", "0.8"), Place(f"{MOVES}:offload_fsdp_optimizer", "0.8")),
    without="verl keeps its own offload",
)
LOAD = Hook(
    what="resumes the parameters or the optimizer's state",
    through=engines.BY_NAME,
    places=(Place(f"{MOVES}:load_fsdp_model_to_gpu", "0.8"), Place(f"{MOVES}:load_fsdp_optimizer", "0.8")),
    without="verl keeps its own offload",
)
EXPORT = Hook(
    what="keeps the parameters in GPU memory until verl has sent them to the rollout",
    through=engines.BY_NAME,
    places=(
        Place(f"{ENGINE}:FSDPEngine.get_per_tensor_param", "0.8"),
        Place(f"{ENGINE}:FSDPEngine.get_per_tensor_param_shard", "0.9"),
    ),
    without="verl keeps its own offload",
)
SAVE = Hook(
    what="brings the state back for a checkpoint",
    through=engines.BY_NAME,
    places=(Place(f"{ENGINE}:FSDPEngine.save_checkpoint", "0.8"),),
    without="verl keeps its own offload",
)
COPY = Hook(
    what="resumes the parameters while `save_model_to_cpu` and `restore_model_from_cpu` copy them",
    through=engines.BY_NAME,
    places=(
        *(Place(f"{MOVES}:fsdp2_sharded_{name}_cpu", "0.8") for name in ("save_to", "load_from")),
        *(Place(f"{MOVES}:fsdp1_sharded_{name}_cpu", "0.9") for name in ("save_to", "load_from")),
    ),
    without="verl keeps its own offload",
)
SETTINGS = Hook(
    what="reads the engine's settings",
    through=engines.READ,
    places=(
        Place(f"{ENGINE}:FSDPEngine.is_param_offload_enabled", "0.8"),
        Place(f"{ENGINE}:FSDPEngine.is_optimizer_offload_enabled", "0.8"),
        Place(f"{MOVES}:fsdp_version", "0.8"),
    ),
    without="verl keeps its own offload",
)
HOOKS = (BUILD, OFFLOAD, LOAD, EXPORT, SAVE, COPY, SETTINGS)

#: Seconds to wait at a resume for memory that vLLM has released but the driver has not yet returned.
_PATIENCE = 30.0
#: Bytes that are not worth verl's own offload.
_LITTLE = 1 << 20


def install() -> None:
    """Registers the hooks in this process, all or none: what one function pauses, the others must know of. Idempotent."""
    package = importlib.import_module("verl")
    found = [place for _, place in engines.present(package, HOOKS)]
    missing = [place for place in _wanted(package) if place not in found]
    if missing or not found:
        engines.say_once(
            f"verl {getattr(package, '__version__', '(version unknown)')} keeps its own offload: "
            + (f"it lacks {', '.join(place.path for place in missing)}" if missing else "this needs 0.8 or later")
        )
        return
    engines.wrap_when_imported(engines.present(package, HOOKS))


def _wanted(package: Any) -> list[Place]:
    """What this version must have."""
    places = [place for hook in HOOKS if hook.around is not None for place in hook.places]
    return [place for place in places if not engines.is_before(package, place.since)]


# ---- shelves ----


class Shelf:
    """Tensors that verl moves together: an engine's parameters, or its optimizer's state."""

    def __init__(self, tag: str, tensors: Callable[[Any], Iterator[Any]]) -> None:
        self.tag = tag
        #: The tensors that verl's functions move, given the module or the optimizer.
        self._tensors = tensors
        #: The storages on this shelf: address, and a weak reference, which keeps the key from being used again.
        self._placed: dict[int, tuple[int, Any]] = {}
        #: Exports that still read the parameters.
        self._readers: weakref.WeakSet[_Reader] = weakref.WeakSet()
        #: Whether verl has called for an offload meanwhile.
        self._is_due = False
        #: Whether the first pause is still to come.
        self._is_new = True

    def offload(self, owner: Any, original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
        if self._readers:
            self._is_due = True
            return None
        self._is_due = False
        if self.is_complete(owner):
            # If this raises, such as for lack of host memory, nothing is paused, and verl's own function runs.
            return self.pause()
        self._clear(owner)
        return original(*arguments, **keywords)

    def load(self, owner: Any, original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
        self._is_due = False
        self.resume()
        if self.is_complete(owner):
            return None
        there = {key for key, storage in self._storages(owner) if _is_on_gpu(storage)}
        with _region(self.tag):
            done = original(*arguments, **keywords)
        self.fill(owner, there)
        return done

    def fill(self, owner: Any, elsewhere: Iterable[int] = ()) -> None:
        """After a region of the tag: what is on the GPU is on this shelf, except for what was there before."""
        moved = [(key, storage) for key, storage in self._storages(owner) if key not in elsewhere and _is_on_gpu(storage)]
        reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
        self._placed.update({key: (storage.data_ptr(), reference(storage)) for key, storage in moved})
        self._is_new = True
        bytes = sum(storage.nbytes() for storage in dict(moved).values())
        managed = sum(there.bytes for there in vramctl.status().tags if there.tag == self.tag)
        if managed < bytes:
            self._placed.clear()
            engines.say_once(
                f"verl keeps its own offload of {self.tag}: of {bytes} bytes, only {managed} came from the library"
            )

    def is_complete(self, owner: Any) -> bool:
        """Whether there is something to move, and all of it is on this shelf, except for a little that may as well stay in GPU memory: some
        models make their rotary cache anew in each forward pass."""
        storages = dict(self._storages(owner))
        others = [storage for key, storage in storages.items() if not self._has(key, storage)]
        is_little = all(map(_is_on_gpu, others)) and sum(storage.nbytes() for storage in others) < _LITTLE
        return len(others) < len(storages) and is_little

    def pause(self) -> None:
        if self._is_new:
            _return_host_memory()
            self._is_new = False
        # First, or those of the tag's pool would be copied, such as gradients that FSDP2 had moved along. What it holds besides is too little
        # to look for.
        _return_free_blocks()
        vramctl.pause(self.tag, live_only=False)

    def resume(self) -> bool:
        """Whether any of it was paused. An exception from here ends verl's step: nothing else could be done with paused memory."""
        if not self._placed:
            return False
        try:
            try:
                report = vramctl.resume(self.tag)
            except vramctl.errors.DeviceMemory:
                # Torch's cache may hold some of the missing memory.
                _return_free_blocks()
                report = vramctl.resume(self.tag, timeout=_PATIENCE)
        except vramctl.errors.UnknownTag:
            return False  # all of it has been freed
        except Exception as error:
            raise engines.Final from error
        return report.allocations > 0

    def reader(self) -> _Reader:
        one = _Reader()
        self._readers.add(one)
        return one

    def give_back(self, reader: _Reader, owner: Any) -> None:
        """The reader has finished. If it was the last, the offload that had to wait for it follows."""
        self._readers.discard(reader)
        if self._is_due and not self._readers:
            importlib.import_module(ENGINE).offload_fsdp_model_to_cpu(owner)

    def to_host(self, owner: Any, offload: engines.Function) -> None:
        """Leaves the tensors as verl's own offload does, in host memory, if they are paused."""
        if self.resume():
            self._placed.clear()
            offload(owner)
            vramctl._torch.required().cuda.synchronize()  # verl copies without waiting
            _return_free_blocks()

    def apart(self, tensor: Any) -> Any:
        """The tensor, or a copy if it is on this shelf: it may be exported by CUDA IPC, and nothing that is open elsewhere can be paused."""
        ours = any(self._has(key, storage) for key, storage in _storages([tensor]))
        return tensor.detach().clone() if ours else tensor

    def _clear(self, owner: Any) -> None:
        """Before verl's own function moves the tensors: those that are here must not be paused."""
        if any(self._has(key, storage) for key, storage in self._storages(owner)):
            self.resume()
        self._placed.clear()

    def _has(self, key: int, storage: Any) -> bool:
        placed = self._placed.get(key)
        return placed is not None and placed[0] == storage.data_ptr()

    def _storages(self, owner: Any) -> Iterator[tuple[int, Any]]:
        return _storages(self._tensors(owner))


class _Reader:
    """Keeps parameters in GPU memory while it is alive: an export that nobody consumes must not do so for ever."""


#: By module or optimizer.
_shelves: weakref.WeakKeyDictionary[Any, Shelf] = weakref.WeakKeyDictionary()
#: The engines of this process, by the first part of their tags.
_names: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _storages(tensors: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The storages behind tensors that are not empty, each with a number that is its own while a weak reference to it exists."""
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            if storage.nbytes() > 0:
                yield storage._cdata, storage


def _parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors inside: of a DTensor its shard, of a quantized optimizer's state its codes and scales."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


def _is_on_gpu(storage: Any) -> bool:
    return bool(storage.device.type == "cuda")


def _parameters(module: Any) -> Iterator[Any]:
    """What `offload_fsdp_model_to_cpu` moves."""
    moves = importlib.import_module(MOVES)
    version = moves.fsdp_version(module)
    if version == 1:
        # verl's functions also initialize FSDP1's root, which its layers rely on: an adapter may be sent before the first forward pass.
        moves._lazy_init(module, module)
        # FSDP1 keeps parameters in flat ones; verl leaves buffers and gradients where they are, and parameters to torch's CPUOffload.
        for part in module.modules():
            handle = getattr(part, "_handle", None)
            if handle is not None and not handle._offload_params:
                yield handle.flat_param
                yield getattr(handle.flat_param, "_local_shard", handle.flat_param)
        return
    # `module.to()` moves parameters, their gradients and buffers. FSDP2's first frees parameters that are gathered (the root's stay so
    # after a forward pass); a pause must, too, or they would be stale after the next `optimizer.step()`.
    for part in module.modules():
        reshard = getattr(part, "reshard", None)
        if version == 2 and reshard is not None:
            reshard()
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def _state(optimizer: Any) -> Iterator[Any]:
    """What `offload_fsdp_optimizer` moves: nothing until a first step, which verl skips if a gradient is not finite."""
    is_tensor = vramctl._torch.required().is_tensor
    for state in optimizer.state.values():
        yield from filter(is_tensor, state.values())


@contextlib.contextmanager
def _region(tag: str) -> Iterator[None]:
    """Inside, torch neither uses its other free blocks nor returns them if memory runs out: it does so only outside of a pool."""
    _return_free_blocks()
    with engines.tagged(tag):
        yield


def _return_free_blocks() -> None:
    torch = vramctl._torch.loaded()
    if torch is not None:
        torch.cuda.empty_cache()


def _return_host_memory() -> None:
    """Torch keeps the pinned memory that verl's own offload has used. From now on the contents go to the library's."""
    torch = vramctl._torch.required()
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        torch.cuda.synchronize()
        empty()


# ---- hooks ----


@engines.around(BUILD)
def _build(original: engines.Function, engine: Any, *arguments: Any, **keywords: Any) -> Any:
    """verl builds the model in GPU memory. Its shelf takes it there, so that all of it can leave before the rollout starts: what verl's own
    offload moves away stays allocated with one rank, because FSDP's views of it do."""
    if not _can_be_ours(engine):
        return original(engine, *arguments, **keywords)
    name = _name(engine)
    parameters, state = Shelf(f"{name}_params", _parameters), Shelf(f"{name}_optimizer", _state)
    with _region(parameters.tag):
        done = original(engine, *arguments, **keywords)
    if engine.optimizer is None or getattr(engine, "_uses_fsdp2_cpu_offload_policy", False):
        return done  # only now is it known that torch offloads it
    if engine.is_optimizer_offload_enabled:
        # Adagrad makes its state at once, in the parameters' region. verl offloads it next, but the parameters before it.
        importlib.import_module(MOVES).offload_fsdp_optimizer(engine.optimizer)
    _shelves[engine.module], _shelves[engine.optimizer] = parameters, state
    parameters.fill(engine.module)
    if "VRAMCTL_RETAIN" not in os.environ:
        # Between two updates, verl loads the parameters only to read them: their backup is still right at the next offload.
        vramctl.retain(parameters.tag, True)
    return done


def _can_be_ours(engine: Any) -> bool:
    """Whether verl's offload of this engine can be a pause."""
    torch = vramctl._torch.loaded()
    if torch is None or not (engine.is_param_offload_enabled or engine.is_optimizer_offload_enabled):
        return False  # no CUDA, or an engine that verl never offloads
    if engine.engine_config.forward_only:
        return False  # the reference: torch offloads it
    if not vramctl.is_preloaded():
        engines.say_once("the library is not preloaded, so verl keeps its own offload: start verl with `vramctl run --no-tag`")
        return False
    if torch.cuda.get_allocator_backend() != "native":
        engines.say_once("verl keeps its own offload, because torch's own allocator is not in use")
        return False
    return True


def _name(engine: Any) -> str:
    """The first part of the engine's tags. No two engines of a process share one, since a pause takes all memory of a tag."""
    role = "critic" if getattr(engine.model_config, "model_type", None) == "value_model" else "actor"
    name, number = role, 1
    while _names.get(name, engine) is not engine:
        number += 1
        name = f"{role}{number}"
    _names[name] = engine
    return name


@engines.around(OFFLOAD)
def _offload(original: engines.Function, owner: Any, *arguments: Any, **keywords: Any) -> Any:
    shelf = _shelves.get(owner)
    if shelf is None:
        return original(owner, *arguments, **keywords)
    return shelf.offload(owner, original, owner, *arguments, **keywords)


@engines.around(LOAD)
def _load(original: engines.Function, owner: Any, *arguments: Any, **keywords: Any) -> Any:
    shelf = _shelves.get(owner)
    if shelf is None:
        return original(owner, *arguments, **keywords)
    return shelf.load(owner, original, owner, *arguments, **keywords)


@engines.around(EXPORT)
def _export(original: engines.Function, engine: Any, *arguments: Any, **keywords: Any) -> Any:
    """verl computes what it sends while the rollout reads it, after it has offloaded the parameters (FSDP1, LoRA) or without having
    loaded them (FSDP2)."""
    shelf = _shelves.get(engine.module)
    if shelf is None:
        return original(engine, *arguments, **keywords)
    reader = shelf.reader()
    if importlib.import_module(MOVES).fsdp_version(engine.module) == 2 and shelf.resume():  # verl loads those of FSDP1
        shelf._is_due = True
    tensors, config = original(engine, *arguments, **keywords)
    if not isinstance(tensors, Iterator):
        # An adapter, all of it computed. With SGLang, only one rank of each engine consumes it.
        adapter = [(name, shelf.apart(tensor)) for name, tensor in tensors]
        shelf.give_back(reader, engine.module)
        return adapter, config
    return _sent(shelf, engine.module, reader, tensors), config


def _sent(shelf: Shelf, module: Any, reader: _Reader, tensors: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    # The receiver copies each before it asks for the next, or waits for the device before it lets go of the last.
    try:
        for name, tensor, *rest in tensors:
            yield (name, shelf.apart(tensor), *rest)
    finally:
        shelf.give_back(reader, module)


@engines.around(SAVE)
def _save(original: engines.Function, engine: Any, *arguments: Any, **keywords: Any) -> Any:
    """verl loads only the parameters, and only if they are offloaded by its setting or look so. It saves the optimizer's state from host
    memory, where a checkpoint's reader expects it."""
    parameters, state = _shelves.get(engine.module), _shelves.get(engine.optimizer)
    if state is not None:
        offload = importlib.import_module(MOVES).offload_fsdp_optimizer
        state.to_host(engine.optimizer, getattr(offload, engines.MARK, offload))
    with _resumed(parameters, engine.module):
        return original(engine, *arguments, **keywords)


@engines.around(COPY)
def _copy(original: engines.Function, module: Any, *arguments: Any, **keywords: Any) -> Any:
    """verl's experimental workers copy the parameters to the CPU and back between steps, without loading them."""
    with _resumed(_shelves.get(module), module):
        return original(module, *arguments, **keywords)


@contextlib.contextmanager
def _resumed(shelf: Shelf | None, owner: Any) -> Iterator[None]:
    """In GPU memory meanwhile, and paused again if it was."""
    was_paused = shelf is not None and shelf.resume()
    try:
        yield
    finally:
        if shelf is not None and was_paused and shelf.is_complete(owner):
            shelf.pause()


if "verl" in sys.modules:
    install()
