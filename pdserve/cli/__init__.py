"""The command line: one file a subcommand, imported only when it is the one that runs."""
