"""Serves one port with several processes: the supervisor, its channel to all workers, what it tells a worker at its
start, and the worker.
"""
