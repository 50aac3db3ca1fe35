"""Model families, their weights, and the runner that turns one scheduled step into logits."""
