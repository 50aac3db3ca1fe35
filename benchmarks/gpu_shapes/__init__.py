"""``benchmarks gpu-shapes`` times steps of random models in shapes that people serve on GPUs."""
