"""``pdserve bench transfer`` measures the transfer engine itself, between two processes' KV caches."""
