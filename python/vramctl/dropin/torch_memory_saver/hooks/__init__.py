"""The two ways in which allocations are found out: see `docs/torch_memory_saver.md` in vramctl's sources."""
