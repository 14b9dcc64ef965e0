"""Comparisons with Ray Tune itself; `make parity` installs it into build/"""
