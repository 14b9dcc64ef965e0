"""Serves a folder to the machines of a farm, as an object store over HTTP."""
