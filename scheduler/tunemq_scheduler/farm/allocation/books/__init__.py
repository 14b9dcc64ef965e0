"""Accounts of what each experiment and owner holds, claims, and may have."""
