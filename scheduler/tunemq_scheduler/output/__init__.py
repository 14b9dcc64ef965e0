"""What a search writes and shows: result files, callbacks, and their repair after a crash."""
