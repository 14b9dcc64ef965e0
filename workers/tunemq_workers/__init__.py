"""The node: its process, its Celery consumer, its forkservers and its trial processes."""
