"""What users set: TuneConfig, RunConfig, limits, policies, and the tuner that a restore loads."""
