"""Writes words into a core ledger."""

from __future__ import annotations

from pdserve.machine.core_ledger import WORD_BYTES, CoreLedger, CoreWord


def write(ledger: CoreLedger, core: int, word: CoreWord) -> None:
    """Sets a core's word as the kernels do."""
    packed = word.state | word.owner << 16 | word.borrower << 32
    with ledger.words as words:
        words[core * WORD_BYTES : core * WORD_BYTES + 8] = packed.to_bytes(8, "little")
