"""Serves one port with several processes: the supervisor, its channel to all workers, and the worker."""
