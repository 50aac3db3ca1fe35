"""The command line, one module for each subcommand: main finds it, node serves the three roles, up starts a
local_cluster and asks it.
"""
