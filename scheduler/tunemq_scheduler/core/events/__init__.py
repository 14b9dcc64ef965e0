"""What each kind of event does to the state."""
