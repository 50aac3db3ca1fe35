"""``benchmarks lent-cores`` times steps of an engine that borrows the cores of another one, which sleeps."""
