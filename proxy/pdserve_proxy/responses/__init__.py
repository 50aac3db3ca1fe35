"""Stores responses for clients that ask for them again, or go on from them (``--store``)."""
