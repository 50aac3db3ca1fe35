"""The command line. ``main`` finds the module of a subcommand: ``servers`` serves a proxy or a node, and ``up`` a whole
cluster on this machine.
"""
