"""``pdserve doctor`` checks a machine and its peers before a person has to call for help.

Each check has its own module, with a thin reader of the system (``read_…``) that returns facts and a pure function
(``check_…``) that turns facts into findings. ``examination`` says which checks run, and in which order.
"""
