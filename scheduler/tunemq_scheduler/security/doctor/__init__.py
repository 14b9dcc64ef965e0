"""`tunemq doctor`: looks for what is wrong with a farm."""
