"""The systems that the benchmarks compare, each in a process of its own: `worker.py` is one, `interleave.py` drives."""
