"""Guesses the next tokens of answers (*drafts*), which a decode step checks as further rows of itself.

A draft is accepted exactly if it is the token that plain decoding gives at its place. So no answer depends on drafts.
"""
