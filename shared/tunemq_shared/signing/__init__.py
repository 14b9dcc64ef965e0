"""Keys of a farm, and signatures of messages."""
