"""Brings the numbers of one step to the host. The host waits for them only when it reads them."""

from __future__ import annotations

import torch


class HostCopy:
    """A tensor on its way to the host, behind the kernels that compute it."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host, self._there = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            self._there.record()

    def read(self) -> torch.Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._host
