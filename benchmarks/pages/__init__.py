"""Writes the results of studies into the pages of the docs."""
