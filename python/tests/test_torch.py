"""Torch's pools and free blocks, with fake_torch in place of torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent / "fake_torch"))

import torch  # noqa: E402
from torch_memory_saver import torch_memory_saver as saver  # noqa: E402

import vramctl  # noqa: E402
from support import MIB, pattern, run  # noqa: E402
from vramctl import _library, _torch, engines, errors  # noqa: E402


def segment_of(tensor: Any) -> dict[str, Any]:
    """The segment that holds a tensor."""
    address = tensor.data_ptr()
    return next(
        segment for segment in torch.cuda.memory_snapshot() if 0 <= address - segment["address"] < segment["total_size"]
    )


def bytes_by_tag() -> dict[str, int]:
    return {tag.tag: tag.bytes for tag in vramctl.status().tags}


class Pools(unittest.TestCase):
    def tearDown(self) -> None:
        vramctl.resume(timeout=None)
        self.assertEqual(
            [each.entered for each in torch.cuda.memory._allocators.values()], [[]] * len(torch.cuda.memory._allocators)
        )

    def test_tensors_of_different_tags_never_share_a_segment(self) -> None:
        """A block freed under one tag must not be reused under another."""
        tensors: dict[str, list[Any]] = {"weights": [], "kv_cache": [], "default": []}
        for turn in range(30):
            for tag, kept in tensors.items():
                size = [3 * MIB, 700, 12 * MIB][turn % 3]
                if tag == "default":
                    kept.append(torch.empty(size))
                else:
                    with vramctl.region(tag):
                        kept.append(torch.empty(size))
                if turn % 4 == 3:
                    del kept[turn // 2]
        segments = {tag: {segment_of(tensor)["address"] for tensor in kept} for tag, kept in tensors.items()}
        self.assertFalse(segments["weights"] & segments["kv_cache"] or segments["weights"] & segments["default"])
        self.assertFalse(segments["kv_cache"] & segments["default"])
        for number, tensor in enumerate(tensors["kv_cache"]):
            tensor.copy_(pattern(number, tensor.size))
        vramctl.pause("weights")
        for number, tensor in enumerate(tensors["kv_cache"]):
            self.assertEqual(tensor.tobytes(), pattern(number, tensor.size), "active memory is usable")

    def test_a_policy_has_a_pool_of_its_own(self) -> None:
        with vramctl.region("mixed", "host"):
            one = torch.empty(3 * MIB)
        with vramctl.region("mixed", "discard"):
            other = torch.empty(3 * MIB)
        self.assertNotEqual(segment_of(one)["address"], segment_of(other)["address"])
        tag = vramctl.status().tag("mixed")
        assert tag is not None
        self.assertEqual(dict(tag.backup), {"host": 20 * MIB, "discard": 20 * MIB})

    def test_tasks_that_take_turns_have_pools_of_their_own(self) -> None:
        async def load(tag: str, steps: int) -> list[Any]:
            tensors = []
            with vramctl.region(tag):
                for _ in range(steps):
                    tensors.append(torch.empty(30 * MIB))
                    await asyncio.sleep(0)
            return tensors

        @vramctl.region("decorated")
        async def fill() -> Any:
            await asyncio.sleep(0)
            return torch.empty(30 * MIB)

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(load("first", 2), fill(), load("second", 4), plain())

        async def plain() -> Any:
            await asyncio.sleep(0)
            return torch.empty(30 * MIB)

        torch.cuda.memory.apply_settings("expandable_segments:True")
        self.addCleanup(torch.cuda.memory.apply_settings, "expandable_segments:False")
        with mock.patch.object(torch.cuda.memory, "_snapshot", wraps=torch.cuda.memory._snapshot) as snapshot:
            kept = asyncio.run(all_at_once())
        self.assertLess(snapshot.call_count, 10, "torch is asked once for each region, not for each step")
        tags = bytes_by_tag()
        self.assertEqual([tags[tag] for tag in ("first", "second", "decorated")], [60 * MIB, 120 * MIB, 30 * MIB])
        self.assertEqual(segment_of(kept[3])["segment_pool_id"], (0, 0))

    def test_a_model_that_is_converted_in_a_shared_region_fits_where_it_does_without_one(self) -> None:
        """Each layer is replaced by a slightly larger one. Torch returns what is free only while no pool is entered."""
        runtime, layers = torch.cuda.memory.runtime(), 6
        torch.cuda.empty_cache()
        hog = runtime.malloc(runtime.free_memory() - (layers + 3) * 40 * MIB)
        self.addCleanup(runtime.free, hog)
        cached = [torch.empty(30 * MIB) for _ in range(4)]
        del cached
        for region, fits in ((engines.tagged("apart"), False), (engines.tagged_in_place("model"), True)):
            model = []
            with contextlib.nullcontext() if fits else self.assertRaises(MemoryError), region:
                model = [torch.empty(40 * MIB) for _ in range(layers)]
                for layer in range(layers):
                    model[layer] = torch.empty(44 * MIB)
            self.assertEqual(bytes_by_tag().get("model"), layers * 44 * MIB if fits else None)
            model.clear()
            gc.collect()
            torch.cuda.empty_cache()

    def test_freed_memory_is_used_again_in_the_next_region_of_the_tag(self) -> None:
        addresses = set()
        for _ in range(5):
            with vramctl.region("again"):
                tensor = torch.empty(5 * MIB)
            addresses.add(tensor.data_ptr())
            del tensor
        self.assertEqual(len(addresses), 1)

    def test_the_innermost_region_counts_although_torch_takes_the_first_pool(self) -> None:
        with vramctl.region("outer"):
            first = torch.empty(MIB * 3)
            with vramctl.region("inner"):
                second = torch.empty(MIB * 3)
                with vramctl.region("outer"):
                    third = torch.empty(MIB * 3)
                fourth = torch.empty(MIB * 3)
            fifth = torch.empty(MIB * 3)
        after = torch.empty(MIB * 3)
        outer = {segment_of(tensor)["segment_pool_id"] for tensor in (first, third, fifth)}
        inner = {segment_of(tensor)["segment_pool_id"] for tensor in (second, fourth)}
        self.assertEqual((len(outer), len(inner), len(outer & inner)), (1, 1, 0))
        self.assertEqual(segment_of(after)["segment_pool_id"], (0, 0))

    def test_regions_inside_a_pool_for_once_have_their_own(self) -> None:
        """Temporary pools serve engines' allocations and unmanaged ones."""
        for name, outermost in (("tagged", engines.tagged("once")), ("disabled", saver.disable())):
            with outermost:
                torch.empty(30 * MIB)  # freed at once, and available for reuse
                with vramctl.region(f"within {name}"):
                    within = torch.empty(8 * MIB)
                with vramctl.unmanaged():
                    unmanaged = torch.empty(8 * MIB)
                with saver.region(f"saved {name}"):
                    saved = torch.empty(8 * MIB)
                with saver.disable():
                    disabled = torch.empty(8 * MIB)
                with engines.tagged(f"inner {name}"):
                    inner = torch.empty(8 * MIB)
                plain = torch.empty(8 * MIB)
            tensors = (within, unmanaged, saved, disabled, inner, plain)
            self.assertEqual(len({segment_of(tensor)["segment_pool_id"] for tensor in tensors}), len(tensors))
            tags = bytes_by_tag()
            for tag in (f"within {name}", f"saved {name}", f"inner {name}"):
                self.assertEqual(tags.get(tag), 20 * MIB, tag)
        self.assertEqual(tags["once"], 30 * MIB)

    def test_an_exception_leaves_no_pool_entered(self) -> None:
        with self.assertRaises(KeyError):
            with vramctl.region("outer"):
                with vramctl.region("broken"):
                    raise KeyError
        with self.assertRaises(errors.Invalid):
            with vramctl.region("outer"), vramctl.region("a=b"):
                pass
        self.assertEqual(segment_of(torch.empty(MIB * 3))["segment_pool_id"], (0, 0))

    def test_threads_in_the_same_region_do_not_get_in_each_other_s_way(self) -> None:
        """Torch does not let two threads enter one pool."""
        both = threading.Barrier(4)
        tensors: list[Any] = []

        def work() -> None:
            with vramctl.region("threads"):
                both.wait(10)
                tensors.append(torch.empty(3 * MIB))
                both.wait(10)

        for _ in range(2):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(len(tensors), 8)
        self.assertNotIn((0, 0), {segment_of(tensor)["segment_pool_id"] for tensor in tensors})
        self.assertLessEqual(len({segment_of(tensor)["segment_pool_id"] for tensor in tensors}), 4, "pools are reused")

    def test_pools_are_never_destroyed(self) -> None:
        with vramctl.region("short"):
            torch.empty(3 * MIB)
        before = list(torch.cuda.memory.destroyed)
        _torch._pools._idle.clear()  # as at interpreter exit
        gc.collect()
        self.assertEqual(torch.cuda.memory.destroyed, before)

    def test_unmanaged_tensors_do_not_land_in_managed_segments(self) -> None:
        with vramctl.region("managed"):
            torch.empty(3 * MIB)
            torch.empty(17 * MIB)
            before = bytes_by_tag()
            with vramctl.unmanaged():
                tensor = torch.empty(3 * MIB)
        self.assertEqual(bytes_by_tag(), before)
        vramctl.pause()
        tensor.copy_(pattern(1, 3 * MIB))
        self.assertEqual(tensor.tobytes(), pattern(1, 3 * MIB), "it is not paused with the rest")

    def test_without_a_pool_only_the_thread_s_region_is_entered(self) -> None:
        pool = torch.cuda.MemPool()
        with vramctl.region("outer"), vramctl.region("own", pool=False), torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(3 * MIB)
        self.assertEqual(segment_of(tensor)["segment_pool_id"], pool.id)
        self.assertEqual(bytes_by_tag()["own"], 20 * MIB)

    def test_a_device_can_be_chosen(self) -> None:
        with vramctl.region("far", device="cuda:1"), torch.cuda.device(1):
            tensor = torch.empty(3 * MIB, device="cuda:1")
        self.assertEqual(segment_of(tensor)["device"], 1)
        self.assertNotEqual(segment_of(tensor)["segment_pool_id"], (0, 0))

    def test_a_graph_s_memory_has_its_tag_wherever_it_is_captured(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with vramctl.region("outer"):
            before = torch.empty(3 * MIB)
            with vramctl.cuda_graph(graph, tag="graphs"):
                inside = torch.empty(3 * MIB)
        self.assertEqual(segment_of(inside)["segment_pool_id"], graph.pool())
        self.assertNotEqual(segment_of(before)["segment_pool_id"], graph.pool())
        self.assertEqual(bytes_by_tag()["graphs"], 20 * MIB)
        more = torch.cuda.CUDAGraph()
        with vramctl.cuda_graph(more, tag="graphs", pool=graph.pool()):
            torch.empty(3 * MIB)
        self.assertEqual(bytes_by_tag()["graphs"], 20 * MIB, "graphs that share a pool share memory")

    def test_a_torch_without_pools_is_refused(self) -> None:
        with mock.patch.object(
            torch, "cuda", mock.Mock(spec=["init", "is_available", "get_allocator_backend", "memory", "current_device"])
        ):
            torch.cuda.get_allocator_backend.return_value = "native"
            torch.cuda.memory._snapshot.return_value = {}
            torch.cuda.current_device.return_value = 0
            for needs_a_pool in (vramctl.region("a"), engines.tagged("a"), saver.disable()):
                with self.assertRaises(errors.Unsupported) as caught:
                    needs_a_pool.__enter__()
                self.assertIn("2.5", str(caught.exception))
        self.assertEqual(vramctl.current_tag(), "default")

    def test_an_allocator_that_does_not_cache_needs_no_pools(self) -> None:
        with mock.patch.object(torch.cuda.memory, "backend", "cudaMallocAsync"):
            with vramctl.region("a"):
                self.assertEqual(torch.cuda.memory.allocator(0).entered, [])
            self.assertFalse(_torch.is_used())


class ExpandableSegments(unittest.TestCase):
    SETTINGS = "max_split_size_mb:512,expandable_segments:True"

    def setUp(self) -> None:
        torch.cuda.memory.apply_settings(self.SETTINGS)
        self.addCleanup(torch.cuda.memory.apply_settings, "expandable_segments:False")

    def test_they_are_off_in_a_region_and_the_other_settings_stay(self) -> None:
        with vramctl.region("a"):
            self.assertEqual(torch.cuda.memory._settings["text"], "max_split_size_mb:512,expandable_segments:False")
            tensor = torch.empty(3 * MIB)
            with vramctl.region("b"):
                pass
            self.assertFalse(torch.cuda.memory._settings["expandable"], "until the outermost region ends")
        self.assertFalse(segment_of(tensor)["is_expandable"])
        self.assertEqual(torch.cuda.memory._settings["text"], self.SETTINGS)
        self.assertTrue(segment_of(torch.empty(3 * MIB))["is_expandable"])

    def test_a_graph_s_memory_is_managed_too(self) -> None:
        with vramctl.cuda_graph(torch.cuda.CUDAGraph(), tag="expandable graph"):
            torch.empty(3 * MIB)
        self.assertEqual(bytes_by_tag()["expandable graph"], 20 * MIB)

    def test_settings_that_do_not_mention_them_do_not_switch_them_off(self) -> None:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
        self.assertTrue(segment_of(torch.empty(3 * MIB))["is_expandable"])
        with vramctl.region("expandable all the same"):
            tensor = torch.empty(3 * MIB)
        self.assertFalse(segment_of(tensor)["is_expandable"])
        self.assertEqual(bytes_by_tag()["expandable all the same"], 20 * MIB)
        self.assertTrue(torch.cuda.memory._settings["expandable"])

    def test_settings_that_the_program_makes_meanwhile_stay(self) -> None:
        """As vLLM does while it loads a model."""
        with vramctl.region("a"):
            torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.8")
        self.assertEqual(torch.cuda.memory._settings["text"], "garbage_collection_threshold:0.8,expandable_segments:True")
        self.assertTrue(torch.cuda.memory._settings["expandable"])
        with vramctl.region("a"):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False,max_split_size_mb:64")
        self.assertEqual(torch.cuda.memory._settings["text"], "expandable_segments:False,max_split_size_mb:64")

    def test_a_torch_that_does_not_tell_is_judged_by_what_was_set(self) -> None:
        def without_the_switch(device: Any = None) -> dict[str, Any]:
            return {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": torch.cuda.memory._settings["text"]}}

        with mock.patch.object(torch.cuda.memory, "_snapshot", without_the_switch):
            with vramctl.region("a"):
                self.assertFalse(torch.cuda.memory._settings["expandable"])
            self.assertTrue(torch.cuda.memory._settings["expandable"])

    def test_where_they_cannot_be_switched_off_it_is_said(self) -> None:
        def stubborn(settings: str) -> None:
            """Applies all settings but this one."""
            torch.cuda.memory.apply_settings(settings.replace("expandable_segments:False", "expandable_segments:True"))

        with mock.patch.object(torch._C, "_accelerator_setAllocatorSettings", stubborn):
            with self.assertRaises(errors.Unsupported) as caught:
                vramctl.region("a").__enter__()
        self.assertIn("PYTORCH_CUDA_ALLOC_CONF", str(caught.exception))
        self.assertEqual(torch.cuda.memory._settings["text"], self.SETTINGS, "the program's settings are unchanged")
        self.assertEqual(vramctl.current_tag(), "default")
        self.assertEqual(_torch._switch.users, 0)

    def test_other_tensors_that_are_expandable_are_left_alone_by_a_pause(self) -> None:
        del torch.empty(64 * MIB).size
        self.assertEqual([size for _, size in _torch.free(None, None).ranges if size >= 64 * MIB], [])


class LiveBlocks(unittest.TestCase):
    def tearDown(self) -> None:
        vramctl.resume(timeout=None)

    def test_what_torch_holds_as_free_is_not_copied(self) -> None:
        with vramctl.region("live"):
            kept = torch.empty(16 * MIB).copy_(pattern(1, 16 * MIB))
            small = torch.empty(1000).copy_(pattern(2, 1000))
            torch.empty(48 * MIB).copy_(pattern(3, 48 * MIB))
        report = vramctl.pause("live")
        self.assertEqual((report.bytes, report.kept_bytes), (66 * MIB, 18 * MIB), "the segment of small tensors is kept")
        vramctl.resume("live")
        self.assertEqual((kept.tobytes(), small.tobytes()), (pattern(1, 16 * MIB), pattern(2, 1000)))

    def test_parts_of_a_segment_are_left_out(self) -> None:
        with vramctl.region("split"):
            torch.empty(20 * MIB)
            kept = [torch.empty(size).copy_(pattern(size, size)) for size in (3 * MIB, 5 * MIB + 512)]
        report = vramctl.pause("split")
        self.assertEqual(report.bytes, 20 * MIB)
        self.assertEqual(report.kept_bytes, 10 * MIB, "to whole pages of 2 MiB")
        vramctl.resume("split")
        self.assertEqual([tensor.tobytes() for tensor in kept], [pattern(tensor.size, tensor.size) for tensor in kept])

    def test_of_what_is_dropped_torch_is_not_asked(self) -> None:
        """A snapshot of a large allocator takes longer than dropping a cache."""
        with vramctl.region("dropped", "discard"):
            dropped = torch.empty(4 * MIB)
        with mock.patch.object(torch.cuda, "memory_snapshot", side_effect=AssertionError):
            self.assertEqual(vramctl.pause("dropped").discarded_bytes, 20 * MIB)
            vramctl.resume("dropped")
            with self.assertRaises(AssertionError):
                vramctl.pause("dropped", backup="host")
        self.assertEqual(dropped.tobytes(), bytes(4 * MIB))

    def test_of_what_is_retained_torch_is_not_asked(self) -> None:
        """It is kept whole, so that the next pause can tell what has changed."""
        with vramctl.region("retained"):
            torch.empty(24 * MIB)
        vramctl.retain("retained", True)
        self.addCleanup(vramctl.retain, "retained", None)
        with mock.patch.object(torch.cuda, "memory_snapshot", side_effect=AssertionError):
            self.assertEqual(vramctl.pause("retained").kept_bytes, 24 * MIB)

    def test_all_of_it_is_kept_if_asked_for(self) -> None:
        with vramctl.region("whole"):
            torch.empty(24 * MIB)
        self.assertEqual(vramctl.pause("whole", live_only=False).kept_bytes, 24 * MIB)

    def test_what_waits_for_another_stream_is_kept(self) -> None:
        with vramctl.region("waiting"):
            torch.empty(24 * MIB).record_stream()
        self.assertEqual(vramctl.pause("waiting").kept_bytes, 24 * MIB)

    def test_a_graph_s_free_blocks_are_kept(self) -> None:
        """A replay leaves results in memory that torch holds as free since the capture."""
        with vramctl.cuda_graph(torch.cuda.CUDAGraph(), tag="replayed"):
            torch.empty(24 * MIB)
        self.assertEqual(vramctl.pause("replayed").kept_bytes, 24 * MIB)

    def test_a_graph_that_is_captured_inside_a_region_keeps_its_free_blocks(self) -> None:
        """They come from the region's pool, which was entered first, but a replay still writes results to them."""
        with vramctl.region("around"):
            torch.empty(48 * MIB)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                captured = torch.empty(24 * MIB).copy_(pattern(4, 24 * MIB))
                address, pool = captured.data_ptr(), segment_of(captured)["segment_pool_id"]
                del captured
        self.assertIn(pool, _torch._pools.of(["around"]))
        self.assertEqual(vramctl.pause("around").kept_bytes, 24 * MIB, "and nothing else")
        vramctl.resume("around")
        self.assertEqual(torch.cuda.memory.runtime().read(address, 24 * MIB), pattern(4, 24 * MIB))

    def test_the_free_blocks_of_other_pools_are_kept_unless_they_are_adopted(self) -> None:
        pool = torch.cuda.MemPool()
        with vramctl.region("foreign", pool=False), torch.cuda.use_mem_pool(pool):
            torch.empty(24 * MIB)
        self.assertEqual(vramctl.pause("foreign").kept_bytes, 24 * MIB)
        vramctl.resume("foreign")
        _torch.adopt(pool.id, "foreign")
        self.assertEqual(vramctl.pause("foreign").kept_bytes, 0)

    def test_a_thread_that_allocates_meanwhile_is_told_of(self) -> None:
        with vramctl.region("raced"):
            torch.empty(24 * MIB)
        library, taken = _library.get(), []
        call = library.call

        def late(name: str, *arguments: Any) -> None:
            if name == "pause_with":
                with vramctl.region("raced"):
                    taken.append(torch.empty(24 * MIB))
            call(name, *arguments)

        with mock.patch.object(library, "call", late), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vramctl.pause("raced")
        self.assertEqual(len(caught), 1)
        self.assertIn(str(24 * MIB), str(caught[0].message))
        self.assertEqual(caught[0].filename, __file__)

    def test_a_thread_that_allocates_under_another_tag_is_no_matter(self) -> None:
        with vramctl.region("paused"):
            torch.empty(24 * MIB)
        library, taken = _library.get(), []
        call = library.call

        def late(name: str, *arguments: Any) -> None:
            if name == "pause_with":
                taken.append(torch.empty(24 * MIB))
            call(name, *arguments)

        del torch.empty(24 * MIB).size  # free under the process's tag
        with mock.patch.object(library, "call", late), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(vramctl.pause("paused").kept_bytes, 0)
        self.assertEqual(len(taken), 1)

    def test_what_is_outside_regions_counts_under_the_process_s_tag(self) -> None:
        kept = torch.empty(16 * MIB).copy_(pattern(1, 16 * MIB))
        torch.empty(40 * MIB)
        report = vramctl.pause("default")
        self.assertLessEqual(report.kept_bytes, report.bytes - 40 * MIB)
        vramctl.resume("default")
        self.assertEqual(kept.tobytes(), pattern(1, 16 * MIB))

    def test_a_backup_of_a_tensor_is_its_bytes(self) -> None:
        with vramctl.region("backup"):
            torch.empty(MIB)
            tensor = torch.empty(3000).copy_(pattern(7, 3000))
        vramctl.pause("backup")
        self.assertEqual(bytes(vramctl.backup_of(tensor)), pattern(7, 3000))
        with mock.patch.object(tensor, "is_contiguous", lambda: False), self.assertRaises(errors.Invalid):
            vramctl.backup_of(tensor)

    def test_overlaps_are_counted(self) -> None:
        one = [(0, 10), (20, 10), (40, 10)]
        for other, wanted in [
            ([], 0),
            ([(5, 20)], 10),
            ([(0, 100)], 30),
            ([(10, 10), (30, 5)], 0),
            ([(2, 1), (4, 1), (49, 9)], 3),
        ]:
            self.assertEqual(_torch._overlap(one, other), wanted, other)


class Exit(unittest.TestCase):
    def test_a_program_that_ends_with_everything_alive_ends_well(self) -> None:
        source = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent / "fake_torch")!r})
import torch, vramctl
with vramctl.region("a"):
    tensor = torch.empty(1 << 24)
vramctl.pause()
vramctl.region("left open").__enter__()
print(torch.cuda.memory.destroyed)
"""
        ran = run([sys.executable, "-c", source])
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "[]\n", ""))


if __name__ == "__main__":
    unittest.main()
