"""Security checks of a farm: probes of its services, and `tunemq doctor`."""
