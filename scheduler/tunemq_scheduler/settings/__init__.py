"""Settings of a search: configs, limits, log policies, and the saved tuner for a restore."""
