"""What a model folder or a GGUF file holds: its shape, its weights, and the demo model as such a folder."""
