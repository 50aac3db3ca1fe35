"""Answers requests in other forms than OpenAI's chat: OpenAI's responses and Anthropic's messages.

A *dialect* turns its request into the chat request that asks for the same (``responses_request``,
``messages_request``), and the chat's answer into its own (``responses_answer``, ``messages_answer``). Everything
between the two is the chat's: template, sampling, stop strings, journal. ``answer_blocks`` cuts an answer into the
blocks that both dialects have, and ``dialect_answers`` writes a stream that another node can go on with.
"""
