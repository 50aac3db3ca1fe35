"""Talks to a model in the terminal: ``pdserve chat``."""
