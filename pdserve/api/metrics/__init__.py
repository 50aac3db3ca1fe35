"""The metrics of a node, under pdserve's names and vLLM's."""
