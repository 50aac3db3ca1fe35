"""Requests whose answers repeat much, and others, with speculation and without."""
