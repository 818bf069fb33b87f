"""Manual annotations: the user's constraints on the plan of a model, without editing the model.

Each kind of annotation is one frozen dataclass in ``kinds.py``, which prints as the Python call that creates it.
``match.py`` resolves patterns, ``remembered.py`` stores annotations with a model, ``constrain.py`` adds those of
activations to the captured graph.
"""
