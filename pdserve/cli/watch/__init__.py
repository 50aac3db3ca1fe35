"""Shows a running cluster and its requests: ``pdserve top`` and ``pdserve trace``."""
