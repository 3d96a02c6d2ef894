"""verl's adapter, against small stand-ins for verl 0.9.1's FSDP engine and for torch.

The stand-in engine has verl's control flow around the functions that the adapter replaces: which of them runs when, what is read in
between, and what is read only later. Torch's tensors have storages with an address and a tag; reading a paused one fails, as on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest
import weakref
from typing import Any
from unittest import mock

import support
import test_engines
import vramctl
from test_engines import GIB, Engine

NUMBERS = itertools.count(1)


class IllegalAddress(Exception):
    """What the GPU says when work touches paused memory."""


class OutOfMemory(Exception):
    """What torch says in a pool while it holds free blocks outside: there, it does not return them."""


class Storage:
    def __init__(self, gpu: Gpu, nbytes: int, device: str) -> None:
        self.gpu, self.size, self.device = gpu, nbytes, types.SimpleNamespace(type=device)
        self._cdata = next(NUMBERS)
        self.address = gpu.place(self)
        self.tag = gpu.regions[-1] if gpu.regions and device == "cuda" else None
        self.is_paused, self.is_kept = False, False
        self.value: Any = None
        gpu.storages.add(self)

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.address


class Tensor:
    def __init__(self, storage: Storage) -> None:
        self.storage, self.grad = storage, None

    def untyped_storage(self) -> Storage:
        return self.storage

    def data_ptr(self) -> int:
        return self.storage.address

    def size(self) -> int:
        return self.storage.size

    @property
    def device(self) -> Any:
        return self.storage.device

    def read(self) -> Any:
        if self.storage.is_paused:
            raise IllegalAddress
        return self.storage.value

    def write(self, value: Any) -> None:
        self.read()
        self.storage.value = value

    def to(self, device: str, non_blocking: bool = False, copy: bool = False) -> Tensor:
        if device == self.storage.device.type and not copy:
            return self
        other = tensor(self.storage.gpu, self.read(), device, self.storage.size)
        return other

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def copy_(self, other: Tensor) -> None:
        self.write(other.read())

    def detach(self) -> Tensor:
        return Tensor(self.storage)

    def clone(self) -> Tensor:
        return tensor(self.storage.gpu, self.read(), self.storage.device.type, self.storage.size)

    def is_floating_point(self) -> bool:
        return False

    def reshape(self, _: int) -> Tensor:
        return Tensor(self.storage)

    def numel(self) -> int:
        return self.storage.size // 4

    def element_size(self) -> int:
        return 4

    def full_tensor(self) -> Tensor:
        """With one rank, a DTensor's shard itself."""
        return Tensor(self.storage)


class DTensor:
    _spec = types.SimpleNamespace(device_mesh="mesh", placements=("shard",))

    def __init__(self, local: Tensor) -> None:
        self._local_tensor, self.grad = local, None

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_local_tensor"], None

    def to(self, device: str, non_blocking: bool = False) -> DTensor:
        return DTensor(self._local_tensor.to(device))

    def full_tensor(self) -> Tensor:
        return self._local_tensor.full_tensor()

    def to_local(self) -> Tensor:
        return self._local_tensor

    def is_floating_point(self) -> bool:
        return False

    @property
    def device(self) -> Any:
        return self._local_tensor.device


class NoGrad(contextlib.ContextDecorator):
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def tensor(gpu: Gpu, value: Any, device: str = "cuda", nbytes: int = GIB) -> Tensor:
    made = Tensor(Storage(gpu, nbytes, device))
    made.storage.value = value
    return made


