"""End to end on the simulated GPU: unmodified engines under `vramctl run`, from `sitecustomize` to a pause from outside. The
engines are stand-ins with the real names; torch is fake_torch.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import support  # noqa: E402
import vramctl  # noqa: E402
from test_engines import SGLANG_PLUGINS  # noqa: E402

FILES = {
    "vllm/__init__.py": "__version__ = '0.26.0'",
    "vllm/device_allocator/__init__.py": "",
    "vllm/device_allocator/cumem.py": """
        class CuMemAllocator:
            instance = None
            @staticmethod
            def get_instance(): raise RuntimeError("vLLM's own allocator is in use")
            def sleep(self, offload_tags=None): ...
        """,
    "vllm/v1/worker/gpu/attn_utils.py": """
        import torch
        def _allocate_kv_cache(config, shared_layers, device):
            return torch.empty(64 << 20)
        def init_kv_cache():
            return _allocate_kv_cache(None, {}, "cuda"), torch.empty(2 << 20)
        """,
    "vllm/v1/worker/gpu_worker.py": """
        import torch
        class Worker:
            def __init__(self, sleep):
                from types import SimpleNamespace as S
                self.vllm_config = S(
                    model_config=S(enable_sleep_mode=sleep, enable_cumem_allocator=sleep), parallel_config=S(tensor_parallel_size=1)
                )
            def _maybe_get_memory_pool_context(self, tag):
                import contextlib
                if not self.vllm_config.model_config.enable_sleep_mode:
                    return contextlib.nullcontext()
                from vllm.device_allocator.cumem import CuMemAllocator
                return CuMemAllocator.get_instance().use_memory_pool(tag)
            def load_model(self):
                with self._maybe_get_memory_pool_context(tag="weights"):
                    loaded = torch.empty(32 << 20)  # temporary memory of a checkpoint
                    self.weights = torch.empty(32 << 20)
                    del loaded
        """,
}

#: The engine, in a spawned child process as in real engines.
ENGINE = """
import multiprocessing, sys
def work(sleep):
    import torch
    torch.cuda.init()
    torch.cuda.CUDAGraph.capture_begin = lambda self, pool=None: torch.cuda.memory.allocator(0).begin("graph")
    torch.cuda.CUDAGraph.capture_end = lambda self: torch.cuda.memory.allocator(0).end("graph")
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.gpu import attn_utils
    worker = Worker(sleep)
    worker.load_model()
    with worker._maybe_get_memory_pool_context("kv_cache"):
        cache, tables = attn_utils.init_kv_cache()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    static = torch.empty(4 << 20)
    graph.capture_end()
    contents = {"weights": worker.weights, "kv_cache": cache, "graph": static}
    for number, tensor in enumerate(contents.values(), 1):
        tensor.copy_(bytes([number]) * tensor.numel())
    print("ready", flush=True)
    for line in open(0):
        if line.strip() == "look":
            fate = {}
            for number, (name, tensor) in enumerate(contents.items(), 1):
                found = tensor.tobytes()
                fate[name] = "kept" if found == bytes([number]) * len(found) else "zero" if found == bytes(len(found)) else "lost"
            print(fate, flush=True)
        else:
            from vllm.device_allocator.cumem import CuMemAllocator
            allocator = CuMemAllocator.get_instance()
            try:
                eval(line, {"allocator": allocator})
                print("done", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
"""

SGLANG_FILES = {
    **SGLANG_PLUGINS,
    "sglang/__init__.py": "__version__ = '0.5.23'",
    "sglang/srt/server_args.py": """
        class ServerArgs:
            def __init__(self, saver): self.enable_memory_saver = saver
        """,
    "sglang/srt/runtime_context.py": """
        published = None
        def get_server_args():
            if published is None: raise ValueError("Global server args is not set yet!")
            return published
        """,
    "sglang/srt/utils/torch_memory_saver_adapter.py": """
        import contextlib
        import torch_memory_saver
        class TorchMemorySaverAdapter:
            @staticmethod
            def create(enable): return Real() if enable else Noop()
        class Real(TorchMemorySaverAdapter):
            def region(self, tag, enable_cpu_backup=False):
                return torch_memory_saver.torch_memory_saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)
        class Noop(TorchMemorySaverAdapter):
            def region(self, tag, enable_cpu_backup=False): return contextlib.nullcontext()
        """,
}

#: A scheduler, which gets its settings from its parent.
SGLANG_ENGINE = """
def settings(saver):
    from sglang.srt.server_args import ServerArgs
    return ServerArgs(saver)
def work(settings):
    import torch
    torch.cuda.init()
    from sglang.srt import plugins, runtime_context
    plugins.load_plugins()
    runtime_context.published = settings
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
    saver = TorchMemorySaverAdapter.create(enable=settings.enable_memory_saver)
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.empty(32 << 20)
    with saver.region("kv_cache"):
        cache = torch.empty(64 << 20)
    other = torch.empty(4 << 20)
    contents = {"weights": weights, "kv_cache": cache, "other": other}
    for number, tensor in enumerate(contents.values(), 1):
        tensor.copy_(bytes([number]) * tensor.numel())
    print("ready", flush=True)
    for _ in open(0):
        fate = {}
        for number, (name, tensor) in enumerate(contents.items(), 1):
            found = tensor.tobytes()
            fate[name] = "kept" if found == bytes([number]) * len(found) else "zero" if found == bytes(len(found)) else "lost"
        print(fate, flush=True)
