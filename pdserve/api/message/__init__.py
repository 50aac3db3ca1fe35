"""Takes the text of a chat's answer apart while it comes: reasoning, content and tool calls.

Each format of tool calls is a small state machine that is fed with text. What it has said is a function of the text
so far, however that was cut, so another node that gets the same text goes on with the answer in the same state.
"""
