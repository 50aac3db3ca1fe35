"""The paths of a node: what describes it (``app``), and what answers requests (``completions``)."""
