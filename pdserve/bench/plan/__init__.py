"""Measures the profile of this machine for ``pdserve plan``, and shows what is predicted from it."""
