"""The systems that the benchmarks compare, each in a process of its own: `worker.py` runs one, `interleave.py` drives them."""
