"""``tunemq doctor``: the checks that are not a single service's, and all checks in a row."""
