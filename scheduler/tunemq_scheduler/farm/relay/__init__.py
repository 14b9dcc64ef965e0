"""An experiment's process and the farm's supervisor, and the socket between them."""
