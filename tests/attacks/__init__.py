"""Attacks on one cluster, which ends with the last test of this package."""
