"""The operations that a decoder step is made of.

``reference`` says in plain torch what each op means; ``cpu`` has the forms that are fast on a CPU. Every op is tested
against its reference.
"""
