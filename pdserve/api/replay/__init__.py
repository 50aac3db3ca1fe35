"""Answers that are written to a log, which clients may read again."""
