"""``benchmarks roles``: nodes whose roles follow the load, against every static split."""
