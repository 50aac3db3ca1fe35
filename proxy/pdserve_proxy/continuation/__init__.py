"""Has another node go on with an answer whose node is lost, drains, or runs out of blocks.

``journal`` stores what an answer can be resumed from. ``resume`` finds the node that goes on, as ``turns`` allows, and
``move`` prepares one while the old node goes on. ``losses`` says which nodes a request has cost.
"""
