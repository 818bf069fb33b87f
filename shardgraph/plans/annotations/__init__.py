"""Manual annotations: constraints that a person puts on the plan of a model, without editing the model.

One kind of annotation is one frozen dataclass in ``kinds.py``, named and printed as it is written. ``match.py`` finds
what patterns mean, ``annotate.py`` remembers annotations with a model, ``constrain.py`` puts those of activations
into the captured graph.
"""
