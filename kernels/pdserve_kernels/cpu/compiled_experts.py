"""Sends rows to a few of many experts, with one compiled call for all of them: csrc/experts.cpp in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from pdserve_kernels.contract import BlockWeight, ExpertsForm, ExpertWeights, UnreadWeight
from pdserve_kernels.cpu.library import CExpert, CExpertRows, CExperts, CExpertWeight, CRouter, Library
from pdserve_kernels.cpu.weight_memory import LINE, FilledMemory
from pdserve_kernels.feed_forward import Activation, GroupScore, Routing, Scoring
from pdserve_kernels.reference import with_identities

ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU: 2,
    Activation.RELU: 3,
    Activation.RELU_SQUARED: 4,
    Activation.CLAMPED_SILU: 5,
    Activation.SIGMOID: 6,
    Activation.SOFTPLUS: 7,
    Activation.SILU_TO_7: 8,
    Activation.SILU_TO_16: 9,
    Activation.LIMITED_SILU: 10,
}
"""The numbers of csrc/activations.h."""
_SCORINGS = {
    Scoring.SOFTMAX: 0,
    Scoring.SOFTMAX_OF_CHOSEN: 1,
    Scoring.SIGMOID: 2,
    Scoring.SIGMOID_OF_CHOSEN: 3,
    Scoring.ROOT_SOFTPLUS: 4,
}
"""The numbers of csrc/route.cpp."""
_DENSE = -1
"""The format of a weight that is not in blocks."""


class CompiledRouter:
    """Computes ``reference.route``. Of equal scores, those of the first experts are the higher ones."""

    def __init__(
        self,
        library: Library,
        rule: Routing,
        count: int,
        correction: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Raises ValueError if the rule cannot choose among ``count`` experts."""
        rule.check(count)
        self._run, self._count, self._chosen = library.route, count, rule.chosen
        self._kept = [_fp32(each, count) for each in (correction, factors)]
        self._rule = CRouter(
            experts=count,
            chosen=rule.chosen,
            groups=rule.groups,
            chosen_groups=rule.chosen_groups,
            scoring=_SCORINGS[rule.scoring],
            normalised=rule.normalised,
            two_best=rule.group_score is GroupScore.TWO_BEST,
            smallest_sum=rule.smallest_sum,
            scale=rule.scale,
            correction=_at(self._kept[0]),
            factors=_at(self._kept[1]),
        )

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns fp32 weights and int32 numbers of experts, both ``[rows, chosen]``."""
        if logits.dim() != 2 or logits.shape[1] != self._count:
            raise ValueError(f"a router of {self._count} experts was given {tuple(logits.shape)}")
        if logits.dtype is not torch.bfloat16:
            logits = logits.float()
        logits, rows = logits.contiguous(), len(logits)
        chosen = torch.empty((rows, self._chosen), dtype=torch.int32)
        weights = torch.empty((rows, self._chosen), dtype=torch.float32)
        self._run(
            int(logits.dtype is torch.bfloat16),
            ctypes.byref(self._rule),
            logits.data_ptr(),
            rows,
            chosen.data_ptr(),
            weights.data_ptr(),
        )
        return weights, chosen


class CompiledExperts:
    """Satisfies ``contract.Experts`` in bf16 and fp32; with weights in blocks, in bf16.

    Only the weights of chosen experts are read, each once for up to some hundred rows. A row's result depends neither
    on the other rows nor on the number of threads.
    """

    def __init__(
        self, library: Library, memory: FilledMemory, form: ExpertsForm, weights: Iterable[ExpertWeights]
    ) -> None:
        """Packs the weights that ``memory`` has not."""
        self._library, self._form = library, form
        self._route = CompiledRouter(library, form.routing, form.count, form.correction, form.factors)
        self._kept: list[torch.Tensor] = []
        self._array = (CExpert * len(form.own))()
        self._packing = _Packing(library, memory, form)
        taken = 0
        for number, each in enumerate(weights):
            self._array[number] = self._expert(each)
            taken += 1
        if taken != len(form.own):
            raise ValueError(f"{len(form.own)} experts are wanted, and there are {taken}")
        self._experts = CExperts(
            experts=ctypes.addressof(self._array),
            count=len(form.own),
            hidden=form.hidden,
            channels=form.channels,
            chosen=form.routing.chosen,
            activation=ACTIVATIONS[form.activation],
            weighs_inputs=form.weighs_inputs,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all weights as they are packed."""
        return self._packing.nbytes

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        form = self._form
        for given in (x,) if beside is None else (x, beside):
            if given.dtype is not form.dtype or given.shape != (len(logits), form.hidden):
                own = f"[{len(logits)}, {form.hidden}] {form.dtype}"
                raise ValueError(f"experts of {own} were given {list(given.shape)} {given.dtype}")
        weights, chosen = self._route(logits)
        beside = with_identities(form, x, weights, chosen, beside)
        if form.some is not None:
            chosen -= form.own.start
        x, beside = x.contiguous(), None if beside is None else beside.contiguous()
        out = torch.empty_like(x)
        rows = CExpertRows(
            x=x.data_ptr(),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            beside=_at(beside),
            out=out.data_ptr(),
            rows=len(x),
        )
        self._library.experts(int(form.dtype is torch.bfloat16), ctypes.byref(self._experts), ctypes.byref(rows))
        return out

    def _expert(self, weights: ExpertWeights) -> CExpert:
        form = self._form
        inner = self._packing.inner(weights.inner)
        gate, up = inner if form.gated else (CExpertWeight(None, _DENSE), inner[0])
        biases: list[torch.Tensor | None] = [None, None]
        if weights.inner_bias is not None:
            biases = [*weights.inner_bias.chunk(2)] if form.gated else [None, weights.inner_bias]
        found = [self._bias(each) for each in (*biases, weights.down_bias)]
        return CExpert(gate, up, self._packing.weight(weights.down, form.hidden, form.channels), *found)

    def _bias(self, bias: torch.Tensor | None) -> int | None:
        if bias is None:
            return None
        self._kept.append(bias.to(self._form.dtype).contiguous())
        return self._kept[-1].data_ptr()


