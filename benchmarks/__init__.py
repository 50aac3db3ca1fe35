"""The studies that make this project's figures. From a checkout, ``python -m benchmarks --help`` lists them.

A study takes its ``settings``, starts servers, and returns a report in the form of ``pdserve bench``. ``pages`` writes
what reports say into the docs. Nothing here is part of the installed product.
"""
