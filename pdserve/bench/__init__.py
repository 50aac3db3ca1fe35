"""``pdserve bench``: what the machine, the engine and a whole server can do, as tables, JSON and plots.

Every benchmark takes its settings and returns a ``report.Report``; the command line prints and keeps it.
"""
