"""Counts, logs and remembers relayed requests, for those who watch the cluster."""
