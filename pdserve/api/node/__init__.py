"""The life of a node: it starts, registers at its proxies, serves, obeys commands, drains and stops."""
