"""Model families: each reads its configuration, names its tensors, and returns a recipe of parts."""
