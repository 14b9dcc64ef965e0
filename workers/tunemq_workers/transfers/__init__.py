"""Uploads and downloads between a node and stores, performed by a child process.

`transfer_client` is the node's end and imports no store client; `transfer_process` is the child.
"""
