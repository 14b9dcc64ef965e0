"""The farm of one script: a private Redis and one node that live and die with it."""