class _Packing:
    """Packs the weights of experts into memory, which it keeps."""

    def __init__(self, library: Library, memory: FilledMemory, form: ExpertsForm) -> None:
        self._library, self._memory, self._form = library, memory, form
        self._kept: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._kept)

    def inner(self, weights: tuple[UnreadWeight | BlockWeight, ...]) -> list[CExpertWeight]:
        """Returns gates and ups, or ups alone."""
        channels = self._form.channels
        if len(weights) == 1 and self._form.gated:
            return self._parts(weights[0], channels, 2, self._form.hidden)
        return [self.weight(weight, channels, self._form.hidden) for weight in weights]

    def weight(self, weight: UnreadWeight | BlockWeight, outputs: int, inputs: int) -> CExpertWeight:
        return self._parts(weight, outputs, 1, inputs)[0]

    def _parts(self, weight: UnreadWeight | BlockWeight, outputs: int, count: int, inputs: int) -> list[CExpertWeight]:
        """Returns the parts of ``outputs`` outputs that a weight consists of. Each begins at a line of the cache.

        Raises ValueError for a weight of another shape or kind of numbers, which the kernel would read beyond its end.
        """
        if isinstance(weight, BlockWeight):
            found, dtype = (weight.blocks.shape[0], weight.inputs), torch.bfloat16
        else:
            found, dtype = weight.shape, weight.dtype
        wanted = (count * outputs, inputs)
        if found != wanted or dtype is not self._form.dtype:
            raise ValueError(f"a weight {wanted} for {self._form.dtype} is wanted, and there is {found} for {dtype}")
        if isinstance(weight, BlockWeight):
            kind, inner = int(weight.format), weight.inputs
            nbytes = self._library.block_panels_bytes(kind, inner, outputs)
        else:
            kind, inner = _DENSE, weight.shape[1]
            columns = -(-outputs // self._library.linear_columns) * self._library.linear_columns
            # Numbers of 16 bits are kept in pairs.
            nbytes = columns * (inner + inner % 2) * weight.dtype.itemsize
        each = -(-nbytes // LINE) * LINE

        def pack(memory: torch.Tensor) -> None:
            whole = weight.blocks if isinstance(weight, BlockWeight) else weight.read()
            for part in range(count):
                rows = whole[part * outputs : (part + 1) * outputs].contiguous()
                at = memory.data_ptr() + part * each
                if isinstance(weight, BlockWeight):
                    self._library.pack_blocks(kind, rows.data_ptr(), at, inner, outputs)
                else:
                    bf16 = int(rows.dtype is torch.bfloat16)
                    self._library.pack_linear(bf16, rows.data_ptr(), at, inner, outputs)

        key = f"{weight.key} in {count} of an expert" if weight.key else ""
        memory = self._memory.filled(key, each * (count - 1) + nbytes, pack)
        self._kept.append(memory)
        return [CExpertWeight(memory.data_ptr() + part * each, kind) for part in range(count)]


def computes(library: Library, form: ExpertsForm) -> bool:
    """Returns whether the compiled operation computes with such experts on this CPU."""
    return library.linear_columns > 0 and form.dtype in (torch.bfloat16, torch.float32)


def _fp32(numbers: torch.Tensor | None, count: int) -> torch.Tensor | None:
    if numbers is None:
        return None
    if numbers.numel() != count:
        raise ValueError(f"a number for each of {count} experts is wanted, and there are {numbers.numel()}")
    return numbers.float().contiguous()


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
