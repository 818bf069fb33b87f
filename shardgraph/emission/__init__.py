"""A program as source: readable files of pure PyTorch that train as the compiled module does, without this package.

:mod:`.segments` cuts a graph at the model's modules, :mod:`.functions` writes each piece as a function, equal layers as
one, :mod:`.expressions` spells operations, :mod:`.program` puts the file together. What files begin with
(:mod:`.prelude`) is code of this package that :mod:`.sources` copies into them.
"""
