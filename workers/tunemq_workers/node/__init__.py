"""The node process: `tunemq worker`, its loop, its health, its end."""
