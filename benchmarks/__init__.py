"""Benchmarks of TuneMQ, of its peers, and of its parts alone.

``python -m benchmarks`` runs all of them, ``python -m benchmarks --help`` lists them.
"""
