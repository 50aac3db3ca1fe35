"""``pdserve bench stream``: clients, a real proxy, a real node with a mock engine, and what a token costs each."""
