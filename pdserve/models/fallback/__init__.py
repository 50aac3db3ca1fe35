"""Models without a recipe, which transformers computes."""
