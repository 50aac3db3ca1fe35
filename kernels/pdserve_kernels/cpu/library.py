"""Says how the kernels are compiled (``CPU_KERNELS``), and has their functions as Python calls them.

The functions trust their arguments: callers check shapes and dtypes first. ``LentCores`` are the cores of the kernels'
loops: an engine's own, which it lends while it sleeps, and those of others. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.compiled_library import BuildError, CpuLevel, Recipe

# What an operating system has to save and x86-64-v2 has besides are not asked for: no processor has these without them.
_V3_FEATURES = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4_FEATURES = _V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V3, _V4 = ("-march=x86-64-v3",), ("-march=x86-64-v4",)

LEVELS = (
    CpuLevel(
        "x86-64-v4-vnni-bf16",
        (*_V4, "-mavx512vnni", "-mavx512bf16"),
        _V4_FEATURES | {"avx512_vnni", "avx512_bf16"},
    ),
    CpuLevel("x86-64-v4-vnni", (*_V4, "-mavx512vnni"), _V4_FEATURES | {"avx512_vnni"}),
    CpuLevel("x86-64-v4", _V4, _V4_FEATURES),
    CpuLevel("x86-64-v3-vnni", (*_V3, "-mavxvnni"), _V3_FEATURES | {"avx_vnni"}),
    CpuLevel("x86-64-v3", _V3, _V3_FEATURES),
)
"""Each has one more of the instructions between which csrc distinguishes."""

CPU_KERNELS = Recipe(
    name="cpu-kernels",
    sources=Path(__file__).parent / "csrc",
    compile_flags=(
        "-std=c++17",
        "-O3",
        # Neither errno nor traps change a result, and both keep the compiler from making vector code.
        "-fno-math-errno",
        "-fno-trapping-math",
        # A tensor is memory without a C++ type.
        "-fno-strict-aliasing",
        # This is not a link flag: torch has loaded an OpenMP, and a second one would keep a second pool of threads.
        "-fopenmp",
        "-fPIC",
    ),
    native_flags=("-march=native",),
    levels=LEVELS,
)

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_INT = ctypes.c_int


class CStep(ctypes.Structure):
    """The structure ``Step`` of csrc/attention.h."""

    _fields_ = (
        ("cache", _POINTER),
        ("tables", _POINTER),
        ("rows", _POINTER),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_singles", "num_tokens")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "heads", "layers", "block_size", "head_dim", "tiles")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


class CTokens(ctypes.Structure):
    """The structure ``Tokens`` of csrc/attention.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value")),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        *((name, _POINTER) for name in ("cos", "sin", "query_norm", "key_norm")),
        ("eps", ctypes.c_float),
        ("layer", ctypes.c_int32),
        ("window", ctypes.c_int64),
        ("chunked", ctypes.c_int64),
        ("sinks", _POINTER),
        ("out", _POINTER),
    )


class CIndex(ctypes.Structure):
    """The structure ``Index`` of csrc/choose.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "rows", "lengths", "starts", "query", "weights", "chosen")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "row_size", "first", "heads", "channels", "count")),
    )


class CRuns(ctypes.Structure):
    """The structure ``Runs`` of csrc/states.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("starts", "sources", "destinations", "kept", "states")),
        *((name, ctypes.c_int64) for name in ("count", "tokens", "block_stride", "head_stride")),
    )


class CConv(ctypes.Structure):
    """The structure ``Conv`` of csrc/states.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "channels", "width")),
        ("silu", ctypes.c_int32),
    )


class CDelta(ctypes.Structure):
    """The structure ``Delta`` of csrc/states.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "decay", "beta", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "group", "key_dim", "value_dim")),
        ("by_channel", ctypes.c_int32),
    )


class CScan(ctypes.Structure):
    """The structure ``Scan`` of csrc/states.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("xbc", "steps", "rate", "skip", "out")),
        *((name, ctypes.c_int64) for name in ("groups", "heads", "head_dim", "size")),
    )


class CChannelScan(ctypes.Structure):
    """The structure ``ChannelScan`` of csrc/states.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "steps", "write", "read", "rate", "skip", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "channels", "size")),
    )


