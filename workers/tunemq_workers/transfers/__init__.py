"""Uploads and downloads of checkpoints: a child process of the node, and the node's end of it.

`link` is the node's end and imports no client of a store; `process` is the child.
"""
