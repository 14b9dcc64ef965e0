"""The node's side of Redis: the Celery consumer, the outboxes and the event publisher."""
