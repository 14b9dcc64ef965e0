"""The public interface: `Tuner`, `run`, and the client of a farm (submit, follow, control)."""
