"""Shows people the cluster: the report of ``/status`` and ``pdserve top``, the page at ``/`` that draws it, who may see
it, and the commands that an admin gives nodes from there.
"""
