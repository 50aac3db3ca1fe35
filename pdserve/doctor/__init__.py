"""``pdserve doctor`` checks a machine and its peers before a person has to call for help.

The checks have a module for each subject. Each check has a thin reader of the system (``read_…``) that returns facts,
and a pure function (``check_…``) that turns facts into findings. ``examination`` says which checks run, in which order.
"""