class Gpu(test_engines.Gpu):
    """With storages in place of named allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.addresses = itertools.count(0x7F00_0000_0000, 1 << 32)
        self.reused: int | None = None
        self.free: int | None = None
        self.retained: dict[str, bool] = {}
        self.torch.Tensor, self.torch.bfloat16 = (Tensor, DTensor), "bfloat16"
        self.torch.device = lambda name: name.partition(":")[0]
        self.torch.no_grad = NoGrad
        self.torch.distributed = types.SimpleNamespace(barrier=lambda: None)
        self.torch.is_tensor = lambda one: isinstance(one, (Tensor, DTensor))
        self.torch._C = types.SimpleNamespace(_host_emptyCache=lambda: self.log.append("host memory returned"))
        self.torch.cuda.synchronize = lambda: self.log.append("synchronize")

        def empty_cache() -> None:
            self.log.append("empty_cache")
            self.cached = 0

        self.torch.cuda.empty_cache = empty_cache
        reductions: Any = types.ModuleType("torch.multiprocessing.reductions")
        reductions.StorageWeakRef = weakref.ref
        self.modules = {
            "torch.multiprocessing": types.ModuleType("torch.multiprocessing"),
            "torch.multiprocessing.reductions": reductions,
        }

    def place(self, storage: Storage) -> int:
        if self.pools and self.cached:
            raise OutOfMemory
        address, self.reused = self.reused or next(self.addresses), None
        return address

    def of(self, tag: str) -> list[Storage]:
        return [one for one in self.storages if one.tag == tag]

    def status(self) -> Any:
        tags = {one.tag for one in self.storages if one.tag}
        return vramctl.types.Status(
            tags=tuple(
                vramctl.types.Tag(tag=tag, state="", bytes=sum(one.size for one in self.of(tag))) for tag in sorted(tags)
            )
        )

    def pause(self, tags: Any, *, timeout: Any = None, backup: str = "default", live_only: bool = True) -> Any:
        if not self.of(tags):
            raise vramctl.errors.UnknownTag(f"no allocation has the tag {tags}")
        if not self.host_memory:
            raise vramctl.errors.HostMemory("too little host memory")
        self.log.append(("pause", tags))
        for one in self.of(tags):
            one.is_paused = True
        return vramctl.types.Report()

    def resume(self, tags: Any, *, timeout: float = 0.0) -> Any:
        self.log.append(("resume", tags))
        if not self.of(tags):
            raise vramctl.errors.UnknownTag(f"no allocation has the tag {tags}")
        paused = [one for one in self.of(tags) if one.is_paused]
        if paused and self.free is not None:
            raise vramctl.errors.DeviceMemory("too little device memory")
        for one in paused:
            one.is_paused = False
        return vramctl.types.Report(allocations=len(paused))

    def transitions(self) -> list[Any]:
        """The pauses and resumes since the last call, in order."""
        found = [one for one in self.log if isinstance(one, tuple)]
        self.log.clear()
        return found


VERL = {
    "verl/__init__.py": "__version__ = '0.9.1'",
    "verl/workers/__init__.py": "",
    "verl/workers/engine/__init__.py": "",
    "verl/workers/engine/fsdp/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/fsdp_utils.py": """
        from test_verl import lazy_init as _lazy_init
        calls = []
        def fsdp_version(model): return model.version
        def offload_fsdp_model_to_cpu(model, empty_cache=True):
            calls.append("offload model")
            model.to("cpu")
        def load_fsdp_model_to_gpu(model):
            calls.append("load model")
            model.to("cuda")
        def offload_fsdp_optimizer(optimizer):
            if not optimizer.state: return
            calls.append("offload optimizer")
            for state in optimizer.state.values():
                for key, value in state.items():
                    if hasattr(value, "to"): state[key] = value.to("cpu", non_blocking=True)
        def load_fsdp_optimizer(optimizer, device_id):
            if not optimizer.state: return
            calls.append("load optimizer")
            for state in optimizer.state.values():
                for key, value in state.items():
                    if hasattr(value, "to"): state[key] = value.to(device_id, non_blocking=True)
        def fsdp1_sharded_save_to_cpu(model):
            return {name: one.data.detach().to("cpu", copy=True) for name, one in model.named_parameters()}
        def fsdp1_sharded_load_from_cpu(model, saved):
            for name, one in model.named_parameters(): one.data.copy_(saved[name].to(one.device))
        def fsdp2_sharded_save_to_cpu(model):
            return {name: one._local_tensor.detach().cpu() for name, one in model.named_parameters()}, "spec"
        def fsdp2_sharded_load_from_cpu(model, saved, spec):
            for name, one in model.named_parameters(): one._local_tensor.copy_(saved[name].to(one.device))
        """,
    "verl/workers/engine/spec.py": "class ShardSpec: from_param = staticmethod(lambda param: None)",
    "verl/workers/engine/fsdp/transformer_impl.py": """
        from verl.utils.fsdp_utils import (
            fsdp_version, load_fsdp_model_to_gpu, load_fsdp_optimizer, offload_fsdp_model_to_cpu, offload_fsdp_optimizer)
        from test_verl import CheckpointManager
        class FSDPEngine:
            @property
            def is_param_offload_enabled(self): return self._is_offload_param
            @property
            def is_optimizer_offload_enabled(self): return self._is_offload_optimizer
            def _build_model_optimizer(self):
                self.module, self.optimizer = self.build()
                if self.engine_config.forward_only: self.optimizer = None
            def initialize(self):
                self._build_model_optimizer()
                self.checkpoint_manager = CheckpointManager(self.module, self.optimizer)
                self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer)
            def to(self, device, model=True, optimizer=True, grad=True):
                if self.engine_config.forward_only: return
                if device == "cuda":
                    if model: load_fsdp_model_to_gpu(self.module)
                    if optimizer and self.optimizer is not None: load_fsdp_optimizer(self.optimizer, device)
                else:
                    if model: offload_fsdp_model_to_cpu(self.module)
                    if optimizer and self.optimizer is not None: offload_fsdp_optimizer(self.optimizer)
            def save_checkpoint(self, local_path):
                if self._is_offload_param: load_fsdp_model_to_gpu(self.module)
                self.checkpoint_manager.save_checkpoint(local_path)
                if self._is_offload_param: offload_fsdp_model_to_cpu(self.module)
            def load_checkpoint(self, local_path):
                if self._is_offload_param: load_fsdp_model_to_gpu(self.module)
                self.checkpoint_manager.load_checkpoint(local_path)
                if self._is_offload_param: offload_fsdp_model_to_cpu(self.module)
                if self._is_offload_optimizer: offload_fsdp_optimizer(self.optimizer)
            def get_per_tensor_param(self, **settings):
                is_peft = hasattr(self.module, "peft_config")
                skip = fsdp_version(self.module) == 2 and not is_peft
                if not skip: load_fsdp_model_to_gpu(self.module)
                params = collect_lora_params(module=self.module) if is_peft else self.module.state_dict()
                if self._is_offload_param and not skip: offload_fsdp_model_to_cpu(self.module)
                if is_peft: return params.items(), {}
                return ((name, one.to("cuda", non_blocking=True).full_tensor() if hasattr(one, "_local_tensor") else one)
                        for name, one in params.items()), None
            def get_per_tensor_param_shard(self, **settings):
                tensors, config = self.get_per_tensor_param()
                return ((name, one, "spec") for name, one in tensors), config
        """,
}

#: The stand-in's part that is no copy of verl's, added to its engine.
BUILT = """

def _init(self, build, model_config, param=True, optimizer=True, forward_only=False):
    from types import SimpleNamespace
    self.build, self.model_config = build, model_config
    self.engine_config = SimpleNamespace(forward_only=forward_only)
    self._is_offload_param, self._is_offload_optimizer, self._qat_enabled = param, optimizer, False
    self._uses_fsdp2_cpu_offload_policy, self.lr_scheduler, self.checkpoint_config = False, None, None