class CExpertWeight(ctypes.Structure):
    """The structure ``ExpertWeight`` of csrc/experts.h."""

    _fields_ = (("panels", _POINTER), ("format", ctypes.c_int64))


class CExpert(ctypes.Structure):
    """The structure ``Expert`` of csrc/experts.h."""

    _fields_ = (
        *((name, CExpertWeight) for name in ("gate", "up", "down")),
        *((name, _POINTER) for name in ("gate_bias", "up_bias", "down_bias")),
    )


class CExperts(ctypes.Structure):
    """The structure ``Experts`` of csrc/experts.h."""

    _fields_ = (
        ("experts", _POINTER),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "channels", "chosen")),
        ("activation", ctypes.c_int32),
        ("weighs_inputs", ctypes.c_int32),
    )


class CRouter(ctypes.Structure):
    """The structure ``Router`` of csrc/experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("experts", "chosen", "groups", "chosen_groups")),
        *((name, ctypes.c_int32) for name in ("scoring", "normalised", "two_best")),
        ("smallest_sum", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("correction", _POINTER),
        ("factors", _POINTER),
    )


class CExpertRows(ctypes.Structure):
    """The structure ``ExpertRows`` of csrc/experts.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "chosen", "weights", "beside", "out")),
        ("rows", ctypes.c_int64),
    )


