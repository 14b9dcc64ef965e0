"""The node process: `tunemq worker`, its start, its loop, its health reports and its exit codes."""
