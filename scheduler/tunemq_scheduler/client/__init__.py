"""What runs on the machine of somebody who uses a farm; it asks the scheduler through Redis."""