FSDPEngine.__init__ = _init
"""


class Module:
    """An FSDP2 module: each parameter is a DTensor."""

    version = 2

    def __init__(self, gpu: Gpu) -> None:
        self.resharded = 0
        self.held: list[Any] = [DTensor(tensor(gpu, f"p{number}")) for number in range(3)]
        self.extra = [tensor(gpu, "rotary", nbytes=4096)]

    def modules(self) -> Any:
        return iter([self])

    def reshard(self) -> None:
        self.resharded += 1

    def parameters(self) -> Any:
        return iter(self.held)

    def named_parameters(self) -> Any:
        return iter(self.state_dict().items())

    def buffers(self) -> Any:
        return iter(self.extra)

    def tensors(self) -> list[Tensor]:
        return [getattr(one, "_local_tensor", one) for one in self.held]

    def state_dict(self) -> dict[str, Any]:
        return {f"p{number}": one for number, one in enumerate(self.held)}

    def to(self, device: str, non_blocking: bool = False) -> None:
        self.reshard()
        moved = [one.to(device) for one in self.held]
        for old, new in zip(self.held, moved):
            new.grad = old.grad.to(device) if old.grad is not None else None
        self.held = moved
        self.extra = [one.to(device) for one in self.extra]

    def cpu(self) -> None:
        self.to("cpu")


class FlatParameter:
    """Its `data` is another object each time, as in torch, and so is not its shard."""

    def __init__(self, data: Tensor) -> None:
        self.storage = data.storage
        self._local_shard = self.data

    @property
    def data(self) -> Tensor:
        return Tensor(self.storage)

    @property
    def device(self) -> Any:
        return self.storage.device

    def untyped_storage(self) -> Storage:
        return self.storage

    def numel(self) -> int:
        return self.data.numel()

    def element_size(self) -> int:
        return self.data.element_size()


class Handle:
    _offload_params = False

    def __init__(self, flat: FlatParameter) -> None:
        self.flat_param = flat

    def flat_param_to(self, device: str, non_blocking: bool = False) -> None:
        self.flat_param.storage = self.flat_param.data.to(device).storage


class FlatModule:
    """An FSDP1 module with three flat parameters, each in a module of its own."""

    version = 1
    _is_root = True
    is_initialized = False

    def __init__(self, gpu: Gpu) -> None:
        self._all_handles = [Handle(FlatParameter(tensor(gpu, f"p{number}"))) for number in range(3)]
        self.parts = [types.SimpleNamespace(_handle=handle) for handle in self._all_handles]
        self.held = [handle.flat_param for handle in self._all_handles]
        self.extra = [tensor(gpu, "rotary", nbytes=4096)]

    def modules(self) -> Any:
        return iter([types.SimpleNamespace(), *self.parts])

    def parameters(self) -> Any:
        return iter(self.held)

    def named_parameters(self) -> Any:
        return ((f"p{number}", one) for number, one in enumerate(self.held))

    def buffers(self) -> Any:
        return iter(self.extra)

    def tensors(self) -> list[Tensor]:
        return [one.data for one in self.held]

    def state_dict(self) -> dict[str, Any]:
        return {f"p{number}": one.data.clone() for number, one in enumerate(self.held)}

    def to(self, device: str) -> None:
        for handle in self._all_handles:
            handle.flat_param_to(device)
            handle.flat_param._local_shard = handle.flat_param.data


class Optimizer:
    def __init__(self, state: Any = ()) -> None:
        self.state: dict[int, dict[str, Any]] = dict(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.state)}]


def lazy_init(state: Any, root: Any) -> None:
    """FSDP1's."""
    root.is_initialized = True


