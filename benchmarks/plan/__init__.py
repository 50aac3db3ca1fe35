"""``benchmarks plan``: what ``pdserve plan`` predicts, beside what then happens."""
