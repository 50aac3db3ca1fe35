"""Guards control connections and what passes them: signed frames, bounded buffers, journals of answers."""