class CheckpointManager:
    """Calls the path that it is given."""

    def __init__(self, model: Any, optimizer: Any, **_: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def save_checkpoint(self, local_path: Any, **_: Any) -> None:
        state = [one for state in self.optimizer.state.values() for one in state.values()]
        local_path([one.read() for one in self.model.tensors()], [(one.device.type, one.read()) for one in state])

    def load_checkpoint(self, local_path: Any, **_: Any) -> None:
        self.optimizer.state = local_path()


class Verl(Engine):
    """An actor of three parameters and its optimizer."""

    module: Any = Module
    optimizer: Any = Optimizer
    is_late = False
    #: Whether this version exports shards, too.
    has_shards = True

    def setUp(self) -> None:
        super().setUp()
        self.gpu: Gpu = Gpu()
        for name in ("region", "status", "pause", "resume"):
            mock.patch.object(vramctl, name, getattr(self.gpu, name)).start()
        mock.patch.object(vramctl, "retain", self.gpu.retained.__setitem__).start()
        self.addCleanup(mock.patch.stopall)
        mock.patch.dict(sys.modules, {"torch": self.gpu.torch, "torch.cuda": self.gpu.torch.cuda, **self.gpu.modules}).start()
        os.environ.pop("VRAMCTL_RETAIN", None)
        test_engines.write(self.folder, self.sources())
        importlib.import_module("verl")
        if self.is_late:
            importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
        self.ours: Any = importlib.import_module("vramctl.frameworks.verl")
        self.moves: Any = importlib.import_module("verl.utils.fsdp_utils")
        self.impl: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
        if hasattr(self.impl, "FSDPEngine"):
            exec(BUILT, vars(self.impl))

    def sources(self) -> dict[str, str]:
        return VERL

    def actor(self, model_type: str = "language_model", policy: bool = False, **settings: Any) -> Any:
        """`policy`: FSDP2's CPUOffloadPolicy."""
        config = types.SimpleNamespace(
            model_type=model_type,
            lora={},
            hf_config=types.SimpleNamespace(model_type="llama"),
            get_processor=lambda: None,
            trust_remote_code=False,
        )

        def build() -> Any:
            if policy:
                engine._is_offload_param = engine._is_offload_optimizer = False
                engine._uses_fsdp2_cpu_offload_policy = True
            return self.module(self.gpu), self.optimizer()

        engine = self.impl.FSDPEngine(build, config, **settings)
        engine.initialize()
        return engine

    def step(self, engine: Any, value: int) -> None:
        """An update, which allocates the optimizer's state the first time."""
        engine.to("cuda")
        for number, one in enumerate(engine.module.tensors()):
            one.write((value, one.read()))
            if number not in engine.optimizer.state:
                engine.optimizer.state[number] = {"exp_avg": tensor(self.gpu, 0), "step": tensor(self.gpu, 0, "cpu", 4)}
            for state in engine.optimizer.state[number].values():
                state.write(value)
        engine.to("cpu")

    def settled(self, **settings: Any) -> Any:
        """An actor after the steps in which verl's own functions move its state."""
        engine = self.actor(**settings)
        for value in (1, 2):
            self.step(engine, value)
        self.forget()
        return engine

    def forget(self) -> None:
        self.gpu.log.clear()
        self.moves.calls.clear()

    def contents(self, engine: Any) -> list[Any]:
        engine.to("cuda")
        found = [one.read() for one in engine.module.tensors()]
        found += [one.read() for state in engine.optimizer.state.values() for one in state.values()]
        engine.to("cpu")
        return found


class Steps(Verl):
    def test_verl_moves_the_state_once_and_then_it_is_paused_and_resumed(self):
        engine = self.actor()
        self.assertEqual(self.moves.calls, [], "the parameters are in their region from the start")
        self.assertEqual(self.gpu.transitions(), [("pause", "actor_params")])
        self.step(engine, 1)
        # A checkpoint or the first step makes state outside of the region: verl's own function moves it once more.
        self.assertEqual(self.moves.calls, ["offload optimizer"])
        self.assertEqual(self.gpu.transitions(), [("resume", "actor_params"), ("pause", "actor_params")])
        self.moves.calls.clear()
        self.step(engine, 2)
        self.assertEqual(self.moves.calls, ["load optimizer"])
        self.assertEqual(
            self.gpu.transitions(), [("resume", "actor_params"), ("pause", "actor_params"), ("pause", "actor_optimizer")]
        )
        self.moves.calls.clear()
        before = self.contents(engine)
        self.gpu.log.clear()
        self.step(engine, 3)
        self.assertEqual(self.moves.calls, [], "from now on verl moves nothing")
        tags = ["actor_params", "actor_optimizer"]
        self.assertEqual(
            self.gpu.transitions(), [("resume", tag) for tag in tags] + [("pause", tag) for tag in tags], "verl's order"
        )
        self.assertEqual(self.contents(engine), [(3, one) for one in before[:3]] + [3] * 6)

    def test_nothing_of_the_parameters_stays_when_the_rollout_starts(self):
        # The rollout takes its share of what is free then. With one rank, FSDP's views keep what verl's own offload moves away.
        views: list[Any] = []
        build = self.module

        def viewed(gpu: Gpu) -> Any:
            module = build(gpu)
            views.extend(Tensor(one.storage) for one in module.tensors())
            return module

        self.module = viewed
        engine = self.actor()
        self.assertEqual([one.is_paused for one in self.gpu.storages if one.device.type == "cuda"], [True] * 4)
        self.assertEqual((len(views), len(engine.module.tensors())), (3, 3))

    def test_log_probabilities_leave_the_optimizer_paused(self):
        engine = self.settled()
        engine.to("cuda", optimizer=False)
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.gpu.transitions(), [("resume", "actor_params"), ("pause", "actor_params")])
        with self.assertRaises(IllegalAddress):
            engine.optimizer.state[0]["exp_avg"].read()

    def test_free_blocks_go_back_before_each_pause(self):
        # Gradients are in torch's default pool, and free by then; vLLM can only have them if torch lets go of its free blocks. Those that
        # FSDP2 has moved along are in the region: the pause would copy them.
        engine = self.settled()
        self.gpu.log.clear()
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.gpu.log, ["empty_cache", ("pause", "actor_params")])
        self.gpu.log.clear()
        self.moves.offload_fsdp_optimizer(engine.optimizer)
        self.assertEqual(self.gpu.log, ["empty_cache", ("pause", "actor_optimizer")])

    def test_torch_s_pinned_memory_goes_back_once_before_the_first_pause(self):
        self.step(self.actor(), 1)
        first = self.gpu.log.index("host memory returned")
        self.assertLess(first, self.gpu.log.index(("pause", "actor_params")))
        engine = self.settled()
        self.step(engine, 3)
        self.assertNotIn("host memory returned", self.gpu.log)

    def test_an_optimizer_that_makes_its_state_at_once(self):
        # Adagrad: verl offloads the parameters first, in whose region it is.
        self.optimizer = lambda: Optimizer({number: {"exp_avg": tensor(self.gpu, 0)} for number in range(3)})
        engine = self.actor()
        for value in (1, 2):
            self.step(engine, value)
        self.assertEqual({one["exp_avg"].storage.tag for one in engine.optimizer.state.values()}, {"actor_optimizer"})
        self.assertEqual(self.contents(engine)[3:], [2] * 3)

    def test_torch_s_free_blocks_go_back_before_a_region(self):
        # Such as those of the reference model, which verl builds first.
        self.gpu.cached = GIB
        engine = self.actor()
        self.step(engine, 1)
        self.gpu.cached = GIB
        self.step(engine, 2)
        self.assertEqual(self.moves.calls, ["offload optimizer", "load optimizer"])

    def test_a_skipped_first_step_leaves_no_state_to_move(self):
        # verl skips `optimizer.step()` if a gradient is not finite.
        engine = self.actor()
        for _ in range(3):
            engine.to("cuda")
            engine.to("cpu")
        self.assertEqual([tag for _, tag in self.gpu.transitions() if tag == "actor_optimizer"], [])
        self.step(engine, 1)
        self.step(engine, 2)
        self.assertIn(("pause", "actor_optimizer"), self.gpu.transitions())

    def test_no_region_is_open_between_verl_s_calls(self):
        # verl switches expandable segments for the whole process while it sends weights.
        engine = self.settled()
        self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))
        tensors, _ = engine.get_per_tensor_param()
        self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))
        bucket = tensor(self.gpu, "bucket")
        self.assertIsNone(bucket.storage.tag, "a bucket is sent by CUDA IPC, so it must not be pausable")
        for _ in tensors:
            self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))

    def test_a_backup_of_parameters_that_were_only_read_is_kept(self):
        self.actor()
        self.assertEqual(self.gpu.retained, {"actor_params": True})
        self.gpu.retained.clear()
        os.environ["VRAMCTL_RETAIN"] = "weights"
        self.actor()
        self.assertEqual(self.gpu.retained, {}, "the user has said what to keep")

    def test_engines_of_one_process_have_tags_of_their_own(self):
        actor, critic, second = self.settled(), self.settled(model_type="value_model"), self.settled()
        self.gpu.transitions()
        for engine, tag in ((actor, "actor"), (critic, "critic"), (second, "actor2")):
            engine.to("cuda", optimizer=False)
            self.assertEqual(self.gpu.transitions(), [("resume", f"{tag}_params")])
            engine.to("cpu", optimizer=False)
            self.gpu.transitions()
        actor.initialize()
        self.assertEqual({shelf.tag for shelf in (self.ours._shelves[actor.module],)}, {"actor_params"}, "built again")

    def test_fsdp2_frees_gathered_parameters_as_its_own_offload_does(self):
        engine = self.settled()
        engine.to("cuda", optimizer=False)
        before = engine.module.resharded
        engine.to("cpu", optimizer=False)
        self.assertGreater(engine.module.resharded, before)


