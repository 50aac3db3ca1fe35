"""``benchmarks stream`` measures a token's cost with clients, a real proxy, and a real node with a mock engine."""
