"""What two real GPUs show."""

import unittest

from section import gpus, section


@unittest.skipIf(gpus() < 2, "there are no two GPUs")
class TwoGpus(unittest.TestCase):
    @section(240)
    def test_move(self, run):
        """moves a PyTorch program to the other and back in the middle of its work, and swaps two jobs; a job that cannot be moved is refused and
        continues"""
        run.script("move.py", 230)

    @section(120)
    def test_copies(self, run):
        """every copy of one device's memory, whichever device is current and in whichever stream, does the same on managed memory as on CUDA's own,
        and as fast"""
        run.script("copies.py", 110)

    @section(160)
    def test_two(self, run):
        """peer copies; NCCL on managed tensors, eager and in captured graphs, before and after pauses; a distributed training loop, paused as a job at
        random moments"""
        run.script("two.py", 150)

    @section(120)
    def test_registration(self, run):
        """memory that is registered with NCCL is not paused unless --registered take says so; and what happens to a captured collective then"""
        run.script("registration.py", 110)

    @section(420)
    def test_nccl(self, run):
        """the ranks of an NCCL job leave both and come back, and change places, with each of NCCL's transports; eager and captured all-reduces are
        correct afterwards (--nccl-dir)"""
        run.script("nccl.py", 400)

    @section(150)
    def test_ray(self, run):
        """a Ray cluster of two nodes on this host with one GPU each, and DistributedDataParallel over both, paused ten times and suspended three times
        through vramctl.ray in the middle of its work; every loss is equal (--ray-dir)"""
        run.script("many_nodes.py", 145)

    @section(420)
    def test_bandwidth(self, run):
        """NCCL's all-reduces of 8 bytes to 1 GiB take at most 1% longer than without the library, in turns"""
        run.script("bandwidth.py", 400)

    @section(590)
    def test_training(self, run):
        """DistributedDataParallel and FSDP over NCCL leave both in the middle of their work, twenty times each, with NCCL's settings for what ranks
        share, and change places; every loss is equal"""
        run.script("training.py", 580)
