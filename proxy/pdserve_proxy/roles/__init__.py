"""Moves nodes between prefilling and decoding by what they measure: the decision, and the controller of commands."""
