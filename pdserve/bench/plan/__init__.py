"""Measures the profile of this machine, and how far predictions made from it are from what happens."""
