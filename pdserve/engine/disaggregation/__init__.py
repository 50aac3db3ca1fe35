"""Local or remote: whether a decode node computes a prompt itself or has a prefill node do it.

Without I/O and clocks: measurements and times are passed in.
"""
