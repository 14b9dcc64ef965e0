"""Code and parameters as blobs, named by their content."""
