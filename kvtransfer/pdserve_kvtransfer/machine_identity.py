"""Whether two processes can share memory: on one running kernel, in one IPC namespace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_KERNEL_BOOT = Path("/proc/sys/kernel/random/boot_id")
_IPC_NAMESPACE = Path("/proc/self/ns/ipc")


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Empty where the system does not tell."""

    machine: str
    ipc_namespace: str


def machine_identity() -> MachineIdentity:
    """Of this process."""
    try:
        return MachineIdentity(_KERNEL_BOOT.read_text().strip(), os.readlink(_IPC_NAMESPACE))
    except OSError:
        return MachineIdentity("", "")
