"""Decides what each step computes.

``queues`` holds the waiting and running requests, ``batch_admission`` says which of the waiting ones join the batch,
and ``scheduler`` makes a step's plan (``batch_plan``) and takes its tokens. ``request_limits`` knows what the model
allows a request; ``output_collector`` gathers what clients are to hear.
"""
