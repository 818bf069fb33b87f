"""Pictures of a program: the data to draw (``tree``, ``flow``) and the drawings (``graph``, ``boxes``, ``memory``)."""