"""


class Live(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in {**FILES, **SGLANG_FILES}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        (self.folder / "vllm_program.py").write_text(ENGINE)
        (self.folder / "sglang_program.py").write_text(SGLANG_ENGINE)

    def engine(self, name, program="vllm_program", argument="False"):
        paths = [str(self.folder), str(pathlib.Path(support.__file__).parent / "fake_torch")]
        # The engine must not inherit the test's own environment.
        environment = {"PYTHONPATH": os.pathsep.join(paths), "LD_PRELOAD": "", "VRAMCTL_TAG": "default"}
        source = (
            f"import multiprocessing\nfrom {program} import *\n"
            "if __name__ == '__main__':\n"
            f"    child = multiprocessing.get_context('spawn').Process(target=work, args=({argument},))\n"
            "    child.start()\n"
            "    child.join()\n"
        )
        program = support.Program(name, source, **environment)
        self.addCleanup(program.__exit__)
        return program

    def vramctl(self, *arguments, code=0):
        done = subprocess.run([support.VRAMCTL, *arguments], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def tags(self, name, engine="vllm"):
        (process,) = json.loads(self.vramctl("status", name, "--json"))["processes"]
        self.assertEqual(process["engine"], engine)
        with vramctl.Client(name) as client:
            self.assertEqual(client.hello().engine, engine)
        return {tag["tag"]: (tag["bytes"] >> 20, tag["state"]) for tag in process["tags"]}

    def test_from_outside(self):
        engine = self.engine("outside")
        tags = self.tags("outside")
        self.assertEqual(tags["kv_cache"], (64, "active"))
        self.assertEqual(tags["default"][1], "active")
        self.assertEqual(set(tags), {"weights", "kv_cache", "cuda_graph", "default"})
        self.assertGreaterEqual(tags["weights"][0], 32)
        for _ in range(3):
            self.vramctl("pause", "kv_cache", "weights", "cuda_graph", "--name", "outside")
            self.assertEqual(self.tags("outside")["kv_cache"], (64, "paused"))
            self.vramctl("resume", "--name", "outside")
            self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'kept', 'graph': 'kept'}")
        refusal = self.vramctl("pause", "kv_cache", "--discard", "--name", "outside", code=1)
        self.assertIn("the prefix cache of vllm", refusal)
        self.vramctl("pause", "kv_cache", "--discard", "--force", "--name", "outside")
        self.vramctl("resume", "--name", "outside")
        self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'zero', 'graph': 'kept'}")

    def test_sleep_mode(self):
        engine = self.engine("sleeping", argument="True")
        self.assertEqual(set(self.tags("sleeping")), {"weights", "kv_cache", "default"})
        for _ in range(2):
            self.assertEqual(engine.ask("allocator.sleep(offload_tags=('weights',))"), "done")
            states = {name: state for name, (_, state) in self.tags("sleeping").items()}
            self.assertEqual(states, {"weights": "paused", "kv_cache": "paused", "default": "active"})
            self.assertEqual(engine.ask("allocator.wake_up(['weights'])"), "done")
            self.assertEqual(self.tags("sleeping")["kv_cache"][1], "paused")
            self.assertEqual(engine.ask("allocator.wake_up(['kv_cache'])"), "done")
            self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'zero', 'graph': 'kept'}")
        self.assertEqual(engine.ask("allocator.sleep(offload_tags=())"), "done")
        self.assertEqual(engine.ask("allocator.wake_up()"), "done")
        self.assertEqual(engine.ask("look"), "{'weights': 'zero', 'kv_cache': 'zero', 'graph': 'kept'}")

    def test_a_wake_up_without_room_leaves_everything_asleep(self):
        """There is room for either tag but not for both: after the error, neither may be awake."""
        engine = self.engine("crowded", argument="True")
        self.assertEqual(engine.ask("allocator.sleep(offload_tags=('weights',))"), "done")
        asleep = self.tags("crowded")
        weights, cache = (asleep[tag][0] << 20 for tag in ("weights", "kv_cache"))
        cuda = support.Cuda()
        hog = cuda.malloc(cuda.free_memory() - max(weights, cache) - min(weights, cache) // 2)
        try:
            self.assertEqual(engine.ask("allocator.wake_up()"), "DeviceMemory")
            self.assertEqual(self.tags("crowded"), asleep)
        finally:
            cuda.free(hog)
        self.assertEqual(engine.ask("allocator.wake_up()"), "done")
        self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'zero', 'graph': 'kept'}")

    def test_sglang_from_outside(self):
        engine = self.engine("outside", "sglang_program", "settings(False)")
        tags = self.tags("outside", "sglang")
        self.assertEqual({name: size for name, (size, _) in tags.items()}, {"weights": 32, "kv_cache": 64, "default": 20})
        self.vramctl("pause", "--name", "outside")
        self.vramctl("resume", "--name", "outside")
        self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'kept', 'other': 'kept'}")

    def test_sglang_with_its_own_memory_saver(self):
        """Its regions set the policies. A pause from outside must not lose contents behind its back either."""
        engine = self.engine("own", "sglang_program", "settings(True)")
        self.assertEqual(set(self.tags("own", "sglang")), {"weights", "kv_cache", "default"})
        self.assertIn("--engine URL", self.vramctl("pause", "--name", "own", code=1))
        self.vramctl("pause", "--name", "own", "--backup", "host")
        self.vramctl("resume", "--name", "own")
        self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'kept', 'other': 'kept'}")
        self.vramctl("pause", "kv_cache", "--name", "own", "--force")
        self.vramctl("resume", "--name", "own")
        self.assertEqual(engine.ask("look"), "{'weights': 'kept', 'kv_cache': 'zero', 'other': 'kept'}")


if __name__ == "__main__":
    unittest.main()
