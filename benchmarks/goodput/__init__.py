"""``benchmarks goodput``: requests a second within latency targets, from one node and from two on the same cores."""
