"""Decides what each step computes.

``scheduler`` plans each step (``batch_plan``) and takes its tokens. ``queues`` holds the waiting and running requests,
and ``batch_admission`` says which of the waiting ones join the batch. ``request_limits`` knows what the model allows a
request, and ``output_collector`` gathers the tokens and endings that clients are to get.
"""
