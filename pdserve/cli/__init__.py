"""The command line, with one module for each subcommand. ``main`` finds the subcommand, ``node`` serves the three
roles, and ``up`` starts a ``local_cluster`` and asks it a question.
"""
