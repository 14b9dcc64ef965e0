"""The supervisor: it queues experiments, answers requests, and runs their processes."""
