"""The command ``shardgraph``: each command is a thin layer over the public function of its name.

Modules here import what needs torch inside of their commands: help, completion and wrong usage answer at once.
"""
