"""The CPU kernel sets: compiled C++ (``csrc``), and plain torch where there is no compiler."""
