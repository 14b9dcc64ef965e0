"""What a farm is looked over for: probes of its services, and `tunemq doctor`."""
