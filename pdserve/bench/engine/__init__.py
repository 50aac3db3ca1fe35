"""``pdserve bench engine``: an engine's parts, timed in this process beside what the machine allows."""
