"""Event handlers: what each kind of event does to the state."""
