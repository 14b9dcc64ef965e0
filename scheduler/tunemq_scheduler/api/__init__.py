"""What users call: `Tuner`, `run`, and the client of a farm (submit, follow, steer)."""
