"""What watches a farm: metrics for Prometheus, the state of the head, status files."""
