"""Object stores: S3 addresses, the client, retries, permissions."""
