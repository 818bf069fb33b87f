"""What a compilation found out, kept on disk for the next start of the same script.

:mod:`digests` and :mod:`code` decide when an entry holds: everything that tracing could read is as it was.
:mod:`values` and :mod:`graphs` write graphs as JSON, :mod:`entries` keeps them in files.
"""
