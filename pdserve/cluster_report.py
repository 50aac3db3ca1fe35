"""What ``pdserve up --ready-json`` says of its cluster, for the program that has started it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.wire.discovery import Role


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a cluster on this machine."""

    name: str
    """Its name in logs, metrics and errors, such as ``decode-0``."""
    role: Role
    """The role that it was started with."""
    url: str
    """Where it answers ``/metrics`` and ``/live``. Clients send their requests to the cluster's URL instead."""
    pid: int
    """The number of its process."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """One line of JSON: when all nodes are ready, and again whenever a node was started again."""

    url: str
    """The proxy's URL, without ``/v1``."""
    model: str
    """The name that requests give for the model."""
    logs: str
    """The folder with the log of each process, such as ``decode-0.log``; empty if there is none."""
    nodes: tuple[Node, ...]
