"""Turns a request's body into what the engine gets: OpenAI's fields, the threads that read long bodies, chat template
and tokenizer, prompts that fit the model, and sampling parameters.
"""
