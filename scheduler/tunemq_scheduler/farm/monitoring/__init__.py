"""Monitoring of a farm: metrics for Prometheus, the state of the head machine, status."""
