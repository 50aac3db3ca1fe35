"""The way of a request to the engine process and of its tokens back, and how it ended."""