_FUNCTIONS: dict[str, list[type[Any]]] = {
    "pdserve_rms_norm": [_INT, _POINTER, _POINTER, _POINTER, ctypes.c_float, _LONG, _LONG, _POINTER, _POINTER],
    "pdserve_activate": [_INT, _INT, _INT, _POINTER, _LONG, _LONG, _POINTER],
    "pdserve_ask_for_large_pages": [_POINTER, _LONG],
    "pdserve_pack_linear": [_INT, _POINTER, _POINTER, _LONG, _LONG],
    "pdserve_linear": [_INT, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG],
    "pdserve_pack_blocks": [_INT, _POINTER, _POINTER, _LONG, _LONG],
    "pdserve_block_linear": [_INT, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG],
    "pdserve_block_rows": [_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "pdserve_experts": [_INT, _POINTER, _POINTER],
    "pdserve_route": [_INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER],
    "pdserve_attend": [_INT, _POINTER, _POINTER],
    "pdserve_choose": [_INT, _POINTER],
    "pdserve_causal_conv": [_INT, _POINTER, _POINTER],
    "pdserve_gated_delta_rule": [_INT, _POINTER, _POINTER],
    "pdserve_mamba2_scan": [_INT, _POINTER, _POINTER],
    "pdserve_mamba_scan": [_INT, _POINTER, _POINTER],
    "pdserve_cores_begin_step": [],
    "pdserve_cores_sleep": [],
    "pdserve_cores_close": [],
    "pdserve_cores_forget": [_POINTER, _LONG, _INT],
}

_INSTRUCTIONS = ("baseline", "avx2", "avx512", "avx512_bf16")


class Library:
    """The functions of one shared library, by the names and with the arguments that csrc gives them."""

    def __init__(self, path: Path) -> None:
        """Raises BuildError if ``path`` cannot be loaded."""
        try:
            # All symbols are resolved now: a missing OpenMP must show here, not in the first request.
            library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, None
            library.pdserve_block_panels_bytes.argtypes = [_INT, _LONG, _LONG]
            library.pdserve_block_panels_bytes.restype = _LONG
            library.pdserve_cores_open.argtypes = [_POINTER, _LONG, _INT, _POINTER, _LONG]
            library.pdserve_cores_pieces.restype = _LONG
            library.pdserve_cores_borrowed_seconds.restype = ctypes.c_double
            self.linear_columns = int(library.pdserve_linear_columns())
            self.instructions = _INSTRUCTIONS[library.pdserve_instructions()]
        except (OSError, AttributeError) as exc:
            raise BuildError(f"the compiled CPU kernels cannot be loaded: {exc}") from exc
        self.rms_norm = library.pdserve_rms_norm
        self.activate = library.pdserve_activate
        self.ask_for_large_pages = library.pdserve_ask_for_large_pages
        self.pack_linear = library.pdserve_pack_linear
        self.linear = library.pdserve_linear
        self.block_panels_bytes = library.pdserve_block_panels_bytes
        self.pack_blocks = library.pdserve_pack_blocks
        self.block_linear = library.pdserve_block_linear
        self.block_rows = library.pdserve_block_rows
        self.experts = library.pdserve_experts
        self.route = library.pdserve_route
        self.attend = library.pdserve_attend
        self.choose = library.pdserve_choose
        self.causal_conv = library.pdserve_causal_conv
        self.gated_delta_rule = library.pdserve_gated_delta_rule
        self.mamba2_scan = library.pdserve_mamba2_scan
        self.mamba_scan = library.pdserve_mamba_scan
        self.cores_open = library.pdserve_cores_open
        self.cores_begin_step = library.pdserve_cores_begin_step
        self.cores_sleep = library.pdserve_cores_sleep
        self.cores_borrowed = library.pdserve_cores_borrowed
        self.cores_borrowed_seconds = library.pdserve_cores_borrowed_seconds
        self.cores_pieces = library.pdserve_cores_pieces
        self.cores_close = library.pdserve_cores_close
        self.cores_forget = library.pdserve_cores_forget


WORD_BYTES = 64
"""Each core's word has a line of the cache for itself, as in csrc/core_ledger.h."""


class LentCores:
    """The cores of one engine, and those that it borrows: csrc/lent_cores.cpp in Python.

    A process has at most one until that is closed. The thread that computes calls all of it.
    """

    def __init__(self, library: Library, words: memoryview, engine: int, own: Sequence[int]) -> None:
        """``words`` has ``WORD_BYTES`` for each core of the machine, and is shared with the other engines. It has to
        stay until ``close``. No other living engine may have the number ``engine``, which is from 1 to 65535.

        Raises RuntimeError if this process has lent its cores already.
        """
        self._library = library
        self._words = (ctypes.c_char * len(words)).from_buffer(words)
        cores = (ctypes.c_int * len(own))(*own)
        at, count = ctypes.addressof(self._words), len(words) // WORD_BYTES
        if not library.cores_open(at, count, engine, cores, len(own)):
            raise RuntimeError("this process lends its cores already")
        self._open = True

    def begin_step(self) -> None:
        """Has the own cores again, and borrows those that are free."""
        self._library.cores_begin_step()

    def sleep(self) -> None:
        """Gives back what is borrowed and lends the own cores, because this engine has nothing to compute."""
        self._library.cores_sleep()

    @property
    def borrowed(self) -> int:
        """The cores of others that compute for this engine."""
        return int(self._library.cores_borrowed())

    @property
    def borrowed_s(self) -> float:
        """The sum of the times for which cores were borrowed, in seconds."""
        return float(self._library.cores_borrowed_seconds())

    @property
    def pieces(self) -> int:
        """The pieces of loops that borrowed cores have computed."""
        return int(self._library.cores_pieces())

    def close(self) -> None:
        """Ends the threads on borrowed cores. The own cores are nobody's from now on. May be called again."""
        if self._open:
            self._open = False
            self._library.cores_close()
            # The memory may go only when nothing points to it any more.
            del self._words


def forget_engine(library: Library, words: memoryview, engine: int) -> None:
    """Gives back what an engine had that has died. The caller keeps others from taking that number meanwhile."""
    memory = (ctypes.c_char * len(words)).from_buffer(words)
    library.cores_forget(ctypes.addressof(memory), len(words) // WORD_BYTES, engine)
