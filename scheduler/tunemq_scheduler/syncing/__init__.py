"""Copies of an experiment's files elsewhere: settings, syncers, and the callback that uses them."""