class ImportedLate(Steps):
    """verl has imported its engine before it imports what its settings name."""

    is_late = True


class StepsOfFsdp1(Steps):
    module = FlatModule

    def test_fsdp2_frees_gathered_parameters_as_its_own_offload_does(self):
        self.settled()  # FSDP1 has no such function

    def test_parameters_that_torch_offloads_are_left_to_it(self):
        engine = self.settled()
        handle = types.SimpleNamespace(_offload_params=True, flat_param=None)
        module = types.SimpleNamespace(version=1, modules=lambda: iter([types.SimpleNamespace(_handle=handle)]))
        self.assertEqual(list(self.ours._parameters(module)), [])
        self.assertTrue(list(self.ours._parameters(engine.module)))


class Export(Verl):
    """Weights on their way to the rollout."""

    def values(self, tensors: Any) -> list[Any]:
        return [one.read() for _, one, *_ in tensors]

    def test_what_fsdp2_sends_is_resumed_until_the_last_is_consumed(self):
        # FSDP2's export loads nothing, because it expects parameters that are on the CPU, and computes one when it is asked for.
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        self.assertEqual(set(self.gpu.transitions()), {("resume", "actor_params")})
        sent = [next(tensors)[1].read()]
        engine.to("cpu", optimizer=False)  # meanwhile
        self.assertEqual(self.gpu.transitions(), [])
        sent += self.values(tensors)
        self.assertEqual(len(sent), 3)
        self.assertEqual(self.gpu.transitions(), [("pause", "actor_params")])
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.moves.calls, [])

    def test_what_is_sent_is_a_copy_outside_of_the_region(self):
        # With one rank, a DTensor's whole is its shard; and a parameter that is no DTensor is sent as it is. A large one goes by CUDA IPC.
        engine = self.settled()
        engine.module.held[2] = engine.module.held[2]._local_tensor
        kept = {one.storage for one in engine.module.tensors()}
        tensors, _ = engine.get_per_tensor_param()
        for _, one in tensors:
            self.assertNotIn(one.storage, kept)
            self.assertIsNone(one.storage.tag)

    def test_what_is_not_in_the_region_is_sent_as_it_is(self):
        engine = self.settled()
        gathered = tensor(self.gpu, "gathered")
        engine.module.state_dict = lambda: {"p0": gathered}
        tensors, _ = engine.get_per_tensor_param()
        self.assertIs(next(tensors)[1], gathered)
        tensors.close()

    def test_an_export_that_ends_early_or_is_never_consumed_lets_go(self):
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        next(tensors)
        tensors.close()
        self.assertEqual(self.gpu.transitions()[-1], ("pause", "actor_params"))
        tensors, _ = engine.get_per_tensor_param()
        del tensors
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.gpu.transitions()[-1], ("pause", "actor_params"))

    def test_an_offload_that_a_load_has_followed_does_not_come_later(self):
        # It had to wait for the export, and the next step has begun when that ends.
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        next(tensors)
        engine.to("cpu", optimizer=False)
        engine.to("cuda", optimizer=False)
        self.gpu.transitions()
        self.assertEqual(len(self.values(tensors)), 2)
        self.assertEqual(self.gpu.transitions(), [])
        for one in engine.module.tensors():
            one.write("used")  # an illegal address, were it paused
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.gpu.transitions(), [("pause", "actor_params")])

    def test_an_export_of_loaded_parameters_leaves_them_loaded(self):
        if self.module is FlatModule:
            return  # verl loads and offloads those itself
        engine = self.settled()
        engine.to("cuda", optimizer=False)
        self.gpu.transitions()
        self.assertEqual(len(self.values(engine.get_per_tensor_param()[0])), 3)
        self.assertNotIn(("pause", "actor_params"), self.gpu.transitions())
        for one in engine.module.tensors():
            one.write("used")

    def test_two_exports_at_once(self):
        engine = self.settled()
        first, _ = engine.get_per_tensor_param()
        second, _ = engine.get_per_tensor_param()
        self.values(second)
        self.assertNotIn(("pause", "actor_params"), self.gpu.transitions())
        self.values(first)
        self.assertEqual(self.gpu.transitions(), [("pause", "actor_params")])

    def test_an_adapter_that_nobody_consumes_holds_nothing(self):
        # With SGLang, only the first rank of each engine does.
        engine = self.settled()
        engine.module.peft_config = {"default": types.SimpleNamespace(to_dict=lambda: {})}
        on_gpu = engine.module.tensors()[0]
        parts = {"a": tensor(self.gpu, "a", "cpu"), "b": on_gpu}
        mock.patch.object(self.impl, "collect_lora_params", lambda **_: parts, create=True).start()
        adapter, _ = engine.get_per_tensor_param(base_sync_done=True)
        self.assertEqual(self.gpu.transitions()[-1], ("pause", "actor_params"))
        engine.to("cpu", optimizer=False)
        self.assertTrue(on_gpu.storage.is_paused)
        self.assertEqual(len(self.values(adapter)), 2)

    def test_parameters_that_left_their_region_meanwhile_are_offloaded_by_verl(self):
        # It copies the base model of an adapter to the CPU and back.
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        next(tensors)
        engine.module.to("cpu")
        engine.module.to("cuda")
        self.values(tensors)
        self.assertEqual(self.moves.calls, ["offload model"])
        self.assertEqual({one.device.type for one in engine.module.tensors()}, {"cpu"})

    def test_an_export_before_the_first_load(self):
        engine = self.actor()
        self.gpu.transitions()
        self.assertEqual(self.values(engine.get_per_tensor_param()[0]), ["p0", "p1", "p2"])
        self.assertEqual(self.moves.calls, [])
        self.assertEqual(list(dict.fromkeys(self.gpu.transitions())), [("resume", "actor_params"), ("pause", "actor_params")])

    def test_shards_are_sent_the_same_way(self):
        if not self.has_shards:
            return
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param_shard()
        self.assertEqual(len(self.values(tensors)), 3)
        self.assertEqual(self.gpu.transitions()[-1], ("pause", "actor_params"))

    def test_a_failed_pause_after_the_last_does_not_fail_the_step(self):
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        self.gpu.host_memory = False
        with self.warned("offload_fsdp_model_to_cpu"):
            self.values(tensors)
        engine.to("cpu", optimizer=False)
        self.assertEqual({one.device.type for one in engine.module.tensors()}, {"cpu"})


