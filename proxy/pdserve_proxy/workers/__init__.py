"""Serves one port with several processes: the supervisor, what it tells a worker at its start, its channel to all
workers, and the worker.
"""
