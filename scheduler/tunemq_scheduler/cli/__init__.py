"""The commands of `tunemq`: each module parses arguments, calls the scheduler, and prints."""
