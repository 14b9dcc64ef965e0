"""The scheduler's connections to Redis: streams, the generation, the Celery publisher."""
