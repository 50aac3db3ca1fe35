"""Decides where a prompt is computed: on this decode node, or on the prefill node that the proxy has named.

``step_cost`` learns what this engine's own steps cost, ``prefill_node`` has what is known of each prefill node,
``placement_rule`` estimates when a prompt's first token comes from either place and decides by it, and ``placement``
asks the rule with what was measured. The package has neither I/O nor clocks: measurements and times are
passed in.
"""
