"""The calls of CUDA and of the preloaded library that guard.py and waits.py make. Their first argument is the path of a libcudart."""

import ctypes
import sys

runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
hooked = ctypes.CDLL(None)  # the preloaded library first
cuda = ctypes.CDLL("libcuda.so.1")
pointer, size = ctypes.c_void_p, ctypes.c_size_t


def must(code):
    if code != 0:
        raise RuntimeError(f"a call answered {code}")