class ExportOfFsdp1(Export):
    module = FlatModule

    def test_what_fsdp2_sends_is_resumed_until_the_last_is_consumed(self):
        # FSDP1 offloads before the first is consumed.
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        self.assertEqual([one for one in self.gpu.transitions() if one[0] == "pause"], [])
        self.assertEqual(len(self.values(tensors)), 3)
        self.assertEqual(self.gpu.transitions(), [("pause", "actor_params")])

    def test_what_is_sent_is_a_copy_outside_of_the_region(self):
        engine = self.settled()
        tensors, _ = engine.get_per_tensor_param()
        for _, one in tensors:
            self.assertIsNone(one.storage.tag)

    def test_verl_s_functions_move_the_parameters(self):
        # scripts/bench verl times them by the engine's names.
        engine = self.settled()

        def note(name: str) -> None:
            function = getattr(self.impl, name)

            def noted(module: Any) -> None:
                self.gpu.log.append((name,))
                function(module)

            mock.patch.object(self.impl, name, noted).start()

        note("load_fsdp_model_to_gpu")
        note("offload_fsdp_model_to_cpu")
        self.values(engine.get_per_tensor_param()[0])
        load, offload = ("load_fsdp_model_to_gpu",), ("offload_fsdp_model_to_cpu",)
        self.assertEqual(
            self.gpu.transitions(), [load, ("resume", "actor_params"), offload, offload, ("pause", "actor_params")]
        )

    def test_the_root_is_initialized_before_the_first_forward_pass(self):
        # With `layered_summon`, verl gathers an adapter layer by layer, and a layer does not initialize the root.
        engine = self.actor()
        engine.module.peft_config = {"default": types.SimpleNamespace(to_dict=lambda: {})}

        def collect(module: Any, **_: Any) -> Any:
            self.assertTrue(module.is_initialized)
            return {"a": tensor(self.gpu, "a", "cpu")}

        mock.patch.object(self.impl, "collect_lora_params", collect, create=True).start()
        self.assertEqual(len(dict(engine.get_per_tensor_param(base_sync_done=True)[0])), 1)


class Copies(Verl):
    """verl's experimental workers keep a copy of the parameters on the CPU, and load it again, without loading the parameters first."""

    #: Whether this version copies such parameters, too.
    copies = True

    def setUp(self):
        super().setUp()
        if not self.copies:
            self.skipTest("this version does not copy them")
        kind = f"fsdp{self.module.version}_sharded"
        self.save, self.restore = (getattr(self.moves, f"{kind}_{name}_cpu") for name in ("save_to", "load_from"))

    def saved(self, engine):
        saved = self.save(engine.module)
        return saved if isinstance(saved, tuple) else (saved,)

    def test_paused_parameters_are_copied_and_restored_and_paused_again(self):
        engine = self.settled()
        saved = self.saved(engine)
        self.assertEqual(self.gpu.transitions(), [("resume", "actor_params"), ("pause", "actor_params")])
        before = self.contents(engine)[:3]
        self.step(engine, 3)
        self.forget()
        self.restore(engine.module, *saved)
        self.assertEqual(self.gpu.transitions(), [("resume", "actor_params"), ("pause", "actor_params")])
        self.assertEqual(self.contents(engine), [*before, *[3] * 6])
        self.assertEqual(self.moves.calls, [])

    def test_parameters_that_are_loaded_stay_so(self):
        engine = self.settled()
        engine.to("cuda")
        self.forget()
        saved = self.saved(engine)
        self.restore(engine.module, *saved)
        self.assertEqual([one for one in self.gpu.transitions() if one[0] == "pause"], [])
        self.assertEqual(len({one.read() for one in engine.module.tensors()}), 3)

    def test_modules_of_somebody_else(self):
        module = self.module(self.gpu)
        self.restore(module, *self.saved(types.SimpleNamespace(module=module)))
        self.assertEqual(self.gpu.transitions(), [])


class CopiesOfFsdp1(Copies):
    module = FlatModule


