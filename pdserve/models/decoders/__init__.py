"""The layers, the model families made of them, decoders left to transformers, and which of these a model gets."""
