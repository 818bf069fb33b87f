"""Pictures of a program: what is drawn (``tree``, ``flow``) and how (``graph``, ``boxes``, ``memory``, ``page``)."""
