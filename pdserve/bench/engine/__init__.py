"""``pdserve bench engine`` times an engine's parts in this process, beside what the machine allows."""
