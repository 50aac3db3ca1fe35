"""Decides where a prompt is computed: on this decode node, or on the prefill node that the proxy has named.

``step_cost`` learns what this engine's own steps cost, ``prefill_node`` keeps what is known of each prefill node,
``prefill_time`` estimates when a prompt's first token comes from either place, ``placement_rule`` decides by it, and
``placement`` asks the rule with what was measured. The package has neither I/O nor clocks: measurements and times are
passed in.
"""
