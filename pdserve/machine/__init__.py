"""The cores and the memory of this machine, which its processes share."""
