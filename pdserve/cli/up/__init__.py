"""Runs a whole cluster on this machine: ``pdserve up``."""
