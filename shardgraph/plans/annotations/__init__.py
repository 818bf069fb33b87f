"""Manual annotations: the user's constraints on the plan of a model, without editing the model.

Each kind of annotation is one frozen dataclass in ``kinds.py``, which prints as the Python call that creates it.
``match.py`` resolves patterns, ``constrain.py`` adds annotations of activations to the captured graph;
:mod:`shardgraph.plans.remembered` stores annotations with a model.
"""
