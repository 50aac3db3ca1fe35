"""Tests of whole clusters. Those that break nothing share clusters, which end with the last test of this package."""
