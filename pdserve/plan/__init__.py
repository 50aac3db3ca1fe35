"""Predicts how a cluster serves a load, from the profile of a machine."""
