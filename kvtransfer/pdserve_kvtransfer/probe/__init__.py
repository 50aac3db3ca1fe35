"""Probes: ``pdserve doctor`` examines a prefill engine and measures a link to it that knows no KV memory.

``examiner`` is what the doctor uses; ``asker`` measures at its end of the probe's link; ``host`` is the end of the
prefill engine.
"""
