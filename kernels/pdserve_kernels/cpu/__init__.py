"""Plain-torch forms of the ops that are fast on a CPU."""
