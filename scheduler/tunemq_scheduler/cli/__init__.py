"""The commands of `tunemq`: each module reads arguments, calls the scheduler, and prints."""
