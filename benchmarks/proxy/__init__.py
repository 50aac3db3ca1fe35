"""``benchmarks proxy``: cheap clients, the proxies that it compares, and mock backends behind them."""