class Checkpoints(Verl):
    def test_a_checkpoint_is_saved_as_verl_would_from_host_memory(self):
        # Paused tensors still say that they are on the GPU, and verl loads only the parameters.
        engine = self.settled()
        saved: list[Any] = []
        engine.save_checkpoint(lambda *found: saved.extend(found))
        self.assertEqual(saved[1], [("cpu", 2)] * 6)
        self.assertEqual(len(saved[0]), 3)
        self.assertIn("synchronize", self.gpu.log)
        self.assertEqual(self.gpu.transitions()[-1], ("pause", "actor_params"))
        self.step(engine, 3)
        self.step(engine, 4)
        self.assertEqual(self.contents(engine)[3:], [4] * 6)
        self.assertIn(("pause", "actor_optimizer"), self.gpu.transitions())

    def test_a_checkpoint_of_parameters_that_somebody_has_offloaded_by_hand(self):
        engine = self.settled()
        engine._is_offload_param = False
        saved: list[Any] = []
        engine.save_checkpoint(lambda *found: saved.extend(found))
        self.assertEqual(len(saved[0]), 3)
        with self.assertRaises(IllegalAddress):
            engine.module.tensors()[0].read()

    def test_an_engine_of_fsdp1(self):
        self.module = FlatModule
        self.test_a_checkpoint_is_saved_as_verl_would_from_host_memory()

    def test_new_state_of_a_loaded_checkpoint_comes_into_the_region(self):
        engine = self.settled()
        engine.load_checkpoint(lambda: {number: {"exp_avg": tensor(self.gpu, 7)} for number in range(3)})
        self.assertEqual(self.moves.calls, ["offload optimizer"])
        self.assertNotIn(("resume", "actor_optimizer"), self.gpu.transitions(), "the old state is gone")
        self.assertEqual(self.contents(engine)[3:], [7] * 3)
        self.assertEqual([one.tag for state in engine.optimizer.state.values() for one in
                          [state["exp_avg"].storage]], ["actor_optimizer"] * 3)  # fmt: skip
        self.forget()
        self.step(engine, 8)
        self.assertEqual(self.moves.calls, [])

    def test_state_of_which_a_part_is_new(self):
        engine = self.settled()
        engine.optimizer.state[1]["exp_avg"] = tensor(self.gpu, 7)
        engine.to("cpu")
        self.assertEqual(self.moves.calls, ["offload optimizer"])
        self.assertEqual(engine.optimizer.state[0]["exp_avg"].read(), 2, "resumed before verl's own function reads it")

    def test_an_address_that_is_used_again_is_not_in_the_region(self):
        engine = self.settled()
        engine.to("cuda")
        self.gpu.reused = engine.optimizer.state[0]["exp_avg"].storage.address
        engine.optimizer.state[0]["exp_avg"] = tensor(self.gpu, 7)
        self.forget()
        engine.to("cpu")
        self.assertEqual(self.moves.calls, ["offload optimizer"])


class Fallbacks(Verl):
    def test_a_little_that_is_made_anew_stays_in_gpu_memory(self):
        engine = self.settled()
        for made, calls in ((4096, []), (GIB, ["offload model"])):
            engine.to("cuda")
            engine.module.extra = [tensor(self.gpu, "rotary", nbytes=made)]
            self.forget()
            engine.to("cpu", optimizer=False)
            self.assertEqual(self.moves.calls, calls)
        engine.to("cuda", optimizer=False)
        self.assertEqual(engine.module.extra[0].read(), "rotary")

    def test_a_gradient_goes_along_with_fsdp2_s_parameters_by_verl_s_own_function(self):
        engine = self.settled()
        engine.to("cuda")
        engine.module.held[0].grad = tensor(self.gpu, "gradient")
        self.forget()
        engine.to("cpu", optimizer=False)
        self.assertEqual(self.moves.calls, ["offload model"])
        self.assertEqual(engine.module.held[0].grad.device.type, "cpu")
        engine.to("cuda", optimizer=False)
        engine.module.held[0].grad = None
        self.forget()
        engine.to("cpu", optimizer=False)
        self.assertEqual((self.moves.calls, self.gpu.transitions()), ([], [("pause", "actor_params")]))

    def test_too_little_host_memory(self):
        engine = self.settled()
        engine.to("cuda")
        self.gpu.host_memory = False
        self.forget()
        with self.warned("offload_fsdp_model_to_cpu", "offload_fsdp_optimizer"):
            engine.to("cpu")
        self.assertEqual(self.moves.calls, ["offload model", "offload optimizer"])
        self.gpu.host_memory = True
        self.step(engine, 3)
        self.assertEqual(self.contents(engine)[3:], [3] * 6)

    def test_too_little_device_memory_ends_the_step_and_says_why(self):
        engine = self.settled()
        self.gpu.free = 0
        with self.assertRaisesRegex(vramctl.errors.DeviceMemory, "too little"):
            engine.to("cuda")
        self.assertIn("empty_cache", self.gpu.log)
        self.assertEqual(self.moves.calls, [])
        self.gpu.free = None
        self.assertEqual(len(self.contents(engine)), 9)

    def test_memory_that_did_not_come_from_the_library_is_not_taken_for_paused(self):
        with mock.patch.object(vramctl, "region", lambda *_, **__: contextlib.nullcontext()):
            with self.warned("only 0 came from the library"):
                engine = self.actor()
            self.step(engine, 1)
        self.assertEqual(self.gpu.transitions(), [])
        self.step(engine, 2)

    def test_a_reference_model_and_torch_s_offload_policy_are_left_alone(self):
        for settings in ({"forward_only": True}, {"param": False, "optimizer": False}, {"policy": True}):
            engine = self.actor(**settings)
            self.assertNotIn(engine.module, self.ours._shelves)
            self.assertEqual(self.gpu.transitions(), [])

    def test_modules_of_somebody_else(self):
        module = Module(self.gpu)
        self.moves.offload_fsdp_model_to_cpu(module)
        self.moves.load_fsdp_model_to_gpu(module)
        self.assertEqual(self.moves.calls, ["offload model", "load model"])
        self.assertEqual(self.gpu.transitions(), [])

    def test_without_cuda_nothing_is_said_or_done(self):
        mock.patch.object(vramctl._torch, "loaded", lambda: None).start()
        with self.silent():
            self.assertNotIn(self.actor().module, self.ours._shelves)

    def test_an_allocator_without_pools(self):
        self.gpu.torch.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
        with self.warned("torch's own allocator is not in use"):
            self.step(self.actor(), 1)
        self.assertEqual(self.moves.calls, ["offload model", "load model", "offload model", "offload optimizer"])


class NotPreloaded(Verl):
    preloaded = False

    def test_it_says_so_once_and_verl_offloads_by_itself(self):
        with self.warned("not preloaded"):
            engine = self.actor()
            self.actor()
        self.step(engine, 1)
        self.step(engine, 2)
        self.assertEqual(self.gpu.transitions(), [])
        self.assertEqual(self.contents(engine)[3:], [2] * 6)


