"""Between a node and Redis: the Celery consumer, and the outbox of events."""
