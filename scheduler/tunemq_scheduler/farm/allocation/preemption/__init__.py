"""Taking slots back for those who wait, with as little loss as possible."""
