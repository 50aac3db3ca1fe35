"""What the metrics of nodes and proxies have in common. It imports nothing of ours."""
