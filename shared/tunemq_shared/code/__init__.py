"""Code and parameters as content-addressed blobs."""
