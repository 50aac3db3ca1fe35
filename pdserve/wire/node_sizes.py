"""What a node serves, and what fits: ``/server_info`` has it, the node's log at its start, and ``pdserve up``."""

from __future__ import annotations

import msgspec


class NodeSizes(msgspec.Struct, frozen=True):
    """The sizes that a node has chosen, or was given, when it started."""

    model: str
    """The name for clients."""
    format: str
    """The form of the weights: ``bfloat16``, or ``GGUF, Q4_K, Q6_K``."""
    device: str
    """``CPU, 4 cores``, or a GPU's name."""
    kernels: str
    ranks: int
    kv_mib: int
    """The KV cache of all ranks together."""
    kv_tokens: int
    context: int
    """The most tokens of a prompt and its output together."""
    places: int
    """The most requests of a step."""
    step_tokens: int

    @property
    def lines(self) -> list[str]:
        """The block that people read: a line for each thing that is worth knowing."""
        whole = self.kv_tokens // self.context if self.context else 0
        plural = "" if whole == 1 else "s"
        contexts = f"{whole:,} full context{plural} of {self.context:,}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return [
            f"model     {self.model}",
            f"format    {self.format}",
            f"device    {self.device}, {self.kernels} kernels, {ranks}",
            f"KV cache  {self.kv_mib:,} MiB: {self.kv_tokens:,} tokens, {contexts}",
            f"steps     {self.places} places, {self.step_tokens:,} tokens",
        ]
