"""The two hook modes: see `docs/torch_memory_saver.md` in vramctl's sources."""
