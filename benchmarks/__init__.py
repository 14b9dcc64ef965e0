"""Measures TuneMQ beside its peers and beside what its parts cost by themselves.

``python -m benchmarks`` runs everything, ``python -m benchmarks --help`` says what there is.
"""
