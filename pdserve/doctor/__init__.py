"""``pdserve doctor``: what a person runs before calling for help.

A module a check. Each has a thin reader of the system (``read_…``) that gives facts, and a pure function (``check_…``)
from facts to findings. ``examination`` says which are made, in which order.
"""
