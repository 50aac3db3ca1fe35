"""``pdserve bench transfer``: the transfer engine itself, KV cache to KV cache between two processes."""