class OtherVersions(Verl):
    def sources(self) -> dict[str, str]:
        lacking = {name: text.replace("def load_fsdp_optimizer", "def load_adam") for name, text in VERL.items()}
        return {**lacking, "verl/workers/engine/fsdp/transformer_impl.py": "class FSDPEngine: ..."}

    def setUp(self) -> None:
        with self.assertLogs("vramctl", "WARNING") as self.said:
            super().setUp()

    def test_a_version_that_lacks_a_function_is_left_alone(self):
        self.assertIn("verl 0.9.1 keeps its own offload", self.said.output[-1])
        self.assertIn("load_fsdp_optimizer", self.said.output[-1])
        self.assertFalse(hasattr(self.moves.offload_fsdp_optimizer, "__wrapped__"))


class OldVersions(OtherVersions):
    def sources(self) -> dict[str, str]:
        return {"verl/__init__.py": "__version__ = '0.7.1'", **{n: "" for n in VERL if n != "verl/__init__.py"}}

    def test_a_version_that_lacks_a_function_is_left_alone(self):
        self.assertIn("needs 0.8 or later", self.said.output[-1])


#: The engine with fake_torch, on the library itself. Prints what is in GPU memory at each point, and whether the contents are right.
LIVE = """
import json, sys, types, weakref
sys.path[:0] = {paths!r}
import torch
class Storage:
    def __init__(self, block): self.block = block
    _cdata = property(lambda self: id(self.block))
    device = types.SimpleNamespace(type="cuda")
    def nbytes(self): return self.block.size
    def data_ptr(self): return self.block.address
class Reference:
    def __init__(self, storage): self.reference = weakref.ref(storage.block)
class OnCpu:
    def __init__(self, contents):
        self.contents, self.grad = contents, None
        self.device = types.SimpleNamespace(type="cpu")
        self._cdata = id(self)
    def untyped_storage(self): return self
    def nbytes(self): return len(self.contents)
    def data_ptr(self): return 0
    def tobytes(self): return self.contents
    def to(self, device, non_blocking=False):
        return self if device == "cpu" else torch.empty(len(self.contents)).copy_(self.contents)
torch.Tensor.untyped_storage = lambda self: Storage(self.block)
torch.Tensor.device = types.SimpleNamespace(type="cuda")
torch.Tensor.grad = None
torch.Tensor.to = lambda self, device, non_blocking=False: self if device == "cuda" else OnCpu(self.tobytes())
torch.is_tensor = lambda one: isinstance(one, (torch.Tensor, OnCpu))
torch.cuda.synchronize = lambda: None
reductions = types.ModuleType("torch.multiprocessing.reductions")
reductions.StorageWeakRef = Reference
sys.modules["torch.multiprocessing.reductions"] = reductions
torch.cuda.init()
MIB = 1 << 20

import vramctl
import verl
import vramctl.frameworks.verl
from verl.workers.engine.fsdp import transformer_impl
import test_verl
exec(test_verl.BUILT, vars(transformer_impl))

class Module:
    version = 2
    def __init__(self): self.held = [torch.empty(8 * MIB).copy_(bytes([one]) * 8 * MIB) for one in (1, 2, 3)]
    def modules(self): return iter([self])
    def parameters(self): return iter(self.held)
    def buffers(self): return iter([])
    def to(self, device): self.held = [one.to(device) for one in self.held]
class Optimizer:
    def __init__(self): self.state = {{}}

def used():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) // MIB

config = types.SimpleNamespace(model_type="language_model")
engine = transformer_impl.FSDPEngine(lambda: (Module(), Optimizer()), config)
engine.initialize()
start, on, off, right = used(), [], [], []
for step in range(1, 5):
    engine.to("cuda")
    for number in range(3):
        state = engine.optimizer.state.setdefault(number, {{}})
        if not state:
            state["exp_avg"] = torch.empty(8 * MIB)
        state["exp_avg"].copy_(bytes([step * 16 + number]) * 8 * MIB)
    on.append(used() - start)
    engine.to("cpu")
    off.append(used() - start)
    engine.to("cuda")
    states = [engine.optimizer.state[one]["exp_avg"] for one in range(3)]
    expected = [(one, number) for number, one in enumerate(engine.module.held, 1)] + [(one, step * 16 + number) for number, one in enumerate(states)]
    right.append(all(one.tobytes() == bytes([number]) * one.numel() for one, number in expected))
    engine.to("cpu")
tags = {{tag.tag: (tag.state, tag.bytes // MIB, tag.retained) for tag in vramctl.status().tags if tag.tag != "default"}}
shelves = vramctl.frameworks.verl._shelves
print(json.dumps([on, off, right, tags, [shelves[engine.module].is_complete(engine.module), shelves[engine.optimizer].is_complete(engine.optimizer)]]))
"""


class Live(unittest.TestCase):
    def test_on_the_library_itself(self):
        with tempfile.TemporaryDirectory() as folder:
            test_engines.write(pathlib.Path(folder), VERL)
            here = pathlib.Path(__file__).resolve().parent
            program = LIVE.format(paths=[folder, str(here / "fake_torch"), str(here)])
            done = support.run([support.VRAMCTL, "run", "--no-tag", "--", sys.executable, "-c", program])
        self.assertEqual(done.returncode, 0, done.stderr)
        on, off, right, tags, complete = json.loads(done.stdout.splitlines()[-1])
        self.assertEqual((right, complete), ([True] * 4, [True] * 2))
        self.assertEqual({tag: one[0] for tag, one in tags.items()}, {"actor_params": "paused", "actor_optimizer": "paused"})
        self.assertEqual({tag: one[2] for tag, one in tags.items()}, {"actor_params": True, "actor_optimizer": False})
        for step in range(4):
            self.assertGreaterEqual(on[step], 48, "both are on the GPU")
            # What stays: page tables of pinned host memory.
            self.assertLess(off[step], 8, f"both are off the GPU: {off}")


if __name__ == "__main__":
    unittest.main()
