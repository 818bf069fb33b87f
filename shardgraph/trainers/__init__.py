"""Trainers of other libraries that train under a plan: a module for each, which needs that library installed.

``accelerate`` is for Hugging Face Accelerate, ``transformers`` for the Hugging Face ``Trainer``, ``lightning`` and
``fabric`` for Lightning's ``Trainer`` and its Fabric, ``tango`` for the FairScale integration of AI2 Tango.
"""
