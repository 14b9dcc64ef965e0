"""What a running trial calls: its session, its results, its context."""
